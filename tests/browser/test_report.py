"""The report in a browser: filters, figures, tables, the keyboard, phones and the dark."""

import itertools
import math
import re
from pathlib import Path

import pytest

from tritile.core.device import target_device
from tritile.lab.report.page import document, figures, searches
from tritile.lab.report.results import stored

TUNING = Path(__file__).parents[2] / "tuning"
SVG = ".plot svg"


@pytest.fixture(scope="session")
def rows():
    device = target_device("nvidia-h200")
    lines = stored([TUNING / "results"], pytest.fail)
    store = searches.of_file(TUNING / "trials" / "nvidia-h200-whole.sqlite3.gz", device)
    return searches.gathered(lines, [store], device.name, device)


@pytest.fixture(scope="session")
def report(rows, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(document.html(rows))
    return path


@pytest.fixture
def opened(visit, report):
    def open_report(suffix="", **options):
        page = visit(report, **options)
        if suffix:
            page.goto(report.resolve().as_uri() + suffix)
            page.reload()
        return settled(page)

    return open_report


def settled(page):
    page.wait_for_function("document.querySelectorAll('.plot svg').length && !document.body.ariaBusy")
    return page


def choose(page, name, value):
    page.select_option(f"select[name={name}]", value)
    return settled(page)


def lines_of(page, figure):
    return page.locator(f"#{figure} tbody tr:visible").count()


def points(page, figure):
    return page.locator(f"#{figure} {SVG} g.mark-symbol.role-mark path:visible").count()


def open_tables(page):
    page.evaluate("document.querySelectorAll('details').forEach((it) => { it.open = true; })")


def test_every_figure_is_drawn_with_its_table(opened, rows):
    page = opened()
    assert page.locator(SVG).count() == 6
    assert page.locator("section[id] table caption").count() == 6
    assert page.locator("#count").inner_text() == f"{len(rows.results)} of {len(rows.results)} results"
    assert [page.locator(".told").nth(i).inner_text() for i in range(4)] == figures.headline(rows)
    products = [row for row in rows.results if row["op"] == "matmul"]
    assert points(page, "roofline") == len(products)
    open_tables(page)
    assert lines_of(page, "roofline") == len(products)
    assert page.locator("text=NaN").count() == 0
    assert page.locator(f"#speedups {SVG} text", has_text="square").count() == 1  # text is text


def test_filters_change_counts_figures_tables_and_the_address(opened, rows):
    page = opened()
    open_tables(page)
    choose(page, "suite", "square")
    choose(page, "dtype", "bfloat16")
    own = [row for row in rows.results if (row["suite"], row["dtype"]) == ("square", "bfloat16")]
    assert page.locator("#count").inner_text() == f"{len(own)} of {len(rows.results)} results"
    for figure in ("speedups", "roofline", "accuracy"):
        assert lines_of(page, figure) == len(own)
    assert points(page, "roofline") == points(page, "speedups") == len(own)
    assert page.locator("#bandwidth .plot").is_hidden()
    assert page.locator("#bandwidth .nothing").is_visible()
    mean = math.exp(sum(math.log(row["torch"]) for row in own) / len(own))
    assert page.locator(f"#speedups {SVG} text", has_text=f"{mean:.2f}x").count() == 1
    assert page.evaluate("location.hash") == "#suite=square&dtype=bfloat16"
    page.click("button[type=reset]")
    settled(page)
    assert page.locator("#count").inner_text().startswith(f"{len(rows.results)} of")
    assert page.locator("#bandwidth .plot").is_visible()


def test_a_baseline_leaves_the_problems_that_it_ran(opened, rows):
    page = choose(opened(), "baseline", "inductor")
    own = [row for row in rows.results if row["inductor"] is not None]
    assert page.locator("#count").inner_text().startswith(f"{len(own)} of")
    assert points(page, "speedups") == len(own)
    assert page.locator(f"#speedups {SVG} text", has_text="ragged / inductor").count() == 1


def test_the_address_brings_a_filter_back(opened, rows):
    page = opened("#op=permute")
    own = [row for row in rows.results if row["op"] == "permute"]
    assert page.locator("select[name=op]").input_value() == "permute"
    assert page.locator("#count").inner_text().startswith(f"{len(own)} of")
    page.click("nav a >> nth=2")  # going to a figure keeps it
    assert page.evaluate("location.hash") == "#op=permute"
    choose(page, "op", "")
    assert points(page, "roofline") > 0  # drawn now, and not at first


def test_the_heat_map_shows_the_problem_that_is_chosen(opened, rows):
    page = opened()
    open_tables(page)
    for row in (rows.searches[1], next(row for row in rows.searches if row["op"] == ["permute"])):
        page.select_option("#problem", str(row["s"]))
        settled(page)
        own = [cell for cell in rows.cells if cell["s"] == row["s"]]
        assert lines_of(page, "heatmap") == len(own)
        drawn = page.locator(f"#heatmap {SVG} g.mark-rect.role-mark path").count()
        grid = len({cell["x"] for cell in own}) * len({cell["y"] for cell in own})
        best = sum(cell["ratio"] == 1 for cell in own)
        assert drawn == grid + best  # each place, measured or empty, and the ring
        first = page.locator("#heatmap tbody tr").first.inner_text()
        assert f"{row['best_us']:.2f}" in first
    assert page.locator("#problem option").count() == len(rows.searches)
    choose(page, "op", "permute")
    assert page.locator("#problem option").count() < len(rows.searches)


def test_tables_are_sorted_by_their_heads(opened):
    page = opened()
    open_tables(page)
    head = page.locator("#speedups thead button", has_text="tritile us")
    column = head.evaluate("(it) => it.closest('th').cellIndex")

    def times():
        return [
            float(text)
            for text in page.locator(f"#speedups tbody tr > :nth-child({column + 1})").all_inner_texts()
        ]

    head.click()
    assert head.evaluate("(it) => it.closest('th').ariaSort") == "ascending"
    assert times() == sorted(times())
    head.press("Enter")
    assert head.evaluate("(it) => it.closest('th').ariaSort") == "descending"
    assert times() == sorted(times(), reverse=True)


def test_the_keyboard_reaches_everything(opened, rows):
    page = opened()
    reached = []
    for _ in range(24):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.name || document.activeElement.tagName"))
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    assert reached[0] == "A"
    assert {"op", "suite", "dtype", "layout", "baseline", "SUMMARY"} <= set(reached)
    page.focus("select[name=op]")
    page.keyboard.press("p")
    settled(page)
    assert page.locator("select[name=op]").input_value() == "permute"
    assert not page.locator("#count").inner_text().startswith(f"{len(rows.results)} of")


@pytest.mark.parametrize("dark", [False, True])
def test_on_a_phone_nothing_scrolls_sideways(opened, dark):
    page = opened(width=360, height=740, dark=dark)
    open_tables(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    for figure in page.locator(SVG).all():
        box = figure.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 361
    box = page.locator("#speedups .scroll")
    assert box.evaluate("(it) => it.scrollWidth > it.clientWidth")


def test_figures_follow_the_theme(opened):
    page = opened()
    colour = f"getComputedStyle(document.querySelector('#speedups {SVG} g.role-axis-label text')).fill"
    light = page.evaluate(colour)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"{colour} !== {light!r}")
    settled(page)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 24, 31)"


def test_a_point_names_its_problem(opened):
    page = opened()
    page.locator("#roofline").scroll_into_view_if_needed()
    page.locator(f"#roofline {SVG} g.mark-symbol.role-mark path").first.hover(force=True)
    tip = page.locator("#vg-tooltip-element.visible")
    tip.wait_for()
    assert "config" in tip.inner_text()
    assert "TFLOP/s" in tip.inner_text()


def readable(page):
    """Return what is wrong with the text of the figures: pairs that overlap, and text outside its figure."""
    return page.evaluate("""() => [...document.querySelectorAll(".plot svg")].flatMap((svg) => {
        const within = svg.getBoundingClientRect();
        const found = [...svg.querySelectorAll("text")].filter((text) => {
            const style = getComputedStyle(text);
            return text.textContent && style.opacity !== "0" && style.visibility !== "hidden";
        });
        const boxes = found.map((text) => [text.textContent, text.getBoundingClientRect()]);
        const out = boxes.filter(([, b]) => b.left < within.left - 1 || b.right > within.right + 1
            || b.top < within.top - 1 || b.bottom > within.bottom + 1).map(([text]) => `${text} is cut off`);
        const both = boxes.flatMap(([one, a], i) => boxes.slice(i + 1).filter(([, b]) =>
            Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
            && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3)
            .map(([two]) => `${one} over ${two}`));
        return [...out, ...both];
    })""")


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_no_text_of_figures_overlaps_or_is_cut_off(opened, width):
    page = opened(width=width)
    assert page.locator(f"{SVG} text").count() > 100
    assert readable(page) == []
    page.evaluate(
        "(() => { const [one, two] = document.querySelectorAll('#roofline .role-axis-label text');"
        "two.setAttribute('transform', one.getAttribute('transform')); })()"
    )
    assert len(readable(page)) == 1  # so it does find what overlaps


@pytest.mark.parametrize("dark", [False, True])
def test_no_two_marks_of_legends_look_alike(opened, dark):
    page = opened(dark=dark)
    for figure in figures.FIGURES:
        marks = page.locator(f"#{figure} {SVG} .role-legend-symbol path").evaluate_all(
            "every => every.map((it) => [getComputedStyle(it).stroke, it.getAttribute('d'), "
            "it.getAttribute('stroke-dasharray')])"
        )
        looks = [([int(part) for part in re.findall(r"\d+", colour)], *shape) for colour, *shape in marks]
        alike = [
            (one, two)
            for one, two in itertools.combinations(looks, 2)
            if one[1:] == two[1:] and math.dist(one[0], two[0]) < 50
        ]
        assert alike == [], figure
        assert len(looks) > 1 or figure == "heatmap"
