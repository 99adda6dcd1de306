"""Write rows as tables of text, below each figure and at the start of a page."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from tritile.lab.report.page.rows import Row, Rows
from tritile.lab.report.results import BASELINES
from tritile.lab.report.summary import HEADS, Summary

Show = Callable[[Any], str]
Column = tuple[str, str, Show]  # title, field, how to show it; columns not shown by `plain` hold numbers


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


def plain(value: Any) -> str:
    """Write a text, or a list of texts."""
    return "" if value is None else ", ".join(value) if isinstance(value, list) else str(value)


def _count(value: int) -> str:
    return f"{value}"


def _error(value: float) -> str:
    return f"{value:.2e}" if value else "0"


def _named(show: Show, **titles: str) -> list[Column]:
    """Return columns that are shown alike, by field."""
    return [(title, field, show) for field, title in titles.items()]


_CASE: Final[list[Column]] = [(name, name, plain) for name in ("problem", "suite", "dtype", "layout")]
_CONFIG: Final[list[Column]] = _named(plain, config="config")
_BASELINES: Final[list[Column]] = [
    column
    for name in BASELINES
    for column in ((f"{name} us", f"{name}_us", us), (f"over {name}", name, ratio))
]
SPEED: Final[list[Column]] = [
    *_CASE, *_named(us, tritile_us="tritile us", torch_us="torch us"), ("over torch", "torch", ratio),
    *_BASELINES, ("spread", "spread", percent), *_CONFIG, ("chosen by", "source", plain),
]  # fmt: skip
ROOF: Final[list[Column]] = [
    *_CASE, *_named(us, intensity="operations a byte", tflops="TFLOP/s"), ("of its roof", "of_roof", percent),
    *_CONFIG,
]  # fmt: skip
BYTES: Final[list[Column]] = [
    *_CASE[:3], *_named(us, megabytes="MB", gbps="GB/s", copy_gbps="a copy's"),
    ("of the copy", "of_copy", percent), *_CONFIG,
]  # fmt: skip
ERROR: Final[list[Column]] = [
    *_CASE, *_named(_error, error="error", torch_error="torch's"), ("over torch's", "over", ratio)
]  # fmt: skip
SEARCH: Final[list[Column]] = [
    *_named(plain, problem="problem", suite="suite", store="store"),
    *_named(_count, configs="configs", failed="failed"), ("best us", "best_us", us),
    ("first over best", "first", ratio), ("configs until 2% off", "within", _count),
    ("best config", "best", plain),
]  # fmt: skip
STUDY: Final[list[Column]] = [
    ("problem", "problem", plain),
    *_named(percent, median="searches, median", worst="worst", first_pick_regret="model's first pick"),
    ("winner on a neighbour", "transfer_regret", percent),
    *_named(_count, configs="configs tried", space="of"),
    *_named(us, tune_seconds="seconds", best_us="best us"), ("best", "best", plain),
]  # fmt: skip
TILES: Final[list[Column]] = [
    *_named(us, y="down", x="across", us="us", ratio="over the fastest", configs="configs"),
    ("fastest config", "config", plain),
]  # fmt: skip
_HOST: Final[list[Column]] = [
    ("call", "call", plain), *_named(us, tritile_us="tritile us", torch_us="torch us"),
    ("over torch", "ratio_torch", ratio),
]  # fmt: skip
_AUTOTUNE: Final[list[Column]] = [
    *_named(plain, kernel="kernel", problem="problem"),
    *_named(us, triton_s="triton s", tritile_s="tritile s, list", space_s="tritile s, space"),
    *_named(us, triton_us="triton us", tritile_us="tritile us, list", space_us="tritile us, space"),
]  # fmt: skip


def table(caption: str, columns: list[Column], rows: Iterable[Row], key: str = "") -> Table:
    """Return the table of rows, without columns that no row fills; `key` is the field that names a row."""
    rows = list(rows)
    used = [column for column in columns if any(row.get(column[1]) not in (None, "", []) for row in rows)]
    lines = [
        (f"{key}{row[key]}" if key else "", [show(row.get(field)) for _, field, show in used]) for row in rows
    ]
    return Table(caption, [(title, show is not plain) for title, _, show in used], lines)


def others(rows: Rows) -> list[Table]:
    """Return the tables without figures: host costs of calls, decorated kernels beside triton.autotune."""
    found = (
        ("What a call costs the host, in microseconds", _HOST, rows.hosts),
        (
            "Decorated kernels beside triton.autotune: seconds of a first call, and the winners' times",
            _AUTOTUNE,
            rows.autotune,
        ),
    )
    return [table(*each) for each in found if each[-1]]


def summary_table(lines: Iterable[Summary]) -> Table:
    """Return the table of geometric means and worst cases against torch, as `tritile bench` prints it."""
    rows = [(f"g {' '.join(line.cells[:3])}", line.cells) for line in lines]
    numbers = range(3, 7)
    heads = [(head, i in numbers) for i, head in enumerate(HEADS)]
    return Table("By suite, type and layout, against torch", heads, rows)
