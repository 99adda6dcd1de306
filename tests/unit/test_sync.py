"""tritile.sync: ranks with different stores plan alike afterwards, or all are told why not."""

import json
from dataclasses import replace

import pytest
from torch import distributed

import tritile
from tests.unit import helpers_for_sync as helpers
from tritile.core.config import Config
from tritile.core.device import INTERPRETER
from tritile.core.problem import KernelProblem
from tritile.errors import DistributedError, InvalidValueError
from tritile.planning.store import Store, store_of
from tritile.planning.sync import PER_PROBLEM, Snapshot, text_of
from tritile.planning.trial import Trial

KERNEL = "0123456789abcdef"
RANKS = 3


@pytest.fixture
def on_ranks(server, tmp_path):
    """What each rank saw that did `work`."""

    def run(work):
        arguments = [(work, rank, RANKS, tmp_path) for rank in range(RANKS)]
        processes = [server.Process(target=helpers.enter_rank, args=given) for given in arguments]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
            if process.is_alive():
                process.kill()
        assert [process.exitcode for process in processes] == [0] * RANKS
        return [json.loads((tmp_path / f"seen-{rank}").read_text()) for rank in range(RANKS)]

    return run


@pytest.fixture(autouse=True)
def _no_stand_in():
    yield
    tritile.forget()


def test_ranks_with_different_stores_plan_alike(on_ranks):
    first, *others = on_ranks("equal_plans")
    for rank, seen in enumerate(others, 1):
        assert seen["before"] != first["before"]
        assert seen["kernel before"] != first["kernel before"]
        for when in ("after", "tune", "off", "later", "again", "kernel", "kernel tune"):
            assert seen[when] == first[when], (rank, when)
    for seen in (first, *others):
        assert seen["after"] == seen["tune"] == first["before"]
        sources = {name: plan[0] for name, plan in seen["after"].items()}
        assert [sources[name] for name in ("on all", "permute", "slow")] == ["exact"] * 3
        assert [sources[name] for name in ("on 1", "like it", "unseen")] == ["model"] * 3
        assert sources["like permute"] == "predicted"  # by a portfolio that ships for a GPU like it
        assert {plan[0] for plan in seen["off"].values()} == {"model"}
        assert seen["kernel"] == seen["kernel tune"][:3] == first["kernel before"]
        assert seen["asked"] == 0
        assert seen["later"] == first["before"]  # what was measured since plays no part
        assert seen["again"]["on all"][2] == 0.5
        assert seen["forgotten"].pop("on all")[2] == 0.5
        changed = {"on all"}
        for name in seen["before"].keys() - changed:
            assert seen["forgotten"][name] == seen["before"][name]
        assert seen["kernel forgotten"] == seen["kernel before"]


def test_every_rank_is_told_what_differs(on_ranks):
    seen = on_ranks("differences")
    for name, text in {
        "device": "DistributedError: sync: rank 1 is not as rank 0: name is 'NVIDIA H100 80GB HBM3', ",
        "mode": "DistributedError: sync: rank 2 is not as rank 0: mode is 'strict', on rank 0 'cached'",
        "failure": "DistributedError: sync: rank 2: DeviceError: out of GPUs",
        "rank 0": "DistributedError: sync: rank 0: IndexError",
        "text": "DistributedError: sync: rank 0: InvalidValueError: no snapshot",
    }.items():
        assert [told[name][: len(text)] for told in seen] == [text] * RANKS
    assert len({json.dumps(told["plans"]) for told in seen}) == RANKS  # nothing was put in force


def test_a_group_of_some_ranks_follows_its_own_first(on_ranks):
    seen = on_ranks("subgroup")
    assert seen[0]["told"] == "DistributedError: sync: this process is not in the group given"
    assert seen[0]["after"] == seen[0]["before"]
    assert seen[1]["told"] is seen[2]["told"] is None
    assert seen[2]["before"] != seen[2]["after"] == seen[1]["after"] == seen[1]["before"]


def test_without_a_process_group_it_says_what_to_call():
    with pytest.raises(DistributedError, match=r"call torch\.distributed\.init_process_group first"):
        tritile.sync()


def test_one_rank_alone_goes_on_with_what_it_knows():
    store, problem = store_of(INTERPRETER), KernelProblem("mine", (("n", 5),), ())
    store.add(KERNEL, trial := Trial(problem, Config.of(BLOCK=1), 1.0))
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        tritile.sync()
    finally:
        distributed.destroy_process_group()
    assert store_of(INTERPRETER) is not store
    assert store_of(INTERPRETER).trials(KERNEL, problem) == [trial]
    tritile.forget()
    assert store_of(INTERPRETER) is store


# --- The snapshot ---


@pytest.fixture
def store(tmp_path):
    return Store(helpers.DEVICE, tmp_path / "a")


def test_a_snapshot_reads_as_its_store(store):
    problems = [helpers.MATMUL, helpers.ELSEWHERE, helpers.PERMUTE]
    for kernel in (KERNEL, "another"):
        for number, problem in enumerate(problems):
            for i in range(4):
                error = 1e-3 if i == 2 else None
                trial = Trial(problem, Config.of(BLOCK=i), 10.0 + number - i, error=error)
                store.add(kernel, trial)
    again = Snapshot(helpers.DEVICE, text_of(store))
    for kernel in (KERNEL, "another", "unknown"):
        for problem in problems:
            assert again.best(kernel, problem) == store.best(kernel, problem)
            assert set(again.trials(kernel, problem)) == set(store.trials(kernel, problem))
        for op in ("matmul", "permute", "kernel"):
            assert set(again.bests(kernel, op)) == set(store.bests(kernel, op))
    assert sorted(again.everything(), key=str) == sorted(store.everything(), key=str)
    assert text_of(again) == text_of(store)


def test_a_snapshot_holds_the_best_that_count_today(store):
    for i in range(2 * PER_PROBLEM):
        store.add(KERNEL, Trial(helpers.MATMUL, Config.of(BLOCK=i), 100.0 - i))
    store.add(KERNEL, Trial(helpers.MATMUL, Config.of(BLOCK=99), None, failure="out of memory"))
    older = Store(replace(helpers.DEVICE, triton="0.1"), store.path.parent)
    older.add(KERNEL, Trial(helpers.PERMUTE, Config.of(BLOCK=1), 1.0))
    again = Snapshot(helpers.DEVICE, text_of(store))
    assert [t.us for t in again.trials(KERNEL, helpers.MATMUL)] == [85.0 + i for i in range(PER_PROBLEM)]
    assert again.bests(KERNEL, "permute") == []


def test_what_is_added_goes_to_the_file(store, monkeypatch):
    monkeypatch.setenv("TRITILE_CACHE_DIR", str(store.path.parent))
    frozen = Snapshot(helpers.DEVICE, "")
    trial = Trial(helpers.MATMUL, Config.of(BLOCK=1), 1.0)
    frozen.add(KERNEL, trial)
    assert frozen.trials(KERNEL, helpers.MATMUL) == []
    assert store.trials(KERNEL, helpers.MATMUL) == [trial]


@pytest.mark.parametrize("text", ["x", "[]", "{}", '["a", []]', '[1, ["", "", ""]]', "[" * 100_000, '["a"]'])
def test_a_text_that_is_no_snapshot_is_refused(text):
    with pytest.raises(InvalidValueError):
        Snapshot(helpers.DEVICE, text)
