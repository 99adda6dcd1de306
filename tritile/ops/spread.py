"""Mode "spread": which calls of tritile's operations are measured meanwhile, and how calls take turns.

A prepared call is cached in each phase of a search as in other modes: with the guess, then with what takes
turns, then with the winner. What was cached is dropped as a phase begins.
"""

import functools
from collections.abc import Callable
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

import torch

from tritile.choose import aten, pick
from tritile.choose.pick import Plan
from tritile.core.call import Call
from tritile.core.config import Config
from tritile.core.device import Device, capturing
from tritile.core.forgetting import new_memo
from tritile.core.problem import Tiled
from tritile.errors import TuningError
from tritile.families import launching
from tritile.ops import memo
from tritile.ops.dispatch import TENSORS
from tritile.ops.memo import ByTorch, Key, Tensors, addresses_of, cache_launch

if TYPE_CHECKING:
    from tritile.tune.spread import Search

_searches: Final[dict[tuple[Tiled, int, bool], "Search | None"]] = new_memo()  # None: over


def search_of(problem: Tiled, index: int, allows_torch: bool) -> "Search | None":
    """Return the search for a problem on a GPU that is under way, if one is."""
    return _searches.get((problem, index, allows_torch))


def planned(problem: Tiled, device: Device, index: int, allows_torch: bool) -> Plan:
    """Return the plan of a problem. If it is a guess, begin to measure; it runs until that is over."""
    place = problem, index, allows_torch
    search = _searches.get(place)
    if search is not None:  # the store has a part of its trials
        return search.plan
    plan = pick.plan_for(problem, device, None, allows_torch)
    assert plan is not None
    if place not in _searches and not capturing():
        _begin(plan, index, allows_torch)
    return plan


def _begin(plan: Plan, index: int, allows_torch: bool) -> None:
    from tritile.tune.spread import Search, is_worth_measuring  # load the tuner only to measure

    def on_change() -> None:
        if search.phase == "over" and _searches.get(place) is search:  # else it was forgotten
            _searches[place] = None  # once in a process: some configs cannot be measured
        for key in list(search.keys):
            memo.CALLS.pop(key, None)

    if is_worth_measuring(plan):
        place = plan.problem, index, allows_torch
        search = _searches[place] = Search(plan, index, allows_torch, on_change)
        search.begin()


def cache(search: "Search | None", phase: str, op: str, key: Key | None, *launch: Any, **how: Any) -> None:
    """Cache a launch as `cache_launch` does, for the phase of the search for its problem, if there is one."""
    cache_launch(op, key, *launch, **how)
    if key is not None and search is not None:
        search.keys.add(key)
        if phase == "over" or search.phase != phase:  # what was cached may have been dropped before this
            memo.CALLS.pop(key, None)


def by_turns(
    search: "Search", op: str, call: Call, torch_call: ByTorch | None, tensors: Tensors, out: Any,
    result: torch.Tensor,
) -> tuple[torch.Tensor, ByTorch]:  # fmt: skip
    """Compute a call with the config whose turn it is.

    Returns the result, and a function that computes other calls, for which the same launches may be used: it
    takes the caller's tensors, then out unless it is None. Raises TuningError if the guess does not run.
    """
    by_role = {role: i for i, (role, _) in enumerate(TENSORS[op])} | {"out": len(tensors)}
    select = itemgetter(*(by_role[memory.buffer] for memory in call.memory))
    launches, faults = dict[Config, Any](), dict[Config, str]()
    count, device = len(tensors), result.device
    form = tuple(result.shape), result.stride(), result.dtype, device
    for config in {search.guess, *search.configs} - {aten.CONFIG}:
        try:
            launches[config] = launching.prepare(call, config)
        except TuningError as error:
            if config == search.guess:
                raise
            faults[config] = str(error)

    def compute(values: Tensors, at: Callable[[], tuple[Any, torch.Tensor]]) -> torch.Tensor:
        """Compute with torch on `values`, or with a launch on the addresses, and into the tensor, of `at`."""

        def ready(config: Config) -> Callable[[], torch.Tensor]:
            if config == aten.CONFIG:
                assert torch_call is not None
                return functools.partial(torch_call, *values)
            if config in faults:
                raise TuningError(faults[config])
            launch, (addresses, made) = launches[config], at()

            def run() -> torch.Tensor:
                launch.at(addresses)
                return made

            return run

        with torch.cuda.device(device):  # whose stream takes the events
            computed: torch.Tensor = search.make(ready)
        return computed

    def computed_again(*values: Any) -> torch.Tensor:
        def at() -> tuple[Any, torch.Tensor]:
            made = memo.new_output(*form) if len(values) == count else values[-1]
            return select(addresses_of((*values[:count], made))), made

        return compute(values, at)

    addresses = [memory.address for memory in call.memory]
    made = compute(tensors if out is None else (*tensors, out), lambda: (addresses, result))
    return made, computed_again
