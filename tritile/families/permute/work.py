"""The work of permutations: one launch, the tensors as they lie."""

from math import prod
from typing import Any

from tritile.core.config import Config
from tritile.core.views import PermuteCall
from tritile.families.common.work import Buffer, Step, Work
from tritile.families.matmul_tile import work as tile
from tritile.families.matmul_tile.family import uneven
from tritile.families.permute import family as packed
from tritile.families.permute.kernel import permute_tile, transpose_in_place
from tritile.families.permute.packed import permute_packed


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


def _args(call: PermuteCall) -> dict[str, Any]:
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
        "ALIGN_M": tile.unit(problem.m, word), "ALIGN_N": tile.unit(problem.n, word),
        "ALIGN_X": tuple(tile.least_unit(steps, word) for steps in (x_m, x_n, x_batch)),
        "ALIGN_OUT": tuple(tile.least_unit(steps, word) for steps in (out_m[:1], out_n, out_batch)),
        "WIDE": max(*spans, problem.m, problem.n, problem.batch) >= tile.WIDE_FROM,
        "TURN": problem.turns, "LANES": lanes, "FLIP_FIRST": call.flip[0], "FLIP_LAST": call.flip[1],
    }  # fmt: skip


def _in_place(call: PermuteCall, config: Config) -> Work:
    """What transposes square matrices where they lie."""
    problem = call.problem
    lanes = 2 if problem.itemsize == 16 else 1
    x, out = problem.x_strides, problem.out_strides
    first, second = (i for i in range(len(x)) if x[i] != out[i])
    shape, strides = call.batch_shape or (1,), tuple(lanes * x[i] for i in call.batch_dims) or (0,)
    size, block = problem.shape[first], config["BLOCK_M"]
    tiles, batch = -(-size // block), prod(shape)
    wide = max(lanes * span for span in problem.spans) >= tile.WIDE_FROM
    args = (
        Buffer(0), size, lanes * x[first], lanes * x[second], batch, shape, strides, tiles,
        lanes, wide, *call.flip, block,
    )  # fmt: skip
    grid = tile.grid(tiles * tiles, batch)
    return Work((Step(transpose_in_place, grid, args, {"num_warps": config.num_warps}),))


def work(call: PermuteCall, config: Config, early: bool) -> Work:
    """What launches a permutation with a config of its families; in place, of `space.tile.in_place`.

    `early`: it may start before the kernel ahead of it is done, and waits in itself.
    """
    if call.in_place:
        return _in_place(call, config)
    kernel, rows, lanes = permute_tile, call.problem.m, 1
    if config.family == packed.NAME:
        kernel, rows = permute_packed, packed.whole_rows(call.problem)
        lanes = packed.WORD // call.problem.itemsize
    # Rows and columns of the matrix, and of a tile; rows are words where words are what is tiled.
    m, block_m = rows // lanes, config["BLOCK_M"] // lanes
    n, block_n = call.problem.n, config["BLOCK_N"]
    values = _args(call) | dict(config.kwargs)
    values |= {"UNEVEN_M": uneven(m, block_m), "UNEVEN_N": uneven(n, block_n), "WAIT": early}
    tiles = -(-m // block_m) * -(-n // block_n)
    args = tuple(values[name] for name in kernel.arg_names)
    options = tile.options(config) | {"launch_pdl": early}
    return Work((Step(kernel, tile.grid(tiles, call.problem.batch), args, options),))
