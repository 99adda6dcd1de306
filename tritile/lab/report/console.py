"""Print results as tables on the terminal; only this module of the room needs rich (the extra `cli`)."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console

from tritile.lab.report.columns import number, table
from tritile.lab.report.results import HOST, Result, latest
from tritile.lab.report.summary import (
    Summary,
    baselines_of,
    dtype_label,
    of_cases,
    rate_text,
    sizes_label,
    summary,
)


def _title(results: list[Result]) -> str:
    """Return the GPU and the versions of the results."""
    names = ("gpu", "torch", "triton")
    found = [" / ".join(dict.fromkeys(line["env"][name] for line in results)) for name in names]
    return f"{found[0] or 'no GPU'}, torch {found[1]}, triton {found[2]}"


def _ratio(value: float | None) -> Any:
    """Return a ratio as a cell, red below 1, where tritile is behind."""
    return number(value, ".3f", bad=value is not None and value < 1)


def print_results(results: Iterable[Result], console: Console | None = None) -> None:
    """Print the last result of each case, one a row; `console` is standard output by default."""
    console, lines = console or Console(), of_cases(results)
    if not lines:
        console.print("no results")
        return
    rows = [
        {
            "problem": sizes_label(line),
            **{name: str(line[name] or "") for name in ("suite", "layout")},
            "dtype": dtype_label(line),
            "us": number(line["tritile_us"], ".2f"),
            "torch us": number(line["torch_us"], ".2f"),
            **{f"x {name}": _ratio(line.get(f"ratio_{name}")) for name in ("torch", *baselines_of(lines))},
            "rate": rate_text(line),
        }
        for line in lines
    ]
    console.print(table(rows, _title(lines), ("suite", "dtype", "layout")))


def _row(row: Summary) -> dict[str, Any]:
    return {
        "suite": row.suite,
        "dtype": row.dtype,
        "layout": row.layout,
        "cases": number(row.count),
        "mean": _ratio(row.geomean),
        "under 1": number(row.behind),
        "worst": _ratio(row.worst),
        "at": row.worst_label,
    }


def print_summary(results: Iterable[Result], console: Console | None = None, baseline: str = "torch") -> None:
    """Print counts, geometric means and worst ratios against a baseline."""
    console, lines = console or Console(), list(results)
    rows = [_row(row) for row in summary(lines, baseline)]
    if not rows:
        console.print("no results")
        return
    title = f"{_title(of_cases(lines))}, against {baseline}"
    console.print(table(rows, title, ("suite", "dtype", "layout")))


def print_host(lines: Iterable[Result], console: Console | None = None) -> None:
    """Print what calls cost the host, one a row."""
    rows = [
        {
            "host cost of": line["call"],
            "tritile us": number(line["tritile_us"], ".1f"),
            "torch us": number(line["torch_us"], ".1f"),
        }
        for line in lines
    ]
    if rows:
        (console or Console()).print(table(rows))


def newest(results: Iterable[Result]) -> list[Result]:
    """Return the newest result of each case or call on each GPU, by its time."""
    return latest(sorted(results, key=lambda line: line["env"]["time"]))


def print_comparison(results: Iterable[Result], console: Console | None = None) -> None:
    """Print a summary for each GPU and each baseline that was run, then what calls cost the host.

    The newest result of each case counts, by its time.
    """
    lines = sorted(results, key=lambda line: line["env"]["time"])
    for gpu in dict.fromkeys(line["env"]["gpu"] for line in lines):
        here = [line for line in lines if line["env"]["gpu"] == gpu]
        cases = [line for line in here if line["op"] != HOST]
        for baseline in ("torch", *baselines_of(cases)) if cases else ():
            print_summary(cases, console, baseline)
        print_host([line for line in latest(here) if line["op"] == HOST], console)
