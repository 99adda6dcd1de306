"""torch's own products under `tritile.batch_invariant(torch=True)` on a GPU: bits, kernels, graphs."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import tritile
from tests.reference import name, values
from tritile.core.device import current_gpu

pytestmark = pytest.mark.gpu
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ROWS, N, K = 300, 520, 1000


def inside():
    return tritile.batch_invariant(torch=True)


def on_gpu(shape, dtype=BF16, seed=0):
    return values(shape, dtype, seed, "cuda")


def kernels_of(call):
    """The names of the kernels that a call launches."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    return {event.key for event in found.key_averages()}


def is_vendors(kernels):
    return any(
        word in kernel
        for kernel in kernels
        for word in ("cutlass", "gemm", "gemv", "nvjet", "cublas", "dot_kernel")
    )


CALLS = {
    "mm": lambda x, w, b: torch.mm(x, w.mT),
    "addmm": lambda x, w, b: torch.addmm(b, x, w.mT, beta=0.3, alpha=1.7),
    "linear": lambda x, w, b: F.linear(x, w, b),
    "batches": lambda x, w, b: torch.bmm(x.unsqueeze(1), w.mT.expand(len(x), K, N))[:, 0],
    "baddbmm": lambda x, w, b: torch.baddbmm(b, x.unsqueeze(1), w.mT.expand(len(x), K, N))[:, 0],
    "einsum": lambda x, w, b: torch.einsum("mk,nk->mn", x, w),
    "vector": lambda x, w, b: torch.mv(x, w[0]),
    "addmv": lambda x, w, b: torch.addmv(x[:, 0], x, w[0]),
    "out": lambda x, w, b: torch.mm(x, w.mT, out=x.new_empty(len(x), N)),
    "in place": lambda x, w, b: x.new_ones(len(x), N).addmm_(x, w.mT),
    "activation": lambda x, w, b: torch._addmm_activation(b, x, w.mT, use_gelu=True),
}


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64], ids=name)
@pytest.mark.parametrize("op", CALLS)
def test_rows_have_the_same_bits(op, dtype):
    call, w, b = CALLS[op], on_gpu((N, K), dtype, 1), on_gpu((N,), dtype, 2)
    x = on_gpu((ROWS, K), dtype)
    outside = call(x, w, b)
    with inside():
        whole = call(x, w, b)
        for count in (1, 2, 7, 64, 129):
            for start in {0, 1, ROWS - count}:
                part = call(x[start : start + count], w, b)
                assert torch.equal(part, whole[start : start + count]), (count, start)
        if "batches" not in op and op != "baddbmm":  # of torch's names, gemm is in ours too
            assert not is_vendors(kernels_of(lambda: call(x, w, b)))
    scale = outside.abs().max().item()
    torch.testing.assert_close(whole, outside, rtol=2e-2, atol=2e-2 * scale)
    assert torch.equal(call(x, w, b), outside)


def test_outside_are_torchs_kernels_and_bits():
    x, w = on_gpu((ROWS, K)), on_gpu((N, K), seed=1)
    before = F.linear(x, w)
    with inside():
        F.linear(x, w)
    assert torch.equal(F.linear(x, w), before)
    assert is_vendors(kernels_of(lambda: F.linear(x, w)))
    found = []
    with inside():
        thread = threading.Thread(target=lambda: found.append(F.linear(x, w)))
        thread.start()
        thread.join()
    assert torch.equal(found[0], before)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(K, 512), torch.nn.Linear(512, N, bias=False)
        self.to("cuda", BF16)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


def gradients(block, x, y):
    block.zero_grad()
    return torch.autograd.grad(y.float().square().sum(), [x, *block.parameters()])


@pytest.mark.parametrize("how", ["plain", "checkpoint", "reentrant"])
def test_backward_passes(how):
    """They run in a thread of torch's own. A row's gradient does not depend on its batch, either."""
    block, x = Block(), on_gpu((64, K)).requires_grad_()

    def forward(rows):
        if how == "plain":
            return block(rows)
        return checkpoint(block, rows, use_reentrant=how == "reentrant")

    def of(rows):
        rows = rows.detach().requires_grad_()
        y = forward(rows)
        y.float().square().sum().backward()
        return rows.grad

    with inside():
        whole = of(x)
        assert torch.equal(of(x[:3]), whole[:3])
        assert torch.equal(of(x[60:]), whole[60:])
        launched = kernels_of(lambda: of(x))
        assert not is_vendors(launched)
    if how == "plain":
        rows = x.detach().requires_grad_()
        with inside():
            y = block(rows)
        y.float().square().sum().backward()  # outside
        assert torch.equal(rows.grad, whole)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_compiled(mode):
    torch.compiler.reset()
    block = Block()
    compiled = torch.compile(block, mode=mode, dynamic=False)
    x = on_gpu((64, K))
    with torch.no_grad():
        outside = compiled(x).clone()
        with inside():
            for _ in range(3):  # warm up, record, replay
                whole = compiled(x).clone()
            for _ in range(3):
                part = compiled(x[:7]).clone()
            assert torch.equal(part, whole[:7])
            assert not is_vendors(kernels_of(lambda: compiled(x)))
        assert torch.equal(compiled(x).clone(), outside)


def test_compiled_backward():
    torch.compiler.reset()
    block, x = Block(), on_gpu((64, K))
    compiled = torch.compile(block, dynamic=False)

    def of(rows):
        rows = rows.detach().requires_grad_()
        with inside():
            y = compiled(rows)
        y.float().square().sum().backward()  # outside
        return rows.grad

    whole = of(x)
    assert torch.equal(of(x[:3]), whole[:3])
    assert not is_vendors(kernels_of(lambda: of(x)))


def test_captured():
    block, x = Block(), on_gpu((64, K))
    with torch.no_grad(), inside():
        wanted = block(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = block(x)
    graph.replay()
    assert torch.equal(y, wanted)


@pytest.mark.skipif(not (current_gpu() and current_gpu().has_tma), reason="torch needs Hopper")
def test_scaled_and_grouped():
    a = on_gpu((64, 512)).to(torch.float8_e4m3fn)
    b = on_gpu((256, 512), seed=1).to(torch.float8_e4m3fn).t()
    one, rows, columns = (
        torch.ones((), device="cuda"),
        torch.rand(64, 1, device="cuda"),
        torch.rand(1, 256, device="cuda"),
    )
    groups, offs = on_gpu((2, 512, 256), seed=2), torch.tensor([16, 64], device="cuda", dtype=torch.int32)
    calls = {
        "tensor": lambda n: torch._scaled_mm(a[:n], b, one, one, out_dtype=BF16),
        "rows": lambda n: torch._scaled_mm(a[:n], b, rows[:n].contiguous(), columns, out_dtype=BF16),
    }
    x = on_gpu((64, 512), seed=3)
    with tritile.batch_invariant.report() as found:
        for call in calls.values():
            whole = call(64)
            assert torch.equal(call(16), whole[:16])
        whole = torch._grouped_mm(x, groups, offs)
        assert torch.equal(whole[:16], x[:16] @ groups[0])
    assert not {"aten::_scaled_mm", "aten::_grouped_mm"} & {each.name for each in found.operations}


def test_check_and_report():
    block = Block()
    make = lambda rows: on_gpu((rows, K))  # noqa: E731
    with inside():
        assert tritile.check_invariant(block, make)
    x = make(5)
    with tritile.batch_invariant.report() as found, torch.no_grad():
        block(x)
    assert not found, found
    found = tritile.check_invariant(block, make)
    if not found:  # torch's own kernels may sum alike on some GPUs
        assert found.operation in ("aten::addmm", "aten::mm", "aten::_addmm_activation")
