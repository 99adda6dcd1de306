"""Tutorial kernels compiled ahead of time: they fit, and are what they are said to be."""

import pytest
import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import ladder_transpose as transpose
from ladder import described
from ladder_rungs import LADDERS
from tests.ahead import later
from tritile.core.device import target_device
from tritile.runtime.ahead import compiling_for
from tritile.runtime.launch import Pointer

pytestmark = pytest.mark.slow  # each compiles
H200 = target_device("nvidia-h200")
RUNGS = [rung for ladder in LADDERS.values() for rung in ladder if not rung.is_baseline]
KERNELS = [rung for rung in RUNGS if rung.kernel is not None]
named = pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: f"{rung.op}-{rung.name}".replace(" ", "_"))


def compiled(rung, n=1024, device=H200):
    pointers = [Pointer(0, getattr(torch, rung.dtype))] * (3 if rung.op == "matmul" else 2)
    config = rung.configs[0]
    with compiling_for(device):
        given = rung.arguments(pointers, n, config)
        return rung.kernel.warmup(*given, grid=(1,), **config.to_triton().all_kwargs())


def of(op, name):
    return next(rung for rung in LADDERS[op] if rung.name == name)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
@named
def test_rungs_compile_or_say_why(rung, target):
    device = target_device(target)
    reading = described(rung, 1024, rung.config(1024, device), device)
    assert (reading.note, reading.failed) == (rung.unfit(device, 1024), False)
    if reading.note is None:
        assert 0 < reading.registers <= 512
        assert reading.spills == 0
        assert reading.shared <= device.shared_memory


def test_what_runs_where():
    unfit = {
        target: [rung.name for rung in KERNELS if rung.unfit(target_device(target), 1024)]
        for target in ("sm_80", "sm_90", "sm_100", "gfx942")
    }
    gluon_rungs, tma = ["shared tiles", "no bank conflicts"], "persistent, TMA"
    assert unfit == {"sm_80": [tma], "sm_90": [], "sm_100": [], "gfx942": ["shared tiles", tma, *gluon_rungs]}
    assert [n for n in (8, 12, 31, 64) if of("matmul", tma).unfit(H200, n) is None] == [8, 64]


@pytest.mark.parametrize("n", [1, later(1000), 1001])
@named
def test_rungs_compile_at_any_size(rung, n):
    reading = described(rung, n, rung.config(n, H200), H200)
    assert reading.note == rung.unfit(H200, n)
    assert (reading.registers is None) == (reading.note is not None)


@pytest.mark.parametrize("every", [3, later(1)])
@pytest.mark.parametrize("rung", [rung for rung in KERNELS if len(rung.configs) > 1], ids=lambda r: r.op)
def test_tuned_configs_fit_without_spills(rung, every):
    assert len(set(rung.configs)) == len(rung.configs)
    for config in rung.configs[::every]:
        found = rung.resources(1024, config, H200)
        assert (found.spills, found.excess(H200)) == (0, None), config


@pytest.mark.parametrize(
    ("name", "cores", "copies"),
    [("shared tiles", False, False), ("register blocks", False, False), ("tensor cores", True, False),
     ("persistent, TMA", True, True)],
)  # fmt: skip
def test_rungs_with_tensor_cores_and_tma(name, cores, copies):
    text = compiled(of("matmul", name)).asm["ptx"]
    assert (("wgmma" in text), ("fma.rn.f32" in text)) == (cores, not cores)
    assert ("cp.async.bulk.tensor" in text) == copies


@gluon.jit
def conflicts(layout: gl.constexpr, WRITING: gl.constexpr, READING: gl.constexpr):
    """Compiles where a warp that writes rows of a tile, and reads columns, waits so many times."""
    shared = gl.allocate_shared_memory(gl.float32, [transpose.TILE, transpose.TILE], layout)
    rows = gl.full([transpose.TILE, transpose.TILE], 0.0, gl.float32, transpose.ALONG_ROWS)
    columns = gl.full([transpose.TILE, transpose.TILE], 0.0, gl.float32, transpose.ALONG_COLUMNS)
    gl.static_assert(gl.bank_conflicts(rows.type, shared.type) == WRITING)
    gl.static_assert(gl.bank_conflicts(columns.type, shared.type) == READING)


@pytest.mark.parametrize(
    ("layout", "reading"),
    [(transpose.PLAIN.value, 31), (transpose.SWIZZLED.value, 0)],
    ids=["plain", "swizzled"],
)
def test_bank_conflicts_of_one_layout(layout, reading):
    with compiling_for(H200):
        conflicts.warmup(layout, 0, reading, grid=(1,), num_warps=4)
        with pytest.raises(triton.CompilationError):
            conflicts.warmup(layout, 0, reading + 1, grid=(1,), num_warps=4)
