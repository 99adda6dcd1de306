"""Results as charts: one HTML page of where this GPU gains and loses, its first chart alone, and the ladder.

altair draws, and its own controls filter. Nothing is loaded from the network.
"""

import html
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final

import altair as alt
import vl_convert

from tritile.core.config import Config
from tritile.errors import FileError, UnsupportedError
from tritile.lab.ladder.results import Ladders, unit
from tritile.lab.results import BASELINES, Result, dtype_label, geomean, of_cases, sizes_label
from tritile.lab.traffic import bytes_text

Row = dict[str, Any]
Chart = alt.LayerChart | alt.FacetChart | alt.VConcatChart
FILTERS: Final = {"op": "operation", "dtype": "dtype", "layout": "layout", "suite": "suite"}
_WIDTH: Final = 900
_MOST_LOSSES: Final = 40
_FONT: Final = "system-ui, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_TYPES: Final = ("bfloat16", "float16", "float32", "float64", "complex", "8-bit", "int16 to int64")
_RATIOS: Final = [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.85, 1, 1.2, 1.5, 2, 3, 5, 8, 12, 20, 50]
# The palette of Okabe and Ito, adapted for a contrast of 3:1 or more with each background, and the colours
# that take their places where the reader asks for a dark scheme. Paper, ink, muted, lines, accent, empty.
_LIGHT: Final = ("white", "#16202b", "#4b5866", "#e3e7ec", "#b3261e", "#b4bec9")
_DARK: Final = ("#12181f", "#eef2f6", "#a9b6c3", "#2b3641", "#ff8a80", "#53606d")
_POINTS: Final = ("#0072b2", "#d55e00", "#00845f", "#c2408f", "#967000", "#66727e", "#5b3fb0")
_POINTS_DARK: Final = ("#56b4e9", "#ff9a4d", "#2fc99a", "#ee9fcb", "#f0d24a", "#94a2b1", "#b79bf0")
_PAPER, _INK, _MUTED, _LINE, _ACCENT, _EMPTY = _LIGHT
_LADDER: Final = (_POINTS[0], _POINTS[1], _EMPTY)
_POWERS: Final = [10.0**power for power in range(15)]
_TITLE: Final = {"anchor": "start", "color": _INK, "subtitleColor": _MUTED, "subtitleFontSize": 12}
_TEXT: Final = {"labelColor": _MUTED, "titleColor": _MUTED, "titleFontWeight": "normal"}
_CONFIG: Final[dict[str, Any]] = {
    "background": _PAPER,
    "view": {"stroke": None},
    "title": _TITLE,
    "axis": _TEXT | {"gridColor": _LINE, "domainColor": _LINE, "tickColor": _LINE, "titleFontSize": 12},
    "legend": _TEXT | {
        "orient": "bottom", "columns": 7, "columnPadding": 22, "labelFontSize": 12, "titleLimit": 400,
        "layout": {"bottom": {"direction": "vertical", "anchor": "start", "margin": 10}},
    },
    "range": {"category": list(_POINTS)},
}  # fmt: skip


_STYLE: Final = f"""<meta name="viewport" content="width=device-width"><style>
body {{ font: 14px/1.5 {_FONT}; margin: 16px; background: {_PAPER}; color: {_INK}; color-scheme: light dark }}
h1 {{ font-size: 20px }} p {{ margin: 2px 0 }} svg {{ max-width: none }}
.vega-embed, .chart-wrapper {{ display: flex !important; flex-direction: column; overflow-x: auto }}
.vega-bindings {{ order: -1; padding: 12px 0 }} .vega-bind {{ display: inline-block; margin-right: 14px }}
@media (prefers-color-scheme: dark) {{ body {{ background: {_DARK[0]}; color: {_DARK[1]} }} }}
</style>"""

# Exchanges the colours of an SVG picture where its reader asks for a dark scheme.
_RULES: Final = "".join(
    f'[{side}="{light}"]{{{side}:{dark}}}'
    for light, dark in zip((*_LIGHT, *_POINTS), (*_DARK, *_POINTS_DARK), strict=True)
    for side in ("fill", "stroke")
)
_DARK_STYLE: Final = f"<style>@media (prefers-color-scheme: dark){{{_RULES}}}</style>"


def rows_of(results: Iterable[Result], gpu: str) -> list[Row]:
    """Return the last result of each case on a GPU as a row of a chart: one for each baseline."""
    found = []
    for line in of_cases(line for line in results if line["env"]["gpu"] == gpu):
        own = {
            "op": line["op"],
            "suite": line["suite"] or "(no name)",
            "dtype": dtype_label(line),
            "layout": line["layout"] or "none",
            "type": _type_of(line["dtype"]),
            "problem": sizes_label(line),
            "tritile_us": line["tritile_us"],
            "config": str(Config.from_dict(line["config"])),
            "source": line["plan_source"],
        }
        # The page holds its data inside a script element, which no text of a file may end.
        own = {name: v.replace("<", "\u2039") if isinstance(v, str) else v for name, v in own.items()}
        for name in ("torch", *BASELINES):
            if line.get(f"ratio_{name}") is not None:
                band = own["suite"] + ("" if name == "torch" else f" / {name}")
                times = {"ratio": line[f"ratio_{name}"], "baseline_us": line[f"{name}_us"]}
                found.append(own | times | {"baseline": name, "band": band})
    return found


def _type_of(dtype: str) -> str:
    if dtype.startswith("complex"):
        return "complex"
    if dtype.startswith(("float8", "int8", "uint8", "bool")):
        return "8-bit"
    return dtype if dtype in _TYPES else "int16 to int64"


def _tips(*fields: str) -> list[alt.Tooltip]:
    """Return tooltips of fields given as "name:T|title|format"."""
    found = []
    for text in fields:
        field, title, *form = text.split("|")
        tip = alt.Tooltip(field, title=title)
        found.append(tip.format(form[0]) if form else tip)
    return found


_ROW_TIPS: Final = (
    "problem:N|problem", "ratio:Q|times as fast|.3f", "tritile_us:Q|tritile us|.2f",
    "baseline:N|baseline", "baseline_us:Q|baseline us|.2f", "suite:N|suite", "dtype:N|dtype",
    "layout:N|layout", "config:N|config", "source:N|chosen by",
)  # fmt: skip


def speedups(rows: list[Row], base: alt.Chart | None = None) -> Chart:
    """Chart each problem's speed-up over each baseline: a band a suite, the highest mean on top.

    `base` draws rows that filters leave; by default all. Raises FileError where there is no row.
    """
    if not rows:
        raise FileError("there are no results of this GPU: tritile bench --output DIR makes them")
    base = alt.Chart(alt.InlineData(rows)) if base is None else base
    bands: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        bands[row["band"]].append(row["ratio"])
    order = sorted(bands, key=lambda band: -geomean(bands[band]))
    ratios = [1.0, *(row["ratio"] for row in rows)]  # of all rows: the axis stays whatever filters leave
    scale = alt.Scale(type="log", nice=False, domain=[min(ratios) / 1.25, max(ratios) * 1.25])
    axis = alt.Axis(values=_RATIOS, format=".4~r", labelOverlap="greedy", labelSeparation=5, orient="top")
    x = alt.X("ratio:Q", scale=scale, axis=axis, title="times as fast as the baseline (log scale)")
    even = alt.Chart(alt.InlineData([{"one": 1}])).mark_rule(color=_ACCENT, strokeDash=[5, 4], size=1.5)
    lines = alt.Axis(grid=True, bandPosition=0, domain=False, ticks=False)
    y = alt.Y("band:N", title=None, axis=lines, sort=order)
    sides = alt.Scale(domain=["as fast or faster", "slower"], range=["circle", "triangle-down"])
    points = (
        base.transform_window(rank="row_number()", sort=[alt.SortField("ratio")], groupby=["band"])
        .transform_joinaggregate(all="count()", groupby=["band"])
        .transform_calculate(
            place="(datum.rank - 0.5) / datum.all", side="datum.ratio < 1 ? 'slower' : 'as fast or faster'"
        )
        .mark_point(size=30, strokeWidth=1.4, opacity=0.9)
        .encode(
            x=x,
            y=y,
            yOffset=alt.YOffset("place:Q", scale=alt.Scale(domain=[-0.15, 1.15])),
            color=alt.Color("type:N", title="type of element", scale=alt.Scale(domain=_TYPES)),
            shape=alt.Shape("side:N", title="speed", scale=sides),
            tooltip=_tips(*_ROW_TIPS),
        )
    )
    means = (
        base.transform_calculate(log="log(datum.ratio)", won="datum.ratio < 1 ? 0 : 1")
        .transform_aggregate(mean="mean(log)", count="count()", won="sum(won)", groupby=["band"])
        .transform_calculate(
            mean="exp(datum.mean)", text="format(datum.mean, '.2f') + 'x'",
            share="datum.won + ' of ' + datum.count",
        )
    )  # fmt: skip
    tips = _tips("band:N|suite", "mean:Q|geometric mean|.3f", "won:Q|as fast or faster", "count:Q|problems")
    ticks = means.mark_tick(thickness=3, size=32, color=_INK).encode(x="mean:Q", y=y, tooltip=tips)
    right: dict[str, Any] = {"x": alt.value("width"), "y": y}
    texts = means.mark_text(align="left", dx=8, dy=-6, color=_INK, fontWeight="bold").encode(
        **right, text="text:N"
    )
    shares = means.mark_text(align="left", dx=8, dy=8, color=_MUTED, fontSize=10).encode(
        **right, text="share:N"
    )
    return alt.layer(even.encode(x="one:Q"), points, ticks, texts, shares).properties(
        width=_WIDTH - 200, height=alt.Step(40)
    )


def _losses(rows: list[Row], base: alt.Chart) -> Chart:
    """Chart the problems that are slowest beside their baseline, the slowest first."""
    own = (
        base.transform_filter("datum.ratio < 1")
        .transform_window(rank="row_number()", sort=[alt.SortField("ratio")])
        .transform_filter(f"datum.rank <= {_MOST_LOSSES}")
        .transform_calculate(
            name="datum.problem + '  ' + datum.dtype + (datum.layout === 'none' ? '' : ' ' + datum.layout)"
            " + '  ' + datum.band"
        )
    )
    # Two results may share a name: the rank tells their bars apart.
    y = alt.Y("rank:O", title=None, axis=None)
    x = alt.X("ratio:Q", title="times as fast as the baseline", scale=alt.Scale(domain=[0, 1]))
    bars = own.mark_bar(height=13, color=_EMPTY).encode(x=x, y=y, tooltip=_tips(*_ROW_TIPS))
    texts = own.transform_calculate(text="format(datum.ratio, '.3f') + '  ' + datum.name")
    words = texts.mark_text(align="left", dx=4, color=_INK).encode(x=alt.value(0), y=y, text="text:N")
    title = alt.TitleParams(f"Slowest beside the baseline, {_MOST_LOSSES} at most")
    return alt.layer(bars, words).properties(width=_WIDTH - 200, height=alt.Step(17), title=title)


def headline(rows: list[Row]) -> list[str]:
    """Say how tritile compares with torch: on the whole, where it gains most, and where it loses most."""
    groups: dict[str, list[float]] = defaultdict(list)
    own = [row for row in rows if row["baseline"] == "torch"]
    for row in own:
        groups[f"{row['dtype']} in {row['suite']}"].append(row["ratio"])
    means = sorted((geomean(ratios), name) for name, ratios in groups.items())
    won, worst = sum(row["ratio"] >= 1 for row in own), min(own, key=lambda row: row["ratio"])

    def named(pairs: Sequence[tuple[float, str]]) -> str:
        return ", ".join(f"{name} ({mean:.2f}x)" for mean, name in pairs) or "none"

    return [
        f"{geomean(row['ratio'] for row in own):.2f}x as fast as torch (geometric mean); "
        f"as fast or faster on {won} of {len(own)} problems.",
        f"Gains most: {named([each for each in means[:-4:-1] if each[0] >= 1.005])}.",
        f"Loses: {named([each for each in means[:3] if each[0] < 0.995])}.",
        f"Slowest: {worst['problem']} {worst['dtype']}, {worst['suite']}, {worst['ratio']:.2f}x.",
    ]


def page(rows: list[Row], gpu: str, env: str) -> str:
    """Return one HTML page with filters by `FILTERS` and baseline. Raises FileError where there is no row."""
    if not rows:
        raise FileError(f"there are no results of {gpu}: tritile bench --output DIR makes them")
    base, params = alt.Chart(alt.NamedData("rows")), []
    for field, label in (FILTERS | {"baseline": "baseline"}).items():
        values = sorted({row[field] for row in rows})
        bind = alt.binding_select(options=["", *values], labels=["all", *values], name=f"{label} ")
        params.append(alt.param(name=f"only_{field}", value="", bind=bind))
        base = base.transform_filter(f"only_{field} === '' || datum.{field} === only_{field}")
    charts = alt.vconcat(speedups(rows, base), _losses(rows, base), spacing=30).add_params(*params)
    spec = charts.to_dict() | {"config": _CONFIG | {"font": _FONT, "background": "transparent"}}
    spec["datasets"] = spec.get("datasets", {}) | {"rows": rows}
    text: str = vl_convert.vegalite_to_html(json.dumps(spec, allow_nan=False), bundle=True, renderer="svg")
    head, title, rest = text.partition("<title>Chart</title>")
    if not title:
        raise UnsupportedError(
            "this vl-convert-python writes another page: install the version of constraints.txt"
        )
    lines = "".join(f"<p>{html.escape(line)}</p>" for line in (*headline(rows), env))
    name = html.escape(f"tritile on {gpu}")
    script, body, rest = rest.rpartition("<body>")
    style = f"<title>{name}</title>{_STYLE}{_DARK_STYLE}"
    return f"{head}{style}{script}{body}<h1>{name}</h1>{lines}{rest}"


def ladder(found: Ladders) -> Chart:
    """Chart the rate of each rung on a logarithmic scale, the bytes it requests where nothing was timed."""
    panels = []
    for op, readings in found.by_op.items():
        rows: list[Row] = []
        for reading in readings:
            value, gains = found.rate(reading), found.gains(reading)
            if not found.timed:
                value, label = reading.requested, bytes_text(reading.requested or 0)
            elif value and gains:
                label = (
                    f"{value:,.4g} {unit(op)} \u00b7 {gains[0]:.3g}\u00d7 \u00b7 {gains[1]:.1%} of the best"
                )
            else:
                label = "failed" if reading.failed else "does not run here"
            own = "tritile" if reading.name == f"tritile.{op}" else "kernels of the ladder"
            kind = "torch" if reading.baseline else own
            rows.append(
                {"rung": reading.name, "idea": reading.idea, "by": kind, "value": value, "label": label}
            )
        values = [row["value"] for row in rows if row["value"]] or [1.0]
        low = 10.0 ** math.floor(math.log10(min(values) * 0.9))
        rows = [row | {"value": row["value"] or low} for row in rows]
        base = alt.Chart(alt.InlineData(rows)).encode(y=alt.Y("rung:N", sort=None, axis=None))
        scale = alt.Scale(type="log", domain=[low, max(*values, 10 * low)], nice=False)
        x = alt.X("value:Q", title=None, scale=scale, axis=alt.Axis(grid=False, values=_POWERS, format="~s"))
        kinds = alt.Scale(domain=["kernels of the ladder", "tritile", "torch"], range=_LADDER)
        color = alt.Color("by:N", title=None, scale=kinds)
        bars = base.mark_bar(height=13, yOffset=9).encode(x=x, x2=alt.datum(low), color=color)
        names = base.mark_text(align="left", dy=-9, fontWeight="bold", color=_INK)
        ideas = base.mark_text(align="left", dx=150, dy=-9, color=_MUTED).encode(text="idea:N")
        labels = base.mark_text(align="left", dx=7, dy=9, color=_INK).encode(x="value:Q", text="label:N")
        left = alt.value(0)
        layers = [bars, names.encode(x=left, text="rung:N"), ideas.encode(x=left), labels]
        about = "compiled for {}; bytes requested of global memory, less is better (log scale)"
        if found.timed:
            about = "on {}; \u00d7: times the speed of the first (log scale)"
        title = alt.TitleParams(f"{op}, {found.n} x {found.n}", subtitle=about.format(found.device))
        panels.append(alt.layer(*layers).properties(width=470, height=alt.Step(44), title=title))
    return alt.vconcat(*panels, spacing=30).resolve_scale(x="independent", y="independent")


def picture(chart: Chart, kind: str) -> bytes:
    """Return a chart as SVG, with a light and a dark scheme, or as a light PNG (`kind`)."""
    padding = {"left": 32, "right": 64, "top": 12, "bottom": 12}  # readers' fonts may be wider
    spec = chart.to_dict() | {"padding": padding, "config": _CONFIG | {"font": "sans-serif", "aria": False}}
    text = json.dumps(spec, allow_nan=False)
    if kind == "png":
        return bytes(vl_convert.vegalite_to_png(text, scale=2))
    svg: str = vl_convert.vegalite_to_svg(text)
    end = svg.index(">") + 1
    return f"{svg[:end]}{_DARK_STYLE}{svg[end:]}".encode()
