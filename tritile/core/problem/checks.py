"""Check the fields of problems, and define those that all products share."""

import math
from typing import Any, Final, Literal, get_args

from tritile.errors import InvalidValueError

ITEMSIZE: Final = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "int32": 4,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip
MATMUL_DTYPES: Final = tuple(name for name in ITEMSIZE if name != "int32")
FP8_DTYPES: Final = ("float8_e4m3fn", "float8_e5m2")
COMPLEX_DTYPES: Final = ("complex64", "complex128")  # of products, multiplied by torch alone
LAYOUTS: Final = ("row", "column", "strided")
ALIGNMENTS: Final = (1, 2, 4, 8, 16)
Precision = Literal["ieee", "fp16x3", "tf32", "fast"]
# Dtypes whose precision may be named; of all others it is "ieee". "fast": tensor cores alone keep the sums.
PRECISIONS_OF: Final[dict[str, tuple[Precision, ...]]] = {
    "float32": ("ieee", "fp16x3", "tf32"),
    "float64": ("ieee",),
    **dict.fromkeys(FP8_DTYPES, ("ieee", "fast")),
    "complex64": ("ieee", "tf32"),
    "complex128": ("ieee",),
}
PRECISIONS: Final[tuple[Precision, ...]] = get_args(Precision)
SCALE_K: Final = 128  # elements of K that share a scale within a sum, and that tensor cores sum of fp8
# How many rows of a, and columns of b, share a scale within a sum.
BLOCK_SCALES: Final = {"": None, "1x1": (1, 1), "1x128": (1, 128), "128x1": (128, 1), "128x128": (128, 128)}
MAX_EXTENT: Final = 2**48


def alignment(*places: int) -> int:
    """Return the largest power of two, up to 16, that divides all of these bytes."""
    return math.gcd(16, *places)


def check(condition: bool, problem: Any, wanted: str) -> None:
    """Raise InvalidValueError, with what was wanted, unless the condition holds."""
    if not condition:
        raise InvalidValueError(f"{problem!r}: wanted {wanted}")


def extent_fits(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_EXTENT


def check_sizes(problem: Any, *sizes: Any) -> None:
    check(all(map(extent_fits, sizes)), problem, "sizes of 1 and more")


def check_fields(problem: Any, **allowed: tuple[object, ...]) -> None:
    """Raise InvalidValueError unless each field named is one of those allowed.

    It has to be of the same type too: 16.0 and True are not alignments.
    """
    for name, values in allowed.items():
        value = getattr(problem, name)
        if value not in values or type(value) is not type(values[values.index(value)]):
            article = "an" if name[0] in "aeiou" else "a"
            check(False, problem, f"{article} {name} of {', '.join(map(str, values))}")


class Laid:
    """Say what products of matrices a and b into out have in common: layouts, alignments and dtypes."""

    dtype: str
    precision: str
    a_layout: str
    b_layout: str
    out_layout: str
    a_align: int
    b_align: int
    out_align: int

    def _check_laid(self) -> None:
        check_fields(self, a_layout=LAYOUTS, b_layout=LAYOUTS, out_layout=LAYOUTS, invariant=(False, True))
        check_fields(self, a_align=ALIGNMENTS, b_align=ALIGNMENTS, out_align=ALIGNMENTS)

    @property
    def layouts(self) -> tuple[str, str, str]:
        return (self.a_layout, self.b_layout, self.out_layout)

    @property
    def aligns(self) -> tuple[int, int, int]:
        return (self.a_align, self.b_align, self.out_align)

    @property
    def letters(self) -> str:
        """Return the layouts of a and b as a BLAS names them: N by rows, T by columns, or S for strided."""
        names = {"row": "N", "column": "T", "strided": "S"}
        return names[self.a_layout] + names[self.b_layout]

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def promoted(self) -> bool:
        """True if sums of parts go from tensor cores to totals in fp32, in as many registers again."""
        return self.dtype == "float16" and self.precision == "fp16x3"

    @property
    def totals(self) -> bool:
        """True if sums move from tensor cores to totals in fp32: of parts, and of fp8 unless "fast"."""
        return self.promoted or (self.dtype in FP8_DTYPES and self.precision != "fast")
