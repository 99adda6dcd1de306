"""A climb as a picture or a page: a bar for each step on a logarithmic scale, a panel for each ladder."""

import io
import json
import math
from pathlib import Path
from typing import Any, Final, NamedTuple

import altair as alt

from tritile.core.files import write_whole
from tritile.lab.ladder.climbing import Climb, rate_text, share_text, size_text, unit
from tritile.lab.ladder.running import Reading
from tritile.lab.report.page.charts import with_the_dark
from tritile.lab.report.tiling.page import PAGES

_WIDTH: Final = 760
_STEP: Final = 44  # pixels of a step: a line of text, and the bar under it
_NAME: Final = 150  # pixels from a step's name to what is new
_FONT: Final = "Helvetica, Arial, 'Liberation Sans', sans-serif"
_INK, _FAINT = "#1f2430", "#5d6472"
_COLORS: Final = {"kernel": "#4c78a8", "tritile": "#e4572e", "yardstick": "#b3b9c4"}
_LIGHT: Final = ("white", _INK, _FAINT, *_COLORS.values())
_DARK: Final = ("#12181f", "#e8ecf2", "#9aa5b5", "#6c9bd0", "#ff7a50", "#7d8796")  # as pages/ladder.html


def _kind(reading: Reading) -> str:
    if reading.yardstick:
        return "yardstick"
    return "tritile" if reading.name.startswith("tritile.") else "kernel"


def _bar(reading: Reading, climb: Climb) -> tuple[float | None, str]:
    """Return the value of a step's bar, bytes if untimed, and the label at its end."""
    if not climb.timed:  # bytes counted in products, in sectors in transposes
        traffic = reading.bytes_counted if reading.op == "matmul" else reading.touched
        return traffic, size_text(traffic) if traffic else "not interpreted"
    value = climb.rate(reading)
    if value is None:
        return None, "failed" if reading.failed else "not run here"
    times, share = climb.gains(reading.op)[reading.name]
    gained = f"{rate_text(times)}\u00d7 \u00b7 {share_text(share)} of the best"
    return value, f"{rate_text(value)} {unit(reading.op)} \u00b7 {gained}"


def _subtitle(op: str, climb: Climb) -> str:
    colors = "Blue: steps. Orange: tritile." + " Grey: others." * any(each.yardstick for each in climb.of(op))
    if climb.timed:
        return f"{unit(op)} on {climb.device}, logarithmic scale. \u00d7: times the first step. {colors}"
    asked = "Bytes asked of global memory" if op == "matmul" else "Bytes of the sectors touched"
    return f"{asked}, counted in the interpreter, logarithmic scale: less is better. {colors}"


class Panel(NamedTuple):
    """Hold what is drawn of one ladder: `rows` with a value each, None without; `ticks` are powers of ten."""

    title: str
    subtitle: str
    rows: list[dict[str, Any]]
    ticks: list[float]
    most: float
    timed: bool

    def tick_text(self, value: float) -> str:
        """Write a number at the axis."""
        return f"{value:,.15g}" if self.timed else size_text(round(value))

    def share(self, value: float | None) -> float:
        """Return the length of a bar in percent of the longest."""
        low = self.ticks[0]
        return 100 * math.log(value / low) / math.log(self.most / low) if value else 0.0


def _panel(op: str, climb: Climb) -> Panel:
    readings, bars = climb.of(op), [_bar(reading, climb) for reading in climb.of(op)]
    values = [value for value, _ in bars if value] or [1.0]
    low, high = math.floor(math.log10(min(values) * 0.9)), math.floor(math.log10(max(values)))
    rows = [
        {"place": i, "name": r.name, "new": r.new, "kind": _kind(r), "value": value, "label": label}
        for i, (r, (value, label)) in enumerate(zip(readings, bars, strict=True))
    ]
    ticks, title = [10.0**i for i in range(low, high + 1)], f"{op}, {climb.n} x {climb.n}"
    return Panel(title, _subtitle(op, climb), rows, ticks, max(values), climb.timed)


def _chart(panel: Panel) -> alt.LayerChart:
    low = panel.ticks[0]
    rows = [row | {"value": row["value"] or low, "low": low} for row in panel.rows]
    high = panel.most * (panel.most / low) ** 0.6  # room for the longest bar's label
    scale = alt.Scale(type="log", domain=[low, high], nice=False)
    texts = json.dumps([panel.tick_text(value) for value in panel.ticks])
    axis = alt.Axis(
        values=panel.ticks, labelExpr=f"{texts}[round(log(datum.value / {low!r}) / LN10)]",
        grid=False, domain=False, tickColor=_FAINT, labelColor=_FAINT,
    )  # fmt: skip
    x = alt.X("value:Q", scale=scale, axis=axis, title=None)
    colors = alt.Scale(domain=list(_COLORS), range=list(_COLORS.values()))
    color = alt.Color("kind:N", scale=colors, legend=None)
    base = alt.Chart(alt.Data(values=rows)).encode(y=alt.Y("place:O", axis=None))
    names = base.mark_text(dy=-9, fontSize=12, fontWeight="bold", color=_INK)
    layers = (
        base.mark_bar(size=13, yOffset=8, cornerRadiusEnd=2).encode(x=x, x2="low:Q", color=color),
        base.mark_text(dx=7, dy=9, fontSize=11, color=_INK).encode(x=x, text="label:N"),
        names.encode(x=alt.value(0), text="name:N"),
        base.mark_text(dy=-9, fontSize=12, color=_FAINT).encode(x=alt.value(_NAME), text="new:N"),
    )
    title = alt.TitleParams(panel.title, subtitle=panel.subtitle)
    chart = alt.layer(*layers).properties(width=_WIDTH, height=alt.Step(_STEP), title=title)
    return chart.resolve_scale(color="independent")


def picture(climb: Climb) -> alt.VConcatChart:
    """Return the chart of a climb: rates where it was timed, else traffic."""
    panels = alt.vconcat(*(_chart(_panel(op, climb)) for op in climb.ops), spacing=28, background="white")
    return (
        panels.configure_view(stroke=None)
        .configure_text(align="left", baseline="middle", font=_FONT)
        .configure_axis(labelFont=_FONT, labelFontSize=11)
        .configure_title(
            anchor="start", font=_FONT, fontSize=15, color=_INK, offset=10,
            subtitleFont=_FONT, subtitleFontSize=12, subtitleColor=_FAINT, subtitlePadding=4,
        )
        .properties(padding=14)
    )  # fmt: skip


def page(climb: Climb) -> str:
    """Return the picture as a page in HTML, which fits its window and follows its theme."""
    panels = []
    for panel in (_panel(op, climb) for op in climb.ops):
        rows = [row | {"share": round(panel.share(row["value"]), 2)} for row in panel.rows]
        ticks = [panel.tick_text(value) for value in panel.ticks]
        decade = round(panel.share(10 * panel.ticks[0]), 3)
        panels.append(panel._asdict() | {"rows": rows, "ticks": ticks, "decade": decade})
    return PAGES.get_template("ladder.html").render(n=climb.n, device=climb.device, panels=panels)


def draw(climb: Climb, path: Path) -> None:
    """Draw a climb into an .svg, .png or .html file. Raises OSError where it cannot be written."""
    if path.suffix == ".html":
        return write_whole(path, page(climb))
    if path.suffix == ".png":
        return picture(climb).save(str(path), scale_factor=2)
    drawn = io.StringIO()
    picture(climb).save(drawn, format="svg")
    write_whole(path, with_the_dark(drawn.getvalue(), dict(zip(_LIGHT, _DARK, strict=True))))
