"""What threads share: work that is done once, the interpreter, and nothing else that one waits for."""

import contextlib
import multiprocessing
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs

import tritile
from tests.mock_gpu import recording
from tritile.core import threads
from tritile.core.config import Config
from tritile.core.device import TARGETS
from tritile.core.problem import MatmulProblem
from tritile.core.threads import import_late, interpreter_lock, once
from tritile.errors import TuningError
from tritile.families.matmul_tile import family as tile
from tritile.families.registry import FAMILIES
from tritile.ops import request as ops_request
from tritile.runtime.compiles import compiles_refused
from tritile.runtime.launch import Pointer
from tritile.tuner.measure import workers
from tritile.tuner.store.trial import Trial
from tritile.tuner.store.trials import store_of

DEVICE = replace(TARGETS["nvidia-h200"], name="a GPU without a table")
PROBLEM = MatmulProblem(1, 257, 129, 65, "bfloat16", "bfloat16")
THREADS = 8
PATIENCE_S = 30.0


@triton.jit
def first_kernel(out_ptr, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, BLOCK), 1)


@triton.jit
def second_kernel(out_ptr, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, BLOCK), 2)


@pytest.fixture
def wait_for_all(monkeypatch):
    """Wait until all other threads wait for the work of the one that calls this."""
    semaphore = threading.Semaphore(0)

    class Counted(Future):
        def result(self, timeout=None):
            if not self.done():
                semaphore.release()
            return super().result(timeout)

    monkeypatch.setattr(threads, "Future", Counted)
    return lambda: [semaphore.acquire() for _ in range(THREADS - 1)]


def together(call):
    """What `call` gives in each of some threads, or the error that it raises."""
    with ThreadPoolExecutor(THREADS) as pool:
        futures = [pool.submit(call) for _ in range(THREADS)]
        return [future.exception() or future.result() for future in futures]


@contextlib.contextmanager
def another_thread(call):
    """Within, another thread is amid `call(wait)`, whose `wait` returns when the event is set."""
    begun, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=call, args=(lambda: begun.set() or go_on.wait(),))
    thread.start()
    begun.wait()
    try:
        yield go_on
    finally:
        go_on.set()
        thread.join()


def interpret_for_long(wait):
    with interpreter_lock:
        wait()


def ends(call):
    """True if a new thread gets through a call, however another one is held up."""
    done = []
    thread = threading.Thread(target=lambda: done.append(call()), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return bool(done)


def exit_code(child):
    process = multiprocessing.get_context("fork").Process(target=child, daemon=True)
    process.start()
    process.join()
    return process.exitcode


def test_one_does_all_get(wait_for_all):
    done = []

    def work():
        wait_for_all()
        done.append(1)
        return object()

    assert len(set(together(lambda: once("key", work)))) == len(done) == 1
    assert once("key", lambda: once("another", lambda: 7)) == 7  # anew, once it is done

    def fail():
        wait_for_all()
        raise TuningError("no config works")

    results = together(lambda: once("key", fail))
    assert [str(result) for result in results] == ["no config works"] * THREADS


def test_interrupted_another_begins(wait_for_all):
    begun = []

    def work():
        begun.append(1)
        if len(begun) == 1:
            wait_for_all()
            raise KeyboardInterrupt
        return 7

    results = together(lambda: once("key", work))
    assert [type(result) for result in results if result != 7] == [KeyboardInterrupt]
    assert results.count(7) == THREADS - 1


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_child_does_not_wait():
    with another_thread(lambda wait: once("key", wait)):
        assert exit_code(lambda: None if once("key", lambda: 7) == 7 else exit(1)) == 0


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_child_of_interpreting_has_lock(monkeypatch):
    monkeypatch.setattr(threads, "WAIT_S", 0.01)
    with another_thread(interpret_for_long):
        assert not interpreter_lock.acquire(timeout=0)
        assert exit_code(lambda: None if interpreter_lock.acquire(timeout=0) else exit(1)) == 0
    assert interpreter_lock.acquire(timeout=0)
    interpreter_lock.release()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_fork_waits_for_brief_work(monkeypatch):
    monkeypatch.setattr(threads, "WAIT_S", 60.0)
    with another_thread(interpret_for_long) as go_on:
        threading.Timer(0.1, go_on.set).start()
        assert exit_code(lambda: None if go_on.is_set() else exit(1)) == 0


def test_language_import_waits():
    """The interpreter patches triton.language in place, and Gluon keeps what it finds there."""
    found = []
    thread = threading.Thread(target=lambda: found.append(import_late("tests.launched")))
    with another_thread(interpret_for_long):
        thread.start()
        thread.join(0.1)
        assert found == []
    thread.join()
    assert found == [sys.modules["tests.launched"]]


def test_one_thread_searches(monkeypatch):
    config = Config.of(family=tile.NAME, BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, GROUP_M=8)
    searches, met, barrier = [], threading.local(), threading.Barrier(THREADS)
    plan_for = ops_request.pick.plan_for

    def all_find_nothing(*given):
        found = plan_for(*given)
        if not hasattr(met, "once"):
            met.once = barrier.wait()
            assert found is None
        return found

    def search(problem, device, index):
        searches.append(1)
        trial = Trial(problem, config, 10.0, error=1e-3)
        store_of(device).add(FAMILIES["matmul"][tile.NAME].digest, trial)
        return config

    monkeypatch.setattr(ops_request.pick, "plan_for", all_find_nothing)
    monkeypatch.setattr("tritile.tune.now.tuned_now", search)
    monkeypatch.setattr(ops_request, "capturing", lambda: False)
    monkeypatch.setattr(ops_request.devices, "gpu", lambda index: DEVICE)

    def plan():
        with tritile.mode("tune"):
            return ops_request.planned(PROBLEM, 0)

    plans = together(plan)
    assert len(searches) == 1
    assert {(found.config, found.source) for found in plans} == {(config, "exact")}


def test_mutual_waits_both_work():
    barrier = threading.Barrier(3)

    def call(own, other):
        return once(own, lambda: (barrier.wait() and None) or once(other, lambda: f"{own}, {other}"))

    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(call, own, other) for own, other in ("ab", "bc", "ca")]
        assert {future.result(PATIENCE_S).partition(", ")[2] for future in futures} <= {"a", "b", "c"}
    assert not threads._waiting
    assert not threads._under_way


def test_warm_launch_never_waits(monkeypatch, tmp_path):
    """One thread is held up inside a compile; another launches a warm kernel, and compiles a third."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    out = Pointer(1 << 20, torch.int32)

    def decorated(kernel, *blocks):
        return tritile.autotune([triton.Config({"BLOCK": block}) for block in blocks], [], mode="off")(kernel)

    warm, cold = decorated(first_kernel, 64), decorated(second_kernel, 64, 128)
    with recording(TARGETS["nvidia-h200"], records=False), knobs.compilation.scope():
        warm[(1,)](out)

        def compile_for_long(wait):
            knobs.compilation.listener = lambda **compiled: wait()
            cold[(1,)](out)

        with another_thread(compile_for_long):
            knobs.compilation.listener = None
            assert ends(lambda: warm[(1,)](out) or True)
            assert ends(lambda: decorated(first_kernel, 256)[(1,)](out) or True)
        knobs.compilation.listener = None


def test_threads_refuse_compiles_apart():
    def refuses(wait=lambda: None):
        with compiles_refused("a kernel", "warm it"):
            wait()
            return knobs.cache.manager_class is not None

    with another_thread(refuses):
        assert ends(refuses)
        assert knobs.cache.manager_class is not None
    assert "manager_class" not in vars(knobs.cache)


def test_gpus_tune_side_by_side(monkeypatch):
    class Shop:
        def __init__(self, gpu):
            self.gpu = gpu

    monkeypatch.setattr(workers, "PoolRunner", Shop)
    monkeypatch.setattr(workers, "_runners", {}, raising=False)
    monkeypatch.setattr(workers, "_IDLE_S", 1e6)

    def borrow(gpu, wait=lambda: None):
        with workers.shared_runner(gpu) as shop:
            wait()
            return shop.gpu == gpu

    with another_thread(lambda wait: borrow(0, wait)):
        assert ends(lambda: borrow(1))
        assert not workers._runners[0].lock.acquire(timeout=0)
    assert ends(lambda: borrow(0))
    for lending in workers._runners.values():
        lending.idle.cancel()
