"""fp64 products by remainders on a GPU, against exact sums of sampled elements and against plain fp64."""

import math
from fractions import Fraction

import pytest
import torch

import tritile
from tests.complexes import assert_complex, numbers
from tests.launched import captured, needs_memory
from tests.reference import placed, values
from tritile.core import device as devices
from tritile.core.problem import MAX_DEPTH
from tritile.ops.described import described
from tritile.planning import model
from tritile.runtime import launch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh")]
UNIT = 2.0**-53


def gpu(*shape, seed=0):
    return values(shape, torch.float64, seed, "cuda")


def ozaki(a, b, **more):
    return tritile.matmul(a, b, precision="ozaki", **more)


def exact_element(a, b, i, j):
    row, column = a[i].tolist(), b[:, j].tolist()
    return sum(Fraction(x) * Fraction(y) for x, y in zip(row, column, strict=True))


def assert_within_bound(got, a, b, samples=24):
    """2^-53 (|a b| + sqrt(K) |row| |column|): samples exactly, and all beside a product that errs too."""
    k = a.shape[-1]
    norms = math.sqrt(k) * a.norm(dim=-1)[..., :, None] * b.norm(dim=-2)[..., None, :]
    reference = torch.matmul(a, b)
    magnitudes = torch.matmul(a.abs(), b.abs())
    # That product's own error: sums of K terms, at worst (K + 1) * 2^-53 of the magnitudes.
    bound = UNIT * (1.001 * (reference.abs() + norms) + (k + 1) * magnitudes)
    assert bool(((got - reference).abs() <= bound).all())
    if got.ndim == 2:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(got.shape[0], (samples,), generator=generator).tolist()
        columns = torch.randint(got.shape[1], (samples,), generator=generator).tolist()
        for i, j in zip(rows, columns, strict=True):
            exact = exact_element(a, b, i, j)
            allowed = UNIT * (abs(exact) + Fraction(1.001 * norms[i, j].item()))
            assert abs(Fraction(got[i, j].item()) - exact) <= allowed


TURNS = {"NN": ("row", "row"), "NT": ("row", "column"), "TN": ("column", "row")}
TURNS |= {"TT": ("column", "column"), "SS": ("sparse", "strided"), "offset": ("offset", "offset")}
TURNS |= {"sliced": ("sliced", "column_sliced")}


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("turn", TURNS)
def test_layouts(turn):
    m, n, k = (256, 320, 192) if turn in ("NN", "TT") else (131, 97, 61)
    a, b = gpu(m, k), gpu(k, n, seed=1)
    a_layout, b_layout = TURNS[turn]
    got = ozaki(placed(a, a_layout), placed(b, b_layout))
    assert_within_bound(got, a, b)
    assert torch.equal(got, ozaki(a, b))  # integers are exact, whatever the order of their sums


SIZES = [
    (1, 1, 1), (1, 1009, 513), (1009, 1, 513), (1, 1, 4099), (311, 313, 1), (127, 257, 65), (129, 255, 63),
    (64, 48, 20011), (1024, 1024, 1024),
]  # fmt: skip


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(size):
    m, n, k = size
    a, b = gpu(m, k), gpu(k, n, seed=1)
    assert_within_bound(ozaki(a, b), a, b)


def test_every_family_and_config_gives_the_same_bits():
    a, b = gpu(300, 500), gpu(500, 260, seed=1)
    call = described(a, b, torch.empty(300, 260, dtype=torch.float64, device="cuda"), "ozaki")
    device = devices.gpu(0)
    first = ozaki(a, b)
    families = model.families(call.problem, device)
    assert "tile" in families
    for family in families:
        for config in model.ranked(call.problem, device, family)[:6]:
            call.out.tensor.fill_(math.nan)
            launch.prepare(call, config)(*call.tensors)
            assert torch.equal(call.out.tensor, first), config


def test_numbers_near_the_ends_of_float64():
    a, b = gpu(64, 100), gpu(100, 50, seed=1)
    product = ozaki(a, b)
    assert torch.equal(ozaki(a * 2.0**1000, b * 2.0**-950), product * 2.0**50)
    assert torch.equal(ozaki(a * 2.0**-700, b * 2.0**600), product * 2.0**-100)
    small = ozaki(a * 2.0**-600, b * 2.0**-440)  # subnormal results, rounded once
    assert torch.allclose(small * 2.0**1000, product * 2.0**-40, rtol=0, atol=2.0**-74)
    assert not ozaki(a * 2.0**-800, b * 2.0**-800).any()
    huge = ozaki(a * 2.0**600, b * 2.0**600)
    assert torch.equal(huge, product.sign() * math.inf)


@pytest.mark.parametrize("value", [1.0, -1.5, 2.0 - 2.0**-52])
def test_the_deepest_sums_stay_within_int32(value):
    """Vectors of one value have the largest sums of remainders that there are."""
    a = torch.full((32, MAX_DEPTH), value, dtype=torch.float64, device="cuda")
    b = torch.full((MAX_DEPTH, 16), -1.0, dtype=torch.float64, device="cuda")
    exact = Fraction(value) * -MAX_DEPTH
    got = ozaki(a, b)
    assert (got == got[0, 0]).all()
    assert abs(Fraction(got[0, 0].item()) - exact) <= abs(exact) * Fraction(UNIT) * 2
    assert torch.equal(ozaki(a, a.mT), ozaki(-a, -a.mT))


def test_large_products_err_no_more_than_twice_as_much_as_torch():
    """Root mean squares of normal operands: here 2^-55 sqrt(K), in torch by how its sums are split."""
    a, b = gpu(4096, 4096), gpu(4096, 4096, seed=1)
    rows = slice(0, 4)
    columns = slice(0, 4)
    got, plain = ozaki(a, b), torch.matmul(a, b)
    exact = [[exact_element(a, b, i, j) for j in range(4)] for i in range(4)]

    def error(result):
        part = result[rows, columns].tolist()
        return math.sqrt(
            sum(float(Fraction(part[i][j]) - exact[i][j]) ** 2 for i in range(4) for j in range(4))
        )

    assert error(got) <= 2 * error(plain)
    assert_within_bound(got, a, b, samples=4)


def test_unfit_vectors_are_multiplied_in_plain_float64():
    a, b = gpu(300, 200), gpu(200, 330, seed=1)
    wanted = ozaki(a, b)
    a[3, 5], a[266, 0], b[7, 9], a[120, 1] = math.inf, math.nan, -math.inf, 1e25
    b[0, 166] = 1e300
    got, plain = ozaki(a, b), torch.matmul(a, b)
    unfit = torch.zeros(300, 330, dtype=torch.bool, device="cuda")
    unfit[[3, 266, 120]] = True
    unfit[:, [9, 166]] = True
    assert torch.equal(got[~unfit], wanted[~unfit])
    assert torch.equal(got.isnan(), plain.isnan())
    assert torch.equal(got.isinf(), plain.isinf())
    finite = plain.isfinite()
    magnitudes = torch.matmul(a.abs(), b.abs())
    assert bool(((got - plain).abs() <= 2 * 200 * UNIT * magnitudes)[finite & unfit].all())


def test_rows_of_a_wide_range_keep_the_digits_of_plain_float64():
    """Elements of 2^-120 to 2^120 in a row: every one of the result is as right as magnitudes let it be."""
    scale = torch.exp2(torch.linspace(-120, 120, 300, device="cuda", dtype=torch.float64))
    a, b = gpu(100, 300) * scale, gpu(300, 90, seed=1) / scale[:, None]
    got, plain = ozaki(a, b), torch.matmul(a, b)
    magnitudes = torch.matmul(a.abs(), b.abs())
    assert bool(((got - plain).abs() <= 2 * 300 * UNIT * magnitudes).all())


@pytest.mark.parametrize("precision", ["ozaki", "ozaki-3m"])
@pytest.mark.parametrize("size", [(300, 70, 200), (16, 512, 333)], ids=str)
def test_complex_products_are_made_of_these(size, precision):
    m, n, k = size
    a, b = numbers((m, k), torch.complex128, 0, "cuda"), numbers((k, n), torch.complex128, 1, "cuda")
    for right in (b, b.mT.contiguous().mT):
        assert_complex(tritile.matmul(a, right, precision=precision), a, b, precision)
    a[1, 2] = complex(math.inf, 1)
    got, plain = tritile.matmul(a, b, precision=precision), tritile.matmul(a, b)
    assert torch.equal(got.isfinite(), plain.isfinite())


def test_what_is_fused():
    x, weight = gpu(90, 333), gpu(210, 333, seed=1)
    bias, added = gpu(210, seed=2), gpu(90, 210, seed=3)
    x[2, 2] = math.inf
    got = tritile.linear(x, weight, bias, activation="relu", residual=added, precision="ozaki")
    wanted = torch.relu(x @ weight.mT + bias) + added
    assert torch.allclose(got, wanted, rtol=1e-13, atol=1e-12, equal_nan=True)
    got = tritile.addmm(added, x, weight.mT, alpha=0.1, beta=3, precision="ozaki")
    wanted = torch.addmm(added, x, weight.mT, alpha=0.1, beta=3)
    assert torch.allclose(got, wanted, rtol=1e-13, atol=1e-12, equal_nan=True)


@pytest.mark.serial
def test_remainders_beyond_2_to_31():
    needs_memory(30)
    m, n, k = 13001, 13003, 12007
    assert min(14 * m * k, 14 * m * n) > 2**31
    a, b = gpu(m, k), gpu(k, n, seed=1)
    got = ozaki(a, b)
    for rows in (slice(0, 40), slice(m - 40, m), slice(m // 2, m // 2 + 40)):
        assert_within_bound(got[rows], a[rows], b, samples=2)


def test_a_captured_call_replays():
    a, b = gpu(201, 75), gpu(75, 130, seed=1)
    out = torch.empty(201, 130, dtype=torch.float64, device="cuda")
    graph, _ = captured(lambda: ozaki(a, b, out=out))
    for seed in (5, 6):
        a.copy_(gpu(201, 75, seed=seed))
        if seed == 6:
            a[7, 7] = math.nan  # found on the GPU, with no word to the host
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out.isnan(), torch.matmul(a, b).isnan())
        finite = ~out.isnan().any(1)
        assert_within_bound(out[finite], a[finite], b)


def test_a_call_does_not_wait_for_the_gpu():
    a, b = gpu(200, 300), gpu(300, 100, seed=1)
    first = ozaki(a, b)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = [ozaki(a, b) for _ in range(20)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(first, other) for other in again)
