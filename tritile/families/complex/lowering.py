"""Lower products of complex matrices to products of real ones: see `tritile.core.problem.complexes`.

With a sign for each operand, -1 where it is conjugated (sa, sb), the result is re = a.re b.re - sa sb a.im
b.im, im = sb a.re b.im + sa a.im b.re.
"""

from dataclasses import replace
from math import prod
from typing import Any, Final, Literal, NamedTuple

from tritile.core.problem import ITEMSIZE, REAL_DTYPE, merged
from tritile.core.problem.checks import THREE
from tritile.core.problem.complexes import form_of
from tritile.core.views import MatmulCall, Placed, View
from tritile.families.common import grids
from tritile.families.common.lowered import Lowered
from tritile.families.common.work import Buffer, Kernel, Section, Step, buffer_of, step_of

lay_out: Final = Kernel("tritile.families.complex.kernel", "lay_out")
put_together: Final = Kernel("tritile.families.complex.kernel", "put_together")

_TILE: Final = (16, 512, 4)  # rows of a tile of complex numbers, bytes of each, and its warps
_RE, _IM = (1, 0), (0, 1)  # weights of an element's two parts in a real number that stands for it

Values = tuple[tuple[tuple[int, int], ...], ...]  # the real numbers for an element, as rows
# Where the rows lie: within the matrix, in planes, in planes of a batch.
Rows = Literal["within", "stacked", "batched"]


class _Planes(NamedTuple):
    """Hold a result in planes, and how its numbers count in both parts, as `put_together` takes them."""

    planes: int
    across: int
    re: tuple[int, ...]
    im: tuple[int, ...]


class _Call:
    """Collect the launches and workspaces of a call."""

    def __init__(self, call: MatmulCall, early: bool) -> None:
        self.call, self.early, self.real = call, early, REAL_DTYPE[call.dtype]
        self.size = ITEMSIZE[self.real]
        self.steps: list[Step] = []
        self.scratch: dict[str, Section] = {}

    def place(self, name: str, elements: int) -> Placed:
        self.scratch[name] = Section(self.real, elements)
        return Placed(name, self.real)

    def row(self, columns: int) -> int:
        """Return the length of a row of a workspace: whole units of 16 bytes, of 128 if that adds little."""
        line = (128 if columns * self.size >= 1024 else 16) // self.size
        return -(-columns // line) * line

    def batched(self, view: View, whole: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return sizes and strides, in real numbers, of the distinct matrices of a batch, one at least.

        Third are the strides of the whole batch over copies of these, of `whole` real numbers each.
        """
        pairs = list(zip(self.call.batch_shape, view.batch_strides, strict=True))
        sizes, steps = zip(*((size, 2 * step) for size, step in [*pairs, (1, 1)] if step), strict=True)
        strides, reach = [], whole
        for size, step in reversed(pairs):
            strides.append(reach if step else 0)
            reach *= size if step else 1
        return sizes, steps, tuple(reversed(strides))

    def step(self, kernel: Kernel, view: View, args: dict[str, Any]) -> Step:
        rows, columns = view.shape
        batch, block = prod(args["batch_shape"]), _TILE[1] // view.itemsize
        args |= {
            "rows": rows, "columns": columns, "batch": batch,
            "DENSE": view.strides[1] == 1 or columns == 1, "WIDE": batch >= grids.WIDE_FROM,
            "ALIGN_COLUMNS": grids.unit(columns, view.itemsize),
            "ALIGN_ROWS": grids.unit(2 * view.strides[0], self.size),
            "ALIGN_BATCH": grids.least_unit(args["batch_strides"], self.size),
            "ALIGN_SCRATCH": 16 // self.size,
            "BLOCK_R": _TILE[0], "BLOCK_C": block, "WAIT": self.early,
        }  # fmt: skip
        tiles = -(-rows // _TILE[0]) * -(-columns // block)
        options = {"num_warps": _TILE[2], "launch_pdl": self.early}
        return step_of(kernel, grids.grid(tiles, batch), args, options)

    def laid_out(
        self, role: Literal["a", "b"], values: Values, rows: Rows = "within", turn: bool = True
    ) -> View:
        """Return an operand in a workspace, each element as `values`, as a real operand.

        It is column-major if the complex one is, unless `turn` is false, else row-major. "batched": planes
        are one more dimension of the batch, the last.
        """
        view: View = getattr(self.call, role)
        turned = turn and view.layout == "column"
        if turned:
            view = view.transposed
            values = tuple(zip(*values, strict=True)) if rows == "within" else values
        slots, across, (m, n) = len(values), len(values[0]), view.shape
        row = self.row(across * n)
        plane, whole = m * row, slots * m * row
        sizes, steps, strides = self.batched(view, whole)
        place = self.place(f"real_{role}", prod(sizes) * whole)
        args = {
            "source": buffer_of(view.tensor, role), "copy": Buffer(place.buffer),
            "stride_sr": 2 * view.strides[0], "stride_sc": 2 * view.strides[1],
            "batch_shape": sizes, "batch_strides": steps,
            "stride_slot": row if rows == "within" else plane,
            "stride_row": slots * row if rows == "within" else row, "stride_matrix": whole,
            "VALUES": tuple(times for line in values for number in line for times in number),
            "ACROSS": across,
        }  # fmt: skip
        self.steps.append(self.step(lay_out, view, args))
        if rows == "batched":
            slots, strides = 1, (*strides, plane)
        made = View(place, (slots * m, across * n), (row, 1), strides, self.size)
        return made.transposed if turned else made

    def put_together(self, result: _Planes, batched: bool) -> tuple[View, Step]:
        """Return a workspace for the core's result, and the launch that makes complex numbers of it.

        The planes are above each other in one matrix, or, `batched`, the last dimension of the batch.
        """
        view, planes, across = self.call.out, result.planes, result.across
        (m, n), row = view.shape, self.row(across * view.shape[1])
        plane, whole = m * row, planes * m * row
        sizes, steps, strides = self.batched(view, whole)
        place = self.place("planes", prod(sizes) * whole)
        args = {
            "source": Buffer(place.buffer), "out": buffer_of(view.tensor, "out"),
            "stride_or": 2 * view.strides[0], "stride_oc": 2 * view.strides[1],
            "batch_shape": sizes, "batch_strides": steps,
            "stride_plane": plane, "stride_row": row, "stride_matrix": whole,
            "RE": result.re, "IM": result.im, "ACROSS": across,
        }  # fmt: skip
        shape = (m if batched else planes * m, across * n)
        made = View(place, shape, (row, 1), (*strides, plane) if batched else strides, self.size)
        return made, self.step(put_together, view, args)


def _as_it_lies(view: View) -> View:
    """Return complex matrices as real ones, twice as long along the contiguous dimension."""
    if view.layout == "column":
        return _as_it_lies(view.transposed).transposed
    (m, n), batch_strides = view.shape, tuple(2 * step for step in view.batch_strides)
    return View(view.tensor, (m, 2 * n), (2 * view.strides[0], 1), batch_strides, view.itemsize // 2)


def wanted(call: MatmulCall) -> bool:
    return call.dtype in REAL_DTYPE


def lowered(call: MatmulCall, early: bool) -> Lowered:
    form, made = form_of(call.problem), _Call(call, early)
    sa, sb = (-1 if view.conj else 1 for view in (call.a, call.b))
    result = _Planes(1, 2, (1, 0), (0, 1))  # as it lies
    if form == "embedded":
        a = _as_it_lies(call.a) if call.a.layout == "row" else made.laid_out("a", ((_RE, _IM),))
        b = made.laid_out("b", ((_RE, (0, sb)), ((0, -sa * sb), (sa, 0))))
    elif form == "planes":
        a = made.laid_out("a", ((_RE, (0, -sa * sb)), ((0, sa), (sb, 0))), "stacked", turn=False)
        b = _as_it_lies(call.b)
        result = _Planes(2, 1, (1, 0), (0, 1))
    elif form == "pairs":
        a = made.laid_out("a", ((_RE,), ((0, sa),)), "stacked", turn=False)
        b = _as_it_lies(call.b) if call.b.layout == "row" else made.laid_out("b", ((_RE, _IM),))
        result = _Planes(2, 2, (1, 0, 0, -sb), (0, sb, 1, 0))
    else:
        a = made.laid_out("a", ((_RE,), ((0, sa),), ((1, sa),)), "batched")
        b = made.laid_out("b", ((_RE,), ((0, sb),), ((1, sb),)), "batched")
        result = _Planes(3, 1, (1, -1, 0), (-1, -1, 1))
    after: tuple[Step, ...] = ()
    if form == "embedded" and call.out.layout == "row":
        out = _as_it_lies(call.out)
    else:
        out, last = made.put_together(result, batched=form == "three")
        after = (last,)
    sizes = (*call.batch_shape, 3) if form == "three" else call.batch_shape
    sizes, strides = merged(sizes, *(view.batch_strides for view in (a, b, out)))
    a, b, out = (replace(view, batch_strides=own) for view, own in zip((a, b, out), strides, strict=True))
    core = MatmulCall(a, b, out, sizes, made.real, made.real, call.precision.removesuffix(THREE))
    return Lowered(tuple(made.steps), core, after, made.scratch)
