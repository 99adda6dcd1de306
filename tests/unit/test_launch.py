"""How a call becomes launches; no kernel runs."""

import itertools
import subprocess
from dataclasses import replace
from math import prod
from types import SimpleNamespace

import pytest
import torch
import triton

from tests.configs import packed_weights, tma
from tritile.choose import pick, waves
from tritile.core.call import call_for
from tritile.core.config import Config
from tritile.core.device import compiler_version, target_device
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import GroupedProblem, MatmulProblem, QuantizedProblem
from tritile.families import launching
from tritile.families.launching import compiled_for
from tritile.families.matmul_tile import family as tile
from tritile.families.space import legal_configs
from tritile.families.work import lowered, pieces_of, work_of, workspace_bytes
from tritile.ops.products import matmul_call
from tritile.runtime import ahead, launch, native
from tritile.runtime.counters import Allocation
from tritile.runtime.work import COUNTERS, Buffer, Descriptor, Workspace, laid_out

HOPPER = target_device("nvidia-h200")
TINY = Config.of(family="tile", BLOCK_M=16, BLOCK_N=16, BLOCK_K=32, GROUP_M=1)


def by_descriptor(split=1, group=1):
    return tma(64, 64, 64, 4, 4, split=split, group=group)


def _product(*batch, m=1, n=1):
    a = torch.empty(*batch, m, 1, dtype=torch.int8, device="meta")
    b = torch.empty(*batch, 1, n, dtype=torch.int8, device="meta")
    return matmul_call(a, b, torch.empty(*batch, m, n, dtype=torch.int32, device="meta"), "ieee")


@pytest.mark.parametrize("batch", [(2**31 + 5,), (2**31 - 1,), (2**33,)])
def test_large_batch_is_split(batch):
    """Triton's launcher multiplies the grid in 32 bits, and runs nothing where the product turns negative."""
    found = pieces_of(_product(*batch), TINY, HOPPER)
    pieces = [piece for piece, _ in found]
    for piece, work in found:
        (step,) = work.steps
        assert step.grid == tile.work(piece, TINY).steps[0].grid
        assert 0 < prod(step.grid) < 2**31
    assert sum(prod(piece.batch_shape) for piece in pieces) == prod(batch)
    start = 0
    for piece in pieces:
        assert piece.a.address == start  # an element is a byte
        assert piece.out.address == 4 * start
        start += prod(piece.batch_shape)


class _Unloaded:
    """A compiled kernel of which Triton's launcher would be made when its handles are asked for."""

    name, kernel, function, n_regs, n_spills = "it", b"", 1, 2, 3

    def __init__(self):
        target = SimpleNamespace(backend="cuda", warp_size=32)
        self.metadata, self.launchers = SimpleNamespace(target=target, shared=0, num_warps=4), 0

    def _init_handles(self):
        self.launchers += 1


def test_loaded_without_triton_launcher(monkeypatch):
    """The hooks are chains that are there, and empty, where nobody listens."""
    utils = SimpleNamespace(load_binary=lambda *_: (0, 7, 8, 9, 1024))
    active = SimpleNamespace(utils=utils, get_current_device=lambda: 0)
    monkeypatch.setattr(native, "driver", SimpleNamespace(active=active))
    quiet, heard = _Unloaded(), _Unloaded()
    assert native.loaded(quiet, 1024) == (7, 8, 9)
    assert quiet.launchers == 0
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.kernel_load_start_hook.add(print)
        try:
            assert native.loaded(heard, 1024) == (1, 2, 3)
        finally:
            triton.knobs.runtime.kernel_load_start_hook.remove(print)
    assert heard.launchers == 1


SMALL = MatmulProblem(1, 64, 64, 64, "float16", "float16")


def test_multiplications_are_fused_whatever_tritons_default():
    with triton.knobs.language.scope():
        triton.knobs.language.default_fp_fusion = False
        kernel = compiled_for(replace(SMALL, dtype="bfloat16"), TINY, target_device("sm_80"))
    assert kernel.metadata.enable_fp_fusion


@pytest.mark.parametrize("name", ["sm_80", "sm_90", "sm_100"])
def test_assembler_that_compiles(name, monkeypatch, tmp_path):
    called, run = [], subprocess.run

    def recorded(command, **how):
        called.append(command)
        return run(command, **how)

    device = target_device(name)
    monkeypatch.setattr(subprocess, "run", recorded)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = compiled_for(SMALL, TINY, device)
    ahead._assembled(kernel)
    compiler_version.__wrapped__("cuda", device.arch)
    compiling, asked = (tool for tool, *rest in called if any("--gpu-name" in word for word in rest))
    assert compiling == asked == called[-1][0]


class _Noting:
    """A compiled kernel that Triton's launcher runs: notes its arguments."""

    metadata = SimpleNamespace(tensordesc_meta=None)

    def __getitem__(self, grid):
        def run(*args, stream):
            self.given, self.stream = args, stream

        return run


def test_buffers_reach_named_arguments(monkeypatch):
    """Of a product whose a is copied, and whose K programs share."""
    a, b, out = (torch.empty(256, 256 + pad, dtype=torch.bfloat16)[:, :256] for pad in (1, 0, 0))
    call, counters = matmul_call(a, b, out, "ieee"), torch.zeros(64, dtype=torch.int64)
    work = work_of(call, by_descriptor(split=2), 132, False)
    kernels, memory, asked = [_Noting() for _ in work.steps], torch.empty(1 << 20, dtype=torch.uint8), []
    allocation = Allocation(counters.data_ptr(), None)
    take = SimpleNamespace(take=lambda count, stream: asked.append(count) or allocation)
    monkeypatch.setattr(launch, "counters_of", lambda device: take)
    monkeypatch.setattr(launch, "current_gpu", lambda: 0)
    monkeypatch.setattr(launch, "current_raw_stream", lambda device: 7)
    made = launch.Launch(work, kernels, launch.pointers_to(call.buffers), 0)
    monkeypatch.setattr(torch, "empty", lambda size, **rest: memory[:size])
    made(*call.tensors)
    lies = {name: memory.address for name, memory in call.buffers.items()}
    offsets, end = laid_out(work.scratch.values())
    lies |= {name: memory.data_ptr() + by for name, by in zip(work.scratch, offsets, strict=True)}
    lies[COUNTERS] = counters.data_ptr()
    for step, kernel in zip(work.steps, kernels, strict=True):
        assert kernel.stream == 7
        for value, given in zip(step.values, kernel.given, strict=True):
            if isinstance(value, Buffer):
                assert given == lies[value.buffer]
            elif isinstance(value, Descriptor):
                assert given.base.address == lies[value.buffer]
    assert set(work.scratch) == {"copy_a", "parts"}
    assert laid_out([Workspace("int8", 3), Workspace("float32", 65), Workspace("float64", 1)])[0] == [
        0,
        256,
        768,
    ]
    assert (asked, work.counters) == ([16], 16)  # one for each tile
    parts = 2 * 16 * 64 * 64 * 4
    assert end == made._bytes == 256 * 256 * 2 + parts


def test_batch_pieces_own_operands(monkeypatch):
    """Also of what is added, and of a second matrix: what is stretched over the batch stays where it is."""
    a, b, up, residual = (torch.empty(4, *sizes) for sizes in ((3, 5), (5, 7), (5, 7), (3, 7)))
    extras = {"bias": torch.empty(7), "residual": residual}
    gated = {"bias": torch.empty(4, 3, 7), "activation": "silu", "up": up}
    posed_of, given = [], []

    def noted(work, tensors, index, fault):
        posed_of.append([at.address for at in tensors.values()])
        return SimpleNamespace(at=given.append)

    monkeypatch.setattr("tritile.families.work._MAX_PROGRAMS", 1)
    monkeypatch.setattr(launch.devices, "gpu", lambda index: HOPPER)
    monkeypatch.setattr(launch, "bound", noted)
    for more in (extras, gated):
        call = matmul_call(a, b, torch.empty(4, 3, 7), "ieee", **more)
        launching.prepare(call, TINY)(*call.tensors)
        starts = given[-4:]
        assert starts == posed_of[-4:]
        for name, *found in zip(call.buffers, *starts, strict=True):
            tensor = call.buffers[name].tensor
            step = 0 if tensor.ndim == 1 else tensor.stride(0) * tensor.element_size()
            assert found == [tensor.data_ptr() + step * i for i in range(4)], name


def test_batch_pieces_share_workspace(monkeypatch):
    a, b = (torch.empty(4, 256, 256 + pad, dtype=torch.bfloat16)[..., :256] for pad in (1, 0))
    call = matmul_call(a, b, torch.empty(4, 256, 256, dtype=torch.bfloat16), "ieee")
    copied = 256 * 256 * 2  # a
    one = pick.Plan(replace(SMALL, m=256, n=256, k=256, a_align=2), by_descriptor(), "model", HOPPER)
    assert f"{one.workspace} bytes of workspace" in repr(one)
    assert one.workspace == copied
    assert replace(one, config=TINY).workspace == 0
    assert workspace_bytes(call, by_descriptor(), HOPPER) == 4 * copied
    monkeypatch.setattr("tritile.families.work._MAX_PROGRAMS", 32)
    assert workspace_bytes(call, by_descriptor(), HOPPER) == copied


@pytest.mark.parametrize(
    ("problem", "config", "least"),
    [
        (replace(SMALL, m=256, n=256, k=256), tma(64, 64, 64, 4, 4, split=2), 16),
        (
            QuantizedProblem(256, 256, 256, "float16", 8, 128),
            packed_weights(64, 64, 64, 4, 4, split=2),
            32,
        ),
    ],
    ids=["matmul", "linear_quantized"],
)
def test_programs_wait_only_if_all_run(problem, config, least):
    """16 tiles of 2 parts each: one that waits for another, which has no processor yet, waits in vain.

    An SM holds two programs of products: 65 KiB of shared memory, and half of all registers each.
    """
    call = call_for(problem)
    polls = [work_of(call, config, count, True).steps[-1].args["POLLS"] for count in (least - 1, least)]
    assert (polls[0], polls[1] > 0) == (0, True)


def test_unstepped_strides_keep_alignment():
    """A row, and a column, of matrices whose rows start anywhere."""
    wide, square = torch.empty(64, 77).half(), torch.empty(64, 64).half()
    row, rows, column = wide[:1, :64], wide[:2, :64], wide.mT[:64, :1]
    assert matmul_call(row, square, torch.empty(1, 64).half(), "ieee").a.align == 16
    assert matmul_call(rows, square, torch.empty(2, 64).half(), "ieee").a.align == 2
    assert matmul_call(square, column, torch.empty(64, 1).half(), "ieee").b.align == 16


OPERATIONS = [
    MatmulProblem(1, 256, 256, 256, "float16", "float16", a_align=2),
    MatmulProblem(1, 256, 256, 256, "float16", "float16", epilogue="gated silu"),
    MatmulProblem(1, 256, 256, 256, "int8", "bfloat16", epilogue="scale_a=column scale_b=row"),
    MatmulProblem(1, 256, 256, 256, "float32", "float32", b_layout="column"),
    MatmulProblem(1, 256, 256, 256, "float32", "float32", precision="fp16x3"),
    GroupedProblem(4, 256, 256, 256, "float16", "float16"),
    PermuteProblem.transposed(1, 256, 256, 2),
    QuantizedProblem(256, 256, 256, "bfloat16", 4, 128),
]


@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize("problem", OPERATIONS, ids=lambda problem: problem.label)
def test_early_starters_wait(problem, starts):
    call = call_for(problem)
    early = 0
    for family in waves.families(problem, HOPPER):
        config = legal_configs(problem, HOPPER, family)[0]
        for step in work_of(call, config, 132, starts).steps:
            waits = step.args.get("WAIT", False)
            assert step.options.get("launch_pdl", False) == waits, step.kernel
            early += waits
    assert bool(early) == starts


def test_one_kernel_makes_fp16x3():
    """A second one would add to what the first has stored, where a residual is overwritten in place."""
    call = call_for(OPERATIONS[4])
    parts = lowered(call, False)
    ranges = [parts.core.fallback[1:], *(step.args["FLAGS"] for step in parts.after)]
    assert ranges[0][0] == 0
    assert all(one[1] == following[0] for one, following in itertools.pairwise(ranges))
    assert all(least < end for least, end in ranges)


def test_grid_axes_within_limits():
    """Whole columns of tiles as bands, of a batch too long for the third axis."""
    for batch in (65535, 65536):
        a = torch.empty(batch, 64, 64, dtype=torch.bfloat16, device="meta")
        call = matmul_call(a, a, torch.empty_like(a), "ieee")
        *_, step = work_of(call, by_descriptor(group=8), 132, True).steps
        assert prod(step.grid) == batch
        assert max(step.grid[1:]) <= 65535
