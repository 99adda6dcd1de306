"""Epilogues in Triton's interpreter: types, batches and strides of what follows the sums of a product.

What all families have to do is in test_families_interpreted.py.
"""

import math

import pytest
import torch

import tritile
from tests.configs import tile, tma
from tests.reference import Sides, assert_fused, bytes_of, frame, guard_intact, name, placed, values
from tritile.core.problem import ACTIVATIONS
from tritile.ops.described import Extras, described
from tritile.runtime import launch

pytestmark = pytest.mark.interpreted

TILE = tile(32, 32, 32, group=2)
CONFIGS = {
    "tile": TILE,
    "descriptor": tma(32, 32, 32, group=2),
    "persistent": tma(32, 32, 32, group=2, persistent=True),
    "by halves": tma(32, 32, 32, group=2, subtiles=2),
    "split": tma(32, 32, 32, group=2, split=2),
}
FP32, FP16, FP64 = torch.float32, torch.float16, torch.float64
M, N, K = 37, 29, 51


def configs(*names):
    return pytest.mark.parametrize("config", [CONFIGS[name] for name in names], ids=names)


def side(spread, dtype=FP32, seed=5, shape=(M, N)):
    """An operand that is spread over a result of this shape as `spread` says."""
    m, n = shape[-2:]
    sizes = {"one": (), "row": (n,), "column": (m, 1), "full": shape, "": None}[spread]
    return None if sizes is None else values(sizes, dtype, seed)


def run(config, a, b, out, sides):
    """Through the kernel itself, with out as it lies; by descriptor tf32 is computed as fp32 here."""
    precision = "ieee" if config == TILE else "tf32"
    launch.run_interpreted(described(a, b, out, precision, Extras(*sides)), config)
    assert_fused(out, a, b, sides)


def operands(dtype, batch=(), seed=0):
    return values((*batch, M, K), dtype, seed), values((*batch, K, N), dtype, seed + 1)


def test_gelu_is_right_to_the_last_digits_far_below_zero_too():
    x = torch.linspace(-6, 14, 2001)[:, None]
    got = tritile.linear(x, torch.ones(1, 1), activation="gelu").double()
    wanted = torch.special.ndtr(x.double()) * x.double()
    # Each of three roundings of the exponent of e^(-x^2 / 2) moves the share by up to eps x^2 / 4.
    allowed = 6e-7 + torch.where(x < 0, 0.75 * torch.finfo(FP32).eps * x**2, 0.0)
    assert ((got - wanted).abs() <= allowed * wanted.abs()).all()


@configs("tile", "descriptor")
@pytest.mark.parametrize(
    ("dtype", "out_dtype", "kind"),
    [(FP32, FP16, FP32), (FP16, FP32, FP16), (torch.int8, FP32, FP16)],
    ids=name,
)
def test_dtypes(config, dtype, out_dtype, kind):
    a, b = operands(dtype)
    out = torch.empty(M, N, dtype=out_dtype)
    small = 2.0**-9 if dtype == torch.int8 else 1.0  # fp16 ends at 65504
    scales = side("column") * small, side("row", seed=6)
    run(config, a, b, out, Sides(*scales, side("full", kind), side("column", kind), "gelu"))


@pytest.mark.parametrize("activation", ["", *ACTIVATIONS])
@pytest.mark.parametrize("weighted", [False, True])
def test_float64_keeps_its_digits(activation, weighted):
    a, b = operands(FP64)
    out = torch.empty(M, N, dtype=FP64)
    weights = {"alpha": 1 / 3, "beta": -0.1} if weighted else {}
    of_both = side("one", FP64), side("column", FP64)
    added = side("row", FP64), side("full", FP64, 6)
    for sides in ((None, None, *added), (*of_both, None, None)):
        run(TILE, a, b, out, Sides(*sides, activation, **weights))


@configs("tile", "persistent")
def test_batches(config):
    """What is added differs by matrix, or is the same for some dimensions of the batch, or for all."""
    a, b = operands(FP32, (2, 2))
    for given, other in (((2, 2), (1, 1)), ((1, 2), (2, 1)), ((2,), ())):
        _, out = frame((2, 2, M, N), FP32, "column" if given == (2, 2) else "row")
        bias, residual = values((*given, M, N), FP32, 3), values((*other, M, N), FP32, 4)
        run(config, a, b, out, Sides(bias=bias, residual=residual, activation="relu"))


def test_a_batch_of_three_dimensions():
    """That do not merge: b is the same for the middle one, and what is added for the first."""
    a, b = values((2, 3, 2, M, K), FP32), values((2, 1, 2, K, N), FP32, 1)
    bias, residual = values((3, 1, 1, N), FP32, 2), values((2, 1, 1, M, N), FP32, 3)
    out = torch.empty(2, 3, 2, M, N)
    call = described(a, b, out, "ieee", Extras(bias=bias, residual=residual))
    assert len(call.batch_shape) == 3
    run(TILE, a, b, out, Sides(bias=bias, residual=residual, activation="silu"))


@configs(*CONFIGS)
@pytest.mark.parametrize("layout", ["column", "column_sliced"])
def test_results_that_lie_column_by_column_are_made_turned(config, layout):
    a, b = operands(FP32)
    rows, columns = ([side(spread, seed=seed) for seed in (6, 7)] for spread in ("row", "column"))
    sides = Sides(columns[0], rows[0], rows[1], columns[1], "gelu", 0.5, 2.0)
    buffer, out = frame((M, N), FP32, layout)
    call = described(a, b, out, "ieee", Extras(*sides))
    assert call.swapped
    assert call.problem.epilogue == "scale_a=column scale_b=row bias=column residual=row weighted gelu"
    run(config, a, b, out, sides)
    assert guard_intact(buffer, out)
    run(config, a, b, out, Sides(rows[0], side("full"), side("full", seed=7), side("one", seed=8)))


@configs("tile", "descriptor")
def test_what_is_added_lies_in_any_way(config):
    a, b = operands(FP32)
    for layout in ("column", "sparse"):
        bias, residual = placed(side("full"), layout), placed(side("full", seed=6), layout)
        run(config, a, b, torch.empty(M, N), Sides(bias=bias, residual=residual))
        column, row = placed(side("column"), layout), placed(values((1, N), FP32, 6), layout)
        run(config, a, b, torch.empty(M, N), Sides(column, row, row, column))


# The operations, by which 16-bit and fp8 types are widened here and rounded by torch.


@pytest.mark.parametrize("kind", [None, torch.bfloat16, FP32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP16, FP32, FP64], ids=name)
@pytest.mark.parametrize(("activation", "batch"), [("gelu", (2, 3)), (None, ())], ids=str)
def test_linear(dtype, activation, batch, kind):
    """`kind`: another type of what is added, and then of the result."""
    if dtype == FP64 and kind:
        kind = FP64
    x, weight = values((*batch, 9, 21), dtype), values((13, 21), dtype, 1)
    bias, residual = values((13,), kind or dtype, 2), values((*batch, 9, 13), kind or dtype, 3)
    got = tritile.linear(x, weight, bias, activation=activation, residual=residual, out_dtype=kind)
    assert got.dtype == (kind or dtype)
    assert_fused(got, x, weight.mT, Sides(bias=bias, residual=residual, activation=activation or ""))


def test_the_same_bits_by_every_family():
    """A pure function of the sums: what is stored differs where sums do, and here they do not."""
    a, b = (torch.randint(-8, 8, shape).float() for shape in ((M, K), (K, N)))
    sides = Sides(bias=side("row"), residual=side("full"), activation="gelu")
    found = []
    for config in CONFIGS.values():
        found.append(torch.empty(M, N))
        run(config, a, b, found[-1], sides)
    assert all(torch.equal(bytes_of(found[0]), bytes_of(other)) for other in found[1:])


HALVES = [(FP16, False), (FP32, False)]
FACTORS = [*((dtype, True) for dtype in (torch.bfloat16, FP64, torch.complex64)), *HALVES]


@pytest.mark.parametrize(("dtype", "batched"), FACTORS, ids=str)
@pytest.mark.parametrize("beta", [1, 0.5, 0])
def test_factors_are_not_read_where_alpha_is_0(dtype, batched, beta):
    """They hold NaN and infinities; their gradients are zeros."""
    op, batch = (tritile.baddbmm, (2,)) if batched else (tritile.addmm, ())
    sizes = (3, 5), (3, 4), (4, 5)
    added, a, b = (values((*batch, *size), FP64, i).to(dtype) for i, size in enumerate(sizes))
    a[..., 0, 0], b[..., 1, 1] = math.nan, math.inf
    wanted = beta * added
    added = added if beta else added * math.nan
    for alpha in (0, 0.0, -0.0) + (0j,) * dtype.is_complex:
        assert torch.equal(op(added, a, b, beta=beta, alpha=alpha), wanted)
    out = torch.full_like(added, math.nan)
    assert op(added, a, b, beta=beta, alpha=0, out=out) is out
    assert torch.equal(out, wanted)
    if not dtype.is_complex:
        active = op(added, a, b, beta=beta, alpha=0, activation="relu")
        assert torch.equal(active, wanted.relu())

    def product(added, a, b):
        return op(added, a, b, beta=beta, alpha=0)

    compiled = torch.compile(product, backend="aot_eager")
    operator = getattr(torch.ops.tritile, op.__name__)(added, a, b, beta=beta, alpha=0)
    batches = torch.vmap(lambda x: product(added, x, b))(torch.stack([a, a]))
    assert all(torch.equal(got, wanted) for got in (operator, *batches))
    tensors = [tensor.requires_grad_() for tensor in (added, a, b)]
    for call in (product, compiled):
        y = call(*tensors)
        assert torch.equal(y, wanted)
        of_added, *of_factors = torch.autograd.grad(y, tensors, torch.ones_like(y))
        assert torch.equal(of_added, torch.full_like(added, beta))
        assert not any(gradient.any() for gradient in of_factors)
    _, tangent = torch.func.jvp(product, (added, a, b), (torch.ones_like(added), a, b))
    assert torch.equal(tangent, torch.full_like(added, beta))
    with pytest.raises(tritile.errors.ShapeError, match="K is 4"):
        product(added, a, b[..., :3, :])
