"""Build the charts of a report. A chart only names its data, which a page or a picture fills in.

The colours come from a theme, light or dark, whose colours colour-blind readers can tell apart.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, Final

import altair as alt

from tritile.core.problem import PRECISIONS
from tritile.lab.report.page.rows import TYPES, Row, Rows, kinds
from tritile.lab.report.results import BASELINES
from tritile.lab.report.summary import geomean

Chart = alt.LayerChart | alt.FacetChart
_RATIOS: Final = [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.85, 1, 1.2, 1.5, 2, 3, 5, 8, 12, 20, 50]
_TENS: Final = [10.0**power for power in range(-16, 10)]
_FEW: Final = [digit * ten for ten in _TENS for digit in (1, 3)]
_PLAIN: Final = ".4~r"  # four digits at most, no zeros at the end
_SHAPES: Final = ["circle", "square", "diamond", "triangle-up", "cross", "triangle-right", "triangle-left"]
_CASE: Final = ("problem:N|problem", "suite:N|suite", "dtype:N|dtype", "layout:N|layout")
_CHOICE: Final = ("config:N|config", "source:N|chosen by")
_MARKED: Final = {"type": TYPES, "precision": PRECISIONS}  # a value has one colour or shape in all figures
_ALL_OPS: Final = 6  # as many ops have a colour of their own; one more colour is for the rest
_FONT: Final = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def _theme(ink: str, muted: str, line: str, accent: str, empty: str, colours: list[str]) -> dict[str, Any]:
    """Return the Vega-Lite config of one theme; the page gives the background."""
    text = {"labelColor": muted, "titleColor": muted, "titleFontWeight": "normal", "titleFontSize": 12}
    return {
        "background": None,
        "padding": {"left": 4, "right": 16, "top": 4, "bottom": 4},  # labels may end beyond an axis
        "font": _FONT,
        "aria": False,
        "view": {"stroke": None},
        "title": {"color": muted},
        "axis": text | {"gridColor": line, "domainColor": line, "tickColor": line, "labelFontSize": 11},
        "legend": text | {
            "orient": "bottom", "labelFontSize": 12, "symbolStrokeWidth": 1.8, "columns": 7,
            "columnPadding": 22, "symbolBaseStrokeColor": ink, "titleLimit": 400,
            "layout": {"bottom": {"direction": "vertical", "anchor": "start", "margin": 10}},
        },
        "range": {"category": colours},
        "text": {"color": ink},
        "style": {
            "mean": {"color": ink},
            "even": {"color": accent, "strokeDash": [5, 4]},
            "roof": {"color": muted, "fontSize": 11},
            "count": {"color": muted, "fontSize": 10},
            "best": {"color": accent},
            "empty": {"color": empty},
        },
    }  # fmt: skip


# The palette of Okabe and Ito, adapted for a contrast of 3:1 or more with each background.
_LIGHT: Final = (
    "#16202b", "#4b5866", "#e3e7ec", "#b3261e", "#b4bec9",
    ["#0072b2", "#d55e00", "#00845f", "#c2408f", "#967000", "#66727e", "#5b3fb0"],
)  # fmt: skip
_DARK: Final = (
    "#eef2f6", "#a9b6c3", "#2b3641", "#ff8a80", "#53606d",
    ["#56b4e9", "#ff9a4d", "#2fc99a", "#ee9fcb", "#f0d24a", "#94a2b1", "#b79bf0"],
)  # fmt: skip
LIGHT: Final = _theme(*_LIGHT)
DARK: Final = _theme(*_DARK)
# The colours of a light picture, white paper first, and those that take their places in the dark.
IN_THE_DARK: Final = dict(
    zip(("white", *_LIGHT[:-1], *_LIGHT[-1]), ("#12181f", *_DARK[:-1], *_DARK[-1]), strict=True)
)


def with_the_dark(svg: str, dark: dict[str, str] = IN_THE_DARK) -> str:
    """Replace the colours of a light picture by those in `dark` where its reader asks for a dark scheme."""
    rules = [f'[{side}="{old}"]{{{side}:{new}}}' for old, new in dark.items() for side in ("fill", "stroke")]
    end = svg.index(">") + 1
    return f"{svg[:end]}<style>@media (prefers-color-scheme: dark){{{''.join(rules)}}}</style>{svg[end:]}"


def _of(op: str, rows: Rows) -> list[Row]:
    return [row for row in rows.results if row["op"] == op]


def _data(name: str) -> alt.Chart:
    return alt.Chart(alt.NamedData(name))


def _legend(field: str, rows: list[Row]) -> dict[str, Any]:
    """Return the title and legend of a field of points, with the values that rows have."""
    title = "type of element" if field == "type" else field
    return {"title": title, "legend": alt.Legend(symbolOpacity=1, values=kinds(rows, field))}


def _colour(rows: list[Row]) -> alt.Color:
    """Encode the type of elements by the theme's colours."""
    return alt.Color("type:N", scale=alt.Scale(domain=TYPES), **_legend("type", rows))


def _tips(*fields: str) -> list[alt.Tooltip]:
    """Return tooltips of fields given as "name:T|title|format"."""
    found = []
    for text in fields:
        field, title, *form = text.split("|")
        tip = alt.Tooltip(field, title=title)
        found.append(tip.format(form[0]) if form else tip)
    return found


def _points(
    base: alt.Chart, place: dict[str, Any], rows: list[Row], field: str, numbers: tuple[str, ...]
) -> alt.Chart:
    """Draw a point for each row at its place; colour tells the type, shape a field."""
    values = _MARKED[field]
    scale = alt.Scale(domain=values, range=_SHAPES[: len(values)])
    marks = base.mark_point(size=38, strokeWidth=1.4, opacity=0.85)
    case = [tip for tip in _CASE if kinds(rows, tip.partition(":")[0])]  # permutations have no layout
    tips = _tips(case[0], *numbers, *case[1:], *_CHOICE)
    shape = alt.Shape(f"{field}:N", scale=scale, **_legend(field, rows))
    return marks.encode(**place, color=_colour(rows), shape=shape, tooltip=tips)


def _one(axis: str) -> alt.Chart:
    """Draw the line on which both sides are even."""
    return alt.Chart(alt.InlineData([{"one": 1}])).mark_rule(style="even", size=1.5).encode(**{axis: "one:Q"})


def _log(values: Iterable[float | None], room: float = 1.25) -> alt.Scale:
    """Return a scale that holds these values, with room (a factor) beside them, whatever filters leave."""
    found = [value for value in values if value] or [1.0]
    held = alt.DomainUnionWith(unionWith=[min(found) / room, max(found) * room])
    return alt.Scale(type="log", nice=False, padding=4, domain=held)


def _spaced(values: list[Any], **more: Any) -> alt.Axis:
    given = {"format": _PLAIN, "labelOverlap": "greedy", "labelSeparation": 5, **more}
    return alt.Axis(values=values, **given)


def speedups(rows: Rows) -> Chart:
    """Chart each problem's speed-up over each baseline, a band for a suite, the best on top."""
    baseline = alt.param(name="baseline", value="")
    base = (
        _data("results")
        .transform_fold(["torch", *BASELINES], as_=["baseline", "ratio"])
        .transform_filter("isValid(datum.ratio) && (baseline === '' || datum.baseline === baseline)")
        .transform_calculate(
            band="datum.suite + (datum.baseline === 'torch' ? '' : ' / ' + datum.baseline)",
            baseline_us="datum[datum.baseline + '_us']",
            side="datum.ratio < 1 ? 'slower' : 'as fast or faster'",
        )
    )
    lines = alt.Axis(grid=True, bandPosition=0, domain=False, ticks=False)
    band = alt.Y("band:N", title=None, axis=lines, sort=_bands(rows))
    scale = _log([1, *(row[name] for row in rows.results for name in ("torch", *BASELINES))])
    points = _speedup_points(base, band, scale, rows.results)
    layers = _one("x"), points, *_speedup_means(base, band, scale)
    return alt.layer(*layers).add_params(baseline).properties(height=alt.Step(40))


def _bands(rows: Rows) -> list[str]:
    """Return a band for each suite and baseline, the highest geometric mean first."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows.results:
        for name in ("torch", *BASELINES):
            if row[name] is not None:
                found[row["suite"] + ("" if name == "torch" else f" / {name}")].append(row[name])
    return sorted(found, key=lambda band: -geomean(found[band]))


def _speedup_points(base: alt.Chart, band: alt.Y, scale: alt.Scale, rows: list[Row]) -> alt.Chart:
    sides = alt.Scale(domain=["as fast or faster", "slower"], range=["circle", "triangle-down"])
    tips = (
        "baseline:N|baseline",
        "ratio:Q|times as fast|.3f",
        "tritile_us:Q|tritile us|.2f",
        "baseline_us:Q|baseline us|.2f",
    )
    title = "times as fast as the baseline (log scale)"
    return (
        base.transform_window(
            rank="row_number()", sort=[alt.SortField("ratio", "ascending")], groupby=["band"]
        )
        .transform_joinaggregate(all="count()", groupby=["band"])
        .transform_calculate(place="(datum.rank - 0.5) / datum.all")
        .mark_point(size=30, strokeWidth=1.4, opacity=0.9)
        .encode(
            x=alt.X("ratio:Q", title=title, scale=scale, axis=_spaced(_RATIOS, orient="top")),
            y=band,
            yOffset=alt.YOffset("place:Q", scale=alt.Scale(domain=[-0.15, 1.15])),
            color=_colour(rows),
            shape=alt.Shape("side:N", title="speed", scale=sides),
            tooltip=_tips(_CASE[0], *tips, *_CASE[1:], *_CHOICE),
        )
    )


def _speedup_means(base: alt.Chart, band: alt.Y, scale: alt.Scale) -> list[alt.Chart]:
    """Mark each band's geometric mean, and write it at the right, above how many are not slower."""
    means = (
        base.transform_calculate(log="log(datum.ratio)", won="datum.ratio < 1 ? 0 : 1")
        .transform_aggregate(mean="mean(log)", count="count()", won="sum(won)", groupby=["band"])
        .transform_calculate(
            mean="exp(datum.mean)",
            text="format(datum.mean, '.2f') + 'x'",
            share="datum.won + ' of ' + datum.count",
        )
    )
    at = alt.X("mean:Q", scale=scale)
    tips = _tips("band:N|suite", "mean:Q|geometric mean|.3f", "won:Q|as fast or faster", "count:Q|problems")
    ticks = means.mark_tick(thickness=3, size=32, style="mean").encode(x=at, y=band, tooltip=tips)
    beside: dict[str, Any] = {"align": "left", "dx": 8}
    lines: list[tuple[str, dict[str, Any]]] = [
        ("text:N", {"dy": -6, "style": "mean", "fontWeight": "bold"}),
        ("share:N", {"dy": 8, "style": "count"}),
    ]
    right = alt.value("width")
    words = [means.mark_text(**beside, **own).encode(x=right, y=band, text=text) for text, own in lines]
    return [ticks, *words]


def roofline(rows: Rows) -> Chart:
    """Chart products by operations a byte and rate, below the roofs of memory and arithmetic."""
    own = _of("matmul", rows)
    across, up = (_log(row[name] for row in own) for name in ("intensity", "tflops"))
    x = alt.X("intensity:Q", title="operations per byte (log scale)", scale=across, axis=_spaced(_FEW))
    y = alt.Y("tflops:Q", title="TFLOP/s (log scale)", scale=up, axis=_spaced(_FEW))
    numbers = "tflops:Q|TFLOP/s|.1f", "intensity:Q|operations per byte|.1f", "tritile_us:Q|tritile us|.2f"
    base = _data("results").transform_filter("datum.op === 'matmul'")
    points = _points(base, {"x": x, "y": y}, own, "precision", numbers)
    return alt.layer(*_roofs(rows, x, y), points).properties(height=480)


def _roof_name(roof: Row) -> str:
    """Name a roof in two lines: its rate, and the types or precisions that it bounds."""
    real = {"complex64": "float32", "complex128": "float64"}
    names = []
    for label in roof["dtypes"]:
        dtype, _, precision = label.removesuffix("-3m").partition(" ")
        plain = precision in ("", "ieee")
        names.append(re.sub("_e.*", "", real.get(dtype, dtype)) if plain else precision)
    return f"{roof['tflops']:.0f} TFLOP/s\n{', '.join(dict.fromkeys(names))}"


def _roofs(rows: Rows, x: alt.X, y: alt.Y) -> list[alt.Chart]:
    """Draw the roofs; their names stand left of the slope, where no point can be."""
    found = [row["intensity"] for row in _of("matmul", rows)]
    if rows.device is None or not rows.roofs or not found:
        return []
    tbps, high = rows.device.memory_gbps / 1e3, max(found)
    ridges = [roof["tflops"] / tbps for roof in rows.roofs]
    low = min(*found, ridges[0] / 12)  # room for the first name
    lines = [
        {"intensity": at, "tflops": roof["tflops"], "roof": _roof_name(roof)}
        for ridge, roof in zip(ridges, rows.roofs, strict=True)
        for at in (ridge, max(high, ridge))
    ]
    memory = f"memory: {1e3 * tbps:.0f} GB/s"
    slope = [
        {"intensity": at, "tflops": at * tbps, "roof": memory}
        for at in (low, (low * ridges[0]) ** 0.5, ridges[-1])
    ]
    drawn = alt.Chart(alt.InlineData(lines + slope)).mark_line(style="roof", strokeWidth=1.6)
    rise = "atan2(scale('y', 10) - scale('y', 1), scale('x', 10) - scale('x', 1)) * 180 / PI"
    beside = {"align": "right", "dx": -7, "dy": -18, "lineBreak": "\n", "lineHeight": 12}
    names: list[tuple[list[Row], dict[str, Any]]] = [
        (lines[::2], beside),
        (slope[1:2], {"dy": -9, "angle": alt.expr(rise)}),
    ]
    return [drawn.encode(x=x, y=y, detail="roof:N")] + [
        alt.Chart(alt.InlineData(at)).mark_text(style="roof", **moved).encode(x=x, y=y, text="roof:N")
        for at, moved in names
    ]


def bandwidth(rows: Rows) -> Chart:
    """Chart permutations by bytes moved and rate, beside a plain copy of as many bytes."""
    own = _of("permute", rows)
    scale = _log(row["megabytes"] for row in own)
    x = alt.X("megabytes:Q", title="MB read and written (log scale)", scale=scale, axis=_spaced(_FEW))
    y = alt.Y("gbps:Q", title="GB/s", axis=alt.Axis(tickCount=6, format="d"))
    base = _data("results").transform_filter("datum.op === 'permute'")
    rates = "gbps:Q|GB/s|.0f", "copy_gbps:Q|a copy's GB/s|.0f", "of_copy:Q|of the copy|.0%"
    numbers = *rates, "tritile_us:Q|tritile us|.2f"
    points = _points(base, {"x": x, "y": y}, own, "type", numbers)
    copies = base.transform_filter("isValid(datum.copy_gbps)")
    drops = copies.mark_rule(style="roof", opacity=0.4).encode(x=x, y=y, y2="copy_gbps:Q")
    ticks = copies.mark_tick(style="roof", orient="horizontal", size=11, thickness=2, opacity=0.6)
    layers: list[alt.Chart] = [drops, ticks.encode(x=x, y=alt.Y("copy_gbps:Q")), points]
    if rows.device is not None:
        gbps = rows.device.memory_gbps
        top = alt.Chart(alt.InlineData([{"gbps": gbps, "text": f"memory: {gbps:.0f} GB/s"}]))
        text = top.mark_text(style="roof", align="left", dy=-7)
        layers += [
            top.mark_rule(style="roof", strokeWidth=1.6).encode(y=y),
            text.encode(y=y, x=alt.value(4), text="text:N"),
        ]
    return alt.layer(*layers).properties(height=360)


def erring(rows: Rows) -> list[Row]:
    """Return the results whose error can be compared with torch's, the worst beside torch first."""
    own = [row for row in rows.results if row["over"]]
    return sorted(own, key=lambda row: -row["over"])


def accuracy(rows: Rows) -> Chart:
    """Chart products by torch's error and tritile's error over it."""
    base = _data("results").transform_filter("datum.over > 0")
    own = erring(rows)
    found = [row["torch_error"] for row in own] or [1.0]
    errors = _spaced(_TENS if max(found) > 1e3 * min(found) else _FEW, format=".0e")
    ratios = _spaced([ratio for ratio in _RATIOS if ratio not in (0.85, 1.2)])
    across, up = _log(found, room=3), _log([1, *(row["over"] for row in own)])
    x = alt.X("torch_error:Q", title="torch's relative error (log scale)", scale=across, axis=errors)
    y = alt.Y("over:Q", title="tritile's error over torch's (log scale)", scale=up, axis=ratios)
    numbers = "error:Q|tritile's error|.3e", "torch_error:Q|torch's error|.3e", "over:Q|times torch's|.3f"
    points = _points(base, {"x": x, "y": y}, own, "precision", numbers)
    return alt.layer(_one("y"), points).properties(height=340)


def heatmap(rows: Rows) -> Chart:
    """Chart the tiles of one problem: the time of each tile's fastest config over the fastest of all."""
    axes = alt.param(name="axes", value="BLOCK_M (down) by BLOCK_N (across)")
    axis = alt.Axis(grid=False, domain=False, ticks=False, labelAngle=0)
    tips = _tips("y:O|down", "x:O|across", "us:Q|us|.2f", "ratio:Q|times the fastest|.3f",
                 "config:N|fastest config", "configs:Q|configs tried")  # fmt: skip
    place = {"x": alt.X("x:O", title=None, axis=axis), "y": alt.Y("y:O", title=None, axis=axis)}
    shown = {**place, "tooltip": tips}
    base = _data("cells")
    full = base.transform_impute("ratio", key="x", groupby=["y"], value=None)
    missing = full.transform_filter("!isValid(datum.configs)")
    empty = missing.mark_rect(style="empty", filled=False, strokeDash=[3, 3])
    failed = base.transform_filter("!isValid(datum.ratio)").mark_text(text="✕", style="roof")
    works = base.transform_filter("isValid(datum.ratio)").transform_calculate(
        best="datum.ratio === 1",
        digits="datum.ratio > 9.95 ? '.0f' : datum.ratio < 1.006 && !datum.best ? '.3f' : '.2f'",
        text="format(datum.ratio, datum.digits)",
    )
    scale = alt.Scale(type="log", domain=[1, 4], clamp=True, scheme="viridis", reverse=True)
    legend = alt.Legend(
        title="time over the fastest (log scale, 4 and more alike)", values=[1, 1.5, 2, 3, 4], format=_PLAIN
    )
    rects = works.mark_rect(cornerRadius=3).encode(
        **shown, color=alt.Color("ratio:Q", scale=scale, legend=legend)
    )
    ink = alt.condition("datum.ratio > 2.1", alt.value("#ffffff"), alt.value("#101418"))
    texts = works.mark_text(fontSize=11).encode(**shown, text="text:N", color=ink)
    best = works.transform_filter("datum.best")
    ring = best.mark_rect(style="best", filled=False, strokeWidth=3, cornerRadius=3)
    title = alt.TitleParams(text=alt.expr("axes"), anchor="start", fontSize=12, fontWeight="normal")
    layers = [empty.encode(**place), rects, ring.encode(**shown), texts, failed.encode(**shown)]
    return alt.layer(*layers).add_params(axes).properties(height=alt.Step(34), title=title)


def progress(rows: Rows) -> Chart:
    """Chart the best time so far over the best in the end by number of configs, for each search."""
    ops = [op for op, _ in Counter(row["op"] for row in rows.progress).most_common()]
    shown = [*ops[:_ALL_OPS], *["others"] * (len(ops) > _ALL_OPS)]
    thick = alt.Legend(symbolOpacity=1, symbolSize=500, symbolStrokeWidth=2.6)
    colour = alt.Color("shown:N", title="op", scale=alt.Scale(domain=shown), legend=thick)
    counts = alt.Axis(values=[1 << power for power in range(8)])
    ratios = alt.Axis(format=_PLAIN, values=[1, 1.05, 1.1, 1.2, 1.3, 1.5, 1.7, 2])
    scale = alt.Scale(type="log", nice=False, clamp=True, domain=[1, 2])
    x = alt.X(
        "tried:Q", title="configs tried (log scale)", scale=alt.Scale(type="log", nice=False), axis=counts
    )
    y = alt.Y("ratio:Q", title="best so far over the best (log scale)", scale=scale, axis=ratios)
    base = _data("progress").transform_calculate(
        shown=f"indexof({json.dumps(shown)}, datum.op) < 0 ? 'others' : datum.op"
    )
    each = base.mark_line(strokeWidth=0.7, opacity=0.16, interpolate="step-after")
    probs = base.transform_quantile(
        "ratio", probs=[0.5, 0.9], groupby=["tried", "shown"], as_=["prob", "ratio"]
    ).transform_calculate(of="datum.prob < 0.7 ? 'half of them' : '9 of 10'")
    dashes = alt.Scale(domain=["half of them", "9 of 10"], range=[[1, 0], [6, 4]])
    dash = alt.StrokeDash("of:N", title="searches", legend=thick, scale=dashes)
    tips = _tips("shown:N|op", "of:N|of", "tried:Q|after configs", "ratio:Q|at most times the best|.3f")
    lines = probs.mark_line(strokeWidth=2.6, interpolate="step-after")
    hover = probs.mark_point(size=60, opacity=0).encode(x=x, y=y, tooltip=tips, detail="of:N")
    thin = each.encode(x=x, y=y, detail="s:N", color=colour)
    return alt.layer(thin, lines.encode(x=x, y=y, color=colour, strokeDash=dash), hover).properties(
        height=340
    )
