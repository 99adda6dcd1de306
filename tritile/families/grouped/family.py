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
from tritile.core.problem import ITEMSIZE, GroupedProblem
from tritile.errors import TuningError
from tritile.families.common import grids
from tritile.families.common.blocks import least_blocks, oversized, shared_fault
from tritile.families.common.cost import Program
from tritile.families.common.descriptors import BARRIER
from tritile.families.common.numerics import of_product
from tritile.families.common.products import accumulator_words
from tritile.families.common.work import Buffer, Descriptor, Kernel, Work, step_of
from tritile.families.family import Family
from tritile.families.matmul_tile import family as tile
from tritile.families.matmul_tma import family as descriptor
from tritile.families.matmul_tma.family import fault

grouped_matmul_tile: Final = Kernel("tritile.families.grouped.kernel", "grouped_matmul_tile")
grouped_matmul_descriptor: Final = Kernel("tritile.families.grouped.kernel_tma", "grouped_matmul_descriptor")

PARAMETERS: Final = ("BLOCK_K", "BLOCK_M", "BLOCK_N", "GROUP_M", "PERSISTENT", "SUBTILES")
FAR: Final = 2**30  # rows of a descriptor that is cut at a group's end, as in its kernel
_MAX_WORDS: Final = 128
_LEAST_LANES: Final = 32
_STEP: Final = 2**34  # elements: 2**30 such strides lead once around the address space, of any element
_MAX_STRIDE: Final = 2**40  # bytes, of a descriptor


def tiles(config: Config, problem: GroupedProblem) -> int:
    """Return the most tiles that groups can have: each group but the largest may leave one partly filled.

    Rows of no group count as one more group: they are filled with zeros.
    """
    m, n = config["BLOCK_M"], -(-problem.n // config["BLOCK_N"])
    made = min(problem.groups + 1, problem.m)
    return (problem.m + made * (m - 1)) // m * n


def shared_bytes(config: Config, problem: GroupedProblem) -> int:
    tile = (config["BLOCK_M"] + config["BLOCK_N"]) * config["BLOCK_K"] * problem.itemsize
    part = config["BLOCK_M"] * config["BLOCK_N"] // config["SUBTILES"] * ITEMSIZE[problem.out_dtype]
    stored = config["PERSISTENT"] and problem.out_align == 16 and problem.out_layout == "row"
    return (tile + BARRIER) * config.num_stages + (part if stored else 0)


def unreachable(problem: GroupedProblem) -> str | None:
    """Say why no tensor descriptor can see the operands, None where one can.

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
    reason = fault(config, problem, device, PARAMETERS) or unreachable(problem)
    if reason is not None:
        return reason
    if tiles(config, problem) >= 2**31:
        return "more programs than a launch counts"
    words = accumulator_words(config, problem, device)
    if words > _MAX_WORDS:
        return f"{words} accumulator registers a thread, of {_MAX_WORDS}"
    return shared_fault(shared_bytes(config, problem), device)


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
            if m * n // (32 * count) > _MAX_WORDS or (persistent and m * n < 64 * 64):
                continue
            for subtiles in (1, 2) if n >= 128 and persistent else (1,):
                kwargs = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8}
                yield Config.of(
                    count, stages, descriptor.NAME, **kwargs, PERSISTENT=persistent, SUBTILES=subtiles
                )


def _tma_pointless(config: Config, problem: GroupedProblem, device: Device) -> bool:
    if config["PERSISTENT"] and tiles(config, problem) <= device.processors:
        return True
    stage = (config["BLOCK_M"] + config["BLOCK_N"]) * config["BLOCK_K"] * problem.itemsize
    if config.num_stages < 5 and shared_bytes(config, problem) + 2 * stage <= device.shared_memory:
        return True  # room for two more stages
    return oversized(config, problem, least_blocks(problem) | {"BLOCK_K": 128})


def _tma_cost(config: Config, problem: GroupedProblem, device: Device) -> Program:
    return descriptor.cost(config, problem.even, device)


def _group_stride(view: View) -> int:
    """Return elements from the matrix of one group to that of the next; 0 where all share one."""
    return view.batch_strides[0] if view.batch_strides else 0


def _args(call: GroupedCall) -> dict[str, Any]:
    a, b, out = call.a, call.b, call.out
    return {
        "a_ptr": Buffer(a.buffer), "b_ptr": Buffer(b.buffer), "out_ptr": Buffer(out.buffer),
        "offs_ptr": Buffer("offs"),
        "scale_a_ptr": None, "scale_b_ptr": None,
        "groups": call.groups, "M": a.shape[0], "N": b.shape[1], "K": a.shape[1],
        "stride_ag": _group_stride(a), "stride_am": a.strides[0], "stride_ak": a.strides[1],
        "stride_bg": _group_stride(b), "stride_bk": b.strides[0], "stride_bn": b.strides[1],
        "stride_og": _group_stride(out), "stride_om": out.strides[0], "stride_on": out.strides[1],
        "stride_sa": 0, "stride_sb": 0,
        "PRECISION": call.precision, "RAGGED": "m", "SCALED": False,
        "BLOCK_G": max(_LEAST_LANES, 1 << (call.groups - 1).bit_length()),
    }  # fmt: skip


def _units(view: View) -> tuple[int, int, int]:
    """Return the largest powers of two that divide a view's group, row and column strides."""
    rows, columns = (grids.unit(step, view.itemsize) for step in view.strides)
    return grids.least_unit(view.batch_strides, view.itemsize), rows, columns


def tile_work(call: GroupedCall, config: Config, processors: int, early: bool) -> Work:
    values = _args(call) | dict(config.kwargs)
    a, b, out = call.a, call.b, call.out
    m, n, k = (values[f"BLOCK_{side}"] for side in "MNK")
    sides = ((a, m, k), (b, k, n), (out, m, n))
    reach = max(rows * view.strides[0] + columns * view.strides[1] for view, rows, columns in sides)
    values |= {
        "ALIGN_N": grids.unit(values["N"], a.itemsize), "ALIGN_K": grids.unit(values["K"], a.itemsize),
        "ALIGN_A": _units(a), "ALIGN_B": _units(b), "ALIGN_OUT": _units(out),
        "MASK_N": values["N"] % n != 0, "MASK_K": values["K"] % k != 0,
        "WIDE": reach >= grids.WIDE_FROM,
    }  # fmt: skip
    grid = (tiles(config, call.problem), 1, 1)
    return Work((step_of(grouped_matmul_tile, grid, values, grids.options(config)),))


def _described(view: View, groups: int, rows: int, columns: int) -> Descriptor:
    """Return the descriptor of an operand, contiguous dimension last, for tiles of `rows` and `columns`."""
    shape, strides, block = view.shape, view.strides, (rows, columns)
    if view.layout == "column":
        shape, strides, block = shape[::-1], strides[::-1], block[::-1]
    unit = 16 // view.itemsize
    sizes = (groups if view.batch_strides else 1, *shape)
    # A dimension of size 1 is never stepped.
    steps = [
        s if size > 1 else unit for size, s in zip(sizes, (_group_stride(view), strides[0]), strict=False)
    ]
    misplaced = view.address % 16 or (strides[1] != 1 and shape[1] > 1)
    if misplaced or any(s % unit or not 0 <= s * view.itemsize < _MAX_STRIDE for s in steps):
        raise TuningError(f"no descriptor sees strides {strides} of {view.itemsize} bytes")
    return Descriptor(view.buffer, sizes, (steps[0], steps[1], 1), (1, *block))


def _cut(whole: Descriptor) -> Descriptor:
    """Return the descriptor of one matrix, which a kernel may end at any row: see `load_cut`."""
    _, columns = whole.shape[1:]
    step = whole.strides[1]
    shape = (grids.WIDE_FROM, grids.WIDE_FROM, FAR, columns)
    return Descriptor(whole.buffer, shape, (_STEP - step, step, step, 1), (1, *whole.block))


def _stored(call: GroupedCall, rows: int, columns: int) -> Descriptor | None:
    out = call.out
    if out.shape[1] * out.itemsize % 16 or out.layout != "row" or (out.shape[0] > 1 and not out.strides[0]):
        return None
    try:
        whole = _described(out, call.groups, rows, columns)
    except TuningError:
        return None
    return _cut(whole)


def descriptor_work(call: GroupedCall, config: Config, processors: int, early: bool) -> Work:
    """Return the launches of products of groups with a config of the descriptor family.

    Raises TuningError where no descriptor can see an operand.
    """
    reason = unreachable(call.problem)
    if reason is not None:
        raise TuningError(reason)
    m, n, k = (config[f"BLOCK_{side}"] for side in "MNK")
    a = _described(call.a, call.groups, m, k)
    b = _described(call.b, call.groups, k, n)
    rows = call.a.layout != "column", call.b.layout != "column"
    a, b = (operand._replace(rounded=call.precision == "tf32") for operand in (a, b))
    out = _stored(call, m, n // config["SUBTILES"])
    values = _args(call) | dict(config.kwargs)
    values |= {
        "a_desc": a, "b_desc": b, "out_desc": out, "BY_DESCRIPTOR": out is not None,
        "A_ROW": rows[0], "B_ROW": rows[1], "WAIT": early,
    }  # fmt: skip
    made = tiles(config, call.problem)
    grid = (min(made, processors) if config["PERSISTENT"] else made, 1, 1)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "launch_pdl": early}
    return Work((step_of(grouped_matmul_descriptor, grid, values, options),))


TILE: Final = Family(
    GroupedProblem.op, tile.NAME, grouped_matmul_tile, _tile_configs, tile.illegal, tile.pointless,
    lambda config, problem, device: tile.cost(config, problem.even, device), tile_work,
)  # fmt: skip
DESCRIPTOR: Final = Family(
    GroupedProblem.op, descriptor.NAME, grouped_matmul_descriptor, _tma_configs, _tma_illegal,
    _tma_pointless, _tma_cost, descriptor_work,
    numerics=functools.partial(of_product, rounding="tma"),
)  # fmt: skip
