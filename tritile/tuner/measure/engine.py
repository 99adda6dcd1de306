"""The tuning pipeline: propose configs, compile in parallel, screen, race the fastest, check, store.

Several problems are in flight: while one is measured, others compile. Each trial is reported as soon as it is
measured, so a tuner that is stopped at any moment resumes where it was.
"""

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime

from tritile.core.config import Config
from tritile.core.log import log
from tritile.core.problem import Problem
from tritile.errors import TuningError, UnsupportedError, drop_frames
from tritile.tuner.measure.benchmark import Runner, Tunable
from tritile.tuner.measure.timing import rank_raced, timing_of
from tritile.tuner.measure.workers import WorkerError
from tritile.tuner.search import (
    ENOUGH,
    Listed,
    SearchSpace,
    Tried,
    exhaustive,
    expected_gain,
    fastest_first,
    screening,
)
from tritile.tuner.store.trial import Trial

_LOOKAHEAD = 4  # problems in flight: one is measured, the others compile
_PATIENCE = 4  # times `Rules.problem_s`, after which the search gives up if no config works
_FINALISTS = 4  # configs in the final race
_CLOSE = 1.15  # slowdown up to which a config is a finalist
_EXHAUSTIVE_BATCH = 256  # configs
OnTrial = Callable[[str, Trial], None]  # called with the kernel's digest and a trial as it is measured


@dataclass(frozen=True)
class Rules:
    """How a search proceeds; the defaults are those of every search.

    `exhaustive`: try every config. Otherwise `search.screening` proposes configs, until the next batch
    promises too little gain or `most` configs were tried. `batch`: configs to compile at a time. `checked`:
    how many of the fastest must have right answers. `problem_s`: seconds to spend on a problem before the
    final race.

    `by_trials`: pick the winner by the times in its stored trials, with `store.trial.rank`, so that a later
    process, which has only the trials, picks the same config. Otherwise the winner is that of the race, in
    which configs tied within the noise go to the incumbent, or to the first by key.
    """

    exhaustive: bool = False
    batch: int = 16
    checked: int = 1
    problem_s: float = 15.0
    most: int | None = None
    by_trials: bool = False


def exhaustive_rules(rules: Rules) -> Rules:
    """Return the rules of a search through every config, in large batches."""
    return replace(rules, exhaustive=True, batch=_EXHAUSTIVE_BATCH, most=None)


@dataclass(frozen=True)
class TuningTask:
    """A tunable, its search space, its earlier trials, and the config to beat."""

    tunable: Tunable
    space: SearchSpace | Listed
    trials: Mapping[Config, Trial] = field(default_factory=dict)
    incumbent: Config | None = None


@dataclass(frozen=True)
class Tuned:
    """The outcome of tuning one problem: the best trial, or why there is none.

    `trials`: how many configs were measured. `seconds`: time since the operands were made. `cause`: the last
    config's error if there is a `failure`.
    """

    problem: Problem
    best: Trial | None
    trials: int
    seconds: float
    failure: str | None = None
    cause: TuningError | None = field(default=None, compare=False)


def has_more(space: SearchSpace | Listed, trials: Mapping[Config, Trial], rules: Rules) -> bool:
    return bool(proposed(space, tried_of(trials.values()), rules))


def proposed(space: SearchSpace | Listed, tried: Tried, rules: Rules) -> list[Config]:
    if rules.exhaustive or isinstance(space, Listed):
        return exhaustive(space, tried, rules.batch)
    room = rules.batch if rules.most is None else min(rules.batch, rules.most - len(tried))
    configs = screening(space, tried, room) if room > 0 else []
    return [] if tried and configs and expected_gain(tried, len(configs)) < ENOUGH else configs


def tried_of(trials: Iterable[Trial]) -> dict[Config, float]:
    """Return microseconds by config, infinite if it failed: what search strategies take."""
    return {trial.config: trial.time for trial in trials}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def log_trial(trial: Trial) -> None:
    facts = {"problem": trial.problem.label, "config": str(trial.config)}
    log("tune", logging.DEBUG, **facts, us=trial.us, failure=trial.failure)


class _Search:
    """The search for one problem, step by step."""

    def __init__(self, task: TuningTask, runner: Runner, rules: Rules, on_trial: OnTrial) -> None:
        self.task, self.runner, self.rules, self._on_trial = task, runner, rules, on_trial
        self.tunable, self.trials = task.tunable, dict(task.trials)
        self.fastest_us = min(self.tried.values(), default=math.inf)
        self.new = 0
        self.last_error: TuningError | None = None  # of a config
        self.precompiled: set[Config] = set()  # configs with the kernels of their check compiled
        self.begun = False
        self.started = time.monotonic()  # when measuring could begin
        self.compiles: dict[Future[None], Config] = {}
        self.compile(self.propose())

    @property
    def tried(self) -> Tried:
        return tried_of(self.trials.values())

    def record(self, trial: Trial) -> None:
        before, self.trials[trial.config] = self.trials.get(trial.config), trial
        self.fastest_us = min(self.fastest_us, trial.time)
        self._on_trial(self.tunable.digest(trial.config), trial)
        if before is None or (before.us, before.failure) != (trial.us, trial.failure):  # else only checked
            log_trial(trial)

    def fail(self, config: Config, error: WorkerError) -> None:
        drop_frames(error)  # which hold this search, and a call's tensors
        self.last_error = error
        trial = self.trials.get(config) or Trial(self.tunable.problem, config, None)
        self.record(replace(trial, us=None, failure=str(error), measured_utc=now()))

    def is_late(self) -> bool:
        """True if this problem's time is up; it has more while no config works."""
        patience = 1 if self.fastest_us < math.inf else _PATIENCE
        return time.monotonic() - self.started > patience * self.rules.problem_s

    def propose(self) -> list[Config]:
        tried, incumbent = self.tried, self.task.incumbent
        first = [incumbent] if incumbent is not None and incumbent not in tried and not self.new else []
        return list(dict.fromkeys([*first, *proposed(self.task.space, tried, self.rules)]))

    def compile(self, configs: Sequence[Config]) -> None:
        self.compiles = {self.runner.compile(self.tunable, config): config for config in configs}

    def is_ready(self) -> bool:
        """True if a step need not wait for a compiler."""
        return not self.compiles or any(future.done() for future in self.compiles)

    def step(self) -> Tuned | None:
        """Screen what has compiled, and propose more; return the outcome once there is no more to propose."""
        try:
            if not self.begun:  # put operands on the GPU while the first configs compile
                self.begun = True
                self.runner.begin(self.tunable)
                self.started = time.monotonic()
            for future in [future for future in self.compiles if future.done()]:
                self._screen(self.compiles.pop(future), future)
                if self.is_late():
                    self.cancel()
                    break
            if self.compiles:
                return None
            self.compile([] if self.is_late() else self.propose())
            best = fastest_first(self.tried)[:1]
            if best and best[0] not in self.precompiled:
                self.precompiled.update(best)
                self.runner.compile(self.tunable, best[0], for_check=True)
            return None if self.compiles else self._outcome()
        except TuningError as error:  # of the operands, not of one config
            self.abandon()
            drop_frames(error)
            return Tuned(self.tunable.problem, None, self.new, 0.0, str(error), error)

    def cancel(self) -> None:
        for future in self.compiles:
            future.cancel()
        self.compiles = {}

    def abandon(self) -> None:
        self.cancel()
        self.runner.end(self.tunable)

    def _screen(self, config: Config, compiled: Future[None]) -> None:
        try:
            compiled.result()
            timing, resources = self.runner.screen(self.tunable, config, self.fastest_us)
        except CancelledError:
            return
        except WorkerError as refusal:
            self.new += 1
            return self.fail(config, refusal)
        self.new += 1
        used = {} if resources is None else asdict(resources)
        self.record(Trial(self.tunable.problem, config, *timing, **used, measured_utc=now()))

    def _outcome(self) -> Tuned:
        """Race the fastest configs, and choose the first whose answer is right."""
        right = filter(None, map(self._check, self._rank()))
        winner = next(iter([*itertools.islice(right, self.rules.checked)]), None)
        self.runner.end(self.tunable)
        texts = {trial.failure for trial in self.trials.values() if trial.failure}
        reasons = "; ".join(sorted(texts)[:4]) or "none was tried"
        failure = None if winner else f"no config works: {reasons}"
        seconds, cause = time.monotonic() - self.started, self.last_error if failure else None
        return Tuned(self.tunable.problem, winner, self.new, seconds, failure, cause)

    def _rank(self) -> list[Config]:
        """Race the fastest; return every config that worked, the winner first.

        Finalists come before the others: a quick timing may be lucky, and was not interleaved.
        """
        tried = self.tried
        ranked, incumbent = fastest_first(tried), self.task.incumbent
        finalists = [config for config in ranked[:_FINALISTS] if tried[config] <= _CLOSE * tried[ranked[0]]]
        if incumbent in ranked and incumbent not in finalists:
            finalists.append(incumbent)
        order = self._race(finalists)
        if self.rules.by_trials and len(finalists) > 1:
            fastest = fastest_first(self.tried)[:_FINALISTS]
            if not {*fastest} <= {*finalists}:  # the race was slower than somebody's quick timing
                self._race(fastest)
            order = fastest_first(self.tried)
        return list(dict.fromkeys([*order, *ranked]))

    def _race(self, finalists: Sequence[Config]) -> list[Config]:
        if len(finalists) < 2:
            return list(finalists)
        try:
            times = self.runner.race(self.tunable, finalists)
        except WorkerError:
            return list(finalists)  # in screening order; the check finds which one fails
        samples = dict(zip(finalists, times, strict=True))
        for config, measured in samples.items():
            self.record(replace(self.trials[config], **timing_of(measured)._asdict(), measured_utc=now()))
        return rank_raced(samples, self.task.incumbent)

    def _check(self, config: Config) -> Trial | None:
        try:
            error = self.runner.check(self.tunable, config)
        except WorkerError as wrong:
            self.fail(config, wrong)
            return None
        if error != self.trials[config].error:
            self.record(replace(self.trials[config], error=error, measured_utc=now()))
        return self.trials[config]


def tune(
    tasks: Iterable[TuningTask],
    runner: Runner,
    rules: Rules,
    on_trial: OnTrial,
    should_continue: Callable[[], bool] = lambda: True,
) -> Iterator[Tuned]:
    """Run the tasks, a few at a time, and yield each outcome; `on_trial` gets every trial as it is measured.

    No further problem is begun once `should_continue()` is false. If operands cannot be made (out of memory,
    say), no config is legal, or every config fails, the outcome has a failure.
    """
    coming, active = iter(tasks), list[_Search]()
    try:
        while True:
            stop = not should_continue()
            while not stop and len(active) < _LOOKAHEAD and (task := next(coming, None)) is not None:
                try:
                    active.append(_Search(task, runner, rules, on_trial))
                except UnsupportedError as error:  # no config is legal
                    yield Tuned(task.tunable.problem, None, 0, 0.0, str(error))
            current = [search for search in active if search.begun] if stop else active[: runner.max_resident]
            if not current:
                return
            # Measure if something has compiled, else begin a problem, else wait for a compile.
            ready = [search for search in current if search.is_ready()]
            search = next(iter([*ready, *(search for search in current if not search.begun)]), None)
            if search is None:
                compiles = [future for search in current for future in search.compiles]
                wait(compiles, return_when=FIRST_COMPLETED)
            elif (outcome := search.step()) is not None:
                active.remove(search)
                yield outcome
    finally:
        for search in active:
            search.abandon()
