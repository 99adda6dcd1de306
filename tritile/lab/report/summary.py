"""Summarise results, and write them in words: for tables on the terminal and in reports."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tritile.lab.report.results import BASELINES, HOST, Result, case_of, latest

HEADS = ("suite", "dtype", "layout", "problems", "geometric mean", "under 1", "worst", "at")


def of_cases(results: Iterable[Result]) -> list[Result]:
    """Return the last result of each case on each GPU, without results of host time."""
    return [line for line in latest(results) if line["op"] != HOST]


def baselines_of(results: list[Result]) -> list[str]:
    """Return the baselines besides torch that some result has a time of."""
    return [name for name in BASELINES if any(line.get(f"ratio_{name}") is not None for line in results)]


def geomean(values: Iterable[float]) -> float:
    """Return the geometric mean of one value or more, all above 0."""
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs))


@dataclass(frozen=True)
class Summary:
    """Hold how tritile compares with a baseline over one suite, dtype and layout on one GPU.

    `geomean` and `worst` are of the baseline's time by tritile's: above 1, tritile is faster. `behind` counts
    the cases below 1. `worst_label` names the case with the worst ratio. `layout` is "" for permutes.
    """

    gpu: str
    suite: str
    dtype: str
    layout: str
    count: int
    geomean: float
    behind: int
    worst: float
    worst_label: str

    @property
    def cells(self) -> list[str]:
        """Return the cells of a table whose columns are `HEADS`."""
        numbers = f"{self.count}", f"{self.geomean:.3f}", f"{self.behind}", f"{self.worst:.3f}"
        return [self.suite, self.dtype, self.layout, *numbers, self.worst_label]


def summary(results: Iterable[Result], baseline: str = "torch") -> list[Summary]:
    """Return counts, geometric means and worst ratios to a baseline, in the order of the results.

    Each case counts once, by its last result that has a time of the baseline.
    """
    ratio = f"ratio_{baseline}"
    groups: dict[tuple[str, str, str, str], list[Result]] = {}
    for line in of_cases(line for line in results if line.get(ratio) is not None):
        key = line["env"]["gpu"], line["suite"], dtype_label(line), line["layout"] or ""
        groups.setdefault(key, []).append(line)
    found = []
    for names, lines in groups.items():
        ratios, worst = [line[ratio] for line in lines], min(lines, key=lambda line: line[ratio])
        behind = sum(each < 1 for each in ratios)
        found.append(Summary(*names, len(lines), geomean(ratios), behind, worst[ratio], sizes_label(worst)))
    return found


def dtype_label(line: Result) -> str:
    """Write the dtype of a result, with its precision where that is not "ieee"."""
    precision = case_of(line).precision if line["op"] != "permute" else ""
    return f"{line['dtype']} {precision}" if precision not in ("", "ieee") else line["dtype"]


def sizes_label(line: Result) -> str:
    """Write the sizes of a result's case: 4096x4096x4096 (M, N, K), with a batch before them.

    Groups are written "64 even groups of (8192)x2048x4096", with the shared extent in parentheses. A
    permutation is written as the shape of x, then the order of dimensions unless only the last two swap.
    """
    if line["op"] == "permute":
        sizes, dims = "x".join(str(size) for size in line["shape"]), list(line["dims"])
        axes = list(range(len(dims)))
        plain = dims == [*axes[:-2], *reversed(axes[-2:])]
        return sizes if plain else f"{sizes} ({','.join(map(str, dims))})"
    if line["op"] == "grouped":
        sizes = "x".join(f"({line[s]})" if s == line["ragged"] else str(line[s]) for s in ("m", "n", "k"))
        return f"{line['batch']} {line['load']} groups of {sizes}"
    batch = [line["batch"]] if line.get("batch", 1) > 1 else []
    return "x".join(str(size) for size in (*batch, line["m"], line["n"], line["k"]))


def rate_text(line: Result) -> str:
    """Write the rate of a result; that of a permutation counts bytes read and written."""
    if line["op"] != "permute":
        return f"{line['tflops']:.1f} TFLOP/s"
    copy = line.get("copy_gbps")
    return f"{line['gbps']:.0f} GB/s" + (f" ({line['gbps'] / copy:.0%} of copy)" if copy else "")
