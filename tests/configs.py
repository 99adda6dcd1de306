"""Configs of every family by their sides, as tests write them down."""

from dataclasses import replace

import triton

from tritile.core.config import Config
from tritile.core.versions import parsed
from tritile.families.registry import FAMILIES


def numerics(config, problem, device):
    return FAMILIES[problem.op][config.family].numerics(config, problem, device)


def tile(m, n, k, warps=4, stages=3, group=8):
    return Config.of(warps, stages, "tile", BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP_M=group)


def tma(m, n, k, warps=4, stages=3, *, persistent=False, split=1, subtiles=1, group=8):
    blocks = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": group}
    more = {"PERSISTENT": persistent, "SPLIT_K": split, "SUBTILES": subtiles}
    return Config.of(warps, stages, "descriptor", **blocks, **more)


def of_groups(m, n, k, warps=4, stages=4, *, persistent=True, subtiles=1, group=8):
    """The config of grouped products by descriptor."""
    blocks = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": group}
    return Config.of(warps, stages, "descriptor", **blocks, PERSISTENT=persistent, SUBTILES=subtiles)


def warpgroups(m, n, k, consumers, stages, *, persistent=False, subtiles=1, family="warpgroups", **options):
    blocks = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8, "CONSUMERS": consumers}
    own = Config.of(4, stages, family, **blocks, PERSISTENT=persistent, SUBTILES=subtiles, **options)
    return replace(own, num_ctas=2) if "PAIR" in options else own


def split(m, n, consumers, stages, subtiles=1):
    """The config that splits the tiles of the last wave along K."""
    return warpgroups(m, n, 64, consumers, stages, persistent=True, subtiles=subtiles, SPLIT_TAIL=True)


def pair(m, n, consumers, stages, *, persistent=False, subtiles=1):
    """The config whose clusters of two CTAs share tiles of b."""
    return warpgroups(m, n, 64, consumers, stages, persistent=persistent, subtiles=subtiles, PAIR=True)


def skinny_k(rows, dtype, warps=1, stages=3):
    """Of 4 words a thread: 4 rows of w at once, 512 bytes of each."""
    blocks = {"BLOCK_M": _rounded(rows), "BLOCK_N": 4 * warps, "BLOCK_K": 512 // dtype.itemsize}
    return Config.of(warps, stages, "skinny_k", **blocks)


def skinny_n(rows, dtype, columns=32, unroll=2):
    """The config of few rows by rows of w that are contiguous, of one warp."""
    own = min(16 // dtype.itemsize, 32 // _rounded(rows))
    blocks = {"BLOCK_M": _rounded(rows), "BLOCK_N": columns, "BLOCK_K": 32 * own * unroll // columns}
    return Config.of(1, 1, "skinny_n", **blocks)


def odd_rows(rows, split=1):
    block_m = max(16, _rounded(rows))
    blocks = {"BLOCK_M": block_m, "BLOCK_N": 16, "BLOCK_K": 32, "SPLIT_K": split}
    return Config.of(8 if block_m == 256 else 4, 3, "odd_rows", **blocks)


def _rounded(rows):
    return 1 << (rows - 1).bit_length()


def packed_weights(m, n, k, warps, stages, split=1, group=8, family="tile"):
    sides = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": group, "SPLIT_K": split}
    return Config.of(warps, stages, family, **sides)


def turned(m, n, warps=4, group=1):
    """The config of a permutation by tiles."""
    return Config.of(warps, 1, "tile", BLOCK_M=m, BLOCK_N=n, GROUP_M=group)


def boxed(block, run, read, warps=4):
    """The config of a permutation by boxes: elements of a box, of its runs in out, bytes read at once."""
    return Config.of(warps, 1, "box", BLOCK=block, RUN=run, READ=read)


HAS_PAIRS = parsed(triton.__version__) == (3, 7)
# Of every family of products by tiles, with one, two and three consumers, and with every option.
ON_GPU = [
    tile(64, 64, 32, 4, 3),
    tile(128, 64, 64, 8, 3),
    tma(64, 64, 64, 4, 4),
    tma(128, 128, 64, 8, 3, persistent=True, subtiles=2),
    tma(64, 32, 64, 4, 4, split=2),
    warpgroups(64, 64, 64, 1, 4),
    warpgroups(128, 128, 64, 2, 3, persistent=True, subtiles=2),
    warpgroups(192, 96, 64, 3, 3),
    split(128, 160, 2, 4, subtiles=2),
    *([pair(192, 128, 3, 4, persistent=True, subtiles=2), pair(128, 160, 2, 4)] * HAS_PAIRS),
]
