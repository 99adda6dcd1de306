"""Choose the winner of a race: only a difference beyond the noise counts."""

import math
import statistics
from collections.abc import Mapping, Sequence

from tritile.core.config import Config

_TIED = 1.01  # times as slow as the fastest, up to which noise may explain a difference


def slower(a: Sequence[float], b: Sequence[float]) -> bool:
    """Tell whether b is slower than a by over two standard errors, of times that were taken in turns."""
    ratios = [math.log(y / x) for x, y in zip(a, b, strict=True)]
    if len(ratios) < 2:
        return ratios[0] > 0
    error = statistics.stdev(ratios) / math.sqrt(len(ratios))
    return statistics.median(ratios) > 2 * error


def settled(samples: Mapping[Config, Sequence[float]], incumbent: Config | None = None) -> list[Config]:
    """Order raced configs, best first; `samples` are times that were taken in turns.

    The incumbent stays first unless another config is faster beyond the noise. Ties with the fastest break by
    the config's key, so that a repeated race chooses the same.
    """
    middle = {config: statistics.median(times) for config, times in samples.items()}
    order = sorted(samples, key=lambda config: (middle[config], config.key))
    fastest = order[0]
    tied = [
        config
        for config in order
        if middle[config] <= _TIED * middle[fastest] and not slower(samples[fastest], samples[config])
    ]
    first = min(tied, key=lambda config: config.key)
    if incumbent is not None and incumbent in samples and not slower(samples[fastest], samples[incumbent]):
        first = incumbent
    return [first, *(config for config in order if config != first)]
