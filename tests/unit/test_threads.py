"""What several threads want at the same time is done once: by any of them, and a search in mode "tune"."""

import contextlib
import multiprocessing
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest

import tritile
from tritile.core import settings, threads
from tritile.core.config import Config
from tritile.core.device import TARGETS
from tritile.core.problem import MatmulProblem
from tritile.core.threads import import_late, library_lock, once
from tritile.errors import TuningError
from tritile.families.matmul_tile import family as tile
from tritile.families.registry import FAMILIES
from tritile.ops import request as ops_request
from tritile.planning.store import store_of
from tritile.planning.trial import Trial

DEVICE = replace(TARGETS["nvidia-h200"], name="a GPU without a table")
PROBLEM = MatmulProblem(1, 257, 129, 65, "bfloat16", "bfloat16")
THREADS = 8


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


def compile_for_long(wait):
    with library_lock:
        wait()


def exit_code(child):
    process = multiprocessing.get_context("fork").Process(target=child, daemon=True)
    process.start()
    process.join()
    return process.exitcode


def test_one_does_it_and_all_get_what_it_gives(wait_for_all):
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


def test_where_one_is_interrupted_another_begins_anew(wait_for_all):
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


def test_what_another_thread_chose_counts_inside_a_with_and_ends_with_it():
    before, other = settings.rules(), settings.Rules("off", True, True)
    with settings.under(other):
        assert settings.rules() == other
    assert settings.rules() == before


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_does_not_wait_for_a_thread_of_its_parent():
    with another_thread(lambda wait: once("key", wait)):
        assert exit_code(lambda: None if once("key", lambda: 7) == 7 else exit(1)) == 0


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_forked_while_another_thread_compiles_has_a_free_lock(monkeypatch):
    monkeypatch.setattr(threads, "WAIT_S", 0.01)
    with another_thread(compile_for_long):
        assert not library_lock.acquire(timeout=0)
        assert exit_code(lambda: None if library_lock.acquire(timeout=0) else exit(1)) == 0
    assert library_lock.acquire(timeout=0)
    library_lock.release()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_waits_for_what_ends_soon(monkeypatch):
    monkeypatch.setattr(threads, "WAIT_S", 60.0)
    with another_thread(compile_for_long) as go_on:
        threading.Timer(0.1, go_on.set).start()
        assert exit_code(lambda: None if go_on.is_set() else exit(1)) == 0


def test_what_imports_the_language_waits_for_another_thread():
    """The interpreter patches triton.language in place, and Gluon keeps what it finds there."""
    found = []
    thread = threading.Thread(target=lambda: found.append(import_late("tests.launched")))
    with another_thread(compile_for_long):
        thread.start()
        thread.join(0.1)
        assert found == []
    thread.join()
    assert found == [sys.modules["tests.launched"]]


def test_of_threads_that_meet_a_new_problem_one_searches(monkeypatch):
    config = Config.of(family=tile.NAME, BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, GROUP_M=8)
    searches, met, barrier = [], threading.local(), threading.Barrier(THREADS)
    plan_for = ops_request.plans.plan_for

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

    monkeypatch.setattr(ops_request.plans, "plan_for", all_find_nothing)
    monkeypatch.setattr("tritile.tune.now.tuned_now", search)
    monkeypatch.setattr(ops_request, "capturing", lambda: False)
    monkeypatch.setattr(ops_request.devices, "gpu", lambda index: DEVICE)

    def plan():
        with tritile.mode("tune"):
            return ops_request.planned(PROBLEM, 0)

    plans = together(plan)
    assert len(searches) == 1
    assert {(found.config, found.source) for found in plans} == {(config, "exact")}
