"""Explanation: what a problem costs with a config, what bounds it, and why other configs lose."""

import functools
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.markup import table_html
from tritile.core.problem import GroupedProblem, Known, MatmulProblem
from tritile.errors import InvalidValueError, TuningError, UnsupportedError, brief
from tritile.families.common.rates import peak_tflops
from tritile.families.space import illegal
from tritile.lab import traffic
from tritile.lab.explain import bounds
from tritile.lab.explain.hardware import Occupancy, Waves, occupancy, warps_of
from tritile.lab.explain.telling import rows
from tritile.lab.traffic import Traffic
from tritile.planning import model
from tritile.planning.plans import Plan, trials
from tritile.runtime.ahead import compiled_for
from tritile.runtime.offline import Resources, check_fits, resources

Measure = Callable[[Sequence[Config]], dict[Config, float]]  # microseconds, of those that run here
_OTHERS = 4  # configs that are told of besides the one explained


@dataclass(frozen=True)
class Other:
    """Another config: predicted microseconds, measured ones if there are any, and how it stands beside."""

    config: Config
    predicted_us: float
    measured_us: float | None
    why: str


@dataclass(frozen=True)
class Explanation:
    """What is known of one problem with one config on one device.

    `untiled`, `tiled` and `least` are bytes asked of global memory element by element, with this tiling,
    and at the physical least (`tritile.lab.traffic`). `parts` are microseconds of each part of the GPU by
    itself (see `bounds`), `bound` the one that sets the time. `taken` is read from the compiled kernel;
    None, with the reason in `refusal`, where it does not compile. `measured_us` was measured now if
    `live`, else when it was tuned; None where nothing was measured.
    """

    problem: Known
    config: Config
    source: str
    device: Device
    untiled: Traffic
    tiled: Traffic
    least: Traffic
    work: bounds.Work
    waves: Waves
    taken: Resources | None
    occupancy: Occupancy | None
    refusal: str
    predicted_us: float
    measured_us: float | None
    live: bool
    parts: dict[str, float]
    bound: str
    others: tuple[Other, ...]

    @property
    def reuse(self) -> float:
        """By what factor tiling cut the bytes asked of global memory."""
        return self.untiled.total / self.tiled.total

    @property
    def intensity(self) -> float:
        """Operations for each byte that device memory has to move; 0 of a permutation."""
        return self.problem.flops / self.least.total if isinstance(self.problem, MatmulProblem) else 0.0

    @property
    def peak_tflops(self) -> float | None:
        """`families.common.rates.peak_tflops`; None of a permutation, and where it is not known."""
        return peak_tflops(self.problem, self.device) if isinstance(self.problem, MatmulProblem) else None

    @property
    def ridge(self) -> float | None:
        """The intensity from which on multiplying, and not device memory, is the roof."""
        return 1e3 * self.peak_tflops / self.device.memory_gbps if self.peak_tflops else None

    @property
    def roof_us(self) -> float:
        """The time below which no kernel gets on this GPU: the higher of the roofs that are known."""
        memory = self.least.total / (self.device.memory_gbps * 1e3)
        if not (isinstance(self.problem, MatmulProblem) and self.peak_tflops):
            return memory
        return max(memory, self.problem.core.flops / (self.peak_tflops * 1e6))

    def __repr__(self) -> str:
        told = rows(self)
        width = max(len(name) for name, _, _ in told)
        lines = [f"{self.problem.label} on {self.device.name}", f"  {self.config} ({self.source})"]
        for name, figure, note in told:
            lines.append(f"  {name:{width}}  {figure}" + (f" - {note}" if note else ""))
        lines += [f"  {_told(other)}" for other in self.others]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        title = f"{self.problem.label} on {self.device.name}: {self.config} ({self.source})"
        others = [
            (str(other.config), f"{other.predicted_us:.1f}", _us(other.measured_us), other.why)
            for other in self.others
        ]
        head = ("other configs", "predicted us", "measured us", "beside it")
        return table_html(title, ("", "", ""), rows(self)) + table_html("", head, others)


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _told(other: Other) -> str:
    measured = "" if other.measured_us is None else f", measured {other.measured_us:.1f}"
    return f"{other.config}: predicted {other.predicted_us:.1f} us{measured}; {other.why}"


@functools.lru_cache(maxsize=256)
def _compiled(problem: Known, config: Config, device: Device) -> tuple[Resources, int]:
    kernel = compiled_for(problem, config, device)
    check_fits(kernel, device)
    try:
        return resources(kernel), warps_of(kernel)
    except (OSError, subprocess.SubprocessError) as error:
        raise TuningError(f"what {config} takes cannot be read: {brief(error)}") from error


def _rivals(problem: Known, config: Config, device: Device, known: dict[Config, float]) -> list[Config]:
    """The next best: of those measured, then of those predicted, no two with the same tile."""
    ranked = sorted(known, key=lambda c: (known[c], c.key))
    ranked += [other for other in model.ranked(problem, device) if other not in known]
    shapes, found = {_shape(config)}, list[Config]()
    for one in ranked:
        if _shape(one) not in shapes and len(found) < _OTHERS:
            shapes.add(_shape(one))
            found.append(one)
    return found


def _shape(config: Config) -> tuple[str, int, int]:
    return config.family, config["BLOCK_M"], config["BLOCK_N"]


def _at_once(config: Config, work: bounds.Work, held: Occupancy | None, device: Device) -> Waves:
    persistent = dict(config.kwargs).get("PERSISTENT") is True
    together = 1 if persistent or held is None else held.programs
    return Waves(work.units, together * device.processors)


def explained(plan: Plan, config: Config | None = None, measure: Measure | None = None) -> Explanation:
    """Explain a plan, or its problem with another config. Compiles, and launches nothing.

    `measure` gives microseconds of configs on the GPU of the plan, side by side, of those that run. Without
    it, and where the config does not run, times are those remembered of that GPU, if any.
    Raises InvalidValueError for a config that is not legal for the problem on the device, and for products of
    groups, whose sizes only the GPU knows; UnsupportedError for a product with a quantized weight.
    """
    if isinstance(plan.problem, GroupedProblem):
        raise InvalidValueError(
            f"explain: the sizes of {plan.problem.label} only the GPU knows: explain the problem's `even`, "
            "whose groups are all as large"
        )
    problem, device = plan.problem, plan.device
    if not isinstance(problem, Known):
        raise UnsupportedError(f"explain: {problem.label}: wanted a product or permutation of plain operands")
    source = plan.source if config is None or config == plan.config else "given"
    config = config or plan.config
    fault = illegal(config, problem, device)
    if fault is not None:
        raise InvalidValueError(f"{config} for {problem.label} on {device.name}: {fault}")
    taken, held, refusal = None, None, ""
    try:
        taken, warps = _compiled(problem, config, device)
        held = occupancy(taken, warps, device)
    except TuningError as error:
        refusal = str(error)
    known = {trial.config: trial.time for trial in trials(problem, device) if trial.works}
    known = {one: us for one, us in known.items() if illegal(one, problem, device) is None}
    if plan.us is not None and plan.source in ("exact", "table"):
        known.setdefault(plan.config, plan.us)
    rivals = _rivals(problem, config, device, known)
    timed = measure([config, *rivals]) if measure is not None and taken is not None else {}
    live = config in timed
    if live:
        known = timed
    us = known.get(config)
    others = [
        Other(
            one,
            model.predict_us(one, problem, device),
            known.get(one),
            bounds.beside(problem, one, config, device, (known.get(one), us)),
        )
        for one in rivals
    ]
    work = bounds.work_of(problem, config, device)
    predicted = model.predict_us(config, problem, device)
    times = bounds.parts(problem, config, device)
    return Explanation(
        problem, config, source, device,
        traffic.untiled(problem), traffic.tiled(problem, config, device), traffic.least(problem),
        work, _at_once(config, work, held, device), taken, held, refusal,
        predicted, us, live, times, bounds.bound(times, us or predicted), tuple(others),
    )  # fmt: skip
