"""A formula that predicts the time of products of groups: that of a batch whose products are all as large.

What groups leave unfilled of their last tiles is counted as if all left as much.
"""

from dataclasses import replace

from tritile.config import Config
from tritile.device import Device
from tritile.model.matmul import matmul_us, tma_us
from tritile.problem import GroupedProblem
from tritile.space import grouped


def grouped_us(config: Config, problem: GroupedProblem, device: Device) -> float:
    """Predicted microseconds of a config on products of groups."""
    even = problem.even
    if config.family != grouped.NAME:
        return matmul_us(config, even, device)
    kwargs = tuple(sorted((*config.kwargs, ("SPLIT_K", 1))))
    return tma_us(replace(config, kwargs=kwargs), even, device)
