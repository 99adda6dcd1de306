"""Run the pipeline of tuning on made-up subjects, in real processes: every fault costs one config alone."""

import contextlib
import math
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.unit import helpers_for_fork_servers as helpers
from tests.unit.fake_subjects import Fake, config
from tests.unit.helpers_for_fork_servers import LONG_S, QuickForkServer
from tritile.core.config import Config
from tritile.core.device import HOST
from tritile.errors import UnsupportedError
from tritile.planning.store import Store
from tritile.planning.trial import Trial
from tritile.tune.measure.child import Child, ChildError, ForkServer
from tritile.tune.measure.engine import tune
from tritile.tune.measure.pool import CompilePool
from tritile.tune.measure.tasks import Rules, Task, has_more
from tritile.tune.measure.timing import settled, slower
from tritile.tune.measure.workshop import Workshop
from tritile.tune.spaces import Listed

RULES = Rules(exhaustive=True, problem_s=math.inf)


@pytest.fixture(scope="module")
def shop(server):
    limits = {"limit_s": helpers.SCREEN_S, "compile_s": helpers.COMPILE_S}
    with Workshop(None, jobs=1, **limits, fork_server=QuickForkServer(server)) as shop:
        yield shop


@pytest.fixture(scope="module")
def fork_server(server):
    fork_server = QuickForkServer(server)
    yield fork_server
    fork_server.close()


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Start a fork server as a program of its own, where a file and a path could mislead it."""
    folder, fork_server = tmp_path_factory.mktemp("misleading"), ForkServer()
    (folder / "json.py").write_text("raise SystemExit('imported')")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path, folder])  # a Path, which Python passes over
        first = Child(fork_server)
        assert first.ask(len, "ab", limit_s=LONG_S) == 2
        first.close()
    yield fork_server
    fork_server.close()


@pytest.fixture
def child(fork_server):
    child = Child(fork_server)
    yield child
    child.close()


def run(shop, folder, *configs, rules=RULES, **rest):
    """Tune one fake; what came of it, and the trials that were kept, the last of each config."""
    kept = {}
    task = Task(Fake(str(folder)), Listed(configs), **rest)
    (tuned,) = tune([task], shop, rules, lambda digest, trial: kept.__setitem__(trial.config, trial))
    return tuned, kept


def test_the_fastest_wins_and_is_checked(shop, tmp_path):
    configs = [config(speed) for speed in (30, 10, 20)]
    tuned, kept = run(shop, tmp_path, *configs)
    assert tuned.best.config == configs[1]
    assert tuned.best.error == 1e-4
    assert {c["SPEED"]: t.us for c, t in kept.items()} == {30: 30.0, 10: 10.0, 20: 20.0}
    assert kept[configs[0]].error is None  # only the winner was checked
    assert tuned.trials == 3


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("refused", "ValueError: a tile too small"),
        ("compiler aborts", "the process died: SIGABRT: LLVM ERROR: cannot select"),
        ("compiler hangs", f"hung: no answer in {helpers.COMPILE_S} s"),
        ("does not load", "RuntimeError: out of shared memory"),
        ("hangs", f"hung: no answer in {helpers.SCREEN_S} s"),
        ("crashes", "the process died: SIGABRT: an illegal memory access"),
        ("killed always", "the process died: SIGKILL"),
        ("scribbles", "garbled: its answer cannot be read: OSError: bad message length"),
        ("too large", "OutOfMemoryError: no room for a workspace"),
        ("broken clock", "it was timed at -1 us"),
        ("wrong", "wrong answer: relative error 1, above 0.001"),
        ("crashes when checked", "the process died: SIGABRT: an illegal memory access"),
    ],
)
def test_a_fault_costs_its_config_alone_and_says_why(shop, tmp_path, monkeypatch, fault, reason):
    helpers.expire_when_hung(monkeypatch, tmp_path)
    bad, good, slow = config(1, fault), config(2), config(3)
    tuned, kept = run(shop, tmp_path, slow, bad, good)
    assert tuned.best.config == good
    assert kept[bad].failure == reason
    assert kept[bad].us is None
    assert kept[good].us == 2.0
    assert kept[slow].failure is None


@pytest.mark.parametrize("fault", ["compiler killed once", "killed once", "large", "large when checked"])
def test_what_another_try_mends_costs_no_config(shop, tmp_path, fault):
    """As where a process is killed from outside, or fewer copies of the operands fit into memory."""
    tuned, kept = run(shop, tmp_path, config(2), config(1, fault))
    assert tuned.best.config == config(1, fault)
    assert all(trial.failure is None for trial in kept.values())


def test_a_subject_that_fails_as_a_whole_fails_alone(shop, tmp_path):
    """As where there is no room for one copy, no legal config, or no config that works."""

    class Nothing(Listed):
        def configs(self):
            raise UnsupportedError("no config is legal")

    folder, broken = str(tmp_path), [config(1, "refused"), config(2, "does not load")]
    tasks = [
        Task(Fake(folder, "huge", memory=0), Listed([config(1)])),
        Task(Fake(folder, "none"), Nothing([config(1)])),
        Task(Fake(folder, "broken"), Listed(broken)),
        Task(Fake(folder, "small"), Listed([config(1)])),
    ]
    kept = []
    tuned = {t.problem.kernel: t for t in tune(tasks, shop, RULES, lambda digest, trial: kept.append(trial))}
    assert {name: each.best is not None for name, each in tuned.items()} == {
        "huge": False, "none": False, "broken": False, "small": True
    }  # fmt: skip
    assert "no room for operands" in tuned["huge"].failure
    assert tuned["none"].failure == "no config is legal"
    assert all(reason in tuned["broken"].failure for reason in ("a tile too small", "out of shared memory"))
    assert {trial.problem.kernel for trial in kept} == {"broken", "small"}


def test_a_search_ends_when_its_problem_has_had_its_time_or_is_stopped_between_two(shop, tmp_path):
    rules = replace(RULES, batch=4, problem_s=0.0)
    tuned, kept = run(shop, tmp_path, *map(config, range(1, 90)), rules=rules)
    assert 1 <= len(kept) <= 8
    assert tuned.best is not None
    tasks = [Task(Fake(str(tmp_path), f"p{i}"), Listed([config(i + 1), config(9)])) for i in range(6)]

    def found(*going_on):
        answers = iter(going_on)
        keep_on = (lambda: next(answers, False)) if going_on else lambda: True
        return {t.problem.kernel: t.best.us for t in tune(tasks, shop, RULES, lambda *_: None, keep_on)}

    assert found() == {f"p{i}": i + 1.0 for i in range(6)}  # several are under way
    assert found(False) == {}
    assert 1 <= len(found(True, True, True)) < 6


def test_no_config_is_blamed_where_operands_cannot_be_made_again(shop, tmp_path):
    """Let one crash; the others are not measured any more, and are not held to be bad."""
    crash, kept = config(1, "crashes"), []
    task = Task(Fake(str(tmp_path), "once"), Listed([crash, config(2), config(3)]))
    (tuned,) = tune([task], shop, replace(RULES, batch=1), lambda digest, trial: kept.append(trial))
    assert [trial.config for trial in kept] == [crash]
    assert tuned.best is None
    assert tuned.failure == "its operands cannot be made: RuntimeError: the GPU is gone"
    assert tuned.trials == 1


def test_no_config_is_blamed_where_no_process_can_be_started(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with Workshop(None, jobs=1) as shop:
        tuned, kept = run(shop, tmp_path, config(1))
    assert not kept
    assert (tuned.best, tuned.trials) == (None, 0)
    assert "no process can be started" in tuned.failure


def test_a_process_that_compiled_much_is_replaced(monkeypatch, server):
    """Triton keeps what it compiled in memory."""
    monkeypatch.setattr("tritile.tune.measure.pool._WORN", 3)
    with CompilePool(1, QuickForkServer(server)) as pool:
        pids = [pool.submit(os.getpid).result() for _ in range(7)]
    assert [len(set(pids[:3])), len(set(pids[3:6])), len(set(pids))] == [1, 1, 3]


def test_a_remembered_time_that_no_launch_takes_is_no_winner(shop, tmp_path):
    bad, good = config(1), config(2)
    known = {bad: Trial(Fake("").problem, bad, -1.0)}
    tuned, _ = run(shop, tmp_path, bad, good, known=known)
    assert tuned.best.config == good


def test_what_is_known_is_not_measured_again(shop, tmp_path):
    first, second = config(5), config(6)
    problem = Fake("").problem
    known = {first: Trial(problem, first, 4.0), second: Trial(problem, second, None, failure="hung: once")}
    assert not has_more(Listed([first, second]), known, RULES)
    assert has_more(Listed([first, second, config(7)]), known, RULES)
    tuned, kept = run(shop, tmp_path, first, second, config(7), known=known)
    assert second not in kept  # it hung once, and is not asked again
    assert tuned.trials == 1
    assert tuned.best.config == first


def test_the_incumbent_stays_unless_another_is_faster_beyond_the_noise():
    a, b, c = (Config.of(B=value) for value in (1, 2, 3))
    noisy = {a: [10.0, 12, 9, 11, 10], b: [10.1, 11, 9.5, 10.5, 10.4], c: [20.0] * 5}
    assert settled(noisy) == [a, b, c]
    assert settled(noisy, b) == [b, a, c]
    assert settled(noisy, c) == [a, b, c]  # an incumbent that lost
    clear = {a: [9.0, 10.8, 8.1, 9.9, 9.0], b: [10.0, 12, 9, 11, 10]}
    assert slower(clear[a], clear[b])
    assert settled(clear, b) == [a, b]
    tied = {b: [10.0, 10.2, 9.9], a: [10.0, 10.1, 10.0]}
    assert settled(tied)[0] == a  # by text, whichever came first
    assert settled(dict(reversed(tied.items())))[0] == a


def test_a_child_answers_and_survives_what_it_is_asked(program):
    """Also with a json.py in the folder that its program was started in."""
    child = Child(program)
    assert child.ask(len, [1, 2, 3], limit_s=LONG_S) == 3
    assert child.ask(lambda x: x + 1, 4, limit_s=LONG_S) == 5  # a function that cannot be imported
    pid = child.pid
    # Ctrl-C and SIGTERM to all of a job's processes are the caller's: those that measure wait for it.
    assert os.getpgid(0) not in (os.getpgid(pid), os.getpgid(program._process.pid))
    with pytest.raises(ChildError, match="ZeroDivisionError") as raised:
        child.ask(divmod, 1, 0, limit_s=LONG_S)
    assert not raised.value.lost
    assert child.pid == pid
    with pytest.raises(ChildError, match="status 3") as raised:
        child.ask(os._exit, 3, limit_s=LONG_S)
    assert raised.value.lost
    assert child.ask(len, "ab", limit_s=LONG_S) == 2
    assert child.pid != pid
    child.close()


def test_no_config_is_blamed_where_nobody_knows_how_its_process_ended(server, tmp_path):
    """Kill the fork server too, as where memory runs out."""
    fork_server, slow = QuickForkServer(server), config(1, "takes long once")
    with Workshop(None, jobs=1, limit_s=LONG_S, fork_server=fork_server) as shop:

        def killer():
            noted = tmp_path / "killed"
            while not (noted.exists() and noted.read_text()):  # else it is not noted that it was
                time.sleep(0.01)
            os.kill(fork_server._process.pid, signal.SIGKILL)
            os.kill(shop._measuring.pid, signal.SIGKILL)

        thread = threading.Thread(target=killer)
        thread.start()
        tuned, kept = run(shop, tmp_path, slow, config(2))
        thread.join()
    assert not [trial.failure for trial in kept.values() if trial.failure]
    assert tuned.best.config == slow


def starts_another(pipe):
    process = subprocess.Popen(["sleep", "600"])
    Path(pipe).write_text(str(process.pid))
    process.wait()


def test_what_a_process_started_ends_with_it(child, tmp_path, monkeypatch):
    """End an assembler that hangs, say: else it would go on when its compiler was given up."""
    pids = []
    os.mkfifo(tmp_path / "pid")
    monkeypatch.setattr(Connection, "poll", lambda *_: pids.append(int((tmp_path / "pid").read_text())))
    with pytest.raises(ChildError, match="hung: no answer in 600 s"):
        child.ask(starts_another, str(tmp_path / "pid"), limit_s=LONG_S)
    wait_for_the_end(pids)


@pytest.fixture
def programs(server, tmp_path):
    """Starts a program, and gives its process, and what it tells of others."""
    started = []

    def start(how):
        ours, theirs = multiprocessing.Pipe(duplex=False)
        process = server.Process(target=helpers.program, args=(how, theirs, tmp_path / "started"))
        process.start()
        theirs.close()
        started.append(process)
        return process, ours.recv()

    yield start
    for process in started:
        process.kill()


def wait_for_the_end(pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            select.select([os.pidfd_open(pid)], [], [])  # zombies count as ended


@pytest.mark.parametrize("how", ["ended", "killed"])
def test_processes_end_with_a_program_that_ends_or_is_killed(programs, tmp_path, how):
    """End also amid a request, with what that started."""
    os.mkfifo(tmp_path / "started")
    process, pids = programs(how)
    if how == "ended":
        process.join()
        assert process.exitcode == 0
    else:
        pids.append(int((tmp_path / "started").read_text()))
        process.kill()
    wait_for_the_end(pids)


def interrupted(answer, pid, stopped):
    """Answer who has stopped waiting for it."""
    os.kill(pid, signal.SIGINT)
    while not stopped.exists():
        time.sleep(0.01)
    return answer


def test_an_answer_never_goes_to_another_request(child, tmp_path):
    """Who stops waiting for one, and asks again, gets the answer to what was asked then."""

    class Stopped(Exception):
        pass

    def stop(number, frame):
        raise Stopped

    before = signal.signal(signal.SIGINT, stop)
    try:
        assert child.ask(len, "ab", limit_s=LONG_S) == 2
        first = child.pid
        with pytest.raises(Stopped):
            child.ask(interrupted, "first", os.getpid(), tmp_path / "stopped", limit_s=LONG_S)
        (tmp_path / "stopped").touch()
        assert child.ask(str, "second", limit_s=LONG_S) == "second"
        assert child.pid != first
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_fork_server_whose_answer_was_not_read_is_not_asked_again(fork_server, child, monkeypatch):
    """Read no number for another: it would be that of a process to kill."""
    assert child.ask(len, "ab", limit_s=LONG_S) == 2
    with monkeypatch.context() as patch:
        patch.setattr("tritile.tune.measure.child._line", stopped)
        with pytest.raises(KeyboardInterrupt):
            fork_server.status(child.pid)
    assert child.close() is None  # nobody knows
    assert child.ask(len, "abc", limit_s=LONG_S) == 3
    os.kill(child.pid, 0)


def stopped(control):
    raise KeyboardInterrupt


class Broken:
    def __reduce__(self):
        return divmod, (1, 0)


def test_an_answer_that_cannot_be_read_costs_its_request_alone(child):
    assert child.ask(len, "ab", limit_s=LONG_S) == 2
    pid = child.pid
    with pytest.raises(ChildError, match="garbled: its answer cannot be read") as raised:
        child.ask(Broken, limit_s=LONG_S)
    assert (raised.value.lost, raised.value.blameless) == (True, False)
    assert child.ask(len, "abc", limit_s=LONG_S) == 3
    assert child.pid != pid


def test_a_pool_that_is_closed_leaves_no_process(server):
    with CompilePool(1, QuickForkServer(server)) as pool:
        pid = pool.submit(os.getpid).result()
        slow = pool.submit(time.sleep, 600)
        waiting = pool.submit(time.sleep, 600)
        while not slow.running():
            time.sleep(0.01)
    assert waiting.cancelled()
    assert slow.exception() is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_tuner_that_is_killed_loses_nothing_and_goes_on_where_it_was(server, tmp_path):
    def start(expires):
        process = server.Process(target=helpers.tuner, args=(tmp_path, expires))
        process.start()
        return process

    first, store, problem = start(expires=False), Store(HOST, tmp_path), Fake("").problem
    while not (tmp_path / "hung").exists():
        assert first.is_alive()
        time.sleep(0.02)
    first.kill()
    first.join()
    kept = store.trials("0123456789abcdef", problem)
    assert sorted(trial.us for trial in kept) == [float(us) for us in range(1, 9)]
    assert all(trial.failure is None for trial in kept)
    (tmp_path / "hung").unlink()
    start(expires=True).join()
    # Only the ninth, which hung, and the tenth were left.
    assert (tmp_path / "tuned").read_text() == "1.0 2"
    found = {t.config["SPEED"]: t.failure for t in store.trials("0123456789abcdef", problem)}
    assert len(found) == 10
    assert found[0.5] == f"hung: no answer in {helpers.SCREEN_S} s"
