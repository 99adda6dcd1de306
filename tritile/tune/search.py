"""Search: choose the configs of a space to measure next, by the space and by what was measured so far.

Both ways to search are pure functions, so that a search can be stopped, and can go on where it was. Tests
replay them against recorded times, to see how well they search.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from tritile.core.config import Config
from tritile.tune.spaces import Listed, SearchSpace, Tried, from_parameters, parameters

OPENING: Final = 16  # configs tried before any neighbour of a leader
LEADERS: Final = 2  # fastest configs, whose neighbours are tried
NEIGHBOURS: Final = 8  # the most neighbours of a leader that are tried
CROSSED: Final = 8  # fastest configs, whose parameters are exchanged
ENOUGH: Final = 5e-4  # expected gain below which a search ends
NEAR: Final = 1.3  # times the fastest, up to which another family's best is a leader too
_FEW: Final = 4  # fastest configs, whose mean gap tells what a new best may gain


def fastest_first(tried: Tried) -> list[Config]:
    """Return the configs that worked, fastest first; ties break by their text."""
    working = [(us, config.key, config) for config, us in tried.items() if us < math.inf]
    return [config for _, _, config in sorted(working, key=lambda item: item[:2])]


def _untried(configs: Iterable[Config], tried: Tried, count: int) -> list[Config]:
    fresh: dict[Config, None] = {}
    for config in configs:
        if len(fresh) == count:
            break
        if config not in tried:
            fresh[config] = None
    return list(fresh)


def exhaustive(space: SearchSpace | Listed, tried: Tried, count: int) -> list[Config]:
    """Try every config, the likeliest first."""
    return _untried(space.configs(), tried, count)


def leaders(tried: Tried) -> list[Config]:
    """Return the fastest few, and the fastest of each other family that is not far behind them."""
    ranked = fastest_first(tried)
    found = ranked[:LEADERS]
    for config in ranked[LEADERS:]:
        near = tried[config] < NEAR * tried[ranked[0]]
        if near and all(config.family != leader.family for leader in found):
            found.append(config)
    return found


def crosses(ranked: Sequence[Config]) -> Iterator[Config]:
    """Yield configs with one parameter taken from another of them, for the first configs first."""
    for one, other in itertools.permutations(ranked, 2):
        mine, theirs = parameters(one), parameters(other)
        if mine.keys() == theirs.keys():
            for name in (name for name in mine if mine[name] != theirs[name]):
                yield from_parameters(mine | {name: theirs[name]})


def screening(space: SearchSpace, tried: Tried, count: int) -> list[Config]:
    """Try an opening by the space's own order, then the likeliest neighbours of the leaders: the default.

    Only so many neighbours of a leader are tried, so that the search ends when the leaders stay. A round
    with room is filled up with crosses of the fastest: the round waits for compiles anyway, and a parameter
    that is good in one config is often good in another. Where the whole opening fails, the rest of the space
    is tried.
    """
    fresh, heads = _untried(space.opening(OPENING), tried, count), leaders(tried)
    if fresh or not heads:
        return fresh or exhaustive(space, tried, count)
    near = [space.neighbours(config)[:NEIGHBOURS] for config in heads]
    steps = [config for turn in itertools.zip_longest(*near) for config in turn if config is not None]
    if not _untried(steps, tried, 1):
        return []
    mixed = (config for config in crosses(fastest_first(tried)[:CROSSED]) if config in space)
    return _untried(itertools.chain(steps, mixed), tried, count)


def expected_gain(tried: Tried, more: int) -> float:
    """Return the relative gain to expect of `more` further configs; infinite where fewer than two worked.

    Of n + more times in random order the least is among the last `more` with probability more / (n + more),
    as each place is equally likely (records of independent draws; Renyi, 1962). The gain of such a record
    is taken to be the mean relative gap between the fastest few. A search's order is not random: its last
    configs are better chosen than the first, though the best of what it learnt is used up. Replays tell which
    gain is too small to go on for (`ENOUGH`).
    """
    times = sorted(us for us in tried.values() if us < math.inf)
    if len(times) < 2:
        return math.inf
    few = times[:_FEW]
    gap = (few[-1] - few[0]) / (len(few) - 1) / few[0]
    return more / (len(times) + more) * gap
