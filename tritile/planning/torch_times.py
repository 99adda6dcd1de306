"""Compare tritile's time with that of torch's own kernel, as measured or as predicted.

A problem at which both were timed is compared by those times. Any other is compared by its class, whose
lead predicts the ratio of both times from the sizes. A class that was timed with torch neither on this GPU
nor on one like it has no ratio.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple

from tritile.core.device import Device
from tritile.core.problem import MatmulProblem, PermuteProblem
from tritile.planning import gpu_tables, plans
from tritile.planning.classes import MOVED, OPERATIONS, ROWS, SIDES, class_of
from tritile.planning.store import store_of
from tritile.planning.table import Table
from tritile.planning.trial import TORCH, best_of

NOISE: Final = 1.02  # ratios vary by this factor from run to run
# The model's picks may be slower than the configs that a lead was fitted to: ask for a larger lead.
_MODELS: Final = 1.25
_BEHIND: Final = 1.25  # times as long as torch: less of it is not worth a warning
_BEHIND_US: Final = 20.0
_PLAIN_FLOPS: Final = 2e9  # of a product of plain fp32, from which torch was faster on Hopper at every size
_PLAIN_SIDE: Final = 96  # that was measured, by _BEHIND and more; and the least of its sizes
_HOPPER: Final = 90


class Times(NamedTuple):
    """Microseconds of tritile and of torch at one problem, measured in turns."""

    tritile_us: float
    torch_us: float


class Comparison(NamedTuple):
    """tritile compared with torch at one problem on one GPU.

    - `ratio`: torch's time over tritile's; None if torch was never timed at this problem or its class.
    - `wins`: True if tritile is faster by more than noise or, of a prediction, if the ratio is one at which
      tritile won 95% of the sizes that were left out of the fit.
    - `source`: "measured", "predicted", or "" without a ratio.
    - `torch_us`: microseconds that torch takes; None if unknown.
    """

    ratio: float | None = None
    wins: bool = False
    source: str = ""
    torch_us: float | None = None


UNKNOWN: Final = Comparison()


def measured(problem: MatmulProblem | PermuteProblem, device: Device) -> Times | None:
    """Return what was measured of just this problem: as pinned, on this machine, or as shipped."""
    torchs, best = store_of(device).best(TORCH, problem), best_of(plans.trials(problem, device))
    own = Times(best.us, torchs.us) if torchs and torchs.us and best and best.us else None
    fixed = gpu_tables.pinned(device)
    of_tables = (_tabled(each, problem, device) for each in gpu_tables.shipped(device))
    return (fixed and _tabled(fixed, problem, device)) or own or next(filter(None, of_tables), None)


def _tabled(found: Table, problem: MatmulProblem | PermuteProblem, device: Device) -> Times | None:
    entry = found.find(problem) if found.device["name"] == device.name else None
    return Times(entry.us, entry.torch_us) if entry is not None and entry.us and entry.torch_us else None


def slower_than_torch(problem: MatmulProblem, device: Device) -> bool:
    """True if a product in plain fp32 is known to take notably longer than torch's.

    Known is what was measured of just this problem. On Hopper it is any large product: see `_PLAIN_FLOPS`.
    """
    if problem.flops < _PLAIN_FLOPS / 10 or problem.invariant or problem.rights > 1:
        return False
    times = measured(problem, device)
    if times is not None:
        return times.tritile_us > max(_BEHIND * times.torch_us, times.torch_us + _BEHIND_US)
    large = problem.flops >= _PLAIN_FLOPS and min(problem.m, problem.n, problem.k) >= _PLAIN_SIDE
    return device.nvidia == _HOPPER and problem.batch == 1 and large


def compared(
    problem: MatmulProblem | PermuteProblem, device: Device, plan: Callable[[], plans.Plan]
) -> Comparison:
    """Compare tritile with torch at a problem. `plan` plans it, and is called only if there is a ratio.

    A product whose bias was not timed is compared without it: both sides add a bias as they store the sums.
    """
    plain = problem if isinstance(problem, PermuteProblem) else replace(problem, epilogue="")
    found = (measured(each, device) for each in dict.fromkeys((problem, plain)))
    times = next((each for each in found if each is not None), None)
    if times is not None and plan().source != "model":  # which picks another config than the one timed
        ratio = times.torch_us / times.tritile_us
        return Comparison(ratio, ratio >= NOISE, "measured", times.torch_us)
    predicted = _predicted(plain, device)
    if predicted is None:
        return UNKNOWN
    (ratio, needed), own = predicted, plan()
    needed *= _MODELS if own.source == "model" else 1.0
    return Comparison(ratio, ratio >= needed, "predicted", own.us and ratio * own.us)


def _predicted(problem: MatmulProblem | PermuteProblem, device: Device) -> tuple[float, float] | None:
    """Return the predicted ratio, and the ratio from which a win is nearly sure.

    None for a problem unlike those that its class was timed with. A larger product counts as the largest of
    those: where torch is slow it stays slow, as with the odd rows of a vocabulary.
    """
    name = class_of(problem)
    lead = gpu_tables.lead(name, device) if name is not None else None
    if lead is None:
        return None
    if isinstance(problem, PermuteProblem):
        as_drawn = 2 * MOVED[0] <= problem.bytes <= 2 * MOVED[1]  # read, and written
    else:
        plain = problem.batch == 1 and not problem.invariant and problem.b_layout != "strided"
        plain = plain and problem.a_layout == problem.out_layout == "row"
        as_drawn = plain and min(problem.n, problem.k) >= SIDES[0] and problem.flops >= OPERATIONS[0]
        problem = _within(problem)
    return (lead.ratio(problem), max(lead.least, NOISE)) if as_drawn else None


def _within(problem: MatmulProblem) -> MatmulProblem:
    """Return a product with fewer rows, so that it takes no more operations than any that was drawn.

    A lead bounds N and K itself, and needs them as they are to know the alignment of rows.
    """
    n, k = (min(side, SIDES[1]) for side in (problem.n, problem.k))
    return replace(problem, m=min(problem.m, ROWS, int(OPERATIONS[1] / (2 * n * k))))
