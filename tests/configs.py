"""Configs of every family by their sides, as tests write them down."""

from dataclasses import replace

from tritile.core.config import Config


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


def warpgroups(m, n, k, consumers, stages, *, persistent=False, subtiles=1, family="warpgroups"):
    blocks = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8, "CONSUMERS": consumers}
    return Config.of(4, stages, family, **blocks, PERSISTENT=persistent, SUBTILES=subtiles)


def transposed(m, n, consumers, stages, **more):
    """The config that makes such a tile transposed: consumers share its columns."""
    return warpgroups(m, n, 64, consumers, stages, **more, family="transposed")


def split(m, n, k, consumers, stages, *, subtiles=1):
    blocks = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8, "CONSUMERS": consumers}
    return Config.of(4, stages, "split", **blocks, SUBTILES=subtiles)


def scaled(m, n, consumers, piece, stages, *, persistent=False):
    blocks = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": 128, "GROUP_M": 8, "CONSUMERS": consumers}
    return Config.of(4, stages, "scaled", **blocks, PIECE=piece, PERSISTENT=persistent)


def clusters(m, n, consumers, stages, down, *, persistent=False, subtiles=1, family="clusters"):
    blocks = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": 64, "GROUP_M": 8, "CONSUMERS": consumers, "DOWN": down}
    own = Config.of(4, stages, family, **blocks, PERSISTENT=persistent, SUBTILES=subtiles)
    return replace(own, num_ctas=2)


def transposed_clusters(*sides, **more):
    """Consumers share columns; of `down` 2 the cluster's tiles lie side by side."""
    return clusters(*sides, **more, family="transposed_clusters")


def packed_weights(m, n, k, warps, stages, split=1, group=8, family="tile"):
    sides = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": group, "SPLIT_K": split}
    return Config.of(warps, stages, family, **sides)


def turned(m, n, warps=4, group=1, family="tile"):
    """The config of a permutation by tiles."""
    return Config.of(warps, 1, family, BLOCK_M=m, BLOCK_N=n, GROUP_M=group)


def boxed(run_out, run_x, block, warps=4):
    return Config.of(warps, 1, "box", BLOCK_M=run_out, BLOCK_N=run_x, BLOCK=block)
