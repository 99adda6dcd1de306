"""Products of complex tensors on a GPU, which torch alone makes: into any `out`, met again, captured."""

import math

import pytest
import torch

import tritile
from tests.launched import captured
from tests.reference import assert_complex, frame, guard_intact, name, placed, values
from tritile.core.device import current_gpu
from tritile.core.problem import MatmulProblem
from tritile.errors import UnsupportedError
from tritile.ops import memo
from tritile.planning import aten

DTYPES = (torch.complex64, torch.complex128)


@pytest.fixture(autouse=True)
def _aten(monkeypatch):
    monkeypatch.setenv("TRITILE_BACKENDS", "triton,aten")


pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison", "fresh")]


def gpu(shape, dtype=torch.complex64, seed=0):
    return values(tuple(shape), dtype, seed, "cuda")


def remembered():
    return [ready for known in memo.CALLS.values() for ready in known]


@pytest.mark.parametrize("lazy", ["conj", "neg"])
@pytest.mark.parametrize("layout", ["row", "column", "sliced", "strided", "sparse"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_any_layout_and_lazy_bits_into_any_out(dtype, layout, lazy):
    a, b = placed(gpu((131, 75), dtype), layout), placed(gpu((75, 66), dtype, 1), layout)
    a = a.conj() if lazy == "conj" else torch._neg_view(a)
    for _ in range(2):  # the second call is a remembered one
        assert_complex(tritile.matmul(a, b), a.resolve_neg(), b)
        buffer, out = frame((131, 66), dtype, layout, "cuda")
        assert tritile.matmul(a, b, out=out) is out
        assert_complex(out, a.resolve_neg(), b)
        assert guard_intact(buffer, out)
    assert len(remembered()) == 2
    assert all(ready.by_torch for ready in remembered())


@pytest.mark.parametrize("layout", ["row", "column", "sparse"])
@pytest.mark.parametrize(
    ("a", "b"),
    [((5,), (5, 7)), ((3, 5), (5,)), ((5,), (5,)), ((2, 3, 5), (5, 7)), ((3, 5), (2, 5, 7)),
     ((4, 1, 3, 5), (2, 5, 7)), ((5,), (2, 5, 7)), ((2, 3, 5), (5,))],
    ids=str,
)  # fmt: skip
def test_vectors_and_batches_into_any_out(a, b, layout):
    a, b = gpu(a), gpu(b, seed=1)
    wanted = torch.matmul(a.to(torch.complex128), b.to(torch.complex128)).to(a.dtype)
    for _ in range(2):
        torch.testing.assert_close(tritile.matmul(a, b), wanted)
        shape = tuple(wanted.shape) if wanted.ndim > 1 else (1, *wanted.shape, 1)
        buffer, out = frame(shape, a.dtype, layout, "cuda")
        out = out if wanted.ndim > 1 else out[0, ..., 0]
        assert tritile.matmul(a, b, out=out) is out
        torch.testing.assert_close(out, wanted)
        assert guard_intact(buffer, out)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_sums_with_complex_weights(dtype):
    a, b, added = (gpu(shape, dtype, i) for i, shape in enumerate([(3, 131, 75), (3, 75, 66), (131, 66)]))
    words, wide = (
        {"beta": 0.5 - 2j, "alpha": 1 + 3j},
        [x.to(torch.complex128, copy=True) for x in (added, a, b)],
    )
    wanted = (words["beta"] * wide[0].conj() + words["alpha"] * (wide[1] @ wide[2])).to(dtype)
    near = {"rtol": 1e-4, "atol": 1e-3} if dtype == torch.complex64 else {"rtol": 1e-12, "atol": 1e-11}
    nothing = torch.full_like(added, math.nan)
    for _ in range(2):
        torch.testing.assert_close(tritile.baddbmm(added.conj(), a, b, **words), wanted, **near)
        buffer, out = frame((131, 66), dtype, "sliced", "cuda")
        assert tritile.addmm(added.conj(), a[0], b[0], out=out, **words) is out
        torch.testing.assert_close(out, wanted[0], **near)
        assert guard_intact(buffer, out)
        got = tritile.linear(a, b[0].mT, added[0], residual=added)
        torch.testing.assert_close(got, (wide[1] @ wide[2][0] + wide[0][0] + wide[0]).to(dtype), **near)
        got = tritile.addmm(nothing, a[0], b[0], beta=0, alpha=1j)
        torch.testing.assert_close(got, (1j * (wide[1][0] @ wide[2][0])).to(dtype), **near)
    for alpha in (1, 2j):  # what is not read may overlap out
        flat = torch.empty(2 * added.numel(), dtype=dtype, device="cuda")
        out, unread = (flat[i : i + added.numel()].view(added.shape) for i in (0, 100))
        tritile.addmm(unread, a[0], b[0], beta=0, alpha=alpha, out=out)
        torch.testing.assert_close(out, (alpha * (wide[1][0] @ wide[2][0])).to(dtype), **near)
    out = added.clone()
    assert tritile.addmm(out, a[0], b[0], out=out, alpha=0, beta=2) is out
    assert torch.equal(out, 2 * added)
    graph, got = captured(lambda: tritile.addmm(added.conj(), a[0], b[0], **words))
    a.neg_()
    graph.replay()
    torch.cuda.synchronize()
    again = words["beta"] * wide[0].conj() - words["alpha"] * (wide[1] @ wide[2])[0]
    torch.testing.assert_close(got, again.to(dtype), **near)


def test_torchs_setting_counts_at_every_call(cuda_matmul):
    a, b = gpu((256, 512)), gpu((512, 256), seed=1)
    for _ in range(2):
        for setting, other in (("ieee", "tf32"), ("tf32", "ieee")):
            cuda_matmul.fp32_precision = setting
            assert_complex(tritile.matmul(a, b), a, b, setting)
            assert_complex(tritile.matmul(a, b, precision=setting), a, b, setting)
            with pytest.raises(UnsupportedError, match=f"fp32_precision is '{setting}'"):
                tritile.matmul(a, b, precision=other)


def test_only_torch_plans_and_nothing_is_tuned_or_timed():
    a, b = gpu((64, 64)), gpu((64, 64), seed=1)
    assert tritile.plan(tritile.matmul, a, b).config == aten.CONFIG
    with tritile.mode("tune"):
        assert_complex(tritile.matmul(a, b), a, b)
    problem = MatmulProblem(1, 64, 64, 64, "complex64", "complex64")
    assert tritile.plan(problem, device=current_gpu()).config == aten.CONFIG
    for ask in (tritile.tune, tritile.bench, tritile.warm):
        with pytest.raises(UnsupportedError, match="only torch computes"):
            ask(tritile.matmul, a, b)
    with tritile.mode(backends="triton"), pytest.raises(UnsupportedError, match="backends leave torch out"):
        tritile.matmul(a, b)


def test_differentiated_and_compiled():
    a, b = gpu((33, 64)).requires_grad_(), gpu((64, 35), seed=1).requires_grad_()
    for call in (tritile.matmul, torch.compile(tritile.matmul, fullgraph=True)):
        y = call(a, b)
        g = gpu(y.shape, seed=2)
        of_a, of_b = torch.autograd.grad(y, (a, b), g)
        assert_complex(of_a, g, b.detach().mH)
        assert_complex(of_b, a.detach().mH, g)
