"""Charts of trials: times over tiles, progress of searches, and quality of the tuner."""

import altair as alt

from tritile.lab.report.page.marks import PLAIN, colour, kinds_of, shape, tips
from tritile.lab.report.page.rows import Rows


def heatmap(rows: Rows) -> alt.LayerChart | alt.FacetChart:
    """Chart the tiles of one problem: the time of each tile's fastest config over the fastest of all."""
    axes = alt.param(name="axes", value="BLOCK_M (down) by BLOCK_N (across)")
    axis = alt.Axis(grid=False, domain=False, ticks=False, labelAngle=0)
    x, y = alt.X("x:O", title=None, axis=axis), alt.Y("y:O", title=None, axis=axis)
    base = alt.Chart(alt.NamedData("cells"))
    full = base.transform_impute("ratio", key="x", groupby=["y"], value=None)
    empty = full.transform_filter("!isValid(datum.configs)").mark_rect(
        style="empty", filled=False, strokeDash=[3, 3]
    )
    failed = base.transform_filter("!isValid(datum.ratio)").mark_text(text="✕", style="roof")
    works = base.transform_filter("isValid(datum.ratio)").transform_calculate(
        text="format(datum.ratio, datum.ratio < 9.95 ? '.2f' : '.0f')", best="datum.ratio === 1"
    )
    shown = tips(
        "y:O|down", "x:O|across", "us:Q|us|.2f", "ratio:Q|times the fastest|.3f", "config:N|fastest config",
        "configs:Q|configs tried",
    )  # fmt: skip
    scale = alt.Scale(type="log", domain=[1, 4], clamp=True, scheme="viridis", reverse=True)
    legend = alt.Legend(title="time over the fastest", values=[1, 1.5, 2, 3, 4], format=PLAIN)
    rects = works.mark_rect(cornerRadius=3).encode(
        x=x, y=y, tooltip=shown, color=alt.Color("ratio:Q", scale=scale, legend=legend)
    )
    texts = works.mark_text(fontSize=11).encode(
        x=x,
        y=y,
        text="text:N",
        tooltip=shown,
        color=alt.condition("datum.ratio > 2.1", alt.value("#ffffff"), alt.value("#101418")),
    )
    ring = works.transform_filter("datum.best").mark_rect(
        style="best", filled=False, strokeWidth=3, cornerRadius=3
    )
    layers = [empty.encode(x=x, y=y), rects, ring.encode(x=x, y=y, tooltip=shown), texts]
    title = alt.TitleParams(text=alt.expr("axes"), anchor="start", fontSize=12, fontWeight="normal")
    return (
        alt.layer(*layers, failed.encode(x=x, y=y, tooltip=shown))
        .add_params(axes)
        .properties(height=alt.Step(34), title=title)
    )


def progress(rows: Rows) -> alt.LayerChart | alt.FacetChart:
    """Chart the best time so far over the best in the end by number of configs, for each search."""
    kinds = kinds_of(rows.searches, "op")
    steps = alt.Scale(type="log", nice=False)
    x = alt.X(
        "tried:Q",
        title="configs tried (log scale)",
        scale=steps,
        axis=alt.Axis(values=[1 << power for power in range(8)]),
    )
    scale = alt.Scale(type="log", nice=False, clamp=True, domain=[1, 2])
    y = alt.Y(
        "ratio:Q",
        title="best so far over the best",
        scale=scale,
        axis=alt.Axis(format=PLAIN, values=[1, 1.05, 1.1, 1.2, 1.3, 1.5, 1.7, 2]),
    )
    base = alt.Chart(alt.NamedData("progress"))
    each = base.mark_line(strokeWidth=0.7, opacity=0.16, interpolate="step-after").encode(
        x=x, y=y, detail="s:N", color=colour("op", kinds)
    )
    probs = base.transform_quantile(
        "ratio", probs=[0.5, 0.9], groupby=["tried", "op"], as_=["prob", "ratio"]
    ).transform_calculate(of="datum.prob < 0.7 ? 'half of them' : '9 of 10'")
    dash = alt.StrokeDash(
        "of:N",
        title=None,
        legend=alt.Legend(symbolSize=500),
        scale=alt.Scale(domain=["half of them", "9 of 10"], range=[[1, 0], [6, 4]]),
    )
    shown = tips("op:N|op", "of:N|of", "tried:Q|after configs", "ratio:Q|at most times the best|.3f")
    lines = probs.mark_line(strokeWidth=2.6, interpolate="step-after").encode(
        x=x, y=y, color=colour("op", kinds), strokeDash=dash
    )
    hover = probs.mark_point(size=60, opacity=0).encode(x=x, y=y, tooltip=shown, detail="of:N")
    return alt.layer(each, lines, hover).properties(height=340)


def study(rows: Rows) -> alt.LayerChart | alt.FacetChart:
    """Chart by problem what searches, the model's first pick and the winner on a neighbour lose."""
    kinds = ["a search", "first pick", "on a neighbour"]
    base = (
        alt.Chart(alt.NamedData("study"))
        .transform_calculate(
            found="[datum.regrets, [datum.first_pick_regret], [datum.transfer_regret]]",
            kinds=f"{kinds}",
        )
        .transform_flatten(["found", "kinds"], as_=["found", "kind"])
        .transform_flatten(["found"], as_=["regret"])
        .transform_filter("isValid(datum.regret)")
        .transform_calculate(percent="100 * datum.regret")
    )
    x = alt.X(
        "percent:Q",
        title="percent slower than the best",
        scale=alt.Scale(type="symlog", constant=0.5, nice=False, padding=10),
        axis=alt.Axis(
            values=[0, 0.5, 1, 2, 5, 10, 20, 50, 100, 200],
            format=PLAIN,
            labelOverlap="greedy",
            labelSeparation=5,
        ),
    )
    y = alt.Y("problem:N", title=None, sort=None, axis=alt.Axis(grid=True, ticks=False))
    points = base.mark_point(size=48, strokeWidth=1.5).encode(
        x=x,
        y=y,
        color=colour("kind", kinds),
        shape=shape("kind", kinds),
        tooltip=tips("problem:N|problem", "kind:N|of", "percent:Q|percent slower|.2f"),
    )
    return alt.layer(points).properties(height=alt.Step(26))
