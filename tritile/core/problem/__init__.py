"""Describe one call by all that decides which config is fast for it: a problem.

A problem is a frozen value of sizes, dtypes, layouts and alignments, without tensors. So it can be
remembered, compared and planned on a machine without the GPU. `operands` gives shapes and strides of tensors
that pose it. `sizes` say by how much two problems of one class differ, and `kind` is all else that decides a
config. `flops` counts multiplications and additions, `bytes` what is moved if every input is read once and
the output written once. `label` is a short name for a table of results.
"""

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Final

from tritile.core.problem.checks import (
    BLOCK_SCALES,
    COMPLEX_DTYPES,
    FP8_DTYPES,
    ITEMSIZE,
    MATMUL_DTYPES,
    PRECISIONS_OF,
    SCALE_K,
    Precision,
    alignment,
    check,
)
from tritile.core.problem.epilogue import (
    ACTIVATIONS,
    SIDES,
    Activation,
    Epilogue,
)
from tritile.core.problem.grouped import (
    GROUPED_DTYPES,
    GROUPED_PRECISIONS,
    LOADS,
    MAX_GROUPS,
    MAX_RAGGED,
    GroupedProblem,
    ends_of,
)
from tritile.core.problem.matmul import (
    PART_UNIT,
    PROMOTED_EVERY,
    MatmulProblem,
    Operand,
    error_bound,
    part_length,
    suits,
)
from tritile.core.problem.permute import PermuteProblem, merged
from tritile.core.problem.quantized import (
    ACTIVATION_DTYPES,
    GROUP_SIZES,
    UNIT_WORDS,
    WEIGHT_BITS,
    GroupSize,
    QuantizedProblem,
    WeightBits,
    scales_shape,
    unit_columns,
    unpacked_row,
    words_shape,
)
from tritile.errors import InvalidValueError

__all__ = [
    "ACTIVATIONS", "ACTIVATION_DTYPES", "BLOCK_SCALES", "COMPLEX_DTYPES", "FP8_DTYPES", "GROUPED_DTYPES",
    "GROUPED_PRECISIONS", "GROUP_SIZES", "ITEMSIZE", "LOADS", "MATMUL_DTYPES",
    "MAX_GROUPS", "MAX_RAGGED", "PART_UNIT", "PRECISIONS_OF", "PROMOTED_EVERY", "SCALE_K", "SIDES",
    "UNIT_WORDS", "WEIGHT_BITS", "Activation", "Epilogue", "GroupSize", "GroupedProblem",
    "KernelProblem", "Known", "MatmulProblem", "Operand", "PermuteProblem", "Precision", "Problem",
    "Product", "QuantizedProblem", "Tiled", "WeightBits", "alignment", "ends_of",
    "error_bound", "merged", "part_length", "problem_from_dict", "problem_key", "problem_to_dict",
    "scales_shape", "suits", "unit_columns", "unpacked_row", "words_shape",
]  # fmt: skip


def _pairs(value: Any) -> bool:
    whole = isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value)
    return whole and all(isinstance(name, str) for name, _ in value)


def _plain(value: Any) -> bool:
    finite = not isinstance(value, float) or math.isfinite(value)
    return isinstance(value, int | float | bool | str | None) and finite


@dataclass(frozen=True)
class KernelProblem:
    """Describe a call of a kernel that `tritile.autotune` decorates: its name, key values and dtypes."""

    op: ClassVar[str] = "kernel"
    kernel: str
    key: tuple[tuple[str, int | float | bool | str | None], ...]
    dtypes: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        check(isinstance(self.kernel, str), self, "the kernel's name")
        check(_pairs(self.key) and all(_plain(v) for _, v in self.key), self, "plain, finite key values")
        check(_pairs(self.dtypes) and all(isinstance(v, str) for _, v in self.dtypes), self, "dtypes by name")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the integers of the key: by them two problems of one kernel are near or far."""
        return tuple(v for _, v in self.key if isinstance(v, int) and not isinstance(v, bool) and v > 0)

    @property
    def label(self) -> str:
        return f"{self.kernel} " + " ".join(f"{name}={value}" for name, value in self.key)


Known = MatmulProblem | PermuteProblem  # every operand is a plain tensor
Product = MatmulProblem | GroupedProblem
Tiled = Known | GroupedProblem | QuantizedProblem  # made by tritile's own kernels, tile by tile
Problem = Tiled | KernelProblem
# Fields that older files lack, which have their defaults there.
_ADDED: Final = ("epilogue", "b_dtype", "block_scales", "invariant")
_ENCODER: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
_KINDS: Final[dict[str, type]] = {
    kind.op: kind for kind in (MatmulProblem, GroupedProblem, PermuteProblem, QuantizedProblem, KernelProblem)
}


@functools.cache
def _fields(kind: type) -> dict[str, Any]:
    """Return the names of a problem's fields; of those that came later with their defaults."""
    return {field.name: field.default if field.name in _ADDED else MISSING for field in fields(kind)}


def problem_to_dict(problem: Problem) -> dict[str, Any]:
    """Return a dictionary that JSON holds and `problem_from_dict` reads back."""
    kind: Any = type(problem)
    pairs = ((name, getattr(problem, name), default) for name, default in _fields(kind).items())
    found = {"op": problem.op} | {name: value for name, value, default in pairs if value != default}
    return found | {"epilogue": str(found["epilogue"])} if "epilogue" in found else found


def problem_key(problem: Problem) -> str:
    return _ENCODER.encode(problem_to_dict(problem))


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value


def problem_from_dict(data: Any) -> Problem:
    """Return the problem that `problem_to_dict` wrote. Raises InvalidValueError for anything else."""
    kind = _KINDS.get(str(data.get("op"))) if isinstance(data, Mapping) else None
    names = {field.name for field in fields(kind)} if kind is not None else set()
    if kind is None or not names - set(_ADDED) <= set(data) - {"op"} <= names:
        raise InvalidValueError(f"{str(data)[:200]!r} is no problem of {', '.join(_KINDS)}")
    try:
        problem: Problem = kind(**{name: _tuples(value) for name, value in data.items() if name != "op"})
        return problem
    except TypeError as error:
        raise InvalidValueError(f"{str(data)[:200]!r} is no problem: {error}") from error
