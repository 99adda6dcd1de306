"""See a product's operands and result as tensor descriptors do: where they lie, or in copies.

Rows of a copy start on 16 bytes, and run along K if tensor cores need that.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from tritile.core.call import MatmulCall, View
from tritile.core.config import Config
from tritile.core.problem import MatmulProblem
from tritile.errors import TuningError
from tritile.families.common.grids import MAX_AXIS, WIDE_FROM
from tritile.families.common.products import SECTOR
from tritile.families.common.work import epilogue_arguments, fallback_arguments
from tritile.runtime.work import Buffer, Descriptor, Kernel, Step, Workspace

repack: Final = Kernel("tritile.families.common.repack", "repack")

BARRIER: Final = 8  # bytes of shared memory that a stage of a TMA pipeline takes for barriers
_COPIED_FROM: Final = 512  # an element of 4 bytes is copied if so many rows or columns read it
_MAX_STRIDE: Final = 2**40  # bytes of a descriptor's stride
_ROW_BYTES: Final = 128  # rows of a copy start on this many bytes
# Tiles of 16-bit operands whose rows start on 16 bytes and not on sectors are slow to read. What copies save
# of a product at this many operations a microsecond, and take, on an H200: `tuning/NOTES.md`.
_OPERATIONS_US: Final = 4e8
_COPIED_US: Final = 1.8e6  # bytes a microsecond, read and written
_SAVED: Final = 0.1  # of a product's time, by the copy
_THINNER: Final = 16  # times as thin as the other operand
# Rows, columns and warps of a copied tile. For contiguous rows: the fastest measured.
_TILE: Final = {False: (8, 256, 4), True: (64, 64, 4)}


def reachable(problem: MatmulProblem) -> str | None:
    """Say why no kernel with tensor descriptors can make this product, None if one can.

    An operand that no descriptor can see is copied first (see `copied`); the result is stored either way.
    """
    if problem.out_layout != "row":
        return f"out is {problem.out_layout}, not row by row"
    if max(problem.m, problem.n, problem.k) > WIDE_FROM:
        return f"sizes above {WIDE_FROM}"
    return None


def k_major_copies(problem: MatmulProblem) -> tuple[bool, bool]:
    """Return which of a and b are copied so that K is contiguous: TF32's tensor cores on Hopper need that.

    Otherwise the kernel transposes each tile in registers, at half the speed. If the other operand is
    thin, an element is read too few times for a copy to pay.
    """
    if problem.precision != "tf32":
        return False, False
    a, b = _unreadable(problem)
    return (
        problem.a_layout == "column" and (a or problem.n >= _COPIED_FROM),
        problem.b_layout != "column" and (b or problem.m >= _COPIED_FROM),
    )


def _unreadable(problem: MatmulProblem) -> tuple[bool, bool]:
    sides = (problem.a_layout, problem.a_align), (problem.b_layout, problem.b_align)
    a, b = (align < 16 or layout == "strided" for layout, align in sides)
    return a, b


def realigned(problem: MatmulProblem) -> tuple[bool, bool]:
    """Return which of a and b is copied as its rows start on 16 bytes but not on sectors, if that pays.

    Only one that is by far the thinner is copied: of others pairs of CTAs read less, and it pays no more.
    """
    plain = problem.itemsize == 2 and problem.out_align == 16 and problem.rights == 1
    measured = plain and min(problem.m, problem.n) > 1
    if not measured or problem.promoted or any(_unreadable(problem)):  # rows of parts are padded
        return False, False
    m, n, k = problem.m, problem.n, problem.k
    row_a, row_b = m if problem.a_layout == "column" else k, k if problem.b_layout == "column" else n
    thin, wide, row = (m, n, row_a) if m < n else (n, m, row_b)
    saved, moved = problem.flops / _OPERATIONS_US * _SAVED, problem.batch * thin * k * problem.itemsize
    pays = thin * _THINNER <= wide and saved > 1 + moved / _COPIED_US
    chosen = pays and row * problem.itemsize % SECTOR != 0
    return chosen and m < n, chosen and m >= n


def copied(problem: MatmulProblem) -> tuple[bool, bool]:
    reasons = _unreadable(problem), k_major_copies(problem), realigned(problem)
    a, b = (any(of_side) for of_side in zip(*reasons, strict=True))
    return a, b


def tiles(config: Config, problem: MatmulProblem) -> int:
    return problem.batch * -(-problem.m // config["BLOCK_M"]) * -(-problem.n // config["BLOCK_N"])


class DescriptorView(NamedTuple):
    """Hold an operand as a descriptor sees it: a batch of row-major matrices.

    `transposed`: rows are the operand's columns.
    """

    buffer: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    transposed: bool = False

    def descriptor(self, rows: int, columns: int, layout: Any = None, rounded: bool = False) -> Descriptor:
        """Return the descriptor for tiles of so many of the operand's own rows and columns."""
        tile = (columns, rows) if self.transposed else (rows, columns)
        block = (1,) * (len(self.shape) - 2) + tile
        return Descriptor(self.buffer, self.shape, self.strides, block, layout and layout(block), rounded)


def descriptor_view(
    view: View, sizes: tuple[int, ...], steps: tuple[int, ...], swap: bool = False
) -> DescriptorView:
    """Return a batch of an operand with its contiguous dimension last, or if `swap` the other.

    A descriptor need not be able to read it.
    """
    if (view.layout == "column") != swap:
        return DescriptorView(view.buffer, sizes + view.shape[::-1], steps + view.strides[::-1], True)
    return DescriptorView(view.buffer, sizes + view.shape, steps + view.strides)


def readable(seen: DescriptorView, view: View) -> bool:
    if view.address % 16 or (seen.strides[-1] != 1 and seen.shape[-1] > 1):
        return False
    dims = zip(seen.shape[:-1], seen.strides[:-1], strict=True)
    steps = [step * view.itemsize for size, step in dims if size > 1]
    return all(0 <= step < _MAX_STRIDE and step % 16 == 0 for step in steps)


def storable(seen: DescriptorView, view: View) -> bool:
    """True if a descriptor may store through it: readable, with rows of a multiple of 16 bytes.

    The hardware cuts a store off at 16 bytes, not at the element: the rest of 16 bytes in which a row ends
    becomes zero.
    """
    stretched = any(size > 1 and step == 0 for size, step in zip(seen.shape, seen.strides, strict=True))
    return seen.shape[-1] * view.itemsize % 16 == 0 and not stretched and readable(seen, view)


def with_valid_strides(seen: DescriptorView, view: View) -> DescriptorView:
    """Return the operand with valid strides for a descriptor along dimensions of size 1."""
    dims = zip(seen.shape[:-1], seen.strides[:-1], strict=True)
    return seen._replace(strides=(*(s if size > 1 else 16 // view.itemsize for size, s in dims), 1))


def _copy(seen: DescriptorView, view: View, name: str) -> tuple[DescriptorView, Workspace]:
    """Return the copy of an operand in a buffer: a stretched batch once, rows padded to whole units."""
    (outer, inner), (rows, columns) = _copied_batch(seen), seen.shape[2:]
    padded = -(-columns * view.itemsize // _ROW_BYTES) * _ROW_BYTES // view.itemsize
    matrix = rows * padded
    strides = (0 if outer == 1 else inner * matrix, 0 if inner == 1 else matrix, padded, 1)
    memory = Workspace(view.dtype, outer * inner * matrix)
    return DescriptorView(name, seen.shape, strides, seen.transposed), memory


def _copied_batch(seen: DescriptorView) -> tuple[int, int]:
    outer, inner = (1 if step == 0 else n for n, step in zip(seen.shape[:2], seen.strides[:2], strict=True))
    return outer, inner


def _copying(pairs: Sequence[tuple[DescriptorView, DescriptorView]], itemsize: int, early: bool) -> Step:
    """Return the launch that copies one operand, or two: each is what is read and its copy."""
    gaps = [seen.strides[3] != 1 for seen, _ in pairs]
    block_r, block_c, warps = _TILE[any(gaps)]
    args: dict[str, Any] = {
        "ALIGN_C": 16 // itemsize, "A_GAPS": gaps[0], "B_GAPS": gaps[-1] and len(pairs) > 1,
        "BLOCK_R": block_r, "BLOCK_C": block_c, "WAIT": early,
    }  # fmt: skip
    tiles = 0
    for side, (seen, copy) in zip("ab", (*pairs, pairs[0]), strict=False):
        outer, inner, rows, columns = *_copied_batch(seen), *seen.shape[2:]
        names = (f"stride_{side}{letter}" for letter in "oirc")
        values = {f"{side}_rows": rows, f"{side}_columns": columns, f"{side}_inner": inner}
        values |= {f"stride_{side}cr": copy.strides[2], **dict(zip(names, seen.strides, strict=True))}
        if side == "b" and len(pairs) == 1:  # nothing to copy
            values, outer = dict.fromkeys(values, 1), 0
            values |= {"stride_bcr": _ROW_BYTES, "stride_bo": 0, "stride_bi": 0, "stride_br": 0}
        args |= {f"{side}_ptr": Buffer(seen.buffer), f"{side}_copy": Buffer(copy.buffer), **values}
        args[f"{side}_batch"] = outer * inner
        tiles += outer * inner * -(-rows // block_r) * -(-columns // block_c)
    return Step(repack.jitted, (tiles, 1, 1), args, {"num_warps": warps, "launch_pdl": early})


class Tma(NamedTuple):
    """Hold how a product's tiles travel by TMA.

    `up`: the second matrix of a gated product; b if there is none. `out`: None if no descriptor can
    store the result. `steps`: launches that copy operands that no descriptor could read, into `scratch`.
    `args`: what the kernels of all such families take, by name.
    """

    a: DescriptorView
    b: DescriptorView
    up: DescriptorView
    out: DescriptorView | None
    steps: tuple[Step, ...]
    scratch: dict[str, Workspace]
    grid: tuple[int, int, int]
    args: dict[str, Any]


def by_tma(call: MatmulCall, config: Config, split: int, processors: int, early: bool) -> Tma:
    """Return how a product's operands, copied if need be, and its result travel.

    Tiles whose K `split` programs share are stored without descriptor. Raises TuningError if a size is
    beyond what descriptors count.
    """
    most, sizes = max(*call.a.shape, call.b.shape[1], *call.batch_shape), call.batch_shape
    if most > WIDE_FROM:
        raise TuningError(f"a size of {most}: descriptors count in 32 bits")
    if len(sizes) > 2:
        raise TuningError(f"a batch of {len(sizes)} dimensions that do not merge: descriptors have 2")
    missing = 2 - len(sizes)
    outer, inner = sizes = (1,) * missing + sizes

    def seen(view: View, swap: bool = False) -> DescriptorView:
        return descriptor_view(view, sizes, (0,) * missing + view.batch_strides, swap)

    a_how, b_how = zip(k_major_copies(call.problem), realigned(call.problem), strict=True)
    views = [(call.a, "copy_a", *a_how), (call.b, "copy_b", *b_how)]
    if call.up is not None:
        views.append((call.up, "copy_up", *b_how))
    read: list[DescriptorView] = []
    copies: list[tuple[DescriptorView, DescriptorView]] = []
    scratch = {}
    for view, name, swap, align in views:
        own = seen(view, swap)
        if not readable(own, view) or (align and own.strides[2] * view.itemsize % SECTOR):
            copy, scratch[name] = _copy(own, view, name)
            copies.append((own, copy))
            own = copy
        read.append(with_valid_strides(own, view))
    steps = tuple(_copying(copies[i : i + 2], call.a.itemsize, early) for i in range(0, len(copies), 2))
    out = DescriptorView(
        call.out.buffer, sizes + call.out.shape, (0,) * missing + call.out.batch_strides + call.out.strides
    )
    by_descriptor = split == 1 and storable(out, call.out)
    grid, flat = _grid(config, call.problem, split, processors)
    names = ("stride_oo", "stride_oi", "stride_om", "stride_on")
    args = {
        "out_ptr": Buffer(out.buffer), **dict(zip(names, out.strides, strict=True)),
        "M": call.a.shape[0], "N": call.b.shape[1], "K": call.a.shape[1],
        "batch": outer * inner, "inner_batch": inner, "BATCHED": outer * inner > 1,
        **fallback_arguments(call), **epilogue_arguments(call, 2),
        "A_ROW": not read[0].transposed, "B_ROW": not read[1].transposed, "UP_ROW": not read[-1].transposed,
        "BY_DESCRIPTOR": by_descriptor, "FLAT": flat, "WAIT": early, **dict(config.kwargs),
    }  # fmt: skip
    stored = with_valid_strides(out, call.out) if by_descriptor else None
    return Tma(read[0], read[1], read[-1], stored, steps, scratch, grid, args)


def _grid(
    config: Config, problem: MatmulProblem, split: int, processors: int
) -> tuple[tuple[int, int, int], bool]:
    """Return the grid, and whether rows, columns and the rest of the tiles have an axis each.

    The rest is the batch, or the parts of K. Such a grid saves divisions, if its order is as good: all
    tiles at once, or whole columns of them as bands.
    """
    made, batch = tiles(config, problem), problem.batch
    rows, columns = -(-problem.m // config["BLOCK_M"]), -(-problem.n // config["BLOCK_N"])
    rest = max(batch, split)
    if config["PERSISTENT"]:
        return (min(made, processors), 1, 1), False
    in_order = made <= processors or config["GROUP_M"] >= rows
    if in_order and min(batch, split) == 1 and max(columns, rest) <= MAX_AXIS:
        return (rows, columns, rest), True
    return (made, split, 1), False
