"""Draw TFLOP/s of tritile and torch by size, from the committed lines.

`python tuning/figures.py` writes both pictures. tuning/pictures/odd_sizes.svg has square products of odd
sizes on an H200. tflops_vs_size.svg has two panels for each GPU: square products above, and drawn products
below, where a dot is a product and a line joins the medians of each octave.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import geometric_mean, median
from typing import Final

import altair as alt
import vl_convert

import benchmark_drawn as drawn
import benchmark_kinds as kinds
from benchmark_kinds import HERE
from benchmark_results import of_cases, stored
from benchmark_tables import Line, read

PICTURE: Final = HERE / "pictures" / "tflops_vs_size.svg"
ODD: Final = HERE / "pictures" / "odd_sizes.svg"
_COLORS: Final = {"tritile": "#0072b2", "torch": "#d55e00"}
TUNED: Final = {
    "aligned": "suite == 'square' and dtype == 'bfloat16' and layout == 'NN'",
    "odd": "suite == 'ragged' and dtype == 'bfloat16' and layout == 'NN' and m % 2 and n % 2 and k % 2"
    " and most < 1.1 * least",
}
DASHED: Final = {"aligned": "", "ragged": " dashed", "odd": " dashed"}
FEWEST: Final = 3  # products of an octave whose median is drawn
WIDTH: Final = 840
_HIGH: Final = 230
_SPACE: Final = 118  # pixels right of a panel, for labels
_GAP: Final = 16  # pixels between the baselines of two labels, at least
_LONGEST: Final = 90  # pixels of a label of an odd size
_STYLE: Final = """
text { font: 13px "Helvetica Neue", Helvetica, Arial, "Liberation Sans", sans-serif; fill: #16202b }
.title { font-size: 15px; font-weight: bold } .axis { font-size: 12px; fill: #4b5866 }
.label { font-weight: bold }
.paper { fill: #ffffff } .grid { stroke: #e3e7ec } .base { stroke: #4b5866 }
.line { fill: none; stroke-width: 2 } .line.tritile { stroke-width: 4 } .dashed { stroke-dasharray: 7 5 }
.dots { fill: none; stroke-width: 3.2; stroke-linecap: round; opacity: 0.28 } .mark { stroke: #ffffff }
path.tritile { stroke: #0072b2 } path.torch { stroke: #d55e00 }
.mark.tritile, text.tritile { fill: #0072b2 } .mark.torch, text.torch { fill: #b54c00 }
@media (prefers-color-scheme: dark) { svg { filter: invert(0.93) hue-rotate(180deg) } }"""

Point = tuple[float, float]  # a size and TFLOP/s, or a place in pixels


@dataclass(frozen=True)
class Series:
    """One library on one kind of size: the points that a line joins, and dots without one."""

    who: str
    kind: str
    line: Sequence[Point]
    dots: Sequence[Point] = ()


@dataclass(frozen=True)
class Panel:
    """Where a panel lies in the picture, and what its axes span: TFLOP/s on a log scale, if `is_log`."""

    left: float
    top: float
    width: float
    height: float
    sizes: Point
    rates: Point
    is_log: bool

    def at(self, point: Point) -> Point:
        """Return the pixels of a size and a rate."""
        (size, rate), (low, high), (least, most) = point, self.sizes, self.rates
        across = math.log(size / low) / math.log(high / low)
        up = (
            math.log(rate / least) / math.log(most / least)
            if self.is_log
            else (rate - least) / (most - least)
        )
        return self.left + self.width * across, self.top + self.height * (1 - up)


def rates(line: Line) -> dict[str, Point]:
    """Return the size of a product, the geometric mean of M, N and K, with the TFLOP/s of either side."""
    size = geometric_mean(line[extent] for extent in kinds.EXTENTS)
    return {"tritile": (size, line["tflops"]), "torch": (size, line["tflops"] / line["ratio_torch"])}


def tuned(cases: list[Line]) -> Iterator[Series]:
    """Yield the series of tuned square products."""
    for kind, condition in TUNED.items():
        found = [rates(line) for line in kinds.picked(cases, condition)]
        for who in ("tritile", "torch"):
            yield Series(who, kind, sorted(point[who] for point in found))


def untuned(lines: Iterable[Line]) -> Iterator[Series]:
    """Yield the series of drawn products."""
    products = [line for line in lines if line["op"] == "matmul"]
    for kind in ("aligned", "ragged"):
        found = [rates(line) for line in products if kinds.kind_of(line)[0] == f"drawn, {kind}"]
        for who in ("tritile", "torch"):
            points = [point[who] for point in found]
            yield Series(who, kind, list(medians(points)), points)


def medians(points: Iterable[Point]) -> Iterator[Point]:
    """Yield the median size and rate of each octave of sizes that has `FEWEST` points or more."""
    octaves: dict[int, list[Point]] = {}
    for point in points:
        octaves.setdefault(math.floor(math.log2(point[0])), []).append(point)
    for _, found in sorted(octaves.items()):
        if len(found) >= FEWEST:
            yield median(size for size, _ in found), median(rate for _, rate in found)


def labels(ends: Sequence[Point], low: float, high: float, right: float) -> list[Point]:
    """Return where the labels of lines begin, by the lines' ends: no two overlap, all lie within the bounds.

    Lines that end near the right side have their labels in a column there, others below their ends.
    """
    found = [(x, min(y + 22, high)) for x, y in ends]
    column = sorted((y, i) for i, (x, y) in enumerate(ends) if x > right - _LONGEST)
    below = low
    for y, i in column:
        found[i] = right + 6, max(y + 4, below)
        below = found[i][1] + _GAP
    above = high
    for _, i in reversed(column):
        found[i] = right + 6, min(found[i][1], above)
        above = found[i][1] - _GAP
    return found


def _text(kind: str, at: Point, words: str, anchor: str = "start") -> str:
    place = f'x="{at[0]:.1f}" y="{at[1]:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{escape(words)}</text>\n'


def _path(kind: str, points: Iterable[Point], between: str = "L", end: str = "") -> str:
    steps = between.join(f"{x:.1f} {y:.1f}{end}" for x, y in points)
    return f'<path class="{kind}" d="M{steps}"/>\n'


def _axes(panel: Panel) -> Iterator[str]:
    (low, high), (least, most) = panel.sizes, panel.rates
    right, bottom = panel.left + panel.width, panel.top + panel.height
    ticks = [10.0**i for i in range(-1, 5)] if panel.is_log else [200.0 * i for i in range(100)]
    for rate in (each for each in ticks if least <= each <= most):
        _, y = panel.at((low, rate))
        yield _path("base" if rate == least else "grid", [(panel.left, y), (right, y)])
        yield _text("axis", (panel.left - 6, y + 4), f"{rate:g}", "end")
    for power in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1):
        x, _ = panel.at((2.0**power, least))
        yield _path("base", [(x, bottom), (x, bottom + 4)])
        if panel.width > 400 or power % 2 == 0:
            yield _text("axis", (x, bottom + 18), f"{2**power}", "middle")


def _series(panel: Panel, all_series: Sequence[Series]) -> Iterator[str]:
    for one in all_series:
        if one.dots:
            yield _path(f"dots {one.who}", map(panel.at, one.dots), "M", "h0")
    for one in all_series:
        yield _path(f"line {one.who}{DASHED[one.kind]}", map(panel.at, one.line))
        for x, y in map(panel.at, one.line):
            yield (
                f'<circle class="mark tritile" cx="{x:.1f}" cy="{y:.1f}" r="5.5"/>\n'
                if one.who == "tritile"
                else (
                    f'<rect class="mark torch" x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7"/>\n'
                )
            )
    ends = [panel.at(one.line[-1]) for one in all_series]
    places = labels(ends, panel.top, panel.top + panel.height, panel.left + panel.width)
    for one, at in zip(all_series, places, strict=True):
        yield _text(f"label {one.who}", at, f"{one.who}, {one.kind}")


def _range(all_series: Iterable[Series], axis: int) -> Point:
    values = [point[axis] for one in all_series for point in (*one.line, *one.dots)]
    return min(values), max(values)


def _panel(panel: Panel, title: str, all_series: Sequence[Series]) -> str:
    words = "TFLOP/s, log scale" if panel.is_log else "TFLOP/s"
    return (
        _text("title", (panel.left - 40, panel.top - 32), title)
        + _text("axis", (panel.left - 40, panel.top - 12), words)
        + "".join(_axes(panel))
        + "".join(_series(panel, all_series))
    )


def _gpu(lines: Sequence[Line]) -> str:
    name: str = lines[0]["env"]["gpu"]
    return name.split()[1]


def _row(top: float, panels: Sequence[tuple[str, Sequence[Series]]], title: str, *, is_log: bool) -> str:
    """Return a panel for each GPU, with the same axes."""
    everything = [one for _, all_series in panels for one in all_series]
    (low, high), (least, most) = _range(everything, 0), _range(everything, 1)
    bounds = (10.0 ** math.floor(math.log10(least)), max(1000, most * 1.05)) if is_log else (0, most * 1.05)
    wide, body = WIDTH / len(panels), ""
    for i, (gpu, all_series) in enumerate(panels):
        box = i * wide + 46, top, wide - 46 - _SPACE, _HIGH
        panel = Panel(*box, (low * 0.9, high * 1.1), bounds, is_log=is_log)
        count = sum(len(one.dots) for one in all_series if one.who == "tritile")
        body += _panel(panel, title.format(gpu=gpu, count=count), all_series)
    return body


def picture(results: Path = HERE / "results") -> str:
    """Return the whole picture as SVG, with a light and a dark scheme."""
    squares, draws = [], []
    for folder in sorted(results.iterdir(), reverse=True):
        cases = [kinds.told(line) for line in of_cases(stored([folder], print))]
        if found := [*tuned(cases)]:
            squares.append((_gpu(cases), found))
        if lines := [x for found in drawn.draws(read(folder / "unseen.jsonl")).values() for x in found]:
            draws.append((_gpu(lines), [*untuned(lines)]))
    body = _row(60, squares, "Square sizes on the {gpu}", is_log=False)
    body += _row(60 + _HIGH + 92, draws, "{count} random sizes on the {gpu}", is_log=True)
    notes = (
        "bfloat16, by the geometric mean of M, N and K. Aligned: N and K are multiples of 8; ragged: not.",
        "Square sizes are row-major; half of the random ones have B transposed. Odd: all three are odd.",
        "A dot is a product, and a line joins the medians of octaves. tritile's tables have the fastest",
        "configs of most square sizes, and of no random one.",
    )
    below = 60 + 2 * _HIGH + 92 + 44
    body += "".join(_text("axis", (6, below + 18 * i), words) for i, words in enumerate(notes))
    height = below + 18 * len(notes) - 2
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    label = "TFLOP/s of tritile and torch by the size of a matrix product"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}">\n'
        f'<style>{_STYLE}</style>\n<rect class="paper" width="{WIDTH}" height="{height}"/>\n{body}</svg>\n'
    )


def odd_sizes() -> str:
    """Return a chart of bars as SVG: square products with odd M, N and K on an H200, by either side."""
    lines = of_cases(stored([kinds.RESULTS], print))
    found = [rates(line) for line in kinds.picked([kinds.told(line) for line in lines], TUNED["odd"])]
    rows = [
        {"size": f"{round(size)}\u00b3", "order": size, "by": who, "rate": round(rate)}
        for point in found
        for who, (size, rate) in point.items()
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
    spec = chart.configure_view(stroke=None).to_dict()
    svg: str = vl_convert.vegalite_to_svg(json.dumps(spec, allow_nan=False))
    return svg if svg.endswith("\n") else f"{svg}\n"
