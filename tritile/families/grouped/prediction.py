"""A formula that predicts the time of products of groups: that of a batch whose products are all as large.

What groups leave unfilled of their last tiles is counted as if all left as much.
"""

from dataclasses import replace

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import GroupedProblem
from tritile.families.common.prediction import matmul_us, tma_us
from tritile.families.grouped import family as grouped


def grouped_us(config: Config, problem: GroupedProblem, device: Device) -> float:
    """Predicted microseconds of a config on products of groups."""
    even = problem.even
    if config.family != grouped.NAME:
        return matmul_us(config, even, device)
    kwargs = tuple(sorted((*config.kwargs, ("SPLIT_K", 1))))
    return tma_us(replace(config, kwargs=kwargs), even, device)
