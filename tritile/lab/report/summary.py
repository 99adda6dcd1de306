"""Summarise results: how tritile compares with a baseline over a suite."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tritile.lab.report.results import BASELINES, HOST, Result, case_of, latest


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
    """Hold how tritile compares with a baseline over one suite, dtype, precision and layout on one GPU.

    `geomean` and `worst` are of the baseline's time by tritile's: above 1, tritile is faster. `behind` counts
    the cases below 1. `worst_label` names the case with the worst ratio. `layout` is "" for permutes.
    """

    gpu: str
    suite: str
    dtype: str
    precision: str
    layout: str
    count: int
    geomean: float
    worst: float
    worst_label: str
    behind: int


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


def summary(results: Iterable[Result], baseline: str = "torch") -> list[Summary]:
    """Return counts, geometric means and worst ratios to a baseline, in the order of the results.

    Each case counts once, by its last result that has a time of the baseline.
    """
    ratio = f"ratio_{baseline}"
    groups: dict[tuple[str, ...], list[Result]] = {}
    for line in of_cases(line for line in results if line.get(ratio) is not None):
        case = case_of(line)
        words = ("", "") if case.op == "permute" else (case.precision, case.layout)
        groups.setdefault((line["env"]["gpu"], case.suite, case.dtype, *words), []).append(line)
    return [_summary_of(words, lines, ratio) for words, lines in groups.items()]


def _summary_of(words: tuple[str, ...], lines: list[Result], ratio: str) -> Summary:
    gpu, suite, dtype, precision, layout = words
    ratios = [line[ratio] for line in lines]
    worst = min(lines, key=lambda line: line[ratio])
    return Summary(
        gpu=gpu,
        suite=suite,
        dtype=dtype,
        precision=precision,
        layout=layout,
        count=len(lines),
        geomean=geomean(ratios),
        worst=worst[ratio],
        worst_label=sizes_label(worst),
        behind=sum(ratio < 1 for ratio in ratios),
    )


def dtype_label(dtype: str, precision: str) -> str:
    """Write the dtype, with its precision where that is not "ieee"."""
    return f"{dtype} {precision}" if precision not in ("", "ieee") else dtype
