"""`tritile tune` by several ranks on one host: the whole tuner, real processes, and one rank killed."""

import signal
import socket
import time

from tests.unit.helpers_for_ranks import CASES, H200, enter_rank
from tritile.planning import plans
from tritile.planning.store import Store
from tritile.tune.subject import is_tuned


def start(server, rank, size, port, folder, pause="0"):
    environment = {
        "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TRITILE_CACHE_DIR": folder / f"rank-{rank}",
        "TRITILE_TEST_PAUSE": pause,
    }  # fmt: skip
    environment = {name: str(value) for name, value in environment.items()}
    process = server.Process(target=enter_rank, args=(environment, folder / f"told-{rank}"))
    process.start()
    return process


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def tuned(folder):
    """Count the problems of which rank 0's store knows a checked winner."""
    store = Store(H200, folder / "rank-0")
    found = [trial for _, trial in store.everything()]
    return len({trial.problem for trial in found if trial.error is not None})


def test_ranks_share_a_suite_and_a_killed_ones_problems_are_done_by_others(server, tmp_path, monkeypatch):
    port = free_port()
    ranks = [start(server, rank, 3, port, tmp_path, pause="0.02") for rank in range(3)]
    deadline = time.monotonic() + 120
    while tuned(tmp_path) < 2:  # all have problems in hand by now
        assert time.monotonic() < deadline, [path.read_text() for path in tmp_path.glob("told-*")]
        time.sleep(0.05)
    ranks[2].kill()
    for rank in ranks:
        rank.join(120)
    told = [(tmp_path / f"told-{rank}").read_text() for rank in range(3)]
    assert [rank.exitcode for rank in ranks] == [0, 0, -signal.SIGKILL], told
    assert "0 problems are left" in told[0]
    monkeypatch.setenv("TRITILE_CACHE_DIR", str(tmp_path / "rank-0"))
    plans.forget()
    assert all(is_tuned(case.problem, H200) for case in CASES)
    assert [path.name for path in tmp_path.glob("rank-*")] == ["rank-0"]  # no other rank wrote anything
    assert all("us, " in told[rank] for rank in (0, 1))  # both had a share; what the third told died with it
