"""One step of a kernel's tiling as an SVG picture: the blocks that a tile loads, and the tiles before it."""

import math
import textwrap
from dataclasses import dataclass
from html import escape
from typing import Final, NamedTuple

from tritile.core.call import call_for
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import MatmulProblem, PermuteProblem
from tritile.errors import InvalidValueError, UnsupportedError
from tritile.families.common.tiles import grouped_tile
from tritile.families.space import illegal
from tritile.families.work import work_of
from tritile.lab import traffic

# Families that walk down bands of tiles.
DRAWN: Final = ("tile", "descriptor", "warpgroups", "scaled", "packed")
_LEFT, _TOP, _WIDTH, _HEIGHT, _GAP = 24.0, 108.0, 500.0, 430.0, 46.0  # of the matrices, in pixels
_THIN: Final = 7  # no side is drawn thinner than the longest by more than this
_STYLE: Final = """
text { font: 13px "Helvetica Neue", Helvetica, Arial, "Liberation Sans", sans-serif; fill: #14181f }
.head { font-size: 20px; font-weight: bold } .name { font-weight: bold } .line { font-size: 15px }
.small { font-size: 12px; fill: #5b6472 } .edge { font-size: 12px; fill: #b4235a }
.a-ink { fill: #2563eb } .b-ink { fill: #b45309 } .c-ink { fill: #0b7f5f }
.paper { fill: #ffffff } .matrix { fill: #fbfcfe; stroke: #5b6472 } .grid { fill: #e3e8ef }
.a { fill: #2563eb } .b { fill: #d97706 } .c { fill: #0f9d76 } .made { opacity: 0.25 } .band { opacity: 0.11 }
.masked { fill: url(#masked); stroke: #b4235a; stroke-width: 0.8 } #masked path { stroke: #b4235a }
.track { fill: #e6eaf0 } .bad { fill: #7b8494 }
@media (prefers-color-scheme: dark) { svg { filter: invert(0.93) hue-rotate(180deg) } }"""


@dataclass(frozen=True)
class Tiling:
    """How a config cuts a problem into tiles, and the order in which programs take them.

    `tile` has the rows and columns of a tile, `rows` and `columns` count the tiles of a matrix. Tiles go down
    bands of `group` tile rows, column by column, matrix after matrix.
    """

    problem: MatmulProblem | PermuteProblem
    tile: tuple[int, int]
    rows: int
    columns: int
    group: int
    block_k: int  # 0 of a permutation

    @property
    def tiles(self) -> int:
        return self.rows * self.columns * self.problem.batch

    @property
    def steps(self) -> int:
        """K iterations of a tile; 1 of a permutation."""
        return -(-self.problem.k // self.block_k) if isinstance(self.problem, MatmulProblem) else 1

    def place(self, index: int) -> tuple[int, int, int]:
        """The matrix, tile row and tile column of a tile, by its place in the order."""
        matrix, within = divmod(index, self.rows * self.columns)
        return matrix, *grouped_tile.fn(within, self.rows, self.columns, self.group)  # as kernels do

    def corner(self, index: int) -> tuple[int, int]:
        """The first row and column of a tile; a permutation's last tiles end where the matrix does."""
        (height, width), (_, row, column) = self.tile, self.place(index)
        if isinstance(self.problem, MatmulProblem):
            return row * height, column * width
        return min(row * height, self.problem.m - height), min(column * width, self.problem.n - width)


def tiling_of(problem: MatmulProblem | PermuteProblem, config: Config, device: Device) -> Tiling:
    """Return the tiling of a problem by a config's kernel; of a lowered product, that of its core.

    Raises InvalidValueError where the config is not legal, UnsupportedError for families not in `DRAWN` and
    for permutations that copy rows.
    """
    reason = illegal(config, problem, device)
    if reason is not None:
        raise InvalidValueError(f"{config} cannot run {problem.label} on {device.name}: {reason}")
    if config.family not in DRAWN:
        raise UnsupportedError(f"{config} has no tiles to draw: families that have are {', '.join(DRAWN)}")
    if isinstance(problem, PermuteProblem):
        if not problem.turns:
            raise UnsupportedError(f"{problem.label} copies rows: of permutations transposes are drawn")
        of = traffic.covers(problem, config)
        return Tiling(problem, (of.m, of.n), of.tiles_m, of.tiles_n, config["GROUP_M"], 0)
    work = work_of(call_for(problem), config, device.processors, False)
    problem = problem.core
    rows, columns = traffic.tile_counts(config, problem)
    # FLAT kernels take the tile from the axes of their grid, whose first one is of tile rows.
    flat = work.steps[work.main].args.get("FLAT", False)
    tile = traffic.tile_of(config, problem)
    return Tiling(problem, tile, rows, columns, rows if flat else config["GROUP_M"], config["BLOCK_K"])


class Block(NamedTuple):
    """A block of `height` x `width` elements, of which `rows` x `columns` lie inside its matrix."""

    top: int
    left: int
    height: int
    width: int
    rows: int
    columns: int


def blocks_of(tiling: Tiling, index: int, step: int) -> tuple[Block, Block, Block]:
    """Return the blocks of A and B that a product's tile loads at a K iteration, and its block of C.

    `index` and `step` count from 0. Elements that lie outside the matrix are zero-filled, and not stored.
    """
    problem, (height, width), depth = tiling.problem, tiling.tile, tiling.block_k
    assert isinstance(problem, MatmulProblem)
    (top, left), k = tiling.corner(index), step * depth
    rows, columns, inner = (
        min(height, problem.m - top), min(width, problem.n - left), min(depth, problem.k - k)
    )  # fmt: skip
    return (
        Block(top, k, height, depth, rows, inner),
        Block(k, left, depth, width, inner, columns),
        Block(top, left, height, width, rows, columns),
    )


class _Frame(NamedTuple):
    """Where a matrix is drawn, and the pixels of a row and of a column."""

    x: float
    y: float
    down: float
    across: float
    transposed: bool = False

    def rect(self, kind: str, top: float, left: float, rows: float, columns: float, least: float = 0) -> str:
        if self.transposed:
            top, left, rows, columns = left, top, columns, rows
        if rows <= 0 or columns <= 0:
            return ""
        wide, high = max(least, columns * self.across), max(least, rows * self.down)
        return _rect(kind, self.x + left * self.across, self.y + top * self.down, wide, high)

    def matrix(self, rows: int, columns: int, height: int, width: int) -> str:
        """Draw a matrix, and the lines between its blocks where they are 4 pixels apart or more."""
        down, across = (self.across, self.down) if self.transposed else (self.down, self.across)
        drawn = [self.rect("matrix", 0, 0, rows, columns)]
        if height * down >= 4:
            drawn += [self.rect("grid", top, 0, 0.8 / down, columns) for top in range(height, rows, height)]
        if width * across >= 4:
            drawn += [self.rect("grid", 0, left, rows, 0.8 / across) for left in range(width, columns, width)]
        return "".join(drawn)

    def block(self, kind: str, block: Block) -> str:
        """Draw a block, hatched where it lies past an edge."""
        top, left, height, width, rows, columns = block
        return (
            self.rect("masked", top + rows, left, height - rows, width)
            + self.rect("masked", top, left + columns, rows, width - columns)
            + self.rect(kind, top, left, rows, columns, 3)
        )


def _rect(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{kind}" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"/>\n'


def _text(kind: str, x: float, y: float, words: str, more: str = "") -> str:
    return f'<text class="{kind}" x="{x:.2f}" y="{y:.2f}"{more}>{escape(words)}</text>\n'


def _by(rows: int, columns: int) -> str:
    return f"{rows:,} \u00d7 {columns:,}"


def _span(first: int, count: int) -> str:
    return f"{first:,}" if count == 1 else f"{first:,} to {first + count - 1:,}"


def _made(tiling: Tiling, frame: _Frame, index: int) -> str:
    """Shade the tiles of the same matrix that were made before: at most three rectangles."""
    (height, width), problem = tiling.tile, tiling.problem
    first, within = divmod(index % (tiling.rows * tiling.columns), tiling.group * tiling.columns)
    first *= tiling.group
    high = min(tiling.group, tiling.rows - first)
    whole, rest = divmod(within, high)
    drawn = ""
    for row, column, rows, columns in (
        (0, 0, first, tiling.columns),
        (first, 0, high, whole),
        (first, whole, rest, 1),
    ):
        top, left = row * height, column * width
        tall, wide = min(problem.m - top, rows * height), min(problem.n - left, columns * width)
        drawn += frame.rect("c made", top, left, tall if rows else 0, wide if columns else 0)
    return drawn


Line = tuple[str, str]  # how a line next to the matrices is written, and its words
Bars = tuple[str, tuple[str, float], tuple[str, float]]  # a title, what tiles request and what none would


def _product(tiling: Tiling, index: int, step: int) -> tuple[str, float, list[Line], Bars]:
    problem, (height, width), depth = tiling.problem, tiling.tile, tiling.block_k
    assert isinstance(problem, MatmulProblem)
    one, two, out = blocks_of(tiling, index, step)
    tall, wide, deep = tiling.rows * height, tiling.columns * width, tiling.steps * depth
    m, n, k = (max(side, max(tall, wide, deep) / _THIN) for side in (tall, wide, deep))
    scale = min((_WIDTH - _GAP) / (k + n), (_HEIGHT - _GAP) / (k + m))
    down, across, along = m * scale / tall, n * scale / wide, k * scale / deep
    x, y = _LEFT + k * scale + _GAP, _TOP + k * scale + _GAP
    a, b, c = _Frame(_LEFT, y, down, along), _Frame(x, _TOP, along, across), _Frame(x, y, down, across)
    drawn = a.matrix(problem.m, problem.k, height, depth) + b.matrix(problem.k, problem.n, depth, width)
    drawn += c.matrix(problem.m, problem.n, height, width) + _made(tiling, c, index)
    drawn += a.rect("a band", out.top, 0, out.rows, deep) + b.rect("b band", 0, out.left, deep, out.columns)
    drawn += a.rect("a made", out.top, 0, out.rows, step * depth)
    drawn += b.rect("b made", 0, out.left, step * depth, out.columns)
    drawn += a.block("a", one) + b.block("b", two) + c.block("c", out)
    low = y + m * scale + 20
    for kind, left, top, rows, columns in (
        ("a", _LEFT, y - 8, problem.m, problem.k), ("b", x, _TOP - 8, problem.k, problem.n),
        ("c", x, low, problem.m, problem.n),
    ):  # fmt: skip
        left = min(left, _LEFT + _WIDTH + 12 - 8.5 * len(_by(rows, columns)))
        drawn += _text(f"name {kind}-ink", left, top, f"{kind.upper()}\u2002{_by(rows, columns)}")
    inside = one.rows * one.columns + two.rows * two.columns
    masked = 1 - inside / (height * depth + depth * width)
    if masked or (out.rows, out.columns) != (height, width):
        low += 20
        drawn += _text("edge", _LEFT, low, "hatched: past the edge, zero-filled; of C not stored")
    done = min(problem.k, (step + 1) * depth)
    with_tiles = (out.rows + out.columns) * done * problem.itemsize
    without = 2 * out.rows * out.columns * done * problem.itemsize
    filled = f"; {math.floor(100 * masked + 1e-9)}% zero-filled" if masked else ""
    lines = [
        ("small", f"rows {_span(out.top, out.rows)}"),
        ("small", f"columns {_span(out.left, out.columns)}"),
        ("", f"Step {step + 1:,} of {tiling.steps:,} loads"),
        ("a", f"{_by(height, depth)} of A"),
        ("b", f"{_by(depth, width)} of B"),
        ("small", f"k = {_span(one.left, one.columns)}"),
        ("small", f"{traffic.bytes_text(inside * problem.itemsize)}{filled}"),
    ]
    bars = "Requested so far, for this tile", ("with tiles", with_tiles), ("element by element", without)
    return drawn, low, lines, bars


def _transpose(
    tiling: Tiling, index: int, config: Config, device: Device
) -> tuple[str, float, list[Line], Bars]:
    problem, (height, width) = tiling.problem, tiling.tile
    assert isinstance(problem, PermuteProblem)
    m, n = (max(side, max(problem.m, problem.n) / _THIN) for side in (problem.m, problem.n))
    scale = min((_WIDTH - _GAP) / (n + m), _HEIGHT / max(m, n))
    down, across = m * scale / problem.m, n * scale / problem.n
    x, left = _Frame(_LEFT, _TOP, down, across), _LEFT + n * scale + _GAP
    out = _Frame(left, _TOP, across, down, True)
    top, first = tiling.corner(index)
    _, row, column = tiling.place(index)
    again = row * height - top, column * width - first  # rows and columns that the tile before moves too
    drawn = ""
    for frame, kind in ((x, "a"), (out, "c")):
        drawn += frame.matrix(problem.m, problem.n, height, width) + _made(tiling, frame, index)
        drawn += frame.rect(kind, top, first, height, width, 3)
        drawn += frame.rect("masked", top, first, again[0], width)
        drawn += frame.rect("masked", top, first, height, again[1])
    low = _TOP + max(m, n) * scale + 20
    drawn += _text("name a-ink", _LEFT, _TOP - 8, f"x\u2002{_by(problem.m, problem.n)}")
    drawn += _text("name c-ink", left, _TOP - 8, f"out\u2002{_by(problem.n, problem.m)}")
    if any(again):
        drawn += _text("edge", _LEFT, low, "hatched: moved by the tile before, too")
    lines = [
        ("small", f"rows {_span(top, height)}"),
        ("small", f"columns {_span(first, width)}"),
        ("", f"moves {traffic.bytes_text(height * width * problem.itemsize)}"),
        ("a", "reads along rows of x"),
        ("c", "writes along rows of out"),
        ("small", "in sectors of 32 bytes"),
    ]
    tiled, untiled = traffic.tiled(problem, config, device), traffic.untiled(problem)
    bars = "Sectors of the whole copy", ("tile by tile", tiled.total), ("element by element", untiled.total)
    return drawn, low, lines, bars


def _panel(lines: list[Line], title: str, *sides: tuple[str, float]) -> tuple[str, float]:
    """Draw the lines and bars beside the matrices; return them, and where they end."""
    drawn = ""
    y = _TOP + 4
    for kind, words in lines:
        y += 14 if not kind and y > _TOP + 4 else 0
        drawn += _text("small" if kind == "small" else f"line {kind}-ink" if kind else "line", 560, y, words)
        y += 21
    y += 14
    drawn += _text("small", 560, y, title)
    most = max(value for _, value in sides) or 1
    for (words, value), kind in zip(sides, ("c bar", "bad"), strict=True):
        drawn += _text("small", 560, y + 24, words)
        drawn += _text("name", 776, y + 24, traffic.bytes_text(value), ' text-anchor="end"')
        drawn += _rect("track", 560, y + 30, 216, 10)
        drawn += _rect(kind, 560, y + 30, max(2, 216 * value / most), 10)
        y += 40
    ratio = sides[1][1] / sides[0][1] if sides[0][1] else 1
    times = f"{ratio:,.1f}" if ratio < 10 else f"{ratio:,.0f}"
    drawn += _text("small", 560, y + 18, f"{times} times as many")
    return drawn, y


def picture(
    problem: MatmulProblem | PermuteProblem,
    config: Config,
    device: Device,
    tile: int | None = None,
    step: int | None = None,
) -> str:
    """Draw one step of a tiling as SVG, 800 pixels wide, with a light and a dark scheme.

    `tile` counts from 0 in the order in which programs take tiles, `step` the K iterations from 1; by default
    both are in the middle. Raises as `tiling_of` does, and InvalidValueError for a tile or step that is not
    there.
    """
    tiling = tiling_of(problem, config, device)
    tile = tiling.tiles // 2 if tile is None else tile
    step = (tiling.steps + 1) // 2 if step is None else step
    if not 0 <= tile < tiling.tiles:
        raise InvalidValueError(f"tile {tile}: wanted one of 0 to {tiling.tiles - 1}")
    if not 1 <= step <= tiling.steps:
        raise InvalidValueError(f"step {step}: wanted one of 1 to {tiling.steps}")
    product = isinstance(tiling.problem, MatmulProblem)
    drawn, low, lines, bars = (
        _product(tiling, tile, step - 1) if product else _transpose(tiling, tile, config, device)
    )
    matrix, row, column = tiling.place(tile)
    of = f" of matrix {matrix:,}" if tiling.problem.batch > 1 else ""
    head = [("", f"Tile {tile:,} of 0 to {tiling.tiles - 1:,}"), ("c", f"row {row:,}, column {column:,}{of}")]
    words, y = _panel(head + lines, *bars)
    drawn += words
    heading = f"{'A matrix product' if product else 'A transpose'}, one tile at a time"
    names = textwrap.wrap(f"{tiling.problem.label} on {device.name}: {config}", 96)
    drawn += "".join(_text("small", _LEFT, 56 + 15 * i, words) for i, words in enumerate(names))
    height = math.ceil(max(low, y + 18) + 24)
    size = f'width="800" height="{height}" viewBox="0 0 800 {height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(heading)}">\n'
        f"<style>{_STYLE}</style>\n"
        '<pattern id="masked" width="7" height="7" patternUnits="userSpaceOnUse"><path d="M0 7L7 0" '
        f'stroke-width="1.6"/></pattern>\n{_rect("paper", 0, 0, 800, height)}'
        f"{_text('head', _LEFT, 36, heading)}{drawn}</svg>\n"
    )
