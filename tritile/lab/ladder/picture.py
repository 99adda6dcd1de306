"""Ladders as one SVG: a bar for each rung on a logarithmic scale, a panel for each ladder."""

import math
from html import escape
from typing import Final

from tritile.lab.ladder.results import Ladders, Reading, unit
from tritile.lab.traffic import bytes_text

_WIDTH: Final = 790
_LEFT, _MOST, _STEP = 14, 470, 44  # pixels: margin, longest bar, a rung's line of text and bar
# Light and dark: ink, faint ink, bars of kernels, of tritile and of others.
_LIGHT: Final = ("#fff", "#1f2430", "#5d6472", "#4c78a8", "#e4572e", "#b3b9c4")
_DARK: Final = ("#12181f", "#e8ecf2", "#9aa5b5", "#6c9bd0", "#ff7a50", "#7d8796")
_RULES: Final = (".page{{fill:{}}}text{{fill:{}}}.faint{{fill:{}}}"
                 ".kernel{{fill:{}}}.own{{fill:{}}}.baseline{{fill:{}}}")  # fmt: skip
_STYLE: Final = (
    "text{font:12px Helvetica,Arial,'Liberation Sans',sans-serif}.title{font-size:15px}.small{font-size:11px}"
    f".title,.name{{font-weight:bold}}{_RULES.format(*_LIGHT)}"
    f"@media(prefers-color-scheme:dark){{{_RULES.format(*_DARK)}}}"
)


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y}" class="{kind}">{escape(text)}</text>'


def _bar(reading: Reading, ladders: Ladders) -> tuple[float | None, str]:
    """Return the value of a rung's bar, requested bytes if untimed, and the label at its end."""
    if not ladders.timed:
        return reading.requested, bytes_text(reading.requested or 0)
    value, gains = ladders.rate(reading), ladders.gains(reading)
    if value is None or gains is None:
        return None, "failed" if reading.failed else "does not run here"
    faster = f"{gains[0]:.3g}\u00d7 \u00b7 {gains[1]:.1%} of the best"
    return value, f"{value:,.4g} {unit(reading.op)} \u00b7 {faster}"


def _panel(readings: list[Reading], ladders: Ladders, top: int) -> list[str]:
    bars = [_bar(reading, ladders) for reading in readings]
    values = [value for value, _ in bars if value] or [1.0]
    low = 10.0 ** math.floor(math.log10(min(values) * 0.9))

    def x(value: float) -> float:
        return _LEFT + _MOST * math.log(value / low) / math.log(max(*values, 10 * low) / low)

    about = f"compiled for {ladders.device}; bytes requested of global memory, less is better"
    if ladders.timed:
        about = f"on {ladders.device}; \u00d7: times the speed of the first"
    legend = "logarithmic scale; blue: kernels of this ladder, orange: tritile, grey: torch"
    title = f"{readings[0].op}, {ladders.n} x {ladders.n}"
    lines = [_text(_LEFT, top, title, "title"), _text(_LEFT, top + 20, f"{about}; {legend}", "faint")]
    for i, (reading, (value, label)) in enumerate(zip(readings, bars, strict=True)):
        y = top + 46 + i * _STEP
        kind = "baseline" if reading.baseline else "own" if reading.name.startswith("tritile.") else "kernel"
        lines += [_text(_LEFT, y, reading.name, "name"), _text(_LEFT + 150, y, reading.idea, "faint")]
        end = x(value) if value else _LEFT
        lines.append(
            f'<rect x="{_LEFT}" y="{y + 7}" width="{end - _LEFT:.1f}" height="13" rx="2" class="{kind}"/>'
        )
        lines.append(_text(end + 7, y + 18, label, "small"))
    bottom = top + 46 + len(readings) * _STEP
    for power in range(round(math.log10(low)), math.floor(math.log10(max(values))) + 1):
        text = f"{10.0**power:,.15g}" if ladders.timed else bytes_text(10.0**power)
        lines.append(_text(x(10.0**power), bottom - 6, text, "faint small"))
    return lines


def svg(ladders: Ladders) -> str:
    """Return the picture: rates where rungs were timed, else requested bytes."""
    lines, top = list[str](), 28
    for readings in ladders.by_op.values():
        lines += _panel(readings, ladders, top)
        top += 46 + len(readings) * _STEP + 36
    size = f'width="{_WIDTH}" height="{top - 20}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {_WIDTH} {top - 20}">'
    return "\n".join((head, f"<style>{_STYLE}</style>", f'<rect {size} class="page"/>', *lines, "</svg>\n"))
