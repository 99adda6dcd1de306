"""Operators on a GPU: training, compiling, graphs and autocast."""

import pytest
import torch

import tritile
from tests.launched import captured
from tests.opdb import NAMES, check, samples
from tests.reference import assert_product, name, values
from tritile.ops import request as ops_request

pytestmark = pytest.mark.gpu
HALVES = (torch.float16, torch.bfloat16)


def gpu(shape, dtype=torch.float32, seed=0):
    return values(shape, dtype, seed, "cuda")


WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)


@pytest.mark.parametrize("dtype", [*HALVES, *WIDE], ids=name)
@pytest.mark.parametrize("op", NAMES)
def test_samples_of_torchs_own_tests(op, dtype):
    cases = list(samples(op, "cuda", dtype))
    assert cases
    for case in cases:
        check(op, case, dtype)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=name)
@pytest.mark.parametrize("shape", [(64, 96), (3, 33, 95)], ids=str)
def test_linear_gradients_within_bounds(shape, dtype):
    x, weight = gpu(shape, dtype).requires_grad_(), gpu((77, shape[-1]), dtype, 1).requires_grad_()
    y = tritile.linear(x, weight)
    g = torch.randn_like(y)
    of_x, of_weight = torch.autograd.grad(y, (x, weight), g)
    assert_product(of_x, g, weight.detach())
    assert_product(of_weight, g.flatten(0, -2).mT, x.detach().flatten(0, -2))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_block_trains(backend, dynamic):
    def block(x, wide, bias, narrow):  # with nothing between products that a compiler rounds otherwise
        return tritile.linear(tritile.linear(x, wide, bias), narrow, residual=x)

    torch._dynamo.reset()
    compiled = torch.compile(block, backend=backend, fullgraph=True, dynamic=dynamic)
    for rows in (40, 72):
        shapes = ((rows, 64), (128, 64), (128,), (64, 128))
        given = [(gpu(s, torch.bfloat16, i) / 8).requires_grad_() for i, s in enumerate(shapes)]
        ours = torch.autograd.grad(compiled(*given).float().square().sum(), given)
        theirs = torch.autograd.grad(block(*given).float().square().sum(), given)
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.equal(mine, other)  # the same kernels by the same plans


def test_captured_with_gradients():
    x, weight = gpu((65, 64), torch.bfloat16), gpu((77, 64), torch.bfloat16, 1).requires_grad_()

    def step():
        weight.grad = None
        tritile.linear(x, weight).sum().backward()
        return weight.grad

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        wanted = step().clone()
    torch.cuda.current_stream().wait_stream(stream)
    graph, grad = captured(step)
    graph.replay()
    assert torch.equal(grad, wanted)


def test_plain_call_skips_dispatcher(monkeypatch):
    a, b = gpu((33, 64)), gpu((64, 77), seed=1)
    tritile.matmul(a, b)
    monkeypatch.setattr(ops_request, "prepared", lambda *given: pytest.fail("it was not remembered"))
    monkeypatch.setattr(
        torch.ops.tritile.matmul, "default", lambda *args, **kwargs: pytest.fail("dispatched")
    )
    assert_product(tritile.matmul(a, b), a, b)
