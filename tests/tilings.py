"""Problems and configs whose tilings tests look at, and where they look for a turn."""

from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.lab.report.tiling import Place, Tiling
from tritile.tune.suites import parse_shape

H200 = target_device("nvidia-h200")


def product(shape):
    return parse_shape(shape, dtype="bfloat16").problem


def tile(group=8, m=64, n=32, k=32):
    return Config.of(4, 3, "tile", BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP_M=group)


def warped(persistent=True, group=16):
    blocks = {"BLOCK_M": 128, "BLOCK_N": 192, "BLOCK_K": 64, "GROUP_M": group}
    return Config.of(4, 4, "warpgroups", **blocks, CONSUMERS=2, PERSISTENT=persistent, SUBTILES=1)


def split(parts=4):
    blocks = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 128, "GROUP_M": 8}
    return Config.of(4, 4, "descriptor", **blocks, PERSISTENT=False, SPLIT_K=parts, SUBTILES=1)


def ranged():
    """Parts of a tile that take a range of K each, and not every few blocks."""
    blocks = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8}
    return Config.of(4, 6, "split", **blocks, CONSUMERS=2, SUBTILES=1)


def transposed(persistent=False, group=4):
    blocks = {"BLOCK_M": 80, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": group}
    return Config.of(4, 4, "transposed", **blocks, CONSUMERS=2, PERSISTENT=persistent, SUBTILES=1)


def mover(group=2, m=32, n=32, family="tile"):
    return Config.of(4, 1, family, BLOCK_M=m, BLOCK_N=n, GROUP_M=group)


def turn_of(tiling: Tiling, place: Place, part: int = 0) -> int:
    """Return the turn that makes a part of a tile: the inverse of `Tiling.place`."""
    rows, columns = tiling.banded
    row, column = place[:0:-1] if tiling.by_columns else place[1:]
    first = row // tiling.group * tiling.group
    high = min(rows - first, tiling.group)
    index = first * columns + column * high + row - first
    return part * tiling.tiles + place.matrix * tiling.rows * tiling.columns + index


def turns_of(tiling: Tiling, program: int) -> range:
    """Return the turns of a program, one after the other."""
    assert 0 <= program < tiling.programs
    return range(program, tiling.turns, tiling.programs)


def wave(tiling: Tiling, number: int) -> range:
    """Return the turns that run at the same time, from the first wave on."""
    first = number * tiling.at_once
    return range(first, min(first + tiling.at_once, tiling.turns))


def waves(tiling: Tiling) -> int:
    """Count the waves from the first turn to the last."""
    return -(-tiling.turns // tiling.at_once)


def sharing(tiling: Tiling, number: int) -> tuple[int, int, int]:
    """Count the blocks that a wave loads at one step: all, and how many of A and of B differ."""
    turns = wave(tiling, number)
    places = [(tiling.place(turn), tiling.part(turn)) for turn in turns]
    rows = {(place.matrix, part, place.row) for place, part in places}
    columns = {(place.matrix, part, place.column) for place, part in places}
    return 2 * len(turns), len(rows), len(columns)
