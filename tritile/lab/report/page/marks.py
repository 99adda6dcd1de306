"""Scales, ticks, colours, shapes and tooltips that charts share."""

from typing import Final

import altair as alt

from tritile.lab.report.page.rows import Row

RATIO_TICKS: Final = [0.1, 0.2, 0.3, 0.5, 0.7, 0.85, 1, 1.2, 1.5, 2, 3, 5, 8, 12, 20, 50]
_SHAPES: Final = ["circle", "square", "diamond", "triangle-up", "cross", "triangle-right", "triangle-left"]
TENS: Final = [10.0**power for power in range(-16, 10)]
FEW: Final = [digit * ten for ten in TENS for digit in (1, 3)]
X_LOG: Final = alt.Scale(type="log", nice=False, padding=12)
PLAIN: Final = ".4~g"  # four digits at most, no zeros at the end
CASE: Final = ("problem:N|problem", "suite:N|suite", "dtype:N|dtype", "layout:N|layout")
CHOICE: Final = ("config:N|config", "source:N|chosen by")
_FIRST: Final = ("bfloat16", "float16", "float32", "float64")  # a dtype has one colour in all figures


def kinds_of(rows: list[Row], name: str) -> list[str]:
    """Return the values of a facet (texts or lists of texts) without "", the usual dtypes first."""
    found: set[str] = set()
    for row in rows:
        found |= set(row[name]) if isinstance(row[name], list) else {row[name]}
    return sorted(found - {""}, key=lambda kind: (_FIRST.index(kind) if kind in _FIRST else 99, kind))


def colour(field: str, values: list[str]) -> alt.Color:
    """Encode a field by the theme's colours, in the order of the values."""
    legend = alt.Legend(symbolOpacity=1)
    return alt.Color(f"{field}:N", title=None, scale=alt.Scale(domain=values), legend=legend)


def shape(field: str, values: list[str]) -> alt.Shape:
    """Encode a field by shapes, in the order of the values."""
    shapes = [_SHAPES[i % len(_SHAPES)] for i in range(len(values))]
    return alt.Shape(f"{field}:N", title=None, scale=alt.Scale(domain=values, range=shapes))


def tips(*fields: str) -> list[alt.Tooltip]:
    """Return tooltips of fields given as "name:T|title|format"."""
    found = []
    for text in fields:
        field, title, form = [*text.split("|"), ""][:3]
        found.append(
            alt.Tooltip(field, title=title, format=form) if form else alt.Tooltip(field, title=title)
        )
    return found
