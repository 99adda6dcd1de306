"""Split two layers over two GPUs: torchrun --nproc-per-node 2 examples/two_gpus.py

Without two GPUs, or without torchrun, this says so and ends.
"""

import os
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tritile

TOKENS, WIDTH, HIDDEN = 1501, 4096, 14336


def skip() -> str | None:
    """Return why this cannot run here, or None."""
    if torch.cuda.device_count() < 2:
        return f"skipped: needs two GPUs, {torch.cuda.device_count()} here"
    if "LOCAL_RANK" not in os.environ:
        return "skipped: start it by `torchrun --nproc-per-node 2 examples/two_gpus.py`"
    return None


def run() -> None:
    """Compare a layer that two ranks share with the same layer whole."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights and data on every rank
    up, down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)
    model = nn.Sequential(OrderedDict(up=up, down=down))
    tritile.nn.convert(model.to("cuda", torch.bfloat16), always=True)
    x = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model(x)
        mesh = init_device_mesh("cuda", (ranks,))
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        y = model(x)
    error = ((y - expected).norm() / expected.norm()).item()
    print(f"rank {rank} of {ranks}: {HIDDEN // ranks} of {HIDDEN} columns, relative error {error:.1e}")
    assert error < 0.02


def main() -> None:
    reason = skip()
    if reason:
        print(reason)
        return
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    try:
        run()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
