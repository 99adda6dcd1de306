"""Search: choose the configs of a space to measure next, by the space and by what was measured so far.

Each strategy is a pure function, so that a search can be stopped, can go on where it was, and can be replayed
against recorded times, without a GPU, to see how well it searches.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from tritile.core.config import Config
from tritile.errors import InvalidValueError
from tritile.tune.spaces import SearchSpace, Tried, from_parameters, parameters

# Returns at most so many untried configs, the likeliest first; none where the search ends.
Strategy = Callable[[SearchSpace, Tried, int], list[Config]]

BATCH: Final = 16  # configs that a search is asked for at a time
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


def exhaustive(space: SearchSpace, tried: Tried, count: int) -> list[Config]:
    """Try every config, the likeliest first."""
    return _untried(space.configs(), tried, count)


def random(space: SearchSpace, tried: Tried, count: int) -> list[Config]:
    """Try every config, in random order: the yardstick of the other strategies."""
    configs = space.configs()
    drawn = Random(len(tried)).sample(range(len(configs)), min(len(configs), count + len(tried)))
    return _untried((configs[place] for place in drawn), tried, count)


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


STRATEGIES: Final[dict[str, Strategy]] = {
    "screening": screening,
    "exhaustive": exhaustive,
    "random": random,
}


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


def next_batch(
    space: SearchSpace, tried: Tried, strategy: Strategy, batch: int, most: int | None, enough: float
) -> list[Config]:
    """Return the next batch of a search; none where the search ends.

    A search ends after `most` configs (None: no limit), or where its next batch promises less gain than
    `enough`.
    """
    room = batch if most is None else min(batch, most - len(tried))
    found = strategy(space, tried, room) if room > 0 else []
    return [] if tried and found and expected_gain(tried, len(found)) < enough else found


@dataclass(frozen=True)
class Replayed:
    """Hold the outcome of a replay.

    `us` is the time of the `best` config found, in microseconds. `regret` is that time over the fastest on
    record, less 1 (0.01: 1% slower). `tried` counts configs, and `rounds` the batches they came in, each of
    which waits for compiles.
    """

    best: Config
    us: float
    regret: float
    tried: int
    rounds: int


class Recorded:
    """Restrict a space to the configs whose time is on record."""

    def __init__(self, space: SearchSpace, recorded: Mapping[Config, float]) -> None:
        self.space, self.recorded = space, recorded

    def configs(self) -> Sequence[Config]:
        """Return every recorded config, in the order of the space."""
        return [config for config in self.space.configs() if config in self.recorded]

    def opening(self, count: int) -> list[Config]:
        """Return the first `count` recorded configs of the space's opening."""
        wanted = count
        while True:
            opening = self.space.opening(wanted)
            found = [config for config in opening if config in self.recorded][:count]
            if len(found) == count or len(opening) < wanted:
                return found
            wanted *= 2

    def neighbours(self, config: Config) -> list[Config]:
        """Return the recorded neighbours of a config."""
        return [step for step in self.space.neighbours(config) if step in self.recorded]

    def __contains__(self, config: object) -> bool:
        return config in self.recorded


def replay(
    space: SearchSpace,
    recorded: Mapping[Config, float],
    strategy: Strategy,
    batch: int = BATCH,
    most: int | None = None,
    enough: float = 0.0,
) -> Replayed:
    """Run a strategy against recorded times, in microseconds, infinity for configs that failed.

    Args:
        space: the space searched; configs that are not on record are not offered.
        recorded: the time of each config.
        strategy: proposes configs, until it proposes none.
        batch: the most configs of a round.
        most: the most configs of the search; None: no limit.
        enough: the expected gain (`expected_gain`) below which the search ends; 0: no such end.

    Raises InvalidValueError where no config of the space works, and where the strategy proposes a config that
    is not on record, or proposes one twice.
    """
    offered, tried, rounds = Recorded(space, recorded), dict[Config, float](), 0
    while proposed := next_batch(offered, tried, strategy, batch, most, enough):
        if not set(proposed) <= recorded.keys() - tried.keys():
            raise InvalidValueError("the strategy proposed a config again, or one that is not in the space")
        tried |= {config: recorded[config] for config in proposed}
        rounds += 1
    if min(tried.values(), default=math.inf) == math.inf:
        raise InvalidValueError(f"none of {len(tried)} configs that the strategy proposed works")
    best = min(tried, key=lambda config: (tried[config], config.key))
    regret = tried[best] / min(recorded.values()) - 1
    return Replayed(best, tried[best], regret, len(tried), rounds)
