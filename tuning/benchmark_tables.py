"""Make Markdown tables of the committed lines."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean as geomean
from typing import Any

Line = dict[str, Any]
Cells = tuple[str, ...]


def table(head: str, rows: Iterable[Cells]) -> str:
    """Return a table. A column of `head` whose name ends with a colon holds numbers."""
    names = [name.strip() for name in head.split("|")]
    rule = ["---:" if name.endswith(":") else "---" for name in names]
    shown = ([name.rstrip(":") for name in names], rule, *rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in shown)


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


def spread(values: Iterable[tuple[float, str]], low: bool = False) -> Cells:
    """Return how many ratios there are, their geometric mean, how many are under 1, the worst and its place.

    If `low`, their 5th percentile follows the mean.
    """
    ordered = sorted(values)
    ratios, (worst, at) = [ratio for ratio, _ in ordered], ordered[0]
    percentile = (f"{ratios[int(0.05 * (len(ratios) - 1))]:.2f}",) * low
    under = sum(ratio < 1 for ratio in ratios)
    return str(len(ratios)), f"{geomean(ratios):.2f}", *percentile, str(under), f"{worst:.2f}", at


def read(path: Path) -> list[Line]:
    """Return the lines of a file, which holds a JSON list or an object a line; none if there is no file."""
    text = path.read_text() if path.exists() else ""
    found: list[Line] = (
        json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]
    )
    return found


def latest(lines: Iterable[Line], names: Sequence[str]) -> list[Line]:
    """Return the last line of each combination of these fields, in the order of their first lines."""
    return list({tuple(str(line.get(name)) for name in names): line for line in lines}.values())
