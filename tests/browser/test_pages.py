"""Pages in a browser: that on tilings counts as `tritile.explain` does, the report filters, pictures fit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from picture import blocks_of, tiling_of
from tests.commands import run
from tests.configs import tile
from tritile.core.device import target_device
from tritile.lab import traffic
from tritile.tune.suites import parse_shape

ROOT = Path(__file__).parents[2]
H200 = target_device("nvidia-h200")
SIZES = ("m", "n", "k", "block_m", "block_n", "block_k", "group_m", "itemsize", "at_once")
CASES = [
    (300, 200, 150, 64, 32, 32, 2, 2, 6),
    (1000, 1200, 800, 128, 128, 64, 8, 2, 132),
    (129, 257, 65, 64, 64, 32, 8, 2, 1),
    (256, 256, 256, 64, 64, 32, 1, 2, 132),
]
BOXES = """selector => [...document.querySelectorAll(selector)].map((each) => {
    const { left, top, right, bottom } = each.getBoundingClientRect();
    return [each.textContent, left, top, right, bottom];
}).filter(([text]) => text.trim())"""


@pytest.fixture
def page(visit, tmp_path):
    """Open the interactive part of docs/tiling.md by itself."""

    def open_(**options):
        script = (ROOT / "docs" / "tiling.js").read_text()
        text = f'<!doctype html><meta charset="utf-8"><div id="tiling"></div><script>{script}</script>'
        (tmp_path / "tiling.html").write_text(text, encoding="utf-8")
        return visit(tmp_path / "tiling.html", **options)

    return open_


def typed(page, case):
    """Type sizes and a tile."""
    for name, value in zip(SIZES, case, strict=True):
        page.fill(f'[name="{name}"]', str(value))


def fact(page, name):
    return float(page.get_attribute(f'[data-fact="{name}"]', "data-value"))


def go(page, name, value):
    """Move a slider."""
    page.locator(f"#tiling-{name}").fill(str(value))


def config_of(case):
    _, _, _, block_m, block_n, block_k, group, *_ = case
    return tile(block_m, block_n, block_k, group=group)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_page_counts_and_takes_like_explain(page, case):
    shown, (m, n, k, *_) = page(), case
    typed(shown, case)
    problem = parse_shape(f"{m}x{n}x{k}").problem
    tiling = tiling_of(problem, config_of(case), H200)
    assert fact(shown, "untiled") == traffic.untiled(problem).read
    assert fact(shown, "tiled") == traffic.tiled(problem, config_of(case), H200).read
    assert fact(shown, "unique") == problem.bytes - 2 * m * n
    assert (fact(shown, "tiles"), fact(shown, "steps")) == (tiling.tiles, tiling.steps)
    order = f"Array.from({{ length: {tiling.tiles} }}, (_, i) => tiling.place(tiling.sizes(), i))"
    assert [tuple(place) for place in shown.evaluate(order)] == [
        tiling.place(index)[1:] for index in range(tiling.tiles)
    ]
    for index, step in ((0, 0), (tiling.tiles // 2, tiling.steps // 2), (tiling.tiles - 1, tiling.steps - 1)):
        go(shown, "tile", index)
        go(shown, "step", step)
        a, b, c = blocks_of(tiling, index, step)
        now = shown.evaluate(f"tiling.blocks(tiling.sizes(), {index}, {step})")
        assert [tuple(now[name].values()) for name in "abc"] == [a, b, c]
        assert fact(shown, "loaded") == 2 * (a.rows * a.columns + b.rows * b.columns)
        hatched = sum((block.rows < block.height) + (block.columns < block.width) for block in (a, b, c))
        assert shown.locator("#tiling svg .masked").count() == hatched
        assert ("zero-filled" in shown.text_content("[role=status]")) == bool(hatched)


def test_blocks_of_wave_counted_once(page):
    shown, case = page(), CASES[0]
    typed(shown, case)
    tiling = tiling_of(parse_shape("300x200x150").problem, config_of(case), H200)
    go(shown, "tile", 8)  # of the second six
    places = [tiling.place(index)[1:] for index in range(6, 12)]
    assert fact(shown, "wave") == 12
    assert fact(shown, "different") == len({row for row, _ in places}) + len({column for _, column in places})
    plain = [divmod(index, tiling.columns) for index in range(6, 12)]  # row by row
    assert fact(shown, "plain") == len({row for row, _ in plain}) + len({column for _, column in plain})


def test_buttons_step_through_tiles(page):
    shown = page()
    typed(shown, CASES[0])
    for _ in range(5):
        shown.click('[data-on="step"]')
    assert (shown.input_value("#tiling-tile"), shown.input_value("#tiling-step")) == ("1", "0")
    shown.click('[data-back="step"]')
    assert (shown.input_value("#tiling-tile"), shown.input_value("#tiling-step")) == ("0", "4")


def test_bad_and_large_sizes(page):
    shown = page()
    for value in ("", "0", "-3", "2.5"):
        shown.fill('[name="m"]', value)
        assert shown.text_content("[role=status]") == "Each field takes a whole number of at least 1."
        shown.fill('[name="m"]', "100")
        assert "row 0" in shown.text_content("[role=status]")
    typed(shown, (65536, 65536, 65536, 16, 16, 16, 8, 2, 132))
    go(shown, "tile", 4096 * 4096 - 1)
    assert shown.evaluate("document.querySelectorAll('#tiling svg *').length") < 100


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_tilings_page_fits_screens(page, width):
    shown = page(width=width)
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    heights = shown.evaluate(
        "[...document.querySelectorAll('#tiling text')].map(e => e.getBoundingClientRect().height)"
    )
    assert min(heights) > 10


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize(
    "sizes", [(50000, 1200, 800), (1000, 1200, 50000), (1000000, 1000000, 1000000)], ids=str
)
def test_labels_of_matrices_lie_apart(page, sizes, width):
    shown = page(width=width)
    typed(shown, (*sizes, *CASES[1][3:]))
    assert unreadable(shown, width) == []


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    done = run("report.py", ROOT / "tuning" / "results" / "nvidia-h200", "--output", path)
    assert done.exit_code == 0, done.output
    return path


@pytest.mark.parametrize(("width", "dark"), [(390, False), (1280, True)])
def test_the_report_opens_and_fits(visit, reported, width, dark):
    shown = visit(reported, width=width, dark=dark)
    shown.wait_for_selector("svg text")
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    light = shown.evaluate(
        "getComputedStyle(document.body).color.match(/\\d+/g).reduce((a, b) => a + Number(b), 0)"
    )
    assert (light > 380) == dark
    assert "tritile on NVIDIA H200" in shown.text_content("h1")


POINTS = ".mark-symbol path[aria-roledescription='point']"


def test_report_filters_leave_named(visit, reported):
    shown = visit(reported)
    points = shown.locator(POINTS)
    shown.wait_for_selector("select")
    every, count = points.count(), f'document.querySelectorAll("{POINTS}").length'
    shown.locator("select[name='only_layout']").select_option(label="NT")
    shown.wait_for_function(f"{count} < {every}")
    labels = points.evaluate_all("every => every.map(each => each.getAttribute('aria-label'))")
    assert 0 < len(labels) < every
    lines = shown.locator(".rows tbody tr:visible")
    assert {*lines.evaluate_all("every => every.map(each => each.children[5].textContent)")} == {"NT"}
    assert 0 < lines.count() <= 40
    shown.locator("select[name='only_op']").select_option(label="permute")  # which have no layout
    assert lines.count() == 0
    shown.wait_for_function(f"{count} === 0")


def unreadable(shown, width):
    """Return pairs of words that overlap by more than a pixel, and words past the sides."""
    boxes = shown.evaluate(BOXES, "text")
    assert len(boxes) > 1
    found = [text for text, left, _, right, _ in boxes if left < 0 or right > width]
    for i, (text, left, top, right, bottom) in enumerate(boxes):
        for other, left_, top_, right_, bottom_ in boxes[:i]:
            if min(right, right_) - max(left, left_) > 1 and min(bottom, bottom_) - max(top, top_) > 1:
                found.append((other, text))
    return found


@pytest.mark.parametrize("sizes", ["8192x8192x8192", "16x8192x8192", "8192x64x500000", "3x1000x500x300"])
def test_words_of_pictures_lie_apart(visit, tmp_path, sizes):
    path = tmp_path / "tiling.svg"
    assert run("picture.py", sizes, "--output", path).exit_code == 0
    assert unreadable(visit(path), 800) == []


@pytest.mark.parametrize("width", [358, 570])  # a telephone's, less the margins of a page, and its own
def test_words_of_rates_readable(visit, tmp_path, width):
    picture = (ROOT / "tuning" / "pictures" / "tflops_vs_size.svg").read_text()
    style = f"<style>body {{ margin: 0 }} svg {{ width: {width}px; height: auto }}</style>"
    (tmp_path / "rates.html").write_text(f'<!doctype html><meta charset="utf-8">{style}{picture}')
    shown = visit(tmp_path / "rates.html", width=width)
    assert unreadable(shown, width) == []
    assert min(bottom - top for _, _, top, _, bottom in shown.evaluate(BOXES, "text")) > 10


@pytest.mark.parametrize("name", ["tiling", "speedups", "tflops_vs_size"])
def test_committed_pictures_follow_the_scheme(visit, name):
    for dark in (False, True):
        shown = visit(ROOT / "tuning" / "pictures" / f"{name}.svg", dark=dark)
        filtered = shown.evaluate("getComputedStyle(document.documentElement).filter")
        assert filtered.startswith("invert") == dark


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="make docs installs it")
    path = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", path]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    return path


CLIPPED = """() => [...document.querySelectorAll("pre > code")]
    .filter(each => each.scrollWidth > each.clientWidth && getComputedStyle(each).overflowX !== "auto")
    .map(each => each.textContent.slice(0, 80))"""


@pytest.mark.parametrize("width", [390, 1280])
def test_pages_fit_screens(browser, site, width):
    context = browser.new_context(viewport={"width": width, "height": 900})
    shown, wrong = context.new_page(), {}
    pages = [path for path in site.rglob("*.html") if site / "files" not in path.parents]
    assert {site / "api" / "choice.html", site / "examples" / "tour.html"} <= {*pages}
    for path in pages:
        shown.goto(path.as_uri(), wait_until="domcontentloaded")
        found = shown.evaluate(CLIPPED)
        if shown.evaluate("document.documentElement.scrollWidth") > width:
            found.append("the page itself")
        wrong |= {path.name: found} if found else {}
    context.close()
    assert wrong == {}


def test_search_and_notebook_without_network(browser, site):
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    shown, asked = context.new_page(), []
    shown.on("request", lambda request: asked.append(request.url))
    shown.goto((site / "guides" / "model.html").as_uri())
    shown.click(".md-search__input")
    shown.keyboard.type("quantize")
    shown.wait_for_selector(".md-search-result__link")
    found = shown.eval_on_selector_all(".md-search-result__link", "all => all.map(each => each.href)")
    assert (site / "api" / "quantized_weights.html").as_uri() in found
    shown.goto((site / "examples" / "tour.html").as_uri())
    assert shown.locator(".jp-RenderedSVG").count() == 1
    shown.click("text=The ladder >> nth=-1")
    assert shown.url.split("#")[0] == (site / "ladder.html").as_uri()
    context.close()
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
