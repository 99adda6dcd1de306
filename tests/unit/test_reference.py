"""Tensors in host memory, which torch computes: the answers of a GPU, without a kernel.

Drawn calls are those of tests/unit/test_described.py, which there go through descriptions of calls.
Derivatives of what torch computes are in test_operators.py.
"""

import itertools

import pytest
import torch

import tritile
from tests.groups import OFFSETS, ends_of, offsets, operands, parts
from tests.invariant_calls import calls
from tests.packed import weight_of
from tests.reference import (
    ACTIVATIONS,
    DEFAULT_OUT,
    FP8,
    MATMUL_DTYPES,
    name,
    placed,
    poison_empty,
    product64,
    values,
)
from tests.scales import blocks_of, expanded, scale
from tests.unit.test_described import (
    test_expanded_overlapping_and_shared_operands,
    test_in_place_inside_a_larger_tensor,
    test_permutations,
    test_products,
    test_scales,
    test_the_imaginary_part_of_a_conjugate,
)
from tritile.choose import aten
from tritile.core.device import HOST
from tritile.errors import HostWarning
from tritile.families import launching
from tritile.ops import request as ops_request

__all__ = [
    "test_expanded_overlapping_and_shared_operands",
    "test_in_place_inside_a_larger_tensor",
    "test_permutations",
    "test_products",
    "test_scales",
    "test_the_imaginary_part_of_a_conjugate",
]
pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore::tritile.errors.HostWarning"),
]
PRECISIONS = {
    torch.float32: ("ieee", "fp16x3", "tf32"),
    torch.float8_e4m3fn: ("ieee", "fast"),
}


@pytest.fixture(autouse=True)
def _no_kernel(monkeypatch):
    poison_empty(monkeypatch)
    for made in ("run_interpreted", "prepare"):
        monkeypatch.setattr(launching, made, lambda *args: pytest.fail("a kernel was launched"))


def assert_rounded_once(got, wanted, k=1):
    """A sum in 64 bits, in whatever order, rounded to got's dtype, through float32 where that is narrower."""
    assert got.shape == wanted.shape
    if got.dtype == torch.int32:
        assert torch.equal(got.to(torch.int64), wanted.to(torch.int64))
        return
    facts = torch.finfo(got.dtype)
    near = facts.eps / 2 * (1 + 2.0**-11) * wanted.abs() + facts.tiny * facts.eps
    near = near + 4 * k * 2.0**-53 * wanted.abs().amax()
    assert bool(((got.double() - wanted).abs() <= near).all())


@pytest.mark.parametrize("dtype", MATMUL_DTYPES, ids=name)
def test_product_rounded_once(dtype):
    a, b = values((7, 301), dtype), values((301, 5), dtype, 1)
    wanted = a.double() @ b.double()
    plain = tritile.matmul(a, b)
    assert plain.dtype == DEFAULT_OUT.get(dtype, dtype)
    assert_rounded_once(plain, wanted, 301)
    for precision in PRECISIONS.get(dtype, ()):
        assert torch.equal(tritile.matmul(a, b, precision=precision), plain)
    narrow = dtype.itemsize < 8 and dtype.is_floating_point
    for out_dtype in (torch.float32, torch.float16, torch.bfloat16) if narrow else ():
        got = tritile.matmul(a, b, out_dtype=out_dtype)
        assert got.dtype == out_dtype
        assert_rounded_once(got, wanted, 301)


def test_torch_precision_setting_ignored(cuda_matmul):
    a, b = values((9, 70), torch.float32), values((70, 8), torch.float32, seed=1)
    plain = tritile.matmul(a, b)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert torch.equal(tritile.matmul(a, b), plain)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_epilogue_is_rounded_once(activation):
    x, weight = values((6, 40), torch.bfloat16), values((9, 40), torch.bfloat16, seed=1)
    bias, residual = values((9,), torch.float32, seed=2), values((6, 1), torch.float16, seed=3)
    got = tritile.linear(x, weight, bias, activation=activation or None, residual=residual)
    active = ACTIVATIONS[activation]
    sums = x.double() @ weight.double().t()
    assert_rounded_once(got, active(sums + bias.double()) + residual.double(), 40)
    got = tritile.gated_linear(x, weight, weight.flip(0), activation=activation or None, bias_gate=bias)
    assert_rounded_once(got, active(sums + bias.double()) * sums.flip(1), 40)


def test_special_values_as_torch():
    a, b = torch.ones(4, 3), torch.ones(3, 5)
    a[0, 0], a[1, 1], a[2, 2], b[0, 4] = torch.nan, torch.inf, -torch.inf, -torch.inf
    assert torch.equal(tritile.matmul(a, b).nan_to_num(7.5), (a @ b).nan_to_num(7.5))
    assert tritile.linear(a, b.t(), activation="relu")[0].isnan().all()
    big = torch.full((2, 300), 3e4, dtype=torch.float16)
    assert tritile.matmul(big, big.t()).isinf().all()


SHAPES = {"rows by columns": (1, 1), "rows by blocks": (1, 128), "blocks by blocks": (128, 128)}


@pytest.mark.parametrize("shared", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtypes", [FP8[:1] * 2, FP8], ids=["one", "mixed"])
def test_scales_for_each_128_of_k(shared, dtypes):
    m, n, k = 131, 140, 300
    a, b = values((m, k), dtypes[0]), values((n, k), dtypes[1], seed=1).t()
    scale_a, scale_b = blocks_of(m, n, k, shared)
    bias = values((n,), torch.float32, seed=2)
    got = tritile.scaled_matmul(a, b, scale_a, scale_b, bias=bias, out_dtype=torch.float32)
    left = a.double() * expanded(scale_a, m, k, shared[0])
    right = b.double() * expanded(scale_b.t(), n, k, shared[1]).t()
    assert_rounded_once(got, left @ right + bias.double(), k)


RAGGED = ["rows", "columns", "k", "none"]


SIZES = {"rows": (40, 9, 21), "columns": (9, 40, 21), "k": (9, 11, 40), "none": (9, 11, 21)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, FP8[0]], ids=name)
@pytest.mark.parametrize(("ragged", "kind"), [*itertools.product(RAGGED[:3], OFFSETS), ("none", "")])
def test_groups(ragged, kind, dtype):
    if ragged == "k" and dtype in FP8:
        pytest.skip("refused on a GPU, too")
    offs = offsets(kind) if kind else None
    a, b = operands(ragged, len(offs) if kind else 3, SIZES[ragged], dtype)
    got = tritile.grouped_matmul(a, b, offs, out_dtype=torch.float32 if dtype in FP8 else dtype)
    made, rest = parts(a, b, offs, got)
    for one, of_a, of_b in made:
        assert_rounded_once(one, product64(of_a, of_b), 40) if one.numel() else None
    assert not rest.any()


@pytest.mark.parametrize(
    ("ragged", "kind"), [*itertools.product(RAGGED[:2], ["uneven", "a rest"]), ("none", "")]
)
def test_groups_with_scales(ragged, kind):
    """Each row or column of a group has a scale; those that groups share have one for all of them."""
    offs = offsets(kind) if kind else None
    a, b = operands(ragged, 4, SIZES[ragged], FP8[0])
    plain = tritile.grouped_matmul(a, b, offs, out_dtype=torch.float32)
    m, n = plain.shape[-2:]
    of_a = scale(m) if ragged == "rows" else scale(4, m)
    of_b = scale(n, seed=10) if ragged == "columns" else scale(4, n, seed=10)
    how = {"scale_a": of_a, "scale_b": of_b, "out_dtype": torch.float32}
    got = tritile.grouped_matmul(a, b, offs, **how)
    ends = [0] * 6 if offs is None else ends_of(offs, 40)
    for group in range(4):
        cut = slice(*ends[group : group + 2])
        rows = of_a[cut] if ragged == "rows" else of_a[group]
        columns = of_b[cut] if ragged == "columns" else of_b[group]
        own = {"rows": cut, "columns": (slice(None), cut)}.get(ragged, group)
        torch.testing.assert_close(got[own], plain[own] * rows[:, None] * columns, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_packed_weight_is_exact(bits):
    weight = weight_of(24, 130, torch.bfloat16, bits, 64, zeros=True)
    x, bias = values((2, 3, 130), torch.bfloat16), values((24,), torch.float32, seed=2)
    got = tritile.linear(x, weight, bias)
    wanted = x.double() @ weight.dequantize(torch.float64).t() + bias.double()
    assert got.dtype == torch.bfloat16
    assert_rounded_once(got, wanted, 130)


# --- Batch invariance ---

CALLS = calls(129)


@pytest.mark.parametrize(("call", "dtype"), CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("n", [1, 6])
def test_invariant_rows_independent(call, dtype, n):
    """Rows alone, or by six, are laid in other memory."""
    x = values((18, 129), dtype)
    with tritile.batch_invariant():
        apart = torch.cat([call(placed(x[i : i + n], "offset")) for i in range(0, len(x), n)])
        assert torch.equal(call(x), apart)


# --- What is said of it ---


@pytest.mark.filterwarnings("default::tritile.errors.HostWarning")
def test_host_warning_points_at_caller():
    x, whole, one = torch.zeros(2, 16, 16), torch.zeros(16, 16, dtype=torch.int8), torch.ones(())
    for call in (
        lambda: tritile.contiguous(torch.zeros(3, 4).mT),
        lambda: tritile.permute(torch.zeros(3, 4), (1, 0)),
        lambda: tritile.linear(x, x[0]),
        lambda: tritile.addmm(x[0], x[0], x[1]),
        lambda: tritile.baddbmm(x, x, x),
        lambda: tritile.scaled_matmul(whole, whole, one, one),
        lambda: tritile.gated_linear(x, x[0], x[1]),
    ):
        ops_request.warn_of_host.cache_clear()
        with pytest.warns(HostWarning, match="TRITON_INTERPRET=1") as caught:
            call()
        tritile.matmul(x, x)  # silent
        ours = [found for found in caught if found.category is HostWarning]
        assert [found.filename for found in ours] == [__file__]


def test_a_plan_says_that_torch_computes():
    found = tritile.plan(tritile.matmul, torch.ones(5, 7), torch.ones(7, 3), precision="tf32")
    assert (found.source, found.device, found.config) == ("host", HOST, aten.CONFIG)
    assert found.workspace == 0
    assert "where torch computes" in str(found)
    assert "means" not in str(found)
    assert tritile.plan("transpose", torch.ones(5, 5)).source == "host"


def test_replaced_torch_is_not_called(monkeypatch):
    a, b = torch.ones(3, 4), torch.ones(4, 5)
    for place in ("matmul", "mm", "bmm", "addmm"):
        monkeypatch.setattr(torch, place, getattr(tritile, place))
    monkeypatch.setattr(torch.Tensor, "permute", tritile.permute)
    assert torch.matmul(a, b).eq(4).all()
