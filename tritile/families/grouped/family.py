"""Make products of groups in one launch: by tiles through pointers, or by tiles that TMA brings.

Predicted times are those of a batch of equal products: each group is taken to leave as much of its last tiles
unfilled.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Any, Final

from tritile.core.call import GroupedCall, View
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import GroupedProblem
from tritile.errors import TuningError
from tritile.families.common import grids, products
from tritile.families.common.descriptors import (
    descriptor_view,
    readable,
    storable,
    with_valid_strides,
)
from tritile.families.family import Family
from tritile.families.matmul_tile import family as tile
from tritile.families.matmul_tma import family as descriptor
from tritile.families.numerics import of_product
from tritile.runtime.work import Buffer, Descriptor, Kernel, Work, step_of

grouped_matmul_tile: Final = Kernel("tritile.families.grouped.kernel", "grouped_matmul_tile")
grouped_matmul_descriptor: Final = Kernel("tritile.families.grouped.kernel_tma", "grouped_matmul_descriptor")

PARAMETERS: Final = ("BLOCK_K", "BLOCK_M", "BLOCK_N", "GROUP_M", "PERSISTENT", "SUBTILES")
FAR: Final = 2**30  # rows of a descriptor that is cut at a group's end, as in its kernel
_LEAST_LANES: Final = 32
_STEP: Final = 2**34  # elements: 2**30 such strides go once around the address space, of any element


def _tile_configs() -> Iterator[Config]:
    """Yield configs of products that order tiles in bands: groups may have several rows of tiles."""
    for config in tile.FAMILY.configs:
        if config["GROUP_M"] > 1 and config.num_warps in (4, 8) and config["BLOCK_K"] >= 32:
            yield config


def _tma_configs() -> Iterator[Config]:
    for m, n, k in itertools.product((16, 32, 64, 128, 256), (32, 64, 128, 256), (64, 128)):
        if not 16 * 64 <= m * n <= 128 * 256 or (k == 64 and m * n < 64 * 64):
            continue
        warps = (4, 8) if m >= 64 and m * n >= 128 * 128 else (4,)
        for count, stages, persistent in itertools.product(warps, (2, 3, 4, 5, 6, 8), (False, True)):
            if m * n // (32 * count) > products.MAX_WORDS or (persistent and m * n < 64 * 64):
                continue
            kwargs = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8, "PERSISTENT": persistent}
            for subtiles in (1, 2) if n >= 128 and persistent else (1,):
                yield Config.of(count, stages, descriptor.NAME, **kwargs, SUBTILES=subtiles)


def tiles(config: Config, problem: GroupedProblem) -> int:
    """Return the most tiles that groups can have: each group but the largest may leave one partly filled.

    Rows of no group count as one more group: they are filled with zeros.
    """
    m, n = config["BLOCK_M"], -(-problem.n // config["BLOCK_N"])
    made = min(problem.groups + 1, problem.m)
    return (problem.m + made * (m - 1)) // m * n


def unreachable(problem: GroupedProblem) -> str | None:
    """Say why no tensor descriptor can see the operands, None if one can.

    A tile begins where its group does, at any row or column. Along the contiguous dimension TMA takes no such
    tile: the H200 reports an illegal instruction.
    """
    if "strided" in (problem.a_layout, problem.b_layout):
        return "an operand has no contiguous dimension"
    if min(problem.a_align, problem.b_align) < 16:
        return "an operand's rows do not start on 16 bytes"
    if problem.a_layout != "row":
        return "groups begin anywhere along the contiguous dimension of a"
    if max(problem.m, problem.n, problem.k, problem.groups) > FAR:
        return f"sizes above {FAR}"
    return None


def _tma_illegal(config: Config, problem: GroupedProblem, device: Device) -> str | None:
    reason = descriptor.fault(config, problem, device, PARAMETERS) or unreachable(problem)
    return reason or products.resource_fault(device, programs=tiles(config, problem))


def _tma_is_dominated(config: Config, problem: GroupedProblem, device: Device) -> bool:
    if config["PERSISTENT"] and tiles(config, problem) <= device.processors:
        return True
    if config.num_stages < 5 and descriptor.is_shallow(config, problem, device):
        return True
    return products.is_oversized(config, problem, 128)


def _args(call: GroupedCall, config: Config) -> dict[str, Any]:
    a, b, out = call.a, call.b, call.out
    between = [sum(view.batch_strides) for view in (a, b, out)]  # groups: 0 if all share a matrix
    return {
        "a_ptr": Buffer(a.buffer), "b_ptr": Buffer(b.buffer), "out_ptr": Buffer(out.buffer),
        "offs_ptr": Buffer("offs"),
        "groups": call.groups, "M": a.shape[0], "N": b.shape[1], "K": a.shape[1],
        "stride_ag": between[0], "stride_am": a.strides[0], "stride_ak": a.strides[1],
        "stride_bg": between[1], "stride_bk": b.strides[0], "stride_bn": b.strides[1],
        "stride_og": between[2], "stride_om": out.strides[0], "stride_on": out.strides[1],
        "PRECISION": call.precision,
        "BLOCK_G": max(_LEAST_LANES, 1 << (call.groups - 1).bit_length()), **dict(config.kwargs),
    }  # fmt: skip


def tile_work(call: GroupedCall, config: Config, processors: int, early: bool) -> Work:
    a, b, out, n, k = call.a, call.b, call.out, call.b.shape[1], call.a.shape[1]
    block_m, block_n, block_k = (config[f"BLOCK_{side}"] for side in "MNK")
    sides = ((a, block_m, block_k), (b, block_k, block_n), (out, block_m, block_n))
    reach = max(rows * view.strides[0] + columns * view.strides[1] for view, rows, columns in sides)

    def units(view: View) -> tuple[int, int, int]:
        by_row, by_column, by_group = grids.units(view)
        return by_group, by_row, by_column

    values = _args(call, config) | {
        "ALIGN_N": grids.unit(n, a.itemsize), "ALIGN_K": grids.unit(k, a.itemsize),
        "ALIGN_A": units(a), "ALIGN_B": units(b), "ALIGN_OUT": units(out),
        "MASK_N": n % block_n != 0, "MASK_K": k % block_k != 0, "WIDE": reach >= grids.WIDE_FROM,
    }  # fmt: skip
    grid = (tiles(config, call.problem), 1, 1)
    return Work((step_of(grouped_matmul_tile, grid, values, grids.options(config)),))


def _cut(whole: Descriptor) -> Descriptor:
    """Return the descriptor of one matrix, which a kernel may end at any row: see `store_rows`."""
    (_, _, columns), step = whole.shape, whole.strides[1]
    shape = (grids.WIDE_FROM, grids.WIDE_FROM, FAR, columns)
    return Descriptor(whole.buffer, shape, (_STEP - step, step, step, 1), (1, *whole.block))


def descriptor_work(call: GroupedCall, config: Config, processors: int, early: bool) -> Work:
    """Return the launches of products of groups with a config of the descriptor family.

    Raises TuningError if no descriptor can see an operand.
    """
    a, b, out = (
        descriptor_view(view, (call.groups if view.batch_strides else 1,), (sum(view.batch_strides),))
        for view in (call.a, call.b, call.out)
    )
    if (reason := unreachable(call.problem)) is not None:
        raise TuningError(reason)
    for seen, view in ((a, call.a), (b, call.b)):
        if not readable(seen, view):
            raise TuningError(f"no descriptor sees strides {view.strides} of {view.itemsize} bytes")
    m, n, k = (config[f"BLOCK_{side}"] for side in "MNK")
    stored, rounded = call.out.layout == "row" and storable(out, call.out), call.precision == "tf32"
    cut = _cut(with_valid_strides(out, call.out).descriptor(m, n // config["SUBTILES"])) if stored else None
    values = _args(call, config) | {
        "a_desc": with_valid_strides(a, call.a).descriptor(m, k, rounded=rounded),
        "b_desc": with_valid_strides(b, call.b).descriptor(k, n, rounded=rounded),
        "out_desc": cut, "BY_DESCRIPTOR": stored,
        "A_ROW": not a.transposed, "B_ROW": not b.transposed, "WAIT": early,
    }  # fmt: skip
    made = tiles(config, call.problem)
    grid = (min(made, processors) if config["PERSISTENT"] else made, 1, 1)
    how = {"num_warps": config.num_warps, "num_stages": config.num_stages, "launch_pdl": early}
    return Work((step_of(grouped_matmul_descriptor, grid, values, how),))


TILE: Final = Family(
    GroupedProblem.op, tile.NAME, grouped_matmul_tile, _tile_configs, tile.illegal, tile.is_dominated,
    lambda config, problem, device: tile.cost(config, problem.even, device), tile_work,
)  # fmt: skip
DESCRIPTOR: Final = Family(
    GroupedProblem.op, descriptor.NAME, grouped_matmul_descriptor, _tma_configs, _tma_illegal,
    _tma_is_dominated, lambda config, problem, device: descriptor.cost(config, problem.even, device),
    descriptor_work, copies=True,
    numerics=functools.partial(of_product, rounding="tma"),
)  # fmt: skip
