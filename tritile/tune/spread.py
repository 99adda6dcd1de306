"""Mode "spread" for problems of tritile's own operations: see `tritile.tuner.spread`.

Searches wait in a queue, one for each GPU. How calls take turns is in `tritile.ops.spread`.
"""

import functools
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, Final

import torch

from tritile.choose import aten, pick
from tritile.choose.pick import Plan
from tritile.choose.predictor import RACED
from tritile.core import settings
from tritile.core.call import call_for
from tritile.core.config import Config
from tritile.core.log import log
from tritile.errors import GpuTakenError, TuningError, brief
from tritile.families import launching
from tritile.families.space import illegal
from tritile.tune.now import time_torch
from tritile.tune.subject.problem import TunableProblem, task_of
from tritile.tuner.measure import engine
from tritile.tuner.measure.engine import Rules
from tritile.tuner.measure.workers import shared_runner
from tritile.tuner.spread import COPIES, TIMED_US, Turns, gate
from tritile.tuner.store.trial import TORCH, Trial
from tritile.tuner.store.trials import store_of

_CHECKED: Final = 10  # of the fastest, so that the guess is one of them
_GUESSES: Final = ("predicted", "model", "torch")  # sources of plans that no measurement of the problem has


def is_worth_measuring(plan: Plan) -> bool:
    """True for a guess that takes long enough, as far as is known, to be timed by events."""
    is_guess = plan.source in _GUESSES and not plan.problem.needs_torch
    return is_guess and (plan.us is None or plan.us >= TIMED_US)


@functools.cache
def _queue(gpu: int) -> "SimpleQueue[Callable[[], None]]":
    """The searches on a GPU, which a thread makes one after the other."""
    searches = SimpleQueue[Callable[[], None]]()

    def work() -> None:
        while True:
            searches.get()()

    threading.Thread(target=work, daemon=True).start()
    return searches


class Search(Turns):
    """The search for a problem; `plan` is the guess. `by_torch`: torch's kernel is a candidate.

    `on_change` is called, in any thread, once turns begin, and once all is over.
    """

    def __init__(self, plan: Plan, gpu: int, by_torch: bool, on_change: Callable[[], object]) -> None:
        super().__init__(plan.config, self._ended)
        self.plan, self.label, self._gpu, self._on_change = plan, plan.problem.label, gpu, on_change
        self._by_torch = by_torch and aten.illegal(plan.problem) is None
        self._tunable = TunableProblem(plan.problem, plan.device, shares_gpu=True)
        self.keys = set[Any]()  # of prepared calls, to be dropped as the next phase begins

    def begin(self) -> None:
        """Have the problem measured, after those that wait already."""
        try:
            _queue(self._gpu).put(self._search)
        except RuntimeError as error:  # no thread can be started
            self.give_up(error)

    @property
    def phase(self) -> str:
        """Say "search", "turns" or "over"."""
        return "over" if self._over else "turns" if self._candidates else "search"

    @property
    def configs(self) -> list[Config]:
        """The configs that take turns."""
        return [candidate.config for candidate in self._candidates]

    def give_up(self, error: Exception) -> None:
        super().give_up(error)
        text = f"{self.label} stays with a guess, which was not measured: {brief(error)}"
        log("tune", logging.WARNING, text, problem=self.label)
        self._ended()

    def _ended(self) -> None:
        pick.forget()  # of what is in the store now, another may be the fastest
        self._on_change()

    def _search(self) -> None:
        gate(self._gpu).acquire()  # a decorated kernel may be measured meanwhile
        self._measured(self._gpu, self._measure)

    def _measure(self) -> None:
        problem, device = self.plan.problem, self.plan.device
        us = self.plan.us or pick.by_model(problem, device, "").us
        if us is not None and us < TIMED_US:
            return self._end()
        if COPIES * problem.bytes > settings.spread_bytes():
            raise GpuTakenError(f"{COPIES} copies of its tensors take more than TRITILE_SPREAD_MEMORY")
        task = task_of(problem, device, among=pick.likely(problem, device, RACED))
        incumbent = task.incumbent if self.guess == aten.CONFIG else self.guess
        task = replace(task, tunable=self._tunable, incumbent=incumbent)
        rules = Rules(problem_s=settings.tune_budget_s(Rules.problem_s), checked=_CHECKED)
        with shared_runner(self._gpu) as runner:
            (tuned,) = engine.tune([task], runner, rules, store_of(device).add)
        if tuned.best is None:
            raise TuningError(tuned.failure) from tuned.cause
        if self._by_torch:
            time_torch(problem, device, self._gpu, shares_gpu=True)
        trials = filter(self._may_run, pick.trials(problem, device, *([TORCH] * self._by_torch)))
        ranked = sorted(trials, key=lambda trial: (trial.time, trial.config.key))
        self._begin_turns(ranked, next((t for t in ranked if t.config == self.guess), None))
        if self.phase == "turns":
            self._on_change()
        return None

    def _may_run(self, trial: Trial) -> bool:
        """True if a call may run it: its answer was checked, or it is torch's."""
        if trial.config == aten.CONFIG:
            return trial.works
        return trial.right and illegal(trial.config, self.plan.problem, self.plan.device) is None

    def _load(self, config: Config) -> None:
        if config != aten.CONFIG:
            where = torch.device("cuda", self._gpu)

            def make(dtype: str, elements: int) -> torch.Tensor:  # its memory is not read
                return torch.empty(16, dtype=getattr(torch, dtype), device=where)

            launching.prepare(call_for(self.plan.problem, make), config)

    def _store(self, trial: Trial) -> None:
        digest = TORCH if trial.config == aten.CONFIG else self._tunable.digest(trial.config)
        store_of(self.plan.device).add(digest, trial)
