"""See operands as tensor descriptors do: where they lie, or in copies.

Rows of a copy start on 16 bytes, and run along K where tensor cores need that.
"""

import itertools
from typing import Any, Final, NamedTuple

from tritile.core.call import MatmulCall, View
from tritile.core.config import Config
from tritile.core.problem import MatmulProblem
from tritile.errors import TuningError
from tritile.families.common.grids import WIDE_FROM
from tritile.families.common.products import SECTOR
from tritile.families.common.work import Buffer, Descriptor, Kernel, Section, Step

repack: Final = Kernel("tritile.families.common.repack", "repack")

_TURNED_FROM: Final = 512  # an element of 4 bytes is copied if so many rows or columns read it
_MAX_STRIDE: Final = 2**40  # bytes of a descriptor's stride
_ROW_BYTES: Final = 128  # rows of a copy start on this many bytes
# Tiles of 16-bit operands whose rows start on 16 bytes and not on sectors are slow to read. What copies save
# of a product at this many operations a microsecond, and take, on an H200: `tuning/NOTES.md`.
_OPERATIONS_US: Final = 4e8
_COPIED_US: Final = 1.8e6  # bytes a microsecond, read and written
_SAVED: Final = {
    "column": (0.18, 0.08),
    "row": (0.10, 0.05),
}  # saved by the first copy and by the second, by b's layout
# Rows, columns and warps of a copied tile. For contiguous rows: the fastest measured.
_TILE: Final = {False: (8, 256, 4), True: (64, 64, 4)}


def reachable(problem: MatmulProblem) -> str | None:
    """Say why no kernel with tensor descriptors can make this product, None where one can.

    An operand that no descriptor can see is copied first (see `copied`); the result is stored either way.
    """
    if problem.out_layout != "row":
        return f"out is {problem.out_layout}, not row by row"
    if max(problem.m, problem.n, problem.k) > WIDE_FROM:
        return f"sizes above {WIDE_FROM}"
    return None


def turned(problem: MatmulProblem) -> tuple[bool, bool]:
    """Tell which of a and b are copied so that K is contiguous: TF32's tensor cores on Hopper need that.

    Otherwise the kernel transposes each tile in registers, at half the speed. Where the other operand is
    thin, an element is read too few times for a copy to pay.
    """
    if problem.precision != "tf32":
        return False, False
    a, b = _unreadable(problem)
    return (
        problem.a_layout == "column" and (a or problem.n >= _TURNED_FROM),
        problem.b_layout != "column" and (b or problem.m >= _TURNED_FROM),
    )


def _unreadable(problem: MatmulProblem) -> tuple[bool, bool]:
    sides = (problem.a_layout, problem.a_align), (problem.b_layout, problem.b_align)
    a, b = (align < 16 or layout == "strided" for layout, align in sides)
    return a, b


def realigned(problem: MatmulProblem) -> tuple[bool, bool]:
    """Tell which of a and b are copied because their rows start on 16 bytes but not on sectors, if that pays.

    Copying only the smaller one saves most of the time that copies of both would save.
    """
    plain = problem.itemsize == 2 and problem.out_align == 16 and problem.rights == 1
    measured = plain and min(problem.m, problem.n) > 1
    if not measured or problem.promoted or any(_unreadable(problem)):  # rows of parts are padded
        return False, False
    m, n, k = problem.m, problem.n, problem.k
    us = problem.flops / _OPERATIONS_US
    rows = (m if problem.a_layout == "column" else k), (k if problem.b_layout == "column" else n)
    chosen = {0: False, 1: False}
    off = [side for side in chosen if rows[side] * problem.itemsize % SECTOR]
    bytes_of = [problem.batch * side * k * problem.itemsize for side in (m, n)]
    for side, saved in zip(sorted(off, key=bytes_of.__getitem__), _SAVED[problem.b_layout], strict=False):
        if us * saved <= 1 + bytes_of[side] / _COPIED_US:
            break
        chosen[side] = True
    return chosen[0], chosen[1]


def copied(problem: MatmulProblem) -> tuple[bool, bool]:
    reasons = _unreadable(problem), turned(problem), realigned(problem)
    a, b = (any(of_side) for of_side in zip(*reasons, strict=True))
    return a, b


def tiles(config: Config, problem: MatmulProblem) -> int:
    return problem.batch * -(-problem.m // config["BLOCK_M"]) * -(-problem.n // config["BLOCK_N"])


class Seen(NamedTuple):
    """Hold an operand as a descriptor sees it: a batch of two dimensions of row-major matrices.

    `transposed`: rows are the operand's columns.
    """

    buffer: str
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    transposed: bool

    def descriptor(self, rows: int, columns: int, layout: Any = None, rounded: bool = False) -> Descriptor:
        """Return the descriptor for tiles of so many of the operand's own rows and columns."""
        block = (1, 1, columns, rows) if self.transposed else (1, 1, rows, columns)
        return Descriptor(self.buffer, self.shape, self.strides, block, layout and layout(block), rounded)


def batch_of(call: MatmulCall, view: View) -> tuple[tuple[int, int], tuple[int, int]]:
    if len(call.batch_shape) > 2:
        raise TuningError(
            f"a batch of {len(call.batch_shape)} dimensions that do not merge: descriptors have 2"
        )
    sizes = (1,) * (2 - len(call.batch_shape)) + call.batch_shape
    strides = (0,) * (2 - len(call.batch_shape)) + view.batch_strides
    return (sizes[0], sizes[1]), (strides[0], strides[1])


def seen_of(call: MatmulCall, view: View, turned: bool = False) -> Seen:
    """Return the operand with its contiguous dimension last, or if `turned` the other.

    A descriptor need not be able to read it.
    """
    (outer, inner), (stride_o, stride_i) = batch_of(call, view)
    (rows, columns), (stride_r, stride_c) = view.shape, view.strides
    transposed = (view.layout == "column") != turned
    if transposed:
        rows, columns, stride_r, stride_c = columns, rows, stride_c, stride_r
    strides = (stride_o, stride_i, stride_r, stride_c)
    return Seen(view.buffer, (outer, inner, rows, columns), strides, transposed)


def readable(seen: Seen, view: View) -> bool:
    if view.address % 16 or (seen.strides[3] != 1 and seen.shape[3] > 1):
        return False
    steps = [s * view.itemsize for size, s in zip(seen.shape[:3], seen.strides[:3], strict=True) if size > 1]
    return all(0 <= step < _MAX_STRIDE and step % 16 == 0 for step in steps)


def storable(seen: Seen, view: View) -> bool:
    """Tell whether a descriptor may store through it: readable, with rows of a multiple of 16 bytes.

    The hardware cuts a store off at 16 bytes, not at the element: the rest of 16 bytes in which a row ends
    becomes zero.
    """
    stretched = any(size > 1 and step == 0 for size, step in zip(seen.shape, seen.strides, strict=True))
    whole = seen.shape[3] * view.itemsize % 16 == 0
    return whole and not stretched and readable(seen, view)


def described(seen: Seen, itemsize: int) -> Seen:
    """Return the operand with valid strides for a descriptor along dimensions of size 1."""
    unit = 16 // itemsize
    steps = [s if size > 1 else unit for size, s in zip(seen.shape[:3], seen.strides[:3], strict=True)]
    return seen._replace(strides=(steps[0], steps[1], steps[2], 1))


class _Copy(NamedTuple):
    """Describe how one operand is copied: arguments of `repack`, whose names lack a or b, and the copy."""

    args: dict[str, Any]
    seen: Seen
    section: Section


def _copy(seen: Seen, view: View, name: str) -> _Copy:
    """Describe the copy of an operand into a buffer: a stretched batch once, rows padded to whole units."""
    outer, inner = (
        1 if step == 0 else size for size, step in zip(seen.shape[:2], seen.strides[:2], strict=True)
    )
    (rows, columns), unit = seen.shape[2:], _ROW_BYTES // view.itemsize
    padded = -(-columns // unit) * unit
    own = (0 if outer == 1 else inner * rows * padded, 0 if inner == 1 else rows * padded, padded, 1)
    args = {
        "{}_ptr": Buffer(seen.buffer), "{}_copy": Buffer(name), "{}_batch": outer * inner, "{}_inner": inner,
        "{}_rows": rows, "{}_columns": columns, "stride_{}cr": padded,
        **dict(zip(("stride_{}o", "stride_{}i", "stride_{}r", "stride_{}c"), seen.strides, strict=True)),
    }  # fmt: skip
    section = Section(view.dtype, outer * inner * rows * padded)
    return _Copy(args, Seen(name, seen.shape, own, seen.transposed), section)


class Inputs(NamedTuple):
    """Hold operands as descriptors see them, the launches that copy some, and the workspaces of the copies.

    `up`: the second matrix of a gated product; b where there is none.
    """

    a: Seen
    b: Seen
    up: Seen
    steps: tuple[Step, ...]
    scratch: dict[str, Section]


def _copying(first: _Copy, second: _Copy | None, itemsize: int, early: bool) -> Step:
    nothing = {"{}_batch": 0, "{}_inner": 1, "{}_rows": 1, "{}_columns": 1, "stride_{}cr": _ROW_BYTES}
    nothing |= {"stride_{}o": 0, "stride_{}i": 0, "stride_{}r": 0, "stride_{}c": 1}
    sides = {"a": first.args, "b": second.args if second else first.args | nothing}
    gaps = [own["stride_{}c"] != 1 for own in sides.values()]
    block_r, block_c, warps = _TILE[any(gaps)]
    args = {name.format(side): value for side, own in sides.items() for name, value in own.items()}
    args |= {
        "ALIGN_C": 16 // itemsize, "A_GAPS": gaps[0], "B_GAPS": gaps[1],
        "BLOCK_R": block_r, "BLOCK_C": block_c, "WAIT": early,
    }  # fmt: skip
    tiles = sum(
        own["{}_batch"] * -(-own["{}_rows"] // block_r) * -(-own["{}_columns"] // block_c)
        for own in sides.values()
    )
    return Step(repack.jitted, (tiles, 1, 1), args, {"num_warps": warps, "launch_pdl": early})


def inputs(call: MatmulCall, early: bool) -> Inputs:
    """Return operands as descriptors can read them, and the launches that copy those that they could not.

    Raises TuningError where a size is beyond what descriptors count.
    """
    most = max(*call.a.shape, call.b.shape[1], *call.batch_shape)
    if most > WIDE_FROM:
        raise TuningError(f"a size of {most}: descriptors count in 32 bits")
    turn_a, turn_b = turned(call.problem)
    align_a, align_b = realigned(call.problem)
    views = [(call.a, "a", turn_a, align_a), (call.b, "b", turn_b, align_b)]
    if call.up is not None:
        views.append((call.up, "up", turn_b, align_b))
    found: list[Seen] = []
    copies: list[_Copy] = []
    for view, role, turn, align in views:
        seen = seen_of(call, view, turn)
        if not readable(seen, view) or (align and seen.strides[2] * view.itemsize % SECTOR):
            copies.append(_copy(seen, view, f"copy_{role}"))
            seen = copies[-1].seen
        found.append(described(seen, view.itemsize))
    pairs = itertools.zip_longest(copies[::2], copies[1::2])
    steps = tuple(_copying(one, other, call.a.itemsize, early) for one, other in pairs)
    scratch = {copy.seen.buffer: copy.section for copy in copies}
    return Inputs(found[0], found[1], found[-1], steps, scratch)
