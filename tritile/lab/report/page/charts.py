"""Build the charts of a report. A chart only names its data, which a page or a picture fills in.

The colours come from a theme, light or dark, whose colours colour-blind readers can tell apart.
"""

from typing import Any, Final

import altair as alt

from tritile.lab.report.page.rows import Row, Rows
from tritile.lab.report.results import BASELINES

Chart = alt.LayerChart | alt.FacetChart
_RATIOS: Final = [0.1, 0.2, 0.3, 0.5, 0.7, 0.85, 1, 1.2, 1.5, 2, 3, 5, 8, 12, 20, 50]
_TENS: Final = [10.0**power for power in range(-16, 10)]
_FEW: Final = [digit * ten for ten in _TENS for digit in (1, 3)]
_PLAIN: Final = ".4~g"  # four digits at most, no zeros at the end
_SHAPES: Final = ["circle", "square", "diamond", "triangle-up", "cross", "triangle-right", "triangle-left"]
_CASE: Final = ("problem:N|problem", "suite:N|suite", "dtype:N|dtype", "layout:N|layout")
_CHOICE: Final = ("config:N|config", "source:N|chosen by")
_FIRST: Final = ("bfloat16", "float16", "float32", "float64")  # a dtype has one colour in all figures
_FONT: Final = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def _theme(ink: str, muted: str, line: str, accent: str, empty: str, colours: list[str]) -> dict[str, Any]:
    """Return the Vega-Lite config of one theme; the page gives the background."""
    text = {"labelColor": muted, "titleColor": muted, "titleFontWeight": "normal", "titleFontSize": 12}
    return {
        "background": None,
        "font": _FONT,
        "aria": False,
        "view": {"stroke": None},
        "title": {"color": muted},
        "axis": text | {"gridColor": line, "domainColor": line, "tickColor": line, "labelFontSize": 11},
        "legend": text | {"orient": "bottom", "labelFontSize": 12, "symbolStrokeWidth": 1.8, "columns": 5},
        "range": {"category": colours},
        "text": {"color": ink},
        "style": {
            "mean": {"color": ink},
            "even": {"color": accent, "strokeDash": [5, 4]},
            "roof": {"color": muted, "fontSize": 11},
            "best": {"color": accent},
            "empty": {"color": empty},
        },
    }  # fmt: skip


# The palette of Okabe and Ito, adapted for a contrast of 3:1 or more with each background.
LIGHT: Final = _theme(
    "#16202b", "#4b5866", "#e3e7ec", "#b3261e", "#b4bec9",
    ["#0072b2", "#d55e00", "#00845f", "#c2408f", "#967000", "#66727e", "#5b3fb0"],
)  # fmt: skip
DARK: Final = _theme(
    "#eef2f6", "#a9b6c3", "#2b3641", "#ff8a80", "#53606d",
    ["#56b4e9", "#ff9a4d", "#2fc99a", "#ee9fcb", "#f0d24a", "#c3ccd6", "#b79bf0"],
)  # fmt: skip


def _kinds(rows: list[Row], name: str) -> list[str]:
    """Return the values of a facet (texts or lists of texts) without "", the usual dtypes first."""
    found: set[str] = set()
    for row in rows:
        found |= set(row[name]) if isinstance(row[name], list) else {row[name]}
    return sorted(found - {""}, key=lambda kind: (_FIRST.index(kind) if kind in _FIRST else 99, kind))


def _of(op: str, rows: Rows) -> list[Row]:
    return [row for row in rows.results if row["op"] == op]


def _data(name: str) -> alt.Chart:
    return alt.Chart(alt.NamedData(name))


def _colour(field: str, values: list[str]) -> alt.Color:
    """Encode a field by the theme's colours, in the order of the values."""
    legend = alt.Legend(symbolOpacity=1)
    return alt.Color(f"{field}:N", title=None, scale=alt.Scale(domain=values), legend=legend)


def _tips(*fields: str) -> list[alt.Tooltip]:
    """Return tooltips of fields given as "name:T|title|format"."""
    found = []
    for text in fields:
        field, title, *form = text.split("|")
        tip = alt.Tooltip(field, title=title)
        found.append(tip.format(form[0]) if form else tip)
    return found


def _points(
    base: alt.Chart, place: dict[str, Any], rows: list[Row], field: str, numbers: tuple[str, ...], **mark: Any
) -> alt.Chart:
    """Draw a point for each row at its place; colour and shape tell a field."""
    kinds = _kinds(rows, field)
    shapes = [_SHAPES[i % len(_SHAPES)] for i in range(len(kinds))]
    shape = alt.Shape(f"{field}:N", title=None, scale=alt.Scale(domain=kinds, range=shapes))
    marks = base.mark_point(**{"size": 40, "strokeWidth": 1.4, "opacity": 0.85, **mark})
    case = [tip for tip in _CASE if _kinds(rows, tip.partition(":")[0])]  # permutations have no layout
    tips = _tips(case[0], *numbers, *case[1:], *_CHOICE)
    return marks.encode(**place, color=_colour(field, kinds), shape=shape, tooltip=tips)


def _one(axis: str) -> alt.Chart:
    """Draw the line on which both sides are even."""
    return alt.Chart(alt.InlineData([{"one": 1}])).mark_rule(style="even", size=1.5).encode(**{axis: "one:Q"})


def _log(padding: int = 12) -> alt.Scale:
    return alt.Scale(type="log", nice=False, padding=padding)


def _spaced(values: list[Any]) -> alt.Axis:
    return alt.Axis(values=values, format=_PLAIN, labelOverlap="greedy", labelSeparation=5)


def speedups(rows: Rows) -> Chart:
    """Chart each problem's speed-up over each baseline, a band for a suite, the slowest on top."""
    peer = alt.param(name="peer", value="")
    side = "datum.ratio < 1 ? 'slower' : 'as fast or faster'"
    base = (
        _data("results")
        .transform_fold(["torch", *BASELINES], as_=["peer", "ratio"])
        .transform_filter("isValid(datum.ratio) && (peer === '' || datum.peer === peer)")
        .transform_calculate(
            band="datum.suite + (datum.peer === 'torch' ? '' : ' / ' + datum.peer)",
            peer_us="datum[datum.peer + '_us']",
            side=side,
        )
    )
    lines = alt.Axis(grid=True, bandPosition=0, domain=False, ticks=False)
    band = alt.Y("band:N", title=None, axis=lines)
    layers = (
        _one("x"),
        _speedup_points(base, band, _kinds(rows.results, "dtype")),
        *_speedup_means(base, band),
    )
    return alt.layer(*layers).add_params(peer).properties(height=alt.Step(64))


def _speedup_points(base: alt.Chart, band: alt.Y, dtypes: list[str]) -> alt.Chart:
    sides = alt.Scale(domain=["as fast or faster", "slower"], range=["circle", "triangle-down"])
    tips = (
        "peer:N|peer",
        "ratio:Q|times as fast|.3f",
        "tritile_us:Q|tritile us|.2f",
        "peer_us:Q|peer us|.2f",
    )
    title = "times as fast as the peer (log scale)"
    return (
        base.transform_window(
            rank="row_number()", sort=[alt.SortField("ratio", "ascending")], groupby=["band"]
        )
        .transform_joinaggregate(all="count()", groupby=["band"])
        .transform_calculate(place="(datum.rank - 0.5) / datum.all")
        .mark_point(size=34, strokeWidth=1.4, opacity=0.9)
        .encode(
            x=alt.X("ratio:Q", title=title, scale=_log(), axis=_spaced(_RATIOS)),
            y=band,
            yOffset=alt.YOffset("place:Q", scale=alt.Scale(domain=[-0.08, 1.08])),
            color=_colour("dtype", dtypes),
            shape=alt.Shape("side:N", title=None, scale=sides),
            tooltip=_tips(_CASE[0], *tips, *_CASE[1:], *_CHOICE),
        )
    )


def _speedup_means(base: alt.Chart, band: alt.Y) -> tuple[alt.Chart, alt.Chart]:
    means = (
        base.transform_calculate(log="log(datum.ratio)")
        .transform_aggregate(mean="mean(log)", count="count()", groupby=["band"])
        .transform_calculate(mean="exp(datum.mean)", text="format(datum.mean, '.2f') + 'x'")
    )
    at = alt.X("mean:Q", scale=_log())
    tips = _tips("band:N|suite", "mean:Q|geometric mean|.3f", "count:Q|problems")
    ticks = means.mark_tick(thickness=3, size=44, style="mean").encode(x=at, y=band, tooltip=tips)
    right = means.mark_text(dy=-20, dx=-4, align="right", style="mean", fontWeight="bold")
    return ticks, right.encode(x=alt.value("width"), y=band, text="text:N", tooltip=tips)


def roofline(rows: Rows) -> Chart:
    """Chart products by operations a byte and rate, below the roofs of memory and arithmetic."""
    title = "operations a byte, each operand moved once"
    x = alt.X("intensity:Q", title=title, scale=_log(), axis=_spaced(_FEW))
    y = alt.Y("tflops:Q", title="TFLOP/s", scale=_log(10), axis=_spaced(_FEW))
    numbers = "tflops:Q|TFLOP/s|.1f", "intensity:Q|operations a byte|.1f", "tritile_us:Q|tritile us|.2f"
    base = _data("results").transform_filter("datum.op === 'matmul'")
    points = _points(base, {"x": x, "y": y}, _of("matmul", rows), "suite", numbers, size=38)
    return alt.layer(*_roofs(rows, x, y), points).properties(height=430)


def _roofs(rows: Rows, x: alt.X, y: alt.Y) -> list[alt.Chart]:
    found = [row["intensity"] for row in _of("matmul", rows)]
    if rows.device is None or not rows.roofs or not found:
        return []
    tbps, low, high = rows.device.memory_gbps / 1e3, min(found), max(found)
    lines: list[Row] = []
    for roof in rows.roofs:
        label = f"{', '.join(roof['dtypes'])}: {roof['tflops']:.0f} TFLOP/s"
        ridge = max(low, roof["tflops"] / tbps)
        for at in (ridge, max(high, ridge)):
            lines.append({"intensity": at, "tflops": roof["tflops"], "roof": label})
    ridge, memory = max(low, rows.roofs[-1]["tflops"] / tbps), f"memory: {tbps:.1f} TB/s"
    slope = [
        {"intensity": at, "tflops": at * tbps, "roof": memory} for at in (low, (low * ridge) ** 0.5, ridge)
    ]
    drawn = alt.Chart(alt.InlineData(lines + slope)).mark_line(style="roof", strokeWidth=1.6)
    names: list[tuple[list[Row], dict[str, Any]]] = [
        (lines[1::2], {"dy": -7}),
        (slope[1:2], {"dx": -10, "dy": -6}),
    ]
    return [drawn.encode(x=x, y=y, detail="roof:N")] + [
        alt.Chart(alt.InlineData(at))
        .mark_text(style="roof", align="right", **moved)
        .encode(x=x, y=y, text="roof:N")
        for at, moved in names
    ]


def bandwidth(rows: Rows) -> Chart:
    """Chart permutations by bytes moved and rate, beside a plain copy of as many bytes."""
    x = alt.X("megabytes:Q", title="megabytes read and written", scale=_log(), axis=_spaced(_FEW))
    y = alt.Y("gbps:Q", title="GB/s", axis=alt.Axis(tickCount=6))
    base = _data("results").transform_filter("datum.op === 'permute'")
    rates = "gbps:Q|GB/s|.0f", "copy_gbps:Q|a copy's GB/s|.0f", "of_copy:Q|of the copy|.0%"
    numbers = *rates, "tritile_us:Q|tritile us|.2f"
    points = _points(base, {"x": x, "y": y}, _of("permute", rows), "dtype", numbers)
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


def accuracy(rows: Rows) -> Chart:
    """Chart products by torch's error and tritile's error over it."""
    base = _data("results").transform_filter("datum.error > 0 && datum.torch_error > 0")
    tens, ticks = alt.Axis(values=_TENS, format=".0e"), alt.Axis(values=_RATIOS, format=_PLAIN)
    x = alt.X("torch_error:Q", title="torch's relative error", scale=_log(), axis=tens)
    y = alt.Y("over:Q", title="tritile's error over torch's", scale=_log(), axis=ticks)
    numbers = "error:Q|tritile's error|.3e", "torch_error:Q|torch's error|.3e", "over:Q|times torch's|.3f"
    points = _points(base, {"x": x, "y": y}, _of("matmul", rows), "dtype", numbers)
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
        text="format(datum.ratio, datum.ratio < 9.95 ? '.2f' : '.0f')", best="datum.ratio === 1"
    )
    scale = alt.Scale(type="log", domain=[1, 4], clamp=True, scheme="viridis", reverse=True)
    legend = alt.Legend(title="time over the fastest", values=[1, 1.5, 2, 3, 4], format=_PLAIN)
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
    colour = _colour("op", _kinds(rows.searches, "op"))
    counts = alt.Axis(values=[1 << power for power in range(8)])
    ratios = alt.Axis(format=_PLAIN, values=[1, 1.05, 1.1, 1.2, 1.3, 1.5, 1.7, 2])
    scale = alt.Scale(type="log", nice=False, clamp=True, domain=[1, 2])
    x = alt.X(
        "tried:Q", title="configs tried (log scale)", scale=alt.Scale(type="log", nice=False), axis=counts
    )
    y = alt.Y("ratio:Q", title="best so far over the best", scale=scale, axis=ratios)
    base = _data("progress")
    each = base.mark_line(strokeWidth=0.7, opacity=0.16, interpolate="step-after")
    probs = base.transform_quantile(
        "ratio", probs=[0.5, 0.9], groupby=["tried", "op"], as_=["prob", "ratio"]
    ).transform_calculate(of="datum.prob < 0.7 ? 'half of them' : '9 of 10'")
    dashes = alt.Scale(domain=["half of them", "9 of 10"], range=[[1, 0], [6, 4]])
    dash = alt.StrokeDash("of:N", title=None, legend=alt.Legend(symbolSize=500), scale=dashes)
    tips = _tips("op:N|op", "of:N|of", "tried:Q|after configs", "ratio:Q|at most times the best|.3f")
    lines = probs.mark_line(strokeWidth=2.6, interpolate="step-after")
    hover = probs.mark_point(size=60, opacity=0).encode(x=x, y=y, tooltip=tips, detail="of:N")
    thin = each.encode(x=x, y=y, detail="s:N", color=colour)
    return alt.layer(thin, lines.encode(x=x, y=y, color=colour, strokeDash=dash), hover).properties(
        height=340
    )
