"""Make 16-bit products as out^T = b^T a^T by clusters of two programs, on Hopper."""

from typing import Final

from tritile.core.config import Config
from tritile.core.views import MatmulCall
from tritile.families.common.specialised import Kind, Shapes
from tritile.families.common.work import Kernel, Work
from tritile.families.matmul_clusters.family import configs_of

matmul_clusters: Final = Kernel("tritile.families.matmul_clusters.kernel", "matmul_clusters")

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
KIND: Final = Kind(NAME, turned=True, shapes=_SHAPES)


def work(call: MatmulCall, config: Config, processors: int, early: bool) -> Work:
    """Return the launches of `call` with a config: see `tritile.families.work.work_of`."""
    return KIND.work(matmul_clusters, call, config, processors, early)


FAMILY: Final = KIND.family(matmul_clusters, lambda: configs_of(KIND), work)
