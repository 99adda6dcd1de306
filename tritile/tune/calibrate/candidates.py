"""Choose the configs of a class for a sweep to time, and which of the timed ones to keep."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np

from tritile.choose import waves
from tritile.choose.classes import class_of
from tritile.choose.table import Table
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import Tiled
from tritile.families.matmul_tma import family as descriptor
from tritile.families.registry import FAMILIES
from tritile.families.space import legal_configs
from tritile.tune.calibrate.sweep import Row, banded
from tritile.tuner.measure.workers import WorkerPool

_SPLIT_ONLY: Final = ("bf16_nn", "bf16_nt")
_HOPPER: Final = 90
_NEAR: Final = 1.2  # times the least predicted time, up to which a config is a candidate
_WORST: Final = 3.0  # slowdown that slower and missing times count as


def is_candidate(config: Config, name: str | None, device: Device) -> bool:
    """False for a config that a class does not need.

    On Hopper `warpgroups` computes aligned 16-bit products like `descriptor` without SPLIT_K, and is
    faster at nearly every size.
    """
    if name not in _SPLIT_ONLY or device.nvidia != _HOPPER or config.family != descriptor.NAME:
        return True
    return config["SPLIT_K"] > 1


def likely(problem: Tiled, device: Device) -> dict[Config, float]:
    """Return the candidates predicted to come near the fastest, with their microseconds."""
    families, name = FAMILIES[problem.op], class_of(problem)
    legal = [c for c in legal_configs(problem, device) if families[c.family].margin is None]
    ranked = [(waves.predict_us(c, problem, device), c) for c in legal if is_candidate(c, name, device)]
    least = min(us for us, _ in ranked)
    found: dict[Config, float] = {}
    for us, config in sorted(ranked, key=lambda pair: (pair[0], pair[1].key)):
        if us <= _NEAR * least:
            found.setdefault(banded(config), us)
    return found


def candidates(
    name: str, problems: Sequence[Tiled], device: Device, earlier: Sequence[Config], tables: Sequence[Table],
    count: int,
) -> list[Config]:  # fmt: skip
    """Return `count` configs to sweep: `earlier` ones, winners of tables, and those predicted fastest.

    Half are chosen so that every size, even a rare kind, has a config near its fastest. Configs that add
    nothing to that come in the order of how many sizes they are near the fastest at.
    """
    own = dict.fromkeys(map(banded, earlier))
    for entry in (entry for each in tables for entry in each.entries):
        plain = not getattr(entry.problem, "epilogue", "")
        if plain and isinstance(entry.problem, Tiled) and class_of(entry.problem) == name:
            own[banded(entry.config)] = None
    with WorkerPool() as pool:
        futures = [pool.submit(likely, problem, device) for problem in problems]
        rows = [Row(problem, each.result()) for problem, each in zip(problems, futures, strict=True)]
    common = [config for config, _ in Counter(config for row in rows for config in row.times).most_common()]
    cover = covering(rows, common, count)
    own_configs = [config for config in own if is_candidate(config, name, device)]
    return list(dict.fromkeys([*cover[: count // 2], *own_configs, *cover]))[:count]


def covering(rows: Sequence[Row], configs: Sequence[Config], count: int) -> list[Config]:
    """Choose `count` configs greedily: each lowers most the mean time of the fastest chosen at each size."""
    places = {config: place for place, config in enumerate(configs)}
    losses = np.full((len(rows), len(configs)), _WORST)
    for row, measured in enumerate(rows):
        fastest = min(measured.times.values())
        for config in measured.times.keys() & places.keys():
            losses[row, places[config]] = min(measured.times[config] / fastest, _WORST)
    losses, best, found = np.log(losses), np.full(len(rows), math.log(_WORST)), list[int]()
    for _ in range(min(count, len(configs))):
        means = np.minimum(losses, best[:, None]).mean(0)
        means[found] = np.inf
        found.append(int(means.argmin()))
        best = np.minimum(best, losses[:, found[-1]])
    return [configs[place] for place in found]
