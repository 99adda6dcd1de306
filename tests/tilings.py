"""Problems and configs whose tilings tests look at."""

from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.tune.suites import parse_shape

H200 = target_device("nvidia-h200")


def product(shape):
    return parse_shape(shape, dtype="bfloat16").problem


def tile(group=8, m=64, n=32, k=32):
    return Config.of(4, 3, "tile", BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP_M=group)


def warped(persistent=True, group=16):
    blocks = {"BLOCK_M": 128, "BLOCK_N": 192, "BLOCK_K": 64, "GROUP_M": group}
    return Config.of(4, 4, "warpgroups", **blocks, CONSUMERS=2, PERSISTENT=persistent, SUBTILES=1)


def mover(group=2, m=32, n=32):
    return Config.of(4, 1, "tile", BLOCK_M=m, BLOCK_N=n, GROUP_M=group)
