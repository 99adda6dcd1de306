"""Results of benchmarks: JSON objects, one a line, that can be compared from run to run.

A result is a dictionary. It names its case (`op, suite, dtype, precision, layout`, then `batch, m, n, k`
or `shape, dims`; precision and layout are null for a permute), its times in microseconds
(`tritile_us, torch_us, inductor_us`), `ratio_torch` and `ratio_inductor` (the peer's time by tritile's:
above 1, tritile is faster), `spread`, `tflops` or `gbps` and `copy_gbps`, `config, plan_source`,
`error, torch_error` and `env`.
"""

import json
import math
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tritile.config import Config
from tritile.errors import InvalidValueError, StoreWarning
from tritile.problem import MatmulProblem
from tritile.report.environment import ENV_FIELDS
from tritile.tune.suites import Case

Result = dict[str, Any]

_TIMES: Final = {"tritile_us": True, "torch_us": True, "inductor_us": False}  # whether it must be there
_RATES: Final = {"matmul": ("tflops",), "permute": ("gbps", "copy_gbps")}
_CASE_FIELDS: Final = {
    "matmul": ("op", "suite", "dtype", "precision", "layout", "batch", "m", "n", "k"),
    "permute": ("op", "suite", "dtype", "shape", "dims"),
}


@dataclass(frozen=True)
class Measurement:
    """What was measured of one case.

    Times are medians in microseconds, None for a peer that was not run. `spread` is that of tritile's
    times, as a fraction of their median. Errors are relative norms against a reference in float64 or
    whole numbers. `copy_gbps` is what a plain copy of as many bytes reaches, read and written bytes
    both counted (permutes only). Raises InvalidValueError for a time or rate that is not above 0, or a
    spread or error below 0 or not finite.
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

    def __post_init__(self) -> None:
        for name in ("tritile_us", "torch_us", "inductor_us", "copy_gbps"):
            needed = name in ("tritile_us", "torch_us")
            _check_number(vars(self), name, needed=needed, above=True)
        for name in ("spread", "error", "torch_error"):
            _check_number(vars(self), name, needed=True, above=False)
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


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def result(case: Case, measured: Measurement, env: Mapping[str, str]) -> Result:
    """The line of a result file for one measured case; `env` as from `environment.environment`."""
    named = dict.fromkeys(("op", "suite", "dtype", "precision", "layout"))
    named |= {name: getattr(case, name) for name in _CASE_FIELDS[case.op]}
    named = {name: list(value) if isinstance(value, tuple) else value for name, value in named.items()}
    ours, inductor = measured.tritile_us, measured.inductor_us
    problem = case.problem
    rates: dict[str, float | None]
    if isinstance(problem, MatmulProblem):
        rates = {"tflops": problem.flops / ours / 1e6}
    else:
        rates = {"gbps": problem.bytes / ours / 1e3, "copy_gbps": measured.copy_gbps}
    numbers = {
        "tritile_us": ours,
        "torch_us": measured.torch_us,
        "inductor_us": inductor,
        "ratio_torch": measured.torch_us / ours,
        "ratio_inductor": None if inductor is None else inductor / ours,
        "spread": measured.spread,
        **rates,
        "error": measured.error,
        "torch_error": measured.torch_error,
    }
    return {
        **named,
        **{name: _rounded(value) for name, value in numbers.items()},
        "config": measured.config.to_dict(),
        "plan_source": measured.plan_source,
        "env": dict(env),
    }


def case_of(line: Mapping[str, Any]) -> Case:
    """The case that a result is of. Raises InvalidValueError if it names none."""
    op = line.get("op")
    if not isinstance(op, str) or op not in _CASE_FIELDS:
        raise InvalidValueError(f"op = {op!r}: wanted one of {', '.join(_CASE_FIELDS)}")
    found = {name: line.get(name) for name in _CASE_FIELDS[op]}
    fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}
    return Case(**fields)


def _checked(line: Any) -> Result:
    """This value, if it is a result. Raises InvalidValueError otherwise."""
    if not isinstance(line, dict):
        raise InvalidValueError("wanted an object")
    case = case_of(line)
    for name, needed in _TIMES.items():
        _check_number(line, name, needed=needed, above=True)
    for name in ("ratio_torch", *_RATES[case.op]):
        _check_number(line, name, needed=name != "copy_gbps", above=True)
    _check_number(line, "ratio_inductor", needed=line.get("inductor_us") is not None, above=True)
    for name in ("spread", "error", "torch_error"):
        _check_number(line, name, needed=True, above=False)
    Config.from_dict(line.get("config"))
    env = line.get("env")
    if not isinstance(env, dict) or any(not isinstance(env.get(name), str) for name in ENV_FIELDS):
        raise InvalidValueError(f"env: wanted {', '.join(ENV_FIELDS)}, as text")
    if not isinstance(line.get("plan_source"), str):
        raise InvalidValueError("plan_source: wanted text")
    return line


def append(path: Path, results: Iterable[Result]) -> None:
    """Add results to the end of a file, whole lines at once; folders are made as needed.

    Raises InvalidValueError for something that is not a result, and OSError if it cannot be written.
    """
    text = "".join(json.dumps(_checked(line), allow_nan=False) + "\n" for line in results)
    if not text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+", buffering=0) as file:
        # A run that was cut off leaves half a line: end it, or it would spoil the first of ours too.
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            text = text if file.read(1) == b"\n" else "\n" + text
        data = text.encode()
        # One write in append mode: another process that appends cannot get between our lines.
        if file.write(data) != len(data):
            raise OSError(f"{path}: written in part only; is the disk full?")


def read(path: Path) -> list[Result]:
    """The results of a file, in its order. Lines that are none are skipped, with one warning.

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
            good.append(_checked(json.loads(line)))
        except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or not a result
            bad.append(f"line {number}: {str(error)[:200]}")
    if bad:
        text = f"{path}: {len(bad)} of {len(lines)} lines skipped; {bad[0]}"
        warnings.warn(text, StoreWarning, stacklevel=2)
    return good


def latest(results: Iterable[Result]) -> list[Result]:
    """The last result of each case on each GPU, in the order in which the cases first came."""
    return list({(case_of(line), line["env"]["gpu"]): line for line in results}.values())


@dataclass(frozen=True)
class Summary:
    """How tritile compares over the cases of one suite, dtype, precision and layout on one GPU.

    `geomean` and `worst` are of `ratio_torch` (above 1: tritile is faster); `behind` counts the cases
    below 1; `worst_label` names the case with the worst ratio. `layout` is "" for permutes.
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
    """The sizes of a result's case: 4096x4096x4096 (M, N, K), with the batch before them if it is one."""
    if line["op"] == "permute":
        return "x".join(str(size) for size in line["shape"])
    batch = [line["batch"]] if line["batch"] > 1 else []
    return "x".join(str(size) for size in (*batch, line["m"], line["n"], line["k"]))


def summary(results: Iterable[Result]) -> list[Summary]:
    """Counts, geometric means and worst ratios, in order of the results, each case once as `latest`."""
    groups: dict[tuple[str, ...], list[Result]] = {}
    for line in latest(results):
        case = case_of(line)
        words = (case.precision, case.layout) if case.op == "matmul" else ("", "")
        groups.setdefault((line["env"]["gpu"], case.suite, case.dtype, *words), []).append(line)
    return [_summary_of(words, lines) for words, lines in groups.items()]


def _summary_of(words: tuple[str, ...], lines: list[Result]) -> Summary:
    gpu, suite, dtype, precision, layout = words
    ratios = [line["ratio_torch"] for line in lines]
    worst = min(lines, key=lambda line: line["ratio_torch"])
    return Summary(
        gpu=gpu,
        suite=suite,
        dtype=dtype,
        precision=precision,
        layout=layout,
        count=len(lines),
        geomean=math.exp(math.fsum(map(math.log, ratios)) / len(ratios)),
        worst=worst["ratio_torch"],
        worst_label=sizes_label(worst),
        behind=sum(ratio < 1 for ratio in ratios),
    )


def dtype_label(dtype: str, precision: str) -> str:
    """The dtype, with how float32 is multiplied where that is not IEEE's way."""
    return f"{dtype} {precision}" if precision not in ("", "ieee") else dtype


def markdown_summary(results: Iterable[Result]) -> str:
    """The summary as Markdown: a table for each GPU, below the versions with which it was measured."""
    results = latest(results)
    rows = summary(results)
    parts: list[str] = []
    for gpu in dict.fromkeys(row.gpu for row in rows):
        envs = [line["env"] for line in results if line["env"]["gpu"] == gpu]
        with_ = [f"{name} {' / '.join(sorted({env[name] for env in envs}))}" for name in ("torch", "triton")]
        parts += [
            f"**{gpu or 'no GPU'}**, {', '.join(with_)}; torch's time / tritile's, above 1 is faster:",
            "",
        ]
        parts += ["| suite | dtype | layout | problems | geometric mean | behind | worst | at |"]
        parts += ["| --- | --- | --- | ---: | ---: | ---: | ---: | --- |"]
        for row in (row for row in rows if row.gpu == gpu):
            cells = (row.suite, dtype_label(row.dtype, row.precision), row.layout, row.count)
            ratios = (f"{row.geomean:.2f}", row.behind, f"{row.worst:.2f}", row.worst_label)
            parts += [f"| {' | '.join(map(str, (*cells, *ratios)))} |"]
        parts += [""]
    return "\n".join(parts)
