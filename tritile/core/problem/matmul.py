"""Describe matrix products."""

import functools
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from tritile.core.problem.checks import (
    BLOCK_SCALES,
    COMPLEX_DTYPES,
    FP8_DTYPES,
    ITEMSIZE,
    MATMUL_DTYPES,
    PRECISIONS,
    PRECISIONS_OF,
    Laid,
    check,
    check_fields,
    check_sizes,
)
from tritile.core.problem.epilogue import BARE, Epilogue


@dataclass(frozen=True)
class Operand:
    """Hold shape (batch, rows, columns) and strides, in elements, of one tensor of a problem."""

    dtype: str
    shape: tuple[int, int, int]
    strides: tuple[int, int, int]

    @property
    def elements(self) -> int:
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


_BY_ROWS_FROM: Final = 128  # rows of a
GATED_DTYPES: Final = ("float16", "bfloat16", "float32", "float64")


def _leading(extent: int, itemsize: int, alignment: int) -> int:
    """Return the smallest stride of at least `extent` elements that has just this alignment, in bytes."""
    unit = max(1, alignment // itemsize)
    stride = -(-extent // unit) * unit
    if alignment < 16 and stride * itemsize % (2 * alignment) == 0 and alignment >= itemsize:
        stride += unit
    return stride


def operand_of(dtype: str, layout: str, alignment: int, shape: tuple[int, int, int]) -> Operand:
    """Return an operand of this layout, without gaps, whose rows or columns have just this alignment."""
    (_, rows, columns), itemsize = shape, ITEMSIZE[dtype]
    if layout == "column":
        leading = _leading(rows, itemsize, alignment)
        return Operand(dtype, shape, (leading * columns, 1, leading))
    step = 2 if layout == "strided" else 1
    leading = _leading(columns * step, itemsize, alignment)
    return Operand(dtype, shape, (leading * rows, leading, step))


@dataclass(frozen=True)
class MatmulProblem(Laid):
    """Describe `batch` products of an m x k by a k x n matrix.

    - Layouts: "row" is contiguous along the last dimension, "column" along the first, "strided" along
      neither.
    - Alignments: the largest power of two, at most 16, in bytes, that divides the address and every stride
      but the contiguous one.
    - `epilogue`: what is fused into the store. Its text is taken as well.
    - `b_dtype`: the dtype of b where it is not that of a, as fp8 types may be mixed.
    - `block_scales`: "1x128" where each 128 of K have scales of their own, one for each row of a and one for
      128 columns of b; see BLOCK_SCALES.
    - `invariant`: sums are made in one way for all m and n; see `tritile.families.numerics`.

    Raises InvalidValueError where a field is out of its range.
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
    epilogue: Epilogue = BARE
    b_dtype: str = ""
    block_scales: str = ""
    invariant: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.epilogue, str):
            object.__setattr__(self, "epilogue", Epilogue.parse(self.epilogue))
        check(isinstance(self.epilogue, Epilogue), self, "an Epilogue, or its text")
        check_sizes(self, self.batch, self.m, self.n, self.k)
        check_fields(self, dtype=MATMUL_DTYPES, out_dtype=tuple(ITEMSIZE), block_scales=tuple(BLOCK_SCALES))
        check_fields(self, precision=PRECISIONS_OF[self.dtype] if self.is_complex else PRECISIONS)
        self._check_laid()
        real = {self.dtype, self.out_dtype}.isdisjoint(COMPLEX_DTYPES)
        linear = self.dtype == self.out_dtype and not self.epilogue.activation
        check(real or linear, self, "complex operands and result of one dtype, and no activation")
        mixed = {self.dtype, self.b_dtype} == set(FP8_DTYPES)
        check(not self.b_dtype or mixed, self, "a b_dtype only where a and b are of fp8 types that differ")
        scalable = self.dtype in FP8_DTYPES and self.batch == 1
        check(not self.block_scales or scalable, self, "block scales of fp8, in one product")
        # fp8 needs scales, fp16x3 transforms both matrices: not offered
        lowered = self.precision == "fp16x3"
        gateable = self.dtype in GATED_DTYPES and not lowered
        check(gateable or not self.epilogue.gated, self, "gated products of real floating types")

    @property
    def rights(self) -> int:
        """Return how many matrices a is multiplied by: two where gated."""
        return 2 if self.epilogue.gated else 1

    @property
    def is_complex(self) -> bool:
        return self.dtype in COMPLEX_DTYPES

    @property
    def is_torchs(self) -> bool:
        """True if torch's kernel alone makes it: complex products, and fp8 with scales within the sum."""
        return self.is_complex or bool(self.block_scales)

    @property
    def flops(self) -> int:
        return 2 * (4 if self.is_complex else self.rights) * self.batch * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        inputs = self.k * (self.m + self.rights * self.n) * self.itemsize
        outputs = self.m * self.n * ITEMSIZE[self.out_dtype]
        read = [self.epilogue.bias, self.epilogue.residual].count("full")
        return self.batch * (inputs + outputs * (1 + read))

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.batch, self.m, self.n, self.k)

    @property
    def kind(self) -> tuple[Any, ...]:
        dtypes, how = (self.dtype, self.out_dtype), (self.precision, self.epilogue)
        return (self.op, *dtypes, *self.layouts, *self.aligns, *how, self.b_dtype, self.block_scales)

    @functools.cached_property
    def operands(self) -> tuple[Operand, Operand, Operand]:
        """Return a, b and out as tensors that pose this problem."""
        batch, m, n, k = self.batch, self.m, self.n, self.k
        return (
            operand_of(self.dtype, self.a_layout, self.a_align, (batch, m, k)),
            operand_of(self.b_dtype or self.dtype, self.b_layout, self.b_align, (batch, k, n)),
            operand_of(self.out_dtype, self.out_layout, self.out_align, (batch, m, n)),
        )

    @property
    def in_parts(self) -> bool:
        return self.dtype == "float32" and self.precision == "fp16x3"

    @property
    def by_rows(self) -> bool:
        """True if b is copied row by row first: see `tritile.families.rows.lowering`.

        The copy of an element takes as long as some 45 multiplications by it save.
        """
        plain = self.dtype == "float32" and self.precision == "ieee" and self.rights == 1
        return plain and self.b_layout == "column" and self.m >= _BY_ROWS_FROM

    @functools.cached_property
    def core(self) -> "MatmulProblem":
        """Return the product that kernels make: another one where operands are transformed first."""
        if self.by_rows:
            return replace(self, b_layout="row", b_align=16)
        if not self.in_parts:
            return self
        scaled = replace(self.epilogue, scale_a="column", scale_b="row")
        a_layout = "column" if self.a_layout == "column" else "row"
        b_layout = "row" if self.b_layout == "row" else "column"
        return replace(
            self, k=3 * part_length(self.k), dtype="float16", epilogue=scaled,
            a_layout=a_layout, b_layout=b_layout, a_align=16, b_align=16,
        )  # fmt: skip

    @property
    def label(self) -> str:
        batch = f"{self.batch}x" if self.batch > 1 else ""
        precision = f" {self.precision}" if self.dtype in PRECISIONS_OF else ""
        epilogue = f" {self.epilogue}" if self.epilogue else ""
        dtype = self.dtype + f" by {self.b_dtype}" * bool(self.b_dtype)
        scales = f" scales {self.block_scales}" * bool(self.block_scales)
        mode = " invariant" * self.invariant
        return f"{batch}{self.m}x{self.n}x{self.k} {self.letters} {dtype}{precision}{scales}{epilogue}{mode}"


# --- float32 products that are made of float16 parts: see `tritile.families.fp16x3.lowering` ---

PART_UNIT: Final = 64  # elements of K: whole cache lines of fp16
PROMOTED_EVERY: Final = 64  # elements of K that tensor cores, which truncate, sum at a time
_LEAST_K: Final = 384
_MOST_K: Final = 32768
_LEAST_SIDE: Final = 512
_LEAST_RESULT: Final = 1 << 22  # elements
_SHARED_K: Final = 8448  # beyond, cuBLAS shares K of more results
_LARGE_RESULT: Final = 1 << 24  # elements, of which cuBLAS makes tiles enough to share no K
_MOST_SHARES: Final = 256  # programs that share a tile's K


def suits(m: int, n: int, k: int) -> bool:
    """True if an m x k by k x n product is made of parts where no precision is named.

    At these sizes that takes less time and errs less than torch's fp32, as measured (`tuning/NOTES.md`).
    Below _LEAST_K torch has few terms to add. Where results are smaller cuBLAS shares K among programs, so
    that its sums are more exact. Above _MOST_K nobody has measured.
    """
    least = _LEAST_RESULT if k <= _SHARED_K else _LARGE_RESULT
    return _LEAST_K <= k <= _MOST_K and min(m, n) >= _LEAST_SIDE and m * n >= least


def part_length(k: int) -> int:
    """Return K of each of the three parts that follow one another along the core's K."""
    return -(-k // PART_UNIT) * PART_UNIT


def error_bound(k: int) -> float:
    """Return how far an element of the product may be from exact, before rounding, as a share of |a| |b|.

    Holds for finite data and Hopper's tensor cores; derived in `tritile.families.fp16x3.lowering`.
    """
    part = part_length(k)
    shares = min(_MOST_SHARES, 3 * part / 16)
    return 2.0**-24 * (28 + 10.5 * PROMOTED_EVERY / 16 + shares + part / 750)
