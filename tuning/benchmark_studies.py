"""Make the rows of docs/benchmarks.md about errors, Llama models, the ladder, and the tuner."""

import json
import statistics
from collections.abc import Iterator
from typing import Any, Final

from benchmark_tables import Cells, Line
from benchmark_tuned import DEVICE, HERE, RESULTS
from tritile.core.problem import MatmulProblem
from tritile.lab.report import recorded
from tritile.planning import model

DATA: Final = ("normal", "uniform", "log-normal", "cancelling", "graded", "badly ranged")
DEPTH: Final = 8192  # terms of a sum, of the errors that the page shows
TASKS: Final = {
    "prefill": "prefill, 2x2048", "train": "training step, 2x2048", "decode1": "decoding, batch 1",
    "decode16": "decoding, batch 16",
}  # fmt: skip
HOW: Final = {"eager": "eager", "graphs": "CUDA graph", "compiled": "torch.compile"}


def _lines(*path: str) -> list[Line]:
    """Return the lines of a file, which holds a JSON list or a JSON object a line."""
    file = HERE.joinpath(*path)
    text = file.read_text()
    lines: list[Line]
    lines = json.loads(text) if file.suffix == ".json" else [json.loads(line) for line in text.splitlines()]
    return lines


def accuracy_lines() -> list[Line]:
    """Return the lines of `tritile accuracy` that the page shows."""
    lines = _lines("accuracy", f"{DEVICE.slug}.jsonl")
    return [line for line in lines if line["k"] == DEPTH and line["data"] in DATA]


def errors() -> Iterator[Cells]:
    """Return tritile's and torch's error of the norm, a row for each dtype and precision."""
    kinds: dict[tuple[str, str], dict[str, str]] = {}
    for line in accuracy_lines():
        shown = f"{_power(line['error'])} / {_power(line['torch_error'])}"
        kinds.setdefault((line["dtype"], line["precision"]), {})[line["data"]] = shown
    for (dtype, precision), by_data in kinds.items():
        yield f"{dtype} {precision}".rstrip(), *(by_data.get(data, "") for data in DATA)


def _power(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}".replace("e-0", "e-").replace("e+00", "")


def llama_lines() -> list[Line]:
    """Return the newest line of each model, way of running and task."""
    lines = _lines("llama", f"{DEVICE.slug}.json")
    return list({(line["model"], line["how"], line["task"]): line for line in lines}.values())


def llama() -> Iterator[Cells]:
    """Return tokens a second of both models without and with tritile, a row for each task."""
    found = {(line["model"], line["how"], line["task"]): line for line in llama_lines()}
    for how in HOW:
        for task in TASKS:
            cells = []
            for name in ("ordinary", "odd"):
                line: dict[str, Any] | None = found.get((name, how, task))
                sides = [f"{line[side]:,.0f}" for side in ("torch", "tritile")] if line else ["", ""]
                cells += [*sides, f"{line['ratio']:.2f}" if line else ""]
            if any(cells):
                yield f"{TASKS[task]}, {HOW[how]}", *cells


def llama_errors() -> Iterator[Cells]:
    """Return the errors of the odd model beside a copy in fp32, without and with tritile."""
    line = next(line for line in llama_lines() if line["model"] == "odd" and line["task"] == "errors")
    for what in line["torch"]:
        yield what, *(_power(line[side][what]) for side in ("torch", "tritile"))


def autotune_lines() -> list[Line]:
    """Return the lines of `tuning/compare_autotune.py`."""
    return _lines("results", DEVICE.slug, "autotune.json")


def autotune() -> Iterator[Cells]:
    """Return seconds of a first call and microseconds of the chosen config, by tuner."""
    for line in autotune_lines():
        if line["measures"] == "tuning":
            seconds = (f"{line[f'{tuner}_s']:.1f}" for tuner in ("triton", "tritile", "space"))
            times = (f"{line[f'{tuner}_us']:.1f}" for tuner in ("triton", "tritile", "space"))
            yield line["kernel"], line["problem"], *seconds, *times


def autotune_host() -> Iterator[Cells]:
    """Return microseconds that a warm call of a decorated kernel takes the host."""
    for line in autotune_lines():
        if line["measures"] == "host":
            yield line["kernel"], *(f"{line[f'{how}_host_us']:.1f}" for how in ("jit", "triton", "tritile"))


def ladder() -> dict[str, Any]:
    """Return what `tritile ladder` measured."""
    found: dict[str, Any] = json.loads((HERE / "ladder" / f"{DEVICE.slug}.json").read_text())
    return found


def ladder_rows() -> Iterator[Cells]:
    """Return time and bytes asked of memory, a row for each kernel of the ladder."""
    for rung in ladder()["readings"]:
        asked = "" if rung["asked"] is None else f"{rung['asked'] / 1e9:.1f}"
        yield rung["op"], rung["name"], rung["new"], rung["dtype"], f"{rung['us'] / 1e3:.2f}", asked


def study() -> dict[str, Any]:
    """Return the figures of the committed study of searches."""
    found: dict[str, Any] = json.loads((RESULTS / "study.json").read_text())
    return found


def study_rows() -> Iterator[Cells]:
    """Return the figures of the study."""
    found = study()
    problems = found["problems"]
    repeats = len(problems) * found["repeats"]
    firsts = [one["first_pick_regret"] for one in problems]
    spaces = [one["space"] for one in problems]
    seconds = max(one["tune_seconds"] for one in problems)
    yield "problems, and configs in a whole space", f"{len(problems)}, {min(spaces)} to {max(spaces)}"
    yield (
        "winner of a search, slower than the fastest of the whole space",
        f"median {found['regret_median']:.1%}, worst {found['regret_worst']:.1%}",
    )
    yield "searches whose winner is over 2% slower", f"{round(found['flip_rate'] * repeats)} of {repeats}"
    yield "time of a search", f"median {found['tune_seconds_median']:.1f} s, worst {seconds:.1f} s"
    yield (
        f"time of {found['suite_problems']} products of the llm suite, nothing known",
        f"{found['suite_seconds']:.0f} s",
    )
    over = f"{sum(regret > 0.05 for regret in firsts)} of {len(firsts)} over 5%"
    yield (
        "the model's first pick, slower than the fastest",
        f"median {found['first_pick_regret_median']:.1%}, {over}, worst {max(firsts):.0%}",
    )
    yield (
        "a winner on a problem a quarter larger, slower than that problem's own winner",
        f"median {found['transfer_regret_median']:.0%}",
    )


def predictions() -> Iterator[Cells]:
    """Return the median error of predicted times, by store of trials and by operation."""
    for path in sorted((HERE / "trials").glob(f"{DEVICE.slug}*.sqlite3.gz")):
        kinds: dict[str, tuple[list[float], list[float]]] = {}
        for (problem, _), times in recorded.times([path], DEVICE).items():
            kind = "products" if isinstance(problem, MatmulProblem) else "permutations"
            off = {one: abs(model.predict_us(one, problem, DEVICE) / us - 1) for one, us in times.items()}
            everything, fastest = kinds.setdefault(kind, ([], []))
            everything += off.values()
            fastest.append(off[min(times, key=lambda config, times=times: times[config])])
        for kind, errors_of in kinds.items():
            yield path.name, kind, *(f"{statistics.median(values):.0%}" for values in errors_of)
