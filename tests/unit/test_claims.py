"""Claims on searches: processes that miss the same problems measure each once, and run the same configs.

Processes are real, and really killed, or threads on a clock and a schedule that are drawn.
"""

import contextlib
import itertools
import math
import multiprocessing
import os
import random
import sqlite3
import threading
import time
import warnings
from collections import Counter
from contextlib import closing, contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton

import tritile
from tests.warned import one_warning
from tritile.choose import pick
from tritile.core.config import Config
from tritile.core.device import HOST, TARGETS
from tritile.core.problem import KernelProblem, MatmulProblem
from tritile.errors import TuningError
from tritile.families.matmul_tile import family as tile
from tritile.families.registry import FAMILIES
from tritile.ops import request
from tritile.ops.memo import stopgaps
from tritile.tuner import decorated
from tritile.tuner.adoption import tuner_of
from tritile.tuner.store import claims
from tritile.tuner.store.claims import Claim
from tritile.tuner.store.trial import Trial, best_of
from tritile.tuner.store.trials import Store, store_of

H200 = TARGETS["nvidia-h200"]
DIGEST = "0123456789abcdef"
FORK = multiprocessing.get_context("fork")
BLOCKS = 16, 32, 64, 128
# By hand: TEST_CLAIMS=200 TEST_CLAIMS_RUNS=20 pytest tests/unit/test_claims.py -k real
PROBLEMS, RUNS = (
    int(os.environ.get(name, few)) for name, few in (("TEST_CLAIMS", 6), ("TEST_CLAIMS_RUNS", 1))
)


def problem_of(number=0):
    return KernelProblem("k", (("N", number),), ())


def config(block):
    return Config.of(BLOCK=block)


def trial(problem, block, us):
    return Trial(problem, config(block), us, measured_utc="2026-01-02T03:04:05+00:00")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    for name in ("_later", "_syncs", "_busy"):
        getattr(claims, name).clear()


@pytest.fixture
def store(tmp_path):
    return Store(HOST, tmp_path / "cache")


@pytest.fixture
def claim(store):
    return Claim(store, DIGEST, problem_of())


def rows(claim, statement="SELECT token FROM claims", *values):
    with closing(sqlite3.connect(claim.path, isolation_level=None)) as file:
        file.execute("PRAGMA synchronous = OFF")
        return file.execute(statement, values).fetchall()


def never(*given):
    pytest.fail("not to be called")


@contextmanager
def held_elsewhere(claim, age_s=0.0):
    """Another process's claim, whose heart beat so long ago."""
    claim._searched(lambda ended: True, never)  # makes the file
    values = claim._place, "other", "host 1", time.time(), time.time() - age_s, None
    rows(claim, "REPLACE INTO claims VALUES (?, ?, ?, ?, ?, ?)", *values)
    yield
    rows(claim, "DELETE FROM claims WHERE token = 'other'")


# --- One claim ---


def test_search_is_claimed_and_released(claim):
    def search(resumes):
        assert not resumes
        assert not claim.is_open(), "to the thread that searches, what is stored is all"
        with open_in_thread(claim) as answers:
            assert answers == [True]
        seen.extend(rows(claim))
        return False

    seen = []
    assert not claim.is_open()
    assert claim.settle(lambda ended: bool(seen), search, math.inf)
    assert len(seen) == 1
    assert rows(claim) == []
    assert claim.settle(lambda ended: True, never, math.inf)


@contextmanager
def open_in_thread(claim):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(claim.is_open()))
    thread.start()
    thread.join()
    yield answers


def test_known_problem_leaves_no_file(claim):
    assert claim.settle(lambda ended: True, never, math.inf)
    assert not claim.path.parent.exists()


def test_threads_of_one_process_search_once(store):
    """Each has a claim of its own; nobody waits for itself."""
    searches, barrier = [], threading.Barrier(4)

    def call():
        barrier.wait()
        claim = Claim(store, DIGEST, problem_of())
        return claim.settle(lambda ended: bool(searches), lambda resumes: bool(searches.append(1)), math.inf)

    answers = []
    threads = [threading.Thread(target=lambda: answers.append(call())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (answers, searches) == ([True] * 4, [1])


def test_search_inside_search_waits_for_nobody(store, claim):
    """A benchmark that calls its own kernel, or another that is claimed: waiting might close a circle."""
    inner = []

    def search(resumes):
        for each in (claim, other):
            assert each.settle(lambda ended: False, lambda resumes: bool(inner.append(1)), math.inf)
        return False

    other = Claim(store, DIGEST, problem_of(1))
    with held_elsewhere(other):
        assert claim.settle(lambda ended: False, search, math.inf)
    assert inner == [1, 1]


def test_waits_once_and_asks_again_later(claim, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    times = {"time": time.time, "monotonic": lambda: clock.now, "sleep": lambda s: add(s)}
    monkeypatch.setattr(claims, "time", SimpleNamespace(**times))

    def add(seconds):
        clock.now += seconds

    with held_elsewhere(claim):
        assert not claim.settle(never, never, 15.0)
        assert clock.now == pytest.approx(15.0, abs=0.1)
        assert not claim.settle(never, never, 15.0)
        add(claims.RETRY_S)
        waited = clock.now
        assert not claim.settle(never, never, 15.0)
        assert clock.now == waited
    add(claims.RETRY_S)
    assert claim.settle(lambda ended: True, never, 15.0)
    with held_elsewhere(claim):
        assert not claim.settle(never, never, 15.0)  # of another search it waits for once, too
    assert clock.now == pytest.approx(waited + claims.RETRY_S + 15.0, abs=0.1)


@pytest.mark.parametrize("age_s", [2 * claims.DEAD_S, -2 * claims.DEAD_S])  # the clock was set back
def test_dead_claim_is_taken_over(claim, age_s):
    resumed = []
    with held_elsewhere(claim, age_s):
        assert claim.is_open()
        assert not claim.is_open(alive=True)
        assert claim.settle(lambda ended: True, lambda resumes: bool(resumed.append(resumes)), math.inf)
        assert rows(claim) == []
    assert resumed == [True], "what is stored is a part, though nothing seems to be missing"


def test_failed_search_is_others_at_once(claim):
    def fail(resumes):
        raise TuningError("no config works")

    with pytest.raises(TuningError):
        claim.settle(lambda ended: False, fail, math.inf)
    assert claim.is_open()
    resumed = []
    assert claim.settle(lambda ended: False, lambda resumes: bool(resumed.append(resumes)), math.inf)
    assert resumed == [True]
    assert not claim.is_open()


def test_search_out_of_time_is_not_gone_on_with_by_its_job(claim, monkeypatch):
    asked = []

    def is_known(ended):
        asked.append(ended)
        return ended

    assert claim.settle(is_known, lambda resumes: True, math.inf)
    assert not claim.is_open()
    for _ in range(2):
        assert claim.settle(is_known, never, math.inf)
    monkeypatch.setattr(claims, "_STARTED", time.time() + 1)  # a process that starts later
    assert claim.settle(is_known, lambda resumes: False, math.inf)
    assert asked == [False, False, True, True, False, False]
    assert rows(claim) == []


def test_heart_beats(claim, monkeypatch):
    monkeypatch.setattr(claims, "BEAT_S", 0.001)

    def search(resumes):
        first = rows(claim, "SELECT beat FROM claims")
        while rows(claim, "SELECT beat FROM claims") == first:
            time.sleep(0.001)
        return False

    assert claim.settle(lambda ended: False, search, math.inf)


def test_lost_claim_waits_for_who_took_it(claim, monkeypatch):
    """A process that was stopped for long: the other's search decides, as it ends later."""
    asked, slept = [], []

    def search(resumes):
        rows(claim, "UPDATE claims SET token = 'other', beat = ?", time.time())
        return False

    def end(seconds):
        slept.append(seconds)
        rows(claim, "DELETE FROM claims")

    def is_known(ended):
        asked.append(bool(slept))
        return False

    monkeypatch.setattr(claims, "time", SimpleNamespace(**vars(time) | {"sleep": end}))
    assert claim.settle(is_known, search, math.inf)
    assert len(slept) == 1
    assert asked == [False, False], "one search is enough"


# --- The device ---


def test_busy_device_is_not_measured_on(claim, monkeypatch):
    """And delays calls by a second once, then by little."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    done, joined = threading.Event(), []
    join = threading.Thread.join

    def noted(thread, timeout=None):
        joined.append(timeout)
        join(thread, 0.0 if not done.is_set() else None)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: done.wait())
    monkeypatch.setattr(threading.Thread, "join", noted)
    for _ in range(2):
        claims._later.clear()
        assert not claim.settle(lambda ended: False, never, math.inf, 0)
    assert joined == [pytest.approx(claims._IDLE_S, abs=0.5), claims._GLANCE_S]
    assert not claim.path.exists()
    done.set()
    claims._later.clear()
    assert claim.settle(lambda ended: False, lambda resumes: False, math.inf, 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: 1 / 0)  # an earlier kernel failed
    assert claim.settle(lambda ended: False, lambda resumes: False, math.inf, 0)


# --- Files that cannot be used ---


def in_the_way(claim):
    claim.path.mkdir()


def of_others(claim):
    claim.path.write_bytes(b"")
    with closing(sqlite3.connect(claim.path)) as file:
        file.execute("CREATE TABLE claims (place TEXT)")


def locked(claim):
    connection = sqlite3.connect(claim.path, isolation_level=None, check_same_thread=False)
    connection.execute("BEGIN EXCLUSIVE")
    return connection


def no_folder(claim):
    claim.path.parent.rmdir()
    claim.path.parent.write_text("a file")


@pytest.mark.parametrize("trouble", [in_the_way, of_others, locked, no_folder])
def test_measured_without_claims(claim, monkeypatch, trouble):
    monkeypatch.setattr(claims, "_FILE_S", 0.01)
    claim.path.parent.mkdir()
    searches = []
    lock = trouble(claim)
    with one_warning("calls go on without it"):
        for _ in range(2):
            assert claim.settle(lambda ended: False, lambda resumes: bool(searches.append(1)), math.inf)
        assert not claim.is_open()
        claim._store.add(DIGEST)
    assert searches == [1, 1]
    if lock is not None:
        lock.close()


def test_damaged_file_is_replaced(claim):
    claim.path.parent.mkdir()
    for damage in (b"garbage" * 1000, b"SQLite format 3\0" + b"garbage" * 1000):
        claim.path.write_bytes(damage)
        assert not claim.is_open()
        assert claim.settle(lambda ended: False, lambda resumes: False, math.inf)


@pytest.mark.parametrize("column", ["token", "beat", "ended"])
@pytest.mark.parametrize("value", ["text", b"\xff", 1e999, -5])
def test_hostile_rows(claim, column, value):
    with held_elsewhere(claim, 2 * claims.DEAD_S):
        rows(claim, f"UPDATE claims SET {column} = ?", value)
        searches = []
        assert claim.settle(lambda ended: False, lambda resumes: bool(searches.append(1)), math.inf)
        assert searches == [1]


# --- Decorated kernels ---


@triton.jit
def kernel(x, N, BLOCK: triton.language.constexpr):
    pass


def bench(call, quantiles):
    raise AssertionError("`timed_by` stands in for it")


def tuned(blocks=BLOCKS, kind=tritile.autotune, **rest):
    return kind([triton.Config({"BLOCK": each}) for each in blocks], ["N"], do_bench=bench, **rest)(kernel)


def planned(tuner, n=5):
    return tuner.choose((torch.zeros(1), n), {}, "tune")


def timed_by(monkeypatch, ms_of):
    """Have configs of `tuned` timed by a function of N and BLOCK; nothing is launched."""

    def time_config(tuner, x, n, config):
        return [ms_of(n, config.kwargs["BLOCK"])] * 3

    monkeypatch.setattr("tritile.tuner.decorated.time_config", time_config)


def claim_on(tuner, n=5):
    return Claim(store_of(HOST), tuner.digest, tuner.problem((torch.zeros(1), n), {}))


def stored(tuner, times, n=5, **rest):
    """Store times by BLOCK, as another process does."""
    problem = tuner.problem((torch.zeros(1), n), {})
    named = {block: Config.from_triton(triton.Config({"BLOCK": block})) for block in times}
    store_of(HOST).add(
        tuner.digest, *(replace(trial(problem, 0, us), config=named[b], **rest) for b, us in times.items())
    )


@pytest.mark.parametrize("adopts", [False, True])
def test_nearest_runs_while_another_process_measures(monkeypatch, adopts):
    measured = []
    timed_by(monkeypatch, lambda n, block: measured.append((n, block)) or 1.0 + abs(block - 64))
    monkeypatch.setenv("TRITILE_TUNE_BUDGET", "0.01")
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("tritile.tuner.autotuner.monotonic", lambda: clock.now)
    with tritile.adopt() if adopts else contextlib.nullcontext() as adoption:
        outer = tuned(kind=triton.autotune if adopts else tritile.autotune)
        tuner = tuner_of(outer) if adopts else outer
        cache, how = (outer.cache if adopts else tuner.cache), {"BLOCK": 16}

        def called(n):
            args, key = (torch.zeros(1), n), tuner.cache_key_of((torch.zeros(1), n), {})[0]
            if adopts:
                return tuner._chosen(("tune", -1), key, None, None, args, {}).kwargs
            return tuner._on_miss(("tune", -1), cache, key, args, {}).kwargs

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with held_elsewhere(claim_on(tuner, 5)):
                assert called(5) == how
                stored(tuner, {32: 7e3})
                assert called(5) == how, "for a second it asks no more"
                clock.now += claims.RETRY_S
                claims._later.clear()
                assert called(5) == {"BLOCK": 32}, "what is stored so far"
            assert (measured, dict(cache)) == ([], {})
            monkeypatch.setenv("TRITILE_TUNE_BUDGET", "inf")
            clock.now += claims.RETRY_S
            claims._later.clear()
            assert called(5) == {"BLOCK": 64}
        assert measured == [(5, 16), (5, 64), (5, 128)]
        assert len(cache) == 1
        if adopts:
            (row,) = adoption.report
            assert (row.measured, row.guessed) == (1, 0)


def test_partial_search_does_not_count(monkeypatch):
    """Of a process that a call meets amid its search: all configs are timed, but it has yet to race."""
    tuner = tuned()
    stored(tuner, {block: 1.0 + block for block in BLOCKS})

    def end(seconds):
        stored(tuner, {128: 0.5})
        rows(claim_on(tuner), "DELETE FROM claims")

    monkeypatch.setattr(claims, "time", SimpleNamespace(**vars(time) | {"sleep": end}))
    with held_elsewhere(claim_on(tuner)):
        plan = planned(tuner)
    assert (plan.config.kwargs, plan.source, plan.tentative) == ({"BLOCK": 128}, "exact", False)


def test_budget_of_one_search_is_the_jobs(monkeypatch):
    measured = []
    timed_by(monkeypatch, lambda n, block: measured.append(block) or 1.0 / block)
    clock = SimpleNamespace(monotonic=lambda: len(measured))
    monkeypatch.setattr("tritile.tuner.measure.engine.time", clock)
    monkeypatch.setenv("TRITILE_TUNE_BUDGET", "1.5")
    for _ in range(2):
        assert planned(tuned()).config.kwargs == {"BLOCK": 32}
        tritile.forget()
    assert measured == [16, 32]
    monkeypatch.setattr(claims, "_STARTED", time.time() + 1)  # the next process
    assert planned(tuned()).config.kwargs == {"BLOCK": 128}
    assert measured == [16, 32, 64, 128]


def test_with_a_reference_the_stored_choice_counts(monkeypatch):
    """What was checked goes first, in the process that searched and in those that waited."""
    tuner = tuned(reference=lambda x: {"x": x})
    stored(tuner, {16: 9.0, 64: 8.0}, error=0.0)
    stored(tuner, {32: 1.0, 128: 2.0})
    offered = tuner.offered((torch.zeros(1), 5), {})
    later = tuner.remembered(tuner.problem((torch.zeros(1), 5), {}), HOST, offered)
    assert planned(tuner).config.kwargs == later.config.kwargs == {"BLOCK": 64}


# --- tritile's own operations ---

PRODUCT = MatmulProblem(1, 512, 256, 128, "float16", "float16")
OWN = [Config.of(family=tile.NAME, BLOCK_M=m, BLOCK_N=64, BLOCK_K=32, GROUP_M=8) for m in (64, 128)]


@pytest.fixture
def operations(monkeypatch):
    """Searches of products, which store two trials; their list."""

    def search(problem, device, index):
        searches.append(problem)
        digest = FAMILIES["matmul"][tile.NAME].digest
        store_of(device).add(digest, *(Trial(problem, c, 9.0 - i, error=1e-3) for i, c in enumerate(OWN)))

    searches = []
    monkeypatch.setattr("tritile.tune.now.tuned_now", search)
    monkeypatch.setattr(request, "capturing", lambda: False)
    monkeypatch.setattr(request.devices, "gpu", lambda index: H200)
    pick.forget()
    with tritile.mode("tune"):
        yield searches
    pick.forget()


def test_product_that_another_process_measures(operations, monkeypatch):
    monkeypatch.setenv("TRITILE_TUNE_BUDGET", "0.01")
    claim, before = pick.claim_on(PRODUCT, H200), stopgaps.count
    with held_elsewhere(claim):
        assert request.planned(PRODUCT, 0).source != "exact"
        digest = FAMILIES["matmul"][tile.NAME].digest
        store_of(H200).add(digest, Trial(PRODUCT, OWN[0], 9.0))  # so far
        assert pick.plan_for(PRODUCT, H200) is None
        request.planned(PRODUCT, 0)
        assert stopgaps.count == before + 2, "their launches are not kept"
        store_of(H200).add(digest, Trial(PRODUCT, OWN[1], 8.0))
    plan = request.planned(PRODUCT, 0)
    assert (plan.source, plan.config) == ("exact", OWN[1])
    assert stopgaps.count == before + 2
    assert operations == []


def test_product_that_a_dead_process_measured(operations):
    claim = pick.claim_on(PRODUCT, H200)
    store_of(H200).add(FAMILIES["matmul"][tile.NAME].digest, Trial(PRODUCT, OWN[0], 9.0))
    with held_elsewhere(claim, 2 * claims.DEAD_S):
        assert request.planned(PRODUCT, 0).config == OWN[1]
        assert rows(claim) == []
    assert request.planned(PRODUCT, 0).config == OWN[1]
    assert operations == [PRODUCT]


def test_stopgap_is_not_kept(operations, monkeypatch):
    def prepared(call, allows_torch):
        problems.append(call.problem)
        request.planned(call.problem, 0)
        return lambda *tensors: None

    kept, problems = [], []
    monkeypatch.setattr(request.spread, "cache_launch", lambda op, key, *rest: kept.append(key))
    monkeypatch.setattr(request, "prepared", prepared)
    monkeypatch.setattr(request, "on_host", lambda tensor: False)
    monkeypatch.setenv("TRITILE_TUNE_BUDGET", "0.01")
    call = "matmul", (torch.zeros(64, 32), torch.zeros(32, 48)), None, (None, None), "key"
    request.eager(*call)
    pick.forget()
    with held_elsewhere(pick.claim_on(problems[0], H200)):
        request.eager(*call)
    request.eager(*call)
    assert kept == ["key", None, "key"]
    assert operations == problems[:1]


# --- Real processes, killed ---


def noisy(seed, n, block):
    """Milliseconds, by which processes would disagree if more than one measured."""
    return 1.0 + random.Random(f"{seed} {n} {block}").random()


def rank(folder, seed, problems, waits):
    """Call a kernel for each problem until a config is final; note what is measured, and the outcomes."""
    claims.DEAD_S, claims.RETRY_S = 1e12, 0.0  # whoever kills a process ages its claims
    settle, measured = Claim.settle, (folder / f"measured-{seed}").open("a", buffering=1)
    if not waits:
        Claim.settle = lambda claim, known, search, wait_s, gpu=None: settle(claim, known, search, 0.0, gpu)

    def time_config(tuner, x, n, config):
        measured.write(f"{n} {config.kwargs['BLOCK']}\n")
        return [noisy(seed, n, config.kwargs["BLOCK"])] * 3

    decorated.time_config = time_config
    tuner, done = tuned(), (folder / f"chosen-{seed}").open("w", buffering=1)
    left = random.Random(seed).sample(range(problems), problems)
    while left:
        for n in [*left]:
            plan = planned(tuner, n)
            if not plan.tentative:
                left.remove(n)
                done.write(f"{n} {plan.config.kwargs['BLOCK']}\n")


def noted(path):
    """The whole lines that a process, killed perhaps, wrote to a file."""
    text = path.read_text() if path.exists() else ""
    return [tuple(map(int, line.split())) for line in text.splitlines(keepends=True) if line.endswith("\n")]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("run", range(RUNS))
def test_real_processes_killed_at_random(tmp_path, run):
    draw, tuner = random.Random(run), tuned()
    folder = tmp_path / "notes"
    folder.mkdir()
    victims = draw.sample(range(8), 3)
    # Some are killed by what they measured, so mostly amid a search, others wherever they are.
    own = {seed: draw.choice([draw.randrange(1, 9), math.inf]) for seed in victims}
    total = {seed: draw.randrange(1, 1 + len(BLOCKS) * PROBLEMS // 2) for seed in victims}
    ranks = {}
    for seed in draw.sample(range(8), 8):
        arguments = folder, seed, PROBLEMS, draw.random() < 0.5
        ranks[seed] = FORK.Process(target=rank, args=arguments)
        ranks[seed].start()
    killed = set()
    while any(process.is_alive() for process in ranks.values()):
        counts = {seed: len(noted(folder / f"measured-{seed}")) for seed in ranks}
        for seed in set(victims) - killed:
            if counts[seed] < own[seed] and sum(counts.values()) < total[seed]:
                continue
            ranks[seed].kill()  # it may have ended meanwhile
            ranks[seed].join()
            killed.add(seed)
        for seed in killed:
            if claim_on(tuner).path.exists():
                age = "UPDATE claims SET beat = -1e15 WHERE process LIKE ?"
                rows(claim_on(tuner), age, f"% {ranks[seed].pid}")
        time.sleep(0.002)
    codes = {seed: process.exitcode for seed, process in ranks.items()}
    assert {code for seed, code in codes.items() if seed not in victims} == {0}
    # One config on all.
    chosen = {seed: dict(noted(folder / f"chosen-{seed}")) for seed in ranks}
    for n in range(PROBLEMS):
        problem = tuner.problem((torch.zeros(1), n), {})
        stored = store_of(HOST).trials(tuner.digest, problem)
        assert {each.config["BLOCK"] for each in stored} == {*BLOCKS}, "nothing is lost"
        best = best_of(stored).config["BLOCK"]
        assert {own[n] for own in chosen.values() if n in own} == {best}
        assert all(n in chosen[seed] for seed in ranks if codes[seed] == 0)
    # Each is searched once, or once more for each searcher that was killed.
    measured = {seed: noted(folder / f"measured-{seed}") for seed in ranks}
    for n in range(PROBLEMS):
        searchers = [seed for seed in ranks if any(number == n for number, _ in measured[seed])]
        died = [seed for seed in searchers if codes[seed] != 0]
        assert len(searchers) <= 1 + len(died), (n, searchers, died)
    times = Counter(pair for pairs in measured.values() for pair in pairs)
    assert set(times) == {(n, block) for n in range(PROBLEMS) for block in BLOCKS}
    assert sum(times.values()) - len(times) <= sum(codes[seed] != 0 for seed in ranks)
    assert rows(claim_on(tuner)) == [] or killed


# --- Drawn histories ---


class _Killed(BaseException):
    """Ends a thread as SIGKILL does a process: nothing that it would do at its end is done."""


class World:
    """Processes of one host as threads, of which one runs at a time, on a clock of their own.

    A drawn schedule says who goes on at each moment, how long that takes, and who is killed.
    """

    def __init__(self, seed, store, patch):
        self.draw, self.store, self.now = random.Random(seed), store, 1e6
        self.threads, self.turns, self.back = {}, {}, threading.Semaphore(0)
        self.doomed, self.gone, self.kills, self.errors = set(), set(), 0, 0
        self.searches, self.chosen, self.local = Counter(), {}, threading.local()
        world = self

        class PerProcess(dict):
            """What claims keep in a process, here of each thread."""

            get = lambda own, key, default: dict.get(own, (world.name, key), default)  # noqa: E731
            pop = lambda own, key, default: dict.pop(own, (world.name, key), default)  # noqa: E731
            __contains__ = lambda own, key: dict.__contains__(own, (world.name, key))  # noqa: E731
            __setitem__ = lambda own, key, value: dict.__setitem__(own, (world.name, key), value)  # noqa: E731

        clock = {"time": lambda: self.now, "monotonic": lambda: self.now, "sleep": lambda s: self.pause()}
        patch.setattr(claims, "time", SimpleNamespace(**clock))
        patch.setattr(claims, "_STARTED", 0.0)
        patch.setattr(claims, "_later", PerProcess())
        patch.setattr(claims, "_is_idle", lambda gpu: self.pause() is None)  # others may claim meanwhile
        numbers = itertools.count()
        named = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=f"{self.name}, claim {next(numbers)}"))
        patch.setattr(claims, "uuid", named)
        patch.setattr(Claim, "_beat", lambda claim, token, stop: None)  # `beat` does
        write = Claim._write
        patch.setattr(Claim, "_write", lambda own, *how: self.name in self.doomed or write(own, *how))

    @property
    def name(self):
        return getattr(self.local, "name", "")

    def pause(self):
        """Let others run; end here if killed meanwhile."""
        self.back.release()
        self.turns[self.name].acquire()
        if self.name in self.doomed:
            raise _Killed

    def start(self, name, work):
        def run():
            self.local.name = name
            self.turns[name].acquire()
            try:
                if name not in self.doomed:
                    work(name)
            except _Killed:
                pass
            finally:
                self.gone.add(name)
                self.back.release()

        self.turns[name], self.threads[name] = threading.Semaphore(0), threading.Thread(target=run)
        self.threads[name].start()

    def beat(self, claim):
        before = self.now
        self.now += self.draw.choice([0.01, 0.5, 3.0])
        if claim.path.exists() and int(before) != int(self.now):
            for name in self.threads.keys() - self.doomed - self.gone:
                rows(claim, "UPDATE claims SET beat = ? WHERE token LIKE ?", self.now, f"{name},%")

    def run(self, claim, killing):
        for _ in range(20_000):
            left = sorted(self.threads.keys() - self.gone)
            if not left:
                return
            name = self.draw.choice(left)
            if name not in self.doomed and len(left) > 1 and self.draw.random() < killing:
                self.doomed.add(name)
                self.kills += 1
            self.beat(claim)
            self.turns[name].release()
            self.back.acquire()
        pytest.fail(f"{left} hang")


def process(world, problems):
    """Settle all problems, each as often as it takes, then note which config the store calls best."""

    def work(name):
        for number in world.draw.sample(range(problems), problems):
            while not settled(name, problem_of(number)):
                world.pause()
            world.pause() if world.draw.random() < 0.3 else None
            best = best_of(world.store.trials(DIGEST, problem_of(number)))
            world.chosen[name, number] = best.config

    def settled(name, problem):
        def known():
            return {each.config["BLOCK"] for each in world.store.trials(DIGEST, problem)}

        def is_known(ended):
            return known() == {*BLOCKS} or (ended and bool(known()))

        def search(resumes):
            world.searches[problem] += 1
            least = world.draw.choice([0, 0, 1])  # configs that its time leaves unmeasured
            for block in [block for block in BLOCKS if block not in known()][: len(BLOCKS) - least]:
                world.pause()
                if world.draw.random() < 0.03:
                    world.errors += 1
                    raise TuningError("no memory")
                world.store.add(DIGEST, trial(problem, block, 1.0 + world.draw.random()))
            world.pause()
            finalists = sorted(world.store.trials(DIGEST, problem), key=lambda each: each.us)[:2]
            for each in finalists:  # which changes the order
                world.store.add(DIGEST, replace(each, us=1.0 + world.draw.random()))
                world.pause()
            return known() != {*BLOCKS}

        wait_s = world.draw.choice([0.0, 5.0, math.inf])
        try:
            return Claim(world.store, DIGEST, problem).settle(is_known, search, wait_s)
        except TuningError:
            return False

    return work


@pytest.mark.parametrize("seed", range(25))
def test_drawn_histories_agree_at_rest(store, monkeypatch, seed):
    world = World(seed, store, monkeypatch)
    count, problems = world.draw.randrange(2, 7), 2
    for number in range(count):
        world.start(f"rank {number}", process(world, problems))
    world.run(Claim(store, DIGEST, problem_of()), world.draw.choice([0.0, 0.01, 0.05]))
    for thread in world.threads.values():
        thread.join()
    survivors = world.threads.keys() - world.doomed
    for number in range(problems):
        best = best_of(store.trials(DIGEST, problem_of(number))).config
        assert {world.chosen[name, number] for name in survivors} == {best}
        assert 1 <= world.searches[problem_of(number)] <= 1 + world.kills + world.errors
