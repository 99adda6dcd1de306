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
