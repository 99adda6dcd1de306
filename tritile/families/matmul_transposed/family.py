"""Make 16-bit products as out^T = b^T a^T by specialised warps, on Hopper."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from tritile.core.config import Config
from tritile.core.views import MatmulCall
from tritile.families.common.specialised import Kind
from tritile.families.common.work import Kernel, Work
from tritile.families.matmul_wgmma import family as warpgroups

matmul_transposed: Final = Kernel("tritile.families.matmul_transposed.kernel", "matmul_transposed")

NAME: Final = "transposed"
KIND: Final = Kind(NAME, turned=True, by_out=True)


def _configs() -> Iterator[Config]:
    for config in warpgroups.FAMILY.configs:
        if config["BLOCK_K"] == 64:
            yield replace(KIND.mirrored(config), family=NAME)


def work(call: MatmulCall, config: Config, processors: int, early: bool) -> Work:
    """Return the launches of `call` with a config: see `tritile.families.work.work_of`."""
    return KIND.work(matmul_transposed, call, config, processors, early)


FAMILY: Final = KIND.family(matmul_transposed, _configs, work)
