"""The work of products of groups, of both families: one launch, the tensors as they lie."""

from typing import Any, Final

from tritile.core.config import Config
from tritile.core.views import GroupedCall, View
from tritile.errors import TuningError
from tritile.families.common.work import Buffer, Descriptor, Step, Work
from tritile.families.grouped.family import tiles, unreachable
from tritile.families.grouped.kernel import grouped_matmul_tile
from tritile.families.grouped.kernel_tma import FAR, grouped_matmul_descriptor
from tritile.families.matmul_tile import work as tile

_LEAST_LANES: Final = 32
_STEP: Final = (
    2**34
)  # elements: 2**30 steps of it lead once around the address space, whatever an element has
_MAX_STRIDE: Final = 2**40  # bytes, of a descriptor


def _group_stride(view: View) -> int:
    """Elements from the matrix of one group to the next one's; 0 where all share one."""
    return view.batch_strides[0] if view.batch_strides else 0


def _args(call: GroupedCall) -> dict[str, Any]:
    """What both kernels take that no config decides, by name."""
    a, b, out = call.a, call.b, call.out
    buffers = iter(range(3, len(call.tensors)))
    offs = None if call.offs is None else Buffer(next(buffers))
    scales: list[Any] = [Buffer(next(buffers)) for _ in call.scales or ()] or [None, None]
    steps = [own.stride for own in call.scales or ()] or [0, 0]
    return {
        "a_ptr": Buffer(0), "b_ptr": Buffer(1), "out_ptr": Buffer(2), "offs_ptr": offs,
        "scale_a_ptr": scales[0], "scale_b_ptr": scales[1],
        "groups": call.groups, "M": a.shape[0], "N": b.shape[1], "K": a.shape[1],
        "stride_ag": _group_stride(a), "stride_am": a.strides[0], "stride_ak": a.strides[1],
        "stride_bg": _group_stride(b), "stride_bk": b.strides[0], "stride_bn": b.strides[1],
        "stride_og": _group_stride(out), "stride_om": out.strides[0], "stride_on": out.strides[1],
        "stride_sa": steps[0], "stride_sb": steps[1],
        "PRECISION": call.precision, "RAGGED": call.ragged, "SCALED": call.scales is not None,
        "BLOCK_G": max(_LEAST_LANES, 1 << (call.groups - 1).bit_length()) if offs else _LEAST_LANES,
    }  # fmt: skip


def _units(view: View) -> tuple[int, int, int]:
    """The largest powers of two that divide a view's group, row and column strides."""
    rows, columns = (tile.unit(step, view.itemsize) for step in view.strides)
    return tile.least_unit(view.batch_strides, view.itemsize), rows, columns


def tile_work(call: GroupedCall, config: Config, processors: int, early: bool) -> Work:
    """What launches products of groups with a config of the tile family."""
    values = _args(call) | dict(config.kwargs)
    a, b, out = call.a, call.b, call.out
    m, n, k = (values[f"BLOCK_{side}"] for side in "MNK")
    sides = ((a, m, k), (b, k, n), (out, m, n))
    reach = max(rows * view.strides[0] + columns * view.strides[1] for view, rows, columns in sides)
    values |= {
        "ALIGN_N": tile.unit(values["N"], a.itemsize), "ALIGN_K": tile.unit(values["K"], a.itemsize),
        "ALIGN_A": _units(a), "ALIGN_B": _units(b), "ALIGN_OUT": _units(out),
        "MASK_N": values["N"] % n != 0, "MASK_K": call.ragged == "k" or values["K"] % k != 0,
        "WIDE": reach >= tile.WIDE_FROM,
    }  # fmt: skip
    args = tuple(values[name] for name in grouped_matmul_tile.arg_names)
    grid = (tiles(config, call.problem), 1, 1)
    return Work((Step(grouped_matmul_tile, grid, args, tile.options(config)),))


def _described(view: View, buffer: int, groups: int, rows: int, columns: int) -> Descriptor:
    """The descriptor of an operand, its contiguous dimension last, for tiles of so many rows and columns."""
    shape, strides, block = view.shape, view.strides, (rows, columns)
    if view.layout == "column":
        shape, strides, block = shape[::-1], strides[::-1], block[::-1]
    unit = 16 // view.itemsize
    sizes = (groups if view.batch_strides else 1, *shape)
    # A dimension of size 1 is never stepped.
    steps = [
        s if size > 1 else unit for size, s in zip(sizes, (_group_stride(view), strides[0]), strict=False)
    ]
    misplaced = view.tensor.data_ptr() % 16 or (strides[1] != 1 and shape[1] > 1)
    if misplaced or any(s % unit or not 0 <= s * view.itemsize < _MAX_STRIDE for s in steps):
        raise TuningError(f"no descriptor sees strides {strides} of {view.itemsize} bytes")
    return Descriptor(buffer, sizes, (steps[0], steps[1], 1), (1, *block))


def _cut(whole: Descriptor) -> Descriptor:
    """The same of one matrix, which a kernel can have end at any row: see `grouped_descriptor.load_cut`."""
    _, columns = whole.shape[1:]
    step = whole.strides[1]
    shape = (2**31 - 2**16, 2**31 - 2**16, FAR.value, columns)
    return Descriptor(whole.buffer, shape, (_STEP - step, step, step, 1), (1, *whole.block))


def _stored(call: GroupedCall, rows: int, columns: int) -> Descriptor | None:
    """The descriptor that stores tiles of the result; None where none can: see `operands.storable`."""
    out = call.out
    if out.shape[1] * out.itemsize % 16 or out.layout != "row" or (out.shape[0] > 1 and not out.strides[0]):
        return None
    try:
        whole = _described(out, 2, call.groups, rows, columns)
    except TuningError:
        return None
    return _cut(whole) if call.ragged == "m" else whole


def descriptor_work(call: GroupedCall, config: Config, processors: int, early: bool) -> Work:
    """What launches products of groups with a config of the descriptor family.

    `early`: the kernel may start before the one ahead of it is done, and waits in itself.
    Raises TuningError where no descriptor can see an operand.
    """
    reason = unreachable(call.problem)
    if reason is not None:
        raise TuningError(reason)
    m, n, k = (config[f"BLOCK_{side}"] for side in "MNK")
    a = _described(call.a, 0, call.groups, m, k)
    b = _described(call.b, 1, call.groups, k, n)
    rows = call.a.layout != "column", call.b.layout != "column"
    if call.ragged == "k":
        a, b = _cut(a), _cut(b)
    a, b = (operand._replace(rounded=call.precision == "tf32") for operand in (a, b))
    out = _stored(call, m, n // config["SUBTILES"])
    values = _args(call) | dict(config.kwargs)
    values |= {
        "a_desc": a, "b_desc": b, "out_desc": out, "BY_DESCRIPTOR": out is not None,
        "A_ROW": rows[0], "B_ROW": rows[1], "WAIT": early,
    }  # fmt: skip
    args = tuple(values[name] for name in grouped_matmul_descriptor.arg_names)
    made = tiles(config, call.problem)
    grid = (min(made, processors) if config["PERSISTENT"] else made, 1, 1)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "launch_pdl": early}
    return Work((Step(grouped_matmul_descriptor, grid, args, options),))
