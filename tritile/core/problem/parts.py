"""Size a float32 product that is made of float16 parts: see `tritile.families.fp16x3.lowering`."""

from typing import Final

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
    """Tell how far an element of the product may be from exact, before it is rounded, as a share of |a| |b|.

    Holds for finite data and Hopper's tensor cores; derived in `tritile.families.fp16x3.lowering`.
    """
    part = part_length(k)
    shares = min(_MOST_SHARES, 3 * part / 16)
    return 2.0**-24 * (28 + 10.5 * PROMOTED_EVERY / 16 + shares + part / 750)
