"""Products of complex numbers, which torch alone makes: what tritile checks, plans, writes and remembers.

Calls are made on host tensors that pass for a GPU's, so that torch really computes them.
"""

import functools
import random

import pytest
import torch

import tritile
from tests.reference import LAYOUTS, frame, guard_intact, placed
from tritile.core.device import target_device
from tritile.core.problem import MatmulProblem, problem_from_dict, problem_to_dict
from tritile.errors import InvalidValueError, OverlapError, UnsupportedError
from tritile.families.space import legal_configs
from tritile.lab.tune import problem_of
from tritile.ops import asked, memo, run
from tritile.ops import aten as ops_aten
from tritile.planning import aten, plans

H200 = target_device("nvidia-h200")
C64, C128 = torch.complex64, torch.complex128


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    monkeypatch.setenv("TRITILE_BACKENDS", "triton,aten")
    monkeypatch.setattr(asked, "on_host", lambda tensor: False)
    monkeypatch.setattr(run.devices, "gpu", lambda index: H200)
    tritile.forget()
    yield
    tritile.forget()


@pytest.fixture
def first_calls(monkeypatch):
    """The problems of calls that are planned, and not remembered."""
    found, plan = [], run.planned

    def planned(problem, index, by_torch=False):
        found.append(problem)
        return plan(problem, index, by_torch)

    monkeypatch.setattr(run, "planned", planned)
    return found


def whole(shape, dtype, draw):
    """Small whole numbers, of which sums are exact."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    parts = torch.randint(-2, 3, (2, *shape), generator=generator).double()
    return torch.complex(*parts).to(dtype)


def laid(x, draw):
    """The same numbers in any layout, and lazily conjugated or negated."""
    x = x.conj().resolve_conj() if (conjugates := draw.random() < 0.3) else x
    x = -x if (negates := draw.random() < 0.2) else x
    x = placed(x, draw.choice(LAYOUTS)) if x.ndim > 1 else x
    x = x.conj() if conjugates else x
    return torch._neg_view(x) if negates else x


def drawn(draw, batch, shape, dtype):
    """An operand with some of the batch dimensions, of which some are 1 or expanded."""
    own = [size if draw.random() < 0.7 else 1 for size in batch][draw.randint(0, len(batch)) :]
    x = laid(whole((*own, *shape), dtype, draw), draw)
    return x.expand(*batch, *shape) if own and draw.random() < 0.3 else x


def wide(x):
    return x.resolve_conj().resolve_neg().to(C128)


def assert_into(draw, call, wanted, monkeypatch):
    """A fresh result is plain memory; one into memory that is given leaves all around it; each once more."""
    if wanted.ndim > 1:
        buffer, out = frame(tuple(wanted.shape), wanted.dtype, draw.choice(LAYOUTS))
    else:
        buffer, view = frame((1, *wanted.shape, 1), wanted.dtype, "sparse")
        out = view[0, ..., 0]
    strides = out.stride()
    for again in (False, True):
        with monkeypatch.context() as patch:
            if again:
                patch.setattr(asked, "is_by_aten", lambda *given: pytest.fail("planned again"))
            found = call()
            assert (found.is_contiguous(), found.is_conj(), found.is_neg()) == (True, False, False)
            assert torch.equal(found, wanted)
            version = out._version
            assert call(out=out) is out
            assert out._version > version or not out.numel()
            assert torch.equal(out, wanted)
            assert out.stride() == strides
            assert guard_intact(buffer, out)
            out.fill_(7)


def sizes(draw):
    return tuple(draw.choice([0, 1, 1, 2, 3, 5, 8]) for _ in range(3))


@pytest.mark.parametrize("seed", range(20))
def test_products(seed, monkeypatch):
    draw = random.Random(f"products {seed}")
    for _ in range(10):
        batch = [draw.choice([0, 1, 2, 2, 3]) for _ in range(draw.randint(0, 3))]
        (m, n, k), dtype = sizes(draw), draw.choice([C64, C128])
        a, b = (
            laid(whole((k,), dtype, draw), draw) if draw.random() < 0.2 else drawn(draw, batch, shape, dtype)
            for shape in ((m, k), (k, n))
        )
        wanted = torch.matmul(wide(a), wide(b)).to(dtype)
        assert_into(draw, functools.partial(tritile.matmul, a, b), wanted, monkeypatch)


def test_what_torch_conjugates_lazily_is_plain_memory():
    a, b = (whole((5,), C64, random.Random(seed)) for seed in (1, 2))
    assert torch.matmul(a.conj(), b.conj()).is_conj()
    assert not tritile.matmul(a.conj(), b.conj()).is_conj()


def spread(draw, shape, dtype):
    """A tensor that broadcasts to a result."""
    own = [size if draw.random() < 0.6 else 1 for size in shape][draw.randint(0, len(shape)) :]
    return laid(whole(own, dtype, draw), draw)


@pytest.mark.parametrize("seed", range(40))
def test_linear(seed, monkeypatch):
    draw = random.Random(f"linear {seed}")
    m, n, k = sizes(draw)
    batch = [draw.choice([1, 2, 3]) for _ in range(draw.randint(0, 2))]
    x = drawn(draw, batch, (m, k), C64)
    weight = laid(whole((k,) if draw.random() < 0.2 else (n, k), C64, draw), draw)
    wanted = torch.nn.functional.linear(wide(x), wide(weight))
    sides = {each: spread(draw, wanted.shape, C64) for each in ("bias", "residual") if draw.random() < 0.7}
    for side in sides.values():
        wanted = wanted + wide(side)
    call = functools.partial(tritile.linear, x, weight, **sides)
    assert_into(draw, call, wanted.to(C64), monkeypatch)
    if wanted.ndim > 1:  # the result may take the place of what is added
        place = placed(torch.ones_like(wanted, dtype=C64), draw.choice(LAYOUTS))
        sums = torch.nn.functional.linear(wide(x), wide(weight)) + 1
        assert tritile.linear(x, weight, residual=place, out=place) is place
        assert torch.equal(place, sums.to(C64))


@pytest.mark.parametrize("seed", range(40))
def test_weighted_sums(seed, monkeypatch):
    draw = random.Random(f"weighted {seed}")
    (m, n, k), rank = sizes(draw), draw.choice([2, 3])
    batch = (draw.choice([1, 3]),) if rank == 3 else ()
    a, b = (laid(whole((*batch, *shape), C128, draw), draw) for shape in ((m, k), (k, n)))
    added, op = spread(draw, (*batch, m, n), C128), tritile.addmm if rank == 2 else tritile.baddbmm
    alpha, beta = draw.choice([0, 1, 2 + 1j, -3j]), draw.choice([0, 1, 2 - 4j])
    if beta == 0:
        added = torch.full_like(added, torch.nan)  # not read
    wanted = alpha * (wide(a) @ wide(b)) + (beta * wide(added) if beta else 0)
    call = functools.partial(op, added, a, b, alpha=alpha, beta=beta)
    if alpha and k:
        assert_into(draw, call, wanted, monkeypatch)
    else:
        assert torch.equal(call(), wanted)
    place = placed(torch.ones_like(wanted), draw.choice(LAYOUTS))
    assert op(place, a, b, alpha=2j, beta=3, out=place) is place
    assert torch.equal(place, 2j * (wide(a) @ wide(b)) + 3)


def test_factors_are_not_read_where_alpha_is_0():
    added, a, b = (whole(shape, C64, random.Random(1)) for shape in ((3, 5), (3, 4), (4, 5)))
    out = torch.full_like(added, torch.nan)
    assert torch.equal(tritile.addmm(added, a * torch.nan, b, alpha=0j, beta=2j, out=out), 2j * added)


def test_an_out_that_overlaps_is_refused_each_time_but_for_what_is_not_read():
    base = whole((3, 16, 16), C64, random.Random(1))
    a, b, out = base
    flat = base.flatten()
    for _ in range(2):
        tritile.matmul(a, b, out=out)
        for other in (a, b, flat[500:756].view(16, 16), out[:1].expand(16, 16)):
            with pytest.raises(OverlapError):
                tritile.matmul(a, b, out=other)
        with pytest.raises(OverlapError):
            tritile.addmm(flat[500:756].view(16, 16), a.clone(), b.clone(), out=out)
    c, d = a.clone(), b.clone()
    for alpha in (1, 2j):
        for _ in range(2):
            found = tritile.addmm(flat[500:756].view(16, 16), c, d, beta=0, alpha=alpha, out=out)
            assert torch.equal(found, alpha * (c @ d))


def test_a_problem_of_complex_numbers_is_torchs_alone():
    a, b = torch.empty(64, 32, dtype=C64), torch.empty(32, 48, dtype=C64)
    for what in (("matmul", a, b), ("addmm", torch.empty(48, dtype=C64), a, b), ("linear", a, b.t())):
        found = tritile.plan(*what, device=H200)
        assert (found.config, found.workspace) == (aten.CONFIG, 0)
        assert problem_from_dict(problem_to_dict(found.problem)) == found.problem
        for mode in ("strict", "off", "tune"):
            with tritile.mode(mode):
                assert tritile.plan(found.problem, device=H200).config == aten.CONFIG
        with pytest.raises(UnsupportedError, match="only torch computes it"):
            legal_configs(found.problem, H200)
        for ask in (tritile.warm, tritile.explain):
            with pytest.raises((UnsupportedError, InvalidValueError), match="only torch"):
                ask(found.problem, device=H200)
        with pytest.raises(UnsupportedError, match="tune: only torch computes 64x48x32 N"):
            problem_of("tune", *what[:1], what[1:], {})
    with pytest.raises(InvalidValueError, match="no activation"):
        MatmulProblem(1, 64, 48, 32, "complex64", "complex64", epilogue="relu")


def test_calls_that_torch_may_not_make_are_refused_before_any_launch(monkeypatch, cuda_matmul):
    a, b = (whole((4, 4), C64, random.Random(seed)) for seed in (1, 2))
    cuda_matmul.fp32_precision = "ieee"
    tritile.matmul(a, b)
    monkeypatch.setattr(ops_aten, "_MULTIPLY", lambda *given: pytest.fail("torch was called"))
    with (
        tritile.mode(backends="triton"),
        pytest.raises(UnsupportedError, match=r'backends leave torch out: wanted "triton,aten"'),
    ):
        tritile.matmul(a, b)
    with tritile.batch_invariant(), pytest.raises(UnsupportedError, match="wanted real operands"):
        tritile.matmul(a, b)
    invariant = MatmulProblem(1, 4, 4, 4, "complex64", "complex64", invariant=True)
    with pytest.raises(UnsupportedError, match="depend on how many rows"):
        plans.plan_for(invariant, H200, None, True)
    with pytest.raises(UnsupportedError, match=r"'tf32', but .*fp32_precision is 'ieee'"):
        tritile.matmul(a, b, precision="tf32")


def test_torchs_setting_counts_at_every_call(first_calls, cuda_matmul):
    a, b = (whole((4, 4), C64, random.Random(seed)) for seed in (1, 2))
    for _ in range(2):
        for setting, other in (("ieee", "tf32"), ("tf32", "ieee")):
            cuda_matmul.fp32_precision = setting
            tritile.matmul(a, b)
            tritile.matmul(a, b, precision=setting)
            with pytest.raises(UnsupportedError, match=f"precision is '{other}'"):
                tritile.matmul(a, b, precision=other)
    assert [problem.precision for problem in first_calls] == ["ieee"] * 2 + ["tf32"] * 2
    tritile.matmul(a.to(C128), b.to(C128), precision="ieee")  # no setting decides how these are multiplied
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(tritile.matmul(a, b), a @ b)
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_is_remembered_is_told_apart_by_lazy_bits():
    a, b = (whole((4, 4), C64, random.Random(seed)) for seed in (1, 2))
    for _ in range(2):
        for x, y in ((a, b), (a.conj(), b), (a, b.conj()), (torch._neg_view(a), b)):
            assert torch.equal(tritile.matmul(x, y), wide(x).matmul(wide(y)).to(C64))
    (known,) = memo.CALLS.values()
    assert len(known) == 4
    assert all(ready.by_torch for ready in known)


def test_a_traced_call_adds_what_is_added():
    x, weight, bias, residual = (
        whole(shape, C64, random.Random(1)) for shape in ((3, 4), (5, 4), (1, 5), (3, 5))
    )
    sums = wide(x) @ wide(weight).t()
    for given in ((None, None), (bias, None), (bias[0], residual), (None, residual)):
        wanted = sum((wide(side) for side in given if side is not None), sums)
        found = ops_aten.LOWERED["linear"]((x, weight, *given), (None, None, None))
        assert torch.equal(found, wanted.to(C64))
    found = ops_aten.LOWERED["addmm"]((residual, x, weight.t()), (2j, 1 - 1j, None))
    assert torch.equal(found, (2j * wide(residual) + (1 - 1j) * sums).to(C64))
