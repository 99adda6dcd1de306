"""The figures of a report, a text, a chart and a table each; and how rows are written as tables."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import altair as alt

from tritile.lab.report.page import charts
from tritile.lab.report.page.rows import Row, Rows
from tritile.lab.report.results import BASELINES
from tritile.lab.report.summary import HEADS, Summary, geomean

_NO_RESULTS: Final = "No such results: tritile bench --output DIR measures problems and writes them."
_NO_TRIALS: Final = "No trials: tritile tune makes them; tritile report FILE shows another machine's."


# Titles of columns that are not the names of fields with spaces.
_TITLES: Final = {
    **{name: f"{name} / tritile" for name in ("torch", *BASELINES)}, "ratio_torch": "torch / tritile",
    "source": "chosen by", "intensity": "operations per byte", "tflops": "TFLOP/s", "of_roof": "of its roof",
    "megabytes": "MB", "gbps": "GB/s", "copy_gbps": "a copy's GB/s", "of_copy": "of the copy",
    "over": "tritile / torch", "torch_error": "torch's error",
    "first": "first over best", "within": "configs to within 2%", "best": "best config",
}  # fmt: skip
_TEXTS: Final = {
    "problem", "suite", "dtype", "layout", "store", "config", "source", "best", "call", "fastest config",
}  # fmt: skip
_SHARES: Final = {"spread", "of_roof", "of_copy"}
_ERRORS: Final = {"error", "torch_error"}
_RATIOS: Final = {"torch", *BASELINES, "ratio_torch", "over", "first"}


@dataclass(frozen=True)
class Table:
    """Hold a table of text; `heads` are (title, whether the column holds numbers).

    Each of `lines` is (key, cells). A key such as "r12" names the row that filters test: of results (r),
    searches (s) or groups of results (g). A line with key "" is always shown.
    """

    caption: str
    heads: list[tuple[str, bool]]
    lines: list[tuple[str, list[str]]]


def _shown(field: str, value: Any) -> str:
    """Write a value: shares in percent, errors with an exponent, ratios in 3 decimals, others in 2."""
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(value)
    if not isinstance(value, float):
        return str(value)
    if field in _ERRORS:
        return f"{value:.2e}" if value else "0"
    return f"{value:.2%}" if field in _SHARES else f"{value:.3f}" if field in _RATIOS else f"{value:.2f}"


def _heads(fields: Iterable[str]) -> list[tuple[str, bool]]:
    """Return the heads of columns, by the fields that they show."""
    return [(_TITLES.get(field, field.replace("_", " ")), field not in _TEXTS) for field in fields]


def table(caption: str, fields: Iterable[str], rows: Iterable[Row], key: str = "") -> Table:
    """Return the table of rows, without columns that no row fills; `key` is the field that names a row."""
    rows = list(rows)
    used = [field for field in fields if any(row.get(field) not in (None, "", []) for row in rows)]
    lines = [
        (f"{key}{row[key]}" if key else "", [_shown(field, row.get(field)) for field in used]) for row in rows
    ]
    return Table(caption, _heads(used), lines)


def summary_table(lines: Iterable[Summary]) -> Table:
    """Return the table of geometric means and worst cases against torch, as `tritile bench` prints it."""
    rows = [(f"g {' '.join(line.cells[:3])}", line.cells) for line in lines]
    numbers = range(3, 7)
    named = [(head, i in numbers) for i, head in enumerate(HEADS)]
    return Table("Torch's time over tritile's, by suite, type and layout", named, rows)


def _named(means: list[tuple[float, str]]) -> str:
    *others, last = [f"{name} ({mean:.2f}x)" for mean, name in means[:3]]
    return f"{', '.join(others)} and {last}" if others else last


def headline(rows: Rows) -> list[str]:
    """Say in sentences how tritile compares with torch: on the whole, where it gains and where it loses."""
    ratios = [row["torch"] for row in rows.results]
    if not ratios:
        return [
            f"Searches: {len(rows.searches)}. Configs tried: {rows.trials}. Nothing was timed beside torch."
        ]
    groups: dict[str, list[float]] = defaultdict(list)
    for row in rows.results:
        groups[f"{row['dtype']} in {row['suite']}"].append(row["torch"])
    means = sorted((geomean(own), name) for name, own in groups.items())
    slower, faster = [each for each in means if each[0] < 0.995], [each for each in means if each[0] >= 1.005]
    won, worst = sum(ratio >= 1 for ratio in ratios), min(rows.results, key=lambda row: row["torch"])
    case = " ".join(filter(None, (worst["problem"], worst["layout"], worst["dtype"])))
    return [
        f"tritile is {geomean(ratios):.2f}x as fast as torch, by the geometric mean of what was measured: "
        f"as fast or faster on {won} of {len(ratios)} problems.",
        f"By type and suite, it gains most on {_named(faster[::-1])}."
        if faster
        else "It gains on no pair of type and suite.",
        f"It loses on {len(slower)} of {len(means)} pairs of type and suite, most on {_named(slower)}."
        if slower
        else "It loses on no pair of type and suite.",
        f"Slowest beside torch is {case}, at {worst['torch']:.2f}x.",
    ]


@dataclass(frozen=True)
class Figure:
    """Describe a figure: its title, a sentence or two on what it shows, and the function that builds it.

    `data` names the field of `Rows` that it draws. `select` returns the rows of its table, none where there
    is nothing to draw. `key` is the field that names a row for filters.
    """

    title: str
    shows: str
    data: str
    build: Callable[[Rows], charts.Chart]
    caption: str
    columns: tuple[str, ...]
    select: Callable[[Rows], list[Row]]
    key: str = "r"

    @property
    def nothing(self) -> str:
        """Say what is missing where there is nothing to draw."""
        return _NO_RESULTS if self.data == "results" else _NO_TRIALS

    def table(self, rows: Rows) -> Table:
        """Return the table of the figure; the page itself fills the heat map's, for the chosen problem."""
        if self.data == "cells":
            return Table(self.caption, _heads(self.columns), [])
        return table(self.caption, self.columns, self.select(rows), self.key)

    def spec(self, rows: Rows) -> dict[str, Any]:
        """Return the Vega-Lite specification, as wide as its container; its data is only named."""
        fit = alt.AutoSizeParams(type="fit-x", contains="padding")
        return dict(self.build(rows).properties(width="container", autosize=fit).to_dict())


def _results(by: str, op: str = "") -> Callable[[Rows], list[Row]]:
    """Return a function that gives the results of an op, or all, by a field."""

    def select(rows: Rows) -> list[Row]:
        own = [row for row in rows.results if op in ("", row["op"])]
        return sorted(own, key=lambda row: row[by] or 0)

    return select


_CASE: Final = ("problem", "suite", "dtype", "layout")
_SPEED: Final = (
    *_CASE, "tritile_us", "torch_us", "torch", *(f"{name}{end}" for name in BASELINES for end in ("_us", "")),
    "spread", "config", "source",
)  # fmt: skip
FIGURES: Final[dict[str, Figure]] = {
    "speedups": Figure(
        "Speed-up over each baseline",
        "A point is a problem: right of the dashed line tritile is faster; left of it, drawn as a triangle, "
        "the baseline is. A row is a suite, beside torch where no other baseline is named, with its slowest "
        "problem at the top. The bar is the geometric mean, written at the right, above how many problems "
        "are as fast or faster.",
        "results", charts.speedups,
        "Times and speed-ups, slowest first", _SPEED, _results("torch"),
    ),
    "roofline": Figure(
        "Roofline of matrix products",
        "A point is a product; bytes count each operand once. Memory bounds products on the slope, "
        "arithmetic those below the flat roof of their type or precision. Roofs are peaks at the highest "
        "clock, which tensor cores do not hold for long.",
        "results", charts.roofline,
        "Products and their roofs",
        (*_CASE, "intensity", "tflops", "of_roof", "config"), _results("intensity", "matmul"),
    ),
    "bandwidth": Figure(
        "Permutations beside a plain copy",
        "A point is a permutation at the rate at which it moves bytes; the bar joined to it is a copy of as "
        "many bytes in the same process.",
        "results", charts.bandwidth,
        "Permutations and copies of as many bytes",
        (*_CASE[:3], "megabytes", "gbps", "copy_gbps", "of_copy", "config"), _results("megabytes", "permute"),
    ),
    "accuracy": Figure(
        "Accuracy of products",
        "Relative errors against a product in float64: below the line tritile errs less than torch. Exact "
        "products are left out, and types of 64 bits: the command tritile accuracy measures those.",
        "results", charts.accuracy,
        "Relative errors, the worst beside torch's first",
        (*_CASE, "error", "torch_error", "over"), charts.erring,
    ),
    "heatmap": Figure(
        "Times over tiles",
        "A cell is a tile: the time of the fastest config with it, over the fastest of all, which is ringed. "
        "Dashed cells were never measured; in cells with a cross every config failed.",
        "cells", charts.heatmap,
        "Tiles of the problem",
        ("down", "across", "us", "over the fastest", "configs", "fastest config"), lambda rows: rows.cells,
    ),
    "progress": Figure(
        "How searches got on",
        "Thin lines are searches: the best time so far over the best in the end, by number of configs. "
        "Half of the searches are at or below the thick line, 9 of 10 below the dashed one. Ratios above 2 "
        "are drawn at 2.",
        "progress", charts.progress,
        "Searches, the largest first",
        ("problem", "suite", "store", "configs", "failed", "best_us", "first", "within", "best"),
        lambda rows: rows.searches, "s",
    ),
}  # fmt: skip
