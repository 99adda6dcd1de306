"""What a call with a config launches: products, also of groups and with packed weights, and permutations."""

from collections.abc import Callable
from typing import Any, Final

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.views import Call, MatmulCall
from tritile.errors import TuningError
from tritile.families.common.work import Work
from tritile.families.grouped import work as grouped
from tritile.families.lowering import joined, lowered
from tritile.families.matmul_tile import work as tile
from tritile.families.matmul_tile.family import NAME as TILE
from tritile.families.matmul_tma import family as descriptor
from tritile.families.matmul_tma import work as tma
from tritile.families.matmul_wgmma import family as warpgroups
from tritile.families.permute import family as packed
from tritile.families.permute import work as permute
from tritile.families.quantized import unpacked as quantized_unpacked
from tritile.families.quantized import work as quantized
from tritile.families.quantized import work_unpacked as unpacked

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


def early(device: Device) -> bool:
    """Whether kernels on this GPU may start before the one ahead of them is done."""
    return 90 <= device.nvidia < 120


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
