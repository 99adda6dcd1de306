"""Hold what a product's time depends on beside its config: see `tritile.planning.formula`."""

from typing import Any, Final, NamedTuple

SECTOR: Final = 32  # bytes that device memory moves at once
LINE: Final = 128  # bytes that a cache looks up at once


class Facts(NamedTuple):
    """Hold what a product's time depends on: numbers, or tensors over many products."""

    m: Any
    n: Any
    k: Any
    batch: Any
    size_a: Any  # bytes an element
    size_b: Any
    bytes_a: Any  # of one matrix
    bytes_b: Any
    bytes_out: Any  # of all results
    reread: Any  # share of b that each band of tiles after the first reads again from device memory
    odd_a: Any  # 1 where rows of a do not start on sectors, else 0
    odd_b: Any
    odd_out: Any
    off_a: Any  # 1 where rows of a do not start on lines
    off_b: Any
    by_row: Any  # 1 where b is contiguous along N, 0 where along K
    copied: Any  # bytes of operands that are copied first
    copies: Any  # 1 where any operand is copied, else 0
    processors: Any
