"""Which configs to try next: pure proposals from the space and from what was measured so far."""

from collections.abc import Collection
from dataclasses import replace

from tritile.config import Config
from tritile.device import Device
from tritile.model import predict_us, screened
from tritile.problem import MatmulProblem, TransposeProblem
from tritile.space import illegal

Tiled = MatmulProblem | TransposeProblem


def opening(problem: Tiled, device: Device, count: int) -> list[Config]:
    """The configs to screen first: the model's favourites over varied tiles."""
    return screened(problem, device, count)


def _with(config: Config, name: str, value: int) -> Config:
    return replace(config, kwargs=tuple((n, value if n == name else v) for n, v in config.kwargs))


def neighbours(config: Config) -> list[Config]:
    """Every config one step away: one block halved or doubled, one more or less warp or stage count."""
    steps = []
    for name, value in config.kwargs:
        if isinstance(value, int):
            steps += [_with(config, name, value * 2)] + [_with(config, name, value // 2)] * (value > 1)
    steps += [replace(config, num_warps=warps) for warps in (config.num_warps * 2, config.num_warps // 2)
              if 1 <= warps <= 16]  # fmt: skip
    if "BLOCK_K" in dict(config.kwargs):
        stages = (config.num_stages - 1, config.num_stages + 1)
        steps += [replace(config, num_stages=count) for count in stages if count >= 2]
    return steps


def refinement(
    best: Collection[Config], tried: Collection[Config], problem: Tiled, device: Device, count: int
) -> list[Config]:
    """Untried legal neighbours of the best configs, the likeliest first, `count` at most."""
    near = {step for config in best for step in neighbours(config)} - set(tried)
    legal = [config for config in near if illegal(config, problem, device) is None]
    return sorted(legal, key=lambda c: (predict_us(c, problem, device), c.key))[:count]
