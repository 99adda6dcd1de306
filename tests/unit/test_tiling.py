"""Tilings as values: every tile once, every block inside, bytes that add up; and the pictures of them."""

import itertools
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from math import prod

import pytest

from tests import commands
from tests.tilings import (
    H200,
    mover,
    product,
    sharing,
    split,
    tile,
    transposed,
    turn_of,
    turns_of,
    warped,
    wave,
    waves,
)  # fmt: skip
from tritile.core.config import Config
from tritile.core.problem import MatmulProblem, PermuteProblem
from tritile.errors import InvalidValueError
from tritile.lab.explain import config_like
from tritile.lab.report import tiling as tilings
from tritile.lab.report.tiling import Place, move_of, page, step_of, svg, tiling_of, total_bytes
from tritile.lab.report.tiling.still import first_tiles
from tritile.lab.report.tiling.texts import notes, size

POSED = {
    "bands": (product("1000x500x300"), tile()),
    "batch": (product("3x1000x500x300"), tile(2)),
    "one group": (product("1000x500x300"), tile(1)),
    "persistent": (product("5000x5000x1000"), warped(True)),
    "persistent batch": (product("3x1500x2000x1000"), warped(True, 2)),
    "flat": (product("1500x1000x1000"), warped(False)),
    "split": (product("500x512x4000"), split(4)),
    "bands of columns": (product("1500x2000x300"), transposed()),
    "bands of columns, batch": (product("3x700x1200x300"), transposed(True, 8)),
    "flat by columns": (product("400x2000x300"), transposed()),
    "transpose": (PermuteProblem.turned(2, 300, 200, 2), mover()),
    "packed": (PermuteProblem.turned(1, 301, 203, 1), mover(4, family="packed")),
}


@pytest.fixture(params=POSED, ids=str)
def tiling(request):
    return tiling_of(*POSED[request.param], H200)


def test_every_part_of_every_tile_is_one_turn(tiling):
    seen = [(tiling.place(turn), tiling.part(turn)) for turn in range(tiling.turns)]
    axes = (range(tiling.matrices), range(tiling.rows), range(tiling.columns), range(tiling.parts))
    assert len(seen) == len(set(seen)) == prod(map(len, axes))
    assert set(seen) == {(Place(i, row, column), part) for i, row, column, part in itertools.product(*axes)}
    assert [turn_of(tiling, *each) for each in seen] == list(range(tiling.turns))


def test_programs_and_waves_share_the_turns_out(tiling):
    by_program = [turn for program in range(tiling.programs) for turn in turns_of(tiling, program)]
    assert sorted(by_program) == list(range(tiling.turns))
    assert all(tiling.program(turn) == by for by in range(tiling.programs) for turn in turns_of(tiling, by))
    found = [wave(tiling, number) for number in range(waves(tiling))]
    assert [turn for each in found for turn in each] == list(range(tiling.turns))
    assert max(map(len, found)) == tiling.at_once <= H200.processors * tiling.resident
    assert all(len({tiling.program(turn) for turn in each}) == len(each) for each in found)


def test_blocks_of_k_are_shared_out(tiling):
    for index in range(0, tiling.tiles, 7):
        blocks = [
            block for part in range(tiling.parts) for block in tiling.k_blocks(part * tiling.tiles + index)
        ]
        assert sorted(blocks) == list(range(tiling.blocks))


@pytest.mark.parametrize("name", ["bands", "batch", "persistent", "split", "bands of columns"])
def test_bytes_of_all_steps_add_up(name):
    problem, config = POSED[name]
    tiling = tiling_of(problem, config, H200)
    loaded = untiled = 0
    for turn in range(tiling.turns):
        steps = [step_of(tiling, turn, step) for step in range(len(tiling.k_blocks(turn)))]
        assert list(itertools.accumulate(step.bytes for step in steps)) == [step.so_far for step in steps]
        assert all(step.c == steps[0].c for step in steps)
        assert all(0 <= step.masked < 1 for step in steps)
        loaded += steps[-1].so_far
        untiled += steps[-1].untiled
    assert (loaded, untiled) == total_bytes(tiling)
    assert untiled == 2 * problem.batch * problem.m * problem.n * problem.k * problem.itemsize


def test_a_ragged_corner_by_hand():
    tiling = tiling_of(product("100x40x70"), tile(), H200)
    assert (tiling.rows, tiling.columns, tiling.blocks) == (2, 2, 3)
    step = step_of(tiling, turn_of(tiling, Place(0, 1, 1)), 2)
    assert step.a == (64, 64, 64, 32, 36, 6)
    assert step.b == (64, 32, 32, 32, 6, 8)
    assert step.c == (64, 32, 64, 32, 36, 8)
    assert step.bytes == 2 * (36 * 6 + 6 * 8)
    assert step.so_far == 2 * 70 * (36 + 8)
    assert step.untiled == 2 * 2 * 70 * 36 * 8
    assert step.masked == pytest.approx(1 - (36 * 6 + 6 * 8) / (64 * 32 + 32 * 32))


def test_bands_share_more_than_rows():
    banded = tiling_of(product("8192x8192x8192"), warped(True), H200)
    shared, plain = sharing(banded, 2), sharing(replace(banded, group=1), 2)
    assert shared == (264, 16, 9)
    assert plain == (264, 4, 43)


def test_the_last_tiles_of_a_transpose_overlap_those_before():
    tiling = tiling_of(PermuteProblem.turned(1, 300, 250, 4), mover(), H200)
    assert (tiling.rows, tiling.columns, tiling.covers) == (10, 8, (32, 32))
    move = move_of(tiling, turn_of(tiling, Place(0, 9, 7)))
    assert move.block[:2] == (300 - 32, 250 - 32)
    assert move.again == (10 * 32 - 300, 8 * 32 - 250)
    assert move_of(tiling, 0).again == (0, 0)


def test_sectors_of_an_aligned_transpose_by_hand():
    move = move_of(tiling_of(PermuteProblem.turned(1, 256, 256, 4), mover(), H200), 5)
    assert move.bytes == 32 * 32 * 4
    assert move.read_sectors == move.written_sectors == 32 * 32 * 4 // 32
    assert move.untiled == 32 * 32  # each element of a row of x in a row of out of its own


def test_transposed_tiles_go_along_bands_of_columns():
    """The order of their kernel: that of out^T."""
    banded, flat = (tiling_of(*POSED[name], H200) for name in ("bands of columns", "flat by columns"))
    assert (banded.rows, banded.columns, banded.group, banded.banded) == (19, 16, 4, (16, 19))
    assert [banded.place(turn)[1:] for turn in range(6)] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]
    assert banded.place(4 * 19) == Place(0, 0, 4)
    assert flat.group == flat.columns == 16
    assert [flat.place(turn) for turn in range(80)] == [Place(0, *divmod(turn, 16)) for turn in range(80)]


@pytest.mark.parametrize(
    "name", ["bands", "one group", "flat", "transpose", "bands of columns", "flat by columns"]
)
def test_rectangles_of_first_tiles_are_those_tiles(name):
    tiling = tiling_of(*POSED[name], H200)
    for count in range(0, tiling.rows * tiling.columns + 1, 3):
        cells = [
            (row + i, column + j)
            for row, column, rows, columns in first_tiles(tiling, count)
            for i in range(rows)
            for j in range(columns)
        ]
        assert sorted(cells) == sorted(tiling.place(turn)[1:] for turn in range(count))


def test_what_is_no_tiling_is_refused():
    problem = product("256x256x256")
    with pytest.raises(InvalidValueError, match="GROUP_M"):
        tiling_of(problem, mover(), H200)
    with pytest.raises(InvalidValueError, match="wanted a MatmulProblem"):
        tiling_of("256", tile(), H200)
    tiling = tiling_of(problem, tile(), H200)
    for number in (-1, tiling.turns):
        with pytest.raises(InvalidValueError, match="tile"):
            tiling.place(number)
    with pytest.raises(InvalidValueError, match="step 9: wanted one of 1 to 8"):
        page(problem, tile(), H200, step=9)
    with pytest.raises(InvalidValueError, match="tile 32: wanted one of 0 to 31"):
        svg(problem, tile(), H200, tile=32)


TF32 = MatmulProblem(1, 1000, 1200, 800, "float32", "float32", precision="tf32")
BY_TMA = Config.of(
    4,
    3,
    "descriptor",
    BLOCK_M=64,
    BLOCK_N=128,
    BLOCK_K=32,
    GROUP_M=8,
    PERSISTENT=False,
    SPLIT_K=1,
    SUBTILES=1,
)


@pytest.mark.parametrize(
    ("posed", "told"),
    [
        (POSED["bands"], "bands of 8 rows"),
        (POSED["one group"], "row by row"),
        (POSED["persistent"], "persistent"),
        (POSED["split"], "4 programs share each tile"),
        (POSED["packed"], "words of 4 bytes"),
        (POSED["bands of columns"], "bands of 4 columns of tiles (GROUP_M), row by row in each"),
        (POSED["bands of columns"], "its share of the tile's columns"),
        (POSED["bands of columns"], "transpose of C is made"),
        (POSED["flat by columns"], "taken row by row: neighbours in time share blocks of A"),
        (POSED["flat"], "taken column by column: neighbours in time share blocks of B"),
        (POSED["flat"], "its share of the tile's rows"),
        ((product("1500x5000x300"), transposed(group=1)), "taken column by column."),
        ((PermuteProblem.turned(1, 300, 250, 4), mover()), "no tile needs masks"),
        ((PermuteProblem.turned(1, 256, 64, 4), mover()), "divide both"),
        ((PermuteProblem.turned(1, 300, 200, 4), mover(m=64, n=64)), "each tile covers 64 \u00d7 52"),
        ((product("500x511x4000"), split(4)), "B is first copied to rows that start on 16 bytes"),
        ((TF32, BY_TMA), "B is first copied so that K is contiguous"),
        ((replace(TF32, precision="ieee", b_layout="column"), tile(n=64)), "B is first copied row by row"),
    ],
)  # fmt: skip
def test_notes_tell_what_is_special(posed, told):
    assert told in " ".join(notes(tiling_of(*posed, H200)))


def test_the_page_names_the_plain_order():
    assert "column by column</button>" in page(*POSED["bands of columns"], H200)


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0 bytes"), (999, "999 bytes"), (1000, "1 KB"), (12250, "12.3 KB")]
)
def test_sizes_in_words(count, shown):
    assert size(count) == shown


def shapes(text, kind):
    root = ElementTree.fromstring(text)
    found = [each for each in root.iter() if each.get("class") == kind]
    return [tuple(float(each.get(side)) for side in ("x", "y", "width", "height")) for each in found]


def test_a_still_picture_shows_the_blocks_where_they_lie():
    problem, config = product("300x200x150"), tile()
    tiling = tiling_of(problem, config, H200)
    turn = turn_of(tiling, Place(0, 4, 6))
    text = svg(problem, config, H200, turn, 5)
    told = step_of(tiling, turn, 4)
    frames = sorted(shapes(text, "matrix"))  # A is leftmost, B above C
    for kind, frame, block, sides in (
        ("a", frames[0], told.a, (300, 150)),
        ("b", frames[1], told.b, (150, 200)),
        ("c", frames[2], told.c, (300, 200)),
    ):
        ((x, y, width, height),) = shapes(text, kind)
        down, across = frame[3] / sides[0], frame[2] / sides[1]
        assert (x - frame[0], y - frame[1]) == pytest.approx((block.left * across, block.top * down), abs=0.1)
        assert width == pytest.approx(max(3, block.columns * across), abs=0.1)
        assert height == pytest.approx(max(3, block.rows * down), abs=0.1)
    assert len(shapes(text, "masked")) == 6
    assert "past the edge, zero-filled" in text
    assert "Step 5 of 5" in text


def test_stills_of_all_kinds_are_whole(tiling):
    text = svg(tiling.problem, tiling.config, H200)
    root = ElementTree.fromstring(text)
    assert root.get("width") == "800"
    for each in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert 0 <= float(each.get("x", 0)) <= 800
        assert float(each.get("x", 0)) + float(each.get("width")) <= 800
        assert float(each.get("y", 0)) + float(each.get("height")) <= float(root.get("height"))
    assert len(text) < 200_000


def run(*arguments):
    return commands.run("picture", *arguments)


@pytest.mark.parametrize(
    ("suffix", "start"), [("html", b"<!doctype html>"), ("svg", b"<svg"), ("png", b"\x89PNG")]
)
@pytest.mark.parametrize("given", [("300x200x150",), ("300x200", "--op", "transpose")], ids=str)
def test_the_command_writes_what_the_suffix_says(tmp_path, suffix, start, given):
    output = tmp_path / f"tiling.{suffix}"
    result = run(*given, "--output", output)
    assert result.exit_code == 0, result.output
    assert output.read_bytes().startswith(start)
    assert "NVIDIA H200" in result.output


def test_the_command_takes_a_config_by_some_of_its_parameters(tmp_path):
    output = tmp_path / "tiling.svg"
    words = "tile BLOCK_M=64 BLOCK_N=64"
    problem = product("300x200x150")
    assert run("300x200x150", "--config", words, "--tile", 3, "--step", 2, "--output", output).exit_code == 0
    assert output.read_text() == svg(problem, config_like(words, problem, H200), H200, 3, 2)


def test_a_page_of_any_problem_is_small_and_asks_for_nothing():
    problem = product("65536x65536x65536")
    text = page(problem, config_like("tile", problem, H200), H200)
    assert len(text) < 100_000
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert sorted(tilings.__all__) == list(tilings.__all__)


def test_a_still_counts_one_and_all_rightly():
    assert "reads 1 sector<" in svg(PermuteProblem.turned(1, 2, 2, 4), mover(), H200)
    assert "reads 1 sectors" not in svg(PermuteProblem.turned(1, 2, 2, 4), mover(), H200)
    nearly = svg(product("1x1x1"), tile(m=64, n=64, k=32), H200)  # of 4,096 elements 4,094 are filled up
    assert "99% zero-filled" in nearly
    assert "100% zero-filled" not in nearly
