"""A whole benchmark: case after case, each result kept as soon as it is there; and reading results back."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from tritile.errors import InvalidValueError, brief
from tritile.lab.report import bench
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
    """Measure every case: the results, and how many cases failed.

    A result is appended to its suite's file in `folder` at once, if one is given. `tell` hears what
    went wrong, `done` the name of each case that is over. Raises OSError if a file cannot be written.
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
        except Exception as error:  # what one case raises, torch's refusals too, is not the others'
            failed += 1
            tell(f"{case.problem.label}: {brief(error)}")
        torch.cuda.empty_cache()  # the memory of one case's graphs is not given to another's by itself
        done(case.problem.label)
    return lines, failed


def run_host(env: Mapping[str, str], folder: Path | None) -> list[Result]:
    """Measure what small calls cost the host; appended to host.jsonl in `folder`, if one is given."""
    lines = [host_result(call, ours, theirs, env) for call, ours, theirs in bench.host_costs()]
    if folder is not None:
        append(folder / f"{HOST}.jsonl", lines)
    return lines


def stored(places: Iterable[Path], tell: Tell) -> list[Result]:
    """The results of these files, and of the .jsonl files of these folders and of the folders in them.

    `tell` hears of lines that are no results. Raises InvalidValueError if there is no file to read.
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
