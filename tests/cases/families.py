"""Every family of products over one table of cases: interpreted at small sizes, on a GPU at full ones.

Each result is right, within its bound, and lies in a frame of poison that stays. Around operands lies NaN,
which must not be read; in the interpreter nothing is read but operands and what kernels wrote before.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from tests import configs
from tests.accesses import reading_only
from tests.configs import odd_rows, skinny_k, skinny_n, tile, tma
from tests.launched import DEVICE, INTERPRETED, launched
from tests.reference import (
    ACTIVATIONS,
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
from tritile.choose import waves
from tritile.core import device as devices
from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.families import launching
from tritile.families.space import illegal, legal_configs
from tritile.ops.products import matmul_call

BY_ROWS = "tritile.core.problem._BY_ROWS_FROM"
WIDE = "tritile.families.matmul_tile.family.WIDE_FROM"
FP32, BF16, HALF = torch.float32, torch.bfloat16, torch.float16
PLAIN = Sides()
FULL = (301, 203, 517)
REPEATED = 1 if INTERPRETED else 10


class Family(NamedTuple):
    """How a family is tried.

    - `configs`: those for a problem.
    - `size`: M, N and K, none of which fills its last tile.
    - `of_b`: how b lies; "odd": contiguous along K, in rows that begin amid a word.
    - `few`: it makes products of few rows; `by_columns`: of few columns, and the large operand is a.
    - `by_tiles`: rows or columns of results are contiguous, as descriptors and warpgroups store them.
    - `precision`: by descriptor tf32 is computed as fp32 in the interpreter.
    - `tensor_cores`: whether it multiplies by them, on a GPU.
    """

    configs: Callable[[object], list[Config]]
    size: tuple[int, int, int] = (37, 29, 83)
    of_b: str = "row"
    few: bool = False
    by_columns: bool = False
    by_tiles: bool = False
    precision: str = "ieee"
    dtype: torch.dtype = FP32
    gated: bool = False
    patched: tuple[tuple[str, int], ...] = ()  # for what large products alone do
    tensor_cores: bool | None = None


def by_descriptor(gated=False, **how):
    config = tma(32, 32, 32, group=2, **how)
    return Family(lambda problem: [config], by_tiles=True, precision="tf32", gated=gated)


def few(config, of_b, by_columns=False):
    """A family of few rows, by the config that a function makes for so many."""
    return Family(
        lambda problem: [config(min(problem.m, problem.n))],
        (37, 3, 131) if by_columns else (3, 37, 131),
        of_b,
        few=True,
        by_columns=by_columns,
        dtype=HALF if of_b == "odd" else FP32,
    )


TILE = Family(lambda problem: [tile(32, 32, 32, group=2)])
SMALL_FAMILIES = {
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


def of_config(config, gated=False):
    by_tiles = config.family != "tile"
    return Family(lambda problem: [config], FULL, by_tiles=by_tiles, dtype=BF16, gated=gated)


def ranked(name, of_b, by_columns=False):
    """A family of few rows, by the configs that its formula prefers; of odd rows by every third."""
    odd = of_b == "odd"

    def found(problem):
        device = devices.gpu(0)
        if device.nvidia < 80:
            pytest.skip("no asynchronous copies to shared memory")
        return legal_configs(problem, device, name)[::3] if odd else waves.ranked(problem, device, name)

    rows = 30 if odd else 3
    size = (1000, rows, 1043) if by_columns else (rows, 1000, 1043)
    dtype = HALF if odd else FP32
    return Family(found, size, of_b, True, by_columns, dtype=dtype, tensor_cores=odd)


def full_families():
    found = {str(config): of_config(config) for config in configs.ON_GPU}
    by_tma = [c for c in configs.ON_GPU if c.family == "descriptor" and c["SPLIT_K"] == 1]
    gated = [c for c in configs.ON_GPU if c.family == "tile"] + by_tma
    found |= {f"gated {config}": of_config(config, True) for config in gated}
    for name, of_b in (("skinny_k", "column"), ("skinny_n", "row"), ("odd_rows", "odd")):
        found |= {name: ranked(name, of_b), f"{name}, columns": ranked(name, of_b, True)}
    return found


FAMILIES = SMALL_FAMILIES if INTERPRETED else full_families()
# In the interpreter, one for each way in which sums are finished and stored.
ENDS = (
    "tile", "by halves", "split", "gated tile", "gated persistent, by halves",
    "few rows", "few columns", "few columns across", "odd rows", "odd columns, split",
) if INTERPRETED else tuple(FAMILIES)  # fmt: skip


def some(which=lambda name, own: True):
    """Run a test by the families that a function of name and family picks."""
    found = {name: own for name, own in FAMILIES.items() if which(name, own)}
    return pytest.mark.parametrize("family", found.values(), ids=found)


def operands(family, size=None, batch=()):
    m, n, k = size or family.size
    if family.by_columns:
        a, b = operands(family._replace(by_columns=False), (n, m, k), batch)
        return b.mT, a.mT.contiguous()
    a = values((*batch, m, k), family.dtype, 0, DEVICE)
    if family.of_b == "odd":
        return a, at_offset(1, n, k, family.dtype, device=DEVICE)
    return a, placed(values((*batch, k, n), family.dtype, 1, DEVICE), family.of_b)


def side(family, spread, seed=5, lies="row", dtype=None):
    """What is spread over a result as `spread` says, and lies in memory as `lies` does; None for ""."""
    m, n, _ = family.size
    shape = {"": None, "one": (), "row": (1, n), "column": (m, 1), "full": (m, n)}[spread]
    if shape is None:
        return None
    found = values(shape, dtype or family.dtype, seed, DEVICE)
    return placed(found, lies) if shape else found


def launches(family, a, b, out, sides=PLAIN, up=None):
    """Yield, for each of the family's configs, what makes the product.

    Gated products have no scales, weights or residual: what would be the residual is the other's bias.
    """
    extras = sides._asdict()
    if family.gated:
        extras = {"bias": sides.bias, "bias_up": sides.residual, "activation": sides.activation, "up": up}
    with pytest.MonkeyPatch.context() as patched:
        for name, value in family.patched:
            patched.setattr(name, value)
        call = matmul_call(a, b, out, family.precision, **extras)
        found = family.configs(call.problem)
        assert found
        for config in found:
            if INTERPRETED:
                assert illegal(config, call.problem, target_device("nvidia-h200")) is None
                with reading_only(*(t for t in (a, b, up, *sides[:4]) if t is not None)):
                    yield functools.partial(launching.run_interpreted, call, config)
            else:
                yield functools.partial(launched(call, config), *call.tensors)


def second(b, seed=9):
    """The second matrix of a gated product, of few bits."""
    return (8 * values(tuple(b.shape), b.dtype, seed, DEVICE)).round() / 8


def check(family, a, b, sides=PLAIN, layout="row", added="", out_dtype=None, up=None):
    """Make a product into a frame of poison, or of `added`, whose place the result takes.

    It is right, has the same bits each time, and nothing else is written.
    """
    unseen = layout in ("strided", "sparse") or (family.gated and "column" in layout)
    layout = "sliced" if unseen and family.by_tiles else layout
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    buffer, out = frame((*batch, a.shape[-2], b.shape[-1]), out_dtype or family.dtype, layout, DEVICE)
    before = getattr(sides, added) if added else out.clone()
    given = sides._replace(**{added: out}) if added else sides
    up = second(b) if family.gated and up is None else up
    for run in launches(family, a, b, out, given, up):
        found = []
        for _ in range(REPEATED):
            out.copy_(before)
            run()
            found.append(bytes_of(out))
        assert all(torch.equal(found[0], other) for other in found[1:])
        if family.gated:
            assert_gated(out, a, b, up, sides.activation, sides.bias, sides.residual)
        else:
            assert_fused(out, a, b, sides, tensor_cores=family.tensor_cores)
    assert guard_intact(buffer, out)


def every_layout():
    """Each family with each layout; in the interpreter every second one where another family ends alike."""
    layouts = [*LAYOUTS, "padded"]
    return [
        pytest.param(own, layout, id=f"{layout}-{name}")
        for number, (name, own) in enumerate(FAMILIES.items())
        for layout in (layouts if name in ENDS or own.patched else layouts[number % 2 :: 2])
    ]


@pytest.mark.parametrize(("family", "layout"), every_layout())
def test_layouts_of_operands_and_of_out(family, layout):
    """Of the smaller operand where a family reads the larger one as it lies in one way alone."""
    a, b = operands(family)
    if family.by_columns:
        check(family, a, placed(b, layout), layout=layout)
        return
    check(family, placed(a, layout), b, layout=layout)
    if family.of_b == "row" and not family.few:
        check(family, a, placed(b, layout))


@some(lambda name, own: name in ENDS or own.dtype == torch.float64)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_scaled_and_weighted_sums(family, activation):
    sides = Sides(None, None, side(family, "row"), side(family, "full", 6), activation)
    if not family.gated:
        scales = side(family, "column", 7, dtype=FP32), side(family, "row", 8, dtype=FP32)
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


@some(lambda name, own: name in ENDS)
@pytest.mark.parametrize(("spread", "lies", "layout"), SPREAD, ids=str)
def test_operands_in_every_spread(family, spread, lies, layout):
    of_scales, of_added = spread[:2], spread[2:]
    # No operation has scales of each element, and wide tiles have no registers for them.
    if not INTERPRETED and "full" in of_scales:
        of_scales = ("column", "row")
    sides = Sides(
        *(side(family, each, seed, lies, FP32) for seed, each in enumerate(of_scales)),
        *(side(family, each, seed, lies) for seed, each in enumerate(of_added, start=2)),
        "silu", 0.5, 2.0,
    )  # fmt: skip
    if family.gated:
        sides = Sides(None, None, sides.bias, sides.residual, "silu")
    check(family, *operands(family), sides, layout)


@some(lambda name, own: name in ENDS and not own.gated)
@pytest.mark.parametrize("layout", ["row", "column"])
@pytest.mark.parametrize("which", ["bias", "residual"])
def test_result_over_what_is_added(family, layout, which):
    sides = Sides(**{which: side(family, "full")}, activation="relu")
    check(family, *operands(family), sides, layout, which)


# Of operands, of the result, and of what is added.
TYPES = [(FP32, HALF, FP32), (HALF, HALF, FP32), (HALF, FP32, HALF), (torch.int8, FP32, HALF)]
if not INTERPRETED:
    TYPES = [(HALF, BF16, FP32), (BF16, HALF, HALF), *TYPES[2:]]


@some(lambda name, own: not own.few and own.dtype in (FP32, BF16) and not own.patched)
@pytest.mark.parametrize(("dtype", "out_dtype", "added"), TYPES, ids=str)
def test_types(family, dtype, out_dtype, added):
    if family.gated and dtype == torch.int8:
        pytest.skip("gated products are of floating types")
    # fp16 ends at 65504
    scales = side(family, "column", dtype=FP32) / 512, side(family, "row", seed=6, dtype=FP32)
    sides = Sides(*scales, side(family, "full", dtype=added), side(family, "column", dtype=added), "gelu")
    if family.gated:
        sides = sides._replace(scale_a=None, scale_b=None, bias=side(family, "row", dtype=added))
    a, b = operands(family._replace(dtype=dtype))
    check(family, a, b, sides, "column", out_dtype=out_dtype)


@some(lambda name, own: own.gated)
def test_gated_matrices_with_own_strides(family):
    (_, n, k), (a, b) = family.size, operands(family)
    other = values((k, n), family.dtype, 2, DEVICE)
    rows, both = (values(shape, family.dtype, 1, DEVICE) for shape in ((2 * n, k), (k, 2 * n)))
    pairs = [(placed(b, layout), other) for layout in ("column", "sparse", "offset")]
    pairs += [(right, left) for left, right in pairs]
    pairs += [(rows[:n].mT, rows[n:].mT), (rows[::2].mT, rows[1::2].mT), (both[:, :n], both[:, n:])]
    for gate, up in pairs:
        check(family, a, gate, Sides(activation="silu"), up=up)


@some()
def test_not_finite_values_as_torch(family):
    (m, n, k), (a, b) = family.size, operands(family)
    a[1, 3], a[2, k - 1], b[9, 1], b[k - 1, 2] = torch.inf, torch.nan, torch.nan, -torch.inf
    residual, out = side(family, "full"), torch.empty(m, n, dtype=family.dtype, device=DEVICE)
    residual[0, 0], residual[m - 1, 0] = torch.inf, torch.nan
    up = second(b) if family.gated else None
    for activation in [""] if INTERPRETED or family.gated else ACTIVATIONS:
        wanted = ACTIVATIONS[activation](a.double() @ b.double())
        wanted = wanted + residual if up is None else wanted * (a.double() @ up.double() + residual)
        for run in launches(family, a, b, out, Sides(residual=residual, activation=activation), up):
            run()
            assert torch.equal(out.isnan(), wanted.isnan())
            assert torch.equal(out == torch.inf, wanted == torch.inf)
            assert torch.equal(out == -torch.inf, wanted == -torch.inf)


# One element, row or column; whole tiles; rows of whole 16 bytes; beyond tiles; rows that end amid 16 bytes.
SIZES = [(1, 1, 64), (1, 45, 83), (37, 1, 83), (32, 32, 64), (64, 68, 72), (33, 65, 97), (37, 51, 64)]
if not INTERPRETED:
    SIZES = [(256, 320, 512), (77, 515, 259), (1, 33, 256), (64, 1, 256)]


@some(lambda name, own: not own.few and own.dtype in (FP32, BF16))
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(family, size):
    if family.gated and size[1] == 1 and family.by_tiles:
        pytest.skip("one column lies by columns, in which no descriptor stores gated products")
    bias, residual = (values(shape, family.dtype, 3, DEVICE) for shape in ((size[1],), size[:2]))
    a, b = operands(family, size)
    b = b if family.patched else placed(b, "padded")
    check(family, a, b, Sides(bias=bias, residual=residual, activation="silu"), "padded")


@some(lambda name, own: own.patched or (name in (*ENDS, "gated descriptor") and own.of_b != "odd"))
def test_batches(family):
    """Of two dimensions, in either order, and broadcast; what is added differs, or is the same along one."""
    # A matrix for several makes rows of them all, of which few families take 8.
    m, n, k = family.size
    size = ((13, 3, k) if family.by_columns else (3, 13, k)) if INTERPRETED and family.few else (m, n, k)
    a, b = operands(family, size, (2, 2) if INTERPRETED else (3, 2) if family.few else (3, 5))
    pairs = [(a, b), (a.transpose(0, 1), b.transpose(0, 1)), (a[:1], b), (a, b[:, :1])]
    if not family.few:  # whose rows may be those of all matrices
        apart = placed(a, "sliced")  # whose rows are not
        pairs = [(a, b[0, 0]), *([(apart, b[0, 0])] if family.gated else pairs)]
    for i, (left, right) in enumerate(pairs):
        shape = torch.matmul(left, right).shape
        of_bias, of_residual = shape, shape[1:] if i % 2 else (shape[0], 1, *shape[2:])
        if family.gated:
            of_bias = of_residual = shape[-1:]
        bias, residual = (values(each, FP32, 2 + j, DEVICE) for j, each in enumerate((of_bias, of_residual)))
        check(family, left, right, Sides(bias=bias, residual=residual))
