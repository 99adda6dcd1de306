"""Which of several raced configs wins: only what is beyond the noise counts."""

import math
import statistics
from collections.abc import Mapping, Sequence

from tritile.core.config import Config

_TIED = 1.01  # times as slow as the fastest, up to which noise may explain a difference


def slower(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether b is slower than a beyond the noise: runs side by side differ by over two standard errors."""
    ratios = [math.log(y / x) for x, y in zip(a, b, strict=True)]
    if len(ratios) < 2:
        return ratios[0] > 0
    error = statistics.stdev(ratios) / math.sqrt(len(ratios))
    return statistics.median(ratios) > 2 * error


def settled(samples: Mapping[Config, Sequence[float]], incumbent: Config | None = None) -> list[Config]:
    """The configs, best first, from times that were taken in turns.

    The incumbent stays first unless another is faster beyond the noise. Of those that the noise does not
    tell from the fastest the one whose text comes first leads, so that a repeat chooses the same.
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
