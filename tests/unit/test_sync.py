"""tritile.sync: ranks that measured different problems, with different times, choose alike afterwards.

Ranks are real processes under gloo. Kernels run in Triton's interpreter, and a made-up benchmark times them;
of tritile's own operations the trials are made up.
"""

import contextlib
import functools
import os
import random
import time
import traceback
import warnings
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from torch import distributed

import tritile
from tests.unit.test_autotune import Bench
from tritile.choose import aten, pick, waves
from tritile.core import device as devices
from tritile.core.config import Config
from tritile.core.device import HOST, TARGETS
from tritile.core.problem import KernelProblem, MatmulProblem
from tritile.errors import (
    InvalidValueError,
    NotTunedError,
    StoreWarning,
    UnsupportedError,
)
from tritile.families.registry import FAMILIES
from tritile.ops import request
from tritile.tuner import sync, traced
from tritile.tuner.store.trial import TORCH, Trial
from tritile.tuner.store.trials import Store, facts_of, row_of, store_of

pytestmark = [pytest.mark.interpreted, pytest.mark.filterwarnings("ignore::tritile.errors.UntunedWarning")]
PATIENCE_S = 120  # a rank that hangs fails the test
BLOCKS = 16, 32, 64
H200 = replace(TARGETS["nvidia-h200"], name="a GPU without a table")
H100 = replace(H200, name="another GPU", processors=100)


@triton.jit
def fill(out_ptr, used_ptr, n, salt, B: tl.constexpr):
    columns = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out_ptr + columns, 1.0, mask=columns < n)
    tl.store(used_ptr, B)


@triton.jit
def other(out_ptr, used_ptr, n, salt, B: tl.constexpr):
    columns = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out_ptr + columns, 2.0, mask=columns < n)
    tl.store(used_ptr, B)


def at_most_n(configs, named, **rest):
    return [config for config in configs if config.kwargs["B"] <= max(16, named["n"])]


def ones(out_ptr):
    return {"out_ptr": torch.ones_like(out_ptr)}


def decorated(bench, fn=fill, blocks=BLOCKS, by=tritile.autotune, **more):
    return by([triton.Config({"B": block}) for block in blocks], ["n", "salt"], do_bench=bench, **more)(fn)


def call(kernel, bench, n=64, salt=0):
    """Call a kernel; return the block that ran."""
    kernel[lambda meta: (triton.cdiv(n, meta["B"]),)](torch.zeros(n), bench.used, n, salt)
    return int(bench.used)


def matmul(m):
    return MatmulProblem(1, m, 512, 512, "bfloat16", "bfloat16")


def remember(problem, config, us, device=H200):
    digest = TORCH if config == aten.CONFIG else FAMILIES["matmul"][config.family].digest
    store_of(device).add(digest, Trial(problem, config, us))


def on_gpu(device):
    """Play a process on a GPU, for tritile's own operations."""
    stack = contextlib.ExitStack()
    for name in ("gpu", "current_gpu"):
        stack.enter_context(mock.patch.object(devices, name, return_value=device))
    return stack


# --- Ranks ---


def enter_rank(work, rank, size, folder, args, answers, environment):
    """Do some work as one of the ranks."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    try:
        answers.put((rank, globals()[work](rank, size, folder, *args)))
    except BaseException:
        answers.put((rank, traceback.format_exc()))
        raise
    finally:
        distributed.destroy_process_group()


def run_ranks(server, folder, size, work, *args):
    """Return what `work(rank, size, folder, *args)` returns on each rank."""
    answers = server.SimpleQueue()
    ranks = [
        server.Process(
            target=enter_rank, args=(work.__name__, rank, size, folder, args, answers, dict(os.environ))
        )
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    found, deadline = {}, time.monotonic() + PATIENCE_S
    while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
        time.sleep(0.02)
        while not answers.empty():
            found.update([answers.get()])
    for process in ranks:
        process.kill()
        process.join()
    while not answers.empty():
        found.update([answers.get()])
    assert [process.exitcode for process in ranks] == [0] * size, found
    return [found[rank] for rank in range(size)]


def error_of(function, *args, **kwargs):
    """Return type and text of the error that a call raises."""
    try:
        return "nothing", repr(function(*args, **kwargs))
    except Exception as error:
        return type(error).__name__, str(error)


# --- Drawn histories ---

ROUNDS = 2


class Draw:
    """One history, the same on every rank: who calls what, on which host, and how long each config takes."""

    def __init__(self, seed, size):
        self.random = random.Random(seed)
        self.seed, self.sizes = seed, (8, 24, 40, 64)
        self.hosts = [self.random.randrange(size) for _ in range(size)]
        self.prune = self.random.choice([None, at_most_n])
        self.options = [self._options() for _ in range(size)]
        self.rounds = [[self._calls() for _ in range(size)] for _ in range(ROUNDS)]

    def _options(self):
        """Of a rank: times of the blocks and of matmul's configs, mode, whether answers are checked."""
        times = {block: self.random.choice([1.0, 2.0, 3.0, self.random.random()]) for block in BLOCKS}
        failing = self.random.choice([None, 32, 64])
        if failing:
            times[failing] = RuntimeError(self.random.choice(["out of memory", "too many registers"]))
        return {
            "times": times,
            "mode": self.random.choice(["tune", "tune", "cached"]),
            "reference": self.random.choice([None, ones]),
            "us": [self.random.choice([5.0, 6.0, self.random.random()]) for _ in range(4)],
            "measured": self.random.randrange(4),
        }

    def _calls(self):
        kinds = "fill", "other", "adopted", "matmul"
        count = self.random.randrange(3, 10)
        return [(self.random.choice(kinds), self.random.choice(self.sizes)) for _ in range(count)]


class Rank:
    """A rank in a history: its kernels, benchmark and store."""

    def __init__(self, draw, rank, folder):
        self.draw, self.options = draw, draw.options[rank]
        os.environ["TRITILE_CACHE_DIR"] = str(folder / f"{draw.seed}-{draw.hosts[rank]}")
        self.bench = Bench(self.options["times"])
        pruned = {"prune_configs_by": draw.prune and {"early_config_prune": draw.prune}}
        self.kernels = {
            "fill": decorated(self.bench, reference=self.options["reference"], **pruned),
            "other": decorated(self.bench, other, **pruned),
            "adopted": decorated(self.bench, by=triton.autotune, blocks=(16, 64)),
        }

    def chosen(self, kind, n, mode):
        """Call an operation or a kernel; return what it ran."""
        with tritile.mode(mode):
            if kind != "matmul":
                return call(self.kernels[kind], self.bench, n, self.draw.seed)
            return str(request.planned(self.matmul(n), 0, True).config)

    def matmul(self, n):
        return matmul(1000 * self.draw.seed + n)

    def measure_matmuls(self):
        """Play a search of some sizes."""
        for n in self.draw.sizes[: self.options["measured"]]:
            for config, us in zip([*likely(), aten.CONFIG], self.options["us"], strict=True):
                remember(self.matmul(n), config, us)


@functools.cache
def likely():
    return list(waves.screened(matmul(64), H200, 3))


def live_histories(rank, size, folder, seeds):
    sync._BATCH = 3  # several batches
    with tritile.adopt("*fill"), on_gpu(H200):
        return [history(Draw(seed, size), rank, folder) for seed in seeds]


def history(draw, rank, folder):
    """Return, of each round, what all calls of all ranks run on this one, and what a second sync changes.

    In between, what ran before and is another now has to be what `sync` says it changed, and nothing that a
    rank measured is measured again.
    """
    own, rounds, called, tuned = Rank(draw, rank, folder), [], set(), set()
    own.measure_matmuls()
    for calls in draw.rounds:
        ran = {}
        for kind, n in calls[rank]:
            ran[kind, n] = own.chosen(kind, n, "cached" if kind == "matmul" else own.options["mode"])
        changes = tritile.sync()
        for each, options in zip(calls, draw.options, strict=True):
            called.update(each)
            tuned.update((kind, n) for kind, n in each if kind != "matmul" and options["mode"] == "tune")
        searched = draw.sizes[: max(options["measured"] for options in draw.options)]
        tuned.update((kind, n) for kind, n in called if kind == "matmul" and n in searched)
        if draw.seed % 2:
            tritile.forget()
        order = sorted(called)
        random.Random(rank).shuffle(order)
        measured = len(own.bench.measured)
        found = {(kind, n): own.chosen(kind, n, "cached") for kind, n in order}
        said = {(c.kernel, getattr(c.problem, "m", 0) % 1000 or c.problem.key[0][1]) for c in changes}
        moved = {each for each in ran if ran[each] != found[each]}
        moved = {("fill" if kind == "adopted" else kind, n) for kind, n in moved}
        assert moved <= said, draw.seed
        tritile.sync(check=True)
        rounds.append((found, [str(change) for change in tritile.sync()], len(changes)))
        assert {each: own.chosen(*each, "tune") for each in tuned} == {each: found[each] for each in tuned}
        assert len(own.bench.measured) == measured, draw.seed
    return rounds


@pytest.mark.slow
def test_ranks_choose_alike_after_drawn_histories(server, tmp_path):
    answers = run_ranks(server, tmp_path, 3, live_histories, range(1, 17))
    changed = 0
    for seed, ranks in enumerate(zip(*answers, strict=True), 1):
        for number, of_round in enumerate(zip(*ranks, strict=True)):
            for found, again, changes in of_round:
                assert found == of_round[0][0], f"seed {seed}, round {number}"
                assert again == [], f"seed {seed}, round {number}"
                changed += changes
    assert changed > 20


# --- What ranks do, one work after the other: each has stores and problems of its own ---

FAST = {16: 1.0, 32: 2.0, 64: 3.0}  # 16 is the fastest
SLOW = {16: 3.0, 32: 2.0, 64: 0.5}  # 64 is


def blocks_apart(rank, salt):
    """Tune on every rank: on the last, another block is the fastest."""
    bench = Bench(FAST if rank < 2 else SLOW)
    kernel = decorated(bench)
    return [call(kernel, bench, salt=salt)], kernel, bench


def stored():
    """The times of blocks in this rank's store."""
    return {t.config["B"]: t.failure or t.us for _, t in store_of(HOST).all_trials()}


def comparing(rank, salt):
    blocks, kernel, bench = blocks_apart(rank, salt)
    with on_gpu(H200):
        for config, us in zip(likely(), (5.0, 4.0 + 2 * rank, 6.0), strict=True):
            remember(matmul(salt), config, us)
        request.planned(matmul(salt), 0)
        before = error_of(tritile.sync, check=True)
        changes = tritile.sync()
        request.planned(matmul(salt), 0)
    blocks.append(call(kernel, bench, salt=salt))
    return blocks, before, [str(each) for each in changes], error_of(tritile.sync, check=True), stored()


def settings_apart(rank, salt):
    """torch's kernel is a candidate on all ranks but one, which the exchange does not change."""
    with on_gpu(H200):
        for config, us in zip([*likely(), aten.CONFIG], (5.0, 4.0, 6.0, 1.0), strict=True):
            remember(matmul(salt), config, us)
        request.planned(matmul(salt), 0, rank != 1)
        found = error_of(tritile.sync, check=True)
        tritile.sync()
        tritile.forget()
        return found, request.planned(matmul(salt), 0, rank != 1).config == aten.CONFIG


def unseen(rank, salt):
    """One rank calls a kernel before the exchange, the others after it."""
    bench = Bench(FAST)
    kernel = decorated(bench)
    if rank == 2:
        call(kernel, bench, salt=salt)
    changes = tritile.sync()
    before = list(bench.measured)
    with tritile.mode("tune" if rank else "strict"):
        return call(kernel, bench, salt=salt), len(changes), bench.measured == before, stored()


def checked_first(rank, salt):
    """One rank alone checks answers: its winner was checked, and goes before what others only timed."""
    bench = Bench(FAST if rank != 1 else SLOW)
    kernel = decorated(bench, reference=ones if rank == 1 else None)
    before = call(kernel, bench, salt=salt)
    tritile.sync()
    return before, call(kernel, bench, salt=salt), stored()


def failing(rank, salt):
    blocks_apart(rank, salt)
    errors = [
        error_of(tritile.sync, check="yes" if rank == 2 else False),
        error_of(tritile.sync, check=rank == 1),
    ]
    for target, name, error in (
        (Store, "rows", RuntimeError("broken")), (Store, "add", RuntimeError("broken")),
        (sync, "best_of", InvalidValueError("not valid")),
    ):  # fmt: skip
        broken = mock.patch.object(target, name, side_effect=error)
        with broken if rank == 1 else contextlib.nullcontext():
            errors.append(error_of(tritile.sync))
    return errors, len(tritile.sync())


def unwritable(rank, salt):
    """One rank's folder cannot be made: what it measures, and what it gets, counts in its process."""
    if rank == 1:
        Path(os.environ["TRITILE_CACHE_DIR"]).parent.mkdir(parents=True, exist_ok=True)
        Path(os.environ["TRITILE_CACHE_DIR"]).write_text("a file")
        blocks_apart(2, salt)
    changes = tritile.sync()
    bench = Bench({})
    return len(changes), call(decorated(bench), bench, salt=salt), stored()


def models_apart(rank, salt):
    """The last rank has another GPU, on which another config is the fastest."""
    device = H200 if rank < 2 else H100
    with on_gpu(device):
        for config, us in zip(
            likely(), ((5.0, 6.0, 4.0), (5.0, 6.0, 7.0), (5.0, 4.0, 6.0))[rank], strict=True
        ):
            remember(matmul(salt), config, us, device)
        request.planned(matmul(salt), 0)
        changes = tritile.sync()
        config = request.planned(matmul(salt), 0).config
        times = [trial.us for _, trial in store_of(device).all_trials()]
        return (
            likely().index(config),
            len(changes),
            sorted(times),
            len(store_of(H200 if rank == 2 else H100).all_trials()),
        )


def in_a_group(rank, salt):
    group = distributed.new_group([0, 2])
    blocks, kernel, bench = blocks_apart(rank, salt)
    found = error_of(tritile.sync, group, check=True), error_of(tritile.sync, group)[0]
    return [*blocks, call(kernel, bench, salt=salt)], *found


WORKS = [comparing, settings_apart, unseen, checked_first, failing, unwritable, models_apart, in_a_group]


def live_works(rank, size, folder, names):
    answers = {}
    for salt, name in enumerate(names, 100):
        os.environ["TRITILE_CACHE_DIR"] = str(folder / name / f"host-{rank}")
        answers[name] = globals()[name](rank, salt)
        tritile.sync()
    return answers


@pytest.fixture(scope="module")
def lived(server, tmp_path_factory):
    """What each work returned on each rank."""
    names = [work.__name__ for work in WORKS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITILE_TUNE_BUDGET", "inf")
        answers = run_ranks(server, tmp_path_factory.mktemp("ranks"), 3, live_works, names)
    return {name: [of_rank[name] for of_rank in answers] for name in names}


def test_ranks_that_differ_are_named(lived):
    before = {of_rank[1] for of_rank in lived["comparing"]}
    ((kind, text),) = before
    assert kind == "NotTunedError"
    own, other, slowest = map(str, likely())
    assert f"matmul 100x512x512 NN bfloat16 on {H200.name} (rank 0: {other}; ranks 1, 2: {own})" in text
    assert "fill n=64 salt=100 on host (ranks 0, 1: B=16 num_warps=4" in text
    assert "; rank 2: B=64 num_warps=4" in text
    assert slowest not in text
    assert [of_rank[3] for of_rank in lived["comparing"]] == [("nothing", "[]")] * 3


def test_the_lowest_ranks_times_count(lived):
    blocks, _, changes, _, times = zip(*lived["comparing"], strict=True)
    assert blocks == ([16, 16], [16, 16], [64, 16])
    assert times == ({16: 1000.0, 32: 2000.0, 64: 3000.0},) * 3
    own, other, _ = map(str, likely())
    changed = f"matmul 100x512x512 NN bfloat16: {own} -> {other}"
    options = "num_warps=4 num_stages=3"
    assert changes == ([], [changed], [changed, f"fill n=64 salt=100: B=64 {options} -> B=16 {options}"])


def test_settings_stay_apart_and_are_found(lived):
    errors, by_torch = zip(*lived["settings_apart"], strict=True)
    assert len(set(errors)) == 1
    kind, text = errors[0]
    assert (kind, "ranks 0, 2: torch's kernel; rank 1: " in text) == ("NotTunedError", True)
    assert by_torch == (True, False, True)


def test_a_rank_that_never_called_takes_the_winner(lived):
    assert lived["unseen"] == [(16, 0, True, {16: 1000.0, 32: 2000.0, 64: 3000.0})] * 3


def test_checked_answers_before_faster_ones(lived):
    blocks = [of_rank[:2] for of_rank in lived["checked_first"]]
    assert blocks == [(16, 64), (64, 64), (16, 64)]


def test_an_error_on_one_rank_raises_on_all(lived):
    errors, changes = zip(*lived["failing"], strict=True)
    expected = "check is 'yes': expected True or False"
    others = "InvalidValueError", f"sync failed on rank 2: {expected}"
    assert [of_rank[0] for of_rank in errors] == [others, others, ("InvalidValueError", f"sync: {expected}")]
    differs = "InvalidValueError", "sync: check is True on some ranks and False on others"
    assert [of_rank[1] for of_rank in errors] == [differs] * 3
    for n, kind, known, text in (
        (2, "RuntimeError", "TritileError", "broken"), (3, "RuntimeError", "TritileError", "broken"),
        (4, "InvalidValueError", "InvalidValueError", "not valid"),
    ):  # fmt: skip
        there = known, f"sync failed on rank 1: {text}"
        assert [of_rank[n] for of_rank in errors] == [there, (kind, text), there]
    assert changes == (0, 0, 1)  # the next sync does all of it


def test_what_cannot_be_written_counts(lived):
    changes, blocks, times = zip(*lived["unwritable"], strict=True)
    assert (changes, blocks) == ((0, 0, 0), (64, 64, 64))
    assert times == ({16: 3000.0, 32: 2000.0, 64: 500.0}, {}, {16: 3000.0, 32: 2000.0, 64: 500.0})


def test_gpu_models_stay_apart(lived):
    """Which config, how many changed, the times stored, and how many of the other GPU's."""
    times = [4.0, 5.0, 6.0]
    assert lived["models_apart"] == [(2, 0, times, 0), (2, 1, times, 0), (1, 0, times, 0)]


def test_a_group_is_some_of_the_ranks(lived):
    blocks, checked, synced = zip(*lived["in_a_group"], strict=True)
    assert blocks == ([16, 16], [16, 16], [64, 16])
    assert synced == ("nothing", "InvalidValueError", "nothing")
    assert "rank 0: B=16" in checked[0][1]
    assert "rank 2: B=64" in checked[0][1]
    assert "expected a ProcessGroup that includes this process" in checked[1][1]


# --- One process ---


@pytest.fixture
def alone(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_without_a_group():
    with pytest.raises(UnsupportedError, match="init_process_group first"):
        tritile.sync()


@pytest.mark.parametrize("group", ["world", 0, [0, 1], object()])
def test_what_is_no_group_is_refused(alone, group):
    with pytest.raises(InvalidValueError, match="expected a ProcessGroup"):
        tritile.sync(group)


@pytest.mark.parametrize("check", [None, 1, "no", torch.ones(())])
def test_check_is_a_bool(alone, check):
    with pytest.raises(InvalidValueError, match="expected True or False"):
        tritile.sync(check=check)


def test_captured_graphs_hold_no_exchange(alone, monkeypatch):
    monkeypatch.setattr(sync, "capturing", lambda: True)
    with pytest.raises(UnsupportedError, match="being captured"):
        tritile.sync()


def test_what_another_process_stored_is_taken_and_stays(alone, monkeypatch, tmp_path):
    """Once the ranks agree, what a third process stores, and an empty store, change nothing until a sync."""
    bench = Bench(FAST)
    kernel = decorated(bench)
    assert call(kernel, bench, salt=1) == 16

    def another_process(us):
        (best,) = (t for _, t in store_of(HOST).all_trials() if t.config["B"] == 32)
        store_of(HOST).add(kernel.digest, replace(best, us=us))

    another_process(0.5)
    assert [str(each).partition(":")[0] for each in tritile.sync()] == ["fill n=64 salt=1"]
    another_process(9e9)
    tritile.forget()
    for mode in ("tune", "cached", "strict"):
        with tritile.mode(mode):
            assert call(kernel, bench, salt=1) == 32
    (change,) = tritile.sync()
    assert (change.kernel, change.before["B"], change.after["B"]) == ("fill", 32, 16)
    monkeypatch.setenv("TRITILE_CACHE_DIR", str(tmp_path / "empty"))
    tritile.forget()
    with tritile.mode("strict"):
        assert call(kernel, bench, salt=1) == 16
    assert len(bench.measured) == 3
    with tritile.mode("off"):  # as before: the first of the list
        assert call(decorated(bench, blocks=(64, 32, 16)), bench, salt=1) == 64


def test_a_space_and_the_tracer(alone, monkeypatch, tmp_path):
    """A winner of a space is in it; torch's tracer is shown what was agreed on, whatever the store holds."""
    bench = Bench(FAST)
    space = tritile.Space({"B": [16, 32, 64], "num_warps": [4, 8]})
    spaced = tritile.autotune(space, ["n", "salt"], do_bench=bench)(fill)
    listed = decorated(bench)
    assert [call(kernel, bench, salt=6) for kernel in (spaced, listed)] == [16, 16]
    best = store_of(HOST).best(listed.digest, listed.problem((torch.zeros(64), bench.used, 64, 6), {}))
    for warps, us in ((4, 0.5), (16, 0.1)):  # the second is in neither
        store_of(HOST).add(listed.digest, replace(best, config=Config.of(B=64, num_warps=warps), us=us))
    assert len(tritile.sync()) == 2
    monkeypatch.setenv("TRITILE_CACHE_DIR", str(tmp_path / "empty"))
    tritile.forget()
    assert [call(kernel, bench, salt=6) for kernel in (spaced, listed)] == [64, 64]
    tensors = ("out_ptr", torch.float32, torch.device("cpu")), ("used_ptr", torch.int32, torch.device("cpu"))
    assert traced.indices_of(listed, tensors, {"n": 64, "salt": 6}, ()) == (BLOCKS.index(64),)


def test_another_list_of_configs_is_not_agreed_on(alone):
    bench = Bench(FAST)
    call(decorated(bench), bench, salt=2)
    tritile.sync()
    assert call(decorated(bench, blocks=(32, 64)), bench, salt=2) == 32


def agree_on(monkeypatch, config, source="exact"):
    monkeypatch.setattr(sync, "agreed", lambda *args: sync.Choice(config, source))
    tritile.forget()


def test_only_legal_configs_are_agreed_on(monkeypatch):
    """What ranks sent runs only where the problem, the GPU and the call allow it."""
    legal = likely()[-1]
    own = pick.plan_for(matmul(64), H200, "cached").config
    assert own != legal
    for config in (legal.derived(family="none"), legal.derived(num_stages=60), Config.of(B=1), aten.CONFIG):
        agree_on(monkeypatch, config)
        assert pick.plan_for(matmul(64), H200, "cached").config == own
    agree_on(monkeypatch, legal)
    for mode in ("cached", "tune", "spread"):
        plan = pick.plan_for(matmul(64), H200, mode)
        assert (plan.config, plan.source, plan.why) == (legal, "exact", sync.WHY)
    assert pick.plan_for(matmul(64), H200, "off").config != legal
    bench = Bench(FAST)
    agree_on(monkeypatch, Config.of(B=128))
    assert call(decorated(bench), bench, salt=3) == 16


def test_guesses_agreed_on_are_no_measurements(monkeypatch):
    """Modes tune and strict do as without them."""
    legal = likely()[-1]
    agree_on(monkeypatch, legal, "predicted")
    assert pick.plan_for(matmul(64), H200, "cached").config == legal
    assert pick.plan_for(matmul(64), H200, "tune") is None
    assert pick.plan_for(matmul(64), H200, "strict").config != legal  # as predicted
    agree_on(monkeypatch, Config.of(B=64), "model")
    bench = Bench(FAST)
    for mode, block in (("cached", 64), ("spread", 64), ("tune", 16)):
        with tritile.mode(mode):
            assert call(decorated(bench), bench, salt=4) == block
    with tritile.mode("strict"), pytest.raises(NotTunedError):
        call(decorated(bench), bench, salt=5)


def test_merged_takes_what_is_certain():
    """Final before passing, checked before timed, then the first."""
    base = Trial(KernelProblem("fill", (("n", 1),), ()), Config.of(B=16), 5.0)
    checked, wrong = replace(base, us=7.0, error=0.0), replace(base, us=None, failure="wrong answer")
    hung = replace(base, us=None, failure="hung: 10 s")
    for trials, best in (
        ([base, replace(base, us=1.0)], base), ([base, checked], checked), ([checked, wrong], checked),
        ([wrong, checked], wrong), ([base, wrong], wrong), ([hung, base], base), ([base, hung], base),
    ):  # fmt: skip
        assert sync.merged(trials) == [best]
    other = replace(base, config=Config.of(B=32))
    assert sync.merged([base, other, checked]) == [checked, other]


def test_measured_proposals_win():
    one, two = Config.of(B=1), Config.of(B=2)
    ranks = [{"p": ("predicted", one)}, {"p": ("exact", two), "q": ("model", two)}, {"q": ("torch", one)}]
    choices = [{p: sync.Choice(config, source) for p, (source, config) in each.items()} for each in ranks]
    assert sync.decided(choices) == {"p": sync.Choice(two, "exact"), "q": sync.Choice(two, "model")}


# --- What other ranks send ---

PLACE = sync._place(HOST, ["digest"], KernelProblem("fill", (("n", 1),), ()), "")
CONFIG = Config.of(B=16).key
ROW = row_of(Trial(KernelProblem("fill", (("n", 1),), ()), Config.of(B=16), 5.0))


@pytest.mark.parametrize(
    "sent",
    [
        None, [], [1], {"": [CONFIG, "exact"]}, {"[]": [CONFIG, "exact"]}, {PLACE: CONFIG}, {PLACE: [CONFIG]},
        {PLACE: ["{}", "exact"]}, {PLACE: [None, "exact"]}, {PLACE + " ": [CONFIG, "exact"]},
        {PLACE.replace('\\"fill\\"', "[]"): [CONFIG, "exact"]}, {"[" * 2000: [CONFIG, "exact"]},
        {PLACE.replace('["digest"]', "[]"): [CONFIG, "exact"]},
        {PLACE.replace("1048576", "-1"): [CONFIG, "exact"]},
        {PLACE.replace('["digest"]', '["' + "x" * 100_000 + '"]'): [CONFIG, "exact"]},
    ],
)  # fmt: skip
def test_choices_are_checked(sent):
    with pytest.raises(InvalidValueError, match="sync: "):
        sync._from_json(sent)
    assert sync._from_json({PLACE: [CONFIG, "exact"]}) == {PLACE: sync.Choice(Config.of(B=16), "exact")}


@pytest.mark.parametrize(
    "row",
    [
        None, {}, "x", [], list(ROW[:-1]), [*ROW, 1], ["x", *ROW[1:]], [*ROW[:2], "{}", *ROW[3:]],
        [*ROW[:3], float("nan"), *ROW[4:]], [*ROW[:3], "5", *ROW[4:]], [*ROW[:3], True, *ROW[4:]],
        [*ROW[:-1], "yesterday"],
    ],
)  # fmt: skip
def test_trials_are_checked(row):
    spot = facts_of(HOST), "digest", ROW[0]
    with pytest.warns(StoreWarning, match="skipped 1 trials of other ranks"):
        assert sync._add({facts_of(HOST): HOST}, [spot], [[[0, [row, list(ROW)]]]]) == 1
    (kept,) = store_of(HOST).all_trials()
    assert row_of(kept[1]) == ROW
