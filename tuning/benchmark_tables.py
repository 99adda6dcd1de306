"""Make Markdown tables of the committed lines."""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean as geomean
from typing import Any, NamedTuple

from benchmark_results import is_by_size

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


def starts(line: Line) -> int:
    """Return the bytes, up to 128, that every row of a product's 16-bit operands starts on."""
    return math.gcd(2 * line["k"], 2 * line["n"] if line["layout"] == "NN" else 0, 128)


def span(values: Iterable[float]) -> Cells:
    """Return the least, the most, the geometric mean and the number of values."""
    values = list(values)
    shown = (
        f"{x:.2f}" if 0.01 <= x < 100 else f"{x:.3g}" for x in (min(values), max(values), geomean(values))
    )
    return *shown, str(len(values))


class Pair(NamedTuple):
    """Times of the peer and of tritile, in the same unit, and the sizes they are of.

    `by_size`: drawn as it comes, or chosen; else of a half that was drawn for its time.
    """

    peer: float
    own: float
    at: str
    by_size: bool = True

    @property
    def ratio(self) -> float:
        return self.peer / self.own


def pair(line: Line, peer: str = "torch_us", own: str = "tritile_us", at: str = "") -> Pair:
    """Return the times of two fields of a line."""
    return Pair(line[peer], line[own], at, is_by_size(line))


def by_time(pairs: Iterable[Pair]) -> float:
    """Return the time-weighted ratio: the sum of the peer's times by the sum of tritile's."""
    pairs = list(pairs)
    return sum(each.peer for each in pairs) / sum(each.own for each in pairs)


def mean(pairs: Iterable[Pair]) -> float:
    """Return the geometric mean of the ratios, of what was drawn by size where anything was."""
    pairs = list(pairs)
    return geomean(each.ratio for each in [each for each in pairs if each.by_size] or pairs)


def spread(pairs: Iterable[Pair], low: bool = False) -> Cells:
    """Return cells of a row: how many, by time, geometric mean, how many under 1, the worst and its sizes.

    If `low`, the 5th percentile follows the mean. Both are of what was drawn by size, the others of all.
    """
    pairs = list(pairs)
    worst = min(pairs, key=lambda each: each.ratio)
    ratios = sorted(each.ratio for each in [each for each in pairs if each.by_size] or pairs)
    percentile = (f"{ratios[int(0.05 * (len(ratios) - 1))]:.2f}",) * low
    middle = f"{by_time(pairs):.2f}", f"{mean(pairs):.2f}", *percentile
    return (
        str(len(pairs)),
        *middle,
        str(sum(each.ratio < 1 for each in pairs)),
        f"{worst.ratio:.2f}",
        worst.at,
    )


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
