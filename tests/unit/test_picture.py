"""Tilings as values: every tile once, blocks that cover the operands; and pictures of them."""

import itertools
import xml.etree.ElementTree as ElementTree

import pytest

from picture import blocks_of, picture, tiling_of
from tests import commands, configs
from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.core.permutation import PermuteProblem
from tritile.errors import InvalidValueError, UnsupportedError
from tritile.tune.suites import parse_shape

H200 = target_device("nvidia-h200")


def product(shape):
    return parse_shape(shape).problem


def tile(group=8):
    return configs.tile(64, 32, 32, group=group)


def mover(group=2):
    return configs.turned(32, 32, group=group)


def warped(persistent):
    return configs.warpgroups(128, 192, 64, 2, 4, persistent=persistent)


POSED = {
    "bands": (product("1000x500x300"), tile()),
    "batch": (product("3x1000x500x300"), tile(2)),
    "one group": (product("1000x500x300"), tile(1)),
    "persistent": (product("3x1500x2000x1000"), warped(True)),
    "flat": (product("1500x1000x1000"), warped(False)),
    "transpose": (PermuteProblem.transposed(2, 300, 200, 2), mover()),
    "transpose in bands": (PermuteProblem.transposed(1, 301, 203, 1), mover(4)),
}


@pytest.fixture(params=POSED, ids=str)
def posed(request):
    return POSED[request.param]


def test_every_tile_is_made_once(posed):
    tiling = tiling_of(*posed, H200)
    wanted = itertools.product(range(tiling.problem.batch), range(tiling.rows), range(tiling.columns))
    assert sorted(map(tiling.place, range(tiling.tiles))) == list(wanted)


def test_ragged_corner_by_hand():
    tiling = tiling_of(product("100x40x70"), tile(), H200)
    assert (tiling.rows, tiling.columns, tiling.steps, tiling.place(3)) == (2, 2, 3, (0, 1, 1))
    a, b, c = blocks_of(tiling, 3, 2)
    assert a == (64, 64, 64, 32, 36, 6)
    assert b == (64, 32, 32, 32, 6, 8)
    assert c == (64, 32, 64, 32, 36, 8)
    flat = tiling_of(*POSED["flat"], H200)  # column by column
    assert flat.group == flat.rows == 12
    assert [flat.place(index)[1:] for index in (0, 1, 11, 12)] == [(0, 0), (1, 0), (11, 0), (0, 1)]


FEW = Config.of(4, 1, "skinny_k", BLOCK_N=32, BLOCK_K=256)
BOX = PermuteProblem.of((12, 30, 50), (50, 600, 1), (1500, 50, 1), 2)


@pytest.mark.parametrize(
    ("problem", "config", "words", "told"),
    [
        (product("256x256x256"), mover(), {}, "GROUP_M"),
        (product("256x256x256"), tile(), {"step": 9}, "step is 9: expected 1 to 8"),
        (product("256x256x256"), tile(), {"tile": -1}, "tile is -1: expected 0 to 31"),
        (product("256x256x256"), tile(), {"tile": 32}, "tile is 32: expected 0 to 31"),
        (BOX, mover(), {}, "copies rows"),
        (product("1x256x256"), FEW, {}, "skinny_k"),
    ],
    ids=["another's config", "step", "no tile", "tile", "rows", "no tiles"],
)
def test_what_has_no_tiles_is_refused(problem, config, words, told):
    with pytest.raises((InvalidValueError, UnsupportedError), match=told):
        picture(problem, config, H200, **words)


def shapes(text, kind):
    """Return x, y, width and height of the rectangles of a class."""
    root = ElementTree.fromstring(text)
    found = [each for each in root.iter() if each.get("class") == kind]
    return [tuple(float(each.get(side)) for side in ("x", "y", "width", "height")) for each in found]


def test_blocks_lie_in_matrices():
    problem, config = product("300x200x150"), tile()
    tiling = tiling_of(problem, config, H200)
    last = tiling.tiles - 1
    text = picture(problem, config, H200, last, 5)
    frames = sorted(shapes(text, "matrix"))  # A is leftmost, B above C
    sides = (300, 150), (150, 200), (300, 200)
    for kind, frame, block, (rows, columns) in zip(
        "abc", frames, blocks_of(tiling, last, 4), sides, strict=True
    ):
        ((x, y, width, height),) = shapes(text, kind)
        down, across = frame[3] / rows, frame[2] / columns
        assert (x - frame[0], y - frame[1]) == pytest.approx((block.left * across, block.top * down), abs=0.1)
        assert width == pytest.approx(max(3, block.columns * across), abs=0.1)
        assert height == pytest.approx(max(3, block.rows * down), abs=0.1)
    assert len(shapes(text, "masked")) == 6
    assert "past the edge, so zero-filled" in text
    assert "Step 5 of 5" in text


def test_pictures_of_all_kinds_are_whole(posed):
    text = picture(*posed, H200)
    root = ElementTree.fromstring(text)
    for each in root.iter("{http://www.w3.org/2000/svg}rect"):
        x, y, width, height = (float(each.get(side)) for side in ("x", "y", "width", "height"))
        assert 0 <= x <= x + width <= 800
        assert 0 <= y <= y + height <= float(root.get("height"))
    assert len(text) < 200_000


def test_command_config_by_parameters(tmp_path):
    output = tmp_path / "tiling.svg"
    words = ("--config", "tile BLOCK_M=64 BLOCK_N=64", "--tile", 3, "--step", 1, "--output", output)
    assert commands.run("picture.py", "300x200x150", *words).exit_code == 0
    assert "BLOCK_M=64 BLOCK_N=64" in " ".join(output.read_text().split())
    assert "Tile 3 of 0 to 19" in output.read_text()


def test_next_config_is_drawn(tmp_path):
    """If a call's own config has no tiles to draw."""
    result = commands.run("picture.py", "1x8192x8192", "--layout", "NT", "--output", tmp_path / "t.svg")
    assert result.exit_code == 0, result.output
    assert "skinny_k" not in result.output
