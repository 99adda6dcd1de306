"""Words of pictures and their pages: none lies upon another or is cut off, at a desk and on a telephone."""

from pathlib import Path

import pytest

from tests.tilings import H200, mover, product, tile, warped
from tritile.core.problem import PermuteProblem
from tritile.lab.report.tiling import page, svg

TUNING = Path(__file__).parents[2] / "tuning"
DRAWN = {
    "ragged": (product("300x200x150"), tile(m=64, n=64), 19, 5),
    "large": (product("8192x8192x8192"), warped(), 7, 2),
    "flat": (product("16x8192x8192"), tile(m=16, n=64), 7, 1),
    "deep": (product("8192x64x500000"), tile(), 64, 2),
    "batched": (product("3x1000x500x300"), tile(), 1, 1),
    "transpose": (PermuteProblem.turned(1, 300, 250, 4), mover(), 3, 1),
    "tall": (PermuteProblem.turned(1, 100000, 30, 2), mover(), 3, 2),
}
BOXES = """selector => [...document.querySelectorAll(selector)].map((each) => {
    const range = document.createRange(); range.selectNodeContents(each);
    const { left, top, right, bottom } = (each.getBBox ? each : range).getBoundingClientRect();
    return [each.textContent, left, top, right, bottom];
}).filter(([text]) => text.trim())"""


def unreadable(opened, selector, width):
    """Return pairs of words that overlap by more than a pixel, and words past the sides."""
    boxes = opened.evaluate(BOXES, selector)
    assert len(boxes) > 1
    found = [text for text, left, _, right, _ in boxes if left < 0 or right > width]
    for i, (text, left, top, right, bottom) in enumerate(boxes):
        for other, left_, top_, right_, bottom_ in boxes[:i]:
            if min(right, right_) - max(left, left_) > 1 and min(bottom, bottom_) - max(top, top_) > 1:
                found.append((other, text))
    return found


@pytest.mark.parametrize("name", ["tiling", "ladder"])
def test_committed_pictures(visit, name):
    assert unreadable(visit(TUNING / "pictures" / f"{name}.svg"), "text", 800) == []


@pytest.mark.parametrize("name", ["tiling", "ladder", "heatmap", "speedups"])
def test_committed_pictures_follow_the_scheme(visit, name):
    opened = visit(TUNING / "pictures" / f"{name}.svg", dark=True)
    light = "fill => fill.match(/\\d+/g).slice(0, 3).reduce((sum, each) => sum + Number(each) / 3, 0)"
    paper, *words = opened.evaluate(
        "[...document.querySelectorAll('svg > rect:first-of-type, text')].filter(e => e.getBBox().width)"
        f".map(e => ({light})(getComputedStyle(e).fill))"
    )
    assert paper < 40
    assert name == "heatmap" or min(words) > 100  # numbers in the heat map lie on cells


@pytest.mark.parametrize("drawn", DRAWN)
def test_stills(visit, tmp_path, drawn):
    problem, config, *place = DRAWN[drawn]
    path = tmp_path / "still.svg"
    path.write_text(svg(problem, config, H200, *place))
    opened = visit(path)
    assert unreadable(opened, "text", 800) == []
    assert opened.evaluate(
        "document.documentElement.getBBox().height <= document.documentElement.viewBox.baseVal.height"
    )


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("drawn", DRAWN)
def test_pages_of_tilings(visit, tmp_path, drawn, width):
    problem, config, *place = DRAWN[drawn]
    path = tmp_path / "page.html"
    path.write_text(page(problem, config, H200, *place), encoding="utf-8")
    opened = visit(path, width=width)
    assert unreadable(opened, "#picture text, #close text", width) == []
    assert opened.evaluate("document.documentElement.scrollWidth") == width
