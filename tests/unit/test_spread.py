"""Mode "spread" on a simulated GPU: whose turn it is, what turns may cost, and what is remembered."""

import contextlib
import random
import warnings
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from triton.errors import TritonError

import tritile
from tests.mock_gpu import event_class, mock_gpu
from tritile.core.config import Config
from tritile.core.problem import KernelProblem
from tritile.errors import GpuTakenError, UnsupportedError, UntunedWarning
from tritile.tuner import spread
from tritile.tuner.decorated import KernelCall
from tritile.tuner.spread import Spread
from tritile.tuner.store.trial import Trial, best_of
from tritile.tuner.store.trials import store_of

PROBLEM = KernelProblem("copy", (("N", 64),), (("x", "float32"),))
CONFIGS = {Config.of(BLOCK=block): triton.Config({"BLOCK": block}) for block in (16, 32, 64, 128, 256)}
GUESS, *OTHERS = CONFIGS.values()


@triton.jit
def copy(x, out, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < N), mask=at < N)


class Simulation:
    """A GPU whose clock runs with the launches; the host is `lag` calls ahead of it."""

    def __init__(self, device, true_us, worker_us, noise=0.02, lag=4, seed=0):
        self.device, self.noise, self.lag, self.dice = device, noise, lag, random.Random(seed)
        self.true_us = dict(zip(CONFIGS.values(), true_us, strict=True))
        self.worker_us = dict(zip(CONFIGS, worker_us, strict=True))
        self.clock, self.launched, self.ran, self.threads, self.warned = 0.0, 0, [], [], []
        self.x, self.out, self.searches, self.capturing = torch.ones(64), torch.zeros(64), 0, False
        self.loaded = []
        self.ended, self.fails, self.reference, self.checked = 0, set(), None, set()
        self.base_fn, self.space, self.raises_after = copy, None, set()
        self.spread = Spread(self, GUESS, self.on_end)

    # What a tuner has.

    def call(self, args, kwargs):
        names, launched = ("x", "out", "N"), {"grid": (4,)}
        source = "0" * 16
        return KernelCall(
            PROBLEM, self.device, source, copy, names, args, launched, CONFIGS, reference=self.reference
        )

    def with_arguments(self, args):
        return self

    def _warn(self, text, category):
        self.warned.append((text, category))

    def on_end(self):
        self.ended += 1

    # What the module uses.

    def measured_config(self, tuner, call, rules):
        assert tuner.measures_here is False
        assert rules.checked == 3
        self.searches += 1
        for config, us in self.worker_us.items():
            failure = None if us else "wrong answer"
            error = 0.0 if us in self.checked else None
            trial = Trial(PROBLEM, config, us, error=error, failure=failure, measured_utc="2026-01-01")
            store_of(call.device).add(call.source, trial)

    def load(self, call, config, warmup):
        assert warmup
        assert all(isinstance(each, torch.Tensor) for each in (call.tensors["x"], call.tensors["out"]))
        self.loaded.append(config)

    def calls(self, number):
        for _ in range(number):
            self.spread.launch((self.x, self.out, 64), {"grid": (4,)}, self.launch)

    def launch(self, config):
        if config in self.fails:
            raise TritonError("this config does not run here")
        self.launched += 1
        self.ran.append(config)
        if config in self.raises_after:
            raise ValueError("a hook of the program")
        self.clock += self.true_us[config] * self.dice.lognormvariate(0, self.noise)

    def searched(self):
        self.calls(1)
        self.search()
        return self

    def search(self):
        for work, arguments in self.threads:
            work(*arguments)
        self.threads.clear()

    @property
    def trials(self):
        return store_of(self.device).trials("0" * 16, PROBLEM)

    @property
    def winner(self):
        return CONFIGS[best_of(self.trials).config]


@pytest.fixture
def simulate(monkeypatch):
    with mock_gpu("nvidia-h200") as device, contextlib.ExitStack() as stack:

        def make(*arguments, **options):
            here = Simulation(device, *arguments, **options)

            class Thread:
                def __init__(self, target, args, daemon):
                    assert daemon
                    self.start = lambda: here.threads.append((target, args))

            monkeypatch.setattr(spread, "measured_config", here.measured_config)
            monkeypatch.setattr(spread, "rules_of", lambda tuner: tritile.tuner.measure.engine.Rules())
            monkeypatch.setattr(spread.threading, "Thread", Thread)
            monkeypatch.setattr(KernelCall, "launch", lambda *given, **how: here.load(*given, **how))
            monkeypatch.setattr(spread, "handles_of", lambda compiled: compiled)
            monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: None)
            monkeypatch.setattr(torch.cuda, "current_stream", lambda gpu: None)
            monkeypatch.setattr(torch.cuda, "Event", event_class(here))
            monkeypatch.setattr(torch.cuda, "Stream", lambda gpu: None)
            monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: here.capturing)
            return here

        spread.gate.cache_clear()
        stack.callback(spread.gate.cache_clear)
        yield make


def added(here):
    """How much longer the GPU took than with the guess alone, relative to that, without noise."""
    guess = here.true_us[GUESS]
    return sum(max(0.0, here.true_us[config] - guess) for config in here.ran) / (guess * len(here.ran))


def test_the_guess_runs_until_something_is_measured(simulate):
    here = simulate([100, 80, 90, 120, 70], [100, 80, 90, 120, 70])
    here.calls(50)
    assert set(here.ran) == {GUESS}
    assert len(here.threads) == 1
    here.search()
    here.calls(2000)
    assert here.ended == 1
    assert here.winner is OTHERS[-1]
    assert here.ran.count(OTHERS[-1]) < 20  # which is enough where it is this clear
    assert {*here.ran} <= {*here.loaded}


def test_the_calls_overrule_the_workers(simulate):
    """The workers' fastest is not the program's: its caches are warm, say."""
    here = simulate([100, 97, 60, 130, 110], [100, 80, 82, 84, 120]).searched()
    here.calls(5000)
    assert here.ended == 1
    assert here.winner is OTHERS[1]
    assert OTHERS[3] not in here.ran  # it was not among the three fastest


def test_the_guess_stays_if_it_is_the_fastest(simulate):
    here = simulate([70, 90, 95, 99, 300], [100, 95, 96, 97, 300]).searched()
    here.calls(20_000)
    assert here.ended == 1
    assert here.winner is GUESS


@pytest.mark.parametrize("seed", range(20))
def test_drawn_times(simulate, seed):
    """Never over 3 times the guess, at most 2% added, and close to the fastest at the end."""
    dice = random.Random(seed)
    true = [dice.uniform(50, 500) for _ in CONFIGS]
    workers = [us * dice.lognormvariate(0, 0.05) for us in true]
    here = simulate(true, workers, noise=dice.choice((0.0, 0.01, 0.1)), lag=dice.randrange(1, 200), seed=seed)
    here.calls(dice.randrange(1, 100))
    here.search()
    here.calls(20_000)
    guess = true[0]
    assert here.ended == 1
    assert max(here.true_us[config] for config in here.ran) <= 3.4 * guess  # the workers' times are off by 5%
    assert added(here) <= 0.021
    assert here.true_us[here.winner] <= 1.2 * min(true)


def test_slower_turns_wait_until_they_cost_little(simulate):
    here = simulate([100, 114, 113, 112, 113], [100, 114, 113, 112, 113], noise=0.001).searched()
    for _ in range(50):
        here.calls(10)
        assert added(here) <= 0.0201
    assert len({*here.ran}) == 3  # of the three fastest the guess is one


def test_a_slow_config_gets_no_turn(simulate):
    here = simulate([100, 350, 380, 320, 330], [100, 350, 380, 320, 330]).searched()
    assert here.ended == 1  # the guess is by far the fastest: there is nothing to compare
    here.calls(100)
    assert set(here.ran) == {GUESS}


def test_short_launches_are_left_to_the_workers(simulate):
    here = simulate([20, 15, 12, 16, 18], [20, 12, 15, 16, 18]).searched()
    here.calls(10)
    assert here.ended == 1
    assert here.winner is OTHERS[0]
    assert set(here.ran) == {GUESS}


def test_capture_runs_the_guess_and_begins_nothing(simulate):
    here = simulate([100, 80, 90, 120, 70], [100, 80, 90, 120, 70])
    here.capturing = True
    here.calls(5)
    assert here.threads == []
    here.capturing = False
    here.calls(1)
    here.search()
    here.capturing = True
    here.calls(100)
    assert set(here.ran) == {GUESS}


def test_a_config_that_fails_in_a_call_loses_its_turns(simulate):
    here = simulate([100, 80, 90, 120, 70], [100, 80, 90, 120, 70]).searched()
    here.fails.add(OTHERS[-1])
    here.calls(3000)
    assert here.ended == 1
    assert here.winner is OTHERS[0]
    assert len(here.ran) == 3001  # each call ran, once


def test_an_unchecked_guess_is_replaced(simulate):
    here = simulate([100, 80, 90, 120, 70], [0, 80, 90, 120, 70])  # it fails in the workers
    here.calls(1)
    here.search()
    assert here.ended == 1
    assert here.winner is OTHERS[-1]


def test_a_guess_whose_answer_nobody_checked_cannot_win(simulate):
    here = simulate([60, 80, 90, 120, 70], [100, 80, 90, 120, 70])
    here.reference, here.checked = (lambda x: {"out": x}), {0, 70, 80, 90}
    here.calls(1)
    here.search()
    assert here.ended == 1
    assert here.winner is OTHERS[-1]


def test_one_problem_is_measured_at_a_time(simulate):
    here = simulate([100, 80, 90, 120, 70], [100, 80, 90, 120, 70])
    here.calls(1)
    other = Spread(here, GUESS, lambda: None)
    launch = lambda: other.launch((here.x, here.out, 64), {"grid": (4,)}, here.launch)  # noqa: E731
    launch()
    assert len(here.threads) == 1
    here.search()
    launch()
    assert len(here.threads) == 1
    here.search()
    assert here.searches == 2


@pytest.mark.parametrize(
    "error", [UnsupportedError("cannot be sent"), GpuTakenError("no room"), OSError("disk")]
)
def test_what_cannot_be_measured_stays_with_the_guess(simulate, monkeypatch, error):
    here = simulate([100, 80, 90, 120, 70], [100, 80, 90, 120, 70])

    def fails(*_):
        raise error

    monkeypatch.setattr(spread, "measured_config", fails)
    here.calls(1)
    here.search()
    here.calls(100)
    assert set(here.ran) == {GUESS}
    ((text, category),) = here.warned
    assert category is UntunedWarning
    assert "copy stays with a guess" in text
    assert spread.gate(0).acquire(blocking=False)


def test_memory_is_limited(simulate, monkeypatch):
    monkeypatch.setenv("TRITILE_SPREAD_MEMORY", "1e-9")

    def refuses(value, most):
        assert most == 0
        raise GpuTakenError("too large")

    monkeypatch.setattr(spread, "duplicate", refuses)
    here = simulate([100, 80, 90, 120, 70], [100, 80, 90, 120, 70])
    here.calls(3)
    assert here.threads == []
    assert len(here.warned) == 1
    assert spread.gate(0).acquire(blocking=False)


def test_stored_times_keep_the_winner_first(simulate):
    """Also beside configs that took no turn, which only the workers timed."""
    for seed in range(10):
        dice = random.Random(seed)
        true, workers = ([dice.uniform(60, 90) for _ in CONFIGS] for _ in range(2))
        here = simulate(true, workers, seed=seed)
        here.calls(1)
        here.search()
        here.calls(20_000)
        fastest = min({*here.ran}, key=here.true_us.__getitem__)
        assert here.true_us[here.winner] <= 1.03 * here.true_us[fastest]
        store_of(here.device).clear()
        spread.gate.cache_clear()


def launched_by(kernel, x, out, calls):
    for _ in range(calls):
        kernel[(1,)](x, out, x.numel())


def test_decorated_and_adopted_kernels(simulate, monkeypatch):
    """The guess stays in the cache until a config is stored, which then replaces it."""
    here = simulate([100, 80, 90, 120, 70], [100, 80, 90, 120, 70])

    def measured(tuner, call, rules):
        for config, us in zip(call.configs, (20, 12, 15), strict=True):
            trial = Trial(call.problem, config, us, measured_utc="2026-01-01")
            store_of(call.device).add(call.source, trial)

    monkeypatch.setattr(spread, "measured_config", measured)
    configs = [triton.Config({"BLOCK": block}) for block in (16, 32, 64)]
    x, out = torch.ones(64), torch.zeros(64)
    own = tritile.autotune(configs, ["N"], mode="spread")(copy)
    theirs = triton.autotune(configs, ["N"])(copy)
    with tritile.adopt(mode="spread") as adopted:
        for kernel in (own, theirs):
            store_of(here.device).clear()
            launched_by(kernel, x, out, 3)
            assert kernel.best_config is configs[0]
            assert [*kernel.cache.values()] == [configs[0]]
            assert len(here.threads) == 1
            here.search()
            launched_by(kernel, x, out, 2)
            assert kernel.best_config is configs[1]
            assert [*kernel.cache.values()] == [configs[1]]
            assert here.threads == []
        launched_by(theirs, torch.ones(65), torch.zeros(65), 1)
    assert "1 problem remembered" in str(adopted)
    assert "2 problems guessed" in str(adopted)
    assert len(theirs.cache) == 1  # a guess leaves it with the adoption


def test_what_was_measured_is_not_measured_again(simulate):
    here = simulate([100, 80, 90, 120, 70], [100, 80, 90, 120, 70])
    configs = [triton.Config({"BLOCK": block}) for block in (16, 32, 64)]
    kernel = tritile.autotune(configs, ["N"])(copy)
    x, out = torch.ones(64), torch.zeros(64)
    with tritile.mode("spread"):
        call = kernel.call((x, out, 64), {"grid": (1,)})
        for config, us in zip(call.configs, (12.0, 10.0, 9.0), strict=True):
            trial = Trial(call.problem, config, us, measured_utc="2026-01-01")
            store_of(here.device).add(kernel.digest, trial)
        launched_by(kernel, x, out, 2)
    assert kernel.best_config is configs[2]
    assert here.threads == []


def test_a_call_that_fails_by_itself_is_not_held_against_a_config(simulate):
    here = simulate([100, 80, 90, 120, 70], [100, 80, 90, 120, 70]).searched()
    here.fails.update(CONFIGS.values())  # a grid that raises, say
    for _ in range(5):
        with pytest.raises(TritonError, match="does not run here"):
            here.calls(1)
    assert all(trial.works for trial in here.trials)
    here.fails.clear()
    here.calls(3000)
    assert here.winner is OTHERS[-1]


def test_a_hook_that_raises_after_a_launch_has_no_second_launch(simulate):
    """Which would add twice in a kernel that adds to its output."""
    here = simulate([100, 80, 90, 120, 70], [100, 80, 90, 120, 70]).searched()
    here.raises_after.update(CONFIGS.values())
    before = here.launched
    for _ in range(4):
        with pytest.raises(ValueError, match="a hook"):
            here.calls(1)
    assert here.launched == before + 4
    assert all(trial.works for trial in here.trials)


def test_a_space_of_configs(simulate):
    """Of which a call names only the first few."""
    here = simulate([100, 80, 90, 120, 70], [100, 80, 90, 120, 70])
    here.space, first = {*CONFIGS}, dict([*CONFIGS.items()][:2])
    own = here.call
    here.call = lambda args, kwargs: replace(own(args, kwargs), configs=first)
    here.searched().calls(3000)
    assert here.warned == []
    assert OTHERS[-1] in here.ran


def test_times_of_zero_do_not_reach_the_program(simulate):
    """Launches of an empty grid, under the key of longer ones."""
    here = simulate([0] * 5, [100, 80, 90, 120, 70]).searched()
    here.calls(300)
    assert len(here.ran) == 301


@pytest.mark.parametrize("args", [(1, 2, 64), (torch.ones(64), torch.zeros(64), 64)])
def test_a_call_that_cannot_be_described_runs(simulate, monkeypatch, args):
    """One without tensors, or whose pruning raises for these values."""
    here = simulate([100, 80, 90, 120, 70], [100, 80, 90, 120, 70])
    if isinstance(args[0], torch.Tensor):
        monkeypatch.setattr(here, "call", lambda args, kwargs: 1 // 0)
    for _ in range(3):
        here.spread.launch(args, {"grid": (4,)}, here.launch)
    assert here.ran == [GUESS] * 3
    assert len(here.warned) == 1
    assert spread.gate(0).acquire(blocking=False)


def test_a_problem_that_waits_for_another_costs_its_calls_nothing(simulate, monkeypatch):
    here = simulate([100, 80, 90, 120, 70], [100, 80, 90, 120, 70])
    here.calls(1)
    described = []
    monkeypatch.setattr(here, "call", lambda args, kwargs: described.append(args))
    other = Spread(here, GUESS, lambda: None)
    for _ in range(3):
        other.launch((here.x, here.out, 64), {"grid": (4,)}, here.launch)
    assert described == []


def _worked(tuner, call, rules):
    for config, us in zip(call.configs, (100, 80, 90), strict=True):
        store_of(call.device).add(call.source, Trial(call.problem, config, us, measured_utc="2026-01-01"))


@pytest.fixture
def kernels(simulate, monkeypatch):
    """A kernel of tritile's decorator, and an adopted one; each with the configs of its launches so far."""
    here = simulate([100, 80, 90, 120, 70], [100, 80, 90, 120, 70])
    monkeypatch.setattr(spread, "measured_config", _worked)
    configs = [triton.Config({"BLOCK": block}) for block in (16, 32, 64)]
    own, theirs = tritile.autotune(configs, ["N"])(copy), triton.autotune(configs, ["N"])(copy)
    ran = []

    def run(*args, BLOCK, grid, warmup=False, **options):
        here.launched += 1
        here.clock += 100 if BLOCK == 16 else BLOCK
        ran.append(BLOCK)

    monkeypatch.setattr(copy, "run", run)
    with tritile.mode("spread"), tritile.adopt():
        yield here, (own, theirs), ran


def test_best_config_is_the_one_that_ran(kernels):
    """Programs size what reads the kernel's output by it."""
    here, tuners, ran = kernels
    for kernel in tuners:
        store_of(here.device).clear()
        seen = set()
        for _ in range(60):
            launched_by(kernel, here.x, here.out, 1)
            assert kernel.best_config.kwargs["BLOCK"] == ran[-1]
            seen.add(ran[-1])
            here.search()
        assert len(seen) > 1


def test_what_a_program_puts_into_the_cache_runs(kernels):
    here, tuners, ran = kernels
    for kernel in tuners:
        store_of(here.device).clear()
        launched_by(kernel, here.x, here.out, 1)
        (key,) = kernel.cache
        mine = kernel.cache[key] = triton.Config({"BLOCK": 128})
        launched_by(kernel, here.x, here.out, 2)
        assert ran[-2:] == [128, 128]
        here.search()
        launched_by(kernel, here.x, here.out, 60)
        assert ran[-60:] == [128] * 60
        assert kernel.cache[key] is mine


def test_another_adoption_leaves_a_search_under_way(kernels):
    here, (_, theirs), ran = kernels
    launched_by(theirs, here.x, here.out, 1)
    with tritile.adopt("*copy", mode="cached", exclude="*"):
        here.search()
        launched_by(theirs, here.x, here.out, 200)
    assert ran[-1] == 32 == theirs.best_config.kwargs["BLOCK"]


def test_a_search_that_was_interrupted_goes_on(kernels):
    """Or is another process's, which measures now: its first trial is no winner."""
    here, tuners, _ = kernels
    for kernel in tuners:
        store_of(here.device).clear()
        call = tritile.tuner.adoption.tuner_for(kernel).call((here.x, here.out, 64), {"grid": (1,)})
        first = next(iter(call.configs))
        trial = Trial(call.problem, first, 100.0, measured_utc="2026-01-01")
        store_of(here.device).add(call.source, trial)
        launched_by(kernel, here.x, here.out, 1)
        assert len(here.threads) == 1
        here.search()
        launched_by(kernel, here.x, here.out, 200)
        assert kernel.best_config.kwargs["BLOCK"] == 32


def test_what_cannot_be_completed_is_searched_once_in_a_process(kernels, monkeypatch):
    """A config hangs each time it is measured."""
    here, tuners, _ = kernels

    def worked(tuner, call, rules):
        for config, us in zip(call.configs, (100, 20, None), strict=True):
            failure = None if us else "hung: no answer in 10 s"
            trial = Trial(call.problem, config, us, failure=failure, measured_utc="2026-01-01")
            store_of(call.device).add(call.source, trial)
        searches.append(tuner)

    monkeypatch.setattr(spread, "measured_config", worked)
    for kernel in tuners:
        searches = []
        store_of(here.device).clear()
        for _ in range(10):
            launched_by(kernel, here.x, here.out, 1)
            here.search()
        assert len(searches) == 1
        assert kernel.best_config.kwargs["BLOCK"] == 32


def test_forget_leaves_the_next_search_alone(simulate):
    here = simulate([100, 80, 90, 120, 70], [100, 80, 90, 120, 70])
    configs = [triton.Config({"BLOCK": block}) for block in (16, 32, 64)]
    kernel, (x, out) = tritile.autotune(configs, ["N"], mode="spread")(copy), torch.ones(2, 64)
    launched_by(kernel, x, out, 1)
    (first,) = kernel._spreads.values()
    tritile.forget()
    launched_by(kernel, x, out, 1)
    (second,) = kernel._spreads.values()
    first._end()
    assert [*kernel._spreads.values()] == [second]
    assert [*kernel.cache.values()] == [configs[0]]
    assert len(here.threads) == 1


@pytest.mark.filterwarnings("error")
def test_warnings_as_errors_do_not_reach_the_program(simulate, monkeypatch):
    here = simulate([100, 80, 90, 120, 70], [100, 80, 90, 120, 70])
    monkeypatch.setattr(here, "call", lambda args, kwargs: 1 // 0)
    monkeypatch.setattr(here, "_warn", warnings.warn)
    here.calls(2)
    assert len(here.ran) == 2
