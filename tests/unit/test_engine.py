"""Run the pipeline of tuning on made-up subjects, in real processes: every fault costs one config alone.

At the end `tritile tune` by the ranks of torchrun: each takes its share of a list. Those of a host write to
one store, and hosts exchange what they measured through a folder.
"""

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
import traceback
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path

import pytest

from tests.commands import run as run_command
from tests.unit import helpers_for_fork_servers as helpers
from tests.unit.helpers_for_fork_servers import LONG_S, Fake, QuickWorkers, QuickWorkshop, config
from tritile.choose import table
from tritile.cli.tuning import ranks
from tritile.core.device import HOST
from tritile.core.problem import problem_key
from tritile.errors import InvalidValueError, UnsupportedError
from tritile.tuner.measure.engine import Rules, TuningTask, has_more, tune
from tritile.tuner.measure.workers import PoolRunner, WorkerError, WorkerPool
from tritile.tuner.search import Listed
from tritile.tuner.store.folder import Folder
from tritile.tuner.store.trial import Trial
from tritile.tuner.store.trials import TRIAL, Store

RULES = Rules(exhaustive=True, problem_s=math.inf)


@pytest.fixture(scope="module")
def shared(server, tmp_path_factory):
    """A workshop, and the folder where subjects note that they hang."""
    folder = tmp_path_factory.mktemp("hung")
    limits = {"limit_s": helpers.SCREEN_S, "compile_s": helpers.COMPILE_S}
    with QuickWorkshop(None, jobs=1, folder=folder, server=server, **limits) as shop:
        yield shop, folder


@pytest.fixture
def shop(shared):
    return shared[0]


@pytest.fixture(scope="module")
def workers(server):
    with QuickWorkers(1, server=server) as workers:
        yield workers


def run(shop, folder, *configs, rules=RULES, **rest):
    """Tune one fake; what came of it, and the trials that were kept, the last of each config."""
    kept = {}
    task = TuningTask(Fake(str(folder)), Listed(configs), **rest)
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
def test_fault_costs_its_config(shared, fault, reason):
    bad, good, slow = config(1, fault), config(2), config(3)
    tuned, kept = run(*shared, slow, bad, good)
    assert tuned.best.config == good
    assert kept[bad].failure == reason
    assert kept[bad].us is None
    assert kept[good].us == 2.0
    assert kept[slow].failure is None


@pytest.mark.parametrize("fault", ["compiler killed once", "killed once", "large", "large when checked"])
def test_retried_faults_cost_nothing(shop, tmp_path, fault):
    """As where a process is killed from outside, or fewer copies of the operands fit into memory."""
    tuned, kept = run(shop, tmp_path, config(2), config(1, fault))
    assert tuned.best.config == config(1, fault)
    assert all(trial.failure is None for trial in kept.values())


def test_failing_subject_fails_alone(shop, tmp_path):
    """As where there is no room for one copy, no legal config, or no config that works."""

    class Nothing(Listed):
        def configs(self):
            raise UnsupportedError("no config is legal")

    folder, broken = str(tmp_path), [config(1, "refused"), config(2, "does not load")]
    tasks = [
        TuningTask(Fake(folder, "huge", memory=0), Listed([config(1)])),
        TuningTask(Fake(folder, "none"), Nothing([config(1)])),
        TuningTask(Fake(folder, "broken"), Listed(broken)),
        TuningTask(Fake(folder, "small"), Listed([config(1)])),
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


def test_search_ends_in_time_or_stopped(shop, tmp_path):
    rules = replace(RULES, batch=4, problem_s=0.0)
    tuned, kept = run(shop, tmp_path, *map(config, range(1, 90)), rules=rules)
    assert 1 <= len(kept) <= 8
    assert tuned.best is not None
    tasks = [TuningTask(Fake(str(tmp_path), f"p{i}"), Listed([config(i + 1), config(9)])) for i in range(6)]

    def found(*going_on):
        answers = iter(going_on)
        keep_on = (lambda: next(answers, False)) if going_on else lambda: True
        return {t.problem.kernel: t.best.us for t in tune(tasks, shop, RULES, lambda *_: None, keep_on)}

    assert found() == {f"p{i}": i + 1.0 for i in range(6)}  # several are under way
    assert found(False) == {}
    assert 1 <= len(found(True, True, True)) < 6


def test_unmakeable_operands_blame_no_config(shop, tmp_path):
    """Let one crash; the others are not measured any more, and are not held to be bad."""
    crash, kept = config(1, "crashes"), []
    task = TuningTask(Fake(str(tmp_path), "once"), Listed([crash, config(2), config(3)]))
    (tuned,) = tune([task], shop, replace(RULES, batch=1), lambda digest, trial: kept.append(trial))
    assert [trial.config for trial in kept] == [crash]
    assert tuned.best is None
    assert tuned.failure == "its operands cannot be made: RuntimeError: the GPU is gone"
    assert tuned.trials == 1


def test_unstartable_process_blames_no_config(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with PoolRunner(None, jobs=1) as shop:
        tuned, kept = run(shop, tmp_path, config(1))
    assert not kept
    assert (tuned.best, tuned.trials) == (None, 0)
    assert "no process can be started" in tuned.failure


def test_process_that_compiled_much_replaced(monkeypatch):
    """Triton keeps what it compiled in memory."""
    monkeypatch.setattr("tritile.tuner.measure.workers._MAX_REQUESTS", 3)
    with QuickWorkers(1) as workers:
        pids = [workers.submit(os.getpid).result() for _ in range(7)]
    assert [len(set(pids[:3])), len(set(pids[3:6])), len(set(pids))] == [1, 1, 3]


def test_urgent_request_first(workers, tmp_path):
    """Wait for a process that is busy, and leave out what is cancelled."""
    os.mkfifo(tmp_path / "go")
    first = workers.submit(Path.read_text, tmp_path / "go")
    served = tmp_path / "served"
    rest = [workers.submit(_add_line, served, urgency, urgency=urgency) for urgency in (3, 1, 2, 4)]
    rest[2].cancel()
    (tmp_path / "go").write_text("go")
    assert first.result() == "go"
    wait([rest[0], rest[1], rest[3]])
    assert served.read_text().split() == ["1", "3", "4"]


def _add_line(path, line):
    with path.open("a") as file:
        file.write(f"{line}\n")


def test_trials_on_record_not_remeasured(shop, tmp_path):
    hung, fast, bad, new = config(1), config(5), config(6), config(7)
    problem = Fake("").problem
    known = {fast: Trial(problem, fast, 4.0), hung: Trial(problem, hung, None, failure="hung: once")}
    assert not has_more(Listed([fast, hung]), known, RULES)
    assert has_more(Listed([fast, hung, new]), known, RULES)
    known[bad] = Trial(problem, bad, -1.0)
    tuned, kept = run(shop, tmp_path, fast, hung, bad, new, trials=known)
    assert hung not in kept
    assert tuned.trials == 1
    assert tuned.best.config == fast


class Broken:
    def __reduce__(self):
        return divmod, (1, 0)


def test_worker_survives_requests(tmp_path, monkeypatch):
    """Start the server as a program of its own, where files and a path could mislead it."""
    (tmp_path / "json.py").write_text("raise SystemExit('imported')")
    script, ran = tmp_path / "script.py", tmp_path / "ran"
    script.write_text(f"open({str(ran)!r}, 'w')\n")  # as multiprocessing runs a program's script once more
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])  # a Path, which Python passes over
    with WorkerPool(1) as workers:
        assert workers.measure(len, [1, 2, 3], limit_s=LONG_S) == 3
        assert workers.measure(lambda x: x + 1, 4, limit_s=LONG_S) == 5  # it cannot be imported
        pid = workers.measure(os.getpid)
        # Ctrl-C and SIGTERM to all of a job's processes are the caller's: those that measure wait for it.
        assert os.getpgid(0) not in (os.getpgid(pid), os.getpgid(workers._server.pid))
        with pytest.raises(WorkerError, match="ZeroDivisionError"):
            workers.measure(divmod, 1, 0, limit_s=LONG_S)
        assert workers.measure(os.getpid) == pid
        with pytest.raises(WorkerError, match="garbled: its answer cannot be read") as raised:
            workers.measure(Broken, limit_s=LONG_S)
        assert not raised.value.retryable
        with pytest.raises(WorkerError, match="status 3"):
            workers.measure(os._exit, 3, limit_s=LONG_S)
        assert workers.measure(os.getpid) != pid
    assert not ran.exists()


@pytest.mark.parametrize("fault", ["takes long once", "compiler takes long once"])
def test_workers_end_with_server(server, tmp_path, fault):
    """Kill the server, as where memory runs out: no config is to blame."""
    slow, noted = config(1, fault), tmp_path / "killed"
    with QuickWorkshop(None, jobs=1, limit_s=LONG_S, compile_s=LONG_S, server=server) as shop:

        def killer():
            while not (
                noted.exists() and noted.read_text().endswith("\n")
            ):  # else it is not noted that it was
                time.sleep(0.01)
            shop._server.kill()
            wait_for_the_end([int(noted.read_text().split()[0])])

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


def wait_for_the_end(pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            select.select([os.pidfd_open(pid)], [], [])  # zombies count as ended


@pytest.mark.parametrize("how", ["ended", "killed"])
def test_processes_end_with_program(server, tmp_path, how):
    """End also amid a request, with what that started."""
    os.mkfifo(tmp_path / "started")
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = server.Process(target=helpers.program, args=(how, theirs, tmp_path / "started"))
    process.start()
    pids = ours.recv()
    if how == "ended":
        process.join()
        assert process.exitcode == 0
    else:
        pids.append(int((tmp_path / "started").read_text()))
        process.kill()
    wait_for_the_end(pids)


def interrupted(answer, pid, stopped):
    """Answer who has stopped waiting for it."""
    while not stopped.exists():
        os.kill(pid, signal.SIGINT)
        time.sleep(0.01)
    return answer


def test_answers_match_requests(workers, tmp_path):
    """Who stops waiting for one, and asks again, gets the answer to what was asked then."""

    class Stopped(Exception):
        pass

    def stop(number, frame):
        """Once, and while the answer is waited for: a signal may come before that begins, or again."""
        waits = Future.result.__code__ in (each.f_code for each, _ in traceback.walk_stack(frame))
        if waits and not stopped.is_set():
            stopped.set()
            raise Stopped

    stopped, path = threading.Event(), tmp_path / "stopped"
    before = signal.signal(signal.SIGINT, stop)
    try:
        first = workers.measure(os.getpid)
        with pytest.raises(Stopped):
            workers.measure(interrupted, "first", os.getpid(), path, limit_s=LONG_S)
        assert workers.measure(str, "second", limit_s=LONG_S) == "second"
        assert workers.measure(os.getpid) != first
    finally:
        path.touch()  # else the process that was given up might answer before it is ended
        signal.signal(signal.SIGINT, before)


def test_cancelled_ends_everything(server, tmp_path):
    """End an assembler that hangs, say: else it would go on when its compiler was given up."""
    os.mkfifo(tmp_path / "pid")
    with QuickWorkers(1, server=server) as workers:
        for ends in (True, False):
            slow = workers.submit(starts_another, str(tmp_path / "pid"))
            started = int((tmp_path / "pid").read_text())
            if ends:
                slow.cancel()
                wait_for_the_end([started])
        pid = workers.measure(os.getpid)
        waiting = workers.submit(time.sleep, 600)
    assert [slow.cancelled(), waiting.cancelled()] == [True, True]
    wait_for_the_end([started, pid])


def test_killed_tuner_goes_on(server, tmp_path):
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


# --- Ranks


def test_two_ranks_share_store(server, tmp_path):
    processes = [server.Process(target=helpers.enter_rank, args=(rank, 2, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    told = [(tmp_path / f"told-{rank}").read_text() for rank in range(2)]
    assert [process.exitcode for process in processes] == [0, 0], told
    store = Store(helpers.H200, tmp_path)
    checked = {trial.problem for _, trial in store.all_trials() if trial.error is not None}
    assert checked == set(helpers.PROBLEMS)
    for rank, text in enumerate(told):
        mine = {problem.label for problem in helpers.PROBLEMS if f"rank {rank}: {problem.label}: " in text}
        assert mine == {problem.label for problem in helpers.PROBLEMS[rank::2]}, text


def test_two_hosts_divide_a_suite(server, tmp_path):
    """Ranks on two hosts, whose clocks are a day apart: one table on both, even after a rank was killed."""
    url, hosts = tmp_path / "shared", [tmp_path / "a", tmp_path / "b"]
    first, unfinished = helpers.PROBLEMS[0], helpers.PROBLEMS[4]  # of rank 0
    searched = []

    def start(**more):
        processes = []
        for rank in range(4):
            args = rank, 4, hosts[rank // 2]
            given = {"TRITILE_SHARED": url} | more
            processes.append(server.Process(target=helpers.enter_rank, args=args, kwargs=given))
            processes[-1].start()
        return processes

    def ended(processes, statuses):
        """What ranks printed. Each lists what it searched."""
        for process in processes:
            process.join()
        told = [(hosts[rank // 2] / f"told-{rank}").read_text() for rank in range(4)]
        assert [process.exitcode for process in processes] == statuses, told
        labels = [problem.label for problem in helpers.PROBLEMS]
        searched.extend(label for text in told for label in labels if f": {label}: " in text)
        return told

    def exported(host):
        variables = {"TRITILE_CACHE_DIR": str(host)}
        found = run_command("pull", "--target", "h200", env=variables | {"TRITILE_SHARED": str(url)})
        assert found.exit_code == 0, found.output
        path = host / "table.json"
        found = run_command("export", "--target", "h200", "--output", path, env=variables)
        assert found.exit_code == 0, found.output
        return {entry.problem: entry.torch_us for entry in table.read(path).entries}

    def is_shared(problem):
        folder, key = Folder(str(url)), problem_key(problem)
        lines = [line for each in folder.read(folder.objects(helpers.H200.slug)) for line in each.lines]
        checked = [*TRIAL].index("error")
        return any(line.row[0] == key and line.row[checked] is not None for line in lines)

    for host in hosts:
        host.mkdir()
    processes = start(HANGS=unfinished.label)
    while not (is_shared(first) and f" {first.label}: " in (hosts[0] / "told-0").read_text()):
        assert processes[0].is_alive()
        time.sleep(0.05)
    processes[0].kill()
    ended(processes, [-signal.SIGKILL, 0, 0, 0])
    timed = dict.fromkeys(helpers.PROBLEMS, 9.0)
    found = exported(hosts[1])
    assert found.pop(first) is None  # torch is timed at the end
    assert found == {problem: us for problem, us in timed.items() if problem not in (first, unfinished)}
    told = ended(start(), [0, 0, 0, 0])
    for rank, text in enumerate(told):
        assert f"rank {rank}: NVIDIA H200: {int(rank == 0)} of 2 problems to tune" in text
    assert sorted(searched) == sorted(problem.label for problem in helpers.PROBLEMS)
    assert exported(hosts[0]) == exported(hosts[1]) == timed
    first_table, second_table = ((host / "table.json").read_bytes() for host in hosts)
    assert first_table == second_table
    known = [Store(helpers.H200, host).all_trials() for host in hosts]
    assert {repr(pair) for pair in known[0]} == {repr(pair) for pair in known[1]}


NODES = {"WORLD_SIZE": "16", "RANK": "9", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}  # two of 8 GPUs


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, (0, 1, 0, 1)),
        ({"WORLD_SIZE": "1", "RANK": "0"}, (0, 1, 0, 1)),
        (NODES, (9, 16, 1, 8)),
        *(
            (NODES | wrong, None)
            for wrong in ({"RANK": "16"}, {"RANK": "-1"}, {"RANK": ""}, {"LOCAL_RANK": "8"})
        ),
        (NODES | {"WORLD_SIZE": "many"}, None),
    ],
    ids=str,
)
def test_a_rank_is_as_torchrun_says(monkeypatch, variables, found):
    for name in NODES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if found is not None:
        assert ranks() == found
        return
    with pytest.raises(InvalidValueError, match="variables that torchrun sets"):
        ranks()
