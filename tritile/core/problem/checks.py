"""Check the fields of problems."""

import math
from typing import Any, Final

from tritile.errors import InvalidValueError

ITEMSIZE: Final = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "int32": 4,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip
MATMUL_DTYPES: Final = tuple(name for name in ITEMSIZE if name != "int32")
FP8_DTYPES: Final = ("float8_e4m3fn", "float8_e5m2")
REAL_DTYPE: Final = {"complex64": "float32", "complex128": "float64"}  # of the parts of complex numbers
LAYOUTS: Final = ("row", "column", "strided")
ALIGNMENTS: Final = (1, 2, 4, 8, 16)
THREE: Final = "-3m"  # suffix of precisions that make a complex product by three real ones, not four
_FP32: Final = ("ieee", "fp16x3", "tf32x3", "tf32")
_FP64: Final = ("ieee", "ozaki")
# Dtypes with a choice of precision; of all others it is "ieee". "fast": tensor cores alone keep the sums.
PRECISIONS_OF: Final = {
    "float32": _FP32, "float64": _FP64, **dict.fromkeys(FP8_DTYPES, ("ieee", "fast")),
    "complex64": (*_FP32, *(name + THREE for name in _FP32)),
    "complex128": (*_FP64, *(name + THREE for name in _FP64)),
}  # fmt: skip
PRECISIONS: Final = tuple(
    dict.fromkeys(name for names in PRECISIONS_OF.values() for name in names if not name.endswith(THREE))
)  # of real products
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


def among(allowed: tuple[object, ...], *values: Any) -> bool:
    """Tell whether each value is one of these, of the same type: 16.0 and True are not alignments."""
    return all(any(type(v) is type(a) and v == a for a in allowed) for v in values)


def extent_fits(value: Any) -> bool:
    """Tell whether it is a size: an integer from 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_EXTENT
