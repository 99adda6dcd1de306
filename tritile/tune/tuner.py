"""Tuning: problems -> screened, checked and re-ranked configs -> store.

Each trial is stored as soon as it is measured, so that a tuner stopped at any moment goes on where it
was. The next problems compile in other processes while the GPU measures.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Future, TimeoutError
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import torch

from tritile import ladder, launch, model
from tritile.config import Config
from tritile.device import Device
from tritile.errors import TuningError, brief
from tritile.problem import MatmulProblem, PermuteProblem
from tritile.store import store_of
from tritile.trial import Trial
from tritile.tune import measure, search
from tritile.tune.worker import COMPILE_LIMIT_S, CompilePool, Refusals

Tiled = MatmulProblem | PermuteProblem
OPENING = 24  # configs screened before any neighbour of the best
REFINED = 8  # neighbours of each leader screened in a round
ROUNDS = 4
FINALISTS = 3
PROBLEM_S = 15.0  # after this, a problem that has its finalists is screened no further
_NEAR = 1.3  # times as slow as the fastest, up to which another family's best is refined too
_LOOKAHEAD = 6  # problems whose configs compile while another is measured


@dataclass(frozen=True)
class Tuned:
    """What tuning one problem came to: the best trial, how many were measured, seconds taken, or why none."""

    problem: Tiled
    best: Trial | None
    trials: int
    seconds: float
    failure: str | None = None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def is_tuned(problem: Tiled, device: Device) -> bool:
    """Whether a winner was measured and its answer checked, each family of kernels having had its turn.

    Counted is what was measured with the present kernels and versions.
    """
    known = ladder.trials(problem, device)
    if not any(trial.error is not None and trial.failure is None for trial in known):
        return False
    return {trial.config.family for trial in known} >= set(model.families(problem, device))


class _Session:
    """One problem being tuned: its operands, and what was measured so far."""

    def __init__(self, problem: Tiled, device: Device) -> None:
        self.problem, self.device = problem, device
        self.calls = measure.copies_of(problem, device)
        self.graphs: dict[Config, measure.Graph] = {}
        self.runs: dict[Config, measure.Run] = {}
        self.trials: dict[Config, Trial] = {}
        self.started = time.monotonic()

    def _keep(self, trial: Trial) -> None:
        self.trials[trial.config] = trial
        kernel = launch.KERNELS[self.problem.op][trial.config.family]
        store_of(self.device).add(kernel.digest, trial)

    def screen(self, configs: Sequence[Config], compiles: Sequence[Future[Refusals]]) -> None:
        """Measure each config quickly, once its compile is done; refusals are remembered too."""
        refused = _refusals(compiles)
        for config in configs:
            if config in refused:
                self._keep(Trial(self.problem, config, None, failure=refused[config], measured_utc=_now()))
            elif config not in self.trials and not self.late():
                self._screen(config)

    def late(self) -> bool:
        """Whether this problem has had its time: long products are not screened in every variant."""
        return time.monotonic() - self.started > PROBLEM_S and len(self.ranked()) >= FINALISTS

    def _screen(self, config: Config) -> None:
        try:
            prepared = launch.prepare(self.calls[0], config)
            kernel, run = prepared.kernel, measure.run_of(prepared)
            graph = measure.Graph(run, self.calls)
            timing = measure.screen_us(graph)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # one config's failure, of whatever kind, is not the others'
            self._keep(Trial(self.problem, config, None, failure=brief(error), measured_utc=_now()))
            return
        self.graphs[config], self.runs[config] = graph, run
        taken = (kernel.n_regs, kernel.n_spills, kernel.metadata.shared)
        self._keep(Trial(self.problem, config, timing.us, timing.spread, *taken, measured_utc=_now()))
        self._drop_slow()

    def _drop_slow(self) -> None:
        for config in self.ranked()[8:]:  # graphs hold memory: keep those that may be finalists
            self.graphs.pop(config, None)

    def ranked(self) -> list[Config]:
        """The configs that work, fastest first."""
        good = [(t.us, config.key, config) for config, t in self.trials.items() if t.us and not t.failure]
        return [config for _, _, config in sorted(good, key=lambda item: item[:2])]

    def leaders(self) -> list[Config]:
        """The two fastest, and of every other family the fastest that is not far behind them."""
        ranked = self.ranked()
        found = ranked[:2]
        for config in ranked[2:]:
            near = (self.trials[config].us or 0.0) < _NEAR * (self.trials[ranked[0]].us or 0.0)
            if near and all(config.family != leader.family for leader in found):
                found.append(config)
        return found

    def finish(self) -> Trial | None:
        """Time the finalists side by side, then return the fastest whose answer is right."""
        finalists = [config for config in self.ranked()[:FINALISTS] if config in self.graphs]
        samples = measure.interleaved([self.graphs[config] for config in finalists])
        for config, times in zip(finalists, samples, strict=True):
            timing = measure.timing_of(times)
            self._keep(replace(self.trials[config], us=timing.us, spread=timing.spread, measured_utc=_now()))
        # Finalists first: a quick look at another may have been lucky, and was not beside theirs.
        rest = [config for config in self.ranked() if config in self.runs and config not in finalists]
        for config in [*sorted(finalists, key=lambda c: (self.trials[c].us, c.key)), *rest]:
            trial = self.trials[config]
            try:
                error = measure.check(self.runs[config], self.calls[0])
            except TuningError as wrong:
                self._keep(replace(trial, us=None, failure=str(wrong), measured_utc=_now()))
                continue
            self._keep(replace(trial, error=error))
            return self.trials[config]
        return None


def _refusals(compiles: Sequence[Future[Refusals]]) -> Refusals:
    """Wait for compiles; what the compiler refused.

    A worker that died, or is slow, refuses nothing: what it was to compile is compiled, and judged,
    where it is used.
    """
    refused: Refusals = {}
    for compiled in compiles:
        with contextlib.suppress(TimeoutError, BrokenExecutor, CancelledError):
            refused |= compiled.result(timeout=COMPILE_LIMIT_S)
    return refused


@dataclass(frozen=True)
class _Ahead:
    """A problem whose first configs are being compiled."""

    problem: Tiled
    opening: list[Config]
    compiles: list[Future[Refusals]]


def _ahead(problem: Tiled, device: Device, pool: CompilePool, force: bool) -> _Ahead:
    earlier = [] if force else ladder.trials(problem, device)
    plans = ladder.tabled(problem, device), ladder.near(problem, device)
    known = [plan.config for plan in plans if plan is not None]
    configs = search.opening(problem, device, OPENING, earlier, known)
    return _Ahead(problem, configs, pool.warm(problem, configs, device))


def _tune_problem(begun: _Ahead, device: Device, pool: CompilePool) -> Tuned:
    """Measure one problem on the current GPU."""
    problem = begun.problem
    session = _Session(problem, device)
    session.screen(begun.opening, begun.compiles)
    for _ in range(ROUNDS):
        best = session.leaders()
        steps = [
            step
            for config in best
            for step in search.refinement([config], session.trials, problem, device, REFINED)
        ]
        if not steps or session.late():
            break
        steps = list(dict.fromkeys(steps))
        session.screen(steps, pool.warm(problem, steps, device))
        if session.leaders() == best:
            break
    winner = session.finish()
    failures = [trial.failure for trial in session.trials.values() if trial.failure]
    return Tuned(
        problem,
        winner,
        len(session.trials),
        time.monotonic() - session.started,
        None if winner else f"no config works: {'; '.join(sorted(set(failures))[:3])}",
    )


def tune(
    problems: Sequence[Tiled],
    device: Device,
    pool: CompilePool,
    budget_s: float | None = None,
    force: bool = False,
    keep_on: Callable[[], bool] = lambda: True,
) -> Iterator[Tuned]:
    """Tune those of `problems` that are not tuned yet (all, with `force`), yielding each as it is done.

    Stops before a problem once `budget_s` seconds are spent or `keep_on()` is false. A problem that
    runs out of GPU memory, or whose every config fails, is yielded with its failure.
    """
    started = time.monotonic()
    todo = deque(dict.fromkeys(p for p in problems if force or not is_tuned(p, device)))
    ahead: deque[_Ahead] = deque()
    while todo or ahead:
        while todo and len(ahead) < _LOOKAHEAD:
            ahead.append(_ahead(todo.popleft(), device, pool, force))
        if not keep_on() or (budget_s is not None and time.monotonic() - started > budget_s):
            for begun in ahead:
                for future in begun.compiles:
                    future.cancel()
            return
        begun = ahead.popleft()
        try:
            yield _tune_problem(begun, device, pool)
        except torch.cuda.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            yield Tuned(begun.problem, None, 0, 0.0, brief(error))
        ladder.forget()


def predict(
    problem: Tiled, device: Device, pool: CompilePool, tries: int = 12
) -> tuple[Config | None, list[str]]:
    """The model's first choice for a GPU that is not here that compiles within its means, and refusals.

    Means: shared memory and no spilled registers. Where each of `tries` spills, the one that spills
    least is taken; None where none compiles within shared memory.
    """
    refused: list[str] = []
    spilling: list[tuple[int, Config]] = []
    for config in search.opening(problem, device, tries):
        try:
            found = pool.inspect(problem, config, device).result(timeout=COMPILE_LIMIT_S)
        except (TimeoutError, BrokenExecutor) as error:
            found = brief(error)
        excess = found if isinstance(found, str) else found.excess(device)
        if excess is None:
            return config, refused
        refused.append(f"{config}: {excess}")
        if not isinstance(found, str) and found.shared <= device.shared_memory:
            spilling.append((found.spills, config))
    return (min(spilling, key=lambda item: item[0])[1] if spilling else None), refused
