"""A climb as a picture: a bar for each step on a logarithmic scale, a panel for each ladder."""

import math
from pathlib import Path
from typing import Any, Final

import altair as alt

from tritile.lab.ladder.climbing import Climb, rate_text, share_text, size_text, unit
from tritile.lab.ladder.running import Reading

_WIDTH: Final = 760
_STEP: Final = 44  # pixels of a step: a line of text, and the bar under it
_NAME: Final = 150  # pixels from a step's name to what is new
_FONT: Final = "Helvetica, Arial, 'Liberation Sans', sans-serif"
_INK, _FAINT, _RULE = "#1f2430", "#5d6472", "#e3e6ec"
_COLORS: Final = {"kernel": "#4c78a8", "tritile": "#e4572e", "yardstick": "#b3b9c4"}


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
    gained = f"{rate_text(times)}x \u00b7 {share_text(share)} of the best"
    return value, f"{rate_text(value)} {unit(reading.op)} \u00b7 {gained}"


def _subtitle(op: str, climb: Climb) -> str:
    if climb.timed:
        shown = "times the first step; share of the best; grey: to compare"
        return f"{unit(op)} on {climb.device}, logarithmic; {shown}"
    asked = "bytes asked of global memory" if op == "matmul" else "bytes of the sectors touched"
    return f"{asked}, counted in the interpreter, logarithmic; less is better"


def _panel(op: str, climb: Climb) -> alt.LayerChart:
    readings, bars = climb.of(op), [_bar(reading, climb) for reading in climb.of(op)]
    values = [value for value, _ in bars if value] or [1.0]
    low = 10 ** math.floor(math.log10(min(values) * 0.9))
    high = max(values) * (max(values) / low) ** 0.6  # room for the longest bar's label
    rows = [
        {"place": i, "name": r.name, "new": r.new, "kind": _kind(r), "value": value or low, "low": low,
         "label": label}
        for i, (r, (value, label)) in enumerate(zip(readings, bars, strict=True))
    ]  # fmt: skip
    scale = alt.Scale(type="log", domain=[low, high], nice=False)
    ticks = [10.0**i for i in range(round(math.log10(low)), math.floor(math.log10(max(values))) + 1)]
    axis = alt.Axis(
        values=ticks, format="~s", grid=True, gridColor=_RULE, domain=False, ticks=False, labelColor=_FAINT
    )
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
    title = alt.TitleParams(f"{op}, {climb.n} x {climb.n}", subtitle=_subtitle(op, climb))
    panel = alt.layer(*layers).properties(width=_WIDTH, height=alt.Step(_STEP), title=title)
    return panel.resolve_scale(color="independent")


def picture(climb: Climb) -> alt.VConcatChart:
    """Return the chart of a climb: rates where it was timed, else traffic."""
    panels = alt.vconcat(*(_panel(op, climb) for op in climb.ops), spacing=28, background="white")
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


def draw(climb: Climb, path: Path) -> None:
    """Draw a climb into an .svg, .png or .html file. Raises OSError where it cannot be written."""
    options: dict[str, dict[str, Any]] = {".html": {"inline": True}, ".png": {"scale_factor": 2}}
    picture(climb).save(str(path), **options.get(path.suffix, {}))
