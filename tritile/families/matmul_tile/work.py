"""The work of the tile family's products: one launch, the tensors as they lie."""

from collections.abc import Iterable
from math import prod
from typing import Any, Final

from tritile.core.config import Config
from tritile.core.views import MatmulCall, View
from tritile.families.common.fused import block_scales, extra, up_index, verdict
from tritile.families.common.gated import gated_tile
from tritile.families.common.sums import in_parts, input_precision
from tritile.families.common.work import Buffer, Step, Work
from tritile.families.matmul_tile.kernel import matmul_tile

_MAX_GRID_AXIS: Final = 65535
WIDE_FROM: Final = 2**31 - 2**16  # from here on an index, a block past the end included, may need 64 bits


def unit(extent: int, itemsize: int) -> int:
    """The largest power of two that divides `extent`, up to 16 bytes of elements."""
    return min(extent & -extent, max(1, 16 // itemsize)) or 1


def least_unit(strides: Iterable[int], itemsize: int) -> int:
    """The same that divides all of these; one of 0 is never stepped."""
    return min((unit(step, itemsize) for step in strides if step), default=16 // itemsize)


def _units(view: View) -> tuple[int, int, int]:
    """The same of a view's row, column and batch strides."""
    rows, columns = (unit(step, view.itemsize) for step in view.strides)
    return rows, columns, least_unit(view.batch_strides, view.itemsize)


def _batch(batch_shape: tuple[int, ...], *views: View) -> tuple[tuple[int, ...], ...]:
    """The batch's shape and each operand's strides: never empty, which kernels could not index."""
    if not batch_shape:
        return ((1,), *(((0,),) * len(views)))
    return (batch_shape, *(view.batch_strides for view in views))


def _args(call: MatmulCall) -> dict[str, Any]:
    """What `matmul_tile` takes that no config decides, by name."""
    a, b, out = call.a, call.b, call.out
    (m, k), n = a.shape, b.shape[1]
    batch_shape, a_batch, b_batch, out_batch = _batch(call.batch_shape, a, b, out)
    scales, shared = block_scales(call)
    word, verdicts = verdict(call)
    spans = [view.span for view in (a, b, out, call.up) if view is not None]
    exact = call.dtype == "float32" and call.precision == "ieee"
    return {
        "a_ptr": Buffer(0), "b_ptr": Buffer(1), "out_ptr": Buffer(2),
        "M": m, "N": n, "K": k,
        "stride_am": a.strides[0], "stride_ak": a.strides[1],
        "stride_bk": b.strides[0], "stride_bn": b.strides[1],
        "stride_om": out.strides[0], "stride_on": out.strides[1],
        "batch": prod(batch_shape), "batch_shape": batch_shape,
        "a_batch_strides": a_batch, "b_batch_strides": b_batch, "out_batch_strides": out_batch,
        "scales": scales, "SCALE_BLOCKS": shared,
        "extra": extra(call, len(batch_shape)), "EPILOGUE": call.fused.epilogue.constants,
        "ALIGN_M": unit(m, a.itemsize), "ALIGN_N": unit(n, a.itemsize), "ALIGN_K": unit(k, a.itemsize),
        "ALIGN_A": _units(a), "ALIGN_B": _units(b), "ALIGN_OUT": _units(out),
        "WIDE": max(*spans, m, n, k, prod(batch_shape)) >= WIDE_FROM,
        "PRECISION": input_precision(call), "COMPENSATED": exact, "PROMOTE": in_parts(call),
        "verdict_ptr": word, "VERDICTS": verdicts,
    }  # fmt: skip


def _up_args(call: MatmulCall) -> dict[str, Any]:
    """The same that `gated_tile` takes besides."""
    if call.up is None:
        return {}
    up = call.up
    _, up_batch = _batch(call.batch_shape, up)
    return {
        "up_ptr": Buffer(up_index(call)), "stride_uk": up.strides[0], "stride_un": up.strides[1],
        "up_batch_strides": up_batch, "ALIGN_UP": _units(up),
    }  # fmt: skip


def _masks(values: dict[str, Any]) -> dict[str, bool]:
    """Which edges the tiles of a product overhang."""
    return {f"MASK_{d}": values[d] % values[f"BLOCK_{d}"] != 0 for d in "MNK"}


def grid(tiles: int, batch: int) -> tuple[int, int, int]:
    """Tiles of a matrix, then matrices, over two axes as one is too short."""
    across = min(batch, _MAX_GRID_AXIS)
    return tiles, across, -(-batch // across)


def options(config: Config) -> dict[str, Any]:
    """How to compile a kernel for a config."""
    found = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return found if config.maxnreg is None else found | {"maxnreg": config.maxnreg}


def work(call: MatmulCall, config: Config) -> Work:
    """What launches a product with a config of the tile family."""
    values = _args(call) | _up_args(call) | dict(config.kwargs)
    kernel = matmul_tile if call.up is None else gated_tile
    values |= _masks(values)
    tiles = -(-values["M"] // values["BLOCK_M"]) * -(-values["N"] // values["BLOCK_N"])
    args = tuple(values[name] for name in kernel.arg_names)
    return Work((Step(kernel, grid(tiles, values["batch"]), args, options(config)),))
