"""The configs of the packed kernel: permutations of 1- and 2-byte elements by words of 4 bytes."""

import itertools
from collections.abc import Iterator
from typing import Final

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import PermuteProblem
from tritile.families.matmul_tile import family as tile

NAME: Final = "packed"
WORD: Final = 4  # bytes


def whole_rows(problem: PermuteProblem) -> int:
    """Rows of which every column has whole words, wherever its first one starts."""
    return problem.m - (WORD // problem.itemsize - 1)


def vectors(config: Config, problem: PermuteProblem) -> tuple[int, int]:
    """Bytes that a thread reads, and writes, at once: an element and a word."""
    return problem.itemsize, WORD


def held_words(config: Config, problem: PermuteProblem, device: Device) -> float:
    """32-bit registers of each thread that hold its part of a tile."""
    tile_bytes = config["BLOCK_M"] * config["BLOCK_N"] * problem.itemsize
    return tile_bytes / (config.num_warps * device.warp_size * WORD)


def illegal(config: Config, problem: PermuteProblem, device: Device) -> str | None:
    """Why `config` may not run `problem` on `device`, or None where it may."""
    if problem.itemsize > 2:
        return f"elements of {problem.itemsize} bytes are not packed"
    if (problem.x_layout, problem.out_layout) != ("row", "column"):
        return "x and out are not contiguous along two dimensions"
    if whole_rows(problem) * problem.itemsize < WORD:
        return f"{problem.m} elements are too few to hold a whole word of {WORD} bytes"
    reason = tile.launch_fault(config, problem, device)
    if reason is not None:
        return reason
    if min(config["BLOCK_M"], config["BLOCK_N"]) * problem.itemsize < WORD:
        return f"a side of the tile is less than a word of {WORD} bytes"
    return tile.moved_fault(config, problem, device, held_words(config, problem, device))


def _configs() -> Iterator[Config]:
    sides = (4, 16, 32, 64, 128, 256, 512)
    for m, n, warps, group in itertools.product(sides, sides, (4, 8, 16), (1, 32, 256)):
        if 2048 <= m * n <= 65536 and m * n // (32 * warps) >= 16:
            yield Config.of(family=NAME, num_warps=warps, num_stages=1, BLOCK_M=m, BLOCK_N=n, GROUP_M=group)


CONFIGS: Final = {"permute": tuple(_configs())}


def pointless(config: Config, problem: PermuteProblem, device: Device) -> bool:
    """Whether another config of the family does the same or strictly less work."""
    return tile.pointless(config, problem, device)
