"""Results as plain rows, from which a report's figures and tables are made."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from tritile.core import device as devices
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import PRECISIONS, MatmulProblem, PermuteProblem, Problem
from tritile.families.common.rates import peak_tflops
from tritile.lab.report.results import BASELINES, HOST, Result, case_of, latest
from tritile.lab.report.summary import Summary, dtype_label, sizes_label, summary

Row = dict[str, Any]
TYPES: Final = (
    "bfloat16",
    "float16",
    "float32",
    "float64",
    "complex",
    "8-bit",
    "int16 to int64",
)  # as many as there are colours that readers can tell apart
FACETS: Final = ("op", "suite", "dtype", "layout")


@dataclass
class Rows:
    """Hold all that a report of one GPU shows, as rows of text, numbers and lists of text.

    `results` has a row for each case, `hosts` one for each call whose host time was measured. `facets` has
    the suites, dtypes and layouts of each problem's results. `searches`, `cells` and `progress` are as
    `searches.searched` returns them. `device` is None where the GPU's peaks are unknown. `left_out` counts
    results of other GPUs by their name.
    """

    gpu: str
    device: Device | None = None
    env: dict[str, list[str]] = field(default_factory=dict)
    results: list[Row] = field(default_factory=list)
    facets: dict[Problem, Row] = field(default_factory=dict)
    roofs: list[Row] = field(default_factory=list)
    summaries: list[Summary] = field(default_factory=list)
    hosts: list[Row] = field(default_factory=list)
    searches: list[Row] = field(default_factory=list)
    cells: list[Row] = field(default_factory=list)
    progress: list[Row] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    trials: int = 0


def _type_of(dtype: str) -> str:
    """Return which of `TYPES` a dtype belongs to."""
    if dtype.startswith("complex"):
        return "complex"
    if dtype.startswith(("float8", "int8", "uint8", "bool")):
        return "8-bit"
    return dtype if dtype in TYPES else "int16 to int64"


def kinds(rows: Iterable[Row], name: str) -> list[str]:
    """Return the values of a facet (texts or lists of texts) without "", in order."""
    found: set[str] = set()
    for row in rows:
        found |= set(row[name]) if isinstance(row[name], list) else {row[name]}
    first = [*TYPES, *PRECISIONS]
    return sorted(found - {""}, key=lambda kind: (first.index(kind) if kind in first else 99, kind))


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


_REFERENCE: Final = {"float64", "complex128"}  # what references are made in


def _over(value: float | None, other: float | None) -> float | None:
    return value / other if value is not None and other else None


def _row(line: Result, number: int, device: Device | None) -> Row:
    """Return a result as a row.

    `of_roof` is the share of the lower roof, of memory or of arithmetic. `over` is the error over torch's.
    It is None for types of 64 bits: their reference, a product in float64, is torch's own at most sizes.
    """
    case = case_of(line)
    problem = case.problem
    row: Row = {
        "r": number,
        **{name: line[name] for name in ("op", "tritile_us", "torch_us", "spread", "error", "torch_error")},
        "suite": case.suite or "(no name)",
        "dtype": dtype_label(line),
        "type": _type_of(line["dtype"]),
        "precision": case.precision.removesuffix("-3m") if line["op"] != "permute" else "",
        "layout": line["layout"] or "",
        "problem": sizes_label(line),
        "torch": line["ratio_torch"],
        "config": str(Config.from_dict(line["config"])),
        "source": line["plan_source"],
        "over": None if line["dtype"] in _REFERENCE else _over(line["error"], line["torch_error"]),
    }
    for name in BASELINES:
        row |= {f"{name}_us": line.get(f"{name}_us"), name: line.get(f"ratio_{name}")}
    if isinstance(problem, PermuteProblem):
        gbps, copy = line["gbps"], line.get("copy_gbps")
        moved = {"megabytes": problem.bytes / 1e6, "gbps": gbps, "copy_gbps": copy}
        return row | moved | {"of_copy": _over(gbps, copy)}
    intensity, roof = problem.flops / problem.bytes, None
    peak = peak_tflops(problem, device) if device and isinstance(problem, MatmulProblem) else None
    if device and peak:
        roof = min(peak, device.memory_gbps / 1e3 * intensity)
    return row | {
        "tflops": line["tflops"], "intensity": intensity, "peak": peak, "of_roof": _over(line["tflops"], roof)
    }  # fmt: skip


def _roofs(rows: list[Row]) -> list[Row]:
    """Return the peak rates of the dtypes that were measured, with the dtypes of each rate."""
    by_rate: dict[float, set[str]] = defaultdict(set)
    for row in rows:
        if row["op"] == "matmul" and row["peak"]:
            by_rate[row["peak"]].add(row["dtype"])
    return [{"tflops": rate, "dtypes": sorted(labels)} for rate, labels in sorted(by_rate.items())]


def rows_of(results: Iterable[Result], gpu: str, device: Device | None) -> Rows:
    """Return the results of one GPU as rows, the last result of each case or call."""
    found = latest(results)
    own = [line for line in found if line["env"]["gpu"] == gpu]
    cases = [line for line in own if line["op"] != HOST]
    rows = [_row(line, number, device) for number, line in enumerate(cases)]
    facets: dict[Problem, Row] = {}
    for line, row in zip(cases, rows, strict=True):
        known = facets.setdefault(case_of(line).problem, {name: [] for name in FACETS})
        for name in FACETS:
            known[name] += [row[name]] * (row[name] not in known[name])
    names = ("torch", "triton", "driver", "tritile", "time")
    return Rows(
        gpu=gpu,
        device=device,
        env={name: sorted({line["env"][name] for line in own} - {""}) for name in names},
        results=rows,
        facets=facets,
        roofs=_roofs(rows),
        summaries=summary(cases),
        hosts=[{name: line[name] for name in ("call", "tritile_us", "torch_us", "ratio_torch")}
               for line in own if line["op"] == HOST],
        left_out=dict(Counter(line["env"]["gpu"] for line in found if line["env"]["gpu"] != gpu)),
    )  # fmt: skip
