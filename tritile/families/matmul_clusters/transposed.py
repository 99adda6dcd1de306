"""Make 16-bit products as out^T = b^T a^T by clusters of two programs, on Hopper."""

from typing import Final

from tritile.families.common.specialised import Kind, Shapes
from tritile.families.matmul_clusters.family import configs_of, matmul_clusters

NAME: Final = "transposed_clusters"
# As those of clusters, of out^T: BLOCK_M here is of its rows, which are columns of out.
_SHAPES: Final[Shapes] = {
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
KIND: Final = Kind(NAME, matmul_clusters, turned=True, shapes=_SHAPES)


FAMILY: Final = KIND.family(lambda: configs_of(KIND))
