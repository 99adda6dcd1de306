"""Charts of results: speed-ups, rooflines and errors.

A chart only names its data, which a page or a picture fills in, as its theme does the colours.
"""

import altair as alt

from tritile.lab.report.page.marks import (
    CASE,
    CHOICE,
    FEW,
    PLAIN,
    RATIO_TICKS,
    TENS,
    X_LOG,
    colour,
    kinds_of,
    shape,
    tips,
)
from tritile.lab.report.page.rows import Row, Rows
from tritile.lab.report.results import BASELINES


def speedups(rows: Rows) -> alt.LayerChart | alt.FacetChart:
    """Chart each problem's speed-up over each baseline, a band for a suite, the slowest on top."""
    peer = alt.param(name="peer", value="")
    side = "datum.ratio < 1 ? 'slower' : 'as fast or faster'"
    base = (
        alt.Chart(alt.NamedData("results"))
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
    one = alt.Chart(alt.InlineData([{"one": 1}])).mark_rule(style="even", size=1.5).encode(x="one:Q")
    layers = (one, _speedup_points(base, band, kinds_of(rows.results, "dtype")), *_speedup_means(base, band))
    return alt.layer(*layers).add_params(peer).properties(height=alt.Step(64))


def _speedup_points(base: alt.Chart, band: alt.Y, dtypes: list[str]) -> alt.Chart:
    across = alt.X(
        "ratio:Q",
        title="times as fast as the peer (log scale)",
        scale=X_LOG,
        axis=alt.Axis(values=RATIO_TICKS, format=PLAIN, labelOverlap="greedy", labelSeparation=5),
    )
    return (
        base.transform_window(
            rank="row_number()", sort=[alt.SortField("ratio", "ascending")], groupby=["band"]
        )
        .transform_joinaggregate(all="count()", groupby=["band"])
        .transform_calculate(place="(datum.rank - 0.5) / datum.all")
        .mark_point(size=34, strokeWidth=1.4, opacity=0.9)
        .encode(
            x=across,
            y=band,
            yOffset=alt.YOffset("place:Q", scale=alt.Scale(domain=[-0.08, 1.08])),
            color=colour("dtype", dtypes),
            shape=alt.Shape(
                "side:N",
                title=None,
                scale=alt.Scale(domain=["as fast or faster", "slower"], range=["circle", "triangle-down"]),
            ),
            tooltip=tips(
                *CASE[:1],
                "peer:N|peer",
                "ratio:Q|times as fast|.3f",
                "tritile_us:Q|tritile us|.2f",
                "peer_us:Q|peer us|.2f",
                *CASE[1:],
                *CHOICE,
            ),
        )
    )


def _speedup_means(base: alt.Chart, band: alt.Y) -> tuple[alt.Chart, alt.Chart]:
    means = (
        base.transform_calculate(log="log(datum.ratio)")
        .transform_aggregate(mean="mean(log)", count="count()", groupby=["band"])
        .transform_calculate(mean="exp(datum.mean)", text="format(datum.mean, '.2f') + 'x'")
    )
    mean_at = alt.X("mean:Q", scale=X_LOG)
    mean_tips = tips("band:N|suite", "mean:Q|geometric mean|.3f", "count:Q|problems")
    ticks = means.mark_tick(thickness=3, size=44, style="mean").encode(x=mean_at, y=band, tooltip=mean_tips)
    right = means.mark_text(dy=-20, dx=-4, align="right", style="mean", fontWeight="bold")
    return ticks, right.encode(x=alt.value("width"), y=band, text="text:N", tooltip=mean_tips)


def roofline(rows: Rows) -> alt.LayerChart | alt.FacetChart:
    """Chart products by operations a byte and rate, below the roofs of memory and arithmetic."""
    suites = kinds_of([row for row in rows.results if row["op"] == "matmul"], "suite")
    few = alt.Axis(values=FEW, format=PLAIN, labelOverlap="greedy", labelSeparation=5)
    x = alt.X("intensity:Q", title="operations a byte, each operand moved once", scale=X_LOG, axis=few)
    y = alt.Y("tflops:Q", title="TFLOP/s", scale=alt.Scale(type="log", nice=False, padding=10), axis=few)
    points = (
        alt.Chart(alt.NamedData("results"))
        .transform_filter("datum.op === 'matmul'")
        .mark_point(size=38, strokeWidth=1.4, opacity=0.85)
        .encode(
            x=x,
            y=y,
            color=colour("suite", suites),
            shape=shape("suite", suites),
            tooltip=tips(
                CASE[0],
                "tflops:Q|TFLOP/s|.1f",
                "intensity:Q|operations a byte|.1f",
                "tritile_us:Q|tritile us|.2f",
                *CASE[1:],
                *CHOICE,
            ),
        )
    )
    return alt.layer(*_roof_layers(rows, x, y), points).properties(height=430)


def _roof_layers(rows: Rows, x: alt.X, y: alt.Y) -> list[alt.Chart]:
    found = [row["intensity"] for row in rows.results if row["op"] == "matmul"]
    if rows.device is None or not rows.roofs or not found:
        return []
    tbps, low, high = rows.device.memory_gbps / 1e3, min(found), max(found)
    lines: list[Row] = []
    for roof in rows.roofs:
        label = f"{', '.join(roof['dtypes'])}: {roof['tflops']:.0f} TFLOP/s"
        ridge = max(low, roof["tflops"] / tbps)
        lines += [
            {"intensity": at, "tflops": roof["tflops"], "roof": label} for at in (ridge, max(high, ridge))
        ]
    ridge = max(low, max(roof["tflops"] for roof in rows.roofs) / tbps)
    memory = f"memory: {tbps:.1f} TB/s"
    lines += [{"intensity": at, "tflops": at * tbps, "roof": memory} for at in (low, ridge)]
    base = alt.Chart(alt.InlineData(lines))
    drawn = base.mark_line(style="roof", strokeWidth=1.6).encode(x=x, y=y, detail="roof:N")
    ends = base.transform_filter(f"datum.roof !== '{memory}'").transform_aggregate(
        intensity="max(intensity)", tflops="max(tflops)", groupby=["roof"]
    )
    named = ends.mark_text(style="roof", align="right", dy=-7).encode(x=x, y=y, text="roof:N")
    middle = {"intensity": (low * ridge) ** 0.5, "tflops": (low * ridge) ** 0.5 * tbps, "roof": memory}
    slope = alt.Chart(alt.InlineData([middle])).mark_text(style="roof", align="right", dx=-10, dy=-6)
    return [drawn, named, slope.encode(x=x, y=y, text="roof:N")]


def bandwidth(rows: Rows) -> alt.LayerChart | alt.FacetChart:
    """Chart permutations by bytes moved and rate, beside a plain copy of as many bytes."""
    kinds = kinds_of([row for row in rows.results if row["op"] == "permute"], "dtype")
    few = alt.Axis(values=FEW, format=PLAIN, labelOverlap="greedy", labelSeparation=5)
    x = alt.X("megabytes:Q", title="megabytes read and written", scale=X_LOG, axis=few)
    y = alt.Y("gbps:Q", title="GB/s", axis=alt.Axis(tickCount=6))
    base = (
        alt.Chart(alt.NamedData("results"))
        .transform_filter("datum.op === 'permute'")
        .transform_calculate(megabytes="datum.bytes / 1e6", share="datum.gbps / datum.copy_gbps")
    )
    points = base.mark_point(size=40, strokeWidth=1.4, opacity=0.9).encode(
        x=x,
        y=y,
        color=colour("dtype", kinds),
        shape=shape("dtype", kinds),
        tooltip=tips(
            CASE[0],
            "gbps:Q|GB/s|.0f",
            "copy_gbps:Q|a copy's GB/s|.0f",
            "share:Q|of the copy|.0%",
            "tritile_us:Q|tritile us|.2f",
            *CASE[1:3],
            *CHOICE,
        ),
    )
    copies = base.transform_filter("isValid(datum.copy_gbps)")
    drops = copies.mark_rule(style="roof", opacity=0.4).encode(x=x, y=y, y2="copy_gbps:Q")
    ticks = copies.mark_tick(style="roof", orient="horizontal", size=11, thickness=2, opacity=0.6).encode(
        x=x, y=alt.Y("copy_gbps:Q")
    )
    layers: list[alt.Chart] = [drops, ticks, points]
    if rows.device is not None:
        top = alt.Chart(
            alt.InlineData(
                [{"gbps": rows.device.memory_gbps, "text": f"memory: {rows.device.memory_gbps:.0f} GB/s"}]
            )
        )
        layers += [
            top.mark_rule(style="roof", strokeWidth=1.6).encode(y=y),
            top.mark_text(style="roof", align="left", dy=-7).encode(y=y, x=alt.value(4), text="text:N"),
        ]
    return alt.layer(*layers).properties(height=360)


def accuracy(rows: Rows) -> alt.LayerChart | alt.FacetChart:
    """Chart products by torch's error and tritile's error over it."""
    kinds = kinds_of([row for row in rows.results if row["op"] == "matmul"], "dtype")
    log = alt.Scale(type="log", nice=False, padding=12)
    base = (
        alt.Chart(alt.NamedData("results"))
        .transform_filter("datum.error > 0 && datum.torch_error > 0")
        .transform_calculate(times="datum.error / datum.torch_error")
    )
    tens, ticks = alt.Axis(values=TENS, format=".0e"), alt.Axis(values=RATIO_TICKS, format=PLAIN)
    points = base.mark_point(size=40, strokeWidth=1.4, opacity=0.85).encode(
        x=alt.X("torch_error:Q", title="torch's relative error", scale=log, axis=tens),
        y=alt.Y("times:Q", title="tritile's error over torch's", scale=log, axis=ticks),
        color=colour("dtype", kinds),
        shape=shape("dtype", kinds),
        tooltip=tips(
            CASE[0],
            "error:Q|tritile's error|.3e",
            "torch_error:Q|torch's error|.3e",
            "times:Q|times torch's|.3f",
            *CASE[1:],
            CHOICE[0],
        ),
    )
    one = alt.Chart(alt.InlineData([{"one": 1}])).mark_rule(style="even", size=1.5).encode(y="one:Q")
    return alt.layer(one, points).properties(height=340)
