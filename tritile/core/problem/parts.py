"""Size a float32 product that is made of float16 parts: see `tritile.families.fp16x3.lowering`."""

from typing import Final

PART_UNIT: Final = 64  # elements of K: whole cache lines of fp16


def part_length(k: int) -> int:
    """Return K of each of the three parts that follow one another along the core's K."""
    return -(-k // PART_UNIT) * PART_UNIT


def promoted_every(k: int) -> int:
    """Return how many elements of K are summed in tensor cores at a time: a power of two, near 2 sqrt(K).

    Tensor cores truncate each sum, so that errors grow with this number. Sums in fp32 err by a random walk,
    as sqrt(K).
    """
    every = PART_UNIT
    while every * every < 2 * k:
        every *= 2
    return every


def error_bound(k: int) -> float:
    """Tell how far an element of the product may be from exact, before it is rounded, as a share of |a| |b|.

    Holds for finite data and Hopper's tensor cores; derived in `tritile.families.fp16x3.lowering`.
    """
    return 2.0**-24 * (25 + 10.5 * promoted_every(k) / 16 + part_length(k) / 15)
