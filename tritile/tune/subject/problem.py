"""A problem of tritile's own operations as a `Tunable`, and the space of its configs."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tritile.choose import aten, pick, waves
from tritile.choose.predictor import RACED
from tritile.core.call import Call
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import Tiled
from tritile.errors import TuningError
from tritile.families import launching
from tritile.families.launching import compiled_for
from tritile.families.registry import FAMILIES
from tritile.families.space import illegal
from tritile.runtime.ahead import Resources, check_fits
from tritile.runtime.native import loaded
from tritile.tune.subject import answers, torch_calls
from tritile.tune.subject.operands import copies_of, guarded, ragged, run_of
from tritile.tuner.measure.benchmark import Harness
from tritile.tuner.measure.engine import TuningTask
from tritile.tuner.measure.outputs import OUTSIDE
from tritile.tuner.measure.timing import Eager, Least, Run, copies_for, graph_of
from tritile.tuner.search import Listed, from_parameters, parameters
from tritile.tuner.store.trial import best_of

_SIDES = ("BLOCK_M", "BLOCK_N", "CONSUMERS")  # in warp-specialised kernels these are no powers of two


@functools.cache
def _grid(op: str, family: str) -> dict[str, list[Any]]:
    values: dict[str, set[Any]] = {}
    for config in FAMILIES[op][family].configs:
        for name, value in parameters(config).items():
            values.setdefault(name, set()).add(value)
    return {name: sorted(own) for name, own in values.items() if len(own) > 1}


def steps(config: Config, op: str) -> list[Config]:
    """Return every config one step away.

    A step sets one parameter to its next value among the family's own configs, halves or doubles it, or adds
    or removes a stage. Tiles of warp-specialised kernels grow and shrink by the rows of a warpgroup, along
    with the number of warpgroups.
    """
    values = parameters(config)
    found, is_specialised = list[dict[str, Any]](), "CONSUMERS" in values
    for name, own in _grid(op, config.family).items():
        value, is_side = values[name], is_specialised and name in _SIDES
        reach = 2 if is_side else 1
        near = [v for v in own if v < value][-reach:] + [v for v in own if v > value][:reach]
        if name == "num_stages":
            near += [value - 1, value + 1]
        elif not is_side and not isinstance(value, bool):
            near += [value // 2, value * 2]
        found += [{name: v} for v in near if isinstance(v, bool) or v >= 1]
    if is_specialised:
        rows = values["BLOCK_M"] // values["CONSUMERS"]
        found += [{"CONSUMERS": count, "BLOCK_M": rows * count} for count in (1, 2, 3)]
    made = dict.fromkeys(from_parameters(values | step) for step in found)
    return [step for step in made if step != config]


class ProblemSpace:
    """The legal configs of a problem on a device, in order of predicted time.

    Those of `seeds`, configs that may be good, come first. `configs` and `opening` raise UnsupportedError,
    with the reason, if no config is legal.
    """

    def __init__(self, problem: Tiled, device: Device, seeds: Iterable[Config] = ()) -> None:
        self.problem, self.device = problem, device
        self._likely: dict[int, list[Config]] = {}
        self.seeds = [config for config in dict.fromkeys(seeds) if config in self]

    def configs(self) -> Sequence[Config]:
        return self._ranked

    @functools.cached_property
    def _ranked(self) -> list[Config]:
        return list(dict.fromkeys([*self.seeds, *waves.ranked(self.problem, self.device)]))

    def opening(self, count: int) -> list[Config]:
        """Return the seeds, then each family's likeliest in turn, over varied tiles."""
        if count not in self._likely:  # a search calls this before each round
            self._likely[count] = waves.screened(self.problem, self.device, count)
        return list(dict.fromkeys([*self.seeds, *self._likely[count]]))[:count]

    def neighbours(self, config: Config) -> list[Config]:
        """Return every legal config one step away, in order of predicted time."""
        legal = [step for step in steps(config, self.problem.op) if step in self]
        return sorted(legal, key=lambda c: (waves.predict_us(c, self.problem, self.device), c.key))

    def __contains__(self, config: object) -> bool:
        return isinstance(config, Config) and illegal(config, self.problem, self.device) is None


@dataclass(frozen=True)
class TunableProblem:
    """A problem on random operands, to be tuned. `shares_gpu`: a program uses the GPU meanwhile."""

    problem: Tiled
    device: Device
    shares_gpu: bool = False

    def digest(self, config: Config) -> str:
        return FAMILIES[self.problem.op][config.family].digest

    def compile(self, config: Config, for_check: bool = False) -> None:
        """Compile for the device, which need not be installed. Raises TuningError if the compiler refuses.

        A check launches the ragged sibling too, if the config is legal for it.
        """
        problem = ragged(self.problem) if for_check else self.problem
        if not for_check or illegal(config, problem, self.device) is None:
            check_fits(compiled_for(problem, config, self.device), self.device)

    @property
    def copies(self) -> int:
        return copies_for(self.problem.bytes, self.device.l2_bytes, self.shares_gpu)

    def harness(self, copies: int) -> Harness:
        return _Harness(self, copies)


class _Harness:
    def __init__(self, tunable: TunableProblem, copies: int) -> None:
        self._problem, self._device = problem, device = tunable.problem, tunable.device
        self._shares_gpu = tunable.shares_gpu
        self.calls: list[Call] = copies_of(problem, device, copies)
        one = torch.ones(16, 16, dtype=torch.float64, device="cuda")
        (one @ one).sum().item()  # loads torch's kernels for checks, which takes a while

    def prepared(self, config: Config) -> tuple[Run, Resources | None]:
        if config == aten.CONFIG:
            return self._by_torch, None
        prepared = launching.prepare(self.calls[0], config)
        kernel = prepared.kernel
        found = loaded(kernel, self._device.shared_memory)
        resources = Resources(found.registers, 4 * found.spills, kernel.metadata.shared)
        return run_of(prepared), resources

    def _by_torch(self, call: Call) -> None:
        run = torch_calls.run_of(self._problem)
        assert run is not None
        with answers.torch_fp32("tf32" if getattr(self._problem, "precision", "") == "tf32" else "ieee"):
            run(call)

    def timed(self, config: Config, run: Run) -> Eager:
        timer = graph_of(run, self.calls)
        return Least(timer) if self._shares_gpu else timer

    def check(self, config: Config, run: Run) -> float:
        """Check at the problem's own sizes, returning that error, and at ragged ones between guards."""
        error = answers.check(run, self.calls[0])
        sibling = ragged(self._problem)
        if illegal(config, sibling, self._device) is None:
            call, memory = guarded(sibling)
            try:
                answers.check(run_of(launching.prepare(call, config)), call)
                if not memory.is_intact():
                    raise TuningError(f"wrote {OUTSIDE}")
            except TuningError as wrong:
                raise TuningError(f"at {sibling.label}: {wrong}") from wrong
        return error


def task_of(problem: Tiled, device: Device, force: bool = False, among: Sequence[Config] = ()) -> TuningTask:
    """Return the task of a problem: its legal configs, or those `among`; no stored trials if `force`."""
    earlier = [] if force else pick.trials(problem, device)
    tabled, predicted = pick.tabled(problem, device), pick.by_predictor(problem, device)
    seeds = [plan.config for plan in (tabled, predicted) if plan is not None]
    best = best_of(trial for trial in earlier if trial.right)
    space = Listed(among) if among else ProblemSpace(problem, device, seeds)
    incumbent = best.config if best is not None else tabled.config if tabled is not None else None
    trials = {trial.config: trial for trial in earlier if trial.is_final and trial.config in space}
    return TuningTask(TunableProblem(problem, device), space, trials, incumbent)


def is_tuned(problem: Tiled, device: Device) -> bool:
    """True if a search that tried every family of kernels has a winner with a checked answer.

    Only trials of the current kernels and versions count.
    """
    trials = pick.trials(problem, device)
    raced = set(pick.likely(problem, device, RACED))  # all that mode "tune" tries
    if {trial.config for trial in trials} <= raced or not any(trial.right for trial in trials):
        return False
    return {trial.config.family for trial in trials} >= set(waves.families(problem, device))
