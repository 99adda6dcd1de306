"""tritile.sync under NCCL: two ranks whose stores differ run one config, and compute the same bits."""

import os

import pytest
import torch
import triton
import triton.language as tl
from torch import distributed

import tritile
from tritile.errors import UnsupportedError

RANKS = 2
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two GPUs"),
]


@triton.jit
def fill(out_ptr, n, B: tl.constexpr):
    columns = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out_ptr + columns, 1.0, mask=columns < n)


class Bench:
    """Answers with made-up milliseconds, one config after the other."""

    def __init__(self, times):
        self.times, self.measured = times, []

    def __call__(self, call, quantiles):
        call()
        self.measured.append(self.times[len(self.measured)])
        return self.measured[-1:] * 3


def enter_rank(rank, folder, answers):
    """Tune a product and a kernel; the made-up times of the kernel differ between ranks."""
    os.environ["TRITILE_CACHE_DIR"] = str(folder / f"host-{rank}")
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    bench, out = Bench([2.0, 1.0] if rank == 0 else [1.0, 2.0]), torch.zeros(100, device="cuda")
    configs = [triton.Config({"B": 32}), triton.Config({"B": 64})]
    kernel, grid = tritile.autotune(configs, ["n"], do_bench=bench)(fill), (4,)
    a = torch.randn(777, 512, generator=torch.Generator().manual_seed(0)).to("cuda", torch.bfloat16)
    with tritile.mode("tune", backends="triton"):
        tritile.matmul(a, a.mT)
        kernel[grid](out, 100)
        before = kernel.best_config.kwargs["B"]
        changes = [str(each) for each in tritile.sync()]
        kernel[grid](out, 100)
        found = tritile.matmul(a, a.mT)
        tritile.sync(check=True)
    everywhere = [torch.empty_like(found) for _ in range(RANKS)]
    distributed.all_gather(everywhere, found)
    # Only this thread's: NCCL has one that asks for events.
    capture = torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local")
    with pytest.raises(UnsupportedError, match="being captured"), capture:
        tritile.sync()
    same = all(torch.equal(found, each) for each in everywhere)
    answers.put((rank, (before, kernel.best_config.kwargs["B"], len(bench.measured), len(changes) > 0, same)))
    distributed.destroy_process_group()


def test_two_gpus_choose_alike(server, tmp_path):
    answers = server.SimpleQueue()
    ranks = [server.Process(target=enter_rank, args=(rank, tmp_path, answers)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0] * RANKS
    found = dict(answers.get() for _ in ranks)
    assert found[0][:3] == (64, 64, 2)
    assert found[1] == (32, 64, 2, True, True)
    assert found[0][4]
