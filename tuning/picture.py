"""Draw a step of a kernel's tiling as SVG: the blocks that a tile loads, and the tiles made before it."""

import math
import sys
import textwrap
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import typer

sys.path.insert(0, str(Path(__file__).parents[1]))

import command
from tritile.choose import pick, waves
from tritile.cli import shared
from tritile.cli.shared import console
from tritile.core.call import call_for
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import MatmulProblem
from tritile.errors import InvalidValueError, UnsupportedError
from tritile.families.common.tiles import grouped_tile
from tritile.families.space import illegal
from tritile.families.work import work_of
from tritile.lab import traffic
from tritile.lab.explain import config_like
from tritile.tune import suites

# Families that walk down bands of tiles.
_DRAWN: Final = ("tile", "descriptor", "warpgroups")
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
    if config.family not in _DRAWN:
        raise UnsupportedError(f"{config} has no tiles to draw: expected a config of {', '.join(_DRAWN)}")
    if isinstance(problem, PermuteProblem):
        if not problem.is_transposing:
            raise UnsupportedError(f"{problem.label} copies rows: only permutations that transpose are drawn")
        of = traffic.coverage(problem, config)
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
    """Where a matrix of `rows` x `columns` is drawn, and the pixels of a row and of a column."""

    x: float
    y: float
    down: float
    across: float
    rows: int
    columns: int
    transposed: bool = False

    def rect(self, kind: str, top: float, left: float, rows: float, columns: float, least: float = 0) -> str:
        if rows <= 0 or columns <= 0:
            return ""
        x, y, width, height = left, top, max(least, columns * self.across), max(least, rows * self.down)
        x, y = x * self.across, y * self.down
        if self.transposed:
            x, y, width, height = y, x, height, width
        return _rect(kind, self.x + x, self.y + y, width, height)

    def matrix(self, height: int, width: int) -> str:
        """Draw the matrix, and the lines between its blocks where they are 4 pixels apart or more."""
        rows, columns, drawn = self.rows, self.columns, self.rect("matrix", 0, 0, self.rows, self.columns)
        if height * self.down >= 4:
            for top in range(height, rows, height):
                drawn += self.rect("grid", top, 0, 0.8 / self.down, columns)
        if width * self.across >= 4:
            for left in range(width, columns, width):
                drawn += self.rect("grid", 0, left, rows, 0.8 / self.across)
        return drawn

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


def _span(name: str, first: int, count: int) -> tuple[str, str]:
    return "small", f"{name} {first:,}" + (f" to {first + count - 1:,}" if count > 1 else "")


def _made(tiling: Tiling, frame: _Frame, index: int) -> str:
    """Shade the tiles of the same matrix that were made before: at most three rectangles."""
    height, width = tiling.tile
    band, within = divmod(index % (tiling.rows * tiling.columns), tiling.group * tiling.columns)
    first, last = band * tiling.group, min((band + 1) * tiling.group, tiling.rows)
    whole, rest = divmod(within, last - first)
    drawn = ""
    for top, left, bottom, right in (
        (0, 0, first, tiling.columns),
        (first, 0, last, whole),
        (first, whole, first + rest, whole + 1),
    ):
        top, left = top * height, left * width
        bottom, right = min(frame.rows, bottom * height), min(frame.columns, right * width)
        drawn += frame.rect("c made", top, left, bottom - top, right - left)
    return drawn


Line = tuple[str, str]  # how a line next to the matrices is written, and its words


def _counted(title: str, by: str, tiled: float, untiled: float) -> list[Line]:
    """Say how many bytes are requested, and how many would be element by element."""
    ratio = untiled / tiled if tiled else 1
    return [
        ("", title),
        ("c", f"{traffic.bytes_text(tiled)} {by}"),
        ("small", f"{traffic.bytes_text(untiled)} element by element:"),
        ("small", f"{ratio:,.{1 if ratio < 10 else 0}f} times as many"),
    ]


def _product(tiling: Tiling, index: int, step: int) -> tuple[str, float, list[Line]]:
    """Draw the matrices; return how low they reach, and the lines next to them."""
    problem, (height, width), depth = tiling.problem, tiling.tile, tiling.block_k
    assert isinstance(problem, MatmulProblem)
    one, two, out = blocks_of(tiling, index, step)
    tall, wide, deep = tiling.rows * height, tiling.columns * width, tiling.steps * depth
    m, n, k = (max(side, max(tall, wide, deep) / _THIN) for side in (tall, wide, deep))
    scale = min((_WIDTH - _GAP) / (k + n), (_HEIGHT - _GAP) / (k + m))
    down, across, along = m * scale / tall, n * scale / wide, k * scale / deep
    x, y = _LEFT + k * scale + _GAP, _TOP + k * scale + _GAP
    a = _Frame(_LEFT, y, down, along, problem.m, problem.k)
    b = _Frame(x, _TOP, along, across, problem.k, problem.n)
    c = _Frame(x, y, down, across, problem.m, problem.n)
    drawn = a.matrix(height, depth) + b.matrix(depth, width) + c.matrix(height, width)
    drawn += _made(tiling, c, index)
    drawn += a.rect("a band", out.top, 0, out.rows, deep) + b.rect("b band", 0, out.left, deep, out.columns)
    drawn += a.rect("a made", out.top, 0, out.rows, step * depth)
    drawn += b.rect("b made", 0, out.left, step * depth, out.columns)
    drawn += a.block("a", one) + b.block("b", two) + c.block("c", out)
    low = y + m * scale + 20
    for kind, frame, top in (("a", a, y - 8), ("b", b, _TOP - 8), ("c", c, low)):
        words = _by(frame.rows, frame.columns)
        left = min(frame.x, _LEFT + _WIDTH + 12 - 8.5 * len(words))
        drawn += _text(f"name {kind}-ink", left, top, f"{kind.upper()}\u2002{words}")
    inside = one.rows * one.columns + two.rows * two.columns
    masked = 1 - inside / (height * depth + depth * width)
    if masked or (out.rows, out.columns) != (height, width):
        low += 20
        drawn += _text("edge", _LEFT, low, "hatched: past the edge, so zero-filled, or in C not stored")
    zeros = f"; {math.floor(100 * masked + 1e-9)}% zero-filled" if masked else ""
    row = min(problem.k, (step + 1) * depth) * problem.itemsize  # bytes of a row of A, up to this step
    lines = [
        _span("rows", out.top, out.rows),
        _span("columns", out.left, out.columns),
        ("", f"Step {step + 1:,} of {tiling.steps:,} loads"),
        ("a", f"{_by(height, depth)} of A"),
        ("b", f"{_by(depth, width)} of B"),
        _span("k =", one.left, one.columns),
        ("small", f"{traffic.bytes_text(inside * problem.itemsize)}{zeros}"),
    ]
    sides = float((out.rows + out.columns) * row), 2.0 * out.rows * out.columns * row
    return drawn, low, lines + _counted("So far, for this tile", "with tiles", *sides)


def _transpose(tiling: Tiling, index: int, config: Config, device: Device) -> tuple[str, float, list[Line]]:
    problem, (height, width) = tiling.problem, tiling.tile
    assert isinstance(problem, PermuteProblem)
    m, n = (max(side, max(problem.m, problem.n) / _THIN) for side in (problem.m, problem.n))
    scale = min((_WIDTH - _GAP) / (n + m), _HEIGHT / max(m, n))
    down, across = m * scale / problem.m, n * scale / problem.n
    x = _Frame(_LEFT, _TOP, down, across, problem.m, problem.n)
    out = x._replace(x=_LEFT + n * scale + _GAP, transposed=True)
    (top, left), (_, row, column) = tiling.corner(index), tiling.place(index)
    again = row * height - top, column * width - left  # rows and columns that the tile before moves too
    drawn = ""
    for frame, kind in ((x, "a"), (out, "c")):
        drawn += frame.matrix(height, width) + _made(tiling, frame, index)
        drawn += frame.rect(kind, top, left, height, width, 3)
        drawn += frame.rect("masked", top, left, again[0], width)
        drawn += frame.rect("masked", top, left, height, again[1])
    low = _TOP + max(m, n) * scale + 20
    drawn += _text("name a-ink", x.x, _TOP - 8, f"x\u2002{_by(problem.m, problem.n)}")
    drawn += _text("name c-ink", out.x, _TOP - 8, f"out\u2002{_by(problem.n, problem.m)}")
    if any(again):
        drawn += _text("edge", _LEFT, low, "hatched: also moved by the tile before")
    lines = [
        _span("rows", top, height),
        _span("columns", left, width),
        ("", f"moves {traffic.bytes_text(height * width * problem.itemsize)}"),
        ("a", "reads along rows of x"),
        ("c", "writes along rows of out"),
        ("small", "in sectors of 32 bytes"),
    ]
    tiled, untiled = traffic.tiled(problem, config, device), traffic.untiled(problem)
    return (
        drawn,
        low,
        lines + _counted("Sectors of the whole copy", "tile by tile", tiled.total, untiled.total),
    )


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
        raise InvalidValueError(f"tile is {tile}: expected 0 to {tiling.tiles - 1}")
    if not 1 <= step <= tiling.steps:
        raise InvalidValueError(f"step is {step}: expected 1 to {tiling.steps}")
    if isinstance(tiling.problem, MatmulProblem):
        heading, (drawn, low, lines) = "A matrix product", _product(tiling, tile, step - 1)
    else:
        heading, (drawn, low, lines) = "A transpose", _transpose(tiling, tile, config, device)
    heading += ", one tile at a time"
    matrix, row, column = tiling.place(tile)
    place = f"row {row:,}, column {column:,}" + f" of matrix {matrix:,}" * (tiling.problem.batch > 1)
    y = _TOP
    for kind, words in [("", f"Tile {tile:,} of 0 to {tiling.tiles - 1:,}"), ("c", place), *lines]:
        y += 25 if not kind and y > _TOP else 19
        drawn += _text(kind if kind == "small" else f"line {kind}-ink", 560, y, words)
    names = textwrap.wrap(f"{tiling.problem.label} on {device.name}: {config}", 96)
    drawn += "".join(_text("small", _LEFT, 56 + 15 * i, words) for i, words in enumerate(names))
    height = math.ceil(max(low, y) + 24)
    size = f'width="800" height="{height}" viewBox="0 0 800 {height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(heading)}">\n'
        f"<style>{_STYLE}</style>\n"
        '<pattern id="masked" width="7" height="7" patternUnits="userSpaceOnUse"><path d="M0 7L7 0" '
        f'stroke-width="1.6"/></pattern>\n{_rect("paper", 0, 0, 800, height)}'
        f"{_text('head', _LEFT, 36, heading)}{drawn}</svg>\n"
    )


def main(
    context: typer.Context,
    sizes: shared.Shape,
    op: shared.SingleOp = "matmul",
    dtype: shared.Dtype = "bfloat16",
    layout: shared.Layout = "NN",
    config: shared.ConfigText = "",
    target: shared.Target = None,
    output: Annotated[Path, typer.Option(help="What to write (.svg).")] = Path("tiling.svg"),
    tile: Annotated[
        int | None, typer.Option(help="Which tile, counted from 0 in the order in which programs take them.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Which K iteration, counted from 1.")] = None,
) -> None:
    """Draw one step of a kernel's tiling: the blocks that a tile loads, and the tiles made before.

    Drawing needs no GPU: without a --target it is for an h200.
    """
    shared.refuse_unread(context, op, layout, sizes)
    shared.check_output(output, ".svg")

    device = shared.device_of("h200" if target is None else target)
    problem = suites.parse_shape(shared.joined(sizes), op, dtype, layout).problem
    assert isinstance(problem, MatmulProblem | PermuteProblem)
    with shared.working("drawing"):
        if config:
            chosen = config_like(config, problem, device)
        else:  # a call's; where that has no tiles to draw, the next one
            plan = pick.plan_for(problem, device, "cached")
            assert plan is not None
            ranked = (plan.config, *waves.ranked(problem, device))
            chosen = next(each for each in ranked if each.family in _DRAWN)
        shared.write(output, picture(problem, chosen, device, tile, step))
    console.print(f"{output}: {problem.label} on {device.name} by {chosen}")


app = command.app_of(
    main,
    "python tuning/picture.py 300x200x150 --output tiling.svg",
    'python tuning/picture.py 300x200x150 --dtype float32 --config "tile BLOCK_M=64 BLOCK_N=64" --tile 19 '
    "--step 5",
)

if __name__ == "__main__":
    command.run(app)
