"""One step of a tiling as a still picture: SVG, 800 pixels wide, on a light background."""

import math
import textwrap
from typing import Any, NamedTuple

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import MatmulProblem, PermuteProblem
from tritile.lab.report.tiling.order import Tiling, tiling_of
from tritile.lab.report.tiling.page import PAGES, checked_start
from tritile.lab.report.tiling.steps import Block, move_of, step_of
from tritile.lab.report.tiling.texts import by, label, size, span, times, title

_LEFT, _TOP, _WIDTH, _HEIGHT = 24.0, 108.0, 500.0, 430.0  # of the matrices, in pixels
_LEAST_HEIGHT = 450.0  # of the picture: what the words need
_THIN = 7  # no side is drawn thinner than the longest by more than this
_THIN_NOTE = "Thin sides are drawn wider than they are."
_LETTER = 8.5  # pixels of a letter of a matrix's name, in the widest font that may draw it
Area = tuple[float, float, float, float]  # top, left, height and width, in elements


class Shape(NamedTuple):
    """Describe a rectangle in pixels; `kind` selects how it is drawn."""

    kind: str
    x: float
    y: float
    width: float
    height: float


class Word(NamedTuple):
    """Describe a text and where it stands, in pixels."""

    kind: str
    x: float
    y: float
    text: str


class Picture(NamedTuple):
    """Hold what the template draws; `lines` are (kind, text), `bars` (text, number, share of width, kind).

    `ratio` has the second bar by the first.
    """

    shapes: list[Shape]
    words: list[Word]
    lines: list[tuple[str, str]]
    bars: list[tuple[str, str, float, str]]
    bars_title: str
    ratio: float
    height: float


class Frame(NamedTuple):
    """Hold where a matrix is drawn: its first element, and the pixels of a row and of a column.

    `turned`: areas are given by columns and rows.
    """

    x: float
    y: float
    down: float
    across: float
    turned: bool = False

    def shape(self, kind: str, area: Area, least: float = 0) -> Shape:
        """Return a rectangle of elements, at least `least` pixels high and wide."""
        top, left, height, width = area if not self.turned else (area[1], area[0], area[3], area[2])
        sides = max(least, width * self.across), max(least, height * self.down)
        return Shape(kind, self.x + left * self.across, self.y + top * self.down, *sides)

    def block(self, kind: str, block: Block) -> list[Shape]:
        """Return a block, its parts past the edge hatched."""
        top, left, height, width, rows, columns = block
        return [
            self.shape("masked", (top + rows, left, height - rows, width)),
            self.shape("masked", (top, left + columns, rows, width - columns)),
            self.shape(kind, (top, left, rows, columns), 3),
        ]

    def grid(self, rows: int, columns: int, height: int, width: int) -> list[Shape]:
        """Return the lines between blocks as thin rectangles, none where they are under 4 pixels apart."""
        down, across = (self.across, self.down) if self.turned else (self.down, self.across)
        areas: list[Area] = []
        if height * down >= 4:
            areas += [(top, 0, 0, columns) for top in range(height, rows, height)]
        if width * across >= 4:
            areas += [(0, left, rows, 0) for left in range(width, columns, width)]
        return [self.shape("grid", area, 0.8) for area in areas]


def first_tiles(tiling: Tiling, count: int) -> list[tuple[int, int, int, int]]:
    """Cover the first `count` tiles of a matrix by up to three rectangles: row, column, rows, columns."""
    rows, columns = tiling.banded
    band, within = divmod(count, tiling.group * columns)
    first = min(band * tiling.group, rows)
    high = min(rows - first, tiling.group)
    whole, rest = divmod(within, high) if high else (0, 0)
    parts = [(0, 0, first, columns), (first, 0, high, whole), (first, whole, rest, 1)]
    if tiling.by_columns:
        parts = [(column, row, wide, tall) for row, column, tall, wide in parts]
    return [part for part in parts if part[2] and part[3]]


def _sectors(count: int) -> str:
    return "1 sector" if count == 1 else f"{count:,} sectors"


def _scaled(*lengths: int) -> list[float]:
    return [max(length, max(lengths) / _THIN) for length in lengths]


def _made(tiling: Tiling, frame: Frame, turn: int, kind: str) -> list[Shape]:
    """Return the tiles of a matrix that were made before a turn."""
    if tiling.parts > 1:
        return []
    count = turn - tiling.place(turn).matrix * tiling.rows * tiling.columns
    (height, width), problem, found = tiling.covers, tiling.problem, []
    for row, column, rows, columns in first_tiles(tiling, count):
        top, left = row * height, column * width
        tall, wide = min(problem.m - top, rows * height), min(problem.n - left, columns * width)
        found.append(frame.shape(kind, (top, left, tall, wide)))
    return found


def _name(kind: str, x: float, y: float, text: str) -> Word:
    """Return a matrix's name at x, or further left where it would run into the words beside the picture."""
    return Word(f"name {kind}", min(x, _LEFT + _WIDTH + 24 - _LETTER * len(text)), y, text)


def _noted(words: list[Word], x: float, low: float, edge: str, thin: bool) -> float:
    """Add notes under the matrices: about an edge, and on sides drawn wider than they are; return the end."""
    for kind, text in (("edge", edge), ("of", _THIN_NOTE if thin else "")):
        if text:
            low += 20
            words.append(Word(kind, x, low, text))
    return max(low + 24, _LEAST_HEIGHT)


def _product_frames(tiling: Tiling) -> tuple[list[Frame], bool]:
    """Return the frames of A, B and C, and whether some side is drawn wider than it is."""
    (height, width), depth, gap = tiling.covers, tiling.config["BLOCK_K"], 44.0
    tall, wide, deep = tiling.rows * height, tiling.columns * width, tiling.blocks * depth
    m, n, k = _scaled(tall, wide, deep)
    scale = min((_WIDTH - gap) / (k + n), (_HEIGHT - gap) / (k + m))
    down, across, along = m * scale / tall, n * scale / wide, k * scale / deep
    left = _LEFT + (_WIDTH - (k + n) * scale - gap) / 2
    cx, cy = left + k * scale + gap, _TOP + k * scale + gap
    frames = [Frame(left, cy, down, along), Frame(cx, _TOP, along, across), Frame(cx, cy, down, across)]
    return frames, [m, n, k] != [tall, wide, deep]


def _product_shapes(tiling: Tiling, turn: int, step: int, frames: list[Frame]) -> list[Shape]:
    problem, now, (a, b, c) = tiling.problem, step_of(tiling, turn, step), frames
    assert isinstance(problem, MatmulProblem)
    (height, width), depth = tiling.covers, tiling.config["BLOCK_K"]
    tall, wide, deep = tiling.rows * height, tiling.columns * width, tiling.blocks * depth
    shapes: list[Shape] = []
    sizes = (problem.m, problem.k), (problem.k, problem.n), (problem.m, problem.n)
    blocks = ((height, depth), (depth, width), (height, width))
    spans = ((tall, deep), (deep, wide), (tall, wide))
    for frame, inside, block, whole in zip(frames, sizes, blocks, spans, strict=True):
        shapes += [frame.shape("beyond", (0, 0, *whole)), frame.shape("matrix", (0, 0, *inside))]
        shapes += frame.grid(*inside, *block)
    shapes += _made(tiling, c, turn, "had-c")
    x, y = c.x + now.c.left * c.across, c.y + now.c.top * c.down  # of the tile of C
    shapes.append(Shape("band-a", a.x, y, x - a.x, now.a.rows * a.down))
    shapes.append(Shape("band-b", x, b.y, now.b.columns * b.across, y - b.y))
    for k_block in tiling.k_blocks(turn)[:step]:
        shapes.append(a.shape("had-a", (now.a.top, k_block * depth, now.a.rows, depth)))
        shapes.append(b.shape("had-b", (k_block * depth, now.b.left, depth, now.b.columns)))
    return shapes + a.block("a", now.a) + b.block("b", now.b) + c.block("c", now.c)


def _product(tiling: Tiling, turn: int, step: int) -> Picture:
    problem, now, place = tiling.problem, step_of(tiling, turn, step), tiling.place(turn)
    assert isinstance(problem, MatmulProblem)
    frames, thin = _product_frames(tiling)
    a, b, c = frames
    low = c.y + tiling.rows * tiling.covers[0] * c.down + 20
    words = [
        _name("a", a.x, c.y - 8, f"A\u2002{by(problem.m, problem.k)}"),
        _name("b", b.x, b.y - 8, f"B\u2002{by(problem.k, problem.n)}"),
        _name("c", c.x, low, f"C\u2002{by(problem.m, problem.n)}"),
    ]
    masked = now.a.masked or now.b.masked
    filled = f"; {math.floor(100 * now.masked + 1e-9)}% zero-filled" if masked else ""
    matrix = f", matrix {place.matrix:,}" if tiling.matrices > 1 else ""
    lines = [
        ("", f"Program {tiling.program(turn):,} makes"),
        ("c", f"tile ({place.row:,}, {place.column:,}) of C{matrix}"),
        ("small", f"rows {span(now.c.top, now.c.rows)}"),
        ("small", f"columns {span(now.c.left, now.c.columns)}"),
        ("gap", f"Step {step + 1:,} of {len(tiling.k_blocks(turn)):,} loads"),
        ("a", f"{by(now.a.height, now.a.width)} of A"),
        ("b", f"{by(now.b.height, now.b.width)} of B"),
        ("small", f"k = {span(now.a.left, now.a.columns)}"),
        ("small", f"{size(now.bytes)}{filled}"),
    ]
    bars = [
        ("with tiles", size(now.so_far), now.so_far / now.untiled, "good"),
        ("element by element", size(now.untiled), 1.0, "bad"),
    ]
    height = _noted(
        words, a.x, low, "hatched red: past the edge, zero-filled; of C not stored" if masked else "", thin
    )
    shapes = _product_shapes(tiling, turn, step, frames)
    ratio = now.untiled / now.so_far
    return Picture(shapes, words, lines, bars, "Bytes so far, for this tile", ratio, height)


def _permutation_shapes(tiling: Tiling, turn: int, x: Frame, out: Frame) -> list[Shape]:
    problem, move = tiling.problem, move_of(tiling, turn)
    block, (rows, columns) = move.block, move.again
    area: Area = (block.top, block.left, block.rows, block.columns)
    shapes: list[Shape] = []
    for frame, had in ((x, "had-a"), (out, "had-c")):
        shapes.append(frame.shape("matrix", (0, 0, problem.m, problem.n)))
        shapes += frame.grid(problem.m, problem.n, *tiling.covers) + _made(tiling, frame, turn, had)
    for frame, now in ((x, "a"), (out, "c")):
        shapes.append(frame.shape(now, area, 3))
        for tall, wide in ((rows, block.columns if rows else 0), (block.rows if columns else 0, columns)):
            shapes.append(frame.shape("masked", (block.top, block.left, tall, wide)))
    return shapes


def _permutation(tiling: Tiling, turn: int) -> Picture:
    problem, move, place = tiling.problem, move_of(tiling, turn), tiling.place(turn)
    assert isinstance(problem, PermuteProblem)
    gap, turned = 48.0, problem.turns
    m, n = _scaled(problem.m, problem.n)
    scale = min((_WIDTH - gap) / (n + (m if turned else n)), _HEIGHT / (max(m, n) if turned else m))
    down, across = m * scale / problem.m, n * scale / problem.n
    x, left = Frame(_LEFT, _TOP, down, across), _LEFT + n * scale + gap
    out = Frame(left, _TOP, across, down, True) if turned else Frame(left, _TOP, down, across)
    low = _TOP + max(m, n if turned else m) * scale + 20
    sides = (problem.n, problem.m) if turned else (problem.m, problem.n)  # of out
    words = [
        _name("a", x.x, _TOP - 8, f"x\u2002{by(problem.m, problem.n)}"),
        _name("c", out.x, _TOP + (n if turned else m) * scale + 20, f"out\u2002{by(*sides)}"),
    ]
    edge = "hatched: moved by the tile before, too" if any(move.again) else ""
    height = _noted(words, x.x, low, edge, [m, n] != [problem.m, problem.n])
    matrix, block = f" of matrix {place.matrix:,}" if tiling.matrices > 1 else "", move.block
    lines = [
        ("", f"Program {tiling.program(turn):,} moves"),
        ("", f"tile ({place.row:,}, {place.column:,}){matrix}"),
        ("small", f"rows {span(block.top, block.rows)}"),
        ("small", f"columns {span(block.left, block.columns)}"),
        ("gap a", f"reads {_sectors(move.read_sectors)}"),
        ("small", "of 32 bytes, along rows of x"),
        ("c", f"writes {_sectors(move.written_sectors)}"),
        ("small", "along rows of out"),
        ("small", f"{size(move.bytes)} of elements"),
    ]
    ratio = move.untiled / move.written_sectors
    bars = [
        ("tile by tile", f"{move.written_sectors:,}", min(1.0, 1 / ratio), "good"),
        ("row by row of x", f"{move.untiled:,}", min(1.0, ratio), "bad"),
    ]
    shapes = _permutation_shapes(tiling, turn, x, out)
    return Picture(shapes, words, lines, bars, "Sectors written, for this tile", ratio, height)


def svg(
    problem: MatmulProblem | PermuteProblem,
    config: Config,
    device: Device,
    tile: int | None = None,
    step: int | None = None,
) -> str:
    """Draw one step of a tiling as an SVG picture, 800 pixels wide, for documents and slides.

    `tile` numbers turns from 0 in the order in which they start, `step` the steps of a turn from 1; both
    default to the middle one. Raises InvalidValueError as `page` does.
    """
    tiling = tiling_of(problem, config, device)
    turn = tiling.turns // 2 if tile is None else tile
    checked_start(tiling, turn, 1)
    if isinstance(problem, MatmulProblem):
        middle = (len(tiling.k_blocks(turn)) + 1) // 2
        picture = _product(tiling, *checked_start(tiling, turn, middle if step is None else step))
    else:
        picture = _permutation(tiling, checked_start(tiling, turn, 1 if step is None else step)[0])
    subtitle = textwrap.wrap(f"{label(problem)} on {device.name}: {config}", 100)
    told: dict[str, Any] = picture._asdict() | {"subtitle": subtitle, "title": title(tiling)}
    told["ratio"] = times(picture.ratio)
    description = " ".join(text for _, text in picture.lines)
    return PAGES.get_template("tiling.svg").render(description=description, **told)


def png(svg_text: str) -> bytes:
    """Convert a picture to PNG, 1600 pixels wide."""
    import vl_convert

    made: bytes = vl_convert.svg_to_png(svg_text, scale=2)
    return made
