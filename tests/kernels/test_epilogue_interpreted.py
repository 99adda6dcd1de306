"""Epilogues and gated products in Triton's interpreter: types, batches and strides of each operand.

What all families have to do is in test_families_interpreted.py.
"""

import math

import pytest
import torch

import tritile
from tests.configs import tile, tma
from tests.reference import Sides, assert_fused, assert_gated, frame, guard_intact, placed, values
from tritile.core.call import call_for
from tritile.core.problem import MatmulProblem
from tritile.ops.products import matmul_call
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
FP32, FP16, FP64, INT8 = torch.float32, torch.float16, torch.float64, torch.int8
M, N, K = 37, 29, 51


def configs(*names):
    return pytest.mark.parametrize("config", [CONFIGS[name] for name in names], ids=names)


def side(spread, dtype=FP32, seed=5):
    """An operand that is spread over a result as `spread` says."""
    return values({"one": (), "row": (N,), "column": (M, 1), "full": (M, N)}[spread], dtype, seed)


def run(config, a, b, out, sides, up=None):
    """Through the kernel itself, with out as it lies; by descriptor tf32 is computed as fp32 here.

    Of a gated product what would be the residual is the other matrix's bias.
    """
    extras = sides._asdict()
    if up is not None:
        extras = {"bias": sides.bias, "bias_up": sides.residual, "activation": sides.activation, "up": up}
    precision = "ieee" if config == TILE else "tf32"
    launch.run_interpreted(matmul_call(a, b, out, precision, **extras), config)
    if up is None:
        assert_fused(out, a, b, sides)
    else:
        assert_gated(out, a, b, up, sides.activation, sides.bias, sides.residual)


def operands(dtype=FP32):
    return values((M, K), dtype), values((K, N), dtype, 1), values((K, N), dtype, 2)


def test_gelu_is_right_to_the_last_digits_far_below_zero_too():
    x = torch.linspace(-6, 14, 2001)[:, None]
    got = tritile.linear(x, torch.ones(1, 1), activation="gelu").double()
    wanted = torch.special.ndtr(x.double()) * x.double()
    # Each of three roundings of the exponent of e^(-x^2 / 2) moves the share by up to eps x^2 / 4.
    allowed = 6e-7 + torch.where(x < 0, 0.75 * torch.finfo(FP32).eps * x**2, 0.0)
    assert ((got - wanted).abs() <= allowed * wanted.abs()).all()


@configs("tile", "descriptor", "by halves")
@pytest.mark.parametrize(
    ("dtype", "out_dtype", "kind"),
    [(FP32, FP16, FP32), (FP16, FP16, FP32), (FP16, FP32, FP16), (INT8, FP32, FP16)],
    ids=str,
)
def test_dtypes(config, dtype, out_dtype, kind):
    a, b, up = operands(dtype)
    out = torch.empty(M, N, dtype=out_dtype)
    small = 2.0**-9 if dtype == INT8 else 1.0  # fp16 ends at 65504
    scales = side("column") * small, side("row", seed=6)
    run(config, a, b, out, Sides(*scales, side("full", kind), side("column", kind), "gelu"))
    if dtype != INT8:
        run(config, a, b, out, Sides(None, None, side("row", kind), None, "gelu_tanh"), up)


def test_a_batch_of_three_dimensions():
    """That do not merge: b is the same for the middle one, and what is added for the first."""
    a, b = values((2, 3, 2, M, K), FP32), values((2, 1, 2, K, N), FP32, 1)
    bias, residual = values((3, 1, 1, N), FP32, 2), values((2, 1, 1, M, N), FP32, 3)
    out = torch.empty(2, 3, 2, M, N)
    call = matmul_call(a, b, out, "ieee", bias=bias, residual=residual)
    assert len(call.batch_shape) == 3
    run(TILE, a, b, out, Sides(bias=bias, residual=residual, activation="silu"))


@configs(*CONFIGS)
@pytest.mark.parametrize("layout", ["column", "column_sliced"])
def test_results_that_lie_column_by_column_are_made_turned(config, layout):
    a, b, _ = operands()
    rows, columns = ([side(spread, seed=seed) for seed in (6, 7)] for spread in ("row", "column"))
    sides = Sides(columns[0], rows[0], rows[1], columns[1], "gelu", 0.5, 2.0)
    buffer, out = frame((M, N), FP32, layout)
    call = matmul_call(a, b, out, "ieee", **sides._asdict())
    assert call.a.buffer == "b"
    assert str(call.problem.epilogue) == "scale_a=column scale_b=row bias=column residual=row weighted gelu"
    run(config, a, b, out, sides)
    assert guard_intact(buffer, out)
    run(config, a, b, out, Sides(rows[0], side("full"), side("full", seed=7), side("one", seed=8)))


@configs("tile", "descriptor")
def test_what_is_added_lies_in_any_way(config):
    a, b, _ = operands()
    for layout in ("column", "sparse"):
        bias, residual = placed(side("full"), layout), placed(side("full", seed=6), layout)
        run(config, a, b, torch.empty(M, N), Sides(bias=bias, residual=residual))
        column, row = placed(side("column"), layout), placed(values((1, N), FP32, 6), layout)
        run(config, a, b, torch.empty(M, N), Sides(column, row, row, column))


@configs("tile", "by halves")
@pytest.mark.parametrize("gate", [None, "row"])
@pytest.mark.parametrize("up", [None, "row", "full", "one"])
def test_biases_of_gated_products(config, gate, up):
    a, b, other = operands()
    found = (spread and side(spread, FP16, 3) for spread in (gate, up))
    run(config, a, b, torch.empty(M, N), Sides(None, None, *found, "gelu"), other)


@configs("tile", "descriptor")
def test_gated_matrices_each_with_strides_of_its_own(config):
    a, b, up = operands()
    rows, both = values((2 * N, K), FP32, 1), values((K, 2 * N), FP32, 1)
    pairs = [(placed(b, layout), up) for layout in ("column", "sparse", "offset")]
    pairs += [(up, gate) for gate, up in pairs]
    pairs += [(rows[:N].mT, rows[N:].mT), (rows[::2].mT, rows[1::2].mT), (both[:, :N], both[:, N:])]
    for left, right in pairs:
        run(config, a, left, torch.empty(M, N), Sides(activation="silu"), right)


def test_operands_are_rounded_to_the_nearest_tf32():
    """Not cut: of numbers just above the middle between two of TF32 the product is that of the upper ones."""
    x, gate = torch.full((16, 16), 1 + 2.0**-11 + 2.0**-20), torch.eye(16)
    got = tritile.gated_linear(x, gate, gate, activation=None, precision="tf32")
    assert torch.equal(got, torch.full((16, 16), (1 + 2.0**-10) ** 2))


def test_the_problem_counts_both_matrices():
    plain = MatmulProblem(1, 64, 48, 32, "float16", "float16")
    gated = MatmulProblem(1, 64, 48, 32, "float16", "float16", epilogue="gated silu")
    assert gated.flops == 2 * plain.flops
    assert gated.bytes == plain.bytes + 32 * 48 * 2
    call = call_for(gated, lambda dtype, elements: torch.zeros(elements, dtype=getattr(torch, dtype)))
    assert call.problem == gated
    assert call.up.shape == call.b.shape
    assert call.up.tensor is not call.b.tensor
    assert len(call.tensors) == 4


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
