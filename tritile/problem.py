"""Problem: one call, described in everything that decides which config is fast for it.

A problem is a frozen value. It names sizes, dtypes, layouts and alignments, and no tensor, so that it
can be remembered, compared and planned for on a machine without the GPU. `operands` gives shapes and
strides of tensors that pose the problem.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Final

from tritile.errors import InvalidValueError

ITEMSIZE: Final = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "int32": 4,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
MATMUL_DTYPES: Final = tuple(name for name in ITEMSIZE if name != "int32")
FP8_DTYPES: Final = ("float8_e4m3fn", "float8_e5m2")
LAYOUTS: Final = ("row", "column", "strided")
ALIGNMENTS: Final = (1, 2, 4, 8, 16)
PRECISIONS: Final = ("ieee", "tf32x3", "tf32")
MAX_EXTENT: Final = 2**48


@dataclass(frozen=True)
class Operand:
    """Shape (batch, rows, columns) and strides, in elements, of one tensor of a problem."""

    dtype: str
    shape: tuple[int, int, int]
    strides: tuple[int, int, int]

    @property
    def elements(self) -> int:
        """How many elements of memory it spans."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


def _check(condition: bool, problem: Any, wanted: str) -> None:
    if not condition:
        raise InvalidValueError(f"{problem!r}: wanted {wanted}")


def _among(allowed: tuple[object, ...], *values: Any) -> bool:
    """Whether each value is one of these, of the same type: 16.0 and True are no alignments."""
    return all(any(type(v) is type(a) and v == a for a in allowed) for v in values)


def _extent(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_EXTENT


def _leading(extent: int, itemsize: int, alignment: int) -> int:
    """The smallest stride of at least `extent` elements that has just this alignment, in bytes."""
    unit = max(1, alignment // itemsize)
    stride = -(-extent // unit) * unit
    if alignment < 16 and stride * itemsize % (2 * alignment) == 0 and alignment >= itemsize:
        stride += unit
    return stride


def _operand(dtype: str, itemsize: int, layout: str, alignment: int, shape: tuple[int, int, int]) -> Operand:
    _, rows, columns = shape
    if layout == "column":
        leading = _leading(rows, itemsize, alignment)
        return Operand(dtype, shape, (leading * columns, 1, leading))
    step = 2 if layout == "strided" else 1
    leading = _leading(columns * step, itemsize, alignment)
    return Operand(dtype, shape, (leading * rows, leading, step))


@dataclass(frozen=True)
class MatmulProblem:
    """`batch` products of an m x k by a k x n matrix.

    Layouts: "row" has its last dimension contiguous, "column" its first, "strided" neither.
    Alignments: the largest power of two, at most 16, in bytes, that divides the address and every
    stride but the contiguous one. Raises InvalidValueError where a field is out of its range.
    """

    op: ClassVar[str] = "matmul"
    batch: int
    m: int
    n: int
    k: int
    dtype: str
    out_dtype: str
    a_layout: str = "row"
    b_layout: str = "row"
    out_layout: str = "row"
    a_align: int = 16
    b_align: int = 16
    out_align: int = 16
    precision: str = "ieee"

    def __post_init__(self) -> None:
        _check(all(map(_extent, (self.batch, self.m, self.n, self.k))), self, "sizes of 1 and more")
        _check(_among(MATMUL_DTYPES, self.dtype), self, f"a dtype of {', '.join(MATMUL_DTYPES)}")
        _check(_among(tuple(ITEMSIZE), self.out_dtype), self, f"an out_dtype of {', '.join(ITEMSIZE)}")
        layouts = (self.a_layout, self.b_layout, self.out_layout)
        _check(_among(LAYOUTS, *layouts), self, f"layouts of {', '.join(LAYOUTS)}")
        aligns = (self.a_align, self.b_align, self.out_align)
        _check(_among(ALIGNMENTS, *aligns), self, f"alignments of {ALIGNMENTS}")
        _check(_among(PRECISIONS, self.precision), self, f"a precision of {', '.join(PRECISIONS)}")

    @property
    def itemsize(self) -> int:
        """Bytes of an input element."""
        return ITEMSIZE[self.dtype]

    @property
    def flops(self) -> int:
        """Multiplications and additions, counted apart."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Bytes moved if every input is read once and the output written once."""
        inputs = self.k * (self.m + self.n) * self.itemsize
        return self.batch * (inputs + self.m * self.n * ITEMSIZE[self.out_dtype])

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes by which two problems of one class are near or far."""
        return (self.batch, self.m, self.n, self.k)

    @property
    def operands(self) -> tuple[Operand, Operand, Operand]:
        """a, b and out: tensors that pose this problem."""
        out_size = ITEMSIZE[self.out_dtype]
        return (
            _operand(self.dtype, self.itemsize, self.a_layout, self.a_align, (self.batch, self.m, self.k)),
            _operand(self.dtype, self.itemsize, self.b_layout, self.b_align, (self.batch, self.k, self.n)),
            _operand(self.out_dtype, out_size, self.out_layout, self.out_align, (self.batch, self.m, self.n)),
        )

    @property
    def label(self) -> str:
        """A short name for a table of results."""
        batch = f"{self.batch}x" if self.batch > 1 else ""
        letters = {"row": "N", "column": "T", "strided": "S"}
        layout = letters[self.a_layout] + letters[self.b_layout]
        precision = f" {self.precision}" if self.dtype == "float32" else ""
        return f"{batch}{self.m}x{self.n}x{self.k} {layout} {self.dtype}{precision}"


@dataclass(frozen=True)
class TransposeProblem:
    """`batch` copies of an m x n tile plane from x to out.

    After merging dimensions, x is (when its layout is "row") contiguous along n and out (when its
    layout is "column") contiguous along m: the general transposition. A plain strided copy has both
    contiguous along n. Layouts and alignments as in `MatmulProblem`; itemsize in bytes.
    """

    op: ClassVar[str] = "transpose"
    batch: int
    m: int
    n: int
    itemsize: int
    x_layout: str = "row"
    out_layout: str = "column"
    x_align: int = 16
    out_align: int = 16

    def __post_init__(self) -> None:
        _check(all(map(_extent, (self.batch, self.m, self.n))), self, "sizes of 1 and more")
        _check(_among(ALIGNMENTS, self.itemsize), self, f"an itemsize of {ALIGNMENTS}")
        _check(_among(LAYOUTS, self.x_layout, self.out_layout), self, f"layouts of {', '.join(LAYOUTS)}")
        _check(_among(ALIGNMENTS, self.x_align, self.out_align), self, f"alignments of {ALIGNMENTS}")

    @property
    def bytes(self) -> int:
        """Bytes moved: every element read once and written once."""
        return 2 * self.batch * self.m * self.n * self.itemsize

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes by which two problems of one class are near or far."""
        return (self.batch, self.m, self.n)

    @property
    def operands(self) -> tuple[Operand, Operand]:
        """x and out: tensors that pose this problem."""
        dtype, shape = f"int{8 * min(self.itemsize, 8)}", (self.batch, self.m, self.n)
        return (
            _operand(dtype, self.itemsize, self.x_layout, self.x_align, shape),
            _operand(dtype, self.itemsize, self.out_layout, self.out_align, shape),
        )

    @property
    def label(self) -> str:
        """A short name for a table of results."""
        batch = f"{self.batch}x" if self.batch > 1 else ""
        return f"{batch}{self.m}x{self.n} {self.x_layout}->{self.out_layout} {self.itemsize}-byte"


def _pairs(value: Any) -> bool:
    """Whether it is a tuple of (name, value) pairs."""
    whole = isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value)
    return whole and all(isinstance(name, str) for name, _ in value)


def _plain(value: Any) -> bool:
    finite = not isinstance(value, float) or math.isfinite(value)
    return isinstance(value, int | float | bool | str | None) and finite


@dataclass(frozen=True)
class KernelProblem:
    """One call of a kernel that `tritile.autotune` decorates: its name, key values and dtypes."""

    op: ClassVar[str] = "kernel"
    kernel: str
    key: tuple[tuple[str, int | float | bool | str | None], ...]
    dtypes: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        _check(isinstance(self.kernel, str), self, "the kernel's name")
        _check(_pairs(self.key) and all(_plain(v) for _, v in self.key), self, "plain, finite key values")
        _check(
            _pairs(self.dtypes) and all(isinstance(v, str) for _, v in self.dtypes), self, "dtypes by name"
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The whole numbers of the key: by them two problems of one kernel are near or far."""
        return tuple(v for _, v in self.key if isinstance(v, int) and not isinstance(v, bool) and v > 0)

    @property
    def label(self) -> str:
        """A short name for a table of results."""
        return f"{self.kernel} " + " ".join(f"{name}={value}" for name, value in self.key)


Problem = MatmulProblem | TransposeProblem | KernelProblem
_KINDS: Final[dict[str, type]] = {kind.op: kind for kind in (MatmulProblem, TransposeProblem, KernelProblem)}


def doublings(a: Problem, b: Problem) -> float:
    """How far apart the sizes of two problems are: 1 where one size is twice the other's."""
    return sum(abs(math.log2(x / y)) for x, y in zip(a.sizes, b.sizes, strict=True))


def problem_to_dict(problem: Problem) -> dict[str, Any]:
    """A dictionary that JSON holds and `problem_from_dict` reads back."""
    return {"op": problem.op} | asdict(problem)


def problem_key(problem: Problem) -> str:
    """The problem as one line of JSON, the same for equal problems."""
    return json.dumps(problem_to_dict(problem), sort_keys=True, separators=(",", ":"))


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value


def problem_from_dict(data: Any) -> Problem:
    """The problem that `problem_to_dict` wrote. Raises InvalidValueError for anything else."""
    kind = _KINDS.get(str(data.get("op"))) if isinstance(data, Mapping) else None
    if kind is None or set(data) - {"op"} != {field.name for field in fields(kind)}:
        raise InvalidValueError(f"{str(data)[:200]!r} is no problem of {', '.join(_KINDS)}")
    try:
        problem: Problem = kind(**{name: _tuples(value) for name, value in data.items() if name != "op"})
        return problem
    except TypeError as error:
        raise InvalidValueError(f"{str(data)[:200]!r} is no problem: {error}") from error
