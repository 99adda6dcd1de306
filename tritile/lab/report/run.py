"""Run a whole benchmark, keeping each result at once, and read results back."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from tritile.core.device import Device
from tritile.errors import InvalidValueError, brief
from tritile.lab.report import bench, drawn
from tritile.lab.report.results import HOST, Result, append, host_result, read, result
from tritile.tune.suites import Case

Tell = Callable[[str], None]


def run_cases(
    cases: Iterable[Case],
    peers: Sequence[str],
    env: Mapping[str, str],
    folder: Path | None,
    tell: Tell,
    done: Tell,
) -> tuple[list[Result], int]:
    """Measure every case; return the results, and how many cases failed.

    If `folder` is given, each result is appended at once to its suite's file there. `tell` is told what went
    wrong, `done` the name of each finished case. Raises OSError if a file cannot be written.
    """
    lines: list[Result] = []
    failed = 0
    for case in cases:
        try:
            lines.append(result(case, bench.measured(case, peers, tell), env))
            if folder is not None:
                append(folder / f"{case.suite}.jsonl", lines[-1:])
        except OSError:
            raise
        except Exception as error:  # a case that raises, in torch too, costs itself alone
            failed += 1
            tell(f"{case.problem.label}: {brief(error)}")
        torch.cuda.empty_cache()  # torch does not give one case's graph memory to another
        done(case.problem.label)
    return lines, failed


def run_drawn(
    cases: Sequence[Case],
    peers: Sequence[str],
    searched: int,
    device: Device,
    env: Mapping[str, str],
    folder: Path | None,
    tell: Tell,
    done: Tell,
) -> tuple[list[Result], int]:
    """Measure drawn cases as `run_cases` does, with nothing remembered and every kernel compiled before.

    The first `searched` aligned products are compared with torch.compile's max-autotune too.
    """
    first = drawn.aligned(cases)[:searched]
    rest = [case for case in cases if case not in first]
    with drawn.nothing_remembered():
        drawn.compile_all(cases, device)
        lines, failed = run_cases(first, list({*peers, "inductor"}), env, folder, tell, done)
        more, lost = run_cases(rest, peers, env, folder, tell, done)
    return lines + more, failed + lost


def run_host(env: Mapping[str, str], folder: Path | None) -> list[Result]:
    """Measure what small calls cost the host, and append that to host.jsonl in `folder`, if given."""
    lines = [host_result(call, ours, theirs, env) for call, ours, theirs in bench.host_costs()]
    if folder is not None:
        append(folder / f"{HOST}.jsonl", lines)
    return lines


def stored(places: Iterable[Path], tell: Tell) -> list[Result]:
    """Read the results of files, and of the .jsonl files in folders and in the folders in them.

    `tell` is told of lines that are no results. Raises InvalidValueError if there is no file to read.
    """
    places = list(places)
    files: list[Path] = []
    for place in places:
        found = [*place.glob("*.jsonl"), *place.glob("*/*.jsonl")] if place.is_dir() else [place]
        files += sorted(found)
    if not files:
        raise InvalidValueError(f"no .jsonl file of results in {', '.join(map(str, places))}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lines = [line for path in dict.fromkeys(files) for line in read(path)]
    for warning in caught:
        tell(str(warning.message))
    return lines
