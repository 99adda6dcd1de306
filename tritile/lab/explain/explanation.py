"""Explanations: what a problem costs with a config, what bounds it, and why other configs are slower."""

import functools
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.markup import table_html
from tritile.core.problem import GroupedProblem, Known, MatmulProblem, Problem, problem_to_dict
from tritile.errors import InvalidValueError, TuningError, UnsupportedError, brief
from tritile.families.common.rates import peak_tflops
from tritile.families.space import illegal
from tritile.lab import traffic
from tritile.lab.explain import bounds
from tritile.lab.explain.bounds import Occupancy, Waves, occupancy
from tritile.lab.explain.texts import rows
from tritile.lab.traffic import Traffic
from tritile.planning import model
from tritile.planning.plans import Plan, trials
from tritile.runtime.ahead import compiled_for
from tritile.runtime.offline import Resources, check_fits, resources

Measure = Callable[[Sequence[Config]], dict[Config, float]]  # microseconds of the configs that run here
_OTHERS = 4  # other configs that an explanation compares with


@dataclass(frozen=True)
class Other:
    """Hold another config: predicted and, if known, measured microseconds, and how it compares."""

    config: Config
    predicted_us: float
    measured_us: float | None
    why: str


@dataclass(frozen=True)
class Explanation:
    """Hold what is known of one problem with one config on one device.

    `untiled`, `tiled` and `least` count bytes asked of global memory: element by element, with this tiling,
    and the least possible (`tritile.lab.traffic`). `parts` has the microseconds of each part of the GPU by
    itself (see `bounds`); `bound` names the part that sets the time. `taken` has the compiled kernel's
    resources, or is None where it does not compile, with the reason in `refusal`. `measured_us` was measured
    now if `live`, else when the problem was tuned; it is None where nothing was measured.
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
        """Return the factor by which tiling cuts the bytes asked of global memory."""
        return self.untiled.total / self.tiled.total

    @property
    def intensity(self) -> float:
        """Return operations per byte that device memory must move; 0 for a permutation."""
        return self.problem.flops / self.least.total if isinstance(self.problem, MatmulProblem) else 0.0

    @property
    def peak_tflops(self) -> float | None:
        """Return the peak TFLOP/s of the product's dtype; None for a permutation and where it is unknown."""
        return peak_tflops(self.problem, self.device) if isinstance(self.problem, MatmulProblem) else None

    @property
    def ridge(self) -> float | None:
        """Return the intensity above which multiplying, not device memory, is the roof."""
        return 1e3 * self.peak_tflops / self.device.memory_gbps if self.peak_tflops else None

    @property
    def roof_us(self) -> float:
        """Return the least time of any kernel on this GPU: by memory, and by arithmetic where it is known."""
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
        for other in self.others:
            measured = "" if other.measured_us is None else f", measured {other.measured_us:.1f}"
            lines.append(f"  {other.config}: predicted {other.predicted_us:.1f} us{measured}; {other.why}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary that JSON holds: bytes, microseconds and TFLOP/s by name."""
        plain = ("source", "refusal", "predicted_us", "measured_us", "live", "bound")
        ratios = ("roof_us", "intensity", "ridge", "peak_tflops")
        others = [asdict(other) | {"config": other.config.to_dict()} for other in self.others]
        return {
            "problem": problem_to_dict(self.problem),
            "gpu": self.device.name,
            "config": self.config.to_dict(),
            **{name: getattr(self, name) for name in (*plain, *ratios)},
            "bytes": {name: getattr(self, name).total for name in ("untiled", "tiled", "least")},
            "work": asdict(self.work),
            "waves": {"count": self.waves.count, "at_once": self.waves.at_once, "idle": self.waves.idle},
            "kernel": None if self.taken is None else asdict(self.taken),
            "occupancy": None if self.occupancy is None else asdict(self.occupancy),
            "parts_us": self.parts,
            "others": others,
        }

    def _repr_html_(self) -> str:
        title = f"{self.problem.label} on {self.device.name}: {self.config} ({self.source})"
        others = [
            (
                one.config,
                f"{one.predicted_us:.1f}",
                f"{one.measured_us:.1f}" if one.measured_us else "",
                one.why,
            )
            for one in self.others
        ]
        head = ("other configs", "predicted us", "measured us", "beside it")
        return table_html(title, ("", "", ""), rows(self)) + table_html("", head, others)


@functools.lru_cache(maxsize=256)
def _compiled(problem: Known, config: Config, device: Device) -> tuple[Resources, int]:
    kernel = compiled_for(problem, config, device)
    check_fits(kernel, device)
    try:
        return resources(kernel), int(kernel.metadata.num_warps)  # specialised warps included
    except (OSError, subprocess.SubprocessError) as error:
        raise TuningError(f"the resources of {config} cannot be read: {brief(error)}") from error


def _rivals(problem: Known, config: Config, device: Device, known: dict[Config, float]) -> list[Config]:
    """Return the next best configs, no two with the same tile: first by measured, then predicted times."""
    measured = sorted(known, key=lambda c: (known[c], c.key))
    by_tile: dict[tuple[str, int, int], Config] = {}
    for one in (config, *measured, *model.ranked(problem, device)):
        by_tile.setdefault((one.family, one["BLOCK_M"], one["BLOCK_N"]), one)
    return list(by_tile.values())[1 : _OTHERS + 1]


def _checked(problem: Problem, config: Config, device: Device) -> Known:
    """Return a problem that can be explained with a config, or raise as `explained` does."""
    if isinstance(problem, GroupedProblem):
        raise InvalidValueError(
            f"explain: only the GPU knows the sizes of {problem.label}: explain the problem's `even`, "
            "whose groups all have the same size"
        )
    if not isinstance(problem, Known):
        raise UnsupportedError(f"explain: {problem.label}: wanted a product or permutation of plain operands")
    fault = illegal(config, problem, device)
    if fault is not None:
        raise InvalidValueError(f"{config} for {problem.label} on {device.name}: {fault}")
    return problem


def _known_us(plan: Plan, problem: Known) -> dict[Config, float]:
    """Return the microseconds of legal configs of a plan's problem that were measured before."""
    device = plan.device
    known = {
        trial.config: trial.time
        for trial in trials(problem, device)
        if trial.works and illegal(trial.config, problem, device) is None
    }
    if plan.us is not None and plan.source in ("exact", "table"):
        known.setdefault(plan.config, plan.us)
    return known


def explained(plan: Plan, config: Config | None = None, measure: Measure | None = None) -> Explanation:
    """Explain a plan, or its problem with another config. Compile the kernel, and launch only to measure.

    `measure` times configs side by side on the plan's GPU and leaves out those that cannot run. Without it,
    and where the config itself cannot run, times are those remembered of that GPU, if any.
    Raises InvalidValueError for a config that is not legal for the problem on the device, and for products of
    groups, whose sizes only the GPU knows; UnsupportedError for a product with a quantized weight.
    """
    device, source = plan.device, plan.source if config in (None, plan.config) else "given"
    config = config or plan.config
    problem = _checked(plan.problem, config, device)
    taken, held, refusal = None, None, ""
    try:
        taken, warps = _compiled(problem, config, device)
        held = occupancy(taken, warps, device)
    except TuningError as error:
        refusal = str(error)
    known = _known_us(plan, problem)
    rivals = _rivals(problem, config, device, known)
    timed = measure([config, *rivals]) if measure is not None and taken is not None else {}
    live = config in timed
    known = timed if live else known
    us, predicted = (
        known.get(config),
        {one: model.predict_us(one, problem, device) for one in (config, *rivals)},
    )
    why = {one: bounds.beside(problem, one, config, device, (known.get(one), us)) for one in rivals}
    work, times = bounds.work_of(problem, config, device), bounds.parts(problem, config, device)
    persistent = dict(config.kwargs).get("PERSISTENT") is True
    on_each = 1 if persistent or held is None else held.programs
    return Explanation(
        problem, config, source, device,
        traffic.untiled(problem), traffic.tiled(problem, config, device), traffic.least(problem),
        work, Waves(work.units, on_each * device.processors), taken, held, refusal,
        predicted[config], us, live, times, bounds.bound(times, us or predicted[config]),
        tuple(Other(one, predicted[one], known.get(one), why[one]) for one in rivals),
    )  # fmt: skip
