"""Snapshot: what one store knew at a moment, as text that another process can take in its place."""

import heapq
import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final

from tritile.core.device import Device
from tritile.core.problem import Problem
from tritile.errors import InvalidValueError
from tritile.planning.store import Store
from tritile.planning.trial import (
    ENVIRONMENT_COLUMNS,
    TRIAL_COLUMNS,
    Trial,
    best_of,
    rank,
    row_of,
    trial_from,
)

PER_PROBLEM: Final = 8
Pair = tuple[str, Trial]


def text_of(store: Store) -> str:
    """Tell what a store knows that counts today, as JSON: kernel and trial, a line each.

    That is the `PER_PROBLEM` best trials that did not fail of each problem and kernel, of this device
    with these versions.
    """
    here = {name: getattr(store.device, name) for name in ENVIRONMENT_COLUMNS[:-1]}
    found: dict[tuple[str, Problem], list[Trial]] = defaultdict(list)
    for facts, trial in store.everything():
        if trial.works and all(facts[name] == value for name, value in here.items()):
            found[facts["kernel"], trial.problem].append(trial)
    lines = [
        json.dumps([kernel, row_of(trial)])
        for (kernel, _), trials in found.items()
        for trial in heapq.nsmallest(PER_PROBLEM, trials, key=rank)
    ]
    return "\n".join(lines)


def _pairs(text: str) -> Iterator[Pair]:
    for line in text.splitlines():
        match json.loads(line):
            case [str(kernel), list(row)] if len(row) == len(TRIAL_COLUMNS):
                yield kernel, trial_from(row)
            case other:
                raise InvalidValueError(f"{str(other)[:80]!r} is no kernel and trial")


class Snapshot(Store):
    """A store that reads what `text_of` gave, whatever its file comes to hold; what is added goes there.

    Raises InvalidValueError for a text that `text_of` cannot have given.
    """

    def __init__(self, device: Device, text: str) -> None:
        super().__init__(device)
        try:
            self._pairs = tuple(_pairs(text))
        except (ValueError, RecursionError) as error:
            raise InvalidValueError(f"no snapshot of a store: {str(error)[:200]}") from error
        self._known: dict[str, dict[Problem, list[Trial]]] = {}
        for kernel, trial in self._pairs:
            self._known.setdefault(kernel, {}).setdefault(trial.problem, []).append(trial)

    def trials(self, kernel: str, problem: Problem, *more: str) -> list[Trial]:
        """As of `Store`, but for those that failed, and all but the best."""
        return [trial for each in (kernel, *more) for trial in self._known.get(each, {}).get(problem, ())]

    def best(self, kernel: str, problem: Problem) -> Trial | None:
        """As of `Store`."""
        return best_of(self.trials(kernel, problem))

    def bests(self, kernel: str, op: str) -> list[Trial]:
        """As of `Store`."""
        known = self._known.get(kernel, {})
        return [min(trials, key=rank) for problem, trials in known.items() if problem.op == op]

    def everything(self) -> Iterator[tuple[dict[str, Any], Trial]]:
        """As of `Store`: what is in the snapshot."""
        here = {name: getattr(self.device, name) for name in ENVIRONMENT_COLUMNS[:-1]}
        return ((here | {"kernel": kernel}, trial) for kernel, trial in self._pairs)
