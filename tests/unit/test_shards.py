"""Ranks that tune together: real processes, one of which is lost, slow, or of other code."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed

from tests.unit import helpers_for_shards as helpers
from tritile.errors import InvalidValueError
from tritile.planning.store import Store
from tritile.tune import shards
from tritile.tune.shards import Place, Shards, part

LOST_S = 1.0


def enter_rank(environment, folder, options):
    os.environ.update(environment)
    helpers.main(folder, **options)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture
def start(server, tmp_path):
    """Return what starts a rank of `size`, with the environment that torchrun gives."""
    started = []
    port = free_port()

    def start_one(rank, size=4, port=port, agent=False, **options):
        environment = {
            "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": agent,
        }  # fmt: skip
        environment = {name: str(value) for name, value in environment.items()}
        process = server.Process(
            target=enter_rank, args=(environment, tmp_path, {"lost_s": LOST_S} | options)
        )
        process.start()
        started.append(process)
        return process

    yield start_one
    for process in started:
        if process.is_alive():
            process.kill()
        process.join()


def ended(processes, limit_s=20):
    """Wait for the processes, and return their exit statuses."""
    deadline = time.monotonic() + limit_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    return [process.exitcode for process in processes]


def lines(folder: Path, name: str) -> list[list[str]]:
    return [line.split() for line in (folder / name).read_text().splitlines()]


def until(condition, limit_s=20.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def busy(folder: Path, rank: int) -> bool:
    """Tell whether a rank is amid a problem, having done at least one."""
    if not (folder / "done").exists():
        return False
    begun, done = (Counter(line[0] for line in lines(folder, name)) for name in ("begun", "done"))
    return done[str(rank)] > 0 and begun[str(rank)] > done[str(rank)]


def assert_all_remembered(folder: Path, count: int) -> None:
    """Assert that rank 0's store has every trial of every problem, once, and no other rank wrote one."""
    found = [trial for _, trial in Store(helpers.DEVICE, folder / "rank-0").everything()]
    wanted = [trial for problem in helpers.problems(count) for trial in helpers.trials(problem)]
    assert Counter(found) == Counter(wanted)
    assert [path.name for path in folder.glob("rank-*")] == ["rank-0"]


def test_a_killed_rank_is_made_up_for_and_a_late_one_takes_part(start, tmp_path):
    ranks = [start(rank, count=24, seconds=0.2, ahead=2) for rank in range(3)]
    until(lambda: busy(tmp_path, 2))
    ranks[2].kill()
    ranks.append(start(3, seconds=0.2))
    assert ended(ranks) == [0, 0, -signal.SIGKILL, 0]
    assert_all_remembered(tmp_path, 24)
    begun, done = ([line[1] for line in lines(tmp_path, name)] for name in ("begun", "done"))
    assert len(begun) > len(done) >= 24  # what the lost one had begun was begun again
    assert set(done) == {str(problem.m) for problem in helpers.problems(24)}
    assert {rank for rank, _ in lines(tmp_path, "done")} == {"0", "1", "2", "3"}
    assert sorted(lines(tmp_path, "left")) == [["0", "0"], ["1", "0"], ["3", "0"]]


@pytest.mark.parametrize("agent", [False, True], ids=["rank 0 keeps the store", "the agent keeps the store"])
def test_a_killed_rank_0_ends_the_others(start, tmp_path, agent):
    port = free_port()
    board = kept(port) if agent else None
    ranks = [start(rank, size=3, port=port, agent=agent, count=60) for rank in range(3)]
    until(lambda: all(busy(tmp_path, rank) for rank in range(3)))
    ranks[0].kill()
    assert ended(ranks) == [-signal.SIGKILL, 3, 3]
    text = (tmp_path / "error-1").read_text()
    assert text.startswith("DistributedError: rank 0" if board else "DistributedError: the ranks' key-value")
    found = [trial for _, trial in Store(helpers.DEVICE, tmp_path / "rank-0").everything()]
    wanted = [trial for problem in helpers.problems(60) for trial in helpers.trials(problem)]
    assert set(found) < set(wanted)
    assert {trial.problem for trial in found} >= {
        problem for problem in helpers.problems(60) if ["0", str(problem.m)] in lines(tmp_path, "done")
    }


def kept(port):
    """Make a key-value store of no rank, as torchrun's agent keeps it."""
    return torch.distributed.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
    )


def test_the_others_go_on_without_a_rank_that_differs_or_never_comes(start, tmp_path):
    facts = {"kernel matmul/tile": "aaaa", "name": "NVIDIA H200"}
    options = {"size": 3, "count": 6, "join_s": 3.0}
    ranks = [
        start(0, facts=facts, **options),
        start(1, facts=facts | {"kernel matmul/tile": "bbbb"}, **options),
    ]
    assert ended(ranks) == [0, 3]
    text = (tmp_path / "error-1").read_text()
    assert "rank 1 cannot tune with rank 0: kernel matmul/tile is 'bbbb', on rank 0 'aaaa'" in text
    assert_all_remembered(tmp_path, 6)


def test_a_slow_rank_is_not_lost(start, tmp_path):
    ranks = [start(rank, size=2, count=6, first_s=2 * LOST_S * rank) for rank in range(2)]
    assert ended(ranks) == [0, 0]
    assert Counter(line[1] for line in lines(tmp_path, "done")) == Counter(
        str(problem.m) for problem in helpers.problems(6)
    )
    assert_all_remembered(tmp_path, 6)


def test_a_rank_held_to_be_lost_that_comes_back_does_no_harm(start, tmp_path):
    ranks = [start(rank, size=2, count=16, seconds=0.2) for rank in range(2)]
    until(lambda: busy(tmp_path, 1))
    os.kill(ranks[1].pid, signal.SIGSTOP)
    time.sleep(2 * LOST_S)
    os.kill(ranks[1].pid, signal.SIGCONT)
    assert ended(ranks) == [0, 0]
    assert_all_remembered(tmp_path, 16)


def test_sigterm_ends_all_ranks_and_keeps_what_is_in_hand(start, tmp_path):
    ranks = [start(rank, size=3, count=60, seconds=0.6) for rank in range(3)]
    until(lambda: all(busy(tmp_path, rank) for rank in range(3)))
    for rank in ranks:
        os.kill(rank.pid, signal.SIGTERM)
    assert ended(ranks) == [128 + signal.SIGTERM] * 3
    found = Counter(trial for _, trial in Store(helpers.DEVICE, tmp_path / "rank-0").everything())
    for rank, m, *_ in lines(tmp_path, "begun"):
        first, *rest = [
            trial
            for problem in helpers.problems(60)
            if str(problem.m) == m
            for trial in helpers.trials(problem)
        ]
        assert found[first] == 1
        assert [rank, m] not in lines(tmp_path, "done") or all(found[trial] == 1 for trial in rest)


def test_under_torchrun(tmp_path):
    """Kill a rank: the agent stops the others and starts all again, and the rest is done."""
    options = ["--nproc-per-node", "2", "--max-restarts", "1", "--master-port", str(free_port())]
    script = [helpers.__file__, str(tmp_path), "12", "0.2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, *script],
        env=os.environ | {"PYTHONPATH": str(Path(helpers.__file__).parents[2])},
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until(lambda: busy(tmp_path, 1))
    pids = {line[0]: int(line[2]) for line in lines(tmp_path, "begun")}
    os.kill(pids["1"], signal.SIGKILL)
    _, told = process.communicate(timeout=40)
    assert process.returncode == 0, told
    assert_all_remembered(tmp_path, 12)
    assert not list(tmp_path.glob("error-*"))
    assert len({line[2] for line in lines(tmp_path, "begun")}) == 4


def test_a_second_list_is_apart_from_the_first(start, tmp_path):
    port = free_port()
    board = kept(port)
    options = {"count": 4, "rounds": 2, "seconds": 0.05}
    ranks = [start(rank, size=2, port=port, agent=True, **options) for rank in range(2)]
    assert ended(ranks) == [0, 0]
    assert_all_remembered(tmp_path, 8)
    assert {(line[0], int(line[1]) >= 68) for line in lines(tmp_path, "done")} == {
        (rank, second) for rank in "01" for second in (False, True)
    }
    del board


@pytest.mark.parametrize(("count", "size"), [(0, 2), (1, 4), (7, 2), (128, 4), (10, 3)])
def test_ranks_begin_apart_and_end_with_everything(monkeypatch, tmp_path, count, size):
    board = torch.distributed.HashStore()
    monkeypatch.setattr(shards, "_connected", lambda *_: board)
    store, listed = Store(helpers.DEVICE, tmp_path), helpers.problems(count)
    assert sorted(number for rank in range(size) for number in part(count, rank, size)) == [*range(count)]
    ranks = [Shards(Place(r, size, r, size, "", 0), listed, store, 9.0) for r in range(size)]
    with contextlib.ExitStack() as stack:
        for one in ranks:
            stack.enter_context(one)
        begun = [[rank._taken() for _ in rank._order[:2]] for rank in ranks if count >= 2 * size]
        assert begun == [
            [*part(count, rank, size)[:2]] for rank in range(len(begun))
        ]  # its own, from the front
        rest = [*iter(ranks[-1]._taken, None)]
        assert sorted(number for some in [*begun, rest] for number in some) == [*range(count)]
        if count == 10:
            assert rest == [8, 9, 2, 5]  # its own, then those of others from the back
        for problem in listed:
            ranks[0].finished(problem)
        assert [rank.left for rank in ranks] == [0] * size


def test_place_is_what_torchrun_says(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert Place.from_environment() is None
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert Place.from_environment() is None
    monkeypatch.setenv("WORLD_SIZE", "8")
    for name, value in {"RANK": "5", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}.items():
        with pytest.raises(InvalidValueError, match="wanted the variables that torchrun sets"):
            Place.from_environment()
        monkeypatch.setenv(name, value)
    assert Place.from_environment() == Place(5, 8, 1, 1, "h", 29500)
    monkeypatch.setenv("RANK", "8")
    with pytest.raises(InvalidValueError):
        Place.from_environment()
