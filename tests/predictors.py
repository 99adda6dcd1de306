"""Made-up predictors: some configs of a class, and networks of small random numbers."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tritile.choose.aten import versions
from tritile.choose.classes import MEASURED
from tritile.choose.predictor import Class, Loss, Network, Predictor
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import Tiled
from tritile.families.registry import digests
from tritile.families.space import legal_configs

LOSS = Loss(100, 0.01, 0.05, 0.02, 0.1)
MOST = 1e12  # operations, or bytes, up to which a class was swept
PREFERRED = -9.0  # of the logarithm of a time that a network is made to love


@functools.cache
def some_configs(problem: Tiled, device: Device, count: int) -> tuple[Config, ...]:
    """About `count` legal configs of all kinds."""
    legal = legal_configs(problem, device)
    return tuple(legal[:: max(1, len(legal) // count)][:count])


def network(op: str, columns: int, seed: int = 0, more: Sequence[float] = ()) -> Network:
    """A network; `more` is added to the logarithms of the columns' times, and last to that of torch's."""
    dice = np.random.RandomState(seed)
    arrays: dict[str, Any] = {}
    for name, shape in Network.shapes(op, columns).items():
        arrays[name] = dice.normal(0, 0.05, shape)
        if name.endswith("_scale"):
            arrays[name][1] = 8.0
    arrays["weights"][: len(more), 0] += more
    return Network(**arrays)


def made(
    name: str, configs: Sequence[Config], *devices: Device, more: Sequence[float] = (), networks: int = 2
) -> Predictor:
    """A predictor of one class, of kernels as they are now. `more` is that of `network`."""
    op = MEASURED[name].op
    kernels = {label: digest for label, digest in digests().items() if label.startswith(f"{op}/")}
    nets = tuple(network(op, len(configs), seed, more) for seed in range(networks))
    of_class = Class(
        tuple(range(len(configs))),
        MOST,
        LOSS if op != "permute" else LOSS._replace(torch=0.0),
        tuple(each.name for each in devices),
    )
    facts = tuple(device.to_dict() for device in devices)
    return Predictor(facts, kernels, versions(), tuple(configs), {name: of_class}, nets)
