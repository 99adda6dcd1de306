"""Results of benchmarks: JSON objects, one a line, that can be compared from run to run.

A result is a dictionary. It names its case (`op, suite, dtype, precision, layout`, then `batch, m, n, k`
or `shape, dims`; precision and layout are null for a permute, and the layout of a linear_quantized is the
weight's, "int4/128"; `epilogue` and `block_scales` where there are any), its times in microseconds
(`tritile_us, torch_us, inductor_us, tutorial_us`; null for a baseline that was not run), `ratio_torch`,
`ratio_inductor` and `ratio_tutorial` (the baseline's time by tritile's: above 1, tritile is faster), `spread`
of tritile's times, `tflops` or `gbps` and `copy_gbps`, `config, plan_source`, `error, torch_error` and `env`.

`torch_us` is the time of the fastest of torch's ways, which `torch_call` names; where there are several,
`torch_calls` has the time of each. `spreads` has the spread of torch's times and of the other baselines'. Of
each side there are `samples` times; each is the mean over `launches` launches on operands of their own.

Older lines lack some of `tutorial_us, ratio_tutorial, torch_call, torch_calls, spreads, samples, launches`.

In op "grouped" `batch` counts groups, `ragged` names the extent that they share, m or k, and `load` says how.

A result of op "host" has the time that a call keeps the host busy: `op, suite` (both "host"), `call`,
`tritile_us, torch_us, ratio_torch` and `env`.
"""

import json
import math
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tritile.core.config import Config
from tritile.core.problem import PermuteProblem
from tritile.errors import InvalidValueError, StoreWarning
from tritile.lab.report.environment import ENV_FIELDS
from tritile.tune.suites import Case

Result = dict[str, Any]

HOST: Final = "host"  # the op and the suite of host times
_APART: Final = ("invariance", "models", "rows")  # ops of lines that tuning/OP.py writes, not read here
BASELINES: Final = ("inductor", "tutorial")  # besides torch, which is always run
_RATES: Final = {
    "matmul": ("tflops",),
    "grouped": ("tflops",),
    "permute": ("gbps", "copy_gbps"),
    "linear_quantized": ("tflops", "gbps"),
}
_CASE_FIELDS: Final = {
    "matmul": ("op", "suite", "dtype", "precision", "layout", "batch", "m", "n", "k"),
    "grouped": ("op", "suite", "dtype", "precision", "layout", "batch", "m", "n", "k", "ragged", "load"),
    "permute": ("op", "suite", "dtype", "shape", "dims"),
    "linear_quantized": ("op", "suite", "dtype", "layout", "m", "n", "k"),
}

_LATER_FIELDS: Final = ("epilogue", "block_scales")  # of a case; written where not ""


@dataclass(frozen=True)
class Measurement:
    """Hold what was measured of one case, in the words of the lines of results.

    Times are medians in microseconds, None for a baseline that was not run. A spread is that of times over
    their median. Errors are relative norms against a reference in float64 or exact integers. `copy_gbps`
    (permutes only) is the rate of a plain copy of as many bytes, read and written. Raises InvalidValueError
    for a time or rate that is not above 0, or a spread or error that is below 0 or not finite.
    """

    tritile_us: float
    torch_us: float
    inductor_us: float | None
    spread: float
    error: float
    torch_error: float
    copy_gbps: float | None
    config: Config
    plan_source: str
    tutorial_us: float | None = None
    torch_call: str = ""
    torch_calls: Mapping[str, float] = field(default_factory=dict)
    spreads: Mapping[str, float] = field(default_factory=dict)
    samples: int | None = None
    launches: int | None = None

    def __post_init__(self) -> None:
        for name in ("tritile_us", "torch_us", "inductor_us", "tutorial_us", "copy_gbps"):
            needed = name in ("tritile_us", "torch_us")
            _check_number(vars(self), name, needed=needed, above=True)
        for name in ("spread", "error", "torch_error"):
            _check_number(vars(self), name, needed=True, above=False)
        _check_sides(vars(self))
        if not isinstance(self.config, Config) or not (
            isinstance(self.plan_source, str) and self.plan_source
        ):
            raise InvalidValueError(
                f"{self.config!r} from {self.plan_source!r}: wanted a config and its source"
            )


def _check_number(data: Mapping[str, Any], name: str, *, needed: bool, above: bool) -> None:
    value = data.get(name)
    if value is None and not needed:
        return
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not 0 <= number <= sys.float_info.max or (above and number == 0):
        raise InvalidValueError(
            f"{name} = {value!r}: wanted a number {'above 0' if above else 'of 0 or more'}"
        )


def _check_sides(data: Mapping[str, Any]) -> None:
    """Check what newer lines tell of each side. Raises InvalidValueError."""
    for name in ("samples", "launches"):
        _check_number(data, name, needed=False, above=True)
    for field_name, above in (("torch_calls", True), ("spreads", False)):
        found = data.get(field_name, {})
        if not isinstance(found, Mapping):
            raise InvalidValueError(f"{field_name} = {found!r}: wanted numbers by name")
        for name in found:
            _check_number(found, name, needed=True, above=above)


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def result(case: Case, measured: Measurement, env: Mapping[str, str]) -> Result:
    """Return the result of one measured case; `env` is as `environment.environment` returns it."""
    named = dict.fromkeys(("op", "suite", "dtype", "precision", "layout"))
    named |= {name: getattr(case, name) for name in _CASE_FIELDS[case.op]}
    named |= {name: value for name in _LATER_FIELDS if (value := getattr(case, name))}
    named = {name: list(value) if isinstance(value, tuple) else value for name, value in named.items()}
    ours = measured.tritile_us
    times = {"torch": measured.torch_us, "inductor": measured.inductor_us, "tutorial": measured.tutorial_us}
    problem = case.problem
    known = {
        "tflops": None if isinstance(problem, PermuteProblem) else problem.flops / ours / 1e6,
        "gbps": problem.bytes / ours / 1e3,
        "copy_gbps": measured.copy_gbps,
    }
    rates = {name: known[name] for name in _RATES[case.op]}
    numbers = {
        "tritile_us": ours,
        **{f"{name}_us": us for name, us in times.items()},
        **{f"ratio_{name}": None if us is None else us / ours for name, us in times.items()},
        "spread": measured.spread,
        **rates,
        "error": measured.error,
        "torch_error": measured.torch_error,
    }
    sides = {
        "torch_call": measured.torch_call,
        "torch_calls": {name: _rounded(us) for name, us in measured.torch_calls.items()},
        "spreads": {name: _rounded(spread) for name, spread in measured.spreads.items()},
        "samples": measured.samples,
        "launches": measured.launches,
    }
    return {
        **named,
        **{name: value for name, value in sides.items() if value},
        **{name: _rounded(value) for name, value in numbers.items()},
        "config": measured.config.to_dict(),
        "plan_source": measured.plan_source,
        "env": dict(env),
    }


def host_result(call: str, tritile_us: float, torch_us: float, env: Mapping[str, str]) -> Result:
    """Return the result of one call's host time, in microseconds."""
    times = {"tritile_us": tritile_us, "torch_us": torch_us, "ratio_torch": torch_us / tritile_us}
    rounded = {name: _rounded(value) for name, value in times.items()}
    return {"op": HOST, "suite": HOST, "call": call, **rounded, "env": dict(env)}


def case_of(line: Mapping[str, Any]) -> Case:
    """Return the case of a result. Raises InvalidValueError if it names none."""
    op = line.get("op")
    if not isinstance(op, str) or op not in _CASE_FIELDS:
        raise InvalidValueError(f"op = {op!r}: wanted one of {', '.join(_CASE_FIELDS)}")
    found = {name: line.get(name) for name in _CASE_FIELDS[op]}
    fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}
    fields |= {name: line.get(name, "") for name in _LATER_FIELDS}
    return Case(**fields)


def _checked(line: Any) -> Result:
    """Return a value if it is a result, else raise InvalidValueError."""
    if not isinstance(line, dict):
        raise InvalidValueError("wanted an object")
    if line.get("op") == HOST:
        if line.get("suite") != HOST or not (isinstance(line.get("call"), str) and line["call"]):
            raise InvalidValueError(f"suite, call: wanted {HOST!r} and the call as text")
    else:
        _check_case(line)
    for name in ("tritile_us", "torch_us", "ratio_torch"):
        _check_number(line, name, needed=True, above=True)
    env = line.get("env")
    if not isinstance(env, dict) or any(not isinstance(env.get(name), str) for name in ENV_FIELDS):
        raise InvalidValueError(f"env: wanted {', '.join(ENV_FIELDS)}, as text")
    return line


def _check_case(line: Result) -> None:
    """Check the fields that only results of cases have. Raises InvalidValueError."""
    case = case_of(line)
    for name in ("precision", "layout"):
        if not isinstance(line.get(name, 0), str | None):
            raise InvalidValueError(f"{name} = {line.get(name)!r}: wanted text or null")
    for name in BASELINES:
        _check_number(line, f"{name}_us", needed=False, above=True)
        _check_number(line, f"ratio_{name}", needed=line.get(f"{name}_us") is not None, above=True)
    for name in _RATES[case.op]:
        _check_number(line, name, needed=name != "copy_gbps", above=True)
    for name in ("spread", "error", "torch_error"):
        _check_number(line, name, needed=True, above=False)
    _check_sides(line)
    Config.from_dict(line.get("config"))
    if not isinstance(line.get("plan_source"), str):
        raise InvalidValueError("plan_source: wanted text")


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


def read(path: Path) -> list[Result]:
    """Read the results of a file, in order. Invalid lines are skipped, with one warning.

    Lines of batch invariance's costs, of whole models and of first calls have no case and are skipped
    silently.

    Raises InvalidValueError if the file cannot be read.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InvalidValueError(f"results {path}: {error}") from error
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
        text = f"{path}: {len(bad)} of {len(lines)} lines skipped; {bad[0]}"
        warnings.warn(text, StoreWarning, stacklevel=2)
    return good


def _subject(line: Result) -> tuple[Case | str, str]:
    return line["call"] if line["op"] == HOST else case_of(line), line["env"]["gpu"]


def latest(results: Iterable[Result]) -> list[Result]:
    """Return the last result of each case or call on each GPU, in the order of their first results."""
    return list({_subject(line): line for line in results}.values())
