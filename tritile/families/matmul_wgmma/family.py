"""Make products of 16 and 8 bits by specialised warps, on Hopper."""

import itertools
from collections.abc import Iterator
from typing import Final

from tritile.core.config import Config
from tritile.core.problem import MatmulProblem
from tritile.families.common.specialised import Kind
from tritile.families.common.warpgroups import COLUMNS, REGISTERS, ROWS
from tritile.families.common.work import Kernel

NAME: Final = "warpgroups"
KIND: Final = Kind(NAME, Kernel("tritile.families.matmul_wgmma.kernel", "matmul_warpgroups"))
_LARGEST: Final = 256 * 160  # elements of a tile


def _configs() -> Iterator[Config]:
    for m, n, consumers, k in itertools.product((64, 128, 192, 256), COLUMNS, (1, 2, 3), (64, 128)):
        rows = m // consumers
        if m % consumers or rows not in ROWS or m * n > _LARGEST:
            continue
        if rows * n // 128 > REGISTERS[consumers] - 56:
            continue
        for stages, group, persistent in itertools.product((3, 4, 5, 6, 8, 10), (1, 8, 16), (False, True)):
            if (m + n) * k * stages > (2**18 if k == 128 else 2**17):
                continue
            for subtiles in (1, 2) if n >= 128 else (1,):
                kwargs = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "CONSUMERS": consumers, "GROUP_M": group}
                yield Config.of(4, stages, NAME, **kwargs, PERSISTENT=persistent, SUBTILES=subtiles)


def contends(problem: MatmulProblem) -> bool:
    """Tell whether the family can be the fastest: not where `scaled` makes what has scales within K."""
    return not problem.block_scales


FAMILY: Final = KIND.family(_configs, contends=contends)
