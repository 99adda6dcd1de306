"""Products of complex numbers, which torch alone makes: what tritile checks, plans, writes and remembers.

Calls are made on host tensors that pass for a GPU's, so that torch really computes them.
"""

import contextlib
import random

import pytest
import torch

import tritile
from tests.drawn import linear, product, weighted, whole, wide
from tritile.core.device import target_device
from tritile.core.problem import MatmulProblem, problem_from_dict, problem_to_dict
from tritile.errors import InvalidValueError, OverlapError, UnsupportedError
from tritile.families.space import legal_configs
from tritile.lab.tune import problem_of
from tritile.ops import aten as ops_aten
from tritile.ops import memo
from tritile.ops import request as ops_request
from tritile.planning import aten, plans

H200 = target_device("nvidia-h200")
C64, C128 = torch.complex64, torch.complex128


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    monkeypatch.setenv("TRITILE_BACKENDS", "triton,aten")
    monkeypatch.setattr(ops_request, "on_host", lambda tensor: False)
    monkeypatch.setattr(ops_request.devices, "gpu", lambda index: H200)
    tritile.forget()
    yield
    tritile.forget()


@pytest.fixture
def first_calls(monkeypatch):
    """The problems of calls that are planned, and not remembered."""
    found, plan = [], ops_request.planned

    def planned(problem, index, allows_torch=False):
        found.append(problem)
        return plan(problem, index, allows_torch)

    monkeypatch.setattr(ops_request, "planned", planned)
    return found


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("made", "dtype", "times"),
    [(product, C64, 5), (product, C128, 5), (linear, C64, 2), (weighted, C128, 2)],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_products(made, dtype, times, seed, monkeypatch):
    """The second call of each kind is not planned again."""

    @contextlib.contextmanager
    def again():
        with monkeypatch.context() as patch:
            patch.setattr(ops_request, "is_by_aten", lambda *given: pytest.fail("planned again"))
            yield

    draw = random.Random(f"{made.__name__} {dtype} {seed}")
    for _ in range(times):
        made(draw, dtype, again)


def test_what_torch_conjugates_lazily_is_plain_memory():
    a, b = (whole((5,), C64, random.Random(seed)) for seed in (1, 2))
    assert torch.matmul(a.conj(), b.conj()).is_conj()
    assert not tritile.matmul(a.conj(), b.conj()).is_conj()


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
        pytest.raises(UnsupportedError, match=r'backends is "triton": expected "triton,aten"'),
    ):
        tritile.matmul(a, b)
    with tritile.batch_invariant(), pytest.raises(UnsupportedError, match="expected real operands"):
        tritile.matmul(a, b)
    invariant = MatmulProblem(1, 4, 4, 4, "complex64", "complex64", invariant=True)
    with pytest.raises(UnsupportedError, match="depend on the number of rows"):
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
    assert len([*known]) == 4
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
