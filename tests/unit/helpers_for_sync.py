"""What each rank of test_sync does, in a process of its own; what it saw is in `seen-RANK`."""

import json
import os
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import distributed

import tritile
from tritile.core.config import Config
from tritile.core.device import INTERPRETER, target_device
from tritile.core.problem import MatmulProblem, PermuteProblem
from tritile.errors import DeviceError, TritileError
from tritile.families.registry import FAMILIES
from tritile.families.space import legal_configs
from tritile.planning import model, plans, sync
from tritile.planning.store import store_of
from tritile.planning.trial import Trial

DEVICE = target_device("nvidia-h200")
MATMUL = MatmulProblem(1, 1000, 600, 500, "float32", "float32", precision="tf32")  # no portfolio serves it
ELSEWHERE = replace(MATMUL, batch=7)
SLOW = replace(MATMUL, batch=49)
PERMUTE = PermuteProblem.turned(1, 3000, 500, 2)
PROBLEMS = {
    "on all": MATMUL, "like it": replace(MATMUL, m=1200), "on 1": ELSEWHERE,
    "unseen": replace(MATMUL, precision="tf32x3"),
    "permute": PERMUTE, "like permute": PermuteProblem.turned(1, 4000, 500, 2), "slow": SLOW,
}  # fmt: skip


@triton.jit
def double(x_ptr, N, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < N) * 2, mask=at < N)


class Bench:
    """Stands for a benchmark: counts how often it is asked."""

    def __init__(self):
        self.asked = 0

    def __call__(self, call, quantiles):
        self.asked += 1
        return [1.0, 1.0, 1.0]


def measured(problem, config, us=1.0, **facts):
    """Remember a trial in this rank's store."""
    kernel = FAMILIES[problem.op][config.family]
    store_of(DEVICE).add(kernel.digest, Trial(problem, config, us, error=1e-3, **facts))


def planned(mode="cached"):
    """What each problem is planned with."""
    found = {name: plans.plan_for(problem, DEVICE, mode) for name, problem in PROBLEMS.items()}
    return {name: plan and [plan.source, plan.config.key, plan.us] for name, plan in found.items()}


class Kernel:
    """A decorated kernel, its remembered trials, and what it chooses."""

    def __init__(self):
        self.bench = Bench()
        configs = [triton.Config({"BLOCK": 32 << i}) for i in range(6)]
        self.tuner = tritile.autotune(configs, ["N"], do_bench=self.bench)(double)

    def args(self, n):
        return (torch.zeros(2048), n)

    def measured(self, n, block):
        problem = self.tuner.problem(self.args(n), {})
        config = replace(Config.from_triton(self.tuner.configs[block]))
        store_of(INTERPRETER).add(self.tuner.digest, Trial(problem, config, 1.0))

    def chosen(self, n, mode="cached"):
        """The BLOCK that a call runs with."""
        with tritile.mode(mode):
            self.tuner.run(*self.args(n), grid=(1,))
        return self.tuner.best_config.kwargs["BLOCK"]


def fill(rank):
    """Every rank remembers something else."""
    fast = {name: model.ranked(PROBLEMS[name], DEVICE) for name in ("on all", "permute", "slow", "on 1")}
    measured(MATMUL, fast["on all"][rank])
    measured(MATMUL, fast["on all"][20 + rank], us=2.0)
    measured(PERMUTE, fast["permute"][rank])
    measured(SLOW, fast["slow"][-1 - rank])
    if rank == 1:
        measured(ELSEWHERE, fast["on 1"][0])


def equal_plans(rank):
    kernel = Kernel()
    fill(rank)
    for n in (10, 20):
        kernel.measured(n, rank + n // 10)
    seen = {"before": planned(), "kernel before": [kernel.chosen(n) for n in (10, 20, 15)]}
    sync.share(lambda: DEVICE)
    tritile.sync()
    seen |= {"after": planned(), "tune": planned("tune"), "off": planned("off")}
    seen["kernel"] = [kernel.chosen(n) for n in (10, 20, 15)]
    seen["kernel tune"] = [kernel.chosen(n, "tune") for n in (10, 20, 15, 1000)]
    seen["asked"] = kernel.bench.asked
    measured(MATMUL, legal_configs(MATMUL, DEVICE)[0], us=0.5)
    plans.forget()  # as the tuner does
    seen["later"] = planned()
    sync.share(lambda: DEVICE)
    seen["again"] = planned()
    tritile.forget()
    seen["forgotten"], seen["kernel forgotten"] = planned(), [kernel.chosen(n) for n in (10, 20, 15)]
    return seen


def told(work):
    """What a call raises."""
    try:
        return work()
    except TritileError as error:
        return f"{type(error).__name__}: {error}"


def differences(rank):
    seen = {}
    other = target_device("sm_90") if rank == 1 else DEVICE
    seen["device"] = told(lambda: sync.share(lambda: other))
    with tritile.mode("strict" if rank == 2 else "cached"):
        seen["mode"] = told(lambda: sync.share(lambda: DEVICE))

    def failing():
        raise DeviceError("out of GPUs")

    seen["failure"] = told(lambda: sync.share(failing if rank == 2 else lambda: DEVICE))
    text_of = sync.text_of
    sync.text_of = lambda store: [][0] if rank == 0 else text_of(store)
    seen["rank 0"] = told(lambda: sync.share(lambda: DEVICE))
    sync.text_of = lambda store: "[]"
    seen["text"] = told(lambda: sync.share(lambda: DEVICE))
    sync.text_of = text_of
    fill(rank)
    seen["plans"] = planned()
    return seen


def subgroup(rank):
    group = distributed.new_group([1, 2])
    fill(rank)
    seen = {"before": planned()}
    seen["told"] = told(lambda: sync.share(lambda: DEVICE, group))
    seen["after"] = planned()
    return seen


def enter_rank(work, rank, size, folder):
    os.environ["TRITILE_CACHE_DIR"] = str(folder / f"cache-{rank}")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    seen = globals()[work](rank)
    (folder / f"seen-{rank}").write_text(json.dumps(seen))
    distributed.barrier()
    distributed.destroy_process_group()
