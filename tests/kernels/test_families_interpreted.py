"""Every family of products that the interpreter runs, over one table of cases.

Each result is right, within its bound, and lies in a frame of poison that stays; nothing is read but operands
and what kernels wrote before.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from tests.accesses import reading_only
from tests.configs import odd_rows, skinny_k, skinny_n, tile, tma
from tests.reference import (
    LAYOUTS,
    Sides,
    assert_fused,
    assert_gated,
    at_offset,
    bytes_of,
    frame,
    guard_intact,
    placed,
    values,
)
from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.core.epilogue import ACTIVATIONS
from tritile.families.space import illegal
from tritile.ops.products import matmul_call
from tritile.runtime import launch

pytestmark = pytest.mark.interpreted

H200 = target_device("nvidia-h200")
BY_ROWS = "tritile.core.problem._BY_ROWS_FROM"
WIDE = "tritile.families.matmul_tile.family.WIDE_FROM"
FP32, HALF = torch.float32, torch.float16
PLAIN = Sides()


class Family(NamedTuple):
    """How a family is tried.

    - `config`: by the fewer of rows and columns.
    - `size`: M, N and K, none of which fills its last tile.
    - `of_b`: how b lies; "odd": contiguous along K, in rows that begin amid a word.
    - `by_columns`: the large operand is a, and b has few columns.
    - `precision`: by descriptor tf32 is computed as fp32 here.
    """

    config: Callable[[int], Config]
    size: tuple[int, int, int] = (37, 29, 83)
    of_b: str = "row"
    by_columns: bool = False
    precision: str = "ieee"
    dtype: torch.dtype = FP32
    gated: bool = False
    patched: tuple[tuple[str, int], ...] = ()  # for what large products alone do


def by_descriptor(gated=False, **how):
    return Family(lambda rows: tma(32, 32, 32, group=2, **how), precision="tf32", gated=gated)


def few(config, of_b, by_columns=False):
    dtype = HALF if of_b == "odd" else FP32
    return Family(config, (37, 3, 131) if by_columns else (3, 37, 131), of_b, by_columns, dtype=dtype)


TILE = Family(lambda rows: tile(32, 32, 32, group=2))
FAMILIES = {
    "tile": TILE,
    "descriptor": by_descriptor(),
    "persistent": by_descriptor(persistent=True),
    "persistent, by halves": by_descriptor(persistent=True, subtiles=2),
    "by halves": by_descriptor(subtiles=2),
    "split": by_descriptor(split=2),
    "tile, fp16": TILE._replace(dtype=HALF),
    "tile, fp64": TILE._replace(dtype=torch.float64),
    "tile, b copied by rows": TILE._replace(of_b="column", patched=((BY_ROWS, 1),)),
    "tile, by 64 bits": TILE._replace(patched=((WIDE, 0),)),
    "gated tile": TILE._replace(gated=True),
    "gated tile, fp64": TILE._replace(gated=True, dtype=torch.float64),
    "gated descriptor": by_descriptor(gated=True),
    "gated persistent, by halves": by_descriptor(gated=True, persistent=True, subtiles=2),
    "few rows": few(lambda rows: skinny_k(rows, FP32), "column"),
    "few columns": few(lambda rows: skinny_k(rows, FP32), "column", True),
    "few rows across": few(lambda rows: skinny_n(rows, FP32), "row"),
    "few columns across": few(lambda rows: skinny_n(rows, FP32), "row", True),
    "odd rows": few(odd_rows, "odd"),
    "odd rows, split": few(lambda rows: odd_rows(rows, 2), "odd"),
    "odd columns, split": few(lambda rows: odd_rows(rows, 2), "odd", True),
}
every = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
# One for each way in which sums are finished and stored.
ENDS = (
    "tile", "by halves", "split", "gated tile", "gated persistent, by halves",
    "few rows", "few columns", "few columns across", "odd rows", "odd columns, split",
)  # fmt: skip


def some(which):
    found = {name: own for name, own in FAMILIES.items() if which(name, own)}
    return pytest.mark.parametrize("family", found.values(), ids=found)


def operands(family, size=None, batch=()):
    m, n, k = size or family.size
    if family.by_columns:
        a, b = operands(family._replace(by_columns=False), (n, m, k), batch)
        return b.mT, a.mT.contiguous()
    a = values((*batch, m, k), family.dtype)
    if family.of_b == "odd":
        return a, at_offset(1, n, k, family.dtype)
    return a, placed(values((*batch, k, n), family.dtype, 1), family.of_b)


def side(family, spread, seed=5, lies="row", dtype=None):
    """What is spread over a result as `spread` says, and lies in memory as `lies` does; None for ""."""
    m, n, _ = family.size
    shape = {"": None, "one": (), "row": (1, n), "column": (m, 1), "full": (m, n)}[spread]
    if shape is None:
        return None
    found = values(shape, dtype or family.dtype, seed)
    return placed(found, lies) if shape else found


def made(family, a, b, out, sides=PLAIN, up=None):
    """Make the product by a legal config, which reads operands alone; return a gated one's second matrix.

    Gated products have no scales, weights or residual: what would be the residual is the other's bias.
    """
    extras = sides._asdict()
    if family.gated:
        up = (8 * values(tuple(b.shape), b.dtype, 9)).round() / 8 if up is None else up
        extras = {"bias": sides.bias, "bias_up": sides.residual, "activation": sides.activation, "up": up}
    with pytest.MonkeyPatch.context() as patched:
        for name, value in family.patched:
            patched.setattr(name, value)
        call = matmul_call(a, b, out, family.precision, **extras)
        config = family.config(min(call.problem.m, call.problem.n))
        assert illegal(config, call.problem, H200) is None
        with reading_only(*(t for t in (a, b, up, *sides[:4]) if t is not None)):
            launch.run_interpreted(call, config)
    return up


def check(family, a, b, sides=PLAIN, layout="row", added="", out_dtype=None, up=None):
    """The same into a frame of poison, or of `added`, whose place the result takes.

    By descriptor results have rows, or if products are not gated columns, that are contiguous.
    """
    unseen = layout in ("strided", "sparse") or (family.gated and "column" in layout)
    layout = "sliced" if unseen and family.precision == "tf32" else layout
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    buffer, out = frame((*batch, a.shape[-2], b.shape[-1]), out_dtype or family.dtype, layout)
    given = sides
    if added:
        out.copy_(getattr(sides, added))
        given = sides._replace(**{added: out})
    up = made(family, a, b, out, given, up)
    if family.gated:
        assert_gated(out, a, b, up, sides.activation, sides.bias, sides.residual)
    else:
        assert_fused(out, a, b, sides)
    assert guard_intact(buffer, out)


@every
@pytest.mark.parametrize("layout", [*LAYOUTS, "padded"])
def test_layouts_of_operands_and_of_out(family, layout):
    """Of the smaller operand where a family reads the larger one as it lies in one way alone."""
    a, b = operands(family)
    if family.by_columns:
        check(family, a, placed(b, layout), layout=layout)
        return
    check(family, placed(a, layout), b, layout=layout)
    if family.of_b == "row" and family.size == TILE.size:
        check(family, a, placed(b, layout))


@some(lambda name, own: name in ENDS or own.dtype == torch.float64)
@pytest.mark.parametrize("activation", ["", *ACTIVATIONS])
def test_activations_of_scaled_and_weighted_sums(family, activation):
    sides = Sides(None, None, side(family, "row"), side(family, "full", 6), activation)
    if not family.gated:
        scales = side(family, "column", 7), side(family, "row", 8)
        sides = sides._replace(scale_a=scales[0], scale_b=scales[1], alpha=-0.3, beta=1.7)
    check(family, *operands(family), sides, "sliced")


# Scales of a and b, bias and residual: how each is spread; how they lie, and how the result does.
SPREAD = [
    (("one", "one", "one", "one"), "row", "row"),
    (("row", "row", "row", "row"), "row", "column_sliced"),
    (("column", "column", "column", "column"), "sparse", "row"),
    (("full", "full", "full", "full"), "column", "row"),
    (("column", "row", "row", "column"), "sparse", "column"),
    (("row", "full", "full", "one"), "row", "column"),
    (("", "one", "row", ""), "row", "row"),
    (("", "", "", "row"), "row", "row"),
]


@every
@pytest.mark.parametrize(("spread", "lies", "layout"), SPREAD, ids=str)
def test_operands_in_every_spread(family, spread, lies, layout):
    found = [side(family, each, seed, lies) for seed, each in enumerate(spread)]
    sides = Sides(*found, "silu", 0.5, 2.0)
    if family.gated:
        sides = Sides(None, None, *found[2:], "silu")
    check(family, *operands(family), sides, layout)


@some(lambda name, own: name in ENDS and not own.gated)
@pytest.mark.parametrize("layout", ["row", "column"])
@pytest.mark.parametrize("which", ["bias", "residual"])
def test_the_result_may_take_the_place_of_what_is_added(family, layout, which):
    sides = Sides(**{which: side(family, "full")}, activation="relu")
    check(family, *operands(family), sides, layout, which)


# Of operands, of the result, and of what is added.
TYPES = [(FP32, HALF, FP32), (HALF, HALF, FP32), (HALF, FP32, HALF), (torch.int8, FP32, HALF)]


@some(lambda name, own: own.size == TILE.size and own.dtype == FP32 and not own.patched)
@pytest.mark.parametrize(("dtype", "out_dtype", "added"), TYPES, ids=str)
def test_types(family, dtype, out_dtype, added):
    if family.gated and dtype == torch.int8:
        pytest.skip("gated products are of floating types")
    scales = side(family, "column") / 512, side(family, "row", seed=6)  # fp16 ends at 65504
    sides = Sides(*scales, side(family, "full", dtype=added), side(family, "column", dtype=added), "gelu")
    if family.gated:
        sides = sides._replace(scale_a=None, scale_b=None, bias=side(family, "row", dtype=added))
    a, b = operands(family._replace(dtype=dtype))
    check(family, a, b, sides, "column", out_dtype=out_dtype)


@some(lambda name, own: own.gated)
def test_gated_matrices_each_with_strides_of_its_own(family):
    (_, n, k), (a, b) = family.size, operands(family)
    other = values((k, n), family.dtype, 2)
    rows, both = values((2 * n, k), family.dtype, 1), values((k, 2 * n), family.dtype, 1)
    pairs = [(placed(b, layout), other) for layout in ("column", "sparse", "offset")]
    pairs += [(right, left) for left, right in pairs]
    pairs += [(rows[:n].mT, rows[n:].mT), (rows[::2].mT, rows[1::2].mT), (both[:, :n], both[:, n:])]
    for gate, up in pairs:
        check(family, a, gate, Sides(activation="silu"), up=up)


@every
def test_not_finite_values_come_out_where_torch_has_them(family):
    (m, n, k), (a, b) = family.size, operands(family)
    a[1, 3], a[2, k - 1], b[9, 1], b[k - 1, 2] = torch.inf, torch.nan, torch.nan, -torch.inf
    residual, out = side(family, "full"), torch.empty(m, n, dtype=family.dtype)
    residual[0, 0], residual[m - 1, 0] = torch.inf, torch.nan
    up = made(family, a, b, out, Sides(residual=residual))
    wanted = a.double() @ b.double()
    wanted = wanted + residual if up is None else wanted * (a.double() @ up.double() + residual)
    assert torch.equal(out.isnan(), wanted.isnan())
    assert torch.equal(out == torch.inf, wanted == torch.inf)
    assert torch.equal(out == -torch.inf, wanted == -torch.inf)


# One element, row or column; whole tiles; rows of whole 16 bytes; beyond tiles; rows that end amid 16 bytes.
SIZES = [(1, 1, 64), (1, 45, 83), (37, 1, 83), (32, 32, 64), (64, 68, 72), (33, 65, 97), (37, 51, 64)]


@some(lambda name, own: own.size == TILE.size)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(family, size):
    if family.gated and size[1] == 1 and family.precision == "tf32":
        pytest.skip("one column lies by columns, in which no descriptor stores gated products")
    bias, residual = values((size[1],), family.dtype, 3), values(size[:2], family.dtype, 4)
    a, b = operands(family, size)
    b = b if family.patched else placed(b, "padded")
    check(family, a, b, Sides(bias=bias, residual=residual, activation="silu"), "padded")


@some(lambda name, own: own.patched or (name in (*ENDS, "gated descriptor") and own.of_b != "odd"))
def test_batches(family):
    """Of two dimensions, in either order, and broadcast; what is added differs, or is the same along one."""
    a, b = operands(family, batch=(2, 2))
    pairs = [(a, b), (a.transpose(0, 1), b.transpose(0, 1)), (a[:1], b), (a, b[:, :1])]
    if family.size == TILE.size:  # whose rows may be those of all matrices
        apart = placed(a, "sliced")  # whose rows are not
        pairs = [(a, b[0, 0]), *([(apart, b[0, 0])] if family.gated else pairs)]
    for i, (left, right) in enumerate(pairs):
        shape = torch.matmul(left, right).shape
        of_bias, of_residual = shape, shape[1:] if i % 2 else (shape[0], 1, *shape[2:])
        if family.gated:
            of_bias = of_residual = shape[-1:]
        check(
            family, left, right, Sides(bias=values(of_bias, FP32, 2), residual=values(of_residual, FP32, 3))
        )


def test_batches_of_three_dimensions_that_do_not_merge():
    a, b = values((2, 3, 2, 37, 51), FP32), values((2, 1, 2, 51, 29), FP32, 1)
    sides = Sides(bias=values((3, 1, 1, 29), FP32, 2), residual=values((2, 1, 1, 37, 29), FP32, 3))
    assert len(matmul_call(a, b, torch.empty(2, 3, 2, 37, 29), "ieee", **sides._asdict()).batch_shape) == 3
    check(TILE, a, b, sides)


@pytest.mark.parametrize("gated", [False, True])
def test_the_same_bits_by_every_family(gated):
    """A pure function of the sums: what is stored differs where sums do, and here they do not."""
    a, b = (torch.randint(-8, 8, shape).float() for shape in ((37, 83), (83, 29)))
    sides = Sides(bias=side(TILE, "row"), residual=side(TILE, "full"), activation="gelu")
    found = []
    for family in FAMILIES.values():
        if (family.gated, family.size, family.dtype) == (gated, TILE.size, FP32):
            found.append(torch.empty(37, 29))
            made(family, a, placed(b, family.of_b), found[-1], sides)
    assert len(found) > 2
    assert all(torch.equal(bytes_of(found[0]), bytes_of(other)) for other in found[1:])
