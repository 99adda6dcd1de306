"""Epilogues in Triton's interpreter, in every family that it runs: what follows the sums of a product."""

import math

import pytest
import torch

import tritile
from tests.configs import tile, tma
from tests.reference import (
    Sides,
    assert_fused,
    bytes_of,
    finished64,
    frame,
    guard_intact,
    name,
    placed,
    values,
)
from tritile.core.problem import ACTIVATIONS
from tritile.ops.described import Extras, described
from tritile.runtime import launch

pytestmark = pytest.mark.interpreted

TILE = tile(32, 32, 32, group=2)
CONFIGS = [TILE]
for how in ((False, 1, 1), (True, 1, 1), (True, 1, 2), (False, 1, 2), (False, 2, 1)):
    persistent, shared, halves = how
    CONFIGS.append(tma(32, 32, 32, group=2, persistent=persistent, split=shared, subtiles=halves))
IDS = ["tile", "descriptor", "persistent", "persistent-subtiles", "subtiles", "split"]
every_config = pytest.mark.parametrize("config", CONFIGS, ids=IDS)
some_configs = pytest.mark.parametrize("config", CONFIGS[:3], ids=IDS[:3])
# Sums that are finished whole, by halves, and by the last of two programs.
each_end = pytest.mark.parametrize("config", CONFIGS[::3] + CONFIGS[5:], ids=IDS[::3] + IDS[5:])
FP32, FP16, FP64 = torch.float32, torch.float16, torch.float64
M, N, K = 37, 29, 51


def side(spread, dtype=FP32, seed=5, shape=(M, N)):
    """An operand that is spread over a result of this shape as `spread` says."""
    m, n = shape[-2:]
    sizes = {"one": (), "row": (n,), "column": (m, 1), "full": shape, "": None}[spread]
    return None if sizes is None else values(sizes, dtype, seed)


def fp32_by(config):
    """The precision by which a family computes in fp32 here."""
    return "ieee" if config == TILE else "tf32"


def run(config, a, b, out, sides, precision=""):
    """Through the kernel itself, with out as it lies; by descriptor tf32 is computed as fp32 here."""
    precision = precision or fp32_by(config)
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


@every_config
@pytest.mark.parametrize("spread", ["one", "row", "column", "full"])
def test_every_operand_in_every_spread(config, spread):
    a, b = operands(FP32)
    buffer, out = frame((M, N), FP32, "sliced")
    run(config, a, b, out, Sides(*(side(spread, seed=seed) for seed in range(4))))
    assert guard_intact(buffer, out)


@each_end
@pytest.mark.parametrize("activation", ["", *ACTIVATIONS])
def test_every_activation_with_weights(config, activation):
    a, b = operands(FP32)
    sides = Sides(None, None, side("row"), side("full", seed=6), activation, -0.3, 1.7)
    run(config, a, b, torch.empty(M, N), sides)


@each_end
@pytest.mark.parametrize(
    ("bias", "residual"),
    [("one", "full"), ("row", "column"), ("column", "row"), ("full", "one"), ("", "full")],
)
def test_every_pair_of_what_is_added(config, bias, residual):
    a, b = operands(FP16)
    out = torch.empty(M, N, dtype=FP16)
    added = side(bias, FP16, 7), side(residual, FP32, 8)
    sides = Sides(side("column"), side("row", seed=6), *added, "silu", 0.5, 2.0)
    run(config, a, b, out, sides)


@pytest.mark.parametrize("config", CONFIGS[:2], ids=IDS[:2])
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
        run(TILE, a, b, out, Sides(*sides, activation, **weights), "ieee")


SPREADS = [(TILE, spread) for spread in ("one", "row", "column", "full")]


@pytest.mark.parametrize(
    ("config", "spread"), [*SPREADS, (CONFIGS[1], "full"), (CONFIGS[2], "full")], ids=str
)
def test_batches(config, spread):
    """What is added differs by matrix, or is the same for some dimensions of the batch, or for all."""
    a, b = operands(FP32, (2, 2))
    m, n = (M if spread in ("column", "full") else 1), (N if spread in ("row", "full") else 1)
    for given, other in (((2, 2), (1, 1)), ((1, 2), (2, 1)), ((2,), ())):
        _, out = frame((2, 2, M, N), FP32, "column" if given == (2, 2) else "row")
        bias, residual = values((*given, m, n), FP32, 3), values((*other, m, n), FP32, 4)
        run(config, a, b, out, Sides(bias=bias, residual=residual, activation="relu"))


def test_a_batch_of_three_dimensions():
    """That do not merge: b is the same for the middle one, and what is added for the first."""
    a, b = values((2, 3, 2, M, K), FP32), values((2, 1, 2, K, N), FP32, 1)
    bias, residual = values((3, 1, 1, N), FP32, 2), values((2, 1, 1, M, N), FP32, 3)
    out = torch.empty(2, 3, 2, M, N)
    call = described(a, b, out, "ieee", Extras(bias=bias, residual=residual))
    assert len(call.batch_shape) == 3
    run(TILE, a, b, out, Sides(bias=bias, residual=residual, activation="silu"))


@every_config
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


@some_configs
def test_what_is_added_lies_in_any_way(config):
    a, b = operands(FP32)
    for layout in ("column", "sparse"):
        bias, residual = placed(side("full"), layout), placed(side("full", seed=6), layout)
        run(config, a, b, torch.empty(M, N), Sides(bias=bias, residual=residual))
        column, row = placed(side("column"), layout), placed(values((1, N), FP32, 6), layout)
        run(config, a, b, torch.empty(M, N), Sides(column, row, row, column))


@each_end
@pytest.mark.parametrize("layout", ["row", "column"])
@pytest.mark.parametrize("which", ["bias", "residual"])
def test_the_result_may_take_the_place_of_what_is_added(config, layout, which):
    a, b = operands(FP32)
    added = side("full")
    buffer, out = frame((M, N), FP32, layout)
    out.copy_(added)
    call = described(a, b, out, fp32_by(config), Extras(**{which: out}, activation="relu"))
    launch.run_interpreted(call, config)
    assert_fused(out, a, b, Sides(**{which: added}, activation="relu"))
    assert guard_intact(buffer, out)


@every_config
@pytest.mark.parametrize("size", [(1, 1, 16), (1, 45, 51), (37, 1, 51), (32, 32, 32), (33, 65, 17)], ids=str)
def test_sizes(config, size):
    m, n, k = size
    if config == CONFIGS[-1]:
        k += 32  # a block for each of two programs
    a, b = values((m, k), FP32), values((k, n), FP32, 1)
    for bias in ((n,), (m, 1)):
        buffer, out = frame((m, n), FP32, "row")
        run(config, a, b, out, Sides(None, None, values(bias, FP32, 2), values((m, n), FP32, 3), "silu"))
        assert guard_intact(buffer, out)


@some_configs
def test_not_finite_values_come_out_where_torch_has_them(config):
    a, b = operands(FP32)
    a[3, 5], a[20, 50], b[7, 9] = math.nan, math.inf, -math.inf
    bias, residual = side("row"), side("full", seed=6)
    bias[4], residual[5, 5], residual[30, 2] = math.inf, math.nan, -math.inf
    for activation in ("", *ACTIVATIONS):
        out, sides = torch.empty(M, N), Sides(None, None, bias, residual, activation)
        launch.run_interpreted(described(a, b, out, fp32_by(config), Extras(*sides)), config)
        sums = torch.matmul(a.double(), b.double())
        wanted, _ = finished64(sums, sums * 0, sides, 0.0)
        assert torch.equal(out.isnan(), wanted.isnan())
        assert torch.equal(out == math.inf, wanted == math.inf)
        assert torch.equal(out == -math.inf, wanted == -math.inf)


# The operations, by which 16-bit and fp8 types are widened here and rounded by torch.


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP16, FP32, FP64], ids=name)
@pytest.mark.parametrize(("activation", "batch"), [(None, ()), ("gelu", (2, 3)), ("silu", ())], ids=str)
def test_linear(dtype, activation, batch):
    x, weight = values((*batch, 9, 21), dtype), values((13, 21), dtype, 1)
    bias, residual = values((13,), dtype, 2), values((*batch, 9, 13), dtype, 3)
    got = tritile.linear(x, weight, bias, activation=activation, residual=residual)
    assert got.dtype == dtype
    assert_fused(got, x, weight.mT, Sides(bias=bias, residual=residual, activation=activation or ""))
    assert_fused(tritile.linear(x, weight), x, weight.mT, Sides())


@pytest.mark.parametrize("kind", [torch.bfloat16, FP16, FP32], ids=name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP16, FP32], ids=name)
def test_linear_adds_other_dtypes(dtype, kind):
    x, weight = values((9, 21), dtype), values((13, 21), dtype, 1)
    bias, residual = values((13,), kind, 2), values((9, 13), kind, 3)
    for out_dtype in (torch.bfloat16, FP16, FP32):
        got = tritile.linear(x, weight, bias, residual=residual, out_dtype=out_dtype)
        assert got.dtype == out_dtype
        assert_fused(got, x, weight.mT, Sides(bias=bias, residual=residual))


def test_the_same_bits_by_every_family():
    """A pure function of the sums: what is stored differs where sums do, and here they do not."""
    a, b = (torch.randint(-8, 8, shape).float() for shape in ((M, K), (K, N)))
    sides = Sides(bias=side("row"), residual=side("full"), activation="gelu")
    found = []
    for config in CONFIGS:
        found.append(torch.empty(M, N))
        run(config, a, b, found[-1], sides)
    assert all(torch.equal(bytes_of(found[0]), bytes_of(other)) for other in found[1:])


def weighted(dtype, batched):
    """Return an op and its operands; the factors hold NaN and infinities."""
    op, batch = (tritile.baddbmm, (2,)) if batched else (tritile.addmm, ())
    sizes = (3, 5), (3, 4), (4, 5)
    added, a, b = (values((*batch, *size), torch.float64, i).to(dtype) for i, size in enumerate(sizes))
    a[..., 0, 0], b[..., 1, 1] = math.nan, math.inf
    return op, added, a, b


no_product = pytest.mark.parametrize("dtype", [torch.bfloat16, FP16, FP32, FP64, torch.complex64], ids=name)


@no_product
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("beta", [1, 0.5, 0])
def test_factors_are_not_read_where_alpha_is_0(dtype, batched, beta):
    op, added, a, b = weighted(dtype, batched)
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
    operator = getattr(torch.ops.tritile, op.__name__)
    compiled = torch.compile(lambda *given: op(*given, beta=beta, alpha=0), backend="aot_eager")
    batches = torch.vmap(lambda x: op(added, x, b, beta=beta, alpha=0))(torch.stack([a, a]))
    for got in (operator(added, a, b, beta=beta, alpha=0), compiled(added, a, b), *batches):
        assert torch.equal(got, wanted)
    with pytest.raises(tritile.errors.ShapeError, match="K is 4"):
        op(added, a, b[..., :3, :], alpha=0)


@no_product
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("compiles", [False, True])
def test_factors_have_zeros_for_gradients_where_alpha_is_0(dtype, batched, compiles):
    op, *tensors = weighted(dtype, batched)
    added, a, b = (tensor.requires_grad_() for tensor in tensors)

    def product(added, a, b):
        return op(added, a, b, beta=2, alpha=0)

    y = (torch.compile(product, backend="aot_eager") if compiles else product)(added, a, b)
    assert torch.equal(y, 2 * added)
    grads = torch.autograd.grad(y, (added, a, b), torch.ones_like(y))
    assert torch.equal(grads[0], torch.full_like(added, 2))
    assert all(torch.equal(grad, torch.zeros_like(of)) for grad, of in zip(grads[1:], (a, b), strict=True))
    _, tangent = torch.func.jvp(product, (added, a, b), (torch.ones_like(added), a, b))
    assert torch.equal(tangent, torch.full_like(added, 2))
    with pytest.raises(tritile.errors.ShapeError, match="K is 4"):
        product(added, a, b[..., :3, :])
