"""The figures of a report: a text and a chart each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import altair as alt

from tritile.lab.report.page import measured, searching
from tritile.lab.report.page.rows import Rows


@dataclass(frozen=True)
class Figure:
    """Describe a figure: its title, a sentence or two on what it shows, and the function that builds it.

    `data` names the fields of `Rows` that it draws.
    """

    title: str
    shows: str
    data: tuple[str, ...]
    build: Callable[[Rows], alt.LayerChart | alt.FacetChart]


FIGURES: Final[dict[str, Figure]] = {
    "speedups": Figure(
        "Speed-up over each peer",
        "A point is a problem: right of 1 tritile is faster, left of it the peer, with a triangle. Each band "
        "holds a suite, its slowest problem at the top; the bar is its geometric mean.",
        ("results",),
        measured.speedups,
    ),
    "roofline": Figure(
        "Roofline of matrix products",
        "A point is a product. Memory bounds products on the slope, arithmetic those below the flat roofs. "
        "Roofs are peaks at the highest clock, which tensor cores do not hold for long.",
        ("results",),
        measured.roofline,
    ),
    "bandwidth": Figure(
        "Permutations beside a plain copy",
        "A point is a permutation at the rate at which it moves bytes; the bar joined to it is a copy of as "
        "many bytes in the same process.",
        ("results",),
        measured.bandwidth,
    ),
    "accuracy": Figure(
        "Accuracy of products",
        "Relative errors against a product in float64: below the line tritile errs less than torch.",
        ("results",),
        measured.accuracy,
    ),
    "heatmap": Figure(
        "Times over tiles",
        "A cell is a tile: the time of the fastest config with it, over the fastest of all, which is ringed. "
        "Dashed cells were never measured; in cells with a cross every config failed.",
        ("cells",),
        searching.heatmap,
    ),
    "progress": Figure(
        "How searches got on",
        "Thin lines are searches: the best time so far over the best in the end, by number of configs. "
        "Half of the searches are at or below the thick line, 9 of 10 below the dashed one. Ratios above 2 "
        "are drawn at 2.",
        ("progress",),
        searching.progress,
    ),
    "study": Figure(
        "Quality of the tuner",
        "How much slower than the fastest of the whole space: what repeated searches find, what the model "
        "picks with nothing measured, and the winner of this problem on a neighbour a quarter larger.",
        ("study",),
        searching.study,
    ),
}


def spec_of(name: str, rows: Rows) -> dict[str, Any]:
    """Return the Vega-Lite specification of a figure as wide as its container; its data is only named."""
    sized = (
        FIGURES[name]
        .build(rows)
        .properties(width="container", autosize=alt.AutoSizeParams(type="fit-x", contains="padding"))
    )
    return dict(sized.to_dict())
