"""The work of tile kernels and the packed one: one launch, the tensors as they lie."""

from collections.abc import Iterable
from math import prod
from typing import Any, Final

from tritile.config import Config
from tritile.kernels.matmul import matmul_tile
from tritile.kernels.packed import permute_packed
from tritile.kernels.permute import permute_tile, transpose_in_place
from tritile.space import packed
from tritile.views import Call, MatmulCall, PermuteCall, View
from tritile.work.values import Buffer, Step, Work

_MAX_GRID_AXIS: Final = 65535
_WIDE: Final = 2**31 - 2**16  # from here on an index, a block past the end included, may need 64 bits


def _unit(extent: int, itemsize: int) -> int:
    """The largest power of two that divides `extent`, up to 16 bytes of elements."""
    return min(extent & -extent, max(1, 16 // itemsize)) or 1


def _least_unit(strides: Iterable[int], itemsize: int) -> int:
    """The same that divides all of these; one of 0 is never stepped."""
    return min((_unit(step, itemsize) for step in strides if step), default=16 // itemsize)


def _units(view: View) -> tuple[int, int, int]:
    """The same of a view's row, column and batch strides."""
    rows, columns = (_unit(step, view.itemsize) for step in view.strides)
    return rows, columns, _least_unit(view.batch_strides, view.itemsize)


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


def _digits(sizes: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """(size, magic, shift) of each dimension but the last, by which nothing divides; never empty.

    For index from 0 to 2^31 - 1, index // size is the upper half of the 64 bits of index * magic,
    shifted right by shift. The magic number, of 32 bits, is given as a signed one.
    """
    digits = []
    for size in sizes[:-1]:
        bits = (size - 1).bit_length()
        digits.append((size, -(-(1 << (31 + bits)) // size) - 2**32, bits - 1))
    return tuple(digits) or ((1, 0, 0),)


def _permute_args(call: PermuteCall) -> dict[str, Any]:
    """What `permute_tile` takes that no config decides, by name."""
    problem, (m, n, batch) = call.problem, call.problem.plane
    lanes = 2 if problem.itemsize == 16 else 1
    word = problem.itemsize // lanes
    sizes = problem.shape
    x, out = (tuple(lanes * step for step in steps) for steps in (problem.x_strides, problem.out_strides))

    def of(values: tuple[int, ...], dims: tuple[int, ...], none: int) -> tuple[int, ...]:
        return tuple(values[i] for i in dims) or (none,)

    x_m, x_batch = of(x, m, 0), of(x, batch, 0)
    x_n_sizes, x_n = problem.n_digits
    x_n = tuple(lanes * step for step in x_n)
    out_m, out_n, out_batch = of(out, m, 0), of(out, n, 0), of(out, batch, 0)
    spans = (lanes * span for span in problem.spans)
    return {
        "x_ptr": Buffer(0), "out_ptr": Buffer(1),
        "M": problem.m, "N": problem.n,
        "m_digits": _digits(of(sizes, m, 1)), "n_digits": _digits(of(sizes, n, 1)), "x_m_strides": x_m,
        "x_n_digits": _digits(x_n_sizes), "x_n_strides": x_n,
        "stride_om": out_m[0], "out_n_strides": out_n,
        "batch": problem.batch, "batch_shape": of(sizes, batch, 1),
        "x_batch_strides": x_batch, "out_batch_strides": out_batch,
        "ALIGN_M": _unit(problem.m, word), "ALIGN_N": _unit(problem.n, word),
        "ALIGN_X": tuple(_least_unit(steps, word) for steps in (x_m, x_n, x_batch)),
        "ALIGN_OUT": tuple(_least_unit(steps, word) for steps in (out_m[:1], out_n, out_batch)),
        "WIDE": max(*spans, problem.m, problem.n, problem.batch) >= _WIDE,
        "TURN": problem.turns, "LANES": lanes, "FLIP_FIRST": call.flip[0], "FLIP_LAST": call.flip[1],
    }  # fmt: skip


def _masks(values: dict[str, Any]) -> dict[str, bool]:
    """Which edges the tiles of a product overhang."""
    return {f"MASK_{d}": values[d] % values[f"BLOCK_{d}"] != 0 for d in "MNK"}


def uneven(extent: int, block: int) -> bool:
    """Whether tiles of `block` that overlap to cover `extent` would copy more than an eighth of it twice."""
    return extent < block or 8 * (-(-extent // block) * block) > 9 * extent


def _grid(values: dict[str, Any], rows: int) -> tuple[int, int, int]:
    """Tiles of so many rows of a matrix, then matrices, over two axes as one is too short."""
    tiles = -(-rows // values["BLOCK_M"]) * -(-values["N"] // values["BLOCK_N"])
    across = min(values["batch"], _MAX_GRID_AXIS)
    return tiles, across, -(-values["batch"] // across)


def _in_place(call: PermuteCall, config: Config) -> Work:
    """What transposes square matrices where they lie."""
    problem = call.problem
    lanes = 2 if problem.itemsize == 16 else 1
    x, out = problem.x_strides, problem.out_strides
    first, second = (i for i in range(len(x)) if x[i] != out[i])
    shape, strides = call.batch_shape or (1,), tuple(lanes * x[i] for i in call.batch_dims) or (0,)
    size, block = problem.shape[first], config["BLOCK_M"]
    tiles, batch = -(-size // block), prod(shape)
    across = min(batch, _MAX_GRID_AXIS)
    wide = max(lanes * span for span in problem.spans) >= _WIDE
    args = (
        Buffer(0), size, lanes * x[first], lanes * x[second], batch, shape, strides, tiles,
        lanes, wide, *call.flip, block,
    )  # fmt: skip
    grid = (tiles * tiles, across, -(-batch // across))
    return Work((Step(transpose_in_place, grid, args, {"num_warps": config.num_warps}),))


def work(call: Call, config: Config, early: bool) -> Work:
    """What launches `call` with a config of the tile or packed family; in place, of `space.tile.in_place`.

    `early`: permutations may start before the kernel ahead of them is done, and wait in themselves.
    """
    if isinstance(call, PermuteCall) and call.in_place:
        return _in_place(call, config)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if config.maxnreg is not None:
        options["maxnreg"] = config.maxnreg
    if isinstance(call, MatmulCall):
        kernel, values = matmul_tile, _matmul_args(call) | dict(config.kwargs)
        values |= _masks(values)
        rows = values["M"]
    else:
        packs = config.family == packed.NAME
        kernel, values = permute_packed if packs else permute_tile, _permute_args(call) | dict(config.kwargs)
        rows = packed.whole_rows(call.problem) if packs else call.problem.m
        lanes = packed.WORD // call.problem.itemsize if packs else 1
        values["UNEVEN_M"] = uneven(rows // lanes, config["BLOCK_M"] // lanes)
        values["UNEVEN_N"] = uneven(call.problem.n, config["BLOCK_N"])
        values["WAIT"] = options["launch_pdl"] = early
        rows = rows // lanes * lanes
    args = tuple(values[name] for name in kernel.arg_names)
    return Work((Step(kernel, _grid(values, rows), args, options),))
