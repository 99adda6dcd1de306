"""Searches run against recorded times, without a GPU, to see how well a strategy searches."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tritile.core.config import Config
from tritile.errors import InvalidValueError
from tritile.tune.search import BATCH, SearchSpace, Strategy, next_batch


@dataclass(frozen=True)
class Replayed:
    """`regret`: the time of the best config found over the fastest on record, less 1 (0.01: 1% slower)."""

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
        return [config for config in self.space.configs() if config in self.recorded]

    def opening(self, count: int) -> list[Config]:
        wanted = count
        while True:
            opening = self.space.opening(wanted)
            found = [config for config in opening if config in self.recorded][:count]
            if len(found) == count or len(opening) < wanted:
                return found
            wanted *= 2

    def neighbours(self, config: Config) -> list[Config]:
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
    """Run a strategy until it proposes nothing, against times in microseconds: infinity for what failed.

    `batch` and `most` are the most configs of a round and of the search, which ends below an expected gain of
    `enough`. Raises InvalidValueError where nothing works, and for a config proposed twice or not on record.
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
