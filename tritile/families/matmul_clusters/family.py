"""Make 16-bit products, as they are or as out^T = b^T a^T, by clusters of two programs, on Hopper.

The programs of a cluster share tiles of an operand.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from tritile.core.config import Config
from tritile.core.problem import MatmulProblem
from tritile.families.common.specialised import Kind, Shapes
from tritile.families.common.work import Kernel

matmul_clusters: Final = Kernel("tritile.families.matmul_clusters.kernel", "matmul_clusters")

NAME: Final = "clusters"
_FEWEST_ROWS: Final = 64
_SHAPES: Final[Shapes] = {
    (192, 128, 3, 2): (5, (1, 2)),
    (128, 192, 2, 1): (4, (1, 2)),
    (128, 160, 2, 2): (5, (1, 2)),
    (128, 256, 2, 2): (4, (2,)),
    (256, 128, 2, 2): (4, (1,)),
    (128, 128, 1, 1): (6, (2,)),
    (64, 128, 1, 1): (8, (2,)),
    (192, 192, 3, 2): (3, (1, 2)),
    (256, 160, 2, 2): (3, (1, 2)),
    (192, 144, 3, 2): (4, (1, 2)),
    (128, 144, 2, 1): (5, (1, 2)),
    (128, 80, 2, 1): (7, (1, 2)),
}
# The same of out^T: BLOCK_M here is of its rows, which are columns of out.
_TRANSPOSED_SHAPES: Final[Shapes] = {
    (64, 48, 1, 1): (10, (1, 2)),
    (64, 80, 1, 1): (10, (1, 2)),
    (128, 32, 2, 1): (10, (1, 2)),
    (128, 48, 2, 1): (8, (1, 2)),
    (128, 80, 2, 1): (7, (1, 2)),
    (128, 96, 2, 1): (6, (1, 2)),
    (128, 144, 2, 1): (5, (1, 2)),
    (192, 80, 3, 1): (5, (1, 2)),
    (192, 96, 3, 1): (5, (1, 2)),
    (192, 144, 3, 2): (4, (1, 2)),
    (192, 192, 3, 2): (3, (1, 2)),
    (256, 80, 2, 1): (4, (1, 2)),
    (256, 160, 2, 2): (3, (1, 2)),
}
KIND: Final = Kind(NAME, matmul_clusters, shapes=_SHAPES)
TRANSPOSED_KIND: Final = Kind("transposed_clusters", matmul_clusters, turned=True, shapes=_TRANSPOSED_SHAPES)

# What gives the rows and columns of a cluster, by family.
CLUSTERED: Final = {kind.name: kind.clustered for kind in (KIND, TRANSPOSED_KIND)}


def _configs(kind: Kind) -> Iterator[Config]:
    for (m, n, consumers, subtiles), (stages, downs) in (kind.shapes or {}).items():
        for down, group, persistent in itertools.product(downs, (1, 8), (False, True)):
            kwargs = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": 64, "CONSUMERS": consumers, "DOWN": down}
            rest = {"GROUP_M": group, "PERSISTENT": persistent, "SUBTILES": subtiles}
            yield kind.mirrored(replace(Config.of(4, stages, kind.name, **kwargs, **rest), num_ctas=2))


def contends(problem: MatmulProblem) -> bool:
    """Tell whether clusters can be the fastest: fewer rows leave half of each idle."""
    return problem.m > _FEWEST_ROWS


FAMILY: Final = KIND.family(lambda: _configs(KIND), contends=contends)
TRANSPOSED: Final = TRANSPOSED_KIND.family(lambda: _configs(TRANSPOSED_KIND))
