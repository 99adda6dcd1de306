"""Draw TFLOP/s of tritile and torch by size, from the committed lines.

`python tuning/figures.py` writes both pictures. tuning/pictures/odd_sizes.svg has square products of odd
sizes on an H200. tflops_vs_size.svg has two panels for each GPU: square products above, and drawn products
below, where a dot is a product and a line joins the medians of each octave. It stays readable in the column
of a telephone.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, Final

import altair as alt
import vl_convert

import benchmark_drawn as drawn
import benchmark_kinds as kinds
from benchmark_kinds import HERE
from benchmark_results import of_cases, stored
from benchmark_tables import Line, read
from report import DARK_STYLE

PICTURE: Final = HERE / "pictures" / "tflops_vs_size.svg"
ODD: Final = HERE / "pictures" / "odd_sizes.svg"
_COLORS: Final = {"tritile": "#0072b2", "torch": "#d55e00"}
TUNED: Final = {
    "aligned": "suite == 'square' and dtype == 'bfloat16' and layout == 'NN'",
    "odd": "suite == 'ragged' and dtype == 'bfloat16' and layout == 'NN' and m % 2 and n % 2 and k % 2"
    " and most < 1.1 * least",
}
_KINDS: Final = {"aligned": "aligned", "odd": "odd or ragged", "ragged": "odd or ragged"}  # in the legend
FEWEST: Final = 3  # products of an octave whose median is drawn
_NOTES: Final = (
    "bfloat16; size is the geometric mean of M, N and K. Aligned:",
    "N and K are multiples of 8; ragged: not. Odd: all three are.",
    "Square sizes are row-major; half of the random ones have B",
    "transposed. A dot is a product; a line joins the medians of",
    "octaves. tritile's tables have the fastest configs of most",
    "square sizes, and of no random one.",
)
_INK, _MUTED, _GRID = "#16202b", "#4b5866", "#e3e7ec"
# At 358 pixels, what a telephone 390 wide leaves beside the margins, letters of 18 are 11 or 12 pixels high.
_FONT_SIZE: Final = 18
_TEXT: Final = {"labelColor": _INK, "labelFontSize": _FONT_SIZE, "titleColor": _MUTED,
    "titleFontSize": _FONT_SIZE, "titleFontWeight": "normal"}  # fmt: skip
_CONFIG: Final[dict[str, Any]] = {
    "aria": False,
    "padding": {"left": 8, "right": 24, "top": 8, "bottom": 8},  # readers' fonts may be wider
    "background": "white",
    "font": "sans-serif",
    "view": {"stroke": None},
    "axis": _TEXT | {"gridColor": _GRID, "domainColor": _MUTED, "tickColor": _MUTED},
    "axisY": {"minExtent": 46},  # panels lie below each other
    "header": {"labelColor": _INK, "labelFontSize": _FONT_SIZE, "title": None},
    "legend": _TEXT
    | {
        "orient": "top",
        "symbolSize": 200,
        "columnPadding": 20,
        "layout": {"top": {"anchor": "start", "direction": "horizontal", "margin": 28}},
    },
    "title": {"color": _INK, "fontSize": _FONT_SIZE, "anchor": "start"},
}

Point = tuple[float, float]  # a size and TFLOP/s
Row = dict[str, Any]


def rates(line: Line) -> dict[str, Point]:
    """Return the size of a product, the geometric mean of M, N and K, with the TFLOP/s of either side."""
    size = geometric_mean(line[extent] for extent in kinds.EXTENTS)
    return {"tritile": (size, line["tflops"]), "torch": (size, line["tflops"] / line["ratio_torch"])}


def rows_of(points: Iterable[Point], who: str, kind: str, mark: str = "line") -> Iterator[Row]:
    """Yield the rows of one library and one kind of size: what a line joins, or dots."""
    for size, rate in points:
        yield {"size": size, "rate": rate, "by": who, "kind": _KINDS[kind], "mark": mark}


def tuned(cases: list[Line]) -> Iterator[Row]:
    """Yield the rows of tuned square products."""
    for kind, condition in TUNED.items():
        found = [rates(line) for line in kinds.picked(cases, condition)]
        for who in _COLORS:
            yield from rows_of(sorted(point[who] for point in found), who, kind)


def untuned(lines: Iterable[Line]) -> Iterator[Row]:
    """Yield the rows of drawn products."""
    products = [line for line in lines if line["op"] == "matmul"]
    for kind in ("aligned", "ragged"):
        found = [rates(line) for line in products if kinds.kind_of(line)[0] == f"random, {kind}"]
        for who in _COLORS:
            points = [point[who] for point in found]
            yield from rows_of(points, who, kind, "dot")
            yield from rows_of(medians(points), who, kind)


def medians(points: Iterable[Point]) -> Iterator[Point]:
    """Yield the median size and rate of each octave of sizes that has `FEWEST` points or more."""
    octaves: dict[int, list[Point]] = {}
    for point in points:
        octaves.setdefault(math.floor(math.log2(point[0])), []).append(point)
    for _, found in sorted(octaves.items()):
        if len(found) >= FEWEST:
            yield median(size for size, _ in found), median(rate for _, rate in found)


def _gpu(lines: Sequence[Line]) -> str:
    name: str = lines[0]["env"]["gpu"]
    return name.split()[1]


def _panels(rows: list[Row], title: str, sizes: Point, y: alt.Y) -> alt.FacetChart:
    """Return a panel for each GPU, with the same axes: one of `sizes` and `y`."""
    order = [*_COLORS]
    by = alt.Legend(title=None, symbolStrokeWidth=0, symbolOpacity=1)
    color = alt.Color("by:N", legend=by, scale=alt.Scale(domain=order, range=[*_COLORS.values()]))
    shape = alt.Shape("by:N", legend=by, scale=alt.Scale(domain=order, range=["circle", "square"]))
    area = alt.Size("by:N", legend=None, scale=alt.Scale(domain=order, range=[90, 45]))
    width = alt.StrokeWidth("by:N", legend=None, scale=alt.Scale(domain=order, range=[4, 2]))
    dashes = alt.Scale(domain=["aligned", "odd or ragged"], range=[[1, 0], [7, 5]])
    dash = alt.StrokeDash("kind:N", legend=alt.Legend(title=None, symbolStrokeWidth=3), scale=dashes)
    axis = alt.Axis(values=[256, 1024, 4096, 16384], format="d", grid=False, labelOverlap=False)
    scale = alt.Scale(type="log", base=2, nice=False, padding=10, domain=[*sizes])
    base = alt.Chart().encode(x=alt.X("size:Q", scale=scale, title=None, axis=axis), y=y, color=color)
    joined = base.transform_filter("datum.mark === 'line'")
    layers = alt.layer(
        base.transform_filter("datum.mark === 'dot'").mark_tick(size=2.2, thickness=2.2, opacity=0.3),
        joined.mark_line().encode(strokeWidth=width, strokeDash=dash),
        joined.mark_point(filled=True, opacity=1).encode(shape=shape, size=area),
        data=alt.InlineData(rows),
    ).properties(width=215, height=190)
    panels = [*dict.fromkeys(row["panel"] for row in rows)]
    return layers.facet(column=alt.Column("panel:N", sort=panels), spacing=44).properties(title=title)


def picture(results: Path = HERE / "results") -> str:
    """Return TFLOP/s by size on each GPU as SVG."""
    squares: list[Row] = []
    draws: list[Row] = []
    for folder in sorted(results.iterdir(), reverse=True):
        cases = [kinds.told(line) for line in of_cases(stored([folder], print))]
        squares += [row | {"panel": _gpu(cases)} for row in tuned(cases)]
        lines = [x for found in drawn.draws(read(folder / "unseen.jsonl")).values() for x in found]
        found = [*untuned(lines)]
        count = sum(row["mark"] == "dot" for row in found) // len(_COLORS)
        draws += [row | {"panel": f"{_gpu(lines)}, {count} sizes"} for row in found]
    linear = alt.Y("rate:Q", title=None)
    powers = alt.Axis(values=[1, 10, 100, 1000], format="d")
    log = alt.Y("rate:Q", title=None, scale=alt.Scale(type="log", nice=True), axis=powers)
    every = [row["size"] for row in squares + draws]
    sizes = min(every), max(every)
    chart = alt.vconcat(
        _panels(squares, "TFLOP/s by size, square", sizes, linear),
        _panels(draws, "TFLOP/s by size, random (log scale)", sizes, log),
        spacing=28,
    ).properties(title=alt.Title([*_NOTES], orient="bottom", offset=16, fontWeight="normal", color=_MUTED))
    return _svg(chart, _CONFIG)


def _svg(chart: alt.TopLevelMixin, config: dict[str, Any]) -> str:
    """Return a chart as SVG, with a light and a dark scheme, and coordinates in hundredths of a pixel."""
    svg: str = vl_convert.vegalite_to_svg(json.dumps(chart.to_dict() | {"config": config}, allow_nan=False))
    svg = re.sub(r"\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}", svg)
    end = svg.index(">") + 1
    svg = f"{svg[:end]}{DARK_STYLE}{svg[end:]}"
    return svg if svg.endswith("\n") else f"{svg}\n"


def _cube(line: Line) -> str:
    """Return the size of a nearly square product as a power: of the extent in the middle, which is odd."""
    extents = sorted(line[extent] for extent in kinds.EXTENTS)
    about = "" if extents[0] == extents[-1] else "\u2248"
    return f"{about}{extents[1]}\u00b3"


def odd_sizes() -> str:
    """Return a chart of bars as SVG: square products with odd M, N and K on an H200, by either side."""
    lines = [kinds.told(line) for line in of_cases(stored([kinds.RESULTS], print))]
    rows = [
        {"size": _cube(line), "order": size, "by": who, "rate": round(rate)}
        for line in kinds.picked(lines, TUNED["odd"])
        for who, (size, rate) in rates(line).items()
    ]
    order = [row["size"] for row in sorted(rows, key=lambda row: float(str(row["order"])))]
    base = alt.Chart(alt.InlineData(rows)).encode(
        x=alt.X("size:N", sort=order, title=None, axis=alt.Axis(labelAngle=0, labelFontSize=20, ticks=False)),
        xOffset=alt.XOffset("by:N", sort=[*_COLORS]),
        y=alt.Y("rate:Q", axis=None),
        color=alt.Color(
            "by:N",
            scale=alt.Scale(domain=[*_COLORS], range=[*_COLORS.values()]),
            legend=alt.Legend(title=None, orient="top-left", labelFontSize=20, symbolSize=300),
        ),
    )
    bars = base.mark_bar()
    numbers = base.mark_text(dy=-10, fontSize=20, fontWeight="bold").encode(text="rate:Q")
    title = alt.Title("TFLOP/s of bf16 products of odd sizes, H200", fontSize=22, anchor="start", offset=16)
    chart = alt.layer(bars, numbers).properties(width=620, height=300, title=title, background="white")
    return _svg(chart, {"view": {"stroke": None}, "font": "sans-serif"})
