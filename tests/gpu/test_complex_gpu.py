"""tritile.matmul of complex tensors on a GPU, against float64: forms, layouts, precisions, graphs, tuning."""

import itertools
import math

import pytest
import torch

import tritile
from tests.complexes import assert_complex, assert_complex_fused, numbers, parts
from tests.launched import captured, needs_memory
from tests.reference import Sides, bytes_of, frame, guard_intact, name, placed
from tritile.core import device as devices
from tritile.core.problem import PRECISIONS_OF
from tritile.core.problem.complexes import form_of
from tritile.ops import asked
from tritile.ops.described import described
from tritile.planning import model
from tritile.runtime import launch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison", "fresh")]
DTYPES = (torch.complex64, torch.complex128)
CASES = [(dtype, precision) for dtype in DTYPES for precision in PRECISIONS_OF[name(dtype)]]
# Sizes (M, N, K) and layouts of a and b with which each form moves least.
FORMS = {
    "embedded": ((320, 96, 192), "row", "row"),
    "embedded, odd": ((331, 97, 61), "offset", "sliced"),
    "embedded, columns": ((331, 97, 61), "column", "column_sliced"),
    "embedded, gaps": ((331, 97, 61), "strided", "sparse"),
    "pairs": ((16, 512, 256), "row", "row"),
    "pairs, odd": ((17, 509, 131), "column", "offset"),
    "pairs, gaps": ((17, 509, 131), "sparse", "strided"),
    "planes": ((16, 512, 256), "row", "column"),
    "planes, odd": ((17, 509, 131), "column", "column_sliced"),
}


def gpu(shape, dtype=torch.complex64, seed=0):
    return numbers(tuple(shape), dtype, seed, "cuda")


def posed(form, dtype=torch.complex64, batch=()):
    (m, n, k), a_layout, b_layout = FORMS[form]
    a, b = gpu((*batch, m, k), dtype), gpu((*batch, k, n), dtype, 1)
    return placed(a, a_layout), placed(b, b_layout)


# Any core reads what either of these leaves it: each precision, beside three of them, has each form once.
PLAIN = ("embedded, odd", "pairs, odd", "planes, odd")
ALL = [(DTYPES[0], "ieee"), (DTYPES[0], "tf32-3m"), (DTYPES[1], "ieee")]
FORMED = [
    *itertools.product(FORMS, ALL),
    *itertools.product(PLAIN, [case for case in CASES if case not in ALL]),
]


@pytest.mark.parametrize(("form", "case"), FORMED, ids=str)
def test_forms(form, case):
    dtype, precision = case
    a, b = posed(form, dtype)
    problem = tritile.plan(tritile.matmul, a, b, precision=precision).problem
    wanted = "three" if precision.endswith("-3m") else form.partition(",")[0]
    assert form_of(problem) == wanted
    for x, y in ((a, b), (a.conj(), b), (a, b.conj()), (a.conj(), b.conj()), (a, b)):
        assert_complex(tritile.matmul(x, y, precision=precision), x, y, precision)


SIZES = [(1, 1, 1), (257, 263, 269), (1, 1009, 513), (1009, 1, 513), (1, 1, 4099), (311, 313, 1)]
SIZES += [(64, 64, 10007)]


# Every size by each dtype's own kernels; by others, whose laying out is the same, one deep.
SIZED = [(*case, size) for case in CASES for size in SIZES if case[1] == "ieee" or size == SIZES[-1]]


@pytest.mark.parametrize(("dtype", "precision", "size"), SIZED, ids=str)
def test_sizes(dtype, precision, size):
    m, n, k = size
    a, b = gpu((m, k), dtype), gpu((k, n), dtype, 1)
    assert_complex(tritile.matmul(a, b, precision=precision), a, b, precision)


@pytest.mark.parametrize("precision", ["ieee", "tf32x3", "tf32", "tf32-3m"])
@pytest.mark.parametrize("form", [*PLAIN, "embedded", "planes"])
def test_every_family_makes_the_core_of_every_form(form, precision):
    a, b = posed(form)
    out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device="cuda")
    call = described(a, b, out, precision)
    device = devices.current_gpu()
    for config in model.screened(call.problem, device, 4):
        out.fill_(complex(math.nan, math.nan))
        launch.prepare(call, config)(*call.tensors)
        assert_complex(out, a, b, precision)


@pytest.mark.parametrize(("part", "value"), [("real", math.nan), ("real", math.inf), ("imag", -math.inf)])
@pytest.mark.parametrize("form", PLAIN)
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_nan_and_inf_spread_as_in_four_real_products(form, part, value, precision):
    a, b = posed(form)
    getattr(a, part)[3, 50] = value
    getattr(b, part)[50, 5] = 0.0  # inf * 0 is NaN
    (a_re, a_im), (b_re, b_im) = parts(a), parts(b)
    expected = a_re @ b_re - a_im @ b_im, a_re @ b_im + a_im @ b_re
    for mine, other in zip(parts(tritile.matmul(a, b, precision=precision)), expected, strict=True):
        assert torch.equal(mine.isnan(), other.isnan())
        assert torch.equal(mine.isinf(), other.isinf())
        assert torch.equal(mine[mine.isinf()], other[other.isinf()])


@pytest.mark.parametrize("precision", ["ieee", "tf32x3", "tf32-3m"])
@pytest.mark.parametrize("form", PLAIN)
def test_answers_repeat_bit_for_bit_and_the_second_call_prepares_nothing(monkeypatch, form, precision):
    a, b = posed(form)
    first = tritile.matmul(a, b, precision=precision)
    conjugated = tritile.matmul(a.conj(), b, precision=precision)
    monkeypatch.setattr(asked, "prepared", lambda call: pytest.fail("prepared again"))
    for _ in range(20):
        assert torch.equal(bytes_of(tritile.matmul(a, b, precision=precision)), bytes_of(first))
        again = tritile.matmul(a.conj(), b, precision=precision)
        assert torch.equal(bytes_of(again), bytes_of(conjugated))


@pytest.mark.parametrize("precision", ["tf32", "tf32-3m"])
@pytest.mark.parametrize("form", ["embedded", "pairs, odd", "planes"])
def test_calls_that_follow_each_other_at_once(form, precision):
    """Launches that start early, and workspaces given from one call to the next: none may be overtaken."""
    pairs = [tuple(x + i for x in posed(form)) for i in range(4)]
    wanted = [tritile.matmul(a, b, precision=precision) for a, b in pairs]
    torch.cuda.synchronize()
    for _ in range(25):
        got = [tritile.matmul(a, b, precision=precision) for a, b in pairs]
        for one, other in zip(got, wanted, strict=True):
            assert torch.equal(bytes_of(one), bytes_of(other))


@pytest.mark.parametrize("form", ["embedded, columns", "pairs", "planes, odd"])
@pytest.mark.parametrize("precision", ["tf32", "ieee-3m"])
def test_in_a_graph(form, precision):
    a, b = posed(form)
    out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device="cuda")
    tritile.matmul(a, b, out=out, precision=precision)
    graph, _ = captured(lambda: tritile.matmul(a, b, out=out, precision=precision))
    for seed in (5, 6):
        a.copy_(gpu(a.shape, seed=seed))
        out.fill_(complex(math.nan, math.nan))
        graph.replay()
        torch.cuda.synchronize()
        assert_complex(out, a, b, precision)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_sums_with_complex_weights(dtype):
    """Twice each, as the second call meets the product again; at last replayed from a graph."""
    a, b, added = (gpu(shape, dtype, i) for i, shape in enumerate([(3, 131, 75), (3, 75, 66), (131, 66)]))
    words = {"beta": 0.5 - 2j, "alpha": 1 + 3j}
    sides = Sides(bias=added.conj(), **words)
    buffer, out = frame((131, 66), dtype, "sliced", "cuda")
    for _ in range(2):
        assert_complex_fused(tritile.baddbmm(added.conj(), a, b.conj(), **words), a, b.conj(), sides)
        assert tritile.addmm(added.conj(), a[0], b[0], out=out, **words) is out
        assert_complex_fused(out, a[0], b[0], sides)
        assert guard_intact(buffer, out)
        got = tritile.linear(a, b[0].mT, added[0], residual=added)
        assert_complex_fused(got, a, b[0], Sides(bias=added[0], residual=added))
    nothing = torch.full_like(added, math.nan)
    assert_complex_fused(tritile.addmm(nothing, a[0], b[0], beta=0, alpha=1j), a[0], b[0], Sides(alpha=1j))
    graph, got = captured(lambda: tritile.addmm(added.conj(), a[0], b[0], **words))
    a.neg_()
    graph.replay()
    assert_complex_fused(got, a[0], b[0], sides)


@pytest.mark.serial
def test_an_operand_beyond_2_to_31_real_numbers():
    rows = 2**31 // 32 + 77
    needs_memory(90)
    a = torch.randint(-4, 5, (rows, 32), dtype=torch.int8, device="cuda")
    a = torch.complex(a[:, :16].float(), a[:, 16:].float())
    b = torch.complex(*(torch.randint(-4, 5, (16, 16), device="cuda").float() for _ in range(2)))
    column = a.mT.contiguous().mT  # laid out: its copy is as large
    assert a.numel() * 2 > 2**31
    for operand, precision in ((a, "ieee"), (column, "ieee"), (a, "ieee-3m")):
        got = tritile.matmul(operand, b, precision=precision)
        for some in (slice(0, 1000), slice(-1000, None), slice(2**31 // 64 - 500, 2**31 // 64 + 500)):
            exact = a[some].to(torch.complex128) @ b.to(torch.complex128)
            assert torch.equal(got[some].to(torch.complex128), exact)
        del got
