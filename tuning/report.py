"""Write results as one HTML page: a chart of where a GPU gains and loses, and its slowest problems.

altair draws the chart, with its own filters. Nothing is loaded from the network.
"""

import html
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated, Any, Final

import altair as alt
import typer
import vl_convert

sys.path.insert(0, str(Path(__file__).parents[1]))

import command
from benchmark_results import BASELINES, Result, dtype_label, of_cases, sizes_label, stored
from tritile.cli import shared
from tritile.cli.shared import console, say
from tritile.core import device as devices
from tritile.core.config import ATEN, Config
from tritile.errors import FileError, UnsupportedError

Row = dict[str, Any]
COMMITTED: Final = Path(__file__).parent / "results"
FILTERS: Final = {"op": "operation", "dtype": "dtype", "layout": "layout", "suite": "suite"}
_MOST_LOSSES: Final = 40
_LEGEND: Final = (
    "Each point is a problem. On the dashed line tritile takes as long as the baseline, right of it less. "
    "A bar is the geometric mean of its suite. The right column shows that mean, and how many "
    "problems are at least as fast."
)
_FONT: Final = "system-ui, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_TYPES: Final = ("bfloat16", "float16", "float32", "float64", "complex", "8-bit", "int16 to int64")
_RATIOS: Final = [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.85, 1, 1.2, 1.5, 2, 3, 5, 8, 12, 20, 50]
_INK, _MUTED, _LINE, _ACCENT = "#16202b", "#4b5866", "#e3e7ec", "#b3261e"
_TEXT: Final = {
    "labelColor": _MUTED,
    "titleColor": _MUTED,
    "titleFontWeight": "normal",
    "labelFontSize": 12,
    "titleFontSize": 12,
}
_CONFIG: Final[dict[str, Any]] = {
    "background": "white",
    "view": {"stroke": None},
    "text": {"fontSize": 12},
    "axis": _TEXT | {"gridColor": _LINE, "domainColor": _LINE, "tickColor": _LINE},
    "legend": _TEXT | {"orient": "bottom", "columns": 7, "columnPadding": 22,
        "layout": {"bottom": {"direction": "vertical", "anchor": "start", "margin": 10}}},
    # The palette of Okabe and Ito, adapted for a contrast of 3:1 or more with the background.
    "range": {"category": ["#0072b2", "#d55e00", "#00845f", "#c2408f", "#967000", "#66727e", "#5b3fb0"]},
}  # fmt: skip
_TIPS: Final = [
    "problem:N", "ratio:Q", "tritile_us:Q", "baseline:N", "baseline_us:Q", "suite:N", "dtype:N", "layout:N",
    "config:N", "source:N",
]  # fmt: skip
_STYLE: Final = f"""<meta name="viewport" content="width=device-width"><style>
body {{ font: 14px/1.5 {_FONT}; margin: 16px }}
body {{ color-scheme: light dark; background: Canvas; color: CanvasText }}
h1 {{ font-size: 20px }} h2 {{ font-size: 15px; margin: 24px 0 8px }}
p {{ margin: 2px 0 }} svg {{ max-width: none }}
.rows {{ overflow-x: auto }} td, th {{ padding: 1px 12px 1px 0; text-align: left; white-space: nowrap }}
td:nth-child(-n+3), th:nth-child(-n+3) {{ text-align: right }} td, th {{ vertical-align: top }}
@media (min-width: 1100px) {{ td:last-child {{ white-space: normal; min-width: 360px }} }}
.vega-embed, .chart-wrapper {{ display: flex !important; flex-direction: column; overflow-x: auto }}
.vega-bindings {{ order: -1; padding: 12px 0 }} .vega-bind {{ display: inline-block; margin-right: 14px }}
@property --fade {{ syntax: "<length>"; inherits: false; initial-value: 0px }}
@keyframes fade {{ from, 95% {{ --fade: 32px }} to {{ --fade: 0px }} }}
.rows, .chart-wrapper {{ animation: fade linear both; animation-timeline: scroll(self inline) }}
.rows, .chart-wrapper {{ mask-image: linear-gradient(to right, black calc(100% - var(--fade)), transparent) }}
</style>"""

# Lightness is reversed, and hues stay, where a reader asks for a dark scheme.
DARK_STYLE: Final = (
    "<style>@media (prefers-color-scheme: dark) { svg { filter: invert(0.93) hue-rotate(180deg) } }</style>"
)

# The chart's filters, which Vega makes, filter the table below it too.
_FILTER: Final = f"""
const lines = [...document.querySelectorAll(".rows tbody tr")];
function filter() {{
    const filters = [...document.querySelectorAll(".vega-bindings select")];
    const chosen = filters.filter((each) => each.value !== "");
    let left = {_MOST_LOSSES};
    for (const line of lines) {{
        const stays = chosen.every((each) => line.dataset[each.name.replace("only_", "")] === each.value);
        line.hidden = !stays || left-- <= 0;
    }}
}}
document.addEventListener("change", filter);
filter();
"""


PICTURE: Final = Path(__file__).parent / "pictures" / "speedups.svg"


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
            "config": _config_of(line),
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


def _config_of(line: Result) -> str:
    config = Config.from_dict(line["config"])
    return "torch's kernel" if config.family == ATEN else str(config)


def _type_of(dtype: str) -> str:
    if dtype.startswith("complex"):
        return "complex"
    if dtype.startswith(("float8", "int8", "uint8", "bool")):
        return "8-bit"
    return dtype if dtype in _TYPES else "int16 to int64"


def speedups(rows: list[Row], base: alt.Chart | None = None) -> alt.LayerChart | alt.FacetChart:
    """Chart each problem's speed-up over each baseline: a band a suite, the highest mean on top.

    `base` draws rows that filters leave; by default all. Raises FileError where there is no row.
    """
    if not rows:
        raise FileError("there are no results for this GPU: run `python tuning/bench.py --output DIR` first")
    base = alt.Chart(alt.InlineData(rows)) if base is None else base
    bands: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        bands[row["band"]].append(row["ratio"])
    order = sorted(bands, key=lambda band: -geometric_mean(bands[band]))
    ratios = [1.0, *(row["ratio"] for row in rows)]  # of all rows: the axis stays whatever filters leave
    scale = alt.Scale(type="log", nice=False, domain=[min(ratios) / 1.25, max(ratios) * 1.25])
    axis = alt.Axis(values=_RATIOS, format=".4~r", labelOverlap="greedy", labelSeparation=5, orient="top")
    x = alt.X("ratio:Q", scale=scale, axis=axis, title="times as fast as the baseline (log scale)")
    lines = alt.Axis(grid=True, bandPosition=0, domain=False, ticks=False)
    y = alt.Y("band:N", title=None, axis=lines, sort=order)
    even = alt.Chart(alt.InlineData([{"one": 1}])).mark_rule(color=_ACCENT, strokeDash=[5, 4], size=1.5)
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
            tooltip=_TIPS,
        )
    )
    means = (
        base.transform_calculate(log="log(datum.ratio)", won="datum.ratio < 1 ? 0 : 1")
        .transform_aggregate(mean="mean(log)", count="count()", won="sum(won)", groupby=["band"])
        .transform_calculate(
            mean="exp(datum.mean)",
            text="format(datum.mean, '.2f') + 'x, ' + datum.won + ' of ' + datum.count",
        )
    )
    ticks = means.mark_tick(thickness=3, size=32, color=_INK).encode(x="mean:Q", y=y)
    right: dict[str, Any] = {"x": alt.value("width"), "y": y, "text": "text:N"}
    texts = means.mark_text(align="left", dx=8, color=_INK, fontWeight="bold").encode(**right)
    return alt.layer(even.encode(x="one:Q"), points, ticks, texts).properties(width=700, height=alt.Step(40))


def _slowest(rows: list[Row]) -> str:
    """Return a table of what is slower than its baseline, slowest first, with the script that filters it."""
    head = ("times as fast", "tritile us", "baseline us", "problem", "dtype", "layout", "suite", "config")
    names = "".join(f'<th scope="col">{name}</th>' for name in head)
    body = ""
    for row in sorted((row for row in rows if row["ratio"] < 1), key=lambda row: row["ratio"]):
        times = f"{row['ratio']:.3f}", f"{row['tritile_us']:.2f}", f"{row['baseline_us']:.2f}"
        cells = (*times, *(row[each] for each in ("problem", "dtype", "layout", "band", "config")))
        fields = "".join(f' data-{field}="{html.escape(row[field])}"' for field in (*FILTERS, "baseline"))
        body += f"<tr{fields}>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"
    title = f"Slowest compared with the baseline: {_MOST_LOSSES} at most, of what the filters leave"
    head_and_body = f"<thead><tr>{names}</tr></thead><tbody>{body}</tbody>"
    table = f'<div class="rows"><table aria-labelledby="slowest">{head_and_body}</table></div>'
    return f'<h2 id="slowest">{title}</h2>{table}<script>{_FILTER}</script>'


def page(rows: list[Row], gpu: str, env: str) -> str:
    """Return one HTML page, its chart with filters by `FILTERS` and baseline.

    Raises FileError where there is no row.
    """
    base, params = alt.Chart(alt.NamedData("rows")), []
    for field, label in (FILTERS | {"baseline": "baseline"}).items():
        values = sorted({row[field] for row in rows})
        bind = alt.binding_select(options=["", *values], labels=["all", *values], name=f"{label} ")
        params.append(alt.param(name=f"only_{field}", value="", bind=bind))
        base = base.transform_filter(f"only_{field} === '' || datum.{field} === only_{field}")
    spec = speedups(rows, base).add_params(*params).to_dict() | {
        "config": _CONFIG | {"font": _FONT, "background": "transparent"}
    }
    spec["datasets"] = spec.get("datasets", {}) | {"rows": rows}
    text: str = vl_convert.vegalite_to_html(json.dumps(spec, allow_nan=False), bundle=True, renderer="svg")
    head, title, rest = text.partition("<title>Chart</title>")
    if not title:
        raise UnsupportedError(
            "this version of vl-convert-python writes pages that tritile does not know: "
            "install the version in constraints.txt"
        )
    name = html.escape(f"tritile on {gpu}")
    script, body, rest = rest.rpartition("<body>")
    style = f"<title>{name}</title>{_STYLE}{DARK_STYLE}"
    chart, end, rest = rest.rpartition("</body>")
    top = f"<h1>{name}</h1><p>{html.escape(env)}</p><p>{_LEGEND}</p>"
    return f"{head}{style}{script}{body}{top}{chart}{_slowest(rows)}{end}{rest}"


def picture(rows: list[Row]) -> str:
    """Return the chart as SVG, with a light and a dark scheme."""
    padding = {"left": 32, "right": 64, "top": 12, "bottom": 12}  # readers' fonts may be wider
    config = _CONFIG | {"font": "sans-serif", "aria": False}
    config["legend"] = config["legend"] | {"columns": 4}
    # Narrow enough that words are at least 10 pixels high in the column of a page, 688 wide.
    spec = speedups(rows).to_dict() | {"padding": padding, "config": config, "width": 470}
    svg: str = vl_convert.vegalite_to_svg(json.dumps(spec, allow_nan=False))
    end = svg.index(">") + 1
    return f"{svg[:end]}{DARK_STYLE}{svg[end:]}"


def _gpu_of(target: str | None, results: list[Result]) -> str:
    """The name of the GPU to report: the one named, the current one, or the one of most results."""
    counts = Counter(line["env"]["gpu"] for line in results)
    here = devices.current_gpu()
    if target is not None:
        named = [name for name in counts if replace(devices.HOST, name=name).slug == target.lower()]
        return named[0] if named else shared.device_of(target).name
    return here.name if here and counts[here.name] else max(counts, key=counts.__getitem__)


def main(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Results (.jsonl) or folders of them, which `tuning/bench.py --output` writes. "
            "Default: tuning/results."
        ),
    ] = None,
    target: shared.Target = None,
    output: Annotated[
        Path, typer.Option(help="The page to write (.html), or its chart alone (.svg).")
    ] = Path("report.html"),
) -> None:
    """Write results as one HTML page that needs no network, or its chart as a picture.

    The page shows where tritile gains and where it loses, with filters.
    """
    shared.check_output(output, ".html", ".svg")
    for file in files or []:
        if not file.exists():
            raise FileError(f"{file}: no such file or folder")
    places = files or [COMMITTED]

    with shared.working("drawing"):
        lines = stored(places, say)
        if not lines:
            raise FileError(f"there are no results in {', '.join(map(str, places))}")
        gpu = _gpu_of(target, lines)
        rows = rows_of(lines, gpu)
        env = shared.measured_on([line for line in lines if line["env"]["gpu"] == gpu])
        drawn = page(rows, gpu, env) if output.suffix == ".html" else picture(rows)
        shared.write(output, drawn)
    console.print(f"{output}: {shared.counted(len(rows), 'comparison')} on {gpu}")
    for other, count in Counter(line["env"]["gpu"] for line in of_cases(lines)).items():
        if other != gpu:
            console.print(f"{count} results of {other} are left out: --target shows them")


app = command.app_of(
    main,
    "python tuning/report.py",
    "python tuning/report.py results --target h200 --output report.html",
    "python tuning/report.py results --output speedups.svg",
)

if __name__ == "__main__":
    command.run(app)
