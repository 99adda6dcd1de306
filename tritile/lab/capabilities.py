"""`tritile.capabilities`: tell which operations, dtypes and precisions a GPU runs, and by which kernels."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from tritile.core import device as devices
from tritile.core.device import Device
from tritile.core.markup import table_html
from tritile.core.problem import (
    ACTIVATION_DTYPES,
    BLOCK_SCALES,
    FP8_DTYPES,
    GROUP_SIZES,
    GROUPED_DTYPES,
    GROUPED_PRECISIONS,
    ITEMSIZE,
    MATMUL_DTYPES,
    PRECISIONS_OF,
    RAGGED,
    REAL_DTYPE,
    WEIGHT_BITS,
    GroupedProblem,
    MatmulProblem,
    PermuteProblem,
    Tiled,
)
from tritile.core.problem.matmul import GATED_DTYPES
from tritile.errors import InvalidValueError, UnsupportedError
from tritile.families.family import Family
from tritile.families.registry import FAMILIES
from tritile.families.space import contenders, illegal
from tritile.ops.plan import gpu_of
from tritile.tune.suites import Case

_SIDE: Final = 4096  # of large probes
_FEW: Final = 4  # rows of small probes
_SAMPLE: Final = 64  # configs of a family, spread evenly
_WIDER: Final = {"int8": "int32", **dict.fromkeys(FP8_DTYPES, "bfloat16")}  # dtype of results
_AS: Final = {
    "mm": "matmul", "bmm": "matmul", "addmm": "linear", "baddbmm": "linear",
    "transpose": "permute", "contiguous": "permute",
}  # fmt: skip
_HEAD: Final = ("operation", "dtype", "precision", "families of kernels")


class Capability(NamedTuple):
    """Tell of one operation, dtype and precision by which families of kernels a GPU runs it.

    `families` is empty where no config is legal on the GPU; `reason` says why then. `precision` is "" where
    the dtype has no choice of precision; for packed weights it names their bits: "int4".
    """

    op: str
    dtype: str
    precision: str
    families: tuple[str, ...]
    reason: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """Return what a table shows."""
        return self.op, self.dtype, self.precision, ", ".join(self.families) or f"none: {self.reason}"


@dataclass(frozen=True)
class Capabilities:
    """Tell which operations, dtypes and precisions a GPU runs. It prints as a table."""

    device: Device
    rows: tuple[Capability, ...]

    def runs(self, op: str, dtype: torch.dtype | str, precision: str | None = None) -> bool:
        """Tell whether the GPU runs an operation of a dtype in a precision; None: in any.

        Raises InvalidValueError where there is no such operation or dtype.
        """
        name, like = str(dtype).removeprefix("torch."), _AS.get(str(op), op)
        known = {row.op: None for row in self.rows}
        kind = getattr(torch, name, None)
        if like not in tuple(known) or not isinstance(kind, torch.dtype):
            wanted = f"one of {', '.join((*known, *_AS))}, and a dtype"
            raise InvalidValueError(f"runs: op is {op!r} and dtype {dtype!r}: wanted {wanted}")
        name = f"{kind.itemsize}-byte" if like == "permute" else name
        found = (row for row in self.rows if (row.op, row.dtype) == (like, name) and row.families)
        return any(precision in (None, row.precision) for row in found)

    def __repr__(self) -> str:
        table = [_HEAD, *(row.cells for row in self.rows)]
        widths = [max(len(cells[place]) for cells in table) for place in range(3)]
        lines = (
            "  ".join([*(c.ljust(w) for c, w in zip(cells, widths, strict=False)), cells[3]])
            for cells in table
        )
        return "\n".join((f"{self.device.name} runs", *(f"  {line}" for line in lines)))

    def _repr_html_(self) -> str:
        return table_html(f"{self.device.name} runs", _HEAD, (row.cells for row in self.rows))


Probe = tuple[str, str, str, Sequence[Tiled]]


def _products(op: str, dtypes: tuple[str, ...], **rest: Any) -> Iterator[Probe]:
    """Yield probes of products of each dtype and precision that problems take; `rest` are further fields."""
    for dtype in dtypes:
        out = "bfloat16" if rest and dtype == "int8" else _WIDER.get(dtype, dtype)
        for precision in PRECISIONS_OF.get(dtype, ("",)):
            how = {"dtype": dtype, "out_dtype": out, "precision": precision or "ieee"} | rest
            shapes = [(m, layout) for m in (_SIDE, _FEW) for layout in ("row", "column")]
            try:
                found = [MatmulProblem(1, m, _SIDE, _SIDE, b_layout=layout, **how) for m, layout in shapes]
            except InvalidValueError:  # no such problem: gated products are not made of parts
                continue
            yield op, dtype, precision, found


def _probes() -> Iterator[Probe]:
    """Yield operation, dtype, precision and problems that stand for them."""
    plain = tuple(dtype for dtype in MATMUL_DTYPES if dtype not in _WIDER and dtype not in REAL_DTYPE)
    yield from _products("matmul", MATMUL_DTYPES)
    yield from _products("linear", plain, epilogue="bias=row")
    yield from _products("linear", tuple(REAL_DTYPE))  # torch adds their bias
    yield from _products("gated_linear", GATED_DTYPES, epilogue="gated silu")
    yield from _products("scaled_matmul", (*FP8_DTYPES, "int8"), epilogue="scale_a=one scale_b=one")
    for scales in filter(None, BLOCK_SCALES):
        for op, dtype, precision, found in _products("scaled_matmul", FP8_DTYPES, block_scales=scales):
            if precision == "ieee":
                yield op, dtype, f"scales {scales}", found
    for dtype in GROUPED_DTYPES:
        for precision in GROUPED_PRECISIONS.get(dtype, ("",)):
            how: Any = {"dtype": dtype, "out_dtype": _WIDER.get(dtype, dtype)}
            how["precision"] = precision or "ieee"
            found = [GroupedProblem(ragged, 8, _SIDE, _SIDE, _SIDE, **how) for ragged in RAGGED]
            yield "grouped_matmul", dtype, precision, found
    for dtype in ACTIVATION_DTYPES:
        for bits in WEIGHT_BITS:
            kind = f"int{bits}/{max(GROUP_SIZES)}"
            cases = [Case("", "linear_quantized", dtype, kind, 1, m, _SIDE, _SIDE) for m in (_SIDE, _FEW)]
            yield "linear", dtype, f"int{bits} weights", [case.problem for case in cases]
    for size in sorted(set(ITEMSIZE.values())):
        turned = PermuteProblem.of((_SIDE, _SIDE), (1, _SIDE), (_SIDE, 1), size)
        kept = PermuteProblem.of((64, 32, _SIDE), (_SIDE, 64 * _SIDE, 1), (32 * _SIDE, _SIDE, 1), size)
        yield "permute", f"{size}-byte", "", [turned, kept]


def _runs(family: Family, problem: Tiled, device: Device) -> bool:
    """Tell whether a config of a family is legal.

    One reason for all of a sample is of the problem or the GPU, as reasons of configs differ by their
    numbers: it refuses the family, without a look at its thousands of configs.
    """
    step = max(1, len(family.configs) // _SAMPLE)
    reasons = {illegal(config, problem, device) for config in family.configs[::step]}
    if len(reasons) == 1:
        return None in reasons
    return None in reasons or any(illegal(config, problem, device) is None for config in family.configs)


def _row(op: str, dtype: str, precision: str, problems: Sequence[Tiled], device: Device) -> Capability:
    """Return what a GPU runs of some problems that stand for an operation."""
    families: dict[str, None] = {}
    for problem in problems:
        for name in contenders(problem):
            if name not in families and _runs(FAMILIES[problem.op][name], problem, device):
                families[name] = None
    ordered = tuple(name for name in FAMILIES[problems[0].op] if name in families)
    first = FAMILIES[problems[0].op][contenders(problems[0])[0]]
    reason = "" if ordered else illegal(first.configs[0], problems[0], device) or ""
    return Capability(op, dtype, precision, ordered, reason)


@functools.lru_cache(maxsize=16)
def _of(device: Device) -> Capabilities:
    return Capabilities(device, tuple(_row(*probe, device) for probe in _probes()))


def capabilities(device: Device | torch.device | str | None = None) -> Capabilities:
    """Return which operations, dtypes and precisions a GPU runs, and by which families of kernels.

    Large and small problems of each kind are posed, and the legality of each family's configs decides:
    nothing is compiled, and nothing is launched. Sizes, strides and alignment may rule a family out, or let
    another in.

    Args:
        device: a `tritile.Device`, which need not be in this machine; a name that `tritile.target_device`
            takes, as "sm_90"; or a GPU of this machine, as torch names it. Default: the current GPU.

    Returns:
        A `tritile.Capabilities`, which prints as a table.

    Raises:
        InvalidValueError: `device` names no GPU.
        UnsupportedError: `device` is None, and there is no GPU here.
    """
    found = devices.current_gpu() if device is None else gpu_of("capabilities", device)
    if found is None:
        names = ", ".join(devices.TARGETS)
        raise UnsupportedError(f"capabilities: there is no GPU here: name one with device=, one of {names}")
    return _of(found)
