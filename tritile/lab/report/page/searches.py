"""Trials as plain rows: searches, times over tiles, and progress of searches; and all rows of a report."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import GroupedProblem, MatmulProblem, Problem
from tritile.lab.report import recorded
from tritile.lab.report.page.rows import Row, Rows, rows_of
from tritile.lab.report.results import Result
from tritile.planning.store import Store
from tritile.planning.trial import Trial

_LOOKED_AT: Final = 128  # configs up to which progress is shown
Recorded = tuple[str, list[Trial]]  # the name of a store, and its trials in the order in which they were made
_LETTERS: Final = {"row": "N", "column": "T", "strided": "S"}


def of_file(path: Path, device: Device) -> Recorded:
    """Read a store from a file or a .gz of one; InvalidValueError if it has no trial of this GPU model."""
    return path.name.removesuffix(".gz").removesuffix(".sqlite3"), recorded.trials(path, device)


def of_store(store: Store) -> Recorded:
    """Read this user's own store, trials of decorated kernels included."""
    everything = ((facts["name"], trial) for facts, trial in store.everything() if not trial.of_torch)
    return "your store", [trial for name, trial in everything if name == store.device.name]


def _facets(problem: Problem) -> Row:
    """Return the facets of a problem that has no result."""
    facets: Row = {"op": [problem.op], "suite": [], "dtype": [], "layout": []}
    if isinstance(problem, MatmulProblem | GroupedProblem):
        precision = f" {problem.precision}" if problem.precision != "ieee" else ""
        layout = _LETTERS[problem.a_layout] + _LETTERS[problem.b_layout]
        return facets | {"dtype": [problem.dtype + precision], "layout": [layout]}
    return facets


def _values(config: Config) -> dict[str, int | bool | float | str]:
    return {"num_warps": config.num_warps, "num_stages": config.num_stages, **dict(config.kwargs)}


def _axes(configs: Iterable[Config]) -> tuple[str, str]:
    """Return the axes of a map, down and across: BLOCK_M and BLOCK_N, else those with the most values."""
    found: dict[str, set[object]] = {}
    for config in configs:
        for name, value in _values(config).items():
            if isinstance(value, int) and not isinstance(value, bool):
                found.setdefault(name, set()).add(value)
    if {"BLOCK_M", "BLOCK_N"} <= set(found):
        return "BLOCK_M", "BLOCK_N"
    most = sorted(found, key=lambda name: (name.startswith("num_"), -len(found[name]), name))
    return most[0], most[1]


def _cells(trials: list[Trial], axes: tuple[str, str], best: float, number: int) -> list[Row]:
    """Return a cell for each tile with its fastest config; `us` is None where none worked."""
    tiles: dict[tuple[object, ...], list[Trial]] = {}
    for trial in trials:
        place = tuple(_values(trial.config).get(name) for name in axes)
        if None not in place:
            tiles.setdefault(place, []).append(trial)
    rows = []
    for (y, x), own in tiles.items():
        first = min(own, key=lambda trial: trial.time)
        rows.append({
            "s": number, "x": x, "y": y, "configs": len(own),
            "us": float(f"{first.us:.5g}") if first.works else None,
            "ratio": round(first.time / best, 4) if first.works else None,
            "config": str(first.config) if first.works else (first.failure or "")[:100],
        })  # fmt: skip
    return rows


def _progress(trials: list[Trial], best: float, row: Row, most: int) -> list[Row]:
    """Return the best time so far over the best of all; no row before a config has worked.

    Progress is shown at two numbers of configs in each doubling, and at `most`.
    """
    steps = sorted({count << i for i in range(most.bit_length()) for count in (1, 3) if count << i < most})
    sofars = list(itertools.accumulate((trial.time / best for trial in trials), min))
    at = ((step, sofars[min(step, len(sofars)) - 1]) for step in (*steps, most))
    return [{**row, "tried": step, "ratio": round(r, 4)} for step, r in at if math.isfinite(r)]


def searched(
    stores: Iterable[Recorded], facets: Mapping[Problem, Row]
) -> tuple[list[Row], list[Row], list[Row]]:
    """Return rows of searches (a problem in a store, the largest first), cells of maps, and progress.

    A map shows the store that tried the most configs of its problem, as only times of one store were measured
    beside each other. `s` is the number of a search. Searches in which no config worked are left out.
    """
    groups: dict[tuple[str, Problem], list[Trial]] = {}
    for name, trials in stores:
        for trial in trials:
            groups.setdefault((name, trial.problem), []).append(trial)
    groups = {key: own for key, own in groups.items() if any(trial.works for trial in own)}
    order = sorted(groups, key=lambda key: -len(groups[key]))
    most = min(_LOOKED_AT, max(map(len, groups.values()), default=1))
    searches: list[Row] = []
    cells: list[Row] = []
    progress: list[Row] = []
    mapped: set[Problem] = set()
    for number, (name, problem) in enumerate(order):
        own = groups[name, problem]
        axes, fastest = _axes(trial.config for trial in own), min(own, key=lambda trial: trial.time)
        best = fastest.time
        searches.append({
            "s": number, "store": name, "problem": problem.label, **facets.get(problem, _facets(problem)),
            "configs": len(own), "failed": sum(not trial.works for trial in own),
            "best_us": float(f"{best:.5g}"), "best": str(fastest.config), "mapped": problem not in mapped,
            "first": round(own[0].time / best, 4) if own[0].works else None,
            "within": next(i for i, trial in enumerate(own, start=1) if trial.time <= 1.02 * best),
            "down": axes[0], "across": axes[1],
        })  # fmt: skip
        if problem not in mapped:
            cells += _cells(own, axes, best, number)
            mapped.add(problem)
        progress += _progress(own, best, {"s": number, "op": problem.op, "store": name}, most)
    return searches, cells, progress


def gathered(results: Iterable[Result], stores: Sequence[Recorded], gpu: str, device: Device | None) -> Rows:
    """Return the rows of a report of one GPU: its results, and the stores' trials.

    `device` has the GPU's peaks, None where they are unknown.
    """
    rows = rows_of(results, gpu, device)
    rows.searches, rows.cells, rows.progress = searched(stores, rows.facets)
    rows.trials = sum(len(trials) for _, trials in stores)
    return rows
