"""`tritile.warm`: which kernels are compiled ahead of calls, by the keys that Triton makes of them."""

import contextlib
import functools
import random
import subprocess
import threading
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs

import tritile
from tests.unit.helpers_for_fork_servers import QuickWorkers
from tests.unit.test_plan import BLOCKS, _double, meta
from tritile.choose import gpu_tables, pick
from tritile.core.device import target_device
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import MatmulProblem
from tritile.errors import (
    InvalidValueError,
    IsolationWarning,
    NotCompiledError,
    NotTunedError,
    TuningError,
    UnsupportedError,
)
from tritile.families.launching import compiles_for
from tritile.lab import check as checking
from tritile.lab import warm as asked
from tritile.runtime.ahead import compiling_for
from tritile.tuner.measure.shipping import stood_in

H200 = target_device("nvidia-h200")


@pytest.fixture
def compiled(monkeypatch):
    """Take the place of compiling: the calls of each request, and what is said of them."""
    requests, reasons = [], []

    def compile_calls(calls, device):
        asked.check_nvidia(device)
        requests.append(calls)
        return {"A", "B"}, reasons

    monkeypatch.setattr(asked, "compile_calls", compile_calls)
    return requests, reasons


def product(m, n, k, layout="NT"):
    sides = (n, k) if layout == "NT" else (k, n)
    b = torch.empty(*sides, dtype=torch.bfloat16, device="meta")
    return torch.empty(m, k, dtype=torch.bfloat16, device="meta"), b.mT if layout == "NT" else b


def problem_of(*sizes):
    return tritile.plan(tritile.matmul, *product(*sizes), device=H200).problem


@contextlib.contextmanager
def not_compiling(heard):
    """Note, for a `with`, Triton's keys of kernels, which are not compiled."""

    def hook(key, fn, **rest):
        heard.add((fn.name, key))
        return True

    with knobs.runtime.scope(), compiling_for(H200):
        knobs.runtime.jit_cache_hook = hook
        yield


def keys(calls):
    """Triton's keys of all kernels that problems launch with configs."""
    heard = set()
    with not_compiling(heard):
        for config, problems in calls.items():
            for problem in problems:
                for compiles in compiles_for(problem, config, H200):
                    compiles()
    return heard


def planned(problems):
    found = {}
    for each in problems:
        found.setdefault(pick.plan_for(each, H200, "cached").config, []).append(each)
    return found


@pytest.mark.parametrize("sizes", [(8200, 8200, "NN"), (6144, 3072, "NN"), (331, 1031, "NT")])
def test_any_rows_find_compiled(sizes):
    """Include sizes whose operands are copied first, few rows, and rows off 16 bytes."""
    drawn = random.Random(str(sizes))
    rows = [1, 2, 3, 8, 17, 63, *(drawn.randint(1, 2 ** drawn.randint(1, 14)) for _ in range(12))]
    ahead = keys(asked.calls_of(problem_of(300, *sizes), H200, any_rows=True))
    assert len(ahead) < 250  # calls of every number of rows share them
    for m in dict.fromkeys(rows):
        assert keys(planned([problem_of(m, *sizes)])) <= ahead, m


def test_tabled_rows_are_compiled():
    known = [
        entry for entry in gpu_tables.shipped(H200)[0].entries
        if isinstance(entry.problem, MatmulProblem) and entry.problem.batch == 1 and entry.problem.m > 1
        and entry.problem.dtype == "bfloat16" and entry.problem.out_layout == "row"
    ]  # fmt: skip
    for entry in known[::40]:
        first = asked._at_rows(entry.problem, 77)
        plan = pick.plan_for(entry.problem, H200, "cached")
        assert entry.problem in asked.calls_of(first, H200, any_rows=True)[plan.config]


DOUBLES = MatmulProblem(1, 384, 512, 256, "float64", "float64")


@pytest.mark.parametrize(
    ("call", "mode", "any_rows"),
    [
        ((tritile.matmul, *product(300, 4096, 1024)), "cached", False),
        ((tritile.matmul, *product(300, 4096, 1024)), "off", True),
        ((DOUBLES,), "cached", False),  # of a class without a predictor
        ((DOUBLES,), "cached", True),
    ],
)
def test_a_call_compiles_its_plan(compiled, call, mode, any_rows):
    with tritile.mode(mode):
        assert tritile.warm(*call, device="nvidia-h200", any_rows=any_rows) == 2
        plan = tritile.plan(*call, device=H200)
    assert compiled[0] == [{plan.config: [plan.problem]}]


@pytest.mark.parametrize(("m", "count"), [(1, 2), (300, 1)])
def test_strict_finds_other_compiles(m, count):
    """A single row runs otherwise in it: as predicted, without families of margins."""
    problem = problem_of(m, 4096, 1024)
    calls = asked.calls_of(problem, H200)
    assert set(calls) == {pick.plan_for(problem, H200, mode).config for mode in ("cached", "strict")}
    assert len(calls) == count


@pytest.mark.parametrize(("n", "k"), [(131, 133), (131, 136), (128, 256)])
@pytest.mark.parametrize("first", [1, 40])
def test_problem_of_rows_is_calls(n, k, first):
    problem = tritile.plan(tritile.matmul, *product(first, n, k), device=H200).problem
    for m in (1, 2, 40):
        wanted = tritile.plan(tritile.matmul, *product(m, n, k), device=H200).problem
        assert asked._at_rows(problem, m) == wanted


def test_residual_layer_warms_one_row():
    def of(m):
        (x, weight), bias = product(m, 4096, 4096), torch.empty(4096, dtype=torch.bfloat16, device="meta")
        residual = torch.empty(m, 4096, dtype=torch.bfloat16, device="meta")
        return tritile.plan(tritile.linear, x, weight.mT, bias, residual=residual, device=H200).problem

    ahead = keys(asked.calls_of(of(300), H200, any_rows=True))
    for m in (1, 8, 300):
        assert keys(planned([of(m)])) <= ahead
    with pytest.raises(InvalidValueError, match="two rows or more"):
        asked.calls_of(of(1), H200, any_rows=True)
    assert asked.calls_of(of(1), H200)


def test_columns_begin_by_rows():
    a, b = torch.empty(64, 40, dtype=torch.bfloat16, device="meta").mT, product(1, 64, 64)[1]
    problem = tritile.plan(tritile.matmul, a, b, device=H200).problem
    assert (problem.a_layout, problem.a_align) == ("column", 16)
    odd = torch.empty(64, 41, dtype=torch.bfloat16, device="meta").mT
    assert asked._at_rows(problem, 41) == tritile.plan(tritile.matmul, odd, b, device=H200).problem


def test_invariant_calls_planned_so():
    with tritile.batch_invariant():
        calls = asked.calls_of(problem_of(300, 4096, 1024), H200, any_rows=True)
        assert {problem.invariant for problems in calls.values() for problem in problems} == {True}
        ahead = keys(calls)
        for m in (1, 64, 9999):
            assert keys(planned([problem_of(m, 4096, 1024)])) <= ahead


X, TURN = torch.empty(8, 8), PermuteProblem.transposed(1, 64, 64, 2)


@pytest.mark.parametrize(
    ("arguments", "words", "error", "wanted"),
    [
        ((tritile.matmul, X, X), {}, InvalidValueError, "tensors are in host memory"),
        ((torch.addmm, X), {"device": H200}, InvalidValueError, "expected one of tritile.matmul"),
        ((tritile.addmm, X), {"device": H200}, InvalidValueError, "missing a required argument: 'mat1'"),
        ((TURN,), {"device": "gpu"}, InvalidValueError, "device is 'gpu'"),
        ((tritile.transpose, X), {"out": X, "device": H200}, InvalidValueError, "leave out= away"),
        ((TURN,), {"device": "gfx942"}, UnsupportedError, "NVIDIA GPUs only"),
    ],
)
def test_what_cannot_be_warmed_is_refused(compiled, arguments, words, error, wanted):
    with pytest.raises(error, match=wanted):
        tritile.warm(*arguments, **words)
    assert compiled[0] == []
    with tritile.mode("strict"), pytest.raises(NotTunedError):
        tritile.warm(DOUBLES, device=H200)


def test_what_is_not_there_is_told(compiled):
    compiled[1].append("4x4 with a config: too large")
    for mode, error in (("cached", TuningError), ("strict", NotCompiledError)):
        with tritile.mode(mode), pytest.raises(error, match="2 kernels are there, others are not: 4x4"):
            tritile.warm(tritile.matmul, *product(4, 64, 64), device=H200)


def test_decorated_compiled_as_planned(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    zeroed = []
    configs = [triton.Config(BLOCKS[1].kwargs, pre_hook=lambda named: zeroed.append(named["out"].dtype))]
    kernel = tritile.autotune(configs, ["n"])(_double)
    assert tritile.warm(kernel, meta(40), meta(40), n=40, device=H200) == 1
    (compiled,) = Path(tmp_path / "cache").rglob("_double.ttir")
    assert "tensor<32x" in compiled.read_text()
    assert zeroed == [meta(40).dtype]
    refused = tritile.autotune([triton.Config({"BLOCK": 33})], ["n"])(_double)
    with pytest.raises(TuningError, match=r"warm: _double n=40, BLOCK: 33.*power of 2"):
        tritile.warm(refused, meta(40), meta(40), 40, device=H200)
    with pytest.raises(UnsupportedError, match="NVIDIA GPUs only"):
        tritile.warm(kernel, meta(40), meta(40), 40, device="gfx942")
    for words, wanted in (
        ({"any_rows": True, "device": H200}, "any_rows is for operations"),
        ({}, "host memory"),
    ):
        with pytest.raises(InvalidValueError, match=wanted):
            tritile.warm(kernel, torch.zeros(40), torch.zeros(40), 40, **words)


# --- tritile.check with device=: all configs of a decorated kernel compiled ahead ---


@triton.jit
def _multiply(
    a, b, c, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        at = start + k
        total = tl.dot(
            tl.load(a + m[:, None] * K + at[None, :]),
            tl.load(b + at[:, None] * BLOCK_N + n[None, :]),
            total,
        )
    tl.store(c + m[:, None] * BLOCK_N + n[None, :], total.to(c.dtype.element_ty))


def block(m, n, k, **options):
    return triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}, **options)


FITS = block(64, 64, 32)
SPILLS = block(128, 256, 32, num_stages=2)
TOO_LARGE = block(128, 256, 64, num_warps=8, num_stages=6)
REFUSED = block(48, 64, 32)
FEW_REGISTERS = block(128, 256, 32, num_stages=2, maxnreg=64)
FACTORS = meta(128, 256), meta(256, 256), meta(128, 256)


@pytest.fixture
def quick(server, monkeypatch, tmp_path):
    """Compile in processes that start at once, into a cache of the test's own."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(checking, "WorkerPool", functools.partial(QuickWorkers, 2, server=server))


def test_all_configs_for_absent_gpu(quick, tmp_path):
    """What is reported is what Triton's own kernels, compiled here, and the assembler say."""
    configs = [FITS, SPILLS, TOO_LARGE, REFUSED, FEW_REGISTERS]
    kernel = tritile.autotune(configs, ["K"])(_multiply)
    found = tritile.check(kernel, *FACTORS, 256, device="h200")
    assert not found
    assert (found.on, found.calls, found.right, found.wrong) == (H200, ("_multiply K=256",), (), ())
    assert [each.config for each in found.compiled] == [FITS, SPILLS]
    assert [each.config for each in found.failed] == [TOO_LARGE, REFUSED, FEW_REGISTERS]
    assert [each.config for each in found.spilling] == [SPILLS]

    by_config = {str(each.config): each for each in found.configs}
    call = kernel.call((*FACTORS, 256), {}, H200)
    call = call.having(stood_in(call.tensors))
    for config in (FITS, SPILLS, TOO_LARGE):
        own, compiled = by_config[str(config)], call.compiled(config)
        (tmp_path / "kernel.cubin").write_bytes(compiled.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(tmp_path / "kernel.cubin")]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert own.shared == compiled.metadata.shared
        assert f"REG:{own.registers} " in usage
        assert (own.spills > 0) == ("STACK:0 " not in usage)
    too_large, refused, few = found.failed
    assert too_large.shared > H200.shared_memory
    assert too_large.reason.endswith(
        f"compiled to {too_large.shared} bytes of shared memory, of {H200.shared_memory}"
    )
    assert "power of 2" in refused.reason
    assert "ptxas" in few.reason.lower()
    assert "egister" in few.reason
    assert refused[-3:] == few[-3:] == (None, None, None)

    text = repr(found)
    assert "2 compiled, 3 failed, 1 spill; compiled for _multiply K=256, answers were not checked" in text
    assert f"{by_config[str(SPILLS)].spills} bytes spilled" in text
    # Calls find there what was compiled.
    with tritile.mode("strict"):
        assert tritile.warm(tritile.autotune([FITS], ["K"])(_multiply), *FACTORS, 256, device=H200) == 1
        with pytest.raises(NotCompiledError):
            tritile.warm(tritile.autotune([FITS], ["K"])(_multiply), *FACTORS, 250, device=H200)


def test_every_call_of_make_compiled(quick):
    """K - 1 is not divisible by 16, and takes another kernel; what is listed is the most that any takes."""

    def make(k):
        return {"a": meta(64, k), "b": meta(k, 64), "c": meta(64, 64), "K": k}

    kernel = tritile.autotune([FITS], ["K"])(_multiply)
    both = tritile.check(kernel, 256, make=make, device=H200)
    assert both
    assert both.calls == ("_multiply K=256 of make(256)", "_multiply K=255 of make(255)")
    each = [tritile.check(kernel, **make(k), device=H200).configs[0] for k in (256, 255)]
    assert each[0][-3:] != each[1][-3:]
    assert both.configs[0][-3:] == tuple(map(max, *(one[-3:] for one in each)))


def test_whole_space_and_unsendable_here(monkeypatch, tmp_path):
    """A call that cannot be sent is compiled in this process."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    lock = threading.Lock()
    space = tritile.Space({"BLOCK": (16, 24, 32)})

    def holding(names):
        with lock:
            return {"BLOCK": names["n"]}

    listed = [triton.Config({"BLOCK": b}, pre_hook=lambda named: holding(named)) for b in (16, 24)]
    monkeypatch.setattr(checking, "WorkerPool", lambda: pytest.fail("a lock was sent"))
    with pytest.warns(IsolationWarning, match="is compiled in this process"):
        found = tritile.check(tritile.autotune(listed, ["n"])(_double), meta(40), meta(40), 40, device=H200)
    assert [each.outcome for each in found.configs] == ["compiled", "failed"]
    monkeypatch.setattr(checking, "described", lambda call: (_ for _ in ()).throw(UnsupportedError("no")))
    with pytest.warns(IsolationWarning):
        found = tritile.check(
            tritile.autotune(space, ["n"])(_double), meta(40), meta(40), 40, device="gfx942"
        )
    assert [(each.config.kwargs["BLOCK"], each.outcome) for each in found.configs] == [
        (16, "compiled"), (24, "failed"), (32, "compiled"),
    ]  # fmt: skip
    assert found.compiled[0].registers > 0
