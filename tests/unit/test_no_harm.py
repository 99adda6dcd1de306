"""On a GPU model that nobody measured, torch's kernel makes what it is not known to be slow at."""

import random
from dataclasses import replace

import pytest
import torch

import tritile
from tritile.choose import aten, gpu_tables, pick
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import MatmulProblem
from tritile.errors import NotTunedError
from tritile.families.registry import FAMILIES
from tritile.families.space import legal_configs
from tritile.tuner.store.trial import TORCH, Trial
from tritile.tuner.store.trials import store_of

# Name, architecture, SMs, MiB of L2 cache, bytes of shared memory, GHz, GB/s. The sm_90 has half an H100's
# bandwidth, and so is not like it.
MADE_UP = [
    Device(name, "cuda" if isinstance(arch, int) else "hip", arch, sms, l2 << 20, shared, ghz, gbps)
    for name, arch, sms, l2, shared, ghz, gbps in [
        ("Made-up 75", 75, 40, 4, 65536, 1.6, 320),
        ("Made-up 80", 80, 96, 40, 166912, 1.4, 1500),
        ("Made-up 80 large", 80, 124, 80, 166912, 1.5, 2600),
        ("Made-up 86", 86, 84, 6, 101376, 1.7, 600),
        ("Made-up 89", 89, 58, 48, 101376, 2.0, 300),
        ("Made-up GeForce 89", 89, 76, 64, 101376, 2.5, 736),
        ("Made-up 90", 90, 114, 50, 232448, 1.7, 1600),
        ("Made-up 100", 100, 132, 100, 232448, 1.9, 7000),
        ("Made-up 103", 103, 160, 126, 232448, 1.9, 8000),
        ("Made-up GeForce 120", 120, 84, 64, 101376, 2.6, 960),
        ("Made-up gfx942", "gfx942", 228, 256, 65536, 2.1, 5000),
        ("Made-up gfx1100", "gfx1100", 96, 6, 65536, 2.5, 960),
    ]
]
PLAIN = MatmulProblem(1, 1000, 4096, 4096, "bfloat16", "bfloat16")
A100 = tritile.target_device("a100")
SAYS = "torch: nothing was measured on this GPU model; tritile tune measures it"


@pytest.fixture(autouse=True)
def _with_torch(monkeypatch):
    monkeypatch.setenv("TRITILE_BACKENDS", "triton,aten")


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def drawn_plain(draw):
    """A plain product whose rows all start on 16 bytes."""
    dtype = draw.choice((torch.float16, torch.bfloat16, torch.float32, torch.float64))
    m, n, k = (8 * round(2 ** draw.uniform(1, 10)) for _ in range(3))
    batch = (draw.randint(2, 9),) if draw.random() < 0.2 else ()
    b = meta(*batch, n, k, dtype=dtype).mT if draw.random() < 0.5 else meta(*batch, k, n, dtype=dtype)
    return meta(*batch, draw.choice((1, 7, m)), k, dtype=dtype), b


@pytest.mark.parametrize("device", MADE_UP, ids=lambda device: device.name)
def test_unmeasured_plain_runs_torch(device):
    """If it is aligned."""
    draw = random.Random(device.name)
    assert not gpu_tables.like(device)
    for _ in range(40):
        a, b = drawn_plain(draw)
        plan = tritile.plan("matmul", a, b, device=device)
        assert (plan.config, plan.source) == (aten.CONFIG, "torch"), plan.problem
    assert f"  source  {SAYS}" in repr(plan).splitlines()


X, W, BIAS = meta(512, 1024), meta(768, 1024), meta(768)
OURS = {
    "ragged K": ("matmul", (meta(512, 1023), meta(1023, 768)), {}),
    "ragged N": ("matmul", (meta(512, 1024), meta(1024, 767)), {}),
    "activation": ("linear", (X, W), {"activation": "gelu"}),
    "residual": ("addmm", (meta(512, 768), X, meta(1024, 768)), {"beta": 0.5}),
    "gated": ("gated_linear", (X, W, W), {}),
    "wider result": ("matmul", (X, meta(1024, 768)), {"out_dtype": torch.float32}),
    "permutation": ("permute", (meta(64, 32, 100), (2, 0, 1)), {}),
    "grouped": ("grouped_matmul", (meta(64, 128), meta(4, 128, 256), meta(4, dtype=torch.int32)), {}),
    "by name": ("matmul", (X.float(), W.float().mT), {"precision": "ieee"}),
    "fused fp32": ("linear", (meta(4096, 4096, dtype=torch.float32),) * 2, {"activation": "gelu"}),
}


@pytest.mark.parametrize("name", OURS)
def test_ours_where_torch_slow_or_none(name):
    what, args, words = OURS[name]
    assert tritile.plan(what, *args, device=A100, **words).source == "model"


def test_torch_bias_and_bytes_run_torch():
    assert tritile.plan("linear", X, W, BIAS, device=A100).source == "torch"
    fp8, one = meta(64, 128, dtype=torch.float8_e4m3fn), meta(1, dtype=torch.float32)
    fp8_call = ("scaled_matmul", fp8, fp8.mT, one, one)
    assert tritile.plan(*fp8_call, device="4090").source == "torch"
    assert tritile.plan(*fp8_call, device="mi300x").source == "model", "torch has it for another fp8 there"
    int8 = meta(64, 128, dtype=torch.int8)
    assert tritile.plan("matmul", int8, int8.mT, device=A100).source == "torch"


def test_modes_without_torch_run_ours():
    for mode in (tritile.mode(backends="triton"), tritile.mode("off"), tritile.batch_invariant()):
        with mode:
            assert tritile.plan("matmul", X, W.mT, device=A100).config.family != aten.CONFIG.family


def test_modes_that_want_measurements_still_do():
    assert pick.plan_for(PLAIN, A100, "tune", True) is None
    with pytest.raises(NotTunedError), tritile.mode("strict"):
        tritile.plan("matmul", X, W.mT, device=A100)


def remember(config, us, problem=PLAIN, error=0.0):
    digest = TORCH if config == aten.CONFIG else FAMILIES[problem.op][config.family].digest
    store_of(A100).add(digest, Trial(problem, config, us, error=error))


def test_what_was_measured_decides_for_itself():
    ours: Config = legal_configs(PLAIN, A100)[0]
    remember(ours, 20.0)
    pick.forget()
    plan = pick.plan_for(PLAIN, A100, "cached", True)
    assert (plan.config, plan.source) == (ours, "exact")
    assert pick.plan_for(replace(PLAIN, m=8), A100, "cached", True).source == "torch"
    remember(aten.CONFIG, 10.0)
    pick.forget()
    plan = pick.plan_for(PLAIN, A100, "cached", True)
    assert (plan.config, plan.source, plan.other_us) == (aten.CONFIG, "exact", 20.0)


H200 = tritile.target_device("h200")
LIKE = [
    ("NVIDIA H20", 78, 4000), ("NVIDIA H800", 132, 3350), ("NVIDIA H200 NVL", 132, 4800),
    ("NVIDIA GH200 480GB", 132, 4000),
]  # fmt: skip


@pytest.mark.parametrize(("name", "processors", "gbps"), LIKE)
def test_similar_gpu_has_predictions(name, processors, gbps):
    device = replace(H200, name=name, processors=processors, memory_gbps=gbps)
    plan = pick.plan_for(replace(PLAIN, m=1001), device, "cached", True)
    assert plan.source == "predicted"
    assert plan.other_us is not None
