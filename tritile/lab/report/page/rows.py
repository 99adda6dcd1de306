"""Results as plain rows, from which a report's figures and tables are made."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tritile.core import device as devices
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import MatmulProblem, PermuteProblem, Problem
from tritile.families.common.rates import peak_tflops
from tritile.lab.report.results import BASELINES, HOST, Result, case_of, latest
from tritile.lab.report.summary import Summary, dtype_label, sizes_label, summary

Row = dict[str, Any]
FACETS: Final = ("op", "suite", "dtype", "layout")


@dataclass
class Rows:
    """Hold all that a report of one GPU shows, as rows of text, numbers and lists of text.

    `results` has a row for each case, `hosts` one for each call whose host time was measured. `searches`,
    `cells` and `progress` are as `searches.searched` returns them. `device` is None where the GPU's peaks are
    unknown. `left_out` counts results of other GPUs by their name.
    """

    gpu: str
    device: Device | None = None
    env: dict[str, list[str]] = field(default_factory=dict)
    results: list[Row] = field(default_factory=list)
    roofs: list[Row] = field(default_factory=list)
    summaries: list[Summary] = field(default_factory=list)
    hosts: list[Row] = field(default_factory=list)
    searches: list[Row] = field(default_factory=list)
    cells: list[Row] = field(default_factory=list)
    progress: list[Row] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    trials: int = 0


def named(gpu: str) -> Device | None:
    """Return the device of this name if it is here or a target, else None."""
    here = devices.current_gpu()
    known = [*([here] if here else []), *devices.TARGETS.values()]
    return next((device for device in known if device.name == gpu), None)


def gpu_of(results: Iterable[Result]) -> str | None:
    """Return the GPU to report: the current one if it has results, else the one with the most results."""
    counts = Counter(line["env"]["gpu"] for line in results)
    here = devices.current_gpu()
    if here is not None and counts[here.name]:
        return here.name
    return counts.most_common(1)[0][0] if counts else None


def _row(line: Result, number: int) -> Row:
    case = case_of(line)
    problem = case.problem
    row: Row = {
        "r": number,
        "op": case.op,
        "suite": case.suite or "(no name)",
        "dtype": dtype_label(line),
        "layout": case.layout if case.op != "permute" else "",
        "problem": sizes_label(line),
        "tritile_us": line["tritile_us"],
        "torch_us": line["torch_us"],
        "torch": line["ratio_torch"],
        "spread": line["spread"],
        "config": str(Config.from_dict(line["config"])),
        "source": line["plan_source"],
        "error": line["error"],
        "torch_error": line["torch_error"],
        "bytes": problem.bytes,
    }
    for name in BASELINES:
        row |= {f"{name}_us": line.get(f"{name}_us"), name: line.get(f"ratio_{name}")}
    if not isinstance(problem, PermuteProblem):
        return row | {"tflops": line["tflops"], "intensity": problem.flops / problem.bytes}
    return row | {"gbps": line["gbps"], "copy_gbps": line.get("copy_gbps")}


def _roofs(lines: list[Result], device: Device | None) -> list[Row]:
    """Return the peak rates of the dtypes that were measured, with the dtypes of each rate."""
    by_rate: dict[float, list[str]] = defaultdict(list)
    for line in lines if device is not None else ():
        case = case_of(line)
        if case.op == "matmul" and isinstance(case.problem, MatmulProblem) and device is not None:
            rate, label = peak_tflops(case.problem, device), dtype_label(line)
            if rate is not None and label not in by_rate[rate]:
                by_rate[rate].append(label)
    return [{"tflops": rate, "dtypes": sorted(labels)} for rate, labels in sorted(by_rate.items())]


def rows_of(results: Iterable[Result], gpu: str, device: Device | None) -> Rows:
    """Return the results of one GPU as rows, the last result of each case or call."""
    found = latest(results)
    own = [line for line in found if line["env"]["gpu"] == gpu]
    cases = [line for line in own if line["op"] != HOST]
    names = ("torch", "triton", "driver", "tritile", "time")
    env = {name: sorted({line["env"][name] for line in own} - {""}) for name in names}
    return Rows(
        gpu=gpu,
        device=device,
        env=env,
        results=[_row(line, number) for number, line in enumerate(cases)],
        roofs=_roofs(cases, device),
        summaries=summary(cases),
        hosts=[{name: line[name] for name in ("call", "tritile_us", "torch_us", "ratio_torch")}
               for line in own if line["op"] == HOST],
        left_out=dict(Counter(line["env"]["gpu"] for line in found if line["env"]["gpu"] != gpu)),
    )  # fmt: skip


def facets_of(results: Iterable[Result], gpu: str) -> Mapping[Problem, Row]:
    """Return for each problem the suites, dtypes and layouts of its results, as lists."""
    found: dict[Problem, Row] = {}
    for line in latest(results):
        if line["op"] == HOST or line["env"]["gpu"] != gpu:
            continue
        row, problem = _row(line, 0), case_of(line).problem
        facets = found.setdefault(problem, {name: [] for name in FACETS})
        for name in FACETS:
            if row[name] not in facets[name]:
                facets[name].append(row[name])
    return found
