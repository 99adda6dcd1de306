"""Kernels that are compiled without a GPU are those that calls look up; mode "strict" compiles none."""

import functools
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from triton import knobs

import tritile
from tests import commands, configs
from tests.configs import turned
from tritile.choose import pick, table
from tritile.core.device import target_device
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import MatmulProblem
from tritile.errors import NotCompiledError
from tritile.families import launching
from tritile.families import registry as families
from tritile.lab import warm
from tritile.ops import request as ops_request
from tritile.runtime import ahead
from tritile.runtime.compiles import compiles_refused

H200 = target_device("nvidia-h200")


tile = functools.partial(configs.tile, stages=2)
tma = functools.partial(configs.tma, 64, 64, 64)


# As torch's own contiguous tensors pose them: DEEP shares a kernel with SQUARE, RAGGED copies both operands
# first, SPLIT takes counters and a workspace.
SQUARE = MatmulProblem(1, 256, 256, 256, "float16", "float16")
DEEP = MatmulProblem(1, 256, 256, 512, "float16", "float16")
RAGGED = MatmulProblem(1, 129, 131, 133, "bfloat16", "bfloat16", a_align=2, b_align=2, out_align=2)
SPLIT = MatmulProblem(1, 64, 64, 1024, "float16", "float16")
TURN = PermuteProblem.transposed(1, 128, 256, 2)
ENTRIES = [
    (SQUARE, tile(32, 32, 32)), (DEEP, tile(32, 32, 32)), (RAGGED, tma()), (SPLIT, tma(split=2)),
    (TURN, turned(32, 32)),
]  # fmt: skip
KERNELS = 5  # distinct: DEEP's is SQUARE's, and RAGGED takes two

SCRIPT = """
import json, sys
from pathlib import Path
import torch, triton, tritile
from tritile.families import launching; from tritile.runtime import ahead
from tritile.choose import pick, table
from tritile.ops import permute; from tritile.ops.products import matmul_call

heard = []
triton.knobs.compilation.listener = lambda **told: heard.append(told["cache_hit"])
entries, device = table.read(Path(sys.argv[1])).entries, tritile.target_device("nvidia-h200")
with ahead.compiling_for(device):
    for entry in entries:
        problem = entry.problem
        if problem.op == "matmul":
            kind = getattr(torch, problem.dtype)
            a = torch.empty(problem.m, problem.k, dtype=kind)
            b = torch.empty(problem.k, problem.n, dtype=kind)
            call = matmul_call(a, b, a.new_empty(problem.m, problem.n), "ieee")
        else:
            columns, rows = problem.shape
            x = torch.empty(rows, columns, dtype=torch.bfloat16)
            call = permute.permute_call(x, x.new_empty(columns, rows), [1, 0])
        assert call.problem == problem, (call.problem, problem)
        for compiled in launching.compiles_of(call, entry.config, device):
            assert compiled().asm["ptx"]
print(json.dumps([tritile.__file__, heard.count(True), heard.count(False)]))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A cache that the command filled by a pinned table, and the table."""
    base = tmp_path_factory.mktemp("warm")
    entries = tuple(table.Entry(problem, config, 1.0) for problem, config in ENTRIES)
    table.write(table.Table(H200.to_dict(), families.digests(), entries), base / "table.json")
    done = run(base)
    assert done.exit_code == 0, done.output
    assert f"{KERNELS} kernels of {len(ENTRIES)} problems on NVIDIA H200" in done.output
    return base


def run(base, *options, mode="cached"):
    """Run `tritile compile` with the table and the cache of a folder."""
    tritile.forget()
    environment = {
        "TRITILE_TABLE": str(base / "table.json"), "TRITON_CACHE_DIR": str(base / "triton"),
        "TRITILE_CACHE_DIR": str(base), "TRITILE_MODE": mode,
    }  # fmt: skip
    command = ["compile", "--target", "nvidia-h200", *options]
    found = commands.run(*command, env=environment)
    tritile.forget()
    return found


def test_other_process_finds_every_kernel(made, tmp_path):
    """Calls as the operations describe them, on torch's own tensors, in a folder that can only be read."""
    used, elsewhere = made / "triton", tmp_path / "installed"
    shutil.copytree(Path(tritile.__file__).parent, elsewhere / "tritile")
    before = contents(used)
    env = {key: value for key, value in os.environ.items() if not key.startswith(("TRITON_", "TRITILE_"))}
    env |= {"HOME": str(tmp_path), "TRITON_CACHE_DIR": str(used), "PYTHONPATH": str(elsewhere)}
    if found := os.environ.get("PYTHONPATH"):
        env["PYTHONPATH"] += os.pathsep + found  # Triton may be found by it
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(made / "table.json")],
        capture_output=True, text=True, env=env, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    where, hits, misses = json.loads(done.stdout)
    assert Path(where).is_relative_to(elsewhere)
    assert (hits, misses) == (KERNELS, 0)
    assert contents(used) == before


def contents(place):
    return {str(path): path.stat().st_mtime_ns for path in place.rglob("*") if path.is_file()}


def test_strict_proves_cache_complete(made, tmp_path):
    done = run(made, mode="strict")
    assert done.exit_code == 0, done.output
    assert f"{KERNELS} kernels of" in done.output
    shutil.copytree(made, tmp_path / "copy")
    lost = tmp_path / "copy" / "triton"
    for group in lost.glob("*/__grp__permute_tile.json"):
        group.unlink()
    before = contents(lost)
    done = run(tmp_path / "copy", mode="strict")
    assert done.exit_code == 1
    assert f"{TURN.label} with {turned(32, 32)}: is not compiled" in done.output
    assert done.output.count("is not compiled") == 1
    assert contents(lost) == before


def in_a_new_process(problem, config):
    """Forget what this process compiled of a config's kernel."""
    families.FAMILIES[problem.op][config.family].kernel.jitted.device_caches.clear()


def test_what_the_compiler_refuses_is_told(tmp_path):
    fp8 = MatmulProblem(1, 64, 64, 64, "float8_e4m3fn", "bfloat16")
    asked = ([fp8], tile(32, 32, 32), target_device("sm_80"), str(tmp_path), False)
    kernels, reason = warm._compiled(*asked)
    assert kernels == set()
    assert "fp8e4nv" in reason


@pytest.fixture
def first_call(monkeypatch, tmp_path):
    """A first call as `prepared` makes it, but for the GPU: it compiles, or finds in memory, one kernel."""
    call, config = SimpleNamespace(problem=TURN, tensors=(torch.empty(0),)), turned(32, 32)

    def compiled(call, config):
        with ahead.compiling_for(H200):
            return [compile_one() for compile_one in launching.compiles_for(TURN, config, H200)]

    def first(mode):
        with tritile.mode(mode):
            return ops_request.prepared(call)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(ops_request.devices, "gpu", lambda index: H200)
    monkeypatch.setattr(ops_request, "_candidates", lambda *given: [config])
    monkeypatch.setattr(ops_request, "fixed", lambda call: None)
    monkeypatch.setattr(launching, "prepare", compiled)
    in_a_new_process(TURN, config)
    return first


def test_strict_call_raises_uncompiled(first_call, tmp_path):
    for _ in range(2):
        with pytest.raises(NotCompiledError) as caught:
            first_call("strict")
    for told in (TURN.label, "NVIDIA H200", str(turned(32, 32)), "`tritile compile`", "`tritile.warm`"):
        assert told in str(caught.value)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
    assert knobs.cache.manager_class is None


def test_strict_call_from_memory_or_disk(first_call):
    assert all(first_call(mode) for mode in ("cached", "off", "tune"))
    assert len(first_call("strict")) == 1
    in_a_new_process(TURN, turned(32, 32))  # as in a new process: found on disk
    assert len(first_call("strict")) == 1
    in_a_new_process(TURN, turned(32, 32))
    with knobs.compilation.scope():
        knobs.compilation.always_compile = True
        with pytest.raises(NotCompiledError):
            first_call("strict")


def test_strict_where_triton_cannot_write(first_call, tmp_path):
    (tmp_path / "triton").write_text("no folder")
    with pytest.raises(NotCompiledError, match="is not compiled") as caught:
        first_call("strict")
    assert isinstance(caught.value.__cause__, OSError)


def test_no_advice_to_compile_uncompilable(first_call, monkeypatch):
    monkeypatch.setattr(ops_request, "fixed", lambda call: turned(32, 32))
    with pytest.raises(NotCompiledError, match=r"compiled: call it once in another mode$"):
        first_call("strict")


def test_split_call_compiles_each_part():
    """A batch of more programs than one launch counts is launched in parts, whose sizes are their own."""
    problem = PermuteProblem.transposed(2**23, 256, 256, 1)
    with ahead.compiling_for(H200):
        parts = list(launching.compiles_for(problem, turned(16, 16), H200))
    assert len(parts) > 1
    assert torch.iinfo(torch.int32).max < 2**23 * 16 * 16 <= len(parts) * torch.iinfo(torch.int32).max


def test_other_threads_may_compile(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = []

    def look():
        found.append(knobs.cache.manager_class("KEY").get_group("kernel.json"))

    with compiles_refused("a kernel", "warm it"):
        other = threading.Thread(target=look)
        other.start()
        other.join()
        with pytest.raises(NotCompiledError):
            look()
    assert found == [None]


@pytest.fixture
def asked(monkeypatch):
    """Give the calls that the command would compile, for a GPU that is not here."""
    found = {}

    def compile_calls(calls, device, done):
        found.update(calls)
        return set(), []

    monkeypatch.setattr("tritile.lab.warm.compile_calls", compile_calls)

    def ask(*options):
        found.clear()
        done = commands.run("compile", "--target", "nvidia-h200", *options)
        assert done.exit_code == 0, done.output
        return dict(found)

    return ask


def test_compile_command_any_rows_invariant_packed(asked):
    problem = MatmulProblem(1, 512, 320, 192, "float16", "float16", b_layout="column")
    shape = ("512x320x192", "--dtype", "float16", "--layout", "NT")
    plan = pick.plan_for(problem, H200, "cached")
    assert asked(*shape) == {plan.config: [problem]}
    assert asked(*shape, "--any-rows") == warm.calls_of(problem, H200, any_rows=True)
    with tritile.batch_invariant():
        calls = asked("64x48x32")
    assert [problem.invariant for (problem,) in calls.values()] == [True]
    calls = asked("5x320x192", "--op", "linear_quantized", "--layout", "int4/64", "--bias")
    found = {(p.op, p.group_size, p.bias) for problems in calls.values() for p in problems}
    assert found == {("linear_quantized", 64, True)}


@pytest.mark.parametrize(("biased", "activation"), [(False, "gelu"), (True, None)])
def test_the_command_takes_linear_layers(asked, biased, activation):
    options = ["--bias"] * biased + ["--activation", activation] * bool(activation)
    bias = torch.empty(320, dtype=torch.bfloat16, device="meta") if biased else None
    x, weight = (torch.empty(rows, 192, dtype=torch.bfloat16, device="meta") for rows in (50, 320))
    plan = tritile.plan(tritile.linear, x, weight, bias, activation=activation, device=H200)
    assert asked("50x320x192", "--layout", "NT", *options) == {plan.config: [plan.problem]}


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ((), "name shapes, a --suite, or in TRITILE_TABLE a table of NVIDIA H200"),
        (("--suite", "llm", "--bias"), "--bias does not go with --suite: each case of a suite has its own"),
        (("8x320x192", "--activation", "sine"), "expected one of relu"),
        (("8x1x192", "--any-rows"), "one column is made as one row"),
        (("8x320x192", "--dtype", "int8", "--bias"), "--bias does not go with --dtype int8"),
        (
            ("8x320x192", "--op", "linear_quantized", "--activation", "gelu"),
            "--activation is for --op matmul:",
        ),
        (("8x8", "--op", "transpose", "--bias"), "--bias is for --op matmul or linear_quantized:"),
    ],
)
def test_what_there_is_not_is_refused(options, wanted):
    assert wanted in commands.refused("compile", "--target", "nvidia-h200", *options)


def test_other_gpus_are_refused():
    assert "NVIDIA GPUs only" in commands.refused("compile", "--target", "gfx942", "8x8x8", status=1)
