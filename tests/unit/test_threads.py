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
def waiting(monkeypatch):
    """Counts the threads that wait for another's work."""
    semaphore = threading.Semaphore(0)

    class Counted(Future):
        def result(self, timeout=None):
            if not self.done():
                semaphore.release()
            return super().result(timeout)

    monkeypatch.setattr(threads, "Future", Counted)
    return semaphore


def together(call):
    """What `call` gives in each of some threads, or the error that it raises."""
    with ThreadPoolExecutor(THREADS) as pool:
        futures = [pool.submit(call) for _ in range(THREADS)]
        return [future.exception() or future.result() for future in futures]


def wait_for_all(waiting):
    for _ in range(THREADS - 1):
        assert waiting.acquire()


def test_one_does_it_and_all_get_what_it_gives(waiting):
    done = []

    def work():
        wait_for_all(waiting)
        done.append(1)
        return object()

    results = together(lambda: once("key", work))
    assert len(done) == 1
    assert len(set(results)) == 1
    assert once("key", lambda: once("another", lambda: 7)) == 7  # anew, once it is done

    def fail():
        wait_for_all(waiting)
        raise TuningError("no config works")

    results = together(lambda: once("key", fail))
    assert [str(result) for result in results] == ["no config works"] * THREADS


def test_where_one_is_interrupted_another_begins_anew(waiting):
    begun = []

    def work():
        begun.append(1)
        if len(begun) == 1:
            wait_for_all(waiting)
            raise KeyboardInterrupt
        return 7

    with ThreadPoolExecutor(THREADS) as pool:
        futures = [pool.submit(once, "key", work) for _ in range(THREADS)]
        errors = [future.exception() for future in futures]
    assert sorted(map(type, errors), key=str) == [KeyboardInterrupt] + [type(None)] * (THREADS - 1)
    assert {future.result() for future, error in zip(futures, errors, strict=True) if not error} == {7}


def test_what_another_thread_chose_counts_inside_a_with_and_ends_with_it():
    before, other = settings.rules(), settings.Rules("off", True, True)
    with settings.under(other):
        assert settings.rules() == other
    assert settings.rules() == before


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_does_not_wait_for_a_thread_of_its_parent():
    begun, go_on = threading.Event(), threading.Event()

    def work():
        begun.set()
        go_on.wait()

    thread = threading.Thread(target=once, args=("key", work))
    thread.start()
    begun.wait()
    process = multiprocessing.get_context("fork").Process(target=once, args=("key", lambda: 7), daemon=True)
    process.start()
    process.join()
    go_on.set()
    thread.join()
    assert process.exitcode == 0


@contextlib.contextmanager
def library_in_use():
    """Within, another thread compiles or interprets: it holds the lock."""
    there, go_on = threading.Event(), threading.Event()

    def work():
        with library_lock:
            there.set()
            go_on.wait()

    thread = threading.Thread(target=work)
    thread.start()
    there.wait()
    try:
        yield go_on
    finally:
        go_on.set()
        thread.join()


def exit_code(child):
    process = multiprocessing.get_context("fork").Process(target=child, daemon=True)
    process.start()
    process.join()
    return process.exitcode


def child_with_a_free_lock():
    assert library_lock.acquire(timeout=0)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_forked_while_another_thread_compiles_has_a_free_lock(monkeypatch):
    monkeypatch.setattr(threads, "WAIT_S", 0.01)
    with library_in_use():
        assert not library_lock.acquire(timeout=0)
        assert exit_code(child_with_a_free_lock) == 0
    assert library_lock.acquire(timeout=0)
    library_lock.release()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_waits_for_what_ends_soon(monkeypatch):
    monkeypatch.setattr(threads, "WAIT_S", 60.0)
    with library_in_use() as go_on:
        threading.Timer(0.1, go_on.set).start()
        assert exit_code(lambda: None if go_on.is_set() else exit(1)) == 0


def test_what_imports_the_language_waits_for_another_thread():
    """The interpreter patches triton.language in place, and Gluon keeps what it finds there."""
    found = []
    thread = threading.Thread(target=lambda: found.append(import_late("tests.launched")))
    with library_in_use():
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
