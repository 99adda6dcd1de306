"""The store: what is remembered comes back, and nothing that befalls the file breaks a call."""

import contextlib
import gzip
import multiprocessing
import os
import random
import re
import shutil
import signal
import sqlite3
import threading
import time
import warnings
from dataclasses import fields, replace
from pathlib import Path

import pytest

from tests.warned import one_warning
from tritile.core import threads
from tritile.core.config import Config
from tritile.core.device import TARGETS
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import KernelProblem, MatmulProblem
from tritile.errors import InvalidValueError, StoreWarning
from tritile.tuner.store import trials as store_module
from tritile.tuner.store.trial import Trial, rank
from tritile.tuner.store.trials import Store, store_of

DEVICE = replace(TARGETS["nvidia-h200"], triton="3.6.0", compiler="V12.8.93")
KERNEL = "0123456789abcdef"
PROBLEM = MatmulProblem(1, 257, 129, 65, "bfloat16", "bfloat16")
FORK = multiprocessing.get_context("fork")
forks = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


def config(number=0):
    return Config.of(BLOCK_M=64, BLOCK_N=16 * (number + 1), num_warps=4)


def trial(us=10.0, number=0, **changes):
    return replace(Trial(PROBLEM, config(number), us, measured_utc="2026-01-02T03:04:05+00:00"), **changes)


def aside(store):
    return sorted(path.name for path in store.path.parent.iterdir() if "set-aside" in path.name)


def raw(store):
    return contextlib.closing(sqlite3.connect(store.path, isolation_level=None))


def sql(store, *statements):
    """What the last of these statements answers, behind the store's back."""
    with raw(store) as connection:
        return [connection.execute(statement).fetchone() for statement in statements][-1]


def filled(directory, count):
    """A store with so many trials."""
    store = Store(DEVICE, directory)
    store.add(KERNEL, *(trial(10.0 + number, number) for number in range(count)))
    return store


@pytest.fixture(autouse=True)
def _no_silent_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", StoreWarning)
        yield


@pytest.fixture
def store(tmp_path):
    return Store(DEVICE, tmp_path / "cache")


# --- What is remembered ---


def test_looking_creates_nothing(store):
    assert store.trials(KERNEL, PROBLEM) == store.bests(KERNEL, "matmul") == store.all_trials() == []
    assert not store.path.parent.exists()


def test_store_in_cache_directory(tmp_path, monkeypatch):
    assert store_of(DEVICE).path == tmp_path / "nvidia-h200.sqlite3"
    monkeypatch.setenv("TRITILE_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert store_of(DEVICE).path.parent == tmp_path / "elsewhere"


@pytest.mark.parametrize(
    "problem",
    [
        PROBLEM,
        PermuteProblem.transposed(3, 5, 7, 2),
        KernelProblem("mine", (("n", 5), ("x", None), ("s", "é\ud800"), ("f", 0.5)), (("x", "float16"),)),
    ],
)
def test_round_trip(tmp_path, problem):
    full = Trial(problem, config(), 12.5, 0.01, 128, 0, 49152, 1e-3, None, "2026-01-02T03:04:05Z")
    failed = Trial(problem, config(1), None, failure="out of resources: é")
    Store(DEVICE, tmp_path).add(KERNEL, full)
    Store(DEVICE, tmp_path).add(KERNEL, failed)
    again = Store(DEVICE, tmp_path)
    assert again.trials(KERNEL, problem) == [full, failed]
    assert again.best(KERNEL, problem) == full
    assert again.bests(KERNEL, problem.op) == [full]
    environment = {f.name: getattr(DEVICE, f.name) for f in fields(DEVICE) if "_g" not in f.name}
    assert list(again.all_trials()) == [(environment | {"kernel": KERNEL}, t) for t in (full, failed)]


def test_the_same_again_replaces(store):
    store.add(KERNEL, trial(10.0, registers=99))
    store.add(KERNEL, trial(None, failure="wrong answer"))
    assert store.trials(KERNEL, PROBLEM) == [trial(None, failure="wrong answer")]
    assert store.best(KERNEL, PROBLEM) is None
    store.add(KERNEL, trial(20.0))
    assert store.trials(KERNEL, PROBLEM) == [trial(20.0)]
    assert sql(store, "SELECT (SELECT count(*) FROM trials), count(*) FROM environments") == (1, 1)


OTHER = {
    "name": "nvidia h200", "backend": "hip", "arch": "90", "processors": 131, "l2_bytes": 1,
    "shared_memory": 1, "triton": "3.6.1", "compiler": "",
}  # fmt: skip


@pytest.mark.parametrize("field", OTHER)
def test_every_field_of_the_environment_counts(store, field):
    store.add(KERNEL, trial())
    changed = Store(replace(DEVICE, **{field: OTHER[field]}), store.path.parent)
    assert changed.path == store.path
    assert changed.trials(KERNEL, PROBLEM) == changed.bests(KERNEL, "matmul") == []
    changed.add(KERNEL, trial(5.0))
    assert changed.best(KERNEL, PROBLEM) == trial(5.0)
    assert store.best(KERNEL, PROBLEM) == trial()


def test_what_a_store_is_keyed_by(store):
    """Kernel, problem and operation; clocks and bandwidth of the device do not count."""
    store.add(KERNEL, trial())
    assert store.bests("another", "matmul") == store.bests(KERNEL, "transpose") == []
    for changes in ({}, {"m": 8}, {"a_align": 8}, {"b_layout": "column"}):
        kernel = KERNEL if changes else "another"
        assert store.best(kernel, replace(PROBLEM, **changes)) is None
    slower = Store(replace(DEVICE, clock_ghz=1.0, memory_gbps=1.0), store.path.parent)
    assert slower.best(KERNEL, PROBLEM) == trial()


def test_best_checked_then_fast(store):
    in_order = [
        trial(3.0, 4, error=0.1),
        trial(3.0, 1, error=0.0),
        trial(2.0, 2),
        trial(2.0, 3),
        trial(None, 5, failure="no", error=0.0),
        trial(1.0, 6, failure="wrong answer"),
    ]
    in_order[:2] = sorted(in_order[:2], key=lambda one: one.config.key)
    tall = replace(PROBLEM, m=9999)
    for one in reversed(in_order):
        store.add(KERNEL, one)
        store.add(KERNEL, replace(one, problem=tall))
    assert sorted(in_order, key=rank) == in_order
    assert store.best(KERNEL, PROBLEM) == in_order[0]
    assert store.bests(KERNEL, "matmul") == [in_order[0], replace(in_order[0], problem=tall)]


@pytest.mark.parametrize("us", [float("nan"), float("inf"), -1.0, 0.0, float("-inf"), 1e300, -(10**400)])
def test_no_time_is_failure(store, us):
    store.add(KERNEL, trial(us))
    store.add(KERNEL, trial(7.0, 1), trial(1.0, 2, failure="wrong answer"))
    store.add(KERNEL, trial(0.5, 3, error=abs(us) if us != us else float("inf")))
    assert store.best(KERNEL, PROBLEM) == trial(7.0, 1)
    assert store.bests(KERNEL, "matmul") == [trial(7.0, 1)]
    first = store.trials(KERNEL, PROBLEM)[0]
    assert (first.us, "measured" in first.failure) == (None, True)


@pytest.mark.parametrize(
    "changes", [{"registers": 2**70}, {"measured_utc": "soon"}, {"us": None}, {"spills": -1}]
)
def test_unstorable_warns_once(store, changes):
    with one_warning("cannot be remembered"):
        store.add(KERNEL, trial(**changes))
        store.add(KERNEL, trial(**changes), trial())
    assert store.trials(KERNEL, PROBLEM) == [trial()]


def test_a_failure_becomes_one_short_line(store):
    store.add(KERNEL, trial(None, failure="ptxas\x00 failed:\n\tout of\ud800é " + "x" * 10**6))
    (found,) = store.trials(KERNEL, PROBLEM)
    assert found.failure.startswith("ptxas failed: out of é xxx")
    assert len(found.failure) <= 2000


# --- Files that are damaged, or not ours ---


def garbage(path):
    path.write_bytes(random.Random(0).randbytes(20000))


def truncated(path):
    filled(path.parent, 200)
    os.truncate(path, path.stat().st_size // 2 + 100)


def foreign(path):
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE trials (id INTEGER PRIMARY KEY)")


def triggered(path):
    filled(path.parent, 3)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TRIGGER t AFTER INSERT ON trials BEGIN DELETE FROM trials; END")


DAMAGE = [garbage, truncated, foreign, triggered]


@pytest.mark.parametrize("first", ["best", "add"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_file_set_aside(tmp_path, damage, first):
    store = Store(DEVICE, tmp_path)
    damage(store.path)
    before = store.path.read_bytes()
    with one_warning("set-aside"):
        assert first == "add" or store.best(KERNEL, PROBLEM) is None
        store.add(KERNEL, trial(99.0, 999))
    (name,) = aside(store)
    assert re.fullmatch(rf"nvidia-h200\.sqlite3\.set-aside-2\w+\.\w+-{os.getpid()}", name)
    assert (tmp_path / name).read_bytes() == before
    for again in (store, Store(DEVICE, tmp_path)):
        assert again.trials(KERNEL, PROBLEM) == [trial(99.0, 999)]


def test_pages_damaged_in_use(tmp_path):
    store = filled(tmp_path, 400)
    assert store.best(KERNEL, PROBLEM) == trial()
    size = store.path.stat().st_size
    assert size > 20 * 4096
    with store.path.open("r+b") as file:
        file.seek(3 * 4096)
        file.write(b"\xff" * (size - 4 * 4096))
    with one_warning("malformed"):
        assert store.trials(KERNEL, PROBLEM) == []
        store.add(KERNEL, trial(3.0))
    assert store.trials(KERNEL, PROBLEM) == [trial(3.0)]
    assert len(aside(store)) == 1


# --- Other processes amid one's own work ---


def test_fresh_file_not_set_aside(store, monkeypatch):
    store.path.parent.mkdir()
    garbage(store.path)
    lock = store_module.FileLock

    def overtaken(*arguments, **options):
        monkeypatch.setattr(store_module, "FileLock", lock)
        with one_warning("set-aside"):
            Store(DEVICE, store.path.parent).add(KERNEL, trial())
        return lock(*arguments, **options)

    monkeypatch.setattr(store_module, "FileLock", overtaken)
    assert store.best(KERNEL, PROBLEM) == trial()  # and warns not: the other did
    assert len(aside(store)) == 1


def test_store_created_meanwhile(store, monkeypatch):
    store.path.parent.mkdir()
    store.path.touch()
    is_store = store_module._is_store

    def overtaken(connection):
        monkeypatch.setattr(store_module, "_is_store", is_store)
        assert not is_store(connection)
        Store(DEVICE, store.path.parent).add(KERNEL, trial())
        return False

    monkeypatch.setattr(store_module, "_is_store", overtaken)
    assert store.best(KERNEL, PROBLEM) == trial()
    assert aside(store) == []


@pytest.mark.parametrize("late", [False, True])
def test_rename_amid_add(tmp_path, monkeypatch, late):
    store = filled(tmp_path, 3)
    put = store_module._put

    def renamed_meanwhile(*arguments):
        monkeypatch.setattr(store_module, "_put", put)
        if late:
            put(*arguments)
        store.path.rename(tmp_path / "moved")
        return 1 if late else put(*arguments)

    monkeypatch.setattr(store_module, "_put", renamed_meanwhile)
    store.add(KERNEL, trial(5.0, 1))
    for again in (store, Store(DEVICE, tmp_path)):
        assert again.trials(KERNEL, PROBLEM) == [trial(5.0, 1)]


# --- Files and disks that cannot be used ---


def newer(store, monkeypatch):
    sql(store, "PRAGMA user_version = 2", "ALTER TABLE trials ADD COLUMN more TEXT")


def a_file_where_the_directory_should_be(store, monkeypatch):
    shutil.rmtree(store.path.parent)
    store.path.parent.write_text("a file")


def read_only(store, monkeypatch):
    def connect(path, *arguments, **options):
        return CONNECT(f"{Path(path).as_uri()}?mode=ro", *arguments, **(options | {"uri": True}))

    monkeypatch.setattr(sqlite3, "connect", connect)


def full(step):
    def fill(store, monkeypatch):
        def refuse(*_):
            raise sqlite3.OperationalError("database or disk is full")

        monkeypatch.setattr(store_module, step, refuse)

    return fill


def damaged_and_not_renamed(store, monkeypatch):
    def refuse(*_):
        raise PermissionError("read-only file system")

    garbage(store.path)
    monkeypatch.setattr(Path, "rename", refuse)


def locked(lock):
    def begin(store, monkeypatch):
        monkeypatch.setattr(store_module, "READ_S", 0.02)
        monkeypatch.setattr(store_module, "WRITE_S", 0.02)
        connection = sqlite3.connect(store.path, isolation_level=None)
        connection.execute(lock)
        return connection

    return begin


CONNECT = sqlite3.connect
TROUBLES = {  # what befalls the file, what the warning says, whether reads work, and whether it passes
    "newer": (newer, "newer", False, False),
    "no directory": (a_file_where_the_directory_should_be, "calls go on without it", False, False),
    "read-only": (read_only, "readonly", True, True),
    "full when written": (full("_put"), "disk is full; calls go on without it", True, True),
    "full when opened": (full("_check"), "disk is full; calls go on without it", False, True),
    "damaged, and not renamed": (damaged_and_not_renamed, "setting it aside failed", False, False),
    "locked": (locked("BEGIN EXCLUSIVE"), "locked", False, True),
    "locked for writing": (locked("BEGIN IMMEDIATE"), "locked", True, True),
}  # fmt: skip


@pytest.mark.parametrize("name", TROUBLES)
def test_unusable_file_breaks_nothing(store, monkeypatch, name):
    befall, text, reads, passes = TROUBLES[name]
    store.add(KERNEL, trial())
    with monkeypatch.context() as patch:
        lock = befall(store, patch)
        before = store.path.read_bytes() if store.path.exists() else b""
        store = Store(DEVICE, store.path.parent)
        with one_warning(text):
            store.add(KERNEL, trial(9.0, 1), trial(1.0, 2))
            new, kept = [trial(9.0, 1), trial(1.0, 2)], [trial()] if reads else []
            assert store.trials(KERNEL, PROBLEM) == kept + new, "they count in this process"
            store.add(KERNEL, trial(7.0, 1))
        assert len(store.unwritten) == 2
        assert store.trials("another", PROBLEM) == store.trials(KERNEL, replace(PROBLEM, m=8)) == []
        assert (store.path.read_bytes() if store.path.exists() else b"") == before
        if lock is not None:
            lock.close()
    if passes:
        store.add(KERNEL, trial(2.0, 3))
        found = {trial(7.0, 1), trial(1.0, 2), trial(2.0, 3)}
        for again in (store, Store(DEVICE, store.path.parent)):
            assert set(again.trials(KERNEL, PROBLEM)) - {trial()} == found
        assert not store.unwritten
    assert store.path.parent.is_file() or aside(store) == []


def test_damaged_file_in_use_stays(store, monkeypatch):
    monkeypatch.setattr(store_module, "READ_S", 0.02)
    filled(store.path.parent, 50)
    data = store.path.read_bytes()
    at = data.rindex(b"bfloat16")
    store.path.write_bytes(data[:at] + b"X" + data[at + 1 :])
    with raw(store) as connection:
        connection.execute("BEGIN IMMEDIATE")
        with one_warning("locked"):
            assert store.trials(KERNEL, PROBLEM) == []
        assert aside(store) == []
    with one_warning("set-aside"):
        assert store.trials(KERNEL, PROBLEM) == []
    assert len(aside(store)) == 1


# --- Rows that nobody of ours wrote ---

CONFIG = config(5).key
BAD = [  # other forms of problems and configs: in test_table
    ("problem", "no JSON"), ("problem", b"\x80"), ("problem", b"\xed\xa0\x80"), ("config", CONFIG + " "),
    ("us", "soon"), ("us", b"\x80"), ("us", -1), ("us", float("inf")), ("us", 0), ("us", None),
    ("spread", -1), ("registers", 1.5), ("error", "x"), ("op", "transpose"), ("failure", b"\x80"),
    ("failure", "x" * 200_000), ("measured_utc", "soon"), ("measured_utc", b"2026"),
]  # fmt: skip


def plant(store, column, value):
    """Spoils one column of the fast trial of config 5, behind the store's back."""
    store.add(KERNEL, trial(10.0))
    store.add(KERNEL, trial(0.001, 5))
    is_text = isinstance(value, bytes) and not value.startswith(b"\x80")
    with raw(store) as connection:
        new = "CAST(? AS TEXT)" if is_text else "?"
        connection.execute(f"UPDATE trials SET {column} = {new} WHERE us < 1", (value,))


@pytest.mark.parametrize(("column", "value"), BAD)
def test_bad_row_skipped(store, column, value):
    plant(store, column, value)
    with one_warning("not valid"):
        assert store.trials(KERNEL, PROBLEM) == [trial(10.0)]
        assert [found for _, found in store.all_trials()] == [trial(10.0)]
        assert store.best(KERNEL, PROBLEM) == trial(10.0)
        assert store.bests(KERNEL, "matmul") == [trial(10.0)]
    assert aside(store) == []


@pytest.mark.parametrize(
    "setting", ["processors = 'many'", "arch = x'80'", "triton = x'ff'", "l2_bytes = -1"]
)
def test_a_bad_environment_is_skipped(store, setting):
    store.add(KERNEL, trial(10.0))
    store.add("other", trial(1.0))
    sql(store, f"UPDATE environments SET {setting} WHERE kernel = 'other'")
    with one_warning("not valid"):
        assert [found for _, found in store.all_trials()] == [trial(10.0)]


# --- Merging ---


def test_merge_takes_newer(tmp_path):
    ours, theirs = Store(DEVICE, tmp_path / "a"), Store(DEVICE, tmp_path / "b")
    early, late = "2026-01-02T06:00:00+05:00", "2026-01-02T05:00:00+00:00"  # late by four hours
    ours.add(KERNEL, trial(1.0, 0, measured_utc=late))
    ours.add(KERNEL, trial(1.0, 1, measured_utc=early))
    for number in range(3):
        theirs.add(KERNEL, trial(2.0, number, measured_utc=late if number else early))
    theirs.add("other", trial(3.0))
    before = theirs.path.read_bytes()
    assert ours.merge(theirs.path) == 3
    assert [t.us for t in ours.trials(KERNEL, PROBLEM)] == [1.0, 2.0, 2.0]
    assert ours.best("other", PROBLEM) == trial(3.0)
    assert ours.merge(theirs.path) == ours.merge(ours.path) == 0
    assert theirs.path.read_bytes() == before
    newer = replace(DEVICE, triton="3.7.0")
    Store(newer, tmp_path / "c").add(KERNEL, trial(0.5))
    assert ours.merge(tmp_path / "c" / theirs.path.name) == 1
    assert ours.best(KERNEL, PROBLEM) == trial(1.0, measured_utc=late)
    assert Store(newer, tmp_path / "a").best(KERNEL, PROBLEM) == trial(0.5)


def test_merge_skips_bad_rows(tmp_path):
    ours, theirs = Store(DEVICE, tmp_path / "a"), filled(tmp_path / "b", 60)
    plant(theirs, "spread", "wide")  # of config 5
    with one_warning("not valid"):
        assert ours.merge(theirs.path) == 59
    packed = tmp_path / "theirs.sqlite3.gz"
    theirs.add(KERNEL, trial(4.0, 5))
    packed.write_bytes(gzip.compress(theirs.path.read_bytes()))
    assert ours.merge(packed) == 1
    assert ours.best(KERNEL, PROBLEM) == trial(4.0, 5)


def of_another_gpu(path):
    Store(TARGETS["sm_90"], path.parent).add(KERNEL, trial())
    path.with_name("nvidia-h100-80gb-hbm3.sqlite3").rename(path)


def of_a_newer_version(path):
    newer(filled(path.parent, 1), None)


@pytest.mark.parametrize(
    ("damage", "text"),
    [(damage, "not a store") for damage in (*DAMAGE, lambda path: path.touch())]
    + [(lambda path: None, "does not exist"), (of_another_gpu, "H100"), (of_a_newer_version, "newer")],
)
def test_merge_refuses_foreign(tmp_path, damage, text):
    (tmp_path / "b").mkdir()
    other, store = tmp_path / "b" / "nvidia-h200.sqlite3", Store(DEVICE, tmp_path / "a")
    damage(other)
    with pytest.raises(InvalidValueError, match=text):
        store.merge(other)
    assert store.all_trials() == []
    assert aside(Store(DEVICE, other.parent)) == []


# --- Many at once ---


def work(directory, report, start, count):
    """What a child does: add trials, and note each one that is added."""
    store = Store(DEVICE, directory)
    with report.open("ab", buffering=0) as done:
        for number in range(start, start + count):
            store.add(KERNEL, trial(1.0 + number, number))
            done.write(b"%d\n" % number)


def started(target, arguments):
    children = [FORK.Process(target=target, args=each) for each in arguments]
    for child in children:
        child.start()
    return children


def exit_codes(children):
    for child in children:
        child.join()
    return [child.exitcode for child in children]


@forks
def test_eight_processes_two_killed(tmp_path, monkeypatch):
    for wait in ("READ_S", "WRITE_S"):  # as long as it takes
        monkeypatch.setattr(store_module, wait, 1e6)
    reports = [tmp_path / f"report{index}" for index in range(8)]
    counts = [10**6, 10**6] + [10] * 6
    children = started(work, [(tmp_path, reports[i], 10_000 * i, counts[i]) for i in range(8)])

    def reported(index):
        return [int(line) for line in reports[index].read_text().split()] if reports[index].exists() else []

    for index in range(2):
        while len(reported(index)) < 4 * (index + 1):
            assert children[index].is_alive()
            time.sleep(0.001)
        os.kill(children[index].pid or 0, signal.SIGKILL)
    assert exit_codes(children) == [-signal.SIGKILL] * 2 + [0] * 6
    finished = [reported(index) for index in range(8)]
    assert [len(numbers) for numbers in finished[2:]] == [10] * 6
    store = Store(DEVICE, tmp_path)
    found = store.trials(KERNEL, PROBLEM)
    expected = {trial(1.0 + number, number) for numbers in finished for number in numbers}
    assert expected <= set(found)
    assert len(set(found)) == len(found) <= len(expected) + 2  # a killed one added, but did not say so
    assert sql(store, "PRAGMA integrity_check") == ("ok",)
    assert aside(store) == []


@forks
def test_child_forked_in_transaction(store, monkeypatch):
    monkeypatch.setattr(threads, "WAIT_S", 0.01)
    store.add(KERNEL, trial())
    working, done = threading.Event(), threading.Event()

    def work(_):
        working.set()
        done.wait()

    def child():
        with one_warning("the parent was using the file"):
            assert store.best(KERNEL, PROBLEM) is None
            store.add(KERNEL, trial(1.0))

    thread = threading.Thread(target=store._use, args=(work, None))
    thread.start()
    working.wait()
    children = started(child, [()])
    done.set()
    thread.join()
    assert exit_codes(children) == [0]
    assert store.trials(KERNEL, PROBLEM) == [trial()]
