"""Make 16-bit products as out^T = b^T a^T by specialised warps, on Hopper."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from tritile.core.config import Config
from tritile.families.common.specialised import Kind
from tritile.families.common.work import Kernel
from tritile.families.matmul_wgmma import family as warpgroups

matmul_transposed: Final = Kernel("tritile.families.matmul_transposed.kernel", "matmul_transposed")

NAME: Final = "transposed"
KIND: Final = Kind(NAME, matmul_transposed, turned=True, by_out=True)


def _configs() -> Iterator[Config]:
    for config in warpgroups.FAMILY.configs:
        if config["BLOCK_K"] == 64:
            yield replace(KIND.mirrored(config), family=NAME)


FAMILY: Final = KIND.family(_configs)
