"""The page of a tiling in a browser: what it shows at each step is what the tiling tells."""

import math
import time

import pytest

from tests.tilings import (
    H200,
    mover,
    product,
    ranged,
    sharing,
    split,
    tile,
    transposed,
    turn_of,
    warped,
    waves,
)  # fmt: skip
from tritile.core.config import Config
from tritile.core.problem import PermuteProblem
from tritile.lab.report.tiling import Place, move_of, page, step_of, tiling_of
from tritile.lab.report.tiling.texts import size, span
from tritile.tune.suites import parse_shape

RAGGED = product("300x200x150"), tile(4)
LARGE = product("8192x8192x8192"), warped()
MOVED = PermuteProblem.turned(1, 300, 250, 4), mover()


@pytest.fixture
def opened(visit, tmp_path):
    """Open the page of a problem and a config; return the page and the tiling."""

    def open_(problem, config, start=(0, 1), **options):
        path = tmp_path / "tiling.html"
        tile, step = start or (None, None)
        path.write_text(page(problem, config, H200, tile, step), encoding="utf-8")
        return visit(path, **options), tiling_of(problem, config, H200)

    return open_


def fact(page, name):
    """Return a number of the list beside the picture, without the small print."""
    return page.locator(f'dd[data-fact="{name}"]').evaluate("each => each.firstChild.textContent")


def rectangle(page, inner, frame, rows, columns):
    """Return (top, left, rows, columns) of a shape, in elements of the matrix drawn as `frame`."""
    read = "each => ['x', 'y', 'width', 'height'].map((side) => Number(each.getAttribute(side)))"
    x, y, width, height = page.locator(inner).evaluate(read)
    fx, fy, fwidth, fheight = page.locator(f'[data-frame="{frame}"]').evaluate(read)
    down, across = fheight / rows, fwidth / columns
    return (y - fy) / down, (x - fx) / across, height / down, width / across


def assert_step(page, tiling, turn, step):
    """Check that text and highlighted blocks are those of a step of a turn."""
    problem, told, place = tiling.problem, step_of(tiling, turn, step), tiling.place(turn)
    steps = len(tiling.k_blocks(turn))
    assert fact(page, "Program") == f"{tiling.program(turn):,}"
    assert fact(page, "Tile (row, column)") == f"({place.row}, {place.column})"
    assert fact(page, "Rows of C") == span(told.c.top, told.c.rows)
    assert fact(page, "Columns of C") == span(told.c.left, told.c.columns)
    assert fact(page, "Step of K") == f"{step + 1} of {steps}"
    assert fact(page, "Loaded now") == size(told.bytes)
    assert page.locator("#compare b").all_text_contents() == [size(told.so_far), size(told.untiled)]
    for inner, frame, block, rows, columns in (
        ("#block-a", "a", told.a, problem.m, problem.k),
        ("#block-b", "b", told.b, problem.k, problem.n),
        ("#tile", "c", told.c, problem.m, problem.n),
    ):
        top, left, height, width = rectangle(page, inner, frame, rows, columns)
        assert (top, left) == pytest.approx((block.top, block.left), abs=0.01)
        assert (height, width) == pytest.approx((block.rows, block.columns), abs=0.01)
    hatched = sum((b.rows < b.height) + (b.columns < b.width) for b in (told.a, told.b, told.c))
    assert page.locator("#live .masked").count() == hatched
    assert page.locator("#close .masked").count() == hatched
    assert ("zero-filled" in page.locator("#saying").text_content()) == bool(told.a.masked or told.b.masked)


def test_buttons_step_through_k_and_programs(opened):
    page, tiling = opened(*RAGGED)
    assert_step(page, tiling, 0, 0)
    for step in range(1, 5):
        page.click("#forward")
        assert_step(page, tiling, 0, step)
    page.click("#forward")  # past the last step: the next program
    assert_step(page, tiling, 1, 0)
    page.click("#back")
    assert_step(page, tiling, 0, 4)
    page.click("#next")
    page.click("#next")
    assert_step(page, tiling, 2, 4)
    page.click("#previous")
    assert_step(page, tiling, 1, 4)


def test_keys_step_too(opened):
    page, tiling = opened(*RAGGED, start=(3, 2))
    for key, turn, step in [
        ("ArrowRight", 3, 2), ("ArrowLeft", 3, 1), ("End", 3, 4), ("Home", 3, 0), ("ArrowDown", 4, 0),
        ("ArrowUp", 3, 0), ("ArrowLeft", 2, 4),
    ]:  # fmt: skip
        page.keyboard.press(key)
        assert_step(page, tiling, turn, step)
    page.keyboard.press("Space")
    assert page.text_content("#play") == "Pause"
    page.keyboard.press("Space")
    assert page.text_content("#play") == "Play"
    page.keyboard.press("w")
    assert page.get_attribute("#all", "aria-pressed") == "true"


def test_sliders_and_clicks_go_anywhere(opened):
    page, tiling = opened(*RAGGED)
    page.locator("#step").fill("4")
    page.locator("#turn").fill("20")
    assert_step(page, tiling, 20, 3)
    assert page.text_content("#turn-of") == f"20 (0 to {tiling.turns - 1})"
    box = page.locator('[data-frame="c"]').bounding_box()
    page.mouse.click(box["x"] + box["width"] * 100 / 200, box["y"] + box["height"] * 280 / 300)
    assert_step(page, tiling, turn_of(tiling, Place(0, 4, 3)), 3)


def test_every_control_is_reached_by_the_keyboard(opened):
    page, _ = opened(*RAGGED)
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id"))
    assert {"one", "all", "play", "back", "forward", "previous", "next", "speed", "step", "turn"} <= set(
        reached
    )


def test_the_ragged_corner_is_hatched_and_named(opened):
    problem, config = RAGGED
    corner = turn_of(tiling_of(problem, config, H200), Place(0, 4, 6))
    page, tiling = opened(problem, config, start=(corner, 5))
    assert_step(page, tiling, corner, 4)
    told = step_of(tiling, corner, 4)
    assert told.a.masked
    assert told.b.masked
    words = page.locator("#close text").all_text_contents()
    assert "zero-filled" in words
    assert "not stored" in words
    assert "past the edge: zero-filled" in page.locator("#legend li").all_text_contents()
    assert fact(page, "Zero-filled now") == f"{math.floor(told.masked * 1000) / 10:g}%"


POSED = [
    RAGGED, LARGE, MOVED,
    (product("3x1000x500x300"), tile(2)),
    (product("3x1500x2000x1000"), warped(group=2)),
    (product("1500x1000x1000"), warped(persistent=False)),
    (product("500x512x4000"), split()),
    (product("500x512x4000"), ranged()),
    (product("1500x2000x300"), transposed()),
    (product("400x2000x300"), transposed()),
    (product("3x700x1200x300"), transposed(True)),
    (PermuteProblem.turned(2, 301, 203, 1), mover(family="packed")),
    (PermuteProblem.turned(2, 71, 31, 2), mover()),
    (PermuteProblem.of((40, 5, 33), (1, 40 * 33, 40), (165, 33, 1), 4), mover()),
]  # fmt: skip


@pytest.mark.parametrize(("problem", "config"), POSED, ids=lambda value: getattr(value, "label", None))
def test_the_page_knows_every_tile_and_what_each_turn_does(opened, problem, config):
    page, tiling = opened(problem, config)
    turns = range(0, tiling.turns, max(1, tiling.turns // 2000))
    asked = f"{list(turns)}.map((turn) => [...Object.values(tiling.place(turn)), tiling.programOf(turn)])"
    assert page.evaluate(asked) == [[*tiling.place(turn), tiling.program(turn)] for turn in turns]
    (assert_steps if problem.op == "matmul" else assert_moves)(page, tiling)
    page.click("#all")
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    shown = min(3, waves(tiling) - 1) + 1
    assert page.text_content("#turn-of") == f"{shown} of {waves(tiling)}"


def assert_steps(page, tiling):
    for turn in {0, tiling.turns // 3, tiling.turns - 1}:
        told = [step_of(tiling, turn, step) for step in range(len(tiling.k_blocks(turn)))]
        steps = f"Array.from({{length: tiling.stepsOf({turn})}}, (_, s) => tiling.stepOf({turn}, s))"
        shown = page.evaluate(steps)
        for matrix in "abc":
            assert [tuple(each[matrix].values()) for each in shown] == [
                getattr(each, matrix) for each in told
            ]
        for name, other in (("done", "k"), ("bytes", "bytes"), ("soFar", "so_far"), ("untiled", "untiled")):
            assert [each[name] for each in shown] == [getattr(each, other) for each in told]


def assert_moves(page, tiling):
    for turn in range(0, tiling.turns, max(1, tiling.turns // 20)):
        told, shown = move_of(tiling, turn), page.evaluate(f"tiling.moveOf({turn})")
        assert tuple(shown["block"].values()) == told.block
        assert tuple(shown["again"]) == told.again
        assert (shown["ends"], shown["bytes"]) == (told.ends, told.bytes)
        sectors = (shown["read"], shown["written"], shown["untiled"])
        assert sectors == (told.read_sectors, told.written_sectors, told.untiled)


def test_a_wave_shows_what_its_programs_share(opened):
    page, tiling = opened(*LARGE, start=(2 * 132, 40))
    page.click("#all")
    _, rows_of_a, columns_of_b = sharing(tiling, 2)
    assert fact(page, "Wave") == f"3 of {waves(tiling)}"
    assert fact(page, "Blocks loaded") == "264"
    assert fact(page, "Different blocks") == str(rows_of_a + columns_of_b)
    assert fact(page, "Found in L2") == f"{264 - rows_of_a - columns_of_b} of 264"
    rows = page.locator("#wave-a").get_attribute("d").count("M")
    columns = page.locator("#wave-b").get_attribute("d").count("M")
    assert (rows, columns) == (rows_of_a, columns_of_b)
    banded = page.locator("#together").get_attribute("d")
    page.click("#plain")  # row by row
    assert fact(page, "Different blocks") == "47"
    assert page.locator("#together").get_attribute("d") != banded
    page.click("#next")
    assert fact(page, "Wave") == f"4 of {waves(tiling)}"
    page.click("#one")
    place = tiling.place(3 * 132)
    assert fact(page, "Tile (row, column)") == f"({place.row}, {place.column})"


def test_a_tile_of_a_transpose_is_read_and_then_written(opened):
    problem, config = MOVED
    corner = turn_of(tiling_of(problem, config, H200), Place(0, 9, 7))
    page, tiling = opened(problem, config, start=(corner, 1))
    told = move_of(tiling, corner)
    block = told.block
    assert page.locator(".now").get_attribute("id") == "block-x"
    assert fact(page, "Rows of x") == span(block.top, block.rows)
    assert fact(page, "Sectors read") == f"{told.read_sectors:,}"
    assert (
        fact(page, "Moved twice") == f"its first {told.again[0]} rows and its first {told.again[1]} columns"
    )
    assert page.locator(".again").count() == 4
    inside = rectangle(page, "#block-x", "x", problem.m, problem.n)
    assert inside == pytest.approx((block.top, block.left, block.rows, block.columns), abs=0.01)
    page.keyboard.press("ArrowRight")
    assert page.locator(".now").get_attribute("id") == "block-out"
    inside = rectangle(page, "#block-out", "out", problem.n, problem.m)
    assert inside == pytest.approx((block.left, block.top, block.columns, block.rows), abs=0.01)
    assert page.locator("#compare b").all_text_contents() == [
        f"{told.written_sectors:,}",
        f"{told.untiled:,}",
    ]


def test_it_plays_by_itself_unless_motion_is_unwanted(opened):
    page, _ = opened(*RAGGED, start=None)
    assert page.text_content("#play") == "Pause"
    page.wait_for_function("tiling.state.turn * 5 + tiling.state.step >= 2", timeout=10_000)
    page.click("#play")
    stopped = page.evaluate("[tiling.state.turn, tiling.state.step]")
    page.wait_for_timeout(700)
    assert page.evaluate("[tiling.state.turn, tiling.state.step]") == stopped
    page.emulate_media(reduced_motion="reduce")
    page.reload()
    assert page.text_content("#play") == "Play"
    page.wait_for_timeout(700)
    assert page.evaluate("[tiling.state.turn, tiling.state.step]") == [0, 0]


def test_playing_ends_at_the_last_step(opened):
    page, tiling = opened(product("128x32x64"), tile(), start=(1, 1))
    page.select_option("#speed", "60")
    page.click("#play")
    page.wait_for_function("document.getElementById('play').textContent === 'Play'", timeout=10_000)
    assert_step(page, tiling, tiling.turns - 1, 1)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize(("problem", "config"), [RAGGED, LARGE, MOVED], ids=["ragged", "large", "transpose"])
def test_a_phone_needs_no_sideways_scrolling(opened, problem, config, dark):
    page, _ = opened(problem, config, width=360, height=740, dark=dark)
    for mode in ("#one", "#all"):
        page.click(mode)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        right = (
            "Math.max(...[...document.querySelectorAll('main *')].map(e => e.getBoundingClientRect().right))"
        )
        assert page.evaluate(right) <= 361


def test_dark_mode_is_dark_and_readable(opened):
    page, _ = opened(*RAGGED, dark=True)

    def light(selector, what):
        color = page.evaluate(f"getComputedStyle(document.querySelector('{selector}')).{what}")
        return sum(int(part) for part in color.strip("rgb()").split(",")) / 3

    assert light("body", "backgroundColor") < 40
    assert light("#saying", "color") > 200
    assert light("#picture text", "fill") > 120


HUGE = product("65536x65536x65536"), tile(8)
WIDE = (
    PermuteProblem.turned(1, 65536, 65536, 2),
    Config.of(16, 1, "tile", BLOCK_M=128, BLOCK_N=128, GROUP_M=32),
)


@pytest.mark.parametrize(("problem", "config"), [LARGE, HUGE, WIDE], ids=["large", "huge", "transpose"])
def test_a_large_problem_is_drawn_fast_and_with_few_elements(opened, problem, config):
    page, _ = opened(problem, config)
    for mode in ("#one", "#all"):
        page.click(mode)
        assert page.evaluate("document.querySelectorAll('#picture *').length") < 200
        step = "(() => { const t = performance.now(); for (let i = 0; i < 50; i++) tiling.go(i * 50, i);"
        assert page.evaluate(f"{step} return (performance.now() - t) / 50 }})()") < 50  # milliseconds


def grids(page):
    """Return the lines of each matrix, as paths."""
    read = "every => every.map(each => each.getAttribute('d'))"
    return page.locator('#picture path[stroke="var(--grid)"]').evaluate_all(read)


@pytest.mark.parametrize(
    ("problem", "config"),
    [
        (parse_shape("1000000000000x4096", "permute", "float64").problem, mover()),
        (parse_shape("20000000000x64x64").problem, tile()),
    ],
    ids=["transpose", "product"],
)
def test_the_longest_sides_are_drawn_without_a_line_for_each_tile(opened, problem, config):
    start = time.perf_counter()
    page, tiling = opened(problem, config)
    assert fact(page, "Tile (row, column)") == "(0, 0)"
    assert time.perf_counter() - start < 5
    assert tiling.rows > 10**8
    assert sum(d.count("M") for d in grids(page)) < 500


def test_lines_lie_between_tiles(opened):
    page, tiling = opened(*RAGGED)
    of_c = grids(page)[2]
    assert (of_c.count("h"), of_c.count("v")) == (tiling.rows - 1, tiling.columns - 1)
    top = rectangle(page, "#tile", "c", 300, 200)[2]
    assert top == pytest.approx(64, abs=0.01)


def test_one_is_told_in_the_singular(opened):
    page, _ = opened(product("8x8x8"), tile(m=16, n=16, k=16))
    page.click("#all")
    assert "1 program runs at a time. At this step it loads 2 blocks" in page.text_content("#saying")
    page, _ = opened(PermuteProblem.turned(1, 2, 2, 4), mover(), start=(0, 2))
    assert page.evaluate("[counted(1, 'sector'), counted(1234, 'sector')]") == ["1 sector", "1,234 sectors"]
    page.click("#all")
    assert "1 program runs at a time, with a tile" in page.text_content("#saying")


def test_less_than_all_is_never_told_as_all(opened):
    page, _ = opened(*RAGGED)
    shares = [1, 0.99999, 0.9995, 0.29, 0.125, 0]
    assert page.evaluate(f"{shares}.map(percent)") == ["100%", "99.9%", "99.9%", "29%", "12.5%", "0%"]
