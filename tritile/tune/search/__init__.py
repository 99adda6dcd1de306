"""Search: pure functions that choose which configs of a space to measure next. No GPU and no store."""

from tritile.tune.search.replay import Replayed, replay
from tritile.tune.search.spaces import Listed, SearchSpace, Space, Tried
from tritile.tune.search.strategies import (
    BATCH,
    ENOUGH,
    STRATEGIES,
    Strategy,
    descent,
    evolution,
    exhaustive,
    expected_gain,
    fastest_first,
    random,
    screening,
)

__all__ = [
    "BATCH",
    "ENOUGH",
    "STRATEGIES",
    "Listed",
    "Replayed",
    "SearchSpace",
    "Space",
    "Strategy",
    "Tried",
    "descent",
    "evolution",
    "exhaustive",
    "expected_gain",
    "fastest_first",
    "random",
    "replay",
    "screening",
]
