"""Describe products by tensor descriptor: their result, sizes and grid, whichever family makes them."""

from typing import Any, Final, NamedTuple

from tritile.core.call import MatmulCall
from tritile.core.config import Config
from tritile.families.common.operands import Inputs, Seen, batch_of, described, storable
from tritile.families.common.work import Buffer, epilogue_arguments, fallback_arguments

BARRIER: Final = 8  # bytes of shared memory that a stage of a TMA pipeline takes beside its tiles
_MAX_AXIS: Final = 65535  # programs along the second and third axis of a grid


class Output(NamedTuple):
    """Hold the result's descriptor, and its strides over batch, rows and columns where it can have none."""

    seen: Seen
    by_descriptor: bool
    strides: tuple[int, ...]


def output_of(call: MatmulCall) -> Output:
    """Return the output of the result; `strides`, over batch, rows and columns, serve without descriptor."""
    (outer, inner), batch_strides = batch_of(call, call.out)
    shape, strides = (outer, inner, *call.out.shape), (*batch_strides, *call.out.strides)
    seen = Seen(call.out.buffer, shape, strides, False)
    by_descriptor = storable(seen, call.out)
    return Output(described(seen, call.out.itemsize) if by_descriptor else seen, by_descriptor, seen.strides)


def sizes_of(call: MatmulCall) -> tuple[int, ...]:
    (outer, inner), _ = batch_of(call, call.out)
    return (call.a.shape[0], call.b.shape[1], call.a.shape[1], outer * inner, inner)


def grid_of(
    call: MatmulCall, config: Config, split: int, processors: int
) -> tuple[tuple[int, int, int], bool]:
    """Return the grid, and whether rows, columns and the rest of the tiles have an axis each.

    The rest is the batch, or the parts of K. Such a grid saves divisions, where its order is as good: all
    tiles at once, or whole columns of them as bands.
    """
    m, n, _, batch, _ = sizes_of(call)
    rows, columns = -(-m // config["BLOCK_M"]), -(-n // config["BLOCK_N"])
    tiles, rest = rows * columns * batch, max(batch, split)
    if config["PERSISTENT"]:
        return (min(tiles, processors), 1, 1), False
    in_order = tiles <= processors or config["GROUP_M"] >= rows
    if in_order and min(batch, split) == 1 and max(columns, rest) <= _MAX_AXIS:
        return (rows, columns, rest), True
    return (tiles, split, 1), False


def arguments(call: MatmulCall, config: Config, read: Inputs, out: Output, early: bool) -> dict[str, Any]:
    """Return the arguments that all kernels share whose tiles travel by TMA, by name."""
    m, n, k, batch, inner = sizes_of(call)
    names = ("stride_oo", "stride_oi", "stride_om", "stride_on")
    return {
        "out_ptr": Buffer(call.out.buffer),
        "M": m, "N": n, "K": k, "batch": batch, "inner_batch": inner,
        **dict(zip(names, out.strides, strict=True)),
        **fallback_arguments(call), **epilogue_arguments(call, 2),
        "A_ROW": not read.a.transposed, "B_ROW": not read.b.transposed, "UP_ROW": not read.up.transposed,
        "BY_DESCRIPTOR": out.by_descriptor, "WAIT": early, "BATCHED": batch > 1, **dict(config.kwargs),
    }  # fmt: skip
