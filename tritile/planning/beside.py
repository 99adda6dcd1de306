"""Tell which of torch's calls tritile is expected to run faster.

A problem that was measured beside torch is decided by those times. Any other is decided by its class, whose
lead predicts how many times as long torch takes. The call is handled where the lead is large enough: of the
sizes left out of its fit, nearly all with such a lead were won. A class that was measured neither on this GPU
nor on one like it is passed through to torch.
"""

from collections.abc import Callable
from dataclasses import replace
from math import inf, prod
from typing import Final, NamedTuple

from tritile.core.device import Device
from tritile.core.problem import MatmulProblem, PermuteProblem
from tritile.planning import gpu_tables, plans
from tritile.planning.classes import MOVED, OPERATIONS, ROWS, SIDES, class_of
from tritile.planning.store import store_of
from tritile.planning.table import Table
from tritile.planning.trial import TORCH, best_of

# A call handled in Python keeps the host busy for 11 to 14 us (`host.jsonl`), besides torch's way to Python.
# If torch's kernel takes less, the host limits a program outside CUDA graphs, and torch needs less of the
# host. A call handled without Python needs least: 4 to 6 us, where torch needs 10 to 18.
HOST_US: Final = 15.0
NOISE: Final = 1.02  # ratios vary by this factor from run to run
_MODELS: Final = (
    1.25  # a lead has to be larger by this factor where the model picks, whose picks may be slower
)
_BEHIND: Final = 1.25  # times as long as torch: less of it is not worth a warning
_BEHIND_US: Final = 20.0
_PLAIN_FLOPS: Final = 2e9  # of a product of plain fp32, from which torch was faster on Hopper at every size
_PLAIN_SIDE: Final = 96  # that was measured, by _BEHIND and more; and the least of its sizes
_HOPPER: Final = 90
_LEAST_MOVED: Final = 1 << 19  # bytes of a copy below which the host is the limit


class Judgement(NamedTuple):
    """Tell whether tritile is expected to be faster, and why.

    `captured`: faster only where the host's time does not count, as under capture of a CUDA graph, or is
    short, as in calls that skip Python.
    """

    take: bool
    why: str
    captured: bool = False


class Times(NamedTuple):
    """Hold microseconds of tritile and of torch, measured side by side."""

    tritile_us: float
    torch_us: float


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
    """Tell whether a product in plain fp32 is known to take notably longer than torch's.

    Known is what was measured of just this problem. On Hopper it is any large product: see `_PLAIN_FLOPS`.
    """
    if problem.flops < _PLAIN_FLOPS / 10 or problem.invariant or problem.rights > 1:
        return False
    times = measured(problem, device)
    if times is not None:
        return times.tritile_us > max(_BEHIND * times.torch_us, times.torch_us + _BEHIND_US)
    large = problem.flops >= _PLAIN_FLOPS and min(problem.m, problem.n, problem.k) >= _PLAIN_SIDE
    return device.nvidia == _HOPPER and problem.batch == 1 and large


def may_be_faster(problem: MatmulProblem | PermuteProblem) -> bool:
    """Tell whether a problem is of a class that is measured, and worth measuring beside torch."""
    if isinstance(problem, PermuteProblem) and _no_copy(problem):
        return False
    return class_of(problem) is not None


def judged(
    problem: MatmulProblem | PermuteProblem, device: Device, plan: Callable[[], plans.Plan]
) -> Judgement:
    """Tell whether to handle a call of torch's. `plan` plans the problem, and is called last.

    A product whose bias was not measured is judged without the bias: both sides add it as they store the
    sums.
    """
    if isinstance(problem, PermuteProblem):
        why = _no_copy(problem)
        if why:
            return Judgement(False, why)
    plain = problem if isinstance(problem, PermuteProblem) else replace(problem, epilogue="")
    found = (measured(each, device) for each in dict.fromkeys((problem, plain)))
    times = next((each for each in found if each is not None), None)
    predicted = _predicted(plain, device)
    if times is None and predicted is None:
        return Judgement(False, "torch was not measured beside its like on this GPU")
    if times is not None and plan().source != "model":
        if times.torch_us < NOISE * times.tritile_us:
            return Judgement(False, "measured: torch is about as fast, or faster")
        return Judgement(True, "measured: tritile is faster", times.torch_us < HOST_US)
    ratio, needed = predicted or (0.0, inf)
    if ratio < needed or (plan().source == "model" and ratio < _MODELS * needed):
        return Judgement(False, "not measured: too few like it are faster than torch")
    short = ratio * (plan().us or inf) < HOST_US
    return Judgement(True, "not measured: nearly all like it are faster than torch", short)


def _predicted(problem: MatmulProblem | PermuteProblem, device: Device) -> tuple[float, float] | None:
    """Return how many times as long torch is predicted to take, and how many times as long it has to.

    Return None for a problem unlike those that its class was measured with. A larger product counts as the
    largest of those: where torch is slow it stays slow, as with the odd rows of a vocabulary.
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

    A lead bounds N and K itself, and needs them as they are to tell what rows start on.
    """
    n, k = (min(side, SIDES[1]) for side in (problem.n, problem.k))
    return replace(problem, m=min(problem.m, ROWS, int(OPERATIONS[1] / (2 * n * k))))


def _no_copy(problem: PermuteProblem) -> str:
    """Say why a copy is unlike those that were measured, "" for one that is like them."""
    whole = problem.spans[0] == problem.spans[1] == prod(problem.shape)
    if problem.x_strides == problem.out_strides:
        return "no dimension changes its place"
    if not whole or 0 in problem.x_strides:
        return "a part of a tensor, or a repeated one: not measured"
    return "less than 512 KiB moved: not measured" if problem.bytes < _LEAST_MOVED else ""
