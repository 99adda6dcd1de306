"""Mode "spread" on a GPU: calls that are right throughout, a choice, and nothing that a graph would keep."""

import time

import pytest
import torch
import triton
import triton.language as tl

import tritile
from tests.reference import assert_product
from tritile.ops import memo
from tritile.ops import spread as own
from tritile.runtime.compiles import compiles_refused
from tritile.tuner import spread as turns
from tritile.tuner.spread import Spread, Turns

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


# --- tritile's own operations ---


def halves(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


OPERATIONS = {
    "matmul": lambda: (tritile.matmul, halves(3000, 2056), halves(2056, 4104)),
    "linear": lambda: (
        tritile.linear,
        halves(3001, 2048),
        halves(4096, 2048),
        torch.zeros_like(halves(4096)),
    ),
    "transpose": lambda: (tritile.transpose, torch.randn(6001, 5000, device="cuda")),
}


def assert_right(call, *tensors, result):
    if call is tritile.transpose:
        assert torch.equal(result, tensors[0].mT)
        return
    a, b, *_ = tensors
    assert_product(result, a, b.mT if call is tritile.linear else b)


def under_way():
    return [search for search in own._searches.values() if search is not None]


def searched(call, *tensors):
    """Call until turns begin; return the search."""
    until = time.monotonic() + 100
    with tritile.mode("spread", backends="triton,aten"):
        call(*tensors)
        (search,) = under_way()
        while search.phase == "search" and time.monotonic() < until:
            call(*tensors)
            torch.cuda.synchronize()
    return search


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_takes_turns_until_a_config_is_chosen(name, monkeypatch):
    """All calls are right, wait for no compiler, and are cached in the end."""
    call, *tensors = OPERATIONS[name]()
    decided, decide = [], Turns._decide
    monkeypatch.setattr(Turns, "_decide", lambda self, times: decided.append(times) or decide(self, times))
    monkeypatch.setattr(turns, "_CLOSE", 100.0)  # however fast this machine's configs are
    search = searched(call, *tensors)
    assert search.phase == "turns", "nothing came close to the guess, or nothing could be measured"
    ran, until = {*search.configs}, time.monotonic() + 100
    with tritile.mode("spread", backends="triton,aten"):
        with compiles_refused("a turn", ""):
            while search.phase == "turns" and time.monotonic() < until:
                for _ in range(20):
                    result = call(*tensors)
                assert_right(call, *tensors, result=result)
        assert len(decided) == 1
        assert_right(call, *tensors, result=call(*tensors))
        (launches,) = memo.CALLS.values()
        (prepared,) = launches
        call(*tensors)
        assert next(iter(launches)) is prepared
        plan = tritile.plan(call, *tensors)
    assert plan.source == "exact"
    assert plan.config in ran
    assert under_way() == []


def test_a_graph_has_the_guess_of_an_operation():
    """Captured while its problem is measured, and while there are turns; other calls go on."""
    a, b = halves(3000, 2056), halves(2056, 4104)
    with tritile.mode("spread", backends="triton"):
        guess = tritile.plan(tritile.matmul, a, b).config
        tritile.matmul(a, b)
        (search,) = under_way()
        phases, until = set(), time.monotonic() + 100
        while phases != {"search", "turns"} and time.monotonic() < until:
            phases.add(search.phase)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = tritile.matmul(a, b)
                time.sleep(0.01)
            graph.replay()
        torch.cuda.synchronize()
    assert_product(result, a, b)
    assert search.guess == guess
    assert not any(candidate.turns for candidate in search._candidates)
    assert phases == {"search", "turns"}
