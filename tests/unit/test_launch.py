"""How a call becomes launches; no kernel runs."""

import os
import subprocess
from dataclasses import replace
from math import prod
from types import SimpleNamespace

import pytest
import torch
import triton

from tritile import launch, loading, offline
from tritile.ahead import compiled_for
from tritile.config import Config
from tritile.deploy.folder import writing
from tritile.device import compiler_version, target_device
from tritile.ops.described import described
from tritile.problem import MatmulProblem
from tritile.work import tile, work_of

TINY = Config.of(family="tile", BLOCK_M=16, BLOCK_N=16, BLOCK_K=32, GROUP_M=1)


def _product(*batch: int, m: int = 1, n: int = 1) -> object:
    a = torch.empty(*batch, m, 1, dtype=torch.int8, device="meta")
    b = torch.empty(*batch, 1, n, dtype=torch.int8, device="meta")
    return described(a, b, torch.empty(*batch, m, n, dtype=torch.int32, device="meta"), "ieee")


@pytest.mark.parametrize("batch", [(2**31 + 5,), (2**31 - 1,), (2**33,)])
def test_a_batch_of_more_programs_than_a_launch_counts_is_split(batch):
    """Triton's launcher multiplies the grid in 32 bits, and runs nothing where the product turns negative."""
    pieces = launch._pieces(_product(*batch), TINY)
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
    assert launch._pieces(call, TINY) == [call]


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
