"""Make Markdown tables of the committed lines."""

from collections.abc import Iterable
from typing import Any

from tritile.lab.report.summary import geomean

Line = dict[str, Any]
Cells = tuple[str, ...]


def table(head: str, rows: Iterable[Cells]) -> str:
    """Return a table. A column of `head` whose name ends with a colon holds numbers."""
    names = [name.strip() for name in head.split("|")]
    rule = ["---:" if name.endswith(":") else "---" for name in names]
    shown = ([name.rstrip(":") for name in names], rule, *rows)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in shown)


def measured_on(lines: Iterable[Line]) -> str:
    """Return the GPU, versions and commits of lines."""
    envs = [line["env"] for line in lines]
    told = {name: ", ".join(dict.fromkeys(env[name] for env in envs)) for name in ("gpu", "torch", "triton")}
    commits = ", ".join(dict.fromkeys(env["tritile"][:7] for env in envs))
    return "**{gpu}**, torch {torch}, triton {triton}, tritile at {}".format(commits, **told)


def span(values: Iterable[float]) -> Cells:
    """Return the least, the most, the geometric mean and the number of values."""
    values = list(values)
    return f"{min(values):.3g}", f"{max(values):.3g}", f"{geomean(values):.3g}", str(len(values))
