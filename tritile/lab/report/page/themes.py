"""Colours of figures, light and dark, that colour-blind readers can tell apart."""

from typing import Any, Final

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
