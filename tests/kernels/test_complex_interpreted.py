"""tritile.matmul of complex host tensors: every form, layout and shape, through Triton's interpreter."""

import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tritile
from tests.complexes import assert_complex, assert_complex_fused, numbers, parts
from tests.configs import tile, tma
from tests.reference import LAYOUTS, Sides, frame, guard_intact, name, placed, poisoned
from tritile.core.device import TARGETS
from tritile.core.posed import posed
from tritile.core.problem import PRECISIONS_OF, MatmulProblem
from tritile.core.problem.complexes import form_of
from tritile.errors import TuningError
from tritile.families.common import grids
from tritile.families.space import illegal
from tritile.families.work import pieces_of
from tritile.ops.described import described
from tritile.planning import plans
from tritile.runtime import launch
from tritile.tune.subject import answers

pytestmark = pytest.mark.interpreted

DTYPES = (torch.complex64, torch.complex128)
CASES = [(dtype, precision) for dtype in DTYPES for precision in PRECISIONS_OF[name(dtype)]]
# Sizes (M, N, K) and layouts of a and b with which each form moves least.
FORMS = {
    "embedded": ((35, 10, 21), "row", "row"),
    "embedded, columns": ((35, 10, 21), "column", "column"),
    "embedded, gaps": ((35, 10, 21), "strided", "sparse"),
    "pairs": ((3, 35, 18), "row", "row"),
    "pairs, gaps": ((3, 35, 18), "sparse", "strided"),
    "pairs, columns": ((3, 35, 18), "column", "sliced"),
    "planes": ((3, 35, 18), "row", "column"),
    "planes, columns": ((3, 35, 18), "column", "column_sliced"),
}
# The forms by four products, whatever their layouts; what makes three differs by its layouts alone.
PLAIN = [form for form in FORMS if "," not in form]
FEW = ["embedded", "pairs, gaps"]
# Any core reads what either of these leaves it: each precision, beside plain ones, has one of them.
PRODUCTS = [
    *((form, (DTYPES[0], "ieee")) for form in FORMS),
    *((form, (DTYPES[0], "ieee-3m")) for form in [*FORMS][::2]),
    *((form, (DTYPES[1], "ieee")) for form in PLAIN),
    *((form, (DTYPES[0], p)) for form, p in zip(PLAIN, ("tf32", "tf32x3", "fp16x3"), strict=True)),
    *(
        ("pairs, columns", (dtype, p))
        for dtype, p in CASES
        if p.endswith("-3m") and (dtype, p) != (DTYPES[0], "ieee-3m")
    ),
    ("embedded, gaps", (DTYPES[1], "ozaki")),  # more of it: tests of ozaki
]
# Every form by four products, and some layouts by three.
BY_BOTH = [*itertools.product(FORMS, ["ieee"]), *itertools.product(FEW, ["ieee-3m"])]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """Workspaces of real numbers begin as NaN; counters at zero."""
    original = torch.zeros

    def zeros(*args, **kwargs):
        made = original(*args, **kwargs)
        return made.fill_(math.nan) if made.is_floating_point() else made

    monkeypatch.setattr(launch.torch, "zeros", zeros)


def operands(form, dtype=torch.complex64):
    (m, n, k), a_layout, b_layout = FORMS[form]
    return placed(numbers((m, k), dtype), a_layout), placed(numbers((k, n), dtype, 1), b_layout)


@pytest.mark.parametrize("form", FORMS)
def test_which_form_moves_least(form):
    for dtype, precision in CASES:
        problem = tritile.plan(tritile.matmul, *operands(form, dtype), precision=precision).problem
        wanted = "three" if precision.endswith("-3m") else form.partition(",")[0]
        assert form_of(problem) == wanted


def test_every_precision_is_among_the_products():
    assert {case for _, case in PRODUCTS} == set(CASES)


@pytest.mark.parametrize(("form", "case"), PRODUCTS, ids=str)
def test_forms(form, case):
    dtype, precision = case
    a, b = operands(form, dtype)
    got = tritile.matmul(a, b, precision=precision)
    assert got.is_contiguous()
    assert not got.is_conj()
    assert_complex(got, a, b, precision)


@pytest.mark.parametrize(
    ("form", "precision", "first", "second"),
    [
        *((*case, True, True) for case in BY_BOTH),
        *((form, "ieee", first, not first) for form in PLAIN for first in (True, False)),
        *(("embedded", "ieee-3m", first, not first) for first in (True, False)),
    ],
)
def test_conjugated_operands_are_never_copied(monkeypatch, form, first, second, precision):
    a, b = operands(form)
    a, b = a.conj() if first else a, b.conj() if second else b
    monkeypatch.setattr(torch.Tensor, "resolve_conj", lambda x: pytest.fail("copied"))
    got = tritile.matmul(a, b, precision=precision)
    monkeypatch.undo()
    assert_complex(got, a, b, precision)


@pytest.mark.parametrize("form", PLAIN)
def test_lazily_negated_operands(form):
    a, b = operands(form)
    for x, y in ((torch._neg_view(a), b), (a, torch._neg_view(b)), (torch._neg_view(a.conj()), b.conj())):
        assert x.is_neg() or y.is_neg()
        assert_complex(tritile.matmul(x, y), x, y)


@pytest.mark.parametrize("precision", ["ieee", "ieee-3m"])
@pytest.mark.parametrize("k", [0, 1, 17])
def test_zero_one_and_odd_sizes(k, precision):
    for m, n in itertools.product((0, 1, 17), repeat=2):
        a, b = numbers((m, k), torch.complex64), numbers((k, n), torch.complex64, 1)
        got = tritile.matmul(a, b, precision=precision)
        if k == 0:
            assert torch.equal(got, torch.zeros(m, n, dtype=torch.complex64))
        assert_complex(got, a, b, precision)


# Vectors, batches of one operand, of both, broadcast, of three dimensions; few columns, and many.
SHAPES = [
    ((5,), (5,)), ((2, 3, 5), (5,)), ((3, 5), (2, 5, 7)), ((2, 1, 3, 5), (4, 5, 7)),
    ((3, 1, 1, 1, 1, 5), (2, 1, 1, 5, 2)), ((2, 3, 0), (0, 7)), ((3, 1, 2, 5), (1, 4, 5, 40)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("shapes", "precision"),
    [*((s, "ieee") for s in SHAPES), *((s, "ieee-3m") for s in SHAPES[::3])],
    ids=str,
)
def test_shapes(shapes, precision):
    a_shape, b_shape = shapes
    a, b = numbers(a_shape, torch.complex64), numbers(b_shape, torch.complex64, 1)
    assert_complex(tritile.matmul(a, b, precision=precision), a, b, precision)
    if a.ndim > 1 and b.ndim > 1:
        a, b = placed(a.mT, "row").mT, placed(b.mT, "row").mT
        assert_complex(tritile.matmul(a, b.conj(), precision=precision), a, b.conj(), precision)


@pytest.mark.parametrize("layout", ["row", "column", "sparse", "offset"])
@pytest.mark.parametrize(
    ("form", "precision"), [*((form, "ieee") for form in PLAIN), ("embedded", "ieee-3m")]
)
def test_out_is_filled_and_nothing_around_it(layout, form, precision):
    a, b = operands(form)
    a = torch.stack([a, a.conj()])
    buffer, out = frame((2, a.shape[-2], b.shape[-1]), torch.complex64, layout)
    assert tritile.matmul(a, b, out=out, precision=precision) is out
    assert_complex(out, a, b, precision)
    assert guard_intact(buffer, out)


def test_rows_of_odd_steps_and_rows_that_overlap():
    b = numbers((9, 4), torch.complex64, 1)
    windows = numbers((40,), torch.complex64).unfold(0, 9, 1)  # each row begins one element after the last
    for a in (windows, placed(numbers((11, 9), torch.complex64), "sliced"), windows[:1].expand(6, 9)):
        for precision in ("ieee", "ieee-3m"):
            assert_complex(tritile.matmul(a, b, precision=precision), a, b, precision)


def test_the_default_precision_follows_torch(cuda_matmul):
    a, b = operands("embedded")
    for setting in ("tf32", "ieee"):
        cuda_matmul.fp32_precision = setting
        assert tritile.plan(tritile.matmul, a, b).problem.precision == setting
        wide = tritile.plan(tritile.matmul, a.to(torch.complex128), b.to(torch.complex128))
        assert wide.problem.precision == "ieee"


@pytest.mark.parametrize(
    ("part", "value"), [("real", math.nan), ("real", math.inf), ("imag", math.inf), ("imag", -math.inf)]
)
@pytest.mark.parametrize("form", PLAIN)
def test_nan_and_inf_spread_as_in_four_real_products(form, part, value):
    a, b = operands(form)
    getattr(a, part)[1, 5] = value
    getattr(b, part)[5, 2] = 0.0  # inf * 0 is NaN
    (a_re, a_im), (b_re, b_im) = parts(a), parts(b)
    expected = a_re @ b_re - a_im @ b_im, a_re @ b_im + a_im @ b_re
    for mine, other in zip(parts(tritile.matmul(a, b)), expected, strict=True):
        assert torch.equal(mine.isnan(), other.isnan())
        assert torch.equal(mine.isinf(), other.isinf())
        assert torch.equal(mine[mine.isinf()], other[other.isinf()])


SIDES = 32, 32, 16
CONFIGS = {"tile": tile(*SIDES), "persistent": tma(*SIDES, persistent=True), "split": tma(*SIDES, split=2)}


@pytest.mark.parametrize(
    ("form", "precision", "batch"),
    [
        *((form, "tf32", (2,)) for form in ("embedded", "pairs", "planes, columns")),
        ("pairs, gaps", "tf32-3m", (2,)),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", CONFIGS)
def test_every_family_makes_the_core(kind, form, precision, batch):
    (m, n, k), a_layout, b_layout = FORMS[form]
    a = placed(numbers((*batch, m, 2 * k), torch.complex64), a_layout)
    b = placed(numbers((*batch, 2 * k, n), torch.complex64, 1), b_layout)
    out = poisoned((*batch, m, n), torch.complex64)
    call = described(a, b.conj(), out, precision)
    assert form_of(call.problem) == ("three" if precision != "tf32" else form.partition(",")[0])
    assert illegal(CONFIGS[kind], call.problem, TARGETS["sm_90"]) is None
    launch.run_interpreted(call, CONFIGS[kind])
    assert_complex(out, a, b.conj(), precision, tensor_cores=False)


@pytest.mark.parametrize(("form", "precision"), [*itertools.product(PLAIN, ["ieee"]), BY_BOTH[-1]])
def test_paths_of_64_bits(monkeypatch, form, precision):
    monkeypatch.setattr(grids, "WIDE_FROM", 0)
    a, b = operands(form)
    a, b = torch.stack([a, a.conj()]), torch.stack([b, -b])
    assert_complex(tritile.matmul(a, b, precision=precision), a, b, precision)


@pytest.mark.parametrize(
    ("form", "precision"),
    [("embedded", "ieee"), ("pairs, gaps", "ieee"), ("planes", "ieee"), ("embedded", "ieee-3m")],
)
def test_batches_too_long_for_one_launch(monkeypatch, form, precision):
    monkeypatch.setattr("tritile.families.work._MAX_PROGRAMS", 8)
    a, b = operands(form)
    a, b = torch.stack([a, -a, a.conj(), 2 * a, 3 * a]), torch.stack([b, b + 1, b - 1, 2 * b, b]).conj()
    out = poisoned((5, a.shape[-2], b.shape[-1]), torch.complex64)
    call = described(a, b, out, precision)
    pieces = [piece for piece, _ in pieces_of(call, CONFIGS["tile"], TARGETS["nvidia-h200"])]
    assert len(pieces) > 1
    for piece in pieces:
        launch.run_interpreted(piece, CONFIGS["tile"])
    assert_complex(out, a, b, precision)


POSED = [{}, {"b_layout": "column", "m": 5}, {"batch": 2, "out_layout": "column"}]


@pytest.mark.parametrize(
    ("dtype", "precision", "fields"),
    [
        *((dtype, p, POSED[1] if p == "ozaki" else {}) for dtype, p in CASES),
        *((DTYPES[0], "ieee", fields) for fields in POSED[1:]),
        (DTYPES[0], "ieee-3m", POSED[2]),
    ],
    ids=str,
)
def test_the_tuner_tells_right_answers_from_wrong_ones(dtype, precision, fields):
    sizes = {"batch": 1, "m": 20, "n": 15, "k": 20} | fields
    problem = MatmulProblem(**sizes, dtype=name(dtype), out_dtype=name(dtype), precision=precision)
    call = posed(problem, lambda kind, size: torch.randn(size, dtype=getattr(torch, kind)))
    call.out.tensor.fill_(math.nan)
    assert answers.error_of(call) == math.inf
    launch.run_interpreted(call, plans.interpreted(call.problem).config)
    assert 0 < answers.answer_error(call) <= answers.allowed_error(call)
    call.out.tensor[1] += 1e3
    with pytest.raises(TuningError, match="wrong answer"):
        answers.answer_error(call)


def test_three_products_err_where_parts_cancel():
    """What its bound says: an imaginary part far below the others is lost, which four products keep."""
    a, b = numbers((5, 30), torch.complex64), numbers((30, 6), torch.complex64, 1)
    a, b = torch.complex(a.real, a.imag * 1e-6), torch.complex(b.real, b.imag * 1e-6)
    wanted = a.to(torch.complex128) @ b.to(torch.complex128)

    def error(precision):
        got = tritile.matmul(a, b, precision=precision)
        return float((got.imag - wanted.imag).norm() / wanted.imag.norm())

    assert error("ieee") < 1e-6 < 1e-3 < error("ieee-3m")


WEIGHTS = [(0.5 - 2j, 1 + 3j), (1, -1j), (2, 0.25), (1 + 0j, 1), (0, 3j)]  # beta, alpha


@pytest.mark.parametrize(
    ("weights", "dtype"),
    [*((weights, DTYPES[0]) for weights in WEIGHTS), (WEIGHTS[0], DTYPES[1]), (WEIGHTS[-1], DTYPES[1])],
    ids=str,
)
def test_sums_with_complex_weights(weights, dtype):
    beta, alpha = weights
    a, b = numbers((2, 9, 21), dtype).conj(), numbers((2, 21, 13), dtype, 1)
    for shape, layout in (((2, 9, 13), "sliced"), ((9, 1), "column"), ((), "row")):
        nothing = torch.full(shape, complex(math.nan, math.inf), dtype=dtype)
        added = numbers(shape, dtype, 2) if beta else nothing
        sides, words = Sides(bias=added.conj(), alpha=alpha, beta=beta), {"alpha": alpha, "beta": beta}
        assert_complex_fused(tritile.baddbmm(added.conj(), a, b, **words), a, b, sides)
        sides = sides._replace(bias=added[0].conj() if shape == (2, 9, 13) else added.conj())
        buffer, out = frame((9, 13), dtype, layout)
        assert tritile.addmm(sides.bias, a[0], b[0], out=out, **words) is out
        assert_complex_fused(out, a[0], b[0], sides)
        assert guard_intact(buffer, out)


def test_weights_of_one_spread_no_infinity():
    a, b = torch.eye(3, dtype=DTYPES[0]), torch.ones(3, 3, dtype=DTYPES[0])
    added = torch.full((3, 3), complex(math.inf, 1.0), dtype=DTYPES[0])
    assert torch.equal(tritile.addmm(added, a, b), torch.full_like(added, complex(math.inf, 1.0)))


@st.composite
def products(draw):
    case = draw(st.sampled_from(CASES))
    slow = case[1].startswith("ozaki")  # 16 products in one
    size = st.integers(0, 8 if slow else 30)
    m, n, k = draw(size), draw(size), draw(size)
    batch = draw(st.lists(st.integers(1, 3), max_size=0 if slow else 2))
    a_batch = [draw(st.sampled_from([1, extent])) for extent in batch]
    b_batch = [draw(st.sampled_from([1, extent])) for extent in batch]
    b_batch = b_batch[draw(st.integers(0, len(batch))) :]
    layouts = draw(st.tuples(*[st.sampled_from(LAYOUTS)] * 3))
    return (*a_batch, m, k), (*b_batch, k, n), case, layouts, draw(st.tuples(st.booleans(), st.booleans()))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(products(), st.integers(0, 2**16))
def test_any_product(product, seed):
    a_shape, b_shape, (dtype, precision), (a_layout, b_layout, out_layout), conjugated = product
    a = placed(numbers(a_shape, dtype, seed), a_layout)
    b = placed(numbers(b_shape, dtype, seed + 1), b_layout)
    a, b = (x.conj() if conj else x for x, conj in zip((a, b), conjugated, strict=True))
    buffer, out = frame(tuple(torch.matmul(a, b).shape), dtype, out_layout)
    tritile.matmul(a, b, out=out, precision=precision)
    assert_complex(out, a, b, precision)
    assert guard_intact(buffer, out)
