"""Which configs to try next: pure proposals from the space and from what was measured so far."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from tritile.config import Config
from tritile.device import Device
from tritile.model import predict_us, screened
from tritile.problem import MatmulProblem, PermuteProblem
from tritile.space import illegal, warpgroups
from tritile.trial import Trial

Tiled = MatmulProblem | PermuteProblem
_SEARCHED = 8  # trials of a family from which on it counts as searched


def opening(
    problem: Tiled,
    device: Device,
    count: int,
    earlier: Sequence[Trial] = (),
    known: Sequence[Config] = (),
) -> list[Config]:
    """The configs to screen first: those `known` to be good, and the model's favourites of each family.

    Favourites are of varied tiles. Of a family that was searched before, as `earlier` shows, the two
    fastest are enough.
    """
    tried: dict[str, list[Trial]] = {}
    for trial in sorted(earlier, key=lambda t: (t.failure is not None, t.us or 0.0, t.config.key)):
        tried.setdefault(trial.config.family, []).append(trial)
    searched = {family for family, trials in tried.items() if len(trials) >= _SEARCHED}
    best = [
        t.config
        for family in sorted(searched)
        for t in tried[family][:2]
        if t.us is not None and not t.failure
    ]
    fresh = [config for config in screened(problem, device, 2 * count) if config.family not in searched]
    found = list(dict.fromkeys([*known, *best, *fresh]))
    return found[: max(count, len(known) + len(best))]


def _with(config: Config, name: str, value: int) -> Config:
    return replace(config, kwargs=tuple((n, value if n == name else v) for n, v in config.kwargs))


def neighbours(config: Config) -> list[Config]:
    """Every config one step away: one block halved or doubled, one more or less warp or stage count.

    Tiles of warp-specialised kernels grow and shrink by rows of a warpgroup, whose number goes along.
    """
    steps = []
    for name, value in config.kwargs:
        if isinstance(value, bool):
            steps += [_with(config, name, not value)]
        elif not isinstance(value, int):
            continue
        elif config.family == warpgroups.NAME and name in ("BLOCK_M", "BLOCK_N", "CONSUMERS"):
            by = {"BLOCK_M": 64, "BLOCK_N": 32, "CONSUMERS": 1}[name]
            steps += [_with(config, name, value + step) for step in (-2 * by, -by, by, 2 * by)]
        else:
            steps += [_with(config, name, value * 2)] + [_with(config, name, value // 2)] * (value > 1)
    if config.family == warpgroups.NAME:
        rows = config["BLOCK_M"] // config["CONSUMERS"]
        steps += [_with(_with(config, "CONSUMERS", count), "BLOCK_M", rows * count) for count in (1, 2, 3)]
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
