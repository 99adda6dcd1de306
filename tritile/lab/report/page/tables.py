"""Write rows as tables of text, below each figure and at the start of a page."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from tritile.lab.report.page.rows import Row
from tritile.lab.report.results import BASELINES
from tritile.lab.report.summary import HEADS, Summary

CASE: Final = ("problem", "suite", "dtype", "layout")
SPEED: Final = (
    *CASE, "tritile_us", "torch_us", "torch", *(f"{name}{end}" for name in BASELINES for end in ("_us", "")),
    "spread", "config", "source",
)  # fmt: skip
ROOF: Final = (*CASE, "intensity", "tflops", "of_roof", "config")
BYTES: Final = (*CASE[:3], "megabytes", "gbps", "copy_gbps", "of_copy", "config")
ERROR: Final = (*CASE, "error", "torch_error", "over")
TILES: Final = ("down", "across", "us", "over the fastest", "configs", "fastest config")
SEARCH: Final = ("problem", "suite", "store", "configs", "failed", "best_us", "first", "within", "best")
HOST: Final = ("call", "tritile_us", "torch_us", "ratio_torch")
# Titles of columns that are not the names of fields with spaces.
_TITLES: Final = {
    **{name: f"over {name}" for name in ("torch", *BASELINES)}, "ratio_torch": "over torch",
    "source": "chosen by", "intensity": "operations a byte", "tflops": "TFLOP/s", "of_roof": "of its roof",
    "megabytes": "MB", "gbps": "GB/s", "copy_gbps": "a copy's GB/s", "of_copy": "of the copy",
    "over": "over torch's", "first": "first over best", "within": "configs until 2% off",
    "best": "best config",
}  # fmt: skip
_TEXTS: Final = {*CASE, "store", "config", "source", "best", "call", "fastest config"}
_SHARES: Final = {"spread", "of_roof", "of_copy"}
_ERRORS: Final = {"error", "torch_error"}


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
    """Write a value: shares in percent, errors with an exponent, other numbers in about four digits."""
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(value)
    if not isinstance(value, float):
        return str(value)
    if field in _ERRORS:
        return f"{value:.2e}" if value else "0"
    return f"{value:.2%}" if field in _SHARES else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def heads(fields: Iterable[str]) -> list[tuple[str, bool]]:
    """Return the heads of columns, by the fields that they show."""
    return [(_TITLES.get(field, field.replace("_", " ")), field not in _TEXTS) for field in fields]


def table(caption: str, fields: Iterable[str], rows: Iterable[Row], key: str = "") -> Table:
    """Return the table of rows, without columns that no row fills; `key` is the field that names a row."""
    rows = list(rows)
    used = [field for field in fields if any(row.get(field) not in (None, "", []) for row in rows)]
    lines = [
        (f"{key}{row[key]}" if key else "", [_shown(field, row.get(field)) for field in used]) for row in rows
    ]
    return Table(caption, heads(used), lines)


def summary_table(lines: Iterable[Summary]) -> Table:
    """Return the table of geometric means and worst cases against torch, as `tritile bench` prints it."""
    rows = [(f"g {' '.join(line.cells[:3])}", line.cells) for line in lines]
    numbers = range(3, 7)
    named = [(head, i in numbers) for i, head in enumerate(HEADS)]
    return Table("By suite, type and layout, against torch", named, rows)
