"""Compute what kernels take of sizes and strides, and how many programs run."""

from collections.abc import Iterable
from typing import Any, Final

from tritile.core.call import View
from tritile.core.config import Config

MAX_AXIS: Final = 65535  # programs along grid axes y and z
WIDE_FROM: Final = 2**31 - 2**16  # from here on an index, a block past the end included, may need 64 bits
POLLS: Final = 64  # some 40 us: parts of a tile end closer together if all programs run at once


def unit(extent: int, itemsize: int) -> int:
    """Return the largest power of two that divides `extent`, up to 16 bytes of elements."""
    return min(extent & -extent, max(1, 16 // itemsize)) or 1


def least_unit(strides: Iterable[int], itemsize: int) -> int:
    """Return the largest power of two that divides all of these; a stride of 0 does not count."""
    return min((unit(step, itemsize) for step in strides if step), default=16 // itemsize)


def units(view: View) -> tuple[int, int, int]:
    """Return the largest powers of two that divide a view's row, column and batch strides."""
    rows, columns = (unit(step, view.itemsize) for step in view.strides)
    return rows, columns, least_unit(view.batch_strides, view.itemsize)


def grid(tiles: int, batch: int) -> tuple[int, int, int]:
    """Return the grid over tiles of a matrix, then matrices, over two axes as one is too short."""
    y = min(batch, MAX_AXIS)
    return tiles, y, -(-batch // y)


def options(config: Config, **more: Any) -> dict[str, Any]:
    found = {"num_warps": config.num_warps, "num_stages": config.num_stages} | more
    return found if config.maxnreg is None else found | {"maxnreg": config.maxnreg}


def polls(programs: int, at_once: int) -> int:
    """Return how often the programs of a tile look for each other's parts; 0 if some wait to run."""
    return POLLS if programs <= at_once else 0
