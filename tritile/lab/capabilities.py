"""`tritile.capabilities`: which operations, dtypes and precisions a GPU runs, and by which kernels."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from tritile.core import device as devices
from tritile.core.device import Device
from tritile.core.markup import Tabular
from tritile.core.problem import (
    ACTIVATION_DTYPES,
    BLOCK_SCALES,
    FP8_DTYPES,
    GROUPED_DTYPES,
    GROUPED_PRECISIONS,
    MATMUL_DTYPES,
    PRECISIONS_OF,
    RAGGED,
    WEIGHT_BITS,
    GroupedProblem,
    MatmulProblem,
    PermuteProblem,
    QuantizedProblem,
    Tiled,
)
from tritile.core.problem.matmul import GATED_DTYPES
from tritile.errors import InvalidValueError, UnsupportedError
from tritile.families.registry import FAMILIES
from tritile.families.space import contenders, illegal
from tritile.ops.plan import gpu_of

_SIDE: Final = 4096
_FEW: Final = 4  # rows of small probes
_SAMPLE: Final = 64  # configs of a family, spread evenly
_WIDER: Final = {"int8": "int32", **dict.fromkeys(FP8_DTYPES, "bfloat16")}  # dtype of results
_SAME_AS: Final = {
    **dict.fromkeys(("mm", "bmm", "linear", "addmm", "baddbmm"), "matmul"),
    **dict.fromkeys(("transpose", "contiguous"), "permute"),
}


class Capability(NamedTuple):
    """The families of kernels that run an operation; where there are none, `reason` says why.

    `precision` is "" where the dtype has no choice; it names the block scales, or the bits of packed weights.
    """

    op: str
    dtype: str
    precision: str
    families: tuple[str, ...]
    reason: str = ""


@dataclass(frozen=True, repr=False)
class Capabilities(Tabular):
    """Which operations, dtypes and precisions a GPU runs. It prints as a table."""

    device: Device
    rows: tuple[Capability, ...]

    def runs(self, op: str, dtype: torch.dtype | str, precision: str | None = None) -> bool:
        """Return whether the GPU runs an operation of a dtype in a precision; None: in any.

        Raises InvalidValueError where there is no such operation or dtype.
        """
        name, like = str(dtype).removeprefix("torch."), _SAME_AS.get(str(op), op)
        known = list(dict.fromkeys(row.op for row in self.rows))
        kind = getattr(torch, name, None)
        if like not in known or not isinstance(kind, torch.dtype):
            wanted = f"one of {', '.join((*known, *_SAME_AS))}, and a dtype"
            raise InvalidValueError(f"runs: op is {op!r} and dtype {dtype!r}: wanted {wanted}")
        name = f"{kind.itemsize}-byte" if like == "permute" else name
        found = (row for row in self.rows if (row.op, row.dtype) == (like, name) and row.families)
        return any(precision in (None, row.precision) for row in found)

    _head = ("operation", "dtype", "precision", "families of kernels")

    @property
    def _title(self) -> str:
        return f"{self.device.name} runs"

    @property
    def _rows(self) -> list[tuple[str, ...]]:
        return [(*row[:3], ", ".join(row.families) or f"none: {row.reason}") for row in self.rows]


def _probes() -> Iterator[tuple[str, str, str, Sequence[Tiled]]]:
    """Yield operation, dtype, precision, and large and small problems that stand for them."""

    def products(dtype: str, out: str = "", **rest: Any) -> list[Tiled]:
        out = out or _WIDER.get(dtype, dtype)
        shapes = [(m, layout) for m in (_SIDE, _FEW) for layout in ("row", "column")]
        return [MatmulProblem(1, m, _SIDE, _SIDE, dtype, out, b_layout=b, **rest) for m, b in shapes]

    for dtype in MATMUL_DTYPES:
        for precision in PRECISIONS_OF.get(dtype, ("",)):
            yield "matmul", dtype, precision, products(dtype, precision=precision or "ieee")
    for dtype in GATED_DTYPES:
        yield "gated_linear", dtype, "", products(dtype, epilogue="gated silu")
    for dtype in (*FP8_DTYPES, "int8"):
        for precision in PRECISIONS_OF.get(dtype, ("",)):
            how = {"precision": precision or "ieee", "epilogue": "scale_a=one scale_b=one"}
            yield "scaled_matmul", dtype, precision, products(dtype, "bfloat16", **how)
    for scales in filter(None, BLOCK_SCALES):
        for dtype in FP8_DTYPES:
            yield "scaled_matmul", dtype, f"scales {scales}", products(dtype, block_scales=scales)
    for dtype in GROUPED_DTYPES:
        for precision in GROUPED_PRECISIONS.get(dtype, ("",)):
            out, named = _WIDER.get(dtype, dtype), precision or "ieee"
            sizes = 8, _SIDE, _SIDE, _SIDE
            groups = [GroupedProblem(each, *sizes, dtype, out, precision=named) for each in RAGGED]
            yield "grouped_matmul", dtype, precision, groups
    for dtype in ACTIVATION_DTYPES:
        for bits in WEIGHT_BITS:
            packed = [QuantizedProblem(m, _SIDE, _SIDE, dtype, bits, 128) for m in (_SIDE, _FEW)]
            yield "linear_quantized", dtype, f"int{bits}", packed
    for size in (1, 2, 4, 8, 16):
        kept = PermuteProblem.of((64, 32, _SIDE), (_SIDE, 64 * _SIDE, 1), (32 * _SIDE, _SIDE, 1), size)
        yield "permute", f"{size}-byte", "", [PermuteProblem.turned(1, _SIDE, _SIDE, size), kept]


def _families(problem: Tiled, device: Device) -> set[str]:
    """Return the families with a legal config.

    One reason for all of a sample is the problem's or the GPU's, as reasons of configs differ by their
    numbers: it refuses the family, without a look at its thousands of configs.
    """
    found = set()
    for name in contenders(problem):
        configs = FAMILIES[problem.op][name].configs
        reasons = {illegal(each, problem, device) for each in configs[:: max(1, len(configs) // _SAMPLE)]}
        others = () if len(reasons) == 1 else configs
        if None in reasons or any(illegal(each, problem, device) is None for each in others):
            found.add(name)
    return found


@functools.lru_cache(maxsize=16)
def _of(device: Device) -> Capabilities:
    rows = []
    for op, dtype, precision, problems in _probes():
        found = set[str]().union(*(_families(problem, device) for problem in problems))
        known = FAMILIES[problems[0].op]
        first = known[contenders(problems[0])[0]].configs[0]
        reason = "" if found else illegal(first, problems[0], device) or ""
        rows.append(Capability(op, dtype, precision, tuple(each for each in known if each in found), reason))
    return Capabilities(device, tuple(rows))


def capabilities(device: Device | torch.device | str | None = None) -> Capabilities:
    """Return which operations, dtypes and precisions a GPU runs, and by which families of kernels.

    Decided by which configs are legal for a large and a small problem of each kind: nothing is compiled or
    launched. Sizes, strides and alignment may rule a family out, or let another in.

    Args:
        device: a `tritile.Device`, which need not be in this machine; a name that `tritile.target_device`
            takes, as "sm_90"; or a GPU of this machine, as torch names it. Default: the current GPU.

    Raises:
        InvalidValueError: `device` names no GPU.
        UnsupportedError: `device` is None, and there is no GPU here.
    """
    found = devices.current_gpu() if device is None else gpu_of("capabilities", device)
    if found is None:
        names = ", ".join(devices.TARGETS)
        raise UnsupportedError(f"capabilities: there is no GPU here: name one with device=, one of {names}")
    return _of(found)
