"""Results of benchmarks: JSON objects, one a line, that can be compared from run to run.

A result is a dictionary. It names its case (`op, suite, dtype, precision, layout`, then `batch, m, n, k`
or `shape, dims`; precision and layout are null for a permute, and the layout of a linear_quantized is the
weight's, "int4/128"; `epilogue` where there is any), its times in microseconds
(`tritile_us, torch_us, inductor_us`; null for a baseline that was not run; `triton_us`, of tritile's own
kernel, differs from `tritile_us` where torch's kernel made the call), `ratio_torch` and
`ratio_inductor` (the baseline's time by tritile's: above 1, tritile is faster), `spread` of tritile's times,
`tflops` or `gbps` and `copy_gbps`, `config, plan_source`, `error, torch_error` and `env`.

`torch_us` is the time of the fastest of torch's ways, which `torch_call` names; where there are several,
`torch_calls` has the time of each. `spreads` has the spread of torch's times and of the other baselines'. Of
each side there are `samples` times; each is the mean over `launches` launches on operands of their own.

Older lines lack some of `triton_us, torch_call, torch_calls, spreads, samples, launches`. Some have
`tutorial_us` and `ratio_tutorial`, of the matmul of Triton's tutorial.

In op "grouped" `batch` counts groups, which share m, and `load` says how.

A result of op "host" has the time that a call keeps the host busy: `op, suite` (both "host"), `call`,
`tritile_us, torch_us, ratio_torch` and `env`.
"""

import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import triton

from tritile.core.config import Config
from tritile.core.problem import PermuteProblem
from tritile.errors import FileError, InvalidValueError
from tritile.lab.environment import ENV_FIELDS
from tritile.tune.suites import Case

Result = dict[str, Any]
Tell = Callable[[str], None]

HOST: Final = "host"  # the op and the suite of host times
_APART: Final = ("invariance", "models", "rows")  # ops of lines that are not read here
BASELINES: Final = ("inductor", "tutorial")  # besides torch, which is always there
_RATES: Final = {
    "matmul": ("tflops",),
    "grouped": ("tflops",),
    "permute": ("gbps", "copy_gbps"),
    "linear_quantized": ("tflops", "gbps"),
}
_CASE_FIELDS: Final = {
    "matmul": ("op", "suite", "dtype", "precision", "layout", "batch", "m", "n", "k"),
    "grouped": ("op", "suite", "dtype", "precision", "layout", "batch", "m", "n", "k", "load"),
    "permute": ("op", "suite", "dtype", "shape", "dims"),
    "linear_quantized": ("op", "suite", "dtype", "layout", "m", "n", "k"),
}


@dataclass(frozen=True)
class Measurement:
    """What was measured of one case, by the names of the lines of results; `source` is their `plan_source`.

    Times are medians in microseconds, None for a baseline that was not run. `tritile_us` is as a call is
    made, `triton_us` by tritile's own kernel. A spread is that of times over their median. Errors are
    relative norms against a reference in float64 or exact integers. `copy_gbps` (permutes only) is the rate
    of a plain copy of as many bytes, read and written.
    """

    tritile_us: float
    torch_us: float | None
    inductor_us: float | None
    spread: float
    error: float | None
    torch_error: float | None
    copy_gbps: float | None
    config: Config | triton.Config
    source: str
    torch_call: str = ""
    torch_calls: Mapping[str, float] = field(default_factory=dict)
    spreads: Mapping[str, float] = field(default_factory=dict)
    samples: int | None = None
    launches: int | None = None
    triton_us: float | None = None


def _rounded(values: Mapping[str, float | None]) -> dict[str, float | None]:
    return {name: None if value is None else float(f"{value:.6g}") for name, value in values.items()}


def result(case: Case, measured: Measurement, env: Mapping[str, str]) -> Result:
    """Return the result of one measured case; `env` is as `environment.environment` returns it."""
    assert isinstance(measured.config, Config)
    named = dict.fromkeys(("op", "suite", "dtype", "precision", "layout"))
    for name in (*_CASE_FIELDS[case.op], *(("epilogue",) if case.epilogue else ())):
        value = getattr(case, name)
        named[name] = list(value) if isinstance(value, tuple) else value
    sides = {name: getattr(measured, name) for name in ("torch_call", "samples", "launches")}
    sides |= {name: _rounded(getattr(measured, name)) for name in ("torch_calls", "spreads")}
    problem, ours = case.problem, measured.tritile_us
    times = {"torch": measured.torch_us, "inductor": measured.inductor_us}
    rates = {
        "tflops": None if isinstance(problem, PermuteProblem) else problem.flops / ours / 1e6,
        "gbps": problem.bytes / ours / 1e3,
        "copy_gbps": measured.copy_gbps,
    }
    numbers = {
        "tritile_us": ours,
        **({} if measured.triton_us is None else {"triton_us": measured.triton_us}),
        **{f"{name}_us": us for name, us in times.items()},
        **{f"ratio_{name}": None if us is None else us / ours for name, us in times.items()},
        "spread": measured.spread,
        **{name: rates[name] for name in _RATES[case.op]},
        "error": measured.error,
        "torch_error": measured.torch_error,
    }
    chosen = {"config": measured.config.to_dict(), "plan_source": measured.source, "env": dict(env)}
    return {**named, **{name: value for name, value in sides.items() if value}, **_rounded(numbers), **chosen}


def host_result(call: str, tritile_us: float, torch_us: float, env: Mapping[str, str]) -> Result:
    """Return the result of one call's host time, in microseconds."""
    times = {"tritile_us": tritile_us, "torch_us": torch_us, "ratio_torch": torch_us / tritile_us}
    return {"op": HOST, "suite": HOST, "call": call, **_rounded(times), "env": dict(env)}


def case_of(line: Mapping[str, Any]) -> Case:
    """Return the case of a result. Raises InvalidValueError if it names none."""
    op = line.get("op")
    if not isinstance(op, str) or op not in _CASE_FIELDS:
        raise InvalidValueError(f"op = {op!r}: wanted one of {', '.join(_CASE_FIELDS)}")
    found = {name: line.get(name) for name in _CASE_FIELDS[op]}
    fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}
    return Case(**fields, epilogue=line.get("epilogue", ""))


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= sys.float_info.max


def _is_share(value: Any) -> bool:
    return value == 0 or _is_positive(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _checked(line: Any) -> Result:
    """Return a value if it is a result, else raise InvalidValueError."""
    if not isinstance(line, dict):
        raise InvalidValueError("wanted an object")

    def check(fits: Callable[[Any], bool], wanted: str, *names: str) -> None:
        for name in names:
            if name not in line or not fits(line[name]):
                raise InvalidValueError(f"{name} = {str(line.get(name))[:80]}: wanted {wanted}")

    def by_name(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
        return lambda value: isinstance(value, dict) and all(map(fits, value.values()))

    def are_texts(env: Any) -> bool:
        return isinstance(env, dict) and all(isinstance(env.get(name), str) for name in ENV_FIELDS)

    check(are_texts, f"texts {', '.join(ENV_FIELDS)}", "env")
    check(_is_positive, "a number above 0", "tritile_us", "torch_us", "ratio_torch")
    if line.get("op") == HOST:
        check(lambda value: value == HOST, HOST, "suite")
        check(_is_text, "a text", "call")
        return line
    check(_is_share, "a number of 0 or more", "spread", "error", "torch_error")
    check(_is_text, "a text", "plan_source")
    check(lambda value: value is None or _is_text(value), "a text or null", "precision", "layout")
    rates = set(_RATES[case_of(line).op]) - {"copy_gbps"}
    ratios = (f"ratio_{name}" for name in BASELINES if line.get(f"{name}_us") is not None)
    optional = ("triton_us", "copy_gbps", "samples", "launches", *(f"{name}_us" for name in BASELINES))
    there = (name for name in optional if line.get(name) is not None)
    check(_is_positive, "a number above 0", *rates, *ratios, *there)
    for name, fits in (("torch_calls", _is_positive), ("spreads", _is_share)):
        if name in line:
            check(by_name(fits), "numbers by name", name)
    Config.from_dict(line.get("config"))
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


def read(path: Path, tell: Tell) -> list[Result]:
    """Read the results of a file, in order. Invalid lines are skipped; `tell` is told of them once.

    Lines of batch invariance's costs, of whole models and of first calls have no case and are skipped
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
            if not (isinstance(found, dict) and found.get("op") in _APART):
                good.append(_checked(found))
        except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or not a result
            bad.append(f"line {number}: {str(error)[:200]}")
    if bad:
        tell(f"{path}: {len(bad)} of {len(lines)} lines skipped; {bad[0]}")
    return good


def stored(places: Iterable[Path], tell: Tell) -> list[Result]:
    """Read the results of files, and of the .jsonl files in folders and in the folders in them.

    `tell` is told of lines that are no results. Raises FileError if there is no file to read.
    """
    places, files = list(places), list[Path]()
    for place in places:
        files += sorted([*place.glob("*.jsonl"), *place.glob("*/*.jsonl")]) if place.is_dir() else [place]
    if not files:
        raise FileError(f"no .jsonl file of results in {', '.join(map(str, places))}")
    return [line for path in dict.fromkeys(files) for line in read(path, tell)]


def latest(results: Iterable[Result]) -> list[Result]:
    """Return the last result of each case or call on each GPU, in the order of their first results."""

    def subject(line: Result) -> tuple[Case | str, str]:
        return line["call"] if line["op"] == HOST else case_of(line), line["env"]["gpu"]

    return list({subject(line): line for line in results}.values())


def of_cases(results: Iterable[Result]) -> list[Result]:
    """Return the last result of each case on each GPU, without results of host time."""
    return [line for line in latest(results) if line["op"] != HOST]


def baselines_of(results: list[Result]) -> list[str]:
    """Return the baselines besides torch that some result has a time of."""
    return [name for name in BASELINES if any(line.get(f"ratio_{name}") is not None for line in results)]


def geomean(values: Iterable[float]) -> float:
    """Return the geometric mean of one value or more, all above 0."""
    return statistics.geometric_mean(values)


@dataclass(frozen=True)
class Summary:
    """How tritile compares with a baseline over one suite, dtype and layout on one GPU.

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
        return f"{line['batch']} {line['load']} groups of ({line['m']})x{line['n']}x{line['k']}"
    batch = [line["batch"]] if line.get("batch", 1) > 1 else []
    return "x".join(str(size) for size in (*batch, line["m"], line["n"], line["k"]))


def rate_text(line: Result) -> str:
    """Write the rate of a result; that of a permutation counts bytes read and written."""
    if line["op"] != "permute":
        return f"{line['tflops']:.1f} TFLOP/s"
    copy = line.get("copy_gbps")
    return f"{line['gbps']:.0f} GB/s" + (f" ({line['gbps'] / copy:.0%} of copy)" if copy else "")
