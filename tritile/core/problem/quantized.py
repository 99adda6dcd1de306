"""Describe products with a weight of 4- or 8-bit integers."""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, get_args

from tritile.core.problem.checks import ALIGNMENTS, alignment, check_fields, check_sizes
from tritile.core.problem.epilogue import Epilogue
from tritile.core.problem.matmul import MatmulProblem, Operand

WeightBits = Literal[4, 8]
GroupSize = Literal[32, 64, 128]
WEIGHT_BITS: Final[tuple[WeightBits, ...]] = get_args(WeightBits)
GROUP_SIZES: Final[tuple[GroupSize, ...]] = get_args(GroupSize)
ACTIVATION_DTYPES: Final = ("bfloat16", "float16")
_ROWS: Final = 16  # rows of a weight are padded to a multiple
_LINE: Final = 128  # bytes; rows of an unpacked weight are multiples
UNIT_WORDS: Final = 128  # words of 32 bits that 8 rows of `unit_columns` are packed into


def unit_columns(bits: int) -> int:
    """Return how many columns of a weight are packed together: K is padded to a multiple."""
    return 512 // bits


def _padded(extent: int, multiple: int) -> int:
    return -(-extent // multiple) * multiple


def words_shape(n: int, k: int, bits: int) -> tuple[int, int]:
    """Return the shape of a packed weight (n, k): eights of rows, and 32-bit words of each."""
    unit = unit_columns(bits)
    return _padded(n, _ROWS) // 8, _padded(k, unit) // unit * UNIT_WORDS


def scales_shape(n: int, k: int, bits: int, group_size: int) -> tuple[int, int]:
    """Return the shape of scales and zero points: groups and rows, those of padding included."""
    return -(-_padded(k, unit_columns(bits)) // group_size), _padded(n, _ROWS)


def unpacked_row(k: int) -> int:
    """Return elements from one row of K 16-bit floats to the next, where a weight is unpacked in memory."""
    return _padded(k, _LINE // 2)


@dataclass(frozen=True)
class QuantizedProblem:
    """Describe x @ weight^T + bias: x (m, k) by a weight (n, k) of integers of `bits` bits.

    `group_size` columns of a row share a scale and, with `zero_points`, a zero point. `dtype` is that of x,
    the scales, the result and the bias. `x_layout` is "row" or "strided". `x_align` and `invariant` are as in
    a `MatmulProblem`.

    Raises InvalidValueError where a field is out of its range.
    """

    op: ClassVar[str] = "linear_quantized"
    batch: ClassVar[int] = 1
    itemsize: ClassVar[int] = 2  # bytes of an activation
    m: int
    n: int
    k: int
    dtype: str
    bits: int
    group_size: int
    zero_points: bool = False
    bias: bool = False
    x_layout: str = "row"
    x_align: int = 16
    invariant: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, self.m, self.n, self.k)
        check_fields(self, dtype=ACTIVATION_DTYPES, bits=WEIGHT_BITS, group_size=GROUP_SIZES)
        check_fields(self, x_layout=("row", "strided"), x_align=ALIGNMENTS, invariant=(False, True))
        check_fields(self, zero_points=(False, True), bias=(False, True))

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def words(self) -> tuple[int, int]:
        return words_shape(self.n, self.k, self.bits)

    @property
    def scales(self) -> tuple[int, int]:
        return scales_shape(self.n, self.k, self.bits, self.group_size)

    @property
    def weight_bytes(self) -> int:
        words, scales = self.words, self.scales
        return 4 * words[0] * words[1] + 2 * scales[0] * scales[1] * (1 + self.zero_points)

    @property
    def unpacked_bytes(self) -> int:
        """Return bytes of the weight as a matrix of 16-bit floats: see `unpacked_row`."""
        return self.itemsize * self.scales[1] * unpacked_row(self.k)

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.itemsize * (self.m * (self.k + self.n) + self.n * self.bias)

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.m, self.n, self.k)

    @property
    def kind(self) -> tuple[Any, ...]:
        weight = (self.bits, self.group_size, self.zero_points)
        return (self.op, self.dtype, *weight, self.bias, self.x_layout, self.x_align)

    @functools.cached_property
    def product(self) -> MatmulProblem:
        """Return the same product with a weight that is not quantized, which lies row by row."""
        dtypes, epilogue = (self.dtype, self.dtype), Epilogue(bias="row" * self.bias)
        aligns = (self.x_align, 16, alignment(self.itemsize * self.n))
        return MatmulProblem(
            1, self.m, self.n, self.k, *dtypes, self.x_layout, "column", "row", *aligns, epilogue=epilogue
        )

    @property
    def x(self) -> Operand:
        return self.product.operands[0]

    @property
    def label(self) -> str:
        zeros, bias = " zeros" if self.zero_points else "", " bias" if self.bias else ""
        strided = " strided" if self.x_layout == "strided" else ""
        weight = f"int{self.bits}/{self.group_size}{zeros}"
        mode = " invariant" * self.invariant
        return f"{self.m}x{self.n}x{self.k} {self.dtype} by {weight}{bias}{strided}{mode}"
