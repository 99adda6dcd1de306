"""Mode "spread" on a GPU: calls that are right throughout, a choice, and nothing that a graph would keep."""

import time

import pytest
import torch
import triton
import triton.language as tl

import tritile
from tritile.tuner.spread import Spread

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("forgotten")]
SIZE = 1 << 26  # some 150 us on an H200


@triton.jit
def add_to(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + tl.load(out + at, mask=at < n), mask=at < n)


def kernel():
    sizes = [(block, warps) for block in (64, 1024, 4096) for warps in (4, 8)]
    configs = [triton.Config({"BLOCK": block}, num_warps=warps) for block, warps in sizes]
    return tritile.autotune(configs, ["n"], restore_value=["out"], mode="spread")(add_to)


def test_every_call_adds_once_until_a_config_is_chosen():
    tuner = kernel()
    x, out = torch.ones(SIZE, device="cuda"), torch.zeros(SIZE, device="cuda")
    grid, calls, until = (lambda meta: (triton.cdiv(SIZE, meta["BLOCK"]),)), 0, time.monotonic() + 100
    while (calls == 0 or any(tuner._spreads.values())) and time.monotonic() < until:
        for _ in range(50):
            tuner[grid](x, out, SIZE)
            calls += 1
        torch.cuda.synchronize()
    assert not any(tuner._spreads.values()), "no config is chosen yet"
    tuner[grid](x, out, SIZE)
    assert bool((out == calls + 1).all())
    assert tuner.best_config.kwargs["BLOCK"] > 64
    assert tuner.choose((x, out, SIZE), {"grid": grid}, "strict").config is tuner.best_config


def test_a_capture_has_the_guess(monkeypatch):
    tuner, launched = kernel(), []
    monkeypatch.setattr(Spread, "_search", lambda *_: launched.append(0))
    x, out = torch.ones(SIZE, device="cuda"), torch.zeros(SIZE, device="cuda")
    grid = lambda meta: (triton.cdiv(SIZE, meta["BLOCK"]),)  # noqa: E731
    tuner[grid](x, out, SIZE)
    assert launched == [0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tuner[grid](x, out, SIZE)
    assert launched == [0]
    graph.replay()
    assert bool((out == 2).all())


def test_captures_go_on_while_a_problem_is_measured():
    """In torch's default mode, in which any thread's copies and waits would end a capture."""
    tuner = kernel()
    x, out = torch.ones(SIZE, device="cuda"), torch.zeros(SIZE, device="cuda")
    grid, until = (lambda meta: (triton.cdiv(SIZE, meta["BLOCK"]),)), time.monotonic() + 60
    tuner[grid](x, out, SIZE)
    replays = 0
    # Captures take no turns: the search is over once turns could begin.
    while not any(each._candidates for each in tuner._spreads.values() if each) and time.monotonic() < until:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tuner[grid](x, out, SIZE)
            time.sleep(0.01)
        graph.replay()
        replays += 1
    torch.cuda.synchronize()
    assert replays > 10
    assert bool((out == replays + 1).all())
