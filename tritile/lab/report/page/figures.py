"""The figures of a report: a text, a chart and a table each."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import altair as alt

from tritile.lab.report.page import charts, tables
from tritile.lab.report.page.rows import Row, Rows

_NO_RESULTS: Final = "No such results: tritile bench --results DIR measures problems and writes them."
_NO_TRIALS: Final = "No trials: tritile tune makes them, and --store FILE shows those of another machine."


@dataclass(frozen=True)
class Figure:
    """Describe a figure: its title, a sentence or two on what it shows, and the function that builds it.

    `data` names the field of `Rows` that it draws. `select` returns the rows of its table, none where there
    is nothing to draw, which `nothing` says. `key` is the field that names a row for filters.
    """

    title: str
    shows: str
    data: str
    nothing: str
    build: Callable[[Rows], charts.Chart]
    caption: str
    columns: tuple[str, ...]
    select: Callable[[Rows], list[Row]]
    key: str = "r"

    def table(self, rows: Rows) -> tables.Table:
        """Return the table of the figure; the page itself fills the heat map's, for the chosen problem."""
        if self.data == "cells":
            return tables.Table(self.caption, tables.heads(self.columns), [])
        return tables.table(self.caption, self.columns, self.select(rows), self.key)

    def spec(self, rows: Rows) -> dict[str, Any]:
        """Return the Vega-Lite specification, as wide as its container; its data is only named."""
        fit = alt.AutoSizeParams(type="fit-x", contains="padding")
        return dict(self.build(rows).properties(width="container", autosize=fit).to_dict())


def _slowest_first(rows: Rows) -> list[Row]:
    return sorted(rows.results, key=lambda row: row["torch"])


def _of(op: str, rows: Rows, by: str) -> Iterator[Row]:
    return (row for row in sorted(rows.results, key=lambda row: row.get(by) or 0) if row["op"] == op)


def _roofed(rows: Rows) -> list[Row]:
    """Return products with their share of the roof, the lower of memory's and arithmetic's."""
    peaks, found = {dtype: roof["tflops"] for roof in rows.roofs for dtype in roof["dtypes"]}, []
    for row in _of("matmul", rows, "intensity"):
        peak = peaks.get(row["dtype"])
        memory = rows.device.memory_gbps / 1e3 * row["intensity"] if rows.device else None
        roof = min(peak, memory) if peak and memory else None
        found.append(row | {"of_roof": row["tflops"] / roof if roof else None})
    return found


def _copied(rows: Rows) -> list[Row]:
    return [
        row
        | {
            "megabytes": row["bytes"] / 1e6,
            "of_copy": row["gbps"] / row["copy_gbps"] if row["copy_gbps"] else None,
        }
        for row in _of("permute", rows, "bytes")
    ]


def _erring(rows: Rows) -> list[Row]:
    found = [
        row | {"over": row["error"] / row["torch_error"] if row["torch_error"] else None}
        for row in rows.results
        if row["op"] == "matmul"
    ]
    return sorted(found, key=lambda row: -(row["over"] or 0))


FIGURES: Final[dict[str, Figure]] = {
    "speedups": Figure(
        "Speed-up over each peer",
        "A point is a problem: right of 1 tritile is faster, left of it the peer, with a triangle. Each band "
        "holds a suite, its slowest problem at the top; the bar is its geometric mean.",
        "results", _NO_RESULTS, charts.speedups,
        "Times and speed-ups, slowest first", tables.SPEED, _slowest_first,
    ),
    "roofline": Figure(
        "Roofline of matrix products",
        "A point is a product. Memory bounds products on the slope, arithmetic those below the flat roofs. "
        "Roofs are peaks at the highest clock, which tensor cores do not hold for long.",
        "results", _NO_RESULTS, charts.roofline,
        "Products and their roofs", tables.ROOF, _roofed,
    ),
    "bandwidth": Figure(
        "Permutations beside a plain copy",
        "A point is a permutation at the rate at which it moves bytes; the bar joined to it is a copy of as "
        "many bytes in the same process.",
        "results", _NO_RESULTS, charts.bandwidth,
        "Permutations and copies of as many bytes", tables.BYTES, _copied,
    ),
    "accuracy": Figure(
        "Accuracy of products",
        "Relative errors against a product in float64: below the line tritile errs less than torch.",
        "results", _NO_RESULTS, charts.accuracy,
        "Relative errors, the worst beside torch's first", tables.ERROR, _erring,
    ),
    "heatmap": Figure(
        "Times over tiles",
        "A cell is a tile: the time of the fastest config with it, over the fastest of all, which is ringed. "
        "Dashed cells were never measured; in cells with a cross every config failed.",
        "cells", _NO_TRIALS, charts.heatmap,
        "Tiles of the problem", tables.TILES, lambda rows: rows.cells,
    ),
    "progress": Figure(
        "How searches got on",
        "Thin lines are searches: the best time so far over the best in the end, by number of configs. "
        "Half of the searches are at or below the thick line, 9 of 10 below the dashed one. Ratios above 2 "
        "are drawn at 2.",
        "progress", _NO_TRIALS, charts.progress,
        "Searches, the largest first", tables.SEARCH, lambda rows: rows.searches, "s",
    ),
}  # fmt: skip
