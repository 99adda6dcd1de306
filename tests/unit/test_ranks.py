"""`tritile tune` by the ranks of torchrun: each takes its share of a list, all write to one store."""

import pytest

from tests.unit.helpers_for_ranks import H200, PROBLEMS, enter_rank
from tritile.cli.tune import ranks
from tritile.errors import InvalidValueError
from tritile.planning.store import Store


def test_two_ranks_share_a_list_and_one_store(server, tmp_path):
    processes = [server.Process(target=enter_rank, args=(rank, 2, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    told = [(tmp_path / f"told-{rank}").read_text() for rank in range(2)]
    assert [process.exitcode for process in processes] == [0, 0], told
    store = Store(H200, tmp_path)
    checked = {trial.problem for _, trial in store.all_trials() if trial.error is not None}
    assert checked == set(PROBLEMS)
    for rank, text in enumerate(told):
        mine = {problem.label for problem in PROBLEMS if f"rank {rank}: {problem.label}: " in text}
        assert mine == {problem.label for problem in PROBLEMS[rank::2]}, text


def environment(monkeypatch, **values):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, (0, 1, 0, 1)),
        ({"WORLD_SIZE": "1", "RANK": "0"}, (0, 1, 0, 1)),
        ({"WORLD_SIZE": "16", "RANK": "9", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}, (9, 16, 1, 8)),
    ],
)
def test_a_rank_is_as_torchrun_says(monkeypatch, given, found):
    environment(monkeypatch, **given)
    assert ranks() == found


@pytest.mark.parametrize(
    "wrong", [{"RANK": "16"}, {"RANK": "-1"}, {"RANK": ""}, {"LOCAL_RANK": "8"}, {"WORLD_SIZE": "many"}]
)
def test_what_torchrun_never_says_is_refused(monkeypatch, wrong):
    given = {"WORLD_SIZE": "16", "RANK": "9", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
    environment(monkeypatch, **given | wrong)
    with pytest.raises(InvalidValueError, match="variables that torchrun sets"):
        ranks()
