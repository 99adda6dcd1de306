"""Rows as tables of text, below each figure and at the start of a page."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from tritile.lab.report.page.rows import Row, Rows
from tritile.lab.report.results import BASELINES
from tritile.lab.report.summary import HEADS, Summary

Show = Callable[[Any], str]


@dataclass(frozen=True)
class Table:
    """Hold a table of text; `heads` are (title, whether the column holds numbers).

    Each of `lines` is (key, cells). A key such as "r12" names the row that filters test: of results (r),
    searches (s), the study (t) or groups of results (g). A line with key "" is always shown.
    """

    caption: str
    heads: list[tuple[str, bool]]
    lines: list[tuple[str, list[str]]]


def us(value: float | None) -> str:
    """Write microseconds in three to four digits."""
    return "" if value is None else f"{value:.2f}" if value < 100 else f"{value:.1f}"


def ratio(value: float | None) -> str:
    """Write a ratio in three to four digits."""
    return "" if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def percent(value: float | None) -> str:
    """Write a fraction in percent."""
    return "" if value is None else f"{100 * value:.2f}%"


def _plain(value: Any) -> str:
    return "" if value is None else ", ".join(value) if isinstance(value, list) else str(value)


def _error(value: float) -> str:
    return f"{value:.2e}" if value else "0"


# (title, field, how to show it); columns not shown by _plain hold numbers.
Column = tuple[str, str, Show]
_CASE: Final[list[Column]] = [(name, name, _plain) for name in ("problem", "suite", "dtype", "layout")]
_CHOICE: Final[list[Column]] = [("config", "config", _plain), ("chosen by", "source", _plain)]
_BASELINES: Final[list[Column]] = [
    column
    for name in BASELINES
    for column in ((f"{name} us", f"{name}_us", us), (f"over {name}", name, ratio))
]
_SPEED: Final[list[Column]] = [
    *_CASE,
    ("tritile us", "tritile_us", us),
    ("torch us", "torch_us", us),
    ("over torch", "torch", ratio),
    *_BASELINES,
    ("spread", "spread", percent),
    *_CHOICE,
]
_ROOF: Final[list[Column]] = [
    *_CASE,
    ("operations a byte", "intensity", us),
    ("TFLOP/s", "tflops", us),
    ("of its roof", "of_roof", percent),
    *_CHOICE[:1],
]
_BYTES: Final[list[Column]] = [
    *_CASE[:3],
    ("MB", "megabytes", us),
    ("GB/s", "gbps", us),
    ("a copy's", "copy_gbps", us),
    ("of the copy", "of_copy", percent),
    *_CHOICE[:1],
]
_ERROR: Final[list[Column]] = [
    *_CASE,
    ("error", "error", _error),
    ("torch's", "torch_error", _error),
    ("over torch's", "over", ratio),
]
_COUNT: Final[Show] = lambda value: f"{value}"  # noqa: E731 - a column of numbers, unlike _plain
_SEARCH: Final[list[Column]] = [
    ("problem", "problem", _plain),
    ("suite", "suite", _plain),
    ("store", "store", _plain),
    ("configs", "configs", _COUNT),
    ("failed", "failed", _COUNT),
    ("best us", "best_us", us),
    ("first over best", "first", ratio),
    ("configs until 2% off", "within", _COUNT),
    ("best config", "best", _plain),
]
_STUDY: Final[list[Column]] = [
    ("problem", "problem", _plain),
    ("searches, median", "median", percent),
    ("worst", "worst", percent),
    ("model's first pick", "first_pick_regret", percent),
    ("winner on a neighbour", "transfer_regret", percent),
    ("configs tried", "configs", _COUNT),
    ("of", "space", _COUNT),
    ("seconds", "tune_seconds", us),
    ("best us", "best_us", us),
    ("best", "best", _plain),
]
_HOST: Final[list[Column]] = [
    ("call", "call", _plain),
    ("tritile us", "tritile_us", us),
    ("torch us", "torch_us", us),
    ("over torch", "ratio_torch", ratio),
]
_AUTOTUNE: Final[list[Column]] = [
    ("kernel", "kernel", _plain),
    ("problem", "problem", _plain),
    ("triton s", "triton_s", us),
    ("tritile s, list", "tritile_s", us),
    ("tritile s, space", "space_s", us),
    ("triton us", "triton_us", us),
    ("tritile us, list", "tritile_us", us),
    ("tritile us, space", "space_us", us),
]


def _table(caption: str, columns: list[Column], rows: Iterable[Row], key: str = "") -> Table:
    rows = list(rows)
    used = [column for column in columns if any(row.get(column[1]) not in (None, "", []) for row in rows)]
    lines = [
        (f"{key}{row[key]}" if key else "", [show(row.get(field)) for _, field, show in used]) for row in rows
    ]
    return Table(caption, [(title, show is not _plain) for title, _, show in used], lines)


def _roofed(rows: Rows) -> Iterable[Row]:
    """Yield products with their share of the roof, the lower of memory's and arithmetic's."""
    peaks = {dtype: roof["tflops"] for roof in rows.roofs for dtype in roof["dtypes"]}
    for row in sorted(rows.results, key=lambda row: row.get("intensity") or 0):
        if row["op"] == "matmul":
            peak = peaks.get(row["dtype"])
            memory = rows.device.memory_gbps / 1e3 * row["intensity"] if rows.device else None
            roof = min(peak, memory) if peak and memory else None
            yield row | {"of_roof": row["tflops"] / roof if roof else None}


def _copied(rows: Rows) -> Iterable[Row]:
    for row in sorted(rows.results, key=lambda row: row["bytes"]):
        if row["op"] == "permute":
            copy = row["copy_gbps"]
            yield row | {"megabytes": row["bytes"] / 1e6, "of_copy": row["gbps"] / copy if copy else None}


def _erring(rows: Rows) -> list[Row]:
    found = [
        row | {"over": row["error"] / row["torch_error"] if row["torch_error"] else None}
        for row in rows.results
        if row["op"] == "matmul"
    ]
    return sorted(found, key=lambda row: -(row["over"] or 0))


def _studied(rows: Rows) -> Iterable[Row]:
    for row in rows.study:
        regrets = row["regrets"]
        middle = statistics.median(regrets) if regrets else None
        yield row | {"median": middle, "worst": max(regrets, default=None)}


def table_of(name: str, rows: Rows) -> Table:
    """Return the table of a figure; the page itself fills the heat map's, for the chosen problem."""
    if name == "speedups":
        slowest_first = sorted(rows.results, key=lambda row: row["torch"])
        return _table("Times and speed-ups, slowest first", _SPEED, slowest_first, "r")
    if name == "roofline":
        return _table("Products and their roofs", _ROOF, _roofed(rows), "r")
    if name == "bandwidth":
        return _table("Permutations and copies of as many bytes", _BYTES, _copied(rows), "r")
    if name == "accuracy":
        return _table("Relative errors, the worst beside torch's first", _ERROR, _erring(rows), "r")
    if name == "progress":
        return _table("Searches, the largest first", _SEARCH, rows.searches, "s")
    if name == "study":
        return _table("What searches lose", _STUDY, _studied(rows), "t")
    heads = ("down", "across", "us", "over the fastest", "configs", "fastest config")
    return Table("Tiles of the problem", [(head, head != heads[-1]) for head in heads], [])


def others(rows: Rows) -> list[Table]:
    """Return the tables without figures: host costs of calls, decorated kernels beside triton.autotune."""
    found = []
    if rows.hosts:
        found.append(_table("What a call costs the host, in microseconds", _HOST, rows.hosts))
    if rows.autotune:
        caption = "Decorated kernels beside triton.autotune: seconds of a first call, and the winners' times"
        found.append(_table(caption, _AUTOTUNE, rows.autotune))
    return found


def summary_table(lines: Iterable[Summary]) -> Table:
    """Return the table of geometric means and worst cases against torch, as `tritile bench` prints it."""
    rows = [(f"g {' '.join(line.cells[:3])}", line.cells) for line in lines]
    numbers = range(3, 7)
    heads = [(head, i in numbers) for i, head in enumerate(HEADS)]
    return Table("By suite, type and layout, against torch", heads, rows)
