"""Where tests look for a turn in a tiling."""

from tritile.lab.report.tiling import Place, Tiling


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
