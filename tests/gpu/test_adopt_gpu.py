"""Adopted kernels on a GPU: measured elsewhere and remembered, in graphs, in torch.compile."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import tritile
from tritile.errors import UntunedWarning
from tritile.tuner import adopted as adopted_module
from tritile.tuner.measure import workers

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("forgotten")]
ROOT = Path(tritile.__file__).parents[1]
LIBRARY = """
import sys, torch, triton, triton.language as tl

def configs():
    return [triton.Config({"BLOCK": b}, num_warps=w) for b in (1024, 256, 4096) for w in (4, 8)]

@triton.autotune(configs(), key=["n"], restore_value=["out"])
@triton.jit
def add_to(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + tl.load(out + at, mask=at < n), mask=at < n)

def call(n, kernel=add_to):
    x, out = torch.ones(n, device="cuda"), torch.full((n + 64,), 2.0, device="cuda")
    kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, out, n)
    assert bool((out[:n] == 3).all()) and bool((out[n:] == 2).all())
    return out

if __name__ == "__main__":
    call(int(sys.argv[1]))
    tuned = sys.modules.get("tritile.tuner.adoption")
    (row,) = [] if tuned is None else tuned._adoptions[0].report
    print(row.measured, row.remembered, row.guessed, len(add_to.configs_timings))
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A module of kernels that knows nothing of tritile."""
    (tmp_path / "library_of_kernels.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    import library_of_kernels

    yield library_of_kernels
    del sys.modules["library_of_kernels"]


def test_a_second_process_measures_nothing(library, tmp_path):
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    printed = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "tritile", "run", sys.executable, "library_of_kernels.py", "100001"],
            cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.split())
    assert printed == [["1", "0", "0", "6"], ["0", "1", "0", "6"]]


def test_it_is_right_and_measured_elsewhere(library, monkeypatch):
    monkeypatch.setattr(library.add_to, "_bench", lambda *args, **rest: pytest.fail("measured here"))
    with tritile.adopt() as adopted:
        for n in (1, 1000, 4097, 1000):
            library.call(n)
    (row,) = adopted.report
    assert (row.measured, row.remembered, row.guessed, row.why) == (3, 0, 0, "")
    assert len(library.add_to.cache) == 3


def test_capture_measures_nothing(library):
    with tritile.adopt() as adopted:
        library.call(8192)
        x, out = torch.ones(9000, device="cuda"), torch.zeros(9000, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            library.add_to[lambda meta: (triton.cdiv(9000, meta["BLOCK"]),)](x, out, 9000)
        for _ in range(3):
            graph.replay()
        assert bool((out == 3).all())
        (row,) = adopted.report
        assert (row.measured, row.guessed) == (1, 1)
        library.call(9000)  # outside of it, it is measured
        assert row.measured == 2


def test_torch_compile_takes_what_is_remembered(library):
    with tritile.adopt():
        library.call(5000)
        best = library.add_to.best_config.kwargs["BLOCK"], library.add_to.best_config.num_warps

        @torch.compile(fullgraph=True)
        def step(x, out):
            library.add_to[lambda meta: (triton.cdiv(5000, meta["BLOCK"]),)](x, out, 5000)
            return out

        x, out = torch.ones(5000, device="cuda"), torch.full((5000,), 2.0, device="cuda")
        assert bool((step(x, out) == 3).all())
        assert best == (library.add_to.best_config.kwargs["BLOCK"], library.add_to.best_config.num_warps)


@triton.jit
def noted(out, n, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK < 1000)
    tl.store(out + tl.arange(0, BLOCK), BLOCK, mask=tl.arange(0, BLOCK) < n)


def test_programs_benchmark_and_bad_config(library):
    def bench(call, quantiles=None):
        call()
        return [1.0] * 3

    configs = [triton.Config({"BLOCK": 1024}), triton.Config({"BLOCK": 16})]  # the first does not compile
    kernel = triton.autotune(configs, key=["n"], do_bench=bench)(noted)
    out = torch.zeros(16, dtype=torch.int32, device="cuda")
    with tritile.adopt() as adopted:
        kernel[(1,)](out, 16)
    assert bool((out == 16).all())
    assert kernel.best_config is configs[1]
    assert adopted.report[0].why == ""


@pytest.mark.serial  # no other process gets memory meanwhile
def test_full_gpu_measures_nothing(library, monkeypatch):
    monkeypatch.setattr(adopted_module, "_taken", set())
    library.call(100)  # by Triton, which loads what it needs
    for shared in workers._runners.values():  # of earlier tests, whose processes have memory
        if shared.runner is not None:
            shared.runner.close()
    workers._runners.clear()
    torch.cuda.empty_cache()
    filler = torch.empty(torch.cuda.mem_get_info()[0] - (64 << 20), dtype=torch.uint8, device="cuda")
    try:
        with tritile.adopt() as adopted:
            with pytest.warns(UntunedWarning, match="no room for it"):
                library.call(200)
            library.call(300)
    finally:
        del filler
        torch.cuda.empty_cache()  # else the processes of later tests have no room
    (row,) = adopted.report
    assert (row.measured, row.remembered, row.guessed, row.why) == (0, 0, 2, "")
