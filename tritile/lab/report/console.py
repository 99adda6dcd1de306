"""Print results as tables on the terminal; only this module of the room needs rich (the extra `cli`)."""

import sys
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tritile.lab.report.results import HOST, Result, latest
from tritile.lab.report.summary import HEADS, baselines_of, columns, of_cases, summary

_PIPED_WIDTH = 200  # columns; to a file or a pipe nothing is gained by folding at 80
_FOLDED = ("source", "config", "at")
_RATIOS = ("over", "geometric mean", "worst")  # how the names of columns of ratios begin
_TEXTS = ("problem", "gpu", "suite", "dtype", "layout", *_FOLDED)


def _print(console: Console | None, title: str, rows: list[dict[str, str]]) -> None:
    """Print a table, or that there is nothing to show. Ratios below 1, where tritile is behind, are red."""
    console = console or Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    if not rows:
        console.print("no results")
        return
    table = Table(title=Text(title), title_justify="left")
    for name in rows[0]:
        folded, justify = name in _FOLDED, "left" if name in _TEXTS else "right"
        table.add_column(name, justify=justify, no_wrap=not folded, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        # Cells come from files: as Text a bracket is not read as rich's markup.
        cells = []
        for name, cell in row.items():
            behind = name.startswith(_RATIOS) and cell and float(cell) < 1
            cells.append(Text(cell, style="bold red" if behind else ""))
        table.add_row(*cells)
    console.print(table)


def _title(results: list[Result]) -> str:
    """Return the GPU and the versions of the results."""
    names = ("gpu", "torch", "triton")
    found = [" / ".join(dict.fromkeys(line["env"][name] for line in results)) for name in names]
    return f"{found[0] or 'no GPU'}, torch {found[1]}, triton {found[2]}"


def print_results(results: Iterable[Result], console: Console | None = None) -> None:
    """Print the last result of each case, one a row; `console` is standard output by default."""
    lines = of_cases(results)
    baselines, rows = baselines_of(lines), []
    for line in lines:
        row = columns(line, baselines)
        case = f"{row.pop('suite')}: {' '.join(row.pop(name) for name in ('problem', 'dtype', 'layout'))}"
        for name in ("source", "config") if baselines else ():  # columns of baselines take their place
            del row[name]
        rows.append({"problem": case.rstrip(), **row})
    _print(console, _title(lines), rows)


def print_summary(results: Iterable[Result], console: Console | None = None, baseline: str = "torch") -> None:
    """Print counts, geometric means and worst ratios against a baseline."""
    lines = list(results)
    rows = [{"gpu": row.gpu, **dict(zip(HEADS, row.cells, strict=True))} for row in summary(lines, baseline)]
    _print(console, f"{_title(of_cases(lines))}, against {baseline}", rows)


def print_host(lines: Iterable[Result], console: Console | None = None) -> None:
    """Print what calls cost the host, one a line."""
    console = console or Console(width=_PIPED_WIDTH)
    for line in lines:
        times = f"tritile {line['tritile_us']:.1f} us, torch {line['torch_us']:.1f} us"
        console.print(f"host cost of {line['call']}: {times}", markup=False)


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
