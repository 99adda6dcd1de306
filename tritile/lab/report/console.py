"""Print results as tables on the terminal; only this module of the room needs rich (the extra `cli`)."""

import sys
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tritile.core.config import Config
from tritile.lab.report.results import HOST, Result, latest
from tritile.lab.report.summary import baselines_of, dtype_label, of_cases, sizes_label, summary

_PIPED_WIDTH = 200  # columns; to a file or a pipe nothing is gained by folding at 80


def _console(console: Console | None) -> Console:
    return console or Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH)


def _table(title: Text, left: Iterable[str], right: Iterable[str], last: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    for name in last:
        table.add_column(name, overflow="fold")
    return table


def _ratio(value: float | None) -> Text:
    """Write a ratio of times, highlighted where tritile is behind."""
    if value is None:
        return Text("-")
    return Text(f"{value:.3f}", style="bold red" if value < 1 else "")


def _rate(line: Result) -> str:
    if line["op"] != "permute":
        return f"{line['tflops']:.1f} TFLOP/s"
    copy = line.get("copy_gbps")
    return f"{line['gbps']:.0f} GB/s" + (f" ({line['gbps'] / copy:.0%} of copy)" if copy else "")


def _title(results: list[Result]) -> Text:
    """Return the GPU and the versions of the results."""
    names = ("gpu", "torch", "triton")
    found = [" / ".join(dict.fromkeys(line["env"][name] for line in results)) for name in names]
    return Text(f"{found[0] or 'no GPU'}, torch {found[1]}, triton {found[2]}")


def _add(table: Table, *cells: str | Text) -> None:
    # Cells come from files: as Text a bracket is not read as rich's markup.
    table.add_row(*[Text(cell) if isinstance(cell, str) else cell for cell in cells])


def _config(config: Config) -> str:
    """Abbreviate a config: 128x256x64 for its blocks, then the rest by name."""
    values = dict(config.kwargs)
    blocks = [str(values.pop(name)) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K") if name in values]
    rest = [f"{name.lower()} {value}" for name, value in values.items()]
    return ", ".join(["x".join(blocks), *rest, f"warps {config.num_warps}", f"stages {config.num_stages}"])


def _row(line: Result, baselines: list[str]) -> list[str | Text]:
    words = dtype_label(line["dtype"], line["precision"] or ""), line["layout"] or ""
    chosen = [line["plan_source"], _config(Config.from_dict(line["config"]))]
    return [
        f"{line['suite']}: {sizes_label(line)} {' '.join(words)}".rstrip(),
        f"{line['tritile_us']:.1f}",
        f"{line['torch_us']:.1f}",
        _ratio(line["ratio_torch"]),
        *[_ratio(line.get(f"ratio_{name}")) for name in baselines],
        f"{line['spread']:.1%}",
        _rate(line),
        f"{line['error']:.1e} / {line['torch_error']:.1e}",
        *(chosen if not baselines else []),  # columns of baselines take their place
    ]


def print_results(results: Iterable[Result], console: Console | None = None) -> None:
    """Print the last result of each case, one a row; ratios below 1 are highlighted.

    Times are in microseconds, ratios the baseline's time by tritile's; the rate of a permute counts bytes
    read and written. `console` is standard output by default.
    """
    lines = of_cases(results)
    if not lines:
        _console(console).print("no results")
        return
    baselines = baselines_of(lines)
    ratios = [f"{name} ratio" for name in ("torch", *baselines)]
    right = ("tritile us", "torch us", *ratios, "spread", "rate", "error / torch's")
    table = _table(_title(lines), ("problem",), right, ("source", "config") if not baselines else ())
    for line in lines:
        _add(table, *_row(line, baselines))
    _console(console).print(table)


def print_summary(results: Iterable[Result], console: Console | None = None, baseline: str = "torch") -> None:
    """Print counts, geometric means and worst ratios against a baseline; ratios below 1 are highlighted."""
    lines = list(results)
    rows = summary(lines, baseline)
    if not rows:
        _console(console).print("no results")
        return
    right = ("problems", "geometric mean", "behind", "worst")
    title = _title(of_cases(lines)).append(f", against {baseline}")
    table = _table(title, ("gpu", "suite", "dtype", "layout"), right, ("at",))
    for row in rows:
        words = (row.gpu, row.suite, dtype_label(row.dtype, row.precision), row.layout)
        numbers = (str(row.count), _ratio(row.geomean), str(row.behind), _ratio(row.worst))
        _add(table, *words, *numbers, row.worst_label)
    _console(console).print(table)


def print_host(lines: Iterable[Result], console: Console | None = None) -> None:
    """Print what calls cost the host, one a line."""
    for line in lines:
        times = f"tritile {line['tritile_us']:.1f} us, torch {line['torch_us']:.1f} us"
        _console(console).print(f"host cost of {line['call']}: {times}", markup=False)


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
