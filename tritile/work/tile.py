"""The tile kernels' work: one launch, the tensors as they lie."""

from math import prod
from typing import Any, Final

from tritile.config import Config
from tritile.kernels.matmul import matmul_tile
from tritile.kernels.transpose import transpose_tile
from tritile.views import Call, MatmulCall, TransposeCall, View
from tritile.work.values import Buffer, Step, Work

_MAX_GRID_AXIS: Final = 65535
_WIDE: Final = 2**31 - 2**16  # from here on an index, a block past the end included, may need 64 bits


def _unit(extent: int, itemsize: int) -> int:
    """The largest power of two that divides `extent`, up to 16 bytes of elements."""
    return min(extent & -extent, max(1, 16 // itemsize)) or 1


def _units(view: View, lanes: int = 1) -> tuple[int, int, int]:
    """The same of a view's row, column and batch strides, counted in words of `lanes` to an element."""
    word = view.itemsize // lanes
    batch = min((_unit(lanes * s, word) for s in view.batch_strides if s), default=16 // word)
    return _unit(lanes * view.strides[0], word), _unit(lanes * view.strides[1], word), batch


def _batch(batch_shape: tuple[int, ...], *views: View) -> tuple[tuple[int, ...], ...]:
    """The batch's shape and each operand's strides: never empty, which kernels could not index."""
    if not batch_shape:
        return ((1,), *(((0,),) * len(views)))
    return (batch_shape, *(view.batch_strides for view in views))


def _matmul_args(call: MatmulCall) -> dict[str, Any]:
    """What `matmul_tile` takes that no config decides, by name."""
    a, b, out = call.a, call.b, call.out
    (m, k), n = a.shape, b.shape[1]
    batch_shape, a_batch, b_batch, out_batch = _batch(call.batch_shape, a, b, out)
    exact = call.dtype == "float32" and call.precision == "ieee"
    return {
        "a_ptr": Buffer(0), "b_ptr": Buffer(1), "out_ptr": Buffer(2),
        "M": m, "N": n, "K": k,
        "stride_am": a.strides[0], "stride_ak": a.strides[1],
        "stride_bk": b.strides[0], "stride_bn": b.strides[1],
        "stride_om": out.strides[0], "stride_on": out.strides[1],
        "batch": prod(batch_shape), "batch_shape": batch_shape,
        "a_batch_strides": a_batch, "b_batch_strides": b_batch, "out_batch_strides": out_batch,
        "ALIGN_M": _unit(m, a.itemsize), "ALIGN_N": _unit(n, a.itemsize), "ALIGN_K": _unit(k, a.itemsize),
        "ALIGN_A": _units(a), "ALIGN_B": _units(b), "ALIGN_OUT": _units(out),
        "WIDE": max(a.span, b.span, out.span, m, n, k, prod(batch_shape)) >= _WIDE,
        "PRECISION": call.precision, "COMPENSATED": exact,
    }  # fmt: skip


def _transpose_args(call: TransposeCall) -> dict[str, Any]:
    """What `transpose_tile` takes that no config decides, by name."""
    x, out = call.x, call.out
    m, n = x.shape
    lanes = 2 if x.itemsize == 16 else 1
    word = x.itemsize // lanes
    batch_shape, x_batch, out_batch = _batch(call.batch_shape, x, out)
    return {
        "x_ptr": Buffer(0), "out_ptr": Buffer(1),
        "M": m, "N": n,
        "stride_xm": lanes * x.strides[0], "stride_xn": lanes * x.strides[1],
        "stride_om": lanes * out.strides[0], "stride_on": lanes * out.strides[1],
        "batch": prod(batch_shape), "batch_shape": batch_shape,
        "x_batch_strides": tuple(lanes * stride for stride in x_batch),
        "out_batch_strides": tuple(lanes * stride for stride in out_batch),
        "ALIGN_M": _unit(m, word), "ALIGN_N": _unit(n, word),
        "ALIGN_X": _units(x, lanes), "ALIGN_OUT": _units(out, lanes),
        "WIDE": max(lanes * x.span, lanes * out.span, m, n, prod(batch_shape)) >= _WIDE,
        "LANES": lanes, "FLIP_FIRST": call.flip[0], "FLIP_LAST": call.flip[1],
    }  # fmt: skip


def _masks(values: dict[str, Any]) -> dict[str, bool]:
    """Which edges the tiles overhang."""
    return {f"MASK_{d}": values[d] % values[f"BLOCK_{d}"] != 0 for d in "MNK" if f"BLOCK_{d}" in values}


def _grid(values: dict[str, Any]) -> tuple[int, int, int]:
    """Tiles of a matrix, then matrices, over two axes as one is too short."""
    tiles = -(-values["M"] // values["BLOCK_M"]) * -(-values["N"] // values["BLOCK_N"])
    across = min(values["batch"], _MAX_GRID_AXIS)
    return tiles, across, -(-values["batch"] // across)


def work(call: Call, config: Config) -> Work:
    """What launches `call` with a config of the tile family."""
    kernel = matmul_tile if isinstance(call, MatmulCall) else transpose_tile
    values = _matmul_args(call) if isinstance(call, MatmulCall) else _transpose_args(call)
    values |= dict(config.kwargs)
    values |= _masks(values)
    args = tuple(values[name] for name in kernel.arg_names)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if config.maxnreg is not None:
        options["maxnreg"] = config.maxnreg
    return Work((Step(kernel, _grid(values), args, options),))
