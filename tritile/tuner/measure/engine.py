"""Run the pipeline of tuning: proposed -> compiled in parallel -> screened -> raced -> checked -> remembered.

Several problems are under way: while one is measured, others compile. Trials are handed on as soon as they
are measured, so that a tuner stopped at any moment goes on where it was.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from tritile.core.config import Config
from tritile.core.log import log
from tritile.core.problem import Problem
from tritile.errors import TuningError, UnsupportedError, drop_frames
from tritile.tuner.measure.bench import Shop, Subject
from tritile.tuner.measure.timing import settled, timing_of
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

_LOOKAHEAD = 4  # problems under way: one is measured, the others compile
_HOPELESS = 4  # times a problem's seconds, after which a problem without a working config is given up
_FINALISTS = 4  # configs in the final race, and
_CLOSE = 1.15  # times the fastest, up to which a config is one of them
_WHOLE = 256  # configs in a batch of a search through all
Keep = Callable[[str, Trial], None]  # takes the digest of the kernel, and what was measured of it


@dataclass(frozen=True)
class Rules:
    """How a search goes: by `screening`, or through every config. Its defaults are those of every search.

    `batch`: configs to compile at a time. `problem_s`: seconds after which a problem is screened no further.
    A screening ends where its next batch promises too little gain, or after `most` configs.
    `by_trials`: the winner is the fastest by its trial, as whoever reads the trials later finds it; else a
    tie goes to the incumbent, or the first by name.
    """

    exhaustive: bool = False
    batch: int = 16
    problem_s: float = 15.0
    most: int | None = None
    by_trials: bool = False


def whole(rules: Rules) -> Rules:
    """Return the rules for a search through every config, in large batches."""
    return replace(rules, exhaustive=True, batch=_WHOLE, most=None)


@dataclass(frozen=True)
class Task:
    """A subject, its search space, its earlier trials, and the config to beat."""

    subject: Subject
    space: SearchSpace | Listed
    trials: Mapping[Config, Trial] = field(default_factory=dict)
    incumbent: Config | None = None


@dataclass(frozen=True)
class Tuned:
    """The outcome of tuning one problem: the best trial, or the `failure` to find one.

    `trials`: configs measured now. `seconds`: since the operands were made. `cause`: the last error, where
    there is a `failure`.
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
    found = screening(space, tried, room) if room > 0 else []
    return [] if tried and found and expected_gain(tried, len(found)) < ENOUGH else found


def tried_of(trials: Iterable[Trial]) -> dict[Config, float]:
    """Return microseconds by config, as strategies take them; infinite where a config failed."""
    return {trial.config: trial.time for trial in trials}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def logged(keep: Keep) -> Keep:
    """Return a `keep` that also logs each trial, at level DEBUG."""
    last: dict[tuple[Problem, Config], Trial] = {}

    def both(digest: str, trial: Trial) -> None:
        keep(digest, trial)
        key = trial.problem, trial.config
        before, last[key] = last.get(key), trial
        if before is None or (before.us, before.failure) != (trial.us, trial.failure):  # else it was checked
            facts = {"problem": trial.problem.label, "config": str(trial.config)}
            log("tune", logging.DEBUG, **facts, us=trial.us, failure=trial.failure)

    return both


class _Search:
    """Search the configs of one problem, step by step."""

    def __init__(self, task: Task, shop: Shop, rules: Rules, keep: Keep) -> None:
        self.task, self.shop, self.rules, self._remember = task, shop, rules, keep
        self.subject, self.trials = task.subject, dict(task.trials)
        self.fastest_us = min(self.tried.values(), default=math.inf)
        self.new = 0
        self.last: TuningError | None = None  # of a config
        self.foreseen: set[Config] = set()  # configs whose checks were compiled ahead
        self.begun = False
        self.since = time.monotonic()  # when measuring could begin
        self.compiles: dict[Future[None], Config] = {}
        self.compile(self.propose())

    @property
    def tried(self) -> Tried:
        return tried_of(self.trials.values())

    def keep(self, trial: Trial) -> None:
        self.trials[trial.config] = trial
        self.fastest_us = min(self.fastest_us, trial.time)
        self._remember(self.subject.digest(trial.config), trial)

    def fail(self, config: Config, error: WorkerError) -> None:
        drop_frames(error)  # which refer to this search, and to a call's tensors
        self.last = error
        trial = self.trials.get(config) or Trial(self.subject.problem, config, None)
        self.keep(replace(trial, us=None, failure=str(error), measured_utc=now()))

    def is_late(self) -> bool:
        """True if this problem's time is over, which is much longer where no config works yet."""
        waited = time.monotonic() - self.since
        patience = 1 if self.fastest_us < math.inf else _HOPELESS
        return waited > patience * self.rules.problem_s

    def propose(self) -> list[Config]:
        tried, incumbent = self.tried, self.task.incumbent
        first = [incumbent] if incumbent is not None and incumbent not in tried and not self.new else []
        return list(dict.fromkeys([*first, *proposed(self.task.space, tried, self.rules)]))

    def compile(self, configs: Sequence[Config]) -> None:
        self.compiles = {self.shop.compile(self.subject, config): config for config in configs}

    def is_ready(self) -> bool:
        """True if a step need not wait for a compiler."""
        return not self.compiles or any(future.done() for future in self.compiles)

    def step(self) -> Tuned | None:
        """Screen what is compiled, and propose more; return the outcome once nothing more is proposed."""
        try:
            if not self.begun:  # put operands on the GPU while the first configs compile
                self.begun = True
                self.shop.begin(self.subject)
                self.since = time.monotonic()
            for future in [future for future in self.compiles if future.done()]:
                self._screen(self.compiles.pop(future), future)
                if self.is_late():
                    self.cancel()
                    break
            if self.compiles:
                return None
            self.compile([] if self.is_late() else self.propose())
            best = fastest_first(self.tried)[:1]
            if best and best[0] not in self.foreseen:
                self.foreseen.update(best)
                self.shop.compile(self.subject, best[0], for_check=True)
            return None if self.compiles else self._outcome()
        except TuningError as error:  # of its operands, not of one config
            self.abandon()
            drop_frames(error)
            return Tuned(self.subject.problem, None, self.new, 0.0, str(error), error)

    def cancel(self) -> None:
        for future in self.compiles:
            future.cancel()
        self.compiles = {}

    def abandon(self) -> None:
        self.cancel()
        self.shop.end(self.subject)

    def _screen(self, config: Config, compiled: Future[None]) -> None:
        try:
            compiled.result()
            timing, taken = self.shop.screen(self.subject, config, self.fastest_us)
        except CancelledError:
            return
        except WorkerError as refusal:
            self.new += 1
            return self.fail(config, refusal)
        self.new += 1
        spilled = None if taken.spills is None else 4 * taken.spills  # bytes
        used = (taken.registers, spilled, taken.shared)
        self.keep(Trial(self.subject.problem, config, *timing, *used, measured_utc=now()))

    def _outcome(self) -> Tuned:
        """Race the fastest configs, and choose the first whose answer is right."""
        winner = next(filter(None, map(self._checked, self._ranked())), None)
        self.shop.end(self.subject)
        texts = {trial.failure for trial in self.trials.values() if trial.failure}
        reasons = "; ".join(sorted(texts)[:4]) or "none was tried"
        failure = None if winner else f"no config works: {reasons}"
        return Tuned(
            self.subject.problem,
            winner,
            self.new,
            time.monotonic() - self.since,
            failure,
            self.last if failure else None,
        )

    def _ranked(self) -> list[Config]:
        """Race the fastest; return all configs that worked, the winner first.

        Finalists come first: another's quick timing may have been lucky, and was not in turns with theirs.
        """
        tried = self.tried
        ranked, incumbent = fastest_first(tried), self.task.incumbent
        finalists = [config for config in ranked[:_FINALISTS] if tried[config] <= _CLOSE * tried[ranked[0]]]
        if incumbent in ranked and incumbent not in finalists:
            finalists.append(incumbent)
        order = self._raced(finalists)
        if self.rules.by_trials and len(finalists) > 1:
            fastest = fastest_first(self.tried)[:_FINALISTS]
            if not {*fastest} <= {*finalists}:  # a quick timing that the race's times do not reach
                self._raced(fastest)
            order = fastest_first(self.tried)
        return list(dict.fromkeys([*order, *ranked]))

    def _raced(self, finalists: Sequence[Config]) -> list[Config]:
        if len(finalists) < 2:
            return list(finalists)
        try:
            times = self.shop.race(self.subject, finalists)
        except WorkerError:
            return list(finalists)  # in the order of screening; the check finds the one at fault
        samples = dict(zip(finalists, times, strict=True))
        for config, measured in samples.items():
            self.keep(replace(self.trials[config], **timing_of(measured)._asdict(), measured_utc=now()))
        return settled(samples, self.task.incumbent)

    def _checked(self, config: Config) -> Trial | None:
        try:
            error = self.shop.check(self.subject, config)
        except WorkerError as wrong:
            self.fail(config, wrong)
            return None
        trial = replace(self.trials[config], error=error)
        if trial != self.trials[config]:
            self.keep(trial)
        return trial


def tune(
    tasks: Iterable[Task],
    shop: Shop,
    rules: Rules,
    keep: Keep,
    keep_on: Callable[[], bool] = lambda: True,
) -> Iterator[Tuned]:
    """Tune each task's subject, yielding its outcome; `keep` gets every trial as it is measured.

    Tasks are taken a few ahead. Stops before another problem is measured once `keep_on()` is false. A subject
    whose operands cannot be made (out of memory, say), that has no legal config, or whose every config fails
    is yielded with its failure.
    """
    coming, active = iter(tasks), list[_Search]()
    try:
        while True:
            stop = not keep_on()
            while not stop and len(active) < _LOOKAHEAD and (task := next(coming, None)) is not None:
                try:
                    active.append(_Search(task, shop, rules, keep))
                except UnsupportedError as error:  # no config is legal
                    yield Tuned(task.subject.problem, None, 0, 0.0, str(error))
            own = [search for search in active if search.begun] if stop else active[: shop.benches]
            if not own:
                return
            # One with something to measure, else one to begin, else the first that a compiler serves.
            ready = [search for search in own if search.is_ready()]
            search = next(iter([*ready, *(search for search in own if not search.begun)]), None)
            if search is None:
                wait([future for each in own for future in each.compiles], return_when=FIRST_COMPLETED)
            elif (outcome := search.step()) is not None:
                active.remove(search)
                yield outcome
    finally:
        for search in active:
            search.abandon()
