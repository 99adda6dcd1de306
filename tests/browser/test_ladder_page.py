"""The page of a climb: whole on a phone and in the dark, and as readable without its picture."""

import pytest

from tritile.lab.ladder.climbing import Climb
from tritile.lab.ladder.reading import Reading
from tritile.lab.ladder.steps import LADDERS
from tritile.lab.report.ladder_picture import draw

ENV = {"gpu": "a GPU", "torch": "2", "triton": "3", "driver": "", "tritile": "0", "time": ""}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    readings = [
        Reading(rung.op, rung.name, rung.new, rung.dtype, rung.yardstick, us=1e5 / 2**i, note="<b>x</b>")
        for ladder in LADDERS.values()
        for i, rung in enumerate(ladder)
    ]
    path = tmp_path_factory.mktemp("page") / "ladder.html"
    draw(Climb(1024, "a GPU", True, ENV, tuple(readings)), path)
    return path


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_and_says_in_words_what_the_picture_shows(visit, page, width, dark):
    shown = visit(page, width=width, dark=dark)
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    assert shown.locator("svg").count() == 1
    names = [rung.name for ladder in LADDERS.values() for rung in ladder]
    assert shown.locator("tbody th").all_inner_texts() == names
    assert shown.locator("td b").count() == 0  # notes are text
    shades = "getComputedStyle(document.body).backgroundColor"
    assert (shown.evaluate(shades) == "rgb(255, 255, 255)") != dark


def test_what_scrolls_is_reached_by_keyboard(visit, page):
    shown = visit(page, width=360)
    for _ in range(3):
        shown.keyboard.press("Tab")
        assert shown.evaluate("document.activeElement.classList.contains('wide')")
        assert shown.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
