"""What a call with a config launches: products, also of groups and with packed weights, and permutations."""

from collections.abc import Callable
from typing import Any, Final

from tritile.config import Config
from tritile.errors import TuningError
from tritile.space import descriptor, packed, quantized_unpacked, warpgroups
from tritile.space.tile import NAME as TILE
from tritile.views import Call, MatmulCall
from tritile.work import grouped, permute, quantized, tile, tma, unpacked
from tritile.work.lower import joined, lowered
from tritile.work.values import Work

# What makes the work of each operation, by family, of: a call, a config, processors, and `early`.
_MAKERS: Final[dict[str, dict[str, Callable[[Any, Config, int, bool], Work]]]] = {
    "matmul": {
        TILE: lambda call, config, processors, early: tile.work(call, config),
        descriptor.NAME: tma.descriptor_work,
        warpgroups.NAME: tma.warpgroups_work,
    },
    "grouped": {TILE: grouped.tile_work, descriptor.NAME: grouped.descriptor_work},
    "permute": dict.fromkeys(
        (TILE, packed.NAME), lambda call, config, processors, early: permute.work(call, config, early)
    ),
    "linear_quantized": {
        TILE: quantized.work,
        descriptor.NAME: quantized.work,
        quantized_unpacked.NAME: unpacked.work,
    },
}


def work_of(call: Call, config: Config, processors: int, early: bool) -> Work:
    """What launches `call` with `config` on a GPU of so many processors.

    `early`: kernels may start before the one ahead of them in the stream is done, and wait in themselves
    for what they read (programmatic dependent launch). Raises TuningError where the family cannot.
    """
    if isinstance(call, MatmulCall) and (parts := lowered(call, early)) is not None:
        return joined(call, parts, work_of(parts.core, config, processors, early))
    maker = _MAKERS[call.op].get(config.family)
    if maker is None:
        raise TuningError(f"{config} is of no family of {call.op}: {', '.join(_MAKERS[call.op])}")
    return maker(call, config, processors, early)
