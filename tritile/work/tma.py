"""The work of kernels whose tiles travel by tensor descriptor, of both families.

An operand that no descriptor can read, as its rows do not start on 16 bytes, is copied first into a
workspace where they do. The result goes straight to its place, by descriptor or by pointers.
"""

from typing import Any, Final, NamedTuple

from triton.experimental.gluon import language as gl

from tritile.config import Config
from tritile.errors import TuningError
from tritile.kernels.descriptor import matmul_descriptor
from tritile.kernels.repack import repack
from tritile.kernels.warpgroups import matmul_warpgroups
from tritile.space import warpgroups
from tritile.views import MatmulCall, View
from tritile.work.values import Buffer, Descriptor, Section, Step, Work

_MAX_EXTENT: Final = 2**31 - 2**16  # coordinates are 32 bits
_MAX_STRIDE: Final = 2**40  # bytes, of a descriptor
_ROW_BYTES: Final = 128  # rows of a copy start on this many bytes
_POLLS: Final = 64  # some 40 us: longer than parts of one tile lie apart where all programs run at once
_COPIED: Final = (8, 256, 4)  # rows and columns of a copied tile, and its warps: the fastest measured


class Seen(NamedTuple):
    """An operand as a descriptor sees it: a batch of two dimensions of matrices whose rows are contiguous.

    `transposed`: rows are the operand's columns.
    """

    buffer: int
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    transposed: bool

    def descriptor(self, rows: int, columns: int, layout: Any = None) -> Descriptor:
        """The descriptor for tiles of so many of the operand's own rows and columns."""
        block = (1, 1, columns, rows) if self.transposed else (1, 1, rows, columns)
        return Descriptor(self.buffer, self.shape, self.strides, block, layout and layout(block))


def _batch(call: MatmulCall, view: View) -> tuple[tuple[int, int], tuple[int, int]]:
    """Sizes and strides of the batch, as two dimensions."""
    if len(call.batch_shape) > 2:
        raise TuningError(
            f"a batch of {len(call.batch_shape)} dimensions that do not merge: descriptors have 2"
        )
    sizes = (1,) * (2 - len(call.batch_shape)) + call.batch_shape
    strides = (0,) * (2 - len(call.batch_shape)) + view.batch_strides
    return (sizes[0], sizes[1]), (strides[0], strides[1])


def _seen(call: MatmulCall, view: View, index: int) -> Seen:
    """The operand with its contiguous dimension last, whether or not a descriptor can read it."""
    (outer, inner), (stride_o, stride_i) = _batch(call, view)
    (rows, columns), (stride_r, stride_c) = view.shape, view.strides
    transposed = view.layout == "column"
    if transposed:
        rows, columns, stride_r, stride_c = columns, rows, stride_c, stride_r
    return Seen(index, (outer, inner, rows, columns), (stride_o, stride_i, stride_r, stride_c), transposed)


def _readable(seen: Seen, view: View) -> bool:
    """Whether a descriptor can read the operand where it lies."""
    if view.tensor.data_ptr() % 16 or (seen.strides[3] != 1 and seen.shape[3] > 1):
        return False
    steps = [s * view.itemsize for size, s in zip(seen.shape[:3], seen.strides[:3], strict=True) if size > 1]
    return all(0 <= step < _MAX_STRIDE and step % 16 == 0 for step in steps)


def _described(seen: Seen, itemsize: int) -> Seen:
    """The same with strides that a descriptor takes where a dimension of size 1 is never stepped."""
    unit = 16 // itemsize
    steps = [s if size > 1 else unit for size, s in zip(seen.shape[:3], seen.strides[:3], strict=True)]
    return seen._replace(strides=(steps[0], steps[1], steps[2], 1))


class _Copy(NamedTuple):
    args: tuple[Any, ...]
    seen: Seen
    section: Section
    tiles: int


def _copy(seen: Seen, view: View, dtype: str, index: int) -> _Copy:
    """How to copy an operand into buffer `index`: a stretched batch once, its rows padded to whole units."""
    outer, inner = (
        1 if step == 0 else size for size, step in zip(seen.shape[:2], seen.strides[:2], strict=True)
    )
    rows, columns = seen.shape[2:]
    unit = _ROW_BYTES // view.itemsize
    padded = -(-columns // unit) * unit
    args = (Buffer(seen.buffer), Buffer(index), outer * inner, inner, rows, columns, *seen.strides, padded)
    own = (0 if outer == 1 else inner * rows * padded, 0 if inner == 1 else rows * padded, padded, 1)
    tiles = outer * inner * -(-rows // _COPIED[0]) * -(-columns // _COPIED[1])
    section = Section(dtype, outer * inner * rows * padded)
    return _Copy(args, Seen(index, seen.shape, own, seen.transposed), section, tiles)


class _Inputs(NamedTuple):
    a: Seen
    b: Seen
    steps: tuple[Step, ...]
    scratch: tuple[Section, ...]


def _inputs(call: MatmulCall, early: bool) -> _Inputs:
    """Both operands as descriptors can read them, and the launch that copies those which they could not."""
    seen = [_seen(call, call.a, 0), _seen(call, call.b, 1)]
    copies: list[_Copy | None] = []
    scratch: list[Section] = []
    for i, view in enumerate((call.a, call.b)):
        copies.append(
            None if _readable(seen[i], view) else _copy(seen[i], view, call.dtype, 3 + len(scratch))
        )
        copy = copies[-1]
        if copy is not None:
            scratch.append(copy.section)
            seen[i] = copy.seen
    described = [_described(s, call.a.itemsize) for s in seen]
    made = [copy for copy in copies if copy is not None]
    if not made:
        return _Inputs(described[0], described[1], (), ())
    nothing = (*made[0].args[:2], 0, 1, 1, 1, 0, 0, 0, 1, _ROW_BYTES)
    first, second = (copy.args if copy is not None else nothing for copy in copies)
    gaps = [copy is not None and copy.args[9] != 1 for copy in copies]
    constants = (16 // call.a.itemsize, *gaps, *_COPIED[:2], early)
    options = {"num_warps": _COPIED[2], "launch_pdl": early}
    grid = (sum(copy.tiles for copy in made), 1, 1)
    step = Step(repack, grid, (*first, *second, *constants), options)
    return _Inputs(described[0], described[1], (step,), tuple(scratch))


class _Output(NamedTuple):
    seen: Seen
    by_descriptor: bool
    strides: tuple[int, ...]


def _output(call: MatmulCall) -> _Output:
    """The result as it is stored; `strides`, over batch, rows and columns, serve where no descriptor can."""
    (outer, inner), batch_strides = _batch(call, call.out)
    seen = Seen(2, (outer, inner, *call.out.shape), (*batch_strides, *call.out.strides), False)
    stretched = any(size > 1 and s == 0 for size, s in zip(seen.shape, seen.strides, strict=True))
    by_descriptor = _readable(seen, call.out) and not stretched
    return _Output(
        _described(seen, call.out.itemsize) if by_descriptor else seen, by_descriptor, seen.strides
    )


def _checked(call: MatmulCall) -> None:
    sizes = (call.a.shape[0], call.a.shape[1], call.b.shape[1], *call.batch_shape)
    if max(sizes) > _MAX_EXTENT:
        raise TuningError(f"a size of {max(sizes)}: descriptors count in 32 bits")


def _sizes(call: MatmulCall) -> tuple[int, ...]:
    (outer, inner), _ = _batch(call, call.out)
    return (call.a.shape[0], call.b.shape[1], call.a.shape[1], outer * inner, inner)


def descriptor_work(call: MatmulCall, config: Config, processors: int, early: bool) -> Work:
    """What launches `call` with a config of the descriptor family on a GPU of so many processors.

    `early`: kernels may start before the one ahead of them is done, and wait in themselves.
    Raises TuningError where no descriptor can see the operands.
    """
    _checked(call)
    inputs, out = _inputs(call, early), _output(call)
    m, n, k, batch, inner = _sizes(call)
    block_m, block_n, block_k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    tiles, split = batch * -(-m // block_m) * -(-n // block_n), config["SPLIT_K"]
    if -(-k // block_k) < split:
        raise TuningError(f"SPLIT_K = {split} leaves programs without a block of K = {k}")
    scratch = inputs.scratch
    by_descriptor = out.by_descriptor and split == 1  # shared tiles are stored by rows
    parts = counters = None
    if split > 1:
        parts, counters = Buffer(3 + len(scratch)), Buffer(4 + len(scratch))
        kind = "int32" if call.out_dtype == "int32" else "float32"
        scratch = (*scratch, Section(kind, tiles * split * block_m * block_n))
    grid = (min(tiles, processors), 1, 1) if config["PERSISTENT"] else (tiles, split, 1)
    args = (
        inputs.a.descriptor(block_m, block_k),
        inputs.b.descriptor(block_k, block_n),
        out.seen.descriptor(block_m, block_n // config["SUBTILES"]) if by_descriptor else None,
        Buffer(2), parts, counters, m, n, k, batch, inner, *out.strides,
        not inputs.a.transposed, not inputs.b.transposed, by_descriptor, call.precision, early,
        _POLLS if tiles * split <= processors else 0,
        block_m, block_n, block_k, config["GROUP_M"], config["PERSISTENT"], split, config["SUBTILES"],
    )  # fmt: skip
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "launch_pdl": early}
    step = Step(matmul_descriptor, grid, args, options)
    return Work((*inputs.steps, step), scratch, tiles if split > 1 else 0)


def _gluon_dtype(name: str) -> Any:
    return getattr(gl, name)


def _swizzled(dtype: str) -> Any:
    """The layout in shared memory of a block of this dtype."""
    return lambda block: gl.NVMMASharedLayout.get_default_for(list(block), _gluon_dtype(dtype))


def warpgroups_work(call: MatmulCall, config: Config, processors: int, early: bool) -> Work:
    """The same with a config of the warpgroups family."""
    _checked(call)
    inputs, out = _inputs(call, early), _output(call)
    m, n, k, batch, inner = _sizes(call)
    block_m, block_n, block_k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    consumers, main = config["CONSUMERS"], warpgroups.main_columns(config)
    rows, rest = block_m // consumers, block_n - main
    tiles = batch * -(-m // block_m) * -(-n // block_n)
    inward, outward = _swizzled(call.dtype), _swizzled(call.out_dtype)
    b, by = inputs.b.descriptor(block_k, main, inward), out.by_descriptor
    args = (
        inputs.a.descriptor(rows, block_k, inward),
        b,
        inputs.b.descriptor(block_k, rest, inward) if rest else b,
        out.seen.descriptor(rows, main // config["SUBTILES"], outward) if by else None,
        out.seen.descriptor(rows, rest, outward) if by and rest else None,
        Buffer(2), m, n, k, batch, inner, *out.strides,
        not inputs.a.transposed, not inputs.b.transposed, by, early,
        main, warpgroups.REGISTERS[consumers], config.num_stages,
        block_m, block_n, block_k, config["GROUP_M"], consumers, config["PERSISTENT"], config["SUBTILES"],
    )  # fmt: skip
    grid = (min(tiles, processors) if config["PERSISTENT"] else tiles, 1, 1)
    step = Step(matmul_warpgroups, grid, args, {"num_warps": config.num_warps, "launch_pdl": early})
    return Work((*inputs.steps, step), inputs.scratch)
