"""float32 products of float16 parts: how they are split, their errors, and what becomes of unfit data."""

import itertools
import math

import pytest
import torch

import tritile
from tests.cases.fp16x3 import *  # noqa: F403
from tests.cases.fp16x3 import Divided, U, posed
from tests.reference import placed, product64, values
from tests.simulated import DATA, assert_bounded, promoted_product
from tritile.core.problem import PROMOTED_EVERY, part_length
from tritile.families.common.fallback import A_SPARSE, B_SPARSE, EXTREME, LOSSY, UNFIT
from tritile.families.fp16x3 import lowering as fp16x3
from tritile.families.fp16x3.lowering import error_bound

pytestmark = pytest.mark.interpreted

LAYOUTS = ("row", "column", "sliced", "strided")


def whole(parts, scale, small_first):
    """Scaled elements that three parts along the last dimension stand for, before and after scaling back."""
    first, second, hi = parts.double().chunk(3, -1)
    low, lo = (second, first) if small_first else (first, second)
    assert torch.equal(low, (hi * 2.0**-6).half().double())
    scaled = hi + lo * 2.0**-6
    return scaled, scaled * scale.double()[..., :1]


def cut_small(monkeypatch, programs=8):
    """Let whole rows be short and tiles small, so that small operands are of many, and chunks of several."""
    monkeypatch.setattr(fp16x3, "_BLOCK", 1024)
    monkeypatch.setattr(fp16x3, "_WHOLE", {False: 32, True: 32})
    monkeypatch.setattr(fp16x3, "_TILE", {False: (8, 64), True: (32, 32)})
    monkeypatch.setattr(fp16x3, "_PROGRAMS", programs)


@pytest.fixture(params=[False, True], ids=["whole rows", "tiles"])
def tiled(request, monkeypatch):
    """Whether operands are split by tiles, or each row at once."""
    if request.param:
        cut_small(monkeypatch)
    return request.param


def limits_passed(x, bit):
    """The verdict on rows, which run along K, by the counts that `families.fp16x3.lowering` derives."""
    k, size = x.shape[1], x.abs().double()
    most = size.nan_to_num(math.inf, math.inf).amax(1, keepdim=True)
    exponent = torch.frexp(most.clamp(2.0**-127, 2.0**127)).exponent - 1
    scaled = size * torch.exp2(14.0 - exponent.clamp(-60, 60))
    scaled = torch.where(most == 0, size, scaled)
    lost, dense = ((scaled > 0) & (scaled < 2.0**-8)).sum(1), (scaled >= 4).sum(1)
    bits = LOSSY * bool((lost > 0).any())
    bits |= bit * bool((dense < k - k // 16 * 3).any())
    bits |= SPARSE * bool((dense < k // 16 * 5).any())
    fits = (most == 0) | ((most >= 2.0**-60) & (most < 2.0**60))
    bits |= UNFIT * bool((lost > k // 64).any() or not fits.all())
    return bits | EXTREME * bool((most >= 2.0**126).any() or ((size > 0) & (size < 2.0**-100)).any())


@pytest.mark.parametrize("layouts", list(itertools.pairwise((*LAYOUTS, "row"))), ids=str)
def test_parts_are_the_operands(tiled, layouts):
    a, b = posed("log-normal", 19, 21, 83, layouts)
    a[3], b[:, 5] = 0.0, 0.0
    assert_divided(a, b)


def assert_divided(a, b):
    """Parts and scales give back both operands, and have zeros where K is filled up."""
    found = Divided(a, b)
    for x, parts, scale, small_first in (
        (a, found.a, found.a_scale, True), (b.mT, found.b.mT, found.b_scale.mT, False),
    ):  # fmt: skip
        part = part_length(x.shape[1])
        assert parts.shape[1] == 3 * part
        scaled, back = whole(parts, scale, small_first)
        assert bool((scaled[:, x.shape[1] :] == 0).all())
        scaled, back = scaled[:, : x.shape[1]], back[:, : x.shape[1]]
        largest = scaled.abs().amax(1)
        assert bool(((largest >= 2.0**14) & (largest < 2.0**15) | (x.abs().amax(1) == 0)).all())
        assert torch.equal(torch.frexp(scale).mantissa.abs(), torch.full_like(scale, 0.5))
        lost = (back - x.double()).abs()
        least = 2.0**-31 * scale.double()[:, :1]
        assert bool((lost <= torch.maximum(2.0**-23 * x.double().abs(), least)).all())
        assert bool((lost > 0).any())
    return found


EDGES = [((1, 1, 33), 1), ((31, 33, 64), 1), ((33, 32, 65), 1), ((8, 65, 200), 9)]


@pytest.mark.parametrize(("size", "programs"), EDGES)
def test_tiles_end_where_the_operands_do(monkeypatch, size, programs):
    """A tile more, a tile less; in one chunk, and in several."""
    cut_small(monkeypatch, programs)
    for layouts in (("row", "row"), ("column", "column")):
        a, b = posed("normal", *size, layouts)
        assert_divided(a, b)


def test_rows_of_many_chunks(monkeypatch):
    cut_small(monkeypatch, 1000)
    a, b = posed("normal", 2, 3, 1100, ("column", "row"))
    a[1, 0], b[-1, 2] = 100.0, -100.0
    assert assert_divided(a, b).verdict == limits_passed(a, A_SPARSE) | limits_passed(b.mT, B_SPARSE)


def test_split_is_exact():
    """24 bits in 11 + 1 + 11: only an odd lo of 12 bits is rounded."""
    x = torch.cat([torch.arange(2**23, 2**23 + 2**13), torch.arange(2**24 - 2**13, 2**24)]).float()[None]
    _, back = whole(*(lambda d: (d.a, d.a_scale, True))(Divided(x, x.mT.contiguous())))
    error = (back[:, : x.shape[1]] - x.double()).abs()
    assert float(error.max()) == 1.0
    assert float((error > 0).double().mean()) == pytest.approx(0.25, abs=0.01)


SPARSE = A_SPARSE | B_SPARSE
VERDICTS = {
    "normal": 0, "uniform": 0, "log-normal": 0, "relu": A_SPARSE, "cancelling": 0, "constant": 0,
    "large": 0, "identity": SPARSE, "zero": SPARSE, "wide": UNFIT, "graded": UNFIT,
    "one small": SPARSE | LOSSY, "one large": UNFIT, "far out": UNFIT,
    "NaN": None, "infinite": None, "huge": None, "denormal": None,
}  # fmt: skip


@pytest.mark.parametrize("name", DATA)
def test_verdicts_and_bounds(monkeypatch, name):
    """Every finite product is within the bound, whichever kernel made it, and the right one did.

    Whole rows and tiles give the same verdict, that of counts in float64.
    """
    layouts = (("row", "column"), ("column", "row"))[list(DATA).index(name) % 2]
    a, b = posed(name, 12, 11, 203, layouts)
    wanted = VERDICTS[name]
    found = Divided(a, b).verdict
    assert found >= EXTREME if wanted is None else found == wanted
    assert found == limits_passed(a, A_SPARSE) | limits_passed(b.mT, B_SPARSE)
    cut_small(monkeypatch)
    assert Divided(a, b).verdict == found
    assert_bounded(tritile.matmul(a, b, precision="fp16x3"), a, b)


def test_lossy_elements_among_dense_rows(tiled):
    """1 in 64 of each row and column so small that its split keeps next to nothing."""
    k = 256
    a, b = values((6, k), torch.float32).sign() * 3.0, values((k, 6), torch.float32, 1).sign() * 3.0
    a[:, ::64], b[32::64] = 3.1e-7, 2.9e-7
    found = Divided(a, b)
    assert found.verdict == LOSSY
    a[0, 1] = 3e-7
    assert Divided(a, b).verdict == UNFIT
    a[0, 1] = 3.0
    assert_bounded(tritile.matmul(a, b, precision="fp16x3"), a, b)


@pytest.mark.parametrize(
    ("zeros_a", "zeros_b", "fits"), [(0.6, 0.1, True), (0.1, 0.6, True), (0.4, 0.4, False), (0.8, 0, False)]
)
def test_dense_operand_for_sparse_one(tiled, zeros_a, zeros_b, fits):
    k = 320
    place = torch.arange(k)
    a, b = torch.ones(4, k), torch.ones(k, 4)
    a[:, place < zeros_a * k], b[place >= (1 - zeros_b) * k] = 0.0, 0.0
    a[0, -1] = 1e-8
    b[0, 0] = 1e-8 if zeros_a == 0 else 1.0
    assert (Divided(a, b).verdict < UNFIT) == fits


@pytest.mark.parametrize("k", [64, 1024, 4096])
def test_errors_with_tensor_cores_simulated(k):
    """With what tensor cores truncate the bound holds, and fp32 in one sum errs more from K = 1024 on.

    Rows of one kind by columns of any: each is scaled by itself.
    """
    kinds = [posed(name, 5, 6, k) for name in ("normal", "uniform", "log-normal", "constant", "cancelling")]
    a, b = torch.cat([a for a, _ in kinds]), torch.cat([b for _, b in kinds], 1)
    found = Divided(a, b)
    sums = promoted_product(found.a.double(), found.b.double(), PROMOTED_EVERY)
    got = sums * found.a_scale * found.b_scale
    exact, magnitude = product64(a, b), product64(a.abs(), b.abs())
    error = (got.double() - exact).abs()
    assert bool((error <= error_bound(k) * magnitude + U * exact.abs()).all())
    if k >= 1024:
        plain = torch.zeros(exact.shape)
        for i in range(k):
            plain = (plain.double() + a[:, i : i + 1].double() * b[i : i + 1].double()).float()
        errors = (plain.double() - exact).abs()
        for i in range(len(kinds)):
            alike = slice(5 * i, 5 * i + 5), slice(6 * i, 6 * i + 6)
            assert float(error[alike].norm()) < float(errors[alike].norm())


def test_bound_below_fp32_sums():
    assert all(error_bound(k) < k * U for k in range(128, 2**20, 997))


LAID = [
    (((3, 1, 9, 70), (2, 70, 11)), ("row", "row")),
    (((3, 1, 9, 70), (2, 70, 11)), ("column", "row")),
    (((4, 9, 70), (70, 11)), ("strided", "sparse")),
    (((9, 70), (70,)), ("column", "row")),
    (((1, 1), (1, 1)), ("row", "row")),
]


@pytest.mark.parametrize(("shapes", "layouts"), LAID, ids=str)
def test_shapes_and_layouts(tiled, shapes, layouts):
    a, b = (values(shape, torch.float32, seed) for seed, shape in enumerate(shapes))
    a, b = placed(a, layouts[0]), placed(b, layouts[1]) if b.ndim > 1 else b
    assert_bounded(tritile.matmul(a, b, precision="fp16x3"), a, b)


def test_other_result_types():
    a, b = posed("normal", 20, 24, 100)
    for dtype, eps in ((torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-8)):
        got, exact = tritile.matmul(a, b, precision="fp16x3", out_dtype=dtype), product64(a, b)
        assert got.dtype == dtype
        assert float(((got.double() - exact).abs() - eps * exact.abs()).max()) < 1e-5
