"""Compute what kernels are told of sizes and strides, and how many programs run."""

from collections.abc import Iterable
from typing import Any, Final

from tritile.core.config import Config

_MAX_GRID_AXIS: Final = 65535
WIDE_FROM: Final = 2**31 - 2**16  # from here on an index, a block past the end included, may need 64 bits
POLLS: Final = 64  # some 40 us: parts of a tile end closer together where all programs run at once


def unit(extent: int, itemsize: int) -> int:
    """Return the largest power of two that divides `extent`, up to 16 bytes of elements."""
    return min(extent & -extent, max(1, 16 // itemsize)) or 1


def least_unit(strides: Iterable[int], itemsize: int) -> int:
    """Return the largest power of two that divides all of these; a stride of 0 does not count."""
    return min((unit(step, itemsize) for step in strides if step), default=16 // itemsize)


def grid(tiles: int, batch: int) -> tuple[int, int, int]:
    """Return the grid over tiles of a matrix, then matrices, over two axes as one is too short."""
    across = min(batch, _MAX_GRID_AXIS)
    return tiles, across, -(-batch // across)


def options(config: Config) -> dict[str, Any]:
    found = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return found if config.maxnreg is None else found | {"maxnreg": config.maxnreg}


def polls(programs: int, at_once: int) -> int:
    """Return how often the programs of a tile look for each other's parts; 0 where some wait to run."""
    return POLLS if programs <= at_once else 0
