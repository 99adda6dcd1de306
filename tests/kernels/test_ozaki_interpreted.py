"""fp64 products by remainders, in Triton's interpreter, against exact integers and fractions."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
import triton
import triton.language as tl

import tritile
from tests.configs import tma
from tests.reference import frame, guard_intact, placed
from tritile.core.problem import MatmulProblem, moduli
from tritile.core.views import Placed
from tritile.errors import InvalidValueError, UnsupportedError
from tritile.families.common.epilogue import remainder
from tritile.families.ozaki import kernel as residues
from tritile.families.ozaki import lowering as ozaki
from tritile.ops.described import described
from tritile.runtime import launch

pytestmark = pytest.mark.interpreted

UNIT = Fraction(1, 2**53)
UNFIT = residues.UNFIT


def normal(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def fractions(matrix):
    return [[Fraction(x) for x in row] for row in matrix.tolist()]


def norm(vector):
    """The Euclidean norm, a little above it."""
    square = sum(x * x for x in vector)
    return Fraction(math.isqrt(math.ceil(square * 2**200)) + 1, 2**100)


def assert_within_bound(got, a, b):
    """The bound that `tritile.families.ozaki.lowering` states, element by element, in exact arithmetic."""
    rows, columns = fractions(a), fractions(b.mT)
    root = Fraction(math.isqrt(len(rows[0]) * 2**40) + 1, 2**20)
    worst = Fraction(0)
    for (i, row), (j, column) in itertools.product(enumerate(rows), enumerate(columns)):
        exact = sum(x * y for x, y in zip(row, column, strict=True))
        bound = UNIT * (abs(exact) + root * norm(row) * norm(column))
        off = abs(Fraction(got[i, j].item()) - exact)
        assert off <= bound
        worst = max(worst, off / bound if bound else Fraction(0))
    return worst


def test_moduli_are_coprime_and_their_remainders_fit():
    assert all(math.gcd(x, y) == 1 for x, y in itertools.combinations(moduli.MODULI, 2))
    assert math.prod(moduli.MODULI) == moduli.RANGE
    assert 2 * moduli.REACH < moduli.RANGE
    assert moduli.MAX_DEPTH * 127**2 < 2**31  # of all moduli but 256
    assert moduli.MODULI[0] == 256
    assert max(moduli.MODULI[1:]) < 255


def test_the_sums_of_kernels_are_exact():
    """What the comments in the kernels say of their arithmetic, reckoned in integers."""
    largest = math.isqrt(moduli.REACH) + 1
    for p, *weights in ozaki.DIGITS:
        assert all((w - (1 << bits)) % p == 0 for w, bits in zip(weights, (16, 32, 48), strict=True))
        value = 2**15 * (1 + abs(weights[0]) + abs(weights[1])) + (largest // 2**48 + 1) * abs(weights[2])
        assert value < 2**24
        quotient_error = Fraction(value, p) * Fraction(2, 2**24) * Fraction(5, 4)  # 1 / p and the product
        assert p == 256 or math.floor(Fraction(p, 2) + p * quotient_error) <= 127
    for part in (1, 2, 3):
        places = [int(weights[part - 1]) for weights in (*ozaki.WEIGHTS, ozaki.WHOLE[1:])]
        lowest = min((x & -x).bit_length() - 1 for x in places if x)
        total = sum(128 * w for w in places[:-1])
        turns = 128 * len(moduli.MODULI)
        assert total >> lowest < 2**53
        assert turns * places[-1] >> lowest < 2**53
    for p, parts in zip(moduli.MODULI, ozaki.WEIGHTS, strict=True):
        whole = sum(map(int, parts))
        assert (whole % p, whole % (moduli.RANGE // p)) == (1, 0)
    assert sum(map(int, ozaki.WHOLE[1:])) == moduli.RANGE


# Integers at the ends of what a scaled element can be, and where rounding to integers is delicate.
LARGEST = math.isqrt(moduli.REACH)
DELICATE = [
    0.0, -0.0, 0.5, -0.5, 1.5, 2.5, 0.49999999999999994, 1.0, -1.0, 127.0, 128.0, -128.0, 255.0, 256.0,
    2.0**15, 2.0**15 - 1, 2.0**16, 2.0**31, 2.0**31 + 2.0**15, 2.0**32 - 1, 2.0**47, 2.0**48 - 1, 2.0**48,
    2.0**51 - 0.5, 2.0**51 + 0.5, 2.0**52 - 0.5, 2.0**52 + 1, 2.0**53 - 1, 2.0**53 + 2, float(LARGEST),
    -float(LARGEST), -(2.0**52) + 0.5, 0x7FFF7FFF7FFF * 1.0, -0x800080008000 * 1.0,
]  # fmt: skip


def split(x, exponents, padded):
    """The remainders of a matrix of vectors, by the kernel."""
    size, depth = x.shape
    out = torch.full((len(moduli.MODULI), size, padded), 99, dtype=torch.int8)
    args = (size, depth, padded, out[0].numel(), *x.stride(), 1, (1,), (0,), ozaki.DIGITS, 4, 16)
    blocks = -(-size // 4) * -(-padded // 16)
    residues.split_residues[(blocks, 1, 1)](x, exponents, out, None, *args)
    return out


@pytest.mark.parametrize("exponent", [0, -3, 40, 1100, -960])
def test_remainders_are_those_of_the_rounded_numbers(exponent):
    generator = torch.Generator().manual_seed(0)
    wide = torch.randint(-LARGEST, LARGEST, (200,), generator=generator).double()
    small = torch.randint(-(2**20), 2**20, (30,), generator=generator).double() / 4
    halves = [
        LARGEST // 4 // p * p * sign + p // 2 + d for p in moduli.MODULI for sign in (1, -1) for d in (0, 1)
    ]
    given = [*DELICATE, *wide.tolist(), *small.tolist(), *halves]
    given = torch.tensor(given[: len(given) // 16 * 16], dtype=torch.float64).view(16, -1)
    x = torch.tensor([[math.ldexp(v, -exponent) for v in row] for row in given.tolist()], dtype=torch.float64)
    out = split(x, torch.full((16,), exponent, dtype=torch.int32), 32)
    for i, j in itertools.product(range(16), range(x.shape[1])):
        scaled = Fraction(x[i, j].item()) * Fraction(2) ** exponent
        found = [out[m, i, j].item() for m in range(len(moduli.MODULI))]
        near = (math.floor(scaled), math.ceil(scaled))
        fits = [n for n in near if all((n - r) % p == 0 for r, p in zip(found, moduli.MODULI, strict=True))]
        assert fits
        assert abs(fits[0] - scaled) <= Fraction(1, 2) + Fraction(1, 2**50)
    assert (out[:, :, x.shape[1] :] == 0).all()


def test_remainders_of_vectors_left_to_plain_float64_are_zero():
    x = torch.full((4, 5), math.nan, dtype=torch.float64)
    exponents = torch.tensor([UNFIT, 0, UNFIT, 0], dtype=torch.int32)
    x[1::2] = 3
    out = split(x, exponents, 16)
    assert (out[:, ::2] == 0).all()
    assert (out[:, 1::2, :5] == 3).all()


@triton.jit
def reduce_sums(sums_ptr, moduli_ptr, out_ptr, COUNT: tl.constexpr):
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    found = remainder(tl.load(sums_ptr + at), tl.load(moduli_ptr + tl.program_id(0)))
    tl.store(out_ptr + at, found.to(tl.int8))


def test_sums_are_reduced_to_remainders_that_fit():
    generator = torch.Generator().manual_seed(0)
    rows = []
    for p in moduli.MODULI:
        halves = [q * p + p // 2 + d for q in (0, 1, 2**30 // p, -(2**31) // p + 1) for d in (-1, 0, 1)]
        ends = [0, 1, -1, 2**31 - 1, -(2**31) + 1, 2**24 + 1, 2**31 - 129]
        drawn = torch.randint(-(2**31), 2**31, (64 - len(halves) - len(ends),), generator=generator)
        rows.append([*halves, *ends, *drawn.tolist()])
    sums, out = torch.tensor(rows, dtype=torch.int32), torch.empty(len(rows), 64, dtype=torch.int8)
    table = torch.tensor(moduli.MODULI, dtype=torch.float32)
    reduce_sums[(len(rows), 1, 1)](sums, table, out, 64)
    for p, row, found in zip(moduli.MODULI, rows, out.tolist(), strict=True):
        assert all((x - r) % p == 0 and abs(r) <= p // 2 for x, r in zip(row, found, strict=True))


def join(numbers, scale):
    """What the kernel makes of the remainders of these numbers, 2**-scale being undone on either side."""
    parts = torch.tensor(
        [[[(n + p // 2) % p - p // 2 for n in row] for row in numbers] for p in moduli.MODULI],
        dtype=torch.int8,
    )
    _, m, n = parts.shape
    out = torch.empty((m, n), dtype=torch.float64)
    of_rows = torch.full((m,), scale[0], dtype=torch.int32)
    of_columns = torch.full((n,), scale[1], dtype=torch.int32)
    args = (m, n, m * n, n, n, 1, 1, 1, 1, (1,), (0,), None, None, ozaki.WEIGHTS, ozaki.WHOLE, 16, 16)
    grid = (-(-m // 16) * -(-n // 16), 1, 1)
    residues.join_residues[grid](parts, of_rows, of_columns, out, *args)
    return out


def half_step(exact):
    """Half the distance of float64 numbers at this one."""
    if not exact:
        return Fraction(0)
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    return Fraction(2) ** (max(exponent, -1022) - 53)


@pytest.mark.parametrize(
    "scale", [(0, 0), (50, 57), (-300, 20), (600, 500), (1100, 60), (-480, -480)], ids=str
)
def test_numbers_are_put_together_and_rounded_once(scale):
    """Off by half a step, and what rounding `lost + low` adds, 2^-40 of it; if subnormal rounded again."""
    source = torch.Generator().manual_seed(1)
    draws = torch.randint(0, 2**62, (4, 200), generator=source).tolist()
    wide = [
        (x << 62 | y) % (2 * moduli.REACH) - moduli.REACH for x, y in zip(draws[0], draws[1], strict=True)
    ]
    narrow = [(x >> (y % 60)) * (1 if y & 64 else -1) for x, y in zip(draws[2], draws[3], strict=True)]
    # With steps of 2^36 to 2^46 all three parts of a number bear on how it is rounded.
    between = [n >> s for n in wide for s in (8, 12, 14, 16, 18, 20, 28)]
    edges = [e + d for e in (0, moduli.REACH, -moduli.REACH, 2**53, 2**69, 2**108) for d in (-1, 0, 1)]
    edges = [min(max(e, -moduli.REACH), moduli.REACH) for e in edges]
    numbers = wide + narrow + between + edges
    numbers += [0] * (-len(numbers) % 19)
    rows = [numbers[i : i + 19] for i in range(0, len(numbers), 19)]
    got = join(rows, scale)
    for i, row in enumerate(rows):
        for j, number in enumerate(row):
            exact = number * Fraction(2) ** -sum(scale)
            if abs(exact) >= Fraction(2) ** 1024:
                assert got[i, j].item() == math.copysign(math.inf, number)
            else:
                off = abs(Fraction(got[i, j].item()) - exact)
                again = abs(exact) * UNIT if abs(exact) < Fraction(2) ** -1022 else 0
                assert off <= half_step(exact) * (1 + Fraction(1, 2**40)) + again


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (17, 13, 33), (2, 2, 130), (33, 18, 16)], ids=str)
def test_sizes_stay_within_the_bound(m, n, k):
    a, b = normal(m, k), normal(k, n, seed=1)
    assert_within_bound(tritile.matmul(a, b, precision="ozaki"), a, b)


SPREADS = {
    "positive": lambda x: x.abs(),
    "uniform": lambda x: torch.special.ndtr(x) - 0.5,
    "log-normal": lambda x: x.sign() * torch.exp(x.roll(1, 0)),
    "sparse": lambda x: torch.where(x.roll(3) > 1, x, 0.0),
    "tiny": lambda x: x * 2.0**-1060,
    "subnormal": lambda x: x * 2.0**-1072,
    "huge": lambda x: x * 2.0**500,
    "by rows": lambda x: x * torch.exp2(40.0 * torch.arange(x.shape[0], dtype=torch.float64) - 300)[:, None],
    "ones": torch.ones_like,
    "all digits": lambda x: torch.full_like(x, 2.0 - 2.0**-52),
}


@pytest.mark.parametrize("spread", SPREADS)
def test_distributions_stay_within_the_bound(spread):
    a, b = SPREADS[spread](normal(6, 40)), SPREADS[spread](normal(5, 40, seed=1)).mT
    if spread in ("tiny", "subnormal"):
        b = b * 2.0**1000  # that the result is not zero altogether
    got = tritile.matmul(a, b, precision="ozaki")
    if spread == "subnormal":
        exact = torch.matmul(a * 2.0**1000, b)
        assert torch.allclose(got * 2.0**1000, exact, rtol=1e-13, atol=2.0**-74)
    else:
        assert_within_bound(got, a, b)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("k", [1, 2, 64])
def test_vectors_along_each_other_reach_the_ends_of_the_range(k, sign):
    """As |x . y| = |x| |y| comes as near to half the product of the moduli as it ever does."""
    scales = torch.tensor([1.0, 1.25, 1.4142135623730951, 1.9999999999999998], dtype=torch.float64)
    a = scales[:, None].expand(4, k).contiguous()
    assert_within_bound(tritile.matmul(a, sign * a.mT, precision="ozaki"), a, sign * a.mT)


def exponents_of(x):
    """The exponents of a matrix of vectors, by the kernel."""
    size, depth = x.shape
    found = torch.full((size,), 7, dtype=torch.int32)
    args = (size, depth, *x.stride(), 1, (1,), (0,), float(moduli.REACH), 4, 4, 16)
    residues.measure_vectors[(-(-size // 4), 1, 1)](x, found, *args)
    return found.tolist()


@pytest.mark.parametrize("scale", [0, 900, -900, -1060])
def test_exponents_are_the_largest_that_fit(scale):
    x = torch.ldexp(normal(11, 37), torch.tensor(scale))
    x[3] = 0
    x[5, 1:] = 0
    for row, exponent in zip(fractions(x), exponents_of(x), strict=True):
        square = sum(v * v for v in row) * Fraction(4) ** exponent
        assert square <= moduli.REACH * (1 + UNIT * 40)
        assert square == 0 or 4 * square > moduli.REACH * (1 - UNIT * 40)


def test_vectors_of_a_wide_range_and_not_finite_ones_are_unfit():
    x = normal(8, 400)
    x[0, 7] = 1e9
    x[1, 300] = math.inf
    x[2, 3] = -math.inf
    x[3, 399] = math.nan
    x[4] = 0
    x[5] = torch.exp(4 * x[5])
    x[6, 20:] = 0
    assert [e == UNFIT for e in exponents_of(x)] == [True, True, True, True, False, True, False, False]


def test_unfit_vectors_are_multiplied_in_plain_float64():
    a, b = normal(70, 40), normal(40, 67, seed=1)
    a[3, 5], a[66, 0], b[7, 9], a[20, 1] = math.inf, math.nan, -math.inf, 1e25
    b[0, 66] = 1e300
    got = tritile.matmul(a, b, precision="ozaki")
    plain = tritile.matmul(a, b)
    unfit = torch.zeros(70, 67, dtype=torch.bool)
    unfit[[3, 66, 20]] = True
    unfit[:, [9, 66]] = True
    assert torch.equal(got[unfit].nan_to_num(), plain[unfit].nan_to_num())
    assert torch.equal(got[unfit].isnan(), plain[unfit].isnan())
    fit_rows, fit_columns = ~unfit.all(1), ~unfit.all(0)
    alone = tritile.matmul(a[fit_rows], b[:, fit_columns], precision="ozaki")
    assert torch.equal(got[fit_rows][:, fit_columns], alone)


def test_results_beyond_float64_are_infinite_as_in_torch():
    a = torch.full((2, 3), 1e200, dtype=torch.float64)
    a[1] = -a[1]
    got = tritile.matmul(a, a.mT, precision="ozaki")
    assert torch.equal(got, a @ a.mT)
    small = a / 1e200 * 1e-200
    assert torch.equal(tritile.matmul(small, small.mT, precision="ozaki"), torch.zeros(2, 2).double())


def test_layouts_and_nothing_around_out():
    a, b = normal(2, 7, 20), normal(20, 9, seed=1)
    a[0, 3, 3] = math.inf
    rows = tritile.matmul(a, b, precision="ozaki")
    for a_layout, layout in (
        ("row", "sparse"),
        ("column", "row"),
        ("strided", "column"),
        ("sparse", "offset"),
    ):
        buffer, out = frame((2, 7, 9), torch.float64, layout)
        assert tritile.matmul(placed(a, a_layout), placed(b, layout), out=out, precision="ozaki") is out
        assert torch.equal(out.nan_to_num(), rows.nan_to_num())
        assert guard_intact(buffer, out)


@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [((5,), (5,)), ((3, 5), (2, 5, 7)), ((3, 1, 3, 5), (2, 5, 7)), ((2, 0, 5), (5, 3)), ((2, 0), (0, 3))],
    ids=str,
)
def test_batches_and_broadcasting(a_shape, b_shape):
    a, b = normal(*a_shape), normal(*b_shape, seed=1)
    got, wanted = tritile.matmul(a, b, precision="ozaki"), a @ b
    assert got.shape == wanted.shape
    assert torch.allclose(got, wanted, rtol=0, atol=1e-13)
    if a.ndim > 2 and got.numel():
        whole = torch.broadcast_to(a, (*got.shape[:-2], *a_shape[-2:])).reshape(-1, *a_shape[-2:])
        right = torch.broadcast_to(b, (*got.shape[:-2], *b_shape[-2:])).reshape(-1, *b_shape[-2:])
        parts = got.reshape(-1, *got.shape[-2:])
        for i in (0, -1):
            assert torch.equal(parts[i], tritile.matmul(whole[i], right[i], precision="ozaki"))


def test_unfit_matrices_of_a_batch():
    a, b = normal(2, 3, 6, 20), normal(3, 20, 5, seed=1)
    a[1, 2, 4, 4], b[0, 0, 1] = math.nan, math.inf
    got, plain = tritile.matmul(a, b, precision="ozaki"), tritile.matmul(a, b)
    assert torch.equal(got.isnan(), plain.isnan())
    assert torch.allclose(got, plain, rtol=1e-12, atol=1e-13, equal_nan=True)


def test_every_family_gives_the_same_bits_each_time():
    a, b = normal(17, 70), normal(70, 35, seed=1)
    wanted = tritile.matmul(a, b, precision="ozaki")
    assert torch.equal(tritile.matmul(a, b, precision="ozaki"), wanted)
    for how in ({}, {"persistent": True, "subtiles": 2}, {"split": 2}):
        out = torch.empty(17, 35, dtype=torch.float64)
        launch.run_interpreted(described(a, b, out, "ozaki"), tma(32, 32, 32, group=2, **how))
        assert torch.equal(out, wanted), how


def test_what_is_fused():
    x, weight, bias, added = normal(9, 33), normal(21, 33, seed=1), normal(21, seed=2), normal(9, 21, seed=3)
    x[2, 2] = math.inf
    got = tritile.linear(x, weight, bias, activation="relu", residual=added, precision="ozaki")
    wanted = tritile.linear(x, weight, bias, activation="relu", residual=added)
    assert torch.allclose(got, wanted, rtol=0, atol=1e-13, equal_nan=True)
    got = tritile.addmm(added, x, weight.mT, alpha=0.1, beta=3, precision="ozaki")
    wanted = tritile.addmm(added, x, weight.mT, alpha=0.1, beta=3)
    assert torch.allclose(got, wanted, rtol=0, atol=1e-13, equal_nan=True)


@pytest.mark.parametrize(
    ("a_shape", "b_shape"), [((300, 1), (1, 1)), ((2, 1, 3, 65), (4, 65, 7)), ((1, 3, 5), (6, 5, 1))], ids=str
)
def test_the_core_that_is_judged_is_the_core_that_runs(a_shape, b_shape):
    a, b = normal(*a_shape), normal(*b_shape)
    call = described(a, b, torch.empty_like(a @ b), "ozaki")
    _, core, _, scratch = ozaki.lowered(call, False)
    assert core.problem == call.problem.core
    assert all(isinstance(tensor, Placed) for tensor in core.tensors)
    assert {tensor.buffer for tensor in core.tensors} <= set(scratch)
    for tensor in core.tensors:
        assert tensor.dtype == scratch[tensor.buffer].dtype


def test_wrong_precisions_and_depths_are_refused():
    a = normal(2, 2)
    with pytest.raises(InvalidValueError, match="'tf32': wanted one of ieee, ozaki for float64"):
        tritile.matmul(a, a, precision="tf32")
    with pytest.raises(InvalidValueError, match=r"'ozaki': wanted one of ieee, .* for float32"):
        tritile.matmul(a.float(), a.float(), precision="ozaki")
    with pytest.raises(InvalidValueError, match="'ozaki' for int8: wanted None"):
        tritile.matmul(a.to(torch.int8), a.to(torch.int8), precision="ozaki")
    with pytest.raises(InvalidValueError, match="'ozaki': wanted one of"):
        tritile.gated_linear(a, a, a, precision="ozaki")
    with pytest.raises(InvalidValueError, match="wanted"):
        tritile.linear(a, a, activation="remainder")
    deep = torch.zeros(1, dtype=torch.float64).expand(moduli.MAX_DEPTH + 1)
    with pytest.raises(UnsupportedError, match=r"K is 131073 .* wanted at most 131072"):
        tritile.matmul(deep, deep, precision="ozaki")
    half = torch.zeros(moduli.MAX_DEPTH // 2 + 1, dtype=torch.complex128)
    with pytest.raises(UnsupportedError, match=r"K is 65537 .* wanted at most 65536"):
        tritile.matmul(half, half, precision="ozaki-3m")
    with pytest.raises(InvalidValueError, match="float64 and k up to 131072, or complex128 and half that"):
        MatmulProblem(1, 8, 8, moduli.MAX_DEPTH + 1, "float64", "float64", precision="ozaki")
    with pytest.raises(InvalidValueError, match="float64 and k up to"):
        MatmulProblem(1, 8, 8, 8, "float32", "float32", precision="ozaki")
