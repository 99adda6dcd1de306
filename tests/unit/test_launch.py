"""How a call becomes launches; no kernel runs."""

import os
import subprocess
from dataclasses import replace
from math import prod
from types import SimpleNamespace

import pytest
import torch
import triton

from tritile.core.config import Config
from tritile.core.device import compiler_version, target_device
from tritile.core.problem import MatmulProblem
from tritile.errors import UntunedWarning
from tritile.families.matmul_tile import family as tile
from tritile.families.pieces import pieces_of, workspace_bytes
from tritile.families.work import work_of
from tritile.ops.described import described
from tritile.planning import model, plans
from tritile.runtime import launch, loading, offline
from tritile.runtime.ahead import compiled_for
from tritile.tune.deploy.folder import writing

HOPPER = target_device("nvidia-h200")
TINY = Config.of(family="tile", BLOCK_M=16, BLOCK_N=16, BLOCK_K=32, GROUP_M=1)


def _product(*batch: int, m: int = 1, n: int = 1) -> object:
    a = torch.empty(*batch, m, 1, dtype=torch.int8, device="meta")
    b = torch.empty(*batch, 1, n, dtype=torch.int8, device="meta")
    return described(a, b, torch.empty(*batch, m, n, dtype=torch.int32, device="meta"), "ieee")


@pytest.mark.parametrize("batch", [(2**31 + 5,), (2**31 - 1,), (2**33,)])
def test_a_batch_of_more_programs_than_a_launch_counts_is_split(batch):
    """Triton's launcher multiplies the grid in 32 bits, and runs nothing where the product turns negative."""
    pieces = pieces_of(_product(*batch), TINY)
    for piece in pieces:
        (step,) = work_of(piece, TINY, 132, True).steps
        assert step.grid == tile.work(piece, TINY).steps[0].grid
        assert 0 < prod(step.grid) < 2**31
    assert sum(prod(piece.batch_shape) for piece in pieces) == prod(batch)
    start = 0
    for piece in pieces:
        assert piece.a.tensor.storage_offset() == piece.out.tensor.storage_offset() == start
        start += prod(piece.batch_shape)


def test_a_batch_that_fits_is_one_launch():
    call = _product(2**31 - 2**16)
    assert pieces_of(call, TINY) == [call]


class _Unloaded:
    """A compiled kernel of which Triton's launcher would be made when its handles are asked for."""

    name, kernel, function, n_regs, n_spills = "it", b"", 1, 2, 3

    def __init__(self) -> None:
        target = SimpleNamespace(backend="cuda", warp_size=32)
        self.metadata, self.launchers = SimpleNamespace(target=target, shared=0, num_warps=4), 0

    def _init_handles(self) -> None:
        self.launchers += 1


def test_a_kernel_is_loaded_without_tritons_launcher_unless_a_hook_listens(monkeypatch):
    """The hooks are chains that are there, and empty, where nobody listens."""
    utils = SimpleNamespace(load_binary=lambda *_: (0, 7, 8, 9, 1024))
    active = SimpleNamespace(utils=utils, get_current_device=lambda: 0)
    monkeypatch.setattr(loading, "driver", SimpleNamespace(active=active))
    quiet, heard = _Unloaded(), _Unloaded()
    assert loading.loaded(quiet, 1024) == (7, 8, 9)
    assert quiet.launchers == 0
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.kernel_load_start_hook.add(print)
        try:
            assert loading.loaded(heard, 1024) == (1, 2, 3)
        finally:
            triton.knobs.runtime.kernel_load_start_hook.remove(print)
    assert heard.launchers == 1


SMALL = MatmulProblem(1, 64, 64, 64, "float16", "float16")
compiles = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"), reason="triton.jit interprets in this process"
)


@compiles
def test_multiplications_are_fused_whatever_tritons_default():
    with triton.knobs.language.scope():
        triton.knobs.language.default_fp_fusion = False
        kernel = compiled_for(replace(SMALL, dtype="bfloat16"), TINY, target_device("sm_80"))
    assert kernel.metadata.enable_fp_fusion


@compiles
@pytest.mark.parametrize("name", ["sm_80", "sm_90", "sm_100"])
def test_the_assembler_asked_is_the_one_that_compiles(name, monkeypatch, tmp_path):
    called, run = [], subprocess.run

    def recorded(command, **how):
        called.append(command)
        return run(command, **how)

    device = target_device(name)
    monkeypatch.setattr(subprocess, "run", recorded)
    with writing(tmp_path):
        kernel = compiled_for(SMALL, TINY, device)
    offline._assembled(kernel)
    compiler_version.__wrapped__("cuda", device.arch)
    compiling, asked = (tool for tool, *rest in called if any("--gpu-name" in word for word in rest))
    assert compiling == asked == called[-1][0]


OZAKI = described(*(torch.empty(64, 64, dtype=torch.float64) for _ in range(3)), "ozaki")


class _NoMemory:
    """Stands for `torch.empty` of a GPU that is full."""

    def __init__(self, monkeypatch) -> None:
        self.asked: list[int] = []
        monkeypatch.setattr(torch, "empty", self)
        monkeypatch.setattr(launch, "current_gpu", lambda: 0)
        monkeypatch.setattr(launch, "current_raw_stream", lambda device: 0)

    def __call__(self, size, **rest):
        self.asked.append(size)
        raise torch.OutOfMemoryError("CUDA out of memory")


def _launch(spare):
    """A launch with a workspace; what it launches is never reached."""
    made = object.__new__(launch.Launch)
    made.device, made._offsets, made._bytes, made._counted, made._spare = 0, [0], 4096, 0, spare
    return made


def test_where_there_is_no_memory_for_a_workspace_a_call_goes_on_without(monkeypatch):
    ran, tensors = [], (torch.zeros(1), torch.zeros(2))
    made = _launch(lambda: prepared.append(1) or (lambda *given: ran.append(given)))
    prepared: list[int] = []
    full = _NoMemory(monkeypatch)
    with pytest.warns(UntunedWarning, match="no memory for a workspace of 4096 bytes"):
        made(*tensors)
    made(*tensors)
    assert ran == [tensors, tensors]
    assert (prepared, full.asked) == ([1], [4096, 4096])  # memory may come back: it is asked for every time


@pytest.mark.parametrize("spare", [None, lambda: launch._spared(OZAKI, 0)], ids=["none", "all take one"])
def test_where_every_config_takes_a_workspace_torchs_error_comes_through(monkeypatch, spare):
    monkeypatch.setattr(launch.devices, "gpu", lambda index: HOPPER)
    made = _launch(spare)
    _NoMemory(monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        made(torch.zeros(1))


def test_the_spare_config_is_the_likeliest_that_takes_no_workspace(monkeypatch):
    a, b = (torch.empty(256, 256 + pad, dtype=torch.bfloat16)[:, :256] for pad in (1, 0))
    call = launch._standing(described(a, b, torch.empty(256, 256, dtype=torch.bfloat16), "ieee"))
    assert not [view for view in (call.a, call.b, call.out) if isinstance(view.tensor, torch.Tensor)]
    monkeypatch.setattr(launch.devices, "gpu", lambda index: HOPPER)
    monkeypatch.setattr(launch, "_prepared", lambda call, config, index: config)
    config = launch._spared(call, 0)
    assert workspace_bytes(call, config, HOPPER) == 0
    first = model.ranked(call.problem, HOPPER)
    assert workspace_bytes(call, first[0], HOPPER) > 0  # a's rows are copied, so that TMA reads them
    assert all(workspace_bytes(call, c, HOPPER) for c in first[: first.index(config)])


def test_a_plan_tells_the_bytes_of_workspace():
    ragged = MatmulProblem(1, 1001, 1024, 1003, "bfloat16", "bfloat16", a_align=2)
    blocks = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP_M": 8}
    config = Config.of(4, 4, "descriptor", **blocks, PERSISTENT=False, SPLIT_K=1, SUBTILES=1)
    plan = plans.Plan(ragged, config, "model", HOPPER)
    assert plan.workspace == 1001 * 1024 * 2  # a, its rows padded to whole 128 bytes
    assert f"{plan.workspace} bytes of workspace" in repr(plan)
    assert plans.Plan(ragged, TINY, "model", HOPPER).workspace == 0
