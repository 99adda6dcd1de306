"""What a call with a config launches: products by tiles or by TMA, and permutations."""

from tritile.config import Config
from tritile.space import descriptor, warpgroups
from tritile.views import Call, MatmulCall
from tritile.work import permute, tile, tma
from tritile.work.lower import joined, lowered
from tritile.work.values import Work


def work_of(call: Call, config: Config, processors: int, early: bool) -> Work:
    """What launches `call` with `config` on a GPU of so many processors.

    `early`: kernels may start before the one ahead of them in the stream is done, and wait in themselves
    for what they read (programmatic dependent launch). Raises TuningError where the family cannot.
    """
    if isinstance(call, MatmulCall):
        parts = lowered(call, early)
        if parts is not None:
            return joined(call, parts, work_of(parts.core, config, processors, early))
        if config.family == descriptor.NAME:
            return tma.descriptor_work(call, config, processors, early)
        if config.family == warpgroups.NAME:
            return tma.warpgroups_work(call, config, processors, early)
        return tile.work(call, config)
    return permute.work(call, config, early)
