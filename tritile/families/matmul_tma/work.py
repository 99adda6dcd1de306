"""The work of kernels whose tiles travel by tensor descriptor, of both families.

An operand that no descriptor can read, as its rows do not start on 16 bytes, or whose layout tensor cores do
not take, is copied first into a workspace. The result goes straight to its place, by descriptor or by
pointers.
"""

from typing import Any, Final, NamedTuple

from triton.experimental.gluon import language as gl

from tritile.core.config import Config
from tritile.core.views import MatmulCall
from tritile.errors import TuningError
from tritile.families.common.fused import block_scales, extra, verdict
from tritile.families.common.gated import gated_descriptor
from tritile.families.common.operands import Seen, batch_of, described, inputs, storable
from tritile.families.common.sums import in_parts, input_precision, promoted_turns
from tritile.families.common.work import Buffer, Section, Step, Work
from tritile.families.matmul_tma.kernel import matmul_descriptor
from tritile.families.matmul_wgmma import family as warpgroups
from tritile.families.matmul_wgmma.kernel import matmul_warpgroups

_MAX_AXIS: Final = 65535  # programs, of the second and third axis of a grid
_MAX_EXTENT: Final = 2**31 - 2**16  # coordinates are 32 bits
_POLLS: Final = 64  # some 40 us: longer than parts of one tile lie apart where all programs run at once


class _Output(NamedTuple):
    seen: Seen
    by_descriptor: bool
    strides: tuple[int, ...]


def _output(call: MatmulCall) -> _Output:
    """The result as it is stored; `strides`, over batch, rows and columns, serve where no descriptor can."""
    (outer, inner), batch_strides = batch_of(call, call.out)
    seen = Seen(2, (outer, inner, *call.out.shape), (*batch_strides, *call.out.strides), False)
    by_descriptor = storable(seen, call.out)
    return _Output(described(seen, call.out.itemsize) if by_descriptor else seen, by_descriptor, seen.strides)


def _checked(call: MatmulCall) -> None:
    sizes = (call.a.shape[0], call.a.shape[1], call.b.shape[1], *call.batch_shape)
    if max(sizes) > _MAX_EXTENT:
        raise TuningError(f"a size of {max(sizes)}: descriptors count in 32 bits")


def _sizes(call: MatmulCall) -> tuple[int, ...]:
    (outer, inner), _ = batch_of(call, call.out)
    return (call.a.shape[0], call.b.shape[1], call.a.shape[1], outer * inner, inner)


def _grid(call: MatmulCall, config: Config, split: int, processors: int) -> tuple[tuple[int, int, int], bool]:
    """The programs to launch, and whether they have an axis each for rows, columns and the rest of tiles.

    The rest is the batch, or the parts of K. Such a grid spares divisions, where its order does as well:
    all tiles at once, or whole columns of them as bands.
    """
    m, n, _, batch, _ = _sizes(call)
    rows, columns = -(-m // config["BLOCK_M"]), -(-n // config["BLOCK_N"])
    tiles, rest = rows * columns * batch, max(batch, split)
    if config["PERSISTENT"]:
        return (min(tiles, processors), 1, 1), False
    in_order = tiles <= processors or config["GROUP_M"] >= rows
    if in_order and min(batch, split) == 1 and max(columns, rest) <= _MAX_AXIS:
        return (rows, columns, rest), True
    return (tiles, split, 1), False


def descriptor_work(call: MatmulCall, config: Config, processors: int, early: bool) -> Work:
    """What launches `call` with a config of the descriptor family on a GPU of so many processors.

    `early`: kernels may start before the one ahead of them is done, and wait in themselves.
    Raises TuningError where no descriptor can see the operands.
    """
    _checked(call)
    if call.up is not None:
        return _gated_work(call, config, processors, early)
    read, out = inputs(call, early), _output(call)
    m, n, k, batch, inner = _sizes(call)
    block_m, block_n, block_k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    tiles, split = batch * -(-m // block_m) * -(-n // block_n), config["SPLIT_K"]
    if -(-k // block_k) < split:
        raise TuningError(f"SPLIT_K = {split} leaves programs without a block of K = {k}")
    scratch = read.scratch
    by_descriptor = out.by_descriptor and split == 1  # shared tiles are stored by rows
    parts = counters = None
    if split > 1:
        first = len(call.tensors) + len(scratch)
        parts, counters = Buffer(first), Buffer(first + 1)
        kind = "int32" if call.dtype == "int8" else "float32"
        scratch = (*scratch, Section(kind, tiles * split * block_m * block_n))
    grid, flat = _grid(call, config, split, processors)
    scales, shared = block_scales(call)
    word, verdicts = verdict(call)
    rounded = call.precision == "tf32"
    args = (
        read.a.descriptor(block_m, block_k, rounded=rounded),
        read.b.descriptor(block_k, block_n, rounded=rounded),
        out.seen.descriptor(block_m, block_n // config["SUBTILES"]) if by_descriptor else None,
        Buffer(2), parts, counters, m, n, k, batch, inner, *out.strides, scales, extra(call, 2), word,
        not read.a.transposed, not read.b.transposed, by_descriptor, input_precision(call), early,
        _POLLS if tiles * split <= processors else 0, flat, batch > 1,
        in_parts(call), verdicts, shared, call.fused.epilogue.constants,
        block_m, block_n, block_k, config["GROUP_M"], config["PERSISTENT"], split, config["SUBTILES"],
    )  # fmt: skip
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "launch_pdl": early}
    step = Step(matmul_descriptor, grid, args, options)
    return Work((*read.steps, step), scratch, tiles if split > 1 else 0)


def _gated_work(call: MatmulCall, config: Config, processors: int, early: bool) -> Work:
    """The same of a gated product, whose tiles no programs share."""
    read, out = inputs(call, early), _output(call)
    m, n, k, batch, inner = _sizes(call)
    block_m, block_n, block_k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    grid, flat = _grid(call, config, 1, processors)
    rounded = call.precision == "tf32"
    args = (
        read.a.descriptor(block_m, block_k, rounded=rounded),
        read.b.descriptor(block_k, block_n, rounded=rounded),
        read.up.descriptor(block_k, block_n, rounded=rounded),
        out.seen.descriptor(block_m, block_n // config["SUBTILES"]) if out.by_descriptor else None,
        Buffer(2), m, n, k, batch, inner, *out.strides, extra(call, 2),
        not read.a.transposed, not read.b.transposed, not read.up.transposed, out.by_descriptor,
        call.precision, early, flat, batch > 1, call.fused.epilogue.constants,
        block_m, block_n, block_k, config["GROUP_M"], config["PERSISTENT"], config["SUBTILES"],
    )  # fmt: skip
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "launch_pdl": early}
    return Work((*read.steps, Step(gated_descriptor, grid, args, options)), read.scratch)


_GLUON_DTYPES: Final = {"float8_e4m3fn": gl.float8e4nv, "float8_e5m2": gl.float8e5}


def _swizzled(dtype: str) -> Any:
    """The layout in shared memory of a block of this dtype."""
    kind = _GLUON_DTYPES.get(dtype) or getattr(gl, dtype)
    return lambda block: gl.NVMMASharedLayout.get_default_for(list(block), kind)


def warpgroups_work(call: MatmulCall, config: Config, processors: int, early: bool) -> Work:
    """The same with a config of the warpgroups family."""
    _checked(call)
    read, out = inputs(call, early), _output(call)
    m, n, k, batch, inner = _sizes(call)
    block_m, block_n, block_k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    consumers, main = config["CONSUMERS"], warpgroups.main_columns(config)
    rows, rest = block_m // consumers, block_n - main
    grid, flat = _grid(call, config, 1, processors)
    inward, outward = _swizzled(call.dtype), _swizzled(call.out_dtype)
    by = out.by_descriptor
    scales, shared = block_scales(call)
    word, verdicts = verdict(call)
    args = (
        read.a.descriptor(rows, block_k, inward),
        read.b.descriptor(block_k, main, inward),
        read.b.descriptor(block_k, rest, inward) if rest else None,
        out.seen.descriptor(rows, main // config["SUBTILES"], outward) if by else None,
        out.seen.descriptor(rows, rest, outward) if by and rest else None,
        Buffer(2), m, n, k, batch, inner, *out.strides, scales, extra(call, 2), word,
        not read.a.transposed, not read.b.transposed, by, early,
        main, warpgroups.REGISTERS[consumers], config.num_stages, flat, batch > 1,
        shared, call.fused.epilogue.constants, promoted_turns(call, config), in_parts(call), verdicts,
        block_m, block_n, block_k, config["GROUP_M"], consumers, config["PERSISTENT"], config["SUBTILES"],
    )  # fmt: skip
    step = Step(matmul_warpgroups, grid, args, {"num_warps": config.num_warps, "launch_pdl": early})
    return Work((*read.steps, step), read.scratch)
