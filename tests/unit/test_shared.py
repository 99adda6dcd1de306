"""A fleet's folder: hosts that share one know the same trials, and nothing wrong with it breaks a call."""

import errno
import json
import logging
import math
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.commands import refused, run
from tests.warned import one_warning
from tritile.core import settings
from tritile.core.config import Config
from tritile.core.device import TARGETS
from tritile.core.problem import KernelProblem, MatmulProblem
from tritile.errors import FileError, InvalidValueError, StoreWarning
from tritile.tuner.store import files, shared
from tritile.tuner.store import folder as folder_module
from tritile.tuner.store.folder import Folder, Line, provenance
from tritile.tuner.store.shared import SharedStore
from tritile.tuner.store.trial import Trial
from tritile.tuner.store.trials import ENVIRONMENT, Store, moment, row_of, store_of

DEVICE = replace(TARGETS["nvidia-h200"], triton="3.6.0", compiler="V12.8.93")
GPU = DEVICE.slug
KERNEL = "0123456789abcdef"
DAY = timedelta(days=1)
NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)
FORK = multiprocessing.get_context("fork")
forks = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


def problem(number=0):
    return MatmulProblem(1, 257 + number, 129, 65, "bfloat16", "bfloat16")


def trial(us=10.0, number=0, of=0, **changes):
    config = Config.of(BLOCK_M=64, BLOCK_N=16 * (number + 1), num_warps=4)
    return replace(Trial(problem(of), config, us, measured_utc="2026-01-02T03:04:05+00:00"), **changes)


def known(store):
    return {json.dumps([facts, row_of(each)]) for facts, each in store.all_trials()}


def is_valid(store):
    """True if no row of the store's file is one that reading skips."""
    rows = store._selected("SELECT count(*) FROM trials")
    return rows == [(len(store.all_trials()),)]


def objects(url):
    return Folder(url).objects(GPU)


def line_of(one, store, **more):
    facts = store._environment(KERNEL), (*row_of(one), None)
    return json.loads(Line(*facts, provenance(DEVICE)).text) | more


def put_raw(url, data, name="20260101T000000Z-0123456789abcdef"):
    path = Path(url, GPU, f"{name}.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode() + b"\n")
    return path


@pytest.fixture(autouse=True)
def _calm(monkeypatch):
    """No warning that a test does not expect, and no threads but where a test lets them start."""
    monkeypatch.setattr(SharedStore, "_wake", lambda store: store._say())
    with warnings.catch_warnings():
        warnings.simplefilter("error", StoreWarning)
        yield


WAKE = SharedStore._wake


@pytest.fixture
def threads(monkeypatch):
    """Threads, which end with the test."""
    monkeypatch.setattr(SharedStore, "_wake", WAKE)
    yield
    ended = [store._thread for store in shared._live]
    shared._close()
    assert not [thread for thread in ended if thread.is_alive()]
    shared._live.clear()


@pytest.fixture
def url(tmp_path):
    return str(tmp_path / "shared")


@pytest.fixture
def hosts(tmp_path, url):
    """Two hosts: each with a cache folder of its own, and a folder that both see."""
    return [SharedStore(DEVICE, tmp_path / name, url) for name in ("a", "b")]


# --- What hosts learn of each other ---


@pytest.mark.parametrize("kind", ["{}", "file://{}", "memory://{}"])
def test_both_learn(tmp_path, kind):
    place = kind.format(tmp_path / "shared")
    a, b = [SharedStore(DEVICE, tmp_path / name, place) for name in ("a", "b")]
    for number in range(500):
        (a, b)[number % 2].add(KERNEL, trial(10.0, 0, number), trial(12.0, 1, number, error=1e-3))
    a.add(KERNEL, Trial(KernelProblem("mine", (("s", "é\ud800"), ("n", None)), ()), Config.of(), 3.5))
    a.flush()
    b.flush()
    assert (len(objects(place)), a.pull(), b.pull()) == (2, 500, 501)
    assert known(a) == known(b)
    assert len(known(a)) == 1001
    assert (a.pull(), b.pull()) == (0, 0)
    a.flush()  # nothing waits
    assert len(objects(place)) == 2


def test_what_lines_say(hosts, url):
    a, _ = hosts
    a.add(KERNEL, trial(registers=96))
    a.flush()
    ((one,),) = [content.lines for content in Folder(url).read(objects(url))]
    text = Path(objects(url)[0].path).read_text()
    data = json.loads(text)
    assert text.endswith("}\n")
    assert {"format": 1, "name": "NVIDIA H200", "registers": 96, "us": 10.0}.items() <= data.items()
    assert set(one.provenance) == {"host", "driver", "clock_ghz", "torch", "tritile"} <= set(data)
    assert one.provenance["host"] == os.uname().nodename
    assert abs(moment(data["written_utc"]) - time.time()) < 3600
    assert set(data) >= set(ENVIRONMENT)
    assert set(data) >= {"problem", "op", "config", "measured_utc"}


def test_machines_faults_stay_at_home(hosts):
    """A hang or a full memory says nothing of the config elsewhere; what a compiler refuses does."""
    a, b = hosts
    a.add(
        KERNEL, trial(None, 0, failure="hung: 10 s"), trial(None, 1, failure="ptxas: too much shared memory")
    )
    a.flush()
    assert b.pull() == 1
    assert b.trials(KERNEL, problem()) == [trial(None, 1, failure="ptxas: too much shared memory")]
    assert b.exchange() == (0, 0) == a.exchange()


def test_only_this_gpu_counts(hosts, url):
    a, b = hosts
    line = line_of(trial(), a)
    put_raw(url, line | {"name": "NVIDIA H100"})
    put_raw(url, line | {"triton": "3.7.0"}, "20260101T000000Z-0123456789abcde1")
    assert b.pull() == 1
    assert b.trials(KERNEL, problem()) == []  # another Triton's
    ((facts, _),) = b.all_trials()
    assert facts["triton"] == "3.7.0"


def test_read_once(hosts, tmp_path, url, monkeypatch):
    """An object is read once for each store, whatever process reads it, and again if the store is new."""
    a, b = hosts
    a.add(KERNEL, trial())
    a.flush()
    reads = []
    cat = Folder(url).fs.cat_file
    monkeypatch.setattr(
        type(Folder(url).fs), "cat_file", lambda fs, path, *at: reads.append(path) or cat(path, *at)
    )
    assert (b.pull(), len(reads)) == (1, 1)
    again = SharedStore(DEVICE, tmp_path / "b", url)
    assert (again.pull(), len(reads)) == (0, 1)
    a.add(KERNEL, trial(9.0, 1))
    a.flush()
    reads.clear()
    assert (again.pull(), len(reads)) == (1, 1)
    b.path.unlink()
    assert (again.pull(), len(reads)) == (2, 3)
    b._index_path.write_text("damaged")
    assert (again.pull(), len(reads)) == (0, 5)
    again.clear()
    assert (again.pull(), again.exchange(), len(again.all_trials())) == (0, (2, 0), 2)


def test_half_an_object(hosts, url):
    """A file system that shows objects before they are whole; what is missing comes later."""
    a, b = hosts
    whole = b"".join(json.dumps(line_of(trial(number=number), a)).encode() + b"\n" for number in range(3))
    path = put_raw(url, whole[: len(whole) // 2])
    with one_warning("is not a trial"):
        assert b.pull() == 1
    assert Folder(url).compact(GPU) == (1, 1, 0)
    path.write_bytes(whole)
    assert b.pull() == 2


# --- Clocks ---


class Clock:
    """The folder's clock, and the host's that is at work, which is off by `skew`."""

    def __init__(self):
        self.time, self.skew = NOON, timedelta(0)

    def now(self):
        return self.time + self.skew

    def write(self, path, data):
        files.write_whole(path, data)
        os.utime(path, (self.time.timestamp(), self.time.timestamp()))

    def measure(self, host, us, skew, *place):
        self.skew = skew
        host.add(KERNEL, trial(us, *place, measured_utc=self.now().isoformat()))


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(folder_module, "now", clock.now)
    monkeypatch.setattr(shared, "now", clock.now)
    monkeypatch.setattr(folder_module, "write_whole", clock.write)
    return clock


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("skew", [-DAY, timedelta(0), DAY, 400 * DAY], ids=str)
@pytest.mark.parametrize("first", [0, 1])
def test_last_measured_wins(tmp_path, hosts, url, clock, first, skew, joined):
    """Whichever host measured last, and whichever clock is wrong: on all hosts, for good."""
    skews, third = (timedelta(0), skew), SharedStore(DEVICE, tmp_path / "c", url)
    for number, which in enumerate((first, 1 - first, first)):
        clock.time += timedelta(hours=1)
        clock.measure(hosts[which], 5.0 + number, skews[which])
        hosts[which].flush()
        clock.time += timedelta(minutes=1)
        if number and joined:
            assert Folder(url).compact(GPU) == (2, 1, 0)
        for host in (*hosts, third, *hosts) if number else ():
            host.pull()
            assert [each.us for each in host.trials(KERNEL, problem())] == [5.0 + number]
        if number:
            assert known(hosts[0]) == known(hosts[1]) == known(third)
            ((_, found),) = third.all_trials()
            assert abs(moment(found.measured_utc) - clock.time.timestamp()) < 120


def test_late_flush_keeps_the_date(hosts, clock):
    """What waited for hours to be written was measured when it was measured."""
    clock.measure(hosts[0], 5.0, DAY)
    clock.time += timedelta(hours=5)
    hosts[0].flush()
    for host in hosts:
        host.pull()
        assert [each.measured_utc for _, each in host.all_trials()] == [NOON.isoformat()]


def test_as_new_alike_everywhere(hosts):
    a, b = hosts
    a.add(KERNEL, trial(5.0))
    b.add(KERNEL, trial(6.0))
    for host in (a, b, a):
        host.flush()
        host.pull()
    assert known(a) == known(b)
    assert [each.us for _, each in a.all_trials()] == [6.0]


@pytest.mark.parametrize("checked", [{"error": 1e-4}, {"us": None, "failure": "wrong answer"}])
@pytest.mark.parametrize("how", ["at once", "apart", "joined", "killed"])
def test_checks_travel(hosts, url, how, checked):
    """A check, which leaves a trial its time and date, counts on all hosts, however it was written."""
    a, b = hosts
    a.add(KERNEL, timed := trial(9.0))
    if how != "at once":
        a.flush()
        b.pull()
    a.add(KERNEL, right := replace(timed, **checked))
    if how == "killed":
        a._queue.clear()
        assert a.exchange() == (0, 1)
    a.flush()
    if how == "joined":
        Folder(url).compact(GPU)
    for host in hosts:
        host.pull()
        assert [each for _, each in host.all_trials()] == [right]
        assert host.exchange() == (0, 0)


@pytest.mark.parametrize("claimed", ["9999-12-31T23:59:59+00:00", "20990101T000000Z", "2100-W01-1"])
def test_claims_of_the_future_end(hosts, url, claimed):
    """No line is later than its object, and no object later than now by more than two days."""
    a, b = hosts
    path = put_raw(url, line_of(trial(1.0), a, measured_utc=claimed, written_utc="0001-01-01T00:00:00"))
    os.utime(path, (4e9, 4e9))
    b.pull()
    ((_, found),) = b.all_trials()
    assert moment(found.measured_utc) < time.time() + 2 * 86400 + 60
    a.add(KERNEL, trial(2.0, measured_utc=datetime.fromtimestamp(time.time() + 3 * 86400, UTC).isoformat()))
    b.take([(a._environment(KERNEL), (*row_of(a.all_trials()[0][1]), None))])
    assert [each.us for _, each in b.all_trials()] == [2.0]


# --- Lines and files that are wrong, by accident or on purpose ---


def hostile(line):
    """What an adversary may put in the place of a line."""
    texts = [
        b"", b"\x00" * 1000, b"null", b"[]", b"3", b'"text"', b"[" * 100_000, b"{" * 50_000, b'{"a":' * 2000,
        b"\xff\xfe", json.dumps(line).encode("utf-16"), json.dumps(line).encode()[:-40],
        b'{"format": 1}', b'{"format": NaN}', b"9" * 5000, b" " * (2 << 20), b"x" * (2 << 20),
    ]  # fmt: skip
    values = [
        None, True, -1, 0, 10**30, 1e400, -1e400, math.nan, "", "\ud800", "x" * 70_000, [], {}, [[]] * 50,
        "2026-13-45", "0000-00-00T00:00:00", "9" * 4000, "__import__('os').system('true')",
    ]  # fmt: skip
    for name in line:
        texts += [json.dumps(line | {name: value}).encode() for value in values]
        texts.append(json.dumps({key: value for key, value in line.items() if key != name}).encode())
    return [text for text in texts if b"\n" not in text]


def fuzzed(line, seed, count):
    """Lines with some bytes changed, lost or doubled."""
    drawn, raw = random.Random(seed), json.dumps(line).encode()
    for _ in range(count):
        text = bytearray(raw)
        for _ in range(drawn.choice((1, 1, 2, 5, 40))):
            place = drawn.randrange(len(text) + 1)
            kind = drawn.randrange(3)
            if kind == 0:
                text[place : place + drawn.randrange(1, 30)] = b""
            elif kind == 1:
                text[place:place] = drawn.choice(
                    (bytes(drawn.choices(range(256), k=3)), b"1e999", b'"', b"\\ud800")
                )
            elif place < len(text):
                text[place] ^= 1 << drawn.randrange(8)
        yield bytes(text).replace(b"\n", b" ")


@pytest.mark.parametrize("seed", range(3))
def test_hostile_lines(hosts, url, seed):
    """One warning; whole trials of the same objects are taken, and all that is taken is valid."""
    a, b = hosts
    line = line_of(trial(of=1, registers=3, error=1e-3, spread=0.1), a, written_utc="2026-01-02T03:05:00")
    bad = [*fuzzed(line, seed, 1500), *(hostile(line) if seed == 0 else ())]
    good = [trial(5.0 + number, number, 2) for number in range(10)]
    mixed = [*bad, *(json.dumps(line_of(each, a)).encode() for each in good)]
    random.Random(seed).shuffle(mixed)
    for part in range(10):
        put_raw(url, b"\n".join(mixed[part::10]) + b"\n", f"20260101T000000Z-{part:016x}")
    with one_warning("skipped what is not valid"):
        b.pull()
        b.pull()
    assert is_valid(b)
    assert sorted(each.us for each in b.trials(KERNEL, problem(2))) == [each.us for each in good]
    b.exchange()
    c = SharedStore(DEVICE, a.path.parent, url)
    with one_warning("skipped what is not valid"):
        c.exchange()
    assert known(b) == known(c)
    Folder(url).compact(GPU)  # joins those without a line that may be another version's
    d = SharedStore(DEVICE, a.path.parent.with_name("d"), url)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StoreWarning)
        d.pull()
    assert is_valid(d)
    assert known(d) == known(b)


def test_hostile_files(hosts, url, tmp_path):
    """Pipes, links, folders, giants, other names; nothing hangs, and a whole object is read all the same."""
    a, b = hosts
    good = put_raw(url, line_of(trial(), a))
    (tmp_path / "elsewhere").write_bytes(json.dumps(line_of(trial(1.0, 1), a)).encode() + b"\n")
    name = "20260101T000000Z-{:016x}.jsonl".format
    os.mkfifo(good.with_name(name(1)))
    good.with_name(name(2)).symlink_to(tmp_path / "elsewhere")
    good.with_name(name(3)).symlink_to("/dev/zero")
    good.with_name(name(4)).mkdir()
    good.with_name(name(5)).touch()
    with good.with_name(name(6)).open("wb") as file:
        file.truncate(1 << 40)
    shutil.copy(tmp_path / "elsewhere", good.with_name("other.jsonl"))
    shutil.copy(tmp_path / "elsewhere", good.with_name(f".{name(7)}.host.1.tmp"))
    (good.parents[1] / "\x1b[31m").mkdir()
    with one_warning("more than 4 MiB"):
        assert b.pull() == 1
    assert b.trials(KERNEL, problem()) == [trial()]
    assert Folder(url).gpus() == [GPU]
    Folder(url).compact(GPU)
    assert len([*good.parent.iterdir()]) == 9


def test_other_schema(hosts, url):
    """Lines of another format are skipped with a warning; compaction leaves them to whoever knows them."""
    a, b = hosts
    a.add(KERNEL, trial())
    a.flush()
    newer = put_raw(url, line_of(trial(1.0, 1), a, format=2, layout="new"))
    before = newer.read_bytes()
    put_raw(url, line_of(trial(2.0, 2), a), "20260101T000000Z-0123456789abcde1")
    with one_warning("its format is not 1"):
        assert b.pull() == 2
    assert Folder(url).compact(GPU) == (3, 2, 0)
    assert newer.read_bytes() == before


# --- Folders that cannot be used ---


class Faulty(MemoryFileSystem):
    """A file system that fails, or hangs, as `fault` says."""

    protocol = "faulty"
    cachable = False
    store, pseudo_dirs = {}, [""]

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("faulty://", "/"))

    fault = None
    go_on = threading.Event()

    def _check(self, writes):
        kind = type(self).fault
        if kind == "unreachable":
            raise ConnectionError("no route to host")
        if kind == "odd":
            raise ZeroDivisionError
        if kind == "hung":
            self.go_on.wait()
        if writes and kind == "read-only":
            raise PermissionError(errno.EROFS, "Read-only file system")
        if writes and kind == "full":
            raise OSError(errno.ENOSPC, "No space left on device")

    def ls(self, path, detail=True, **options):
        self._check(False)
        return super().ls(path, detail, **options)

    def cat_file(self, *arguments, **options):
        self._check(False)
        return super().cat_file(*arguments, **options)

    def pipe_file(self, *arguments, **options):
        self._check(True)
        return super().pipe_file(*arguments, **options)


@pytest.fixture
def faulty():
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    Faulty.store.clear()
    Faulty.fault = None
    Faulty.go_on.clear()
    yield Faulty
    Faulty.fault = None
    Faulty.go_on.set()


def until(condition):
    while not condition():
        time.sleep(0.01)


BROKEN = {
    "unreachable": "no route to host",
    "odd": "ZeroDivisionError",
    "read-only": "Read-only",
    "full": "No space left",
    "hung": "no answer",
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_folder(tmp_path, faulty, threads, monkeypatch, fault):
    """Calls go on with the store, with one warning; what could not be written is there once it can be."""
    monkeypatch.setattr(shared, "FLUSH_S", 0.0)
    monkeypatch.setattr(shared, "PULL_S", 0.0)
    monkeypatch.setattr(shared, "_HUNG_S", 0.0 if fault == "hung" else 600.0)
    a = SharedStore(DEVICE, tmp_path / "a", "faulty://place")
    if fault == "read-only":
        Folder(a.url).put(GPU, [Line(a._environment(KERNEL), (*row_of(trial(7.0, 7)), None), {})])
    faulty.fault = fault
    with one_warning(BROKEN[fault]):
        for number in range(3):
            assert a.trials(KERNEL, problem(99)) == []
            a.add(KERNEL, trial(10.0 + number, number))
            if fault != "hung":
                until(a._settled.is_set)
                a._settled.clear()
        until(lambda: a._notes or a._since < math.inf or "shared" in a._warned)
        a._say()
    assert [each.us for each in a.trials(KERNEL, problem()) if each.us >= 10] == [10.0, 11.0, 12.0]
    if fault == "read-only":
        until(lambda: a.trials(KERNEL, problem(98)) == [] and len(a.trials(KERNEL, problem())) == 4)
    monkeypatch.setattr(shared, "_HUNG_S", 600.0)
    faulty.fault = None
    faulty.go_on.set()
    b = SharedStore(DEVICE, tmp_path / "b", a.url)
    until(lambda: a._woken.set() or (b.pull() >= 0 and len(b.trials(KERNEL, problem())) >= 3))
    assert {10.0, 11.0, 12.0} <= {each.us for each in b.trials(KERNEL, problem())}


def test_unusable_path(tmp_path):
    (tmp_path / "file").write_text("")
    a = SharedStore(DEVICE, tmp_path / "a", str(tmp_path / "file" / "folder"))
    a.add(KERNEL, trial())
    with pytest.raises(NotADirectoryError):
        a.flush()
    with pytest.raises(FileError, match="NotADirectoryError"):
        a.exchange()
    assert a.trials(KERNEL, problem()) == [trial()]


def test_one_object_cannot_be_read(tmp_path, faulty):
    a, b = [SharedStore(DEVICE, tmp_path / name, "faulty://place") for name in ("a", "b")]
    for number in range(3):
        a.add(KERNEL, trial(number=number))
        a.flush()
    refused_path, cat = objects(a.url)[1].path, MemoryFileSystem.cat_file

    def cat_file(self, path, *arguments):
        if path == refused_path:
            raise PermissionError("not yours")
        return cat(self, path, *arguments)

    with pytest.MonkeyPatch.context() as patched, one_warning("not yours"):
        patched.setattr(Faulty, "cat_file", cat_file)
        assert b.pull() == 2
        assert Folder(a.url).compact(GPU)[0] == 3
    assert b.pull() == 1


def test_waiting_trials_are_bounded(tmp_path, faulty, monkeypatch):
    monkeypatch.setattr(shared, "_MAX_QUEUED", 5)
    a = SharedStore(DEVICE, tmp_path / "a", "faulty://place")
    faulty.fault = "full"
    for number in range(8):
        a.add(KERNEL, trial(number=number))
        with pytest.raises(OSError, match="No space left"):
            a.flush()
    faulty.fault = None
    a.flush()
    ((*_, lines),) = [(content.lines,) for content in Folder(a.url).read(objects(a.url))]
    assert len(lines) == 5
    assert a.exchange() == (0, 3)


# --- Threads and processes ---


def test_thread_writes_and_reads(tmp_path, url, threads, monkeypatch):
    monkeypatch.setattr(shared, "FLUSH_S", 0.0)
    monkeypatch.setattr(shared, "_FIRST_S", 600.0)  # however slow the machine is
    a, b = [SharedStore(DEVICE, tmp_path / name, url) for name in ("a", "b")]
    a.add(KERNEL, trial())
    until(lambda: objects(url))
    assert b.trials(KERNEL, problem()) == [trial()]  # the first miss waits
    a.add(KERNEL, trial(of=1))
    until(lambda: len(objects(url)) == 2)
    assert b.trials(KERNEL, problem(1)) == []  # at most once a minute
    monkeypatch.setattr(shared, "PULL_S", 0.0)
    b._pull_at = 0.0
    until(lambda: b.trials(KERNEL, problem(1)))


def test_catch_up(tmp_path, faulty, threads):
    """Both ways, and without a look-up; however long the folder takes, as long as it answers."""
    a, b = [SharedStore(DEVICE, tmp_path / name, "faulty://place") for name in ("a", "b")]
    a.add(KERNEL, trial())
    a.catch_up()
    faulty.fault = "hung"
    threading.Timer(0.5, faulty.go_on.set).start()
    b.catch_up()
    assert known(b) == known(a)


@pytest.mark.parametrize("fault", ["unreachable", "hung"])
def test_catch_up_without_folder(tmp_path, faulty, threads, monkeypatch, fault):
    monkeypatch.setattr(shared, "_HUNG_S", 0.0)
    a, faulty.fault = SharedStore(DEVICE, tmp_path / "a", "faulty://place"), fault
    with one_warning(BROKEN[fault]):
        a.catch_up()
        a.catch_up()
    faulty.go_on.set()


def test_store_of_shares(tmp_path, monkeypatch, url):
    assert type(store_of(DEVICE)) is Store
    monkeypatch.setenv("TRITILE_SHARED", url)
    assert (store_of(DEVICE).url, store_of(DEVICE).path.parent) == (url, tmp_path)
    assert store_of(DEVICE) is store_of(DEVICE)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", None), ("s3://bucket/path", "s3://bucket/path"), ("simplecache::gs://b", "simplecache::gs://b"),
        ("/nfs/x", "/nfs/x"), ("~/x", "{home}/x"), ("x", "{cwd}/x"),
    ],
)  # fmt: skip
def test_shared_url(monkeypatch, value, expected):
    monkeypatch.setenv("TRITILE_SHARED", value)
    places = {"home": Path.home(), "cwd": Path.cwd()}
    assert settings.shared_url() == (expected and expected.format(**places))


def test_shared_url_unknown_user(monkeypatch):
    monkeypatch.setenv("TRITILE_SHARED", "~nosuchuser/x")
    with pytest.raises(InvalidValueError, match="TRITILE_SHARED"):
        settings.shared_url()


SCRIPT = """
import os, sys
from tests.unit.test_shared import *
store = SharedStore(DEVICE, Path(sys.argv[1]), sys.argv[2])
fsspec.register_implementation("faulty", Faulty)
Faulty.fault = sys.argv[3]
store.add(KERNEL, trial())
"""


@pytest.mark.parametrize("fault", ["none", "hung", "full"])
def test_flush_at_exit(tmp_path, fault):
    """A process that ends writes what waits; one that cannot ends all the same, and says so."""
    place = str(tmp_path / "shared") if fault == "none" else "faulty://place"
    command = [sys.executable, "-c", SCRIPT, tmp_path / "a", place, fault]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert ("No space left" in done.stderr) == (fault == "full")
    if fault == "none":
        b = SharedStore(DEVICE, tmp_path / "b", place)
        assert (b.pull(), b.trials(KERNEL, problem())) == (1, [trial()])


@forks
def test_fork(tmp_path, url, threads, monkeypatch):
    """A child has a thread of its own, and does not write what waits in the parent."""
    a = SharedStore(DEVICE, tmp_path / "a", url)
    a.add(KERNEL, trial())

    def child():
        assert a._queue == []
        a.add(KERNEL, trial(of=1))
        shared._close()

    process = FORK.Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0
    ((content,), (one,)) = [*Folder(url).read(objects(url))], objects(url)
    assert (content.object, [line.row[0] for line in content.lines]) == (one, [row_of(trial(of=1))[0]])
    a.flush()
    assert len(objects(url)) == 2


def writer(directory, url, skew, seed, go):
    """Measure and write until killed."""
    folder_module.now = shared.now = lambda: datetime.now(UTC) + skew
    store, drawn = SharedStore(DEVICE, directory, url), random.Random(seed)
    go.set()
    while True:
        when = shared.now().isoformat(timespec="seconds")
        of = drawn.randrange(500)
        store.add(
            KERNEL, *(trial(drawn.uniform(1, 100), number, of, measured_utc=when) for number in range(2))
        )
        if drawn.random() < 0.3:
            store.flush()


@forks
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killed_writers(tmp_path, hosts, url, seed):
    """Two hosts, 500 problems, a clock that is a day off, writers killed, lines torn: both know all."""
    drawn = random.Random(seed)
    for round_ in range(4):
        writers = []
        for host, skew in zip(hosts, (timedelta(0), DAY if seed % 2 else -DAY), strict=True):
            go = FORK.Event()
            process = FORK.Process(
                target=writer, args=(host.path.parent, url, skew, drawn.random(), go), daemon=True
            )
            process.start()
            assert go.wait(60)
            writers.append(process)
        time.sleep(drawn.uniform(0.2, 1.5))
        for process in writers:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            assert process.exitcode == -signal.SIGKILL
        whole = objects(url)
        for each in drawn.sample(whole, min(2, len(whole))):  # by a disk, say, or an upload
            raw = Path(each.path).read_bytes()
            put_raw(url, raw[: drawn.randrange(len(raw))], f"20260101T000000Z-{drawn.getrandbits(64):016x}")
        if round_ == 2:
            Folder(url).compact(GPU)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StoreWarning)
            hosts[round_ % 2].pull()
    mine = {(row_of(each)[0], each.config) for host in hosts for _, each in host.all_trials()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StoreWarning)
        for host in (*hosts, *hosts):
            host.exchange()
        contents = [*Folder(url).read(objects(url))]
    there = {line.place for content in contents for line in content.lines}
    assert known(hosts[0]) == known(hosts[1])
    assert len(known(hosts[0])) == len(there) == len(mine) > 100
    assert {(row_of(each)[0], each.config) for _, each in hosts[0].all_trials()} == mine
    assert all(map(is_valid, hosts))
    assert all(moment(each.measured_utc) < time.time() + 61 for _, each in hosts[0].all_trials())


# --- Many objects ---


def test_compact(tmp_path, hosts, url):
    """Readers that saw the objects, the joined one, or both, end alike."""
    a, b = hosts
    for number in range(30):
        when = (NOON + timedelta(hours=number)).isoformat()
        a.add(KERNEL, trial(10.0 + number, number % 7, measured_utc=when), trial(of=number))
        a.flush()
    put_raw(url, json.dumps(line_of(trial(of=500), a)).encode() + b'\n{"format": 1, "torn\n')
    b.add(KERNEL, trial(of=501))
    b.flush()
    with one_warning("is not a trial"):
        b.pull()  # before
    kept = tmp_path / "kept"
    shutil.copytree(url, kept)
    assert Folder(url).compact(GPU) == (32, 1, 1)
    after = SharedStore(DEVICE, tmp_path / "after", url)
    assert after.pull() == 38
    assert known(after) == known(b)
    assert b.pull() == 0
    shutil.copytree(kept, url, dirs_exist_ok=True)
    both = SharedStore(DEVICE, tmp_path / "both", url)
    with one_warning("is not a trial"):
        assert both.exchange()[1] == 0
    assert known(both) == known(b)
    assert Folder(url).compact(GPU)[1] == 1
    assert Folder(url).compact(GPU) == (1, 1, 0)


def test_compact_killed(tmp_path, hosts, url, monkeypatch):
    """A compaction that dies between writing and deleting, and readers whose objects it deletes meanwhile."""
    a, b = hosts
    for number in range(4):
        a.add(KERNEL, trial(of=number))
        a.flush()
    listed = Folder(url)
    stale = listed.objects(GPU)
    monkeypatch.setattr(type(listed.fs), "rm_file", lambda fs, path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        listed.compact(GPU)
    monkeypatch.undo()
    assert (len(objects(url)), b.pull()) == (5, 4)
    assert Folder(url).compact(GPU) == (5, 1, 0)
    assert [*Folder(url).read(stale)] == []
    assert b.pull() == 0


def test_large_objects_stay(hosts, url, monkeypatch):
    """Joining writes several objects where one would be too large, and leaves large ones alone."""
    a, _ = hosts
    for number in range(12):
        a.add(KERNEL, trial(of=number))
        a.flush()
    size = objects(url)[0].size
    monkeypatch.setattr(folder_module, "MAX_OBJECT", 5 * size)
    assert Folder(url).compact(GPU) == (12, 3, 0)
    assert [each.size // (size - 50) for each in sorted(objects(url), key=lambda each: -each.size)][:2] == [
        5,
        5,
    ]
    assert Folder(url).compact(GPU) == (3, 3, 0)


@pytest.mark.slow
def test_100_000_trials(tmp_path, url):
    """In 1,000 objects: all are taken, once."""
    a = Store(DEVICE, tmp_path / "a")
    text = json.dumps(line_of(trial(12345.5, 999, 99999), a))
    key, config = row_of(trial(of=99999))[0], trial(number=999).config.key
    assert text.count("100256") == text.count("16000") == text.count("12345.5") == 1
    assert ("100256" in key, "16000" in config) == (True, True)
    for number in range(1000):
        lines = [
            text.replace("100256", str(257 + number // 2))
            .replace("16000", str(16 * (1 + number % 2 * 100 + each)))
            .replace("12345.5", str(10.5 + each))
            for each in range(100)
        ]
        put_raw(url, "".join(f"{line}\n" for line in lines).encode(), f"20260101T000000Z-{number:016x}")
    b = SharedStore(DEVICE, tmp_path / "b", url)
    assert (b.pull(), b.pull()) == (100_000, 0)
    for of in (0, 250, 499):
        found = b.trials(KERNEL, problem(of))
        assert len(found) == len({each.config for each in found}) == 200
        assert {each.us for each in found} == {10.5 + each for each in range(100)}
    assert b.trials(KERNEL, problem(500)) == []


@pytest.mark.parametrize("seed", range(8))
def test_drawn_histories(tmp_path, url, seed, clock):
    """Hosts with clocks of their own measure, write, read, join, lose their store; at rest all agree."""
    drawn = random.Random(seed)
    hosts = [SharedStore(DEVICE, tmp_path / name, url) for name in "abc"]
    skews = [timedelta(seconds=drawn.choice((0, 5, -86400, 86400, 3000))) for _ in hosts]
    kinds = "measure", "measure", "measure", "flush", "flush", "pull", "compact", "exchange", "lose"
    history, checked = {}, set()
    for _ in range(150):
        clock.time += timedelta(seconds=drawn.choice((1, 70, 1000)))
        which, kind = drawn.randrange(3), drawn.choice(kinds)
        host, clock.skew = hosts[which], skews[which]
        if kind == "measure":
            place = drawn.randrange(3), drawn.randrange(4)
            clock.measure(host, us := drawn.uniform(1, 9), skews[which], *place)
            history.setdefault((problem(place[1]), trial(us, *place).config), []).append((clock.time, us))
            if drawn.random() < 0.5:
                checked.add(us)
                if drawn.random() < 0.5:
                    host.flush()
                host.add(KERNEL, trial(us, *place, error=1e-4, measured_utc=clock.now().isoformat()))
        elif kind == "compact":
            Folder(url).compact(GPU)
        elif kind == "lose":  # once it has written what it knew
            host.exchange()
            host.path.unlink(missing_ok=True)
            hosts[which] = SharedStore(DEVICE, host.path.parent, url)
        else:
            getattr(host, kind)()
    for which in (0, 1, 2, 0, 1, 2):
        clock.time += timedelta(seconds=100)
        clock.skew = skews[which]
        hosts[which].exchange()
    assert known(hosts[0]) == known(hosts[1]) == known(hosts[2])
    found = {(each.problem, each.config): each.us for _, each in hosts[0].all_trials()}
    assert {each.us for _, each in hosts[0].all_trials() if each.error} == checked & {*found.values()}
    assert found.keys() == history.keys()
    for place, us in found.items():  # clocks may differ by a minute
        latest = history[place][-1][0]
        assert us in [one for when, one in history[place] if latest - when < timedelta(minutes=2)]


# --- A cache folder on a network ---


MOUNTS = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 27 0:40 / /home rw shared:2 - autofs auto.home rw
31 30 0:41 / /home/me rw shared:3 master:1 - {kind} server:/export rw
32 31 0:42 / /home/me/my\\040scratch rw - tmpfs tmpfs rw
33 27 0:43 / /data rw - nfs4 server:/data rw
34 27 0:44 / /data rw - xfs /dev/vdb rw
"""


@pytest.fixture
def mounts(tmp_path, monkeypatch):
    def mount(kind):
        (tmp_path / "mountinfo").write_text(MOUNTS.format(kind=kind))
        monkeypatch.setattr(settings, "_MOUNTS", tmp_path / "mountinfo")
        settings._of_node.cache_clear()

    yield mount
    settings._of_node.cache_clear()


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/home/me/.cache", "nfs4"), ("/home/me", "nfs4"), ("/home/mean", "autofs"), ("/tmp", "ext4"),
        ("/home/me/my scratch/x", "tmpfs"), ("/data/x", "xfs"), ("/home/me/../me/x", "nfs4"),
    ],
)  # fmt: skip
def test_file_system(mounts, folder, kind):
    mounts("nfs4")
    assert settings._file_system(Path(folder)) == kind


def test_file_system_unknown(monkeypatch):
    monkeypatch.setattr(settings, "_MOUNTS", Path("/nonexistent"))
    assert settings._file_system(Path("/home")) == ""


@pytest.mark.parametrize(
    ("kind", "moves"),
    [
        ("nfs", True), ("nfs4", True), ("cifs", True), ("smb3", True), ("lustre", True), ("gpfs", True),
        ("beegfs_nodev", True), ("ceph", True), ("fuse.sshfs", True), ("fuse.gcsfuse", True),
        ("fuse.juicefs", True), ("fuse.ceph-fuse", True), ("fuse.mountpoint-s3", True),
        ("ext4", False), ("xfs", False), ("overlay", False), ("tmpfs", False), ("zfs", False), ("9p", False),
        ("fuse.fuse-overlayfs", False), ("fuseblk", False),
    ],
)  # fmt: skip
def test_network_file_systems(tmp_path, mounts, monkeypatch, caplog, kind, moves):
    """There the store goes to the node, and the cache folder is what hosts share; a line says so."""
    mounts(kind)
    cache, temporary = Path("/home/me/.cache/tritile"), tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(settings.tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TRITILE_CACHE_DIR", str(cache))
    with caplog.at_level(logging.INFO, "tritile.tune"):
        folder, found = settings.store_dir(), settings.shared_url()
        assert (settings.store_dir(), settings.cache_dir()) == (folder, cache)
    assert found == (str(cache) if moves else None)
    assert (folder.parent == temporary / f"tritile-{os.geteuid()}") == moves == (folder != cache)
    assert [record.levelname for record in caplog.records] == ["INFO"] * moves
    if moves:
        assert kind in caplog.text
        assert folder.parent.stat().st_mode & 0o777 == 0o700
        monkeypatch.setenv("TRITILE_SHARED", "s3://bucket")
        assert (settings.store_dir(), settings.shared_url()) == (folder, "s3://bucket")
        monkeypatch.setenv("TRITILE_CACHE_DIR", str(cache / "other"))
        assert settings.store_dir() != folder


def test_earlier_store_on_a_network(tmp_path, mounts, monkeypatch):
    """What an earlier version kept there is taken over, and a damaged file of it costs a warning."""
    cache = tmp_path / "home"
    monkeypatch.setenv("TRITILE_CACHE_DIR", str(cache))
    Store(DEVICE, cache).add(KERNEL, trial())
    (tmp_path / "mountinfo").write_text(f"31 30 0:41 / {cache} rw - nfs4 server:/export rw\n")
    monkeypatch.setattr(settings, "_MOUNTS", tmp_path / "mountinfo")
    monkeypatch.setattr(settings.tempfile, "tempdir", str(tmp_path))
    settings._of_node.cache_clear()
    store = store_of(DEVICE)
    assert (store.url, store.path.parent == cache) == (str(cache), False)
    assert (store.pull(), store.trials(KERNEL, problem())) == (0, [trial()])
    assert store.exchange() == (0, 1)
    assert SharedStore(DEVICE, tmp_path / "c", str(cache)).pull() == 1
    store.path.unlink()
    store.path.with_suffix(".shared.json").unlink()
    (cache / store.path.name).write_bytes(b"damaged" * 1000)
    with one_warning("is not a store"):
        assert store.pull() == 1
    settings._of_node.cache_clear()


# --- Commands ---


def test_commands(tmp_path, url, monkeypatch):
    monkeypatch.setenv("TRITILE_SHARED", url)
    h200 = TARGETS["nvidia-h200"]
    a = SharedStore(h200, tmp_path / "a", url)
    for number in range(3):
        a.add(KERNEL, trial(of=number))
        a.flush()
    Store(h200).add(KERNEL, trial(of=7))
    assert f"3 trials taken from {url}, 1 written there" in run("pull", "--target", "h200").stdout
    assert len(store_of(h200).all_trials()) == 4 == a.pull() + 3
    found = json.loads(run("show", "--shared", "--json").stdout)
    facts = {"gpu": GPU, "objects": 4, "trials": 4, "hosts": [os.uname().nodename], "skipped": 0}
    assert found == {"folder": url, "gpus": [facts | {"newest_utc": "2026-01-02T03:04:05+00:00"}]}
    assert run("compact").stdout == f"{GPU}: 4 objects before, 1 now\n"
    title, names, cells = run("show", "--shared", "--target", "h200").stdout.splitlines()
    row = dict(zip(names.split(), cells.split(), strict=True))
    assert title == url
    assert row == {
        "gpu": GPU, "newest": "2026-01-02T03:04", "hosts": "1", "objects": "1", "trials": "4", "skipped": "0"
    }  # fmt: skip
    put_raw(url, b"torn\n")
    put_raw(url, b"torn\n", "20260101T000000Z-0123456789abcde1")
    assert run("compact", url).stdout == f"{GPU}: 3 objects before, 1 now, 2 invalid lines dropped\n"
    assert f"what {url} has stays there" in run("clear", "--target", "h200", "--yes").stdout


def test_commands_refuse(tmp_path, monkeypatch, url):
    for command in (["pull", "--target", "h200"], ["compact"], ["show", "--shared"]):
        assert "set TRITILE_SHARED" in refused(*command)
    monkeypatch.setenv("TRITILE_SHARED", "nosuchthing://x")
    for command in (["pull", "--target", "h200"], ["compact"], ["show", "--shared"]):
        assert "nosuchthing" in refused(*command, status=1)
    assert "FileNotFoundError" in refused("compact", url, status=1)
    assert "--kernel nor --trials" in refused("show", "--shared", "--trials")
