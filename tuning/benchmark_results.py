"""Results of benchmarks: JSON objects, one a line, that can be compared from run to run.

A result is a dictionary. It names its case (`op, suite, dtype, precision, layout`, then `batch, m, n, k`
or `shape, dims`; precision and layout are null for a permute, and the layout of a linear_quantized is the
weight's, "int4/128"; `epilogue` where there is any), its times in microseconds
(`tritile_us, torch_us, inductor_us`; null for a baseline that was not run; `triton_us`, of tritile's own
kernel, differs from `tritile_us` where torch's kernel made the call), `ratio_torch` and
`ratio_inductor` (the baseline's time by tritile's: above 1, tritile is faster), `spread` of tritile's times,
`tflops` or `gbps` and `copy_gbps`, `config, plan_source`, `error, torch_error` and `env`. That of a case of
suite "unseen" has the `seed`, and how its half is `drawn` ("by size" in older lines, which do not say so).

`torch_us` is the time of torch's fastest baseline, which `torch_call` names; where there are several,
`torch_calls` has the time of each. `spreads` has the spread of torch's times and of the other baselines'. Of
each side there are `samples` times; each is the mean over `launches` launches on operands of their own.

Older lines lack some of `triton_us, torch_call, torch_calls, spreads, samples, launches`.

In op "grouped" `batch` counts groups, which share m, and `load` says how.

A result of op "host" has the time that a call keeps the host busy: `op, suite` (both "host"), `call`,
`tritile_us, torch_us, ratio_torch` and `env`.
"""

import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any, Final

from tritile.core.config import Config
from tritile.core.permutation import PermuteProblem
from tritile.errors import FileError, InvalidValueError
from tritile.lab.bench import BenchResult, Log
from tritile.tune.suites import Case

Result = dict[str, Any]

ENV_FIELDS: Final = ("gpu", "torch", "triton", "driver", "tritile", "time")
HOST: Final = "host"  # the op and the suite of host times
BY_SIZE: Final = "by size"  # how a case of suite "unseen" was `drawn`
BY_TIME: Final = "by time"
BASELINES: Final = ("inductor",)  # besides torch, which is always there
# Ops of lines that are not read here.
_OF_SCRIPTS: Final = ("adopted", "choices", "invariance", "models", "ranks", "rows", "searches", "spread")
_NAMES: Final = ("op", "suite", "dtype", "precision", "layout")
_SIZES: Final = {
    "matmul": ("precision", "layout", "batch", "m", "n", "k"),
    "grouped": ("precision", "layout", "batch", "m", "n", "k", "load"),
    "permute": ("shape", "dims"),
    "linear_quantized": ("layout", "m", "n", "k"),
}
_RATES: Final = {
    "matmul": ("tflops",),
    "grouped": ("tflops",),
    "permute": ("gbps",),
    "linear_quantized": ("tflops", "gbps"),
}


def _plain(value: Any) -> Any:
    """Return a value as JSON holds it, numbers with six digits."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return list(value)
    return float(f"{value:.6g}") if isinstance(value, float) else value


def result(case: Case, measured: BenchResult, env: Mapping[str, str]) -> Result:
    """Return the result of one measured case; `env` is as `environment.environment` returns it."""
    assert isinstance(measured.config, Config)
    problem, us = case.problem, measured.tritile_us
    line: Result = dict.fromkeys(_NAMES) | {"op": case.op, "suite": case.suite, "dtype": case.dtype}
    line |= {name: getattr(case, name) for name in _SIZES[case.op]}
    line |= {"epilogue": case.epilogue} if case.epilogue else {}
    for name in ("torch_call", "torch_calls", "spreads", "samples", "launches", "triton_us"):
        if value := getattr(measured, name):
            line[name] = value
    line["tritile_us"] = us
    for name, theirs in (("torch", measured.torch_us), ("inductor", measured.others_us.get("inductor"))):
        line |= {f"{name}_us": theirs, f"ratio_{name}": None if theirs is None else theirs / us}
    rates = {"gbps": problem.bytes / us / 1e3}
    if isinstance(problem, PermuteProblem):
        line["copy_gbps"] = measured.copy_gbps
    else:
        rates["tflops"] = problem.flops / us / 1e6
    line |= {name: rates[name] for name in _RATES[case.op]}
    line |= {name: getattr(measured, name) for name in ("spread", "error", "torch_error")}
    line |= {"config": measured.config.to_dict(), "plan_source": measured.source, "env": env}
    return {name: _plain(value) for name, value in line.items()}


def host_result(call: str, tritile_us: float, torch_us: float, env: Mapping[str, str]) -> Result:
    """Return the result of one call's host time, in microseconds."""
    times = {"tritile_us": tritile_us, "torch_us": torch_us, "ratio_torch": torch_us / tritile_us}
    return {"op": HOST, "suite": HOST, "call": call, **_plain(times), "env": dict(env)}


def case_of(line: Mapping[str, Any]) -> Case:
    """Return the case of a result. Raises InvalidValueError if it names none."""
    op = line.get("op")
    if not isinstance(op, str) or op not in _SIZES:
        raise InvalidValueError(f"op = {op!r}: expected one of {', '.join(_SIZES)}")
    found = {name: line.get(name) for name in ("op", "suite", "dtype", *_SIZES[op])}
    fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}
    return Case(**fields, epilogue=line.get("epilogue", ""))


def _checked(line: Any) -> Result:
    """Return a value if it is a result, else raise InvalidValueError."""
    if not isinstance(line, dict):
        raise InvalidValueError("expected an object")
    env, positive, texts = line.get("env"), ["tritile_us", "torch_us", "ratio_torch"], ["plan_source"]
    if not (isinstance(env, dict) and all(isinstance(env.get(name), str) for name in ENV_FIELDS)):
        raise InvalidValueError(f"env = {str(env)[:80]}: expected texts {', '.join(ENV_FIELDS)}")
    if line.get("op") == HOST:
        texts = ["call"]
    else:
        positive += _RATES[case_of(line).op]
        for name in (name for name in BASELINES if line.get(f"{name}_us") is not None):
            positive += [f"{name}_us", f"ratio_{name}"]
        positive += [name for name in ("triton_us", "copy_gbps") if line.get(name) is not None]
        for name in ("spread", "error", "torch_error"):
            positive += [name] if line.get(name) != 0 else []
        Config.from_dict(line.get("config"))
    for name in positive:
        value: Any = line.get(name)
        if not (type(value) in (int, float) and 0 < value <= sys.float_info.max):
            raise InvalidValueError(f"{name} = {str(value)[:80]}: expected a number above 0")
    for name in texts:
        if not (isinstance(line.get(name), str) and line[name]):
            raise InvalidValueError(f"{name} = {str(line.get(name))[:80]}: expected a text")
    return line


def append(path: Path, results: Iterable[Result]) -> None:
    """Append results to a file, whole lines at once; make its folders.

    Raises InvalidValueError for something that is not a result, and OSError if it cannot be written.
    """
    text = "".join(json.dumps(_checked(line), allow_nan=False) + "\n" for line in results)
    if not text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+", buffering=0) as file:
        # An interrupted run leaves half a line: end it, or it would spoil our first line too.
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            text = text if file.read(1) == b"\n" else "\n" + text
        data = text.encode()
        # One write in append mode: lines of another process cannot come between ours.
        if file.write(data) != len(data):
            raise OSError(f"{path}: written in part only; is the disk full?")


def read(path: Path, log: Log) -> list[Result]:
    """Read the results of a file, in order. Invalid lines are skipped, and logged in one message.

    Lines of whole models, of first calls and of searches have no case and are skipped
    silently. Raises FileError if the file cannot be read.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise FileError(f"results {path}: {error}") from error
    good: list[Result] = []
    bad: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            if not (isinstance(found, dict) and found.get("op") in _OF_SCRIPTS):
                good.append(_checked(found))
        except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or not a result
            bad.append(f"line {number}: {str(error)[:200]}")
    if bad:
        log(f"{path}: {len(bad)} of {len(lines)} lines skipped; {bad[0]}")
    return good


def stored(places: Iterable[Path], log: Log) -> list[Result]:
    """Read the results of files, and of the .jsonl files in folders and in the folders in them.

    Lines that are no results are logged. Raises FileError if there is no file to read.
    """
    places, files = list(places), list[Path]()
    for place in places:
        files += sorted([*place.glob("*.jsonl"), *place.glob("*/*.jsonl")]) if place.is_dir() else [place]
    if not files:
        raise FileError(f"no .jsonl file of results in {', '.join(map(str, places))}")
    return [line for path in dict.fromkeys(files) for line in read(path, log)]


def of_cases(results: Iterable[Result]) -> list[Result]:
    """Return the last result of each case on each GPU, in the order of their first, without host times."""
    own = (line for line in results if line["op"] != HOST)
    return list({(case_of(line), line["env"]["gpu"]): line for line in own}.values())


def is_by_size(line: Result) -> bool:
    """True of a case that was chosen, or drawn as sizes come; means and percentiles are of these."""
    return line["env"].get("drawn", BY_SIZE) == BY_SIZE


def baselines_of(results: list[Result]) -> list[str]:
    """Return the baselines besides torch that some result has a time of."""
    return [name for name in BASELINES if any(line.get(f"ratio_{name}") is not None for line in results)]


@dataclass(frozen=True)
class Summary:
    """How tritile compares with a baseline over one suite, dtype and layout on one GPU.

    `by_time` is the sum of the baseline's times by that of tritile's; `geomean` and `worst` are of the ratios
    of both times: above 1, tritile is faster. `geomean` leaves out cases that were drawn by time. `behind`
    counts the cases below 1. `worst_label` names the case with the worst ratio. `layout` is "" for permutes.
    """

    gpu: str
    suite: str
    dtype: str
    layout: str
    count: int
    by_time: float
    geomean: float
    behind: int
    worst: float
    worst_label: str


def summary(results: Iterable[Result], baseline: str = "torch") -> list[Summary]:
    """Return counts and ratios to a baseline, in the order of the results.

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
        by_size = [line[ratio] for line in lines if is_by_size(line)]
        behind, mean = sum(each < 1 for each in ratios), geometric_mean(by_size or ratios)
        baseline_us, tritile_us = (
            sum(line[f"{side}_us"] for line in lines) for side in (baseline, "tritile")
        )
        by_time = baseline_us / tritile_us
        found.append(Summary(*names, len(lines), by_time, mean, behind, worst[ratio], sizes_label(worst)))
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
        sizes, dims = "x".join(map(str, line["shape"])), line["dims"]
        axes = list(range(len(dims)))
        is_plain = list(dims) == [*axes[:-2], *reversed(axes[-2:])]
        return sizes if is_plain else f"{sizes} ({','.join(map(str, dims))})"
    if line["op"] == "grouped":
        return f"{line['batch']} {line['load']} groups of ({line['m']})x{line['n']}x{line['k']}"
    batch = [line["batch"]] if line.get("batch", 1) > 1 else []
    return "x".join(str(size) for size in (*batch, line["m"], line["n"], line["k"]))
