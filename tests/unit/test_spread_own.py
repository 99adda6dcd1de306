"""Mode "spread" for tritile's own operations, on a simulated GPU: what runs, what is kept, what is stored."""

import contextlib
import random
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

import tritile
from tests.mock_gpu import event_class
from tritile.choose import aten, pick
from tritile.core.config import ATEN, Config
from tritile.core.device import target_device
from tritile.errors import OverlapError, TuningError
from tritile.families import launching
from tritile.ops import memo
from tritile.ops import request as ops_request
from tritile.ops import spread as ops_spread
from tritile.tune import spread as own
from tritile.tune.subject import problem as subject
from tritile.tuner import spread
from tritile.tuner.measure.engine import Tuned
from tritile.tuner.measure.timing import Least
from tritile.tuner.search import Listed
from tritile.tuner.store.trial import TORCH, Trial
from tritile.tuner.store.trials import store_of

QUEUE = own._queue
H200 = target_device("nvidia-h200")
A, B = torch.empty(3000, 2056, dtype=torch.bfloat16), torch.empty(2056, 4104, dtype=torch.bfloat16)


class Gpu:
    """A GPU whose clock runs with the launches; the host is `lag` calls ahead of it.

    `times` has microseconds of configs in the program's calls, `timed` those that workers measure; what is
    in neither takes 100.
    """

    def __init__(self):
        self.clock, self.launched, self.lag, self.capturing = 0.0, 0, 4, False
        self.noise, self.dice = 0.01, random.Random(0)
        self.times, self.timed, self.refused, self.wrong = {}, {}, set(), set()
        self.ran, self.prepared, self.loaded, self.waiting, self.tasks = [], [], [], [], []
        self.given = {}  # addresses of the latest launch, by buffer

    def run(self, config):
        self.launched += 1
        self.ran.append(config)
        self.clock += self.times.get(config, 100.0) * self.dice.lognormvariate(0, self.noise)

    def search(self):
        """Make the searches that wait, as their thread would."""
        while self.waiting:
            self.waiting.pop(0)()

    # What the modules use.

    def prepare(self, call, config):
        self.prepared.append(config)
        if config in self.refused:
            raise TuningError(f"{config} is refused")
        return Launch(self, config, [memory.buffer for memory in call.memory])

    def tune(self, tasks, runner, rules, on_trial):
        (task,) = tasks
        self.tasks.append(task)
        space = task.space.configs() if isinstance(task.space, Listed) else task.space.opening(8)
        best, tried = None, dict.fromkeys([task.incumbent, *space])
        for config in [config for config in tried if config is not None]:
            error = None if config in self.wrong else 1e-3
            us = self.timed.get(config, 100.0)
            trial = Trial(task.tunable.problem, config, us, error=error, measured_utc="2026-01-01")
            best = trial if best is None or (error and trial.us < best.us) else best
            on_trial(task.tunable.digest(config), trial)
        yield Tuned(task.tunable.problem, best, 8, 1.0)

    def time_torch(self, problem, device, gpu, shares_gpu):
        assert shares_gpu
        us = self.timed.get(aten.CONFIG, 100.0)
        store_of(device).add(TORCH, Trial(problem, aten.CONFIG, us, measured_utc="2026-01-01"))

    def torch_call(self, request, problem, how, out):
        count = len(request.tensors)

        def multiply(*given):
            if aten.CONFIG in self.refused:
                raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
            self.run(aten.CONFIG)
            if len(given) > count:
                return given[-1]
            return torch.empty(problem.m, problem.n, dtype=torch.bfloat16)

        return multiply if aten.illegal(problem) is None else None


class Launch:
    def __init__(self, gpu, config, buffers):
        self.gpu, self.config, self.buffers = gpu, config, buffers

    def __call__(self, *tensors):
        self.at([tensor.data_ptr() for tensor in tensors])

    def at(self, addresses):
        self.gpu.given = dict(zip(self.buffers, addresses, strict=True))
        self.gpu.run(self.config)


@pytest.fixture
def gpu(monkeypatch):
    here = Gpu()

    nothing = lambda *_: contextlib.nullcontext()  # noqa: E731
    for owner, name, value in (
        (ops_request, "on_host", lambda tensor: False),
        (ops_request, "torch_call_of", here.torch_call),
        (ops_request.devices, "gpu", lambda index: H200),
        (launching, "prepare", here.prepare),
        (memo, "new_output", lambda shape, strides, dtype, device: torch.empty(shape, dtype=dtype)),
        (own, "_queue", lambda gpu: SimpleNamespace(put=here.waiting.append)),
        (own, "shared_runner", nothing),
        (own.engine, "tune", here.tune),
        (own, "time_torch", here.time_torch),
        (own.Search, "_load", lambda self, config: here.loaded.append(config)),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "set_device", lambda gpu: None),
        (torch.cuda, "Event", event_class(here)),
        (torch.cuda, "Stream", lambda gpu: None),
        (torch.cuda, "stream", nothing),
        (torch.cuda, "device", nothing),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "is_current_stream_capturing", lambda: here.capturing),
    ):
        monkeypatch.setattr(owner, name, value)
    spread.gate.cache_clear()
    tritile.forget()
    with tritile.mode("spread", backends="triton,aten"):
        yield here
    tritile.forget()
    spread.gate.cache_clear()


def calls(number, a=A, b=B, **options):
    for _ in range(number):
        result = tritile.matmul(a, b, **options)
    return result


def plan_of(a=A, b=B, **options):
    return tritile.plan(tritile.matmul, a.to("meta"), b.to("meta"), device=H200, **options)


def others(gpu):
    """The candidates of the first search, in the order of the list, but the guess."""
    task = gpu.tasks[0]
    return [config for config in task.space.configs() if config != task.incumbent]


def likely():
    return pick.likely(plan_of().problem, H200, 8)


def added(gpu, guess):
    """How much longer the GPU took than with the guess alone, relative to that, without noise."""
    us = gpu.times.get(guess, 100.0)
    return sum(max(0.0, gpu.times.get(each, 100.0) - us) for each in gpu.ran) / (us * len(gpu.ran))


def test_guess_stays_prepared_until_turns_begin(gpu):
    guess = plan_of().config
    calls(50)
    assert [*{*gpu.ran}] == [guess]
    assert len(gpu.waiting) == 1
    assert len(memo.CALLS) == 1
    fastest, *_ = likely()
    gpu.times[fastest] = gpu.timed[fastest] = 70.0
    gpu.search()
    assert memo.CALLS == {}
    calls(300)
    assert gpu.ran[-1] == fastest
    assert {*gpu.ran} <= {*gpu.loaded}
    plan = plan_of()
    assert (plan.config, plan.source) == (fastest, "exact")
    assert len(memo.CALLS) == 1
    before = len(gpu.prepared)
    calls(50)
    assert len(gpu.prepared) == before, "the winner is prepared once"
    assert len(gpu.ran) == 400, "each call launches once"
    assert gpu.waiting == []


@pytest.mark.parametrize("fastest", [aten.CONFIG, None], ids=["torch", "ours"])
@pytest.mark.parametrize("has_out", [False, True])
def test_torch_takes_turns(gpu, fastest, has_out):
    """The calls overrule the workers."""
    out = torch.empty(3000, 4104, dtype=torch.bfloat16) if has_out else None
    ours = likely()[1]
    gpu.times = {aten.CONFIG: 90.0, ours: 90.0} | {fastest or ours: 75.0}
    gpu.timed = {aten.CONFIG: 90.0, ours: 90.0} | {ours if fastest else aten.CONFIG: 80.0}
    calls(1, out=out)
    gpu.search()
    version = None if out is None else out._version
    result = calls(2000, out=out)
    assert out is None or (result is out and out._version == version + 2000)
    assert result.shape == (3000, 4104)
    assert gpu.ran[-1] == plan_of().config == (fastest or ours)
    assert {aten.CONFIG, ours} <= {*gpu.ran}
    assert len(gpu.ran) == 2001


def test_torch_takes_no_turns_where_it_may_not_run(gpu):
    gpu.times[aten.CONFIG] = gpu.timed[aten.CONFIG] = 1.0
    with tritile.mode(backends="triton"):
        calls(1)
        gpu.search()
        calls(500)
    assert aten.CONFIG not in gpu.ran
    assert store_of(H200).trials(TORCH, plan_of().problem) == []


def test_calls_are_prepared_once_for_all_turns(gpu):
    """Also those that launch something else than the call that prepared them."""
    x, weight, bias = torch.empty(3000, 2056).half(), torch.empty(4104, 2056).half(), torch.empty(4104)
    gpu.noise = 0.0  # so that all turns are needed
    out = torch.empty(3000, 4104).half()
    with tritile.mode(backends="triton"):
        tritile.linear(x, weight, bias)
        gpu.search()
        (search,) = ops_spread._searches.values()
        before, ran = len(gpu.prepared), len(gpu.ran)
        for _ in range(100):
            x, weight, bias, out = (each.clone() for each in (x, weight, bias, out))
            assert tritile.linear(x, weight, bias, out=out) is out
            named = {"a": x, "b": weight, "bias": bias, "out": out}
            assert gpu.given == {name: tensor.data_ptr() for name, tensor in named.items()}
    assert search.phase == "turns"
    assert len({*gpu.ran[ran:]}) == len(search.configs) == 4
    assert len(gpu.prepared) == before + 4


def test_turns_are_for_calls_of_the_same_alignment(gpu):
    calls(1)
    gpu.search()
    calls(3)
    (search,) = ops_spread._searches.values()
    shifted = torch.empty(3000 * 2056 + 1, dtype=torch.bfloat16)[1:].view(3000, 2056)
    turns = search._calls
    calls(3, shifted)
    assert search._calls == turns
    calls(3)
    assert search._calls == turns + 3


def test_turns_keep_no_tensor(gpu, uncollected):
    calls(1)
    gpu.search()
    a = A.clone()
    places = [weakref.ref(each) for each in (a, tritile.matmul(a, B))]
    del a
    (search,) = ops_spread._searches.values()
    assert search.phase == "turns"
    assert [place() for place in places] == [None, None]


@pytest.mark.parametrize("seed", range(10))
def test_drawn_times(gpu, seed):
    """At most 2% added, and close to the fastest at the end."""
    dice = random.Random(seed)
    gpu.noise, gpu.lag, guess = dice.choice((0.0, 0.01, 0.1)), dice.randrange(1, 200), plan_of().config
    configs = [*likely(), aten.CONFIG]
    gpu.times = {config: dice.uniform(50, 500) for config in configs}
    gpu.timed = {config: us * dice.lognormvariate(0, 0.05) for config, us in gpu.times.items()}
    calls(dice.randrange(1, 100))
    gpu.search()
    calls(20_000)
    assert max(gpu.times[config] for config in gpu.ran) <= 3.4 * gpu.times[guess]
    assert added(gpu, guess) <= 0.021
    assert gpu.times[gpu.ran[-1]] <= 1.2 * min(gpu.times.values())
    assert gpu.ran[-1] == plan_of().config
    assert len(memo.CALLS) == 1


@pytest.mark.parametrize("size", [64, 1024])
def test_short_operations_are_left_to_cached(gpu, size):
    a = torch.empty(size, size, dtype=torch.bfloat16)
    calls(5, a, a)
    tritile.transpose(a)
    assert (gpu.waiting, len(memo.CALLS)) == ([], 2)


def test_short_operations_take_no_turns(gpu):
    """Which the workers find out."""
    fastest = likely()[2]
    gpu.timed[fastest] = 20.0
    calls(1)
    gpu.search()
    calls(100)
    assert {*gpu.ran[1:]} == {fastest}
    assert len(memo.CALLS) == 1


def test_model_says_what_is_short_on_a_gpu_that_nobody_measured(gpu, monkeypatch):
    a100 = target_device("a100")
    monkeypatch.setattr(ops_request.devices, "gpu", lambda index: a100)
    small = torch.empty(64, 64, dtype=torch.bfloat16)
    for a, b in ((small, small), (A, B)):
        assert tritile.plan(tritile.matmul, a.to("meta"), b.to("meta"), device=a100).source == "torch"
        calls(1, a, b)
        gpu.search()
        calls(20, a, b)
    assert [task.tunable.problem.m for task in gpu.tasks] == [3000]


@pytest.mark.parametrize("how", ["here", "table", "other mode"])
def test_what_is_known_is_not_measured(gpu, monkeypatch, how):
    problem, (config, *_) = plan_of().problem, likely()
    if how == "here":
        trial = Trial(problem, config, 60.0, error=1e-3, measured_utc="2026-01-01")
        store_of(H200).add(subject.FAMILIES["matmul"][config.family].digest, trial)
        store_of(H200).add(TORCH, Trial(problem, aten.CONFIG, 90.0, measured_utc="2026-01-01"))
    elif how == "table":
        known = pick.Plan(problem, config, "table", H200)
        monkeypatch.setattr(pick, "tabled", lambda problem, device: known)
    tritile.forget()
    with tritile.mode("cached") if how == "other mode" else contextlib.nullcontext():
        calls(3)
    assert gpu.waiting == []
    assert {*gpu.ran} == {plan_of().config}
    assert len(memo.CALLS) == 1


def test_what_ranks_agreed_on_is_measured_for_the_next_sync(gpu, monkeypatch):
    """It takes turns, and runs until then."""
    agreed, fastest, *_ = likely()
    gpu.times = gpu.timed = {agreed: 90.0, fastest: 70.0}
    choice = pick.sync.Choice(agreed, "predicted")
    monkeypatch.setattr(pick.sync, "agreed", lambda *_: choice)
    tritile.forget()
    calls(1)
    gpu.search()
    calls(300)
    assert gpu.ran[0] == gpu.ran[-1] == agreed
    assert fastest in gpu.ran
    assert pick.best_of(pick.trials(plan_of().problem, H200)).config == fastest
    assert (len(memo.CALLS), gpu.waiting) == (1, [])


def test_capture_runs_the_guess_and_begins_nothing(gpu):
    guess, fastest = plan_of().config, likely()[0]
    gpu.times[fastest] = gpu.timed[fastest] = 80.0
    gpu.capturing = True
    calls(3)
    assert (gpu.waiting, memo.CALLS) == ([], {})
    gpu.capturing = False
    calls(3)
    gpu.search()
    gpu.capturing = True
    calls(100)
    assert {*gpu.ran} == {guess}
    gpu.capturing = False
    calls(300)
    assert gpu.ran[-1] == fastest


def test_config_that_is_refused_loses_its_turns(gpu):
    first, second, *_ = likely()
    gpu.times = gpu.timed = {first: 60.0, second: 65.0}
    calls(1)
    gpu.search()
    gpu.refused.add(first)
    calls(1000)
    assert gpu.ran[-1] == second
    (failed,) = [trial for trial in pick.trials(plan_of().problem, H200) if trial.failure]
    assert failed.config == first
    assert len(gpu.ran) == 1001


def test_torch_that_refuses_ends_turns(gpu):
    guess, ours = plan_of().config, likely()[1]
    gpu.times = gpu.timed = {ours: 70.0, aten.CONFIG: 75.0}
    calls(1)
    gpu.search()
    gpu.refused.add(aten.CONFIG)
    calls(100)
    assert len(gpu.ran) == 101, "each call launches once"
    assert ours in gpu.ran
    assert ops_spread._searches[plan_of().problem, None, True] is None
    assert guess not in gpu.ran[-50:]


def test_unchecked_config_takes_no_turns(gpu):
    first, second, *_ = likely()
    gpu.times = gpu.timed = {first: 60.0, second: 65.0}
    gpu.wrong.add(first)
    calls(1)
    gpu.search()
    calls(1000)
    assert first not in gpu.ran
    assert gpu.ran[-1] == second


@pytest.mark.parametrize("error", [None, OSError("disk"), TuningError("out of memory")])
def test_what_cannot_be_measured_stays_with_the_guess(gpu, monkeypatch, error, caplog):
    guess = plan_of().config
    if error is None:
        monkeypatch.setenv("TRITILE_SPREAD_MEMORY", "0.1")  # not quite four times the tensors
    else:
        monkeypatch.setattr(own.engine, "tune", lambda *_: (_ for _ in ()).throw(error))
    calls(1)
    with caplog.at_level("WARNING", "tritile"):
        gpu.search()
    assert "stays with a guess" in caplog.text
    assert str(error or "TRITILE_SPREAD_MEMORY") in caplog.text
    calls(10)
    assert {*gpu.ran} == {guess}
    assert (gpu.tasks, gpu.waiting, len(memo.CALLS)) == ([], [], 1)
    assert spread.gate(None).acquire(blocking=False)


def test_searches_wait_for_each_other(gpu):
    """Of decorated kernels, too, on the same GPU."""
    larger = torch.empty(5000, 2056, dtype=torch.bfloat16)
    for a in (A, larger, A, larger):
        calls(2, a)
    assert len(gpu.waiting) == 2
    gpu.search()
    assert [task.tunable.problem.m for task in gpu.tasks] == [3000, 5000]
    assert all(task.tunable.shares_gpu for task in gpu.tasks)


def test_a_thread_searches(gpu, monkeypatch):
    """Also after a search that failed."""
    monkeypatch.setattr(own, "_queue", QUEUE)
    fastest, tried = likely()[0], []
    gpu.times[fastest] = gpu.timed[fastest] = 80.0

    def tune(tasks, *how):
        tried.append(threading.current_thread())
        if len(tried) == 1:
            raise OSError("disk")
        return gpu.tune(tasks, *how)

    monkeypatch.setattr(own.engine, "tune", tune)
    calls(1, torch.empty(5000, 2056, dtype=torch.bfloat16))
    calls(1)
    until = time.monotonic() + 60
    while len(gpu.loaded) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    calls(300)
    assert gpu.ran[-1] == fastest
    assert tried[0] is tried[1] is not threading.current_thread()


def test_other_modes_take_no_turns(gpu):
    guess, fastest = plan_of().config, likely()[0]
    gpu.times[fastest] = gpu.timed[fastest] = 80.0
    with tritile.mode("cached"):
        calls(1)
    calls(1)
    gpu.search()
    with tritile.mode("cached"):
        prepared = len(gpu.prepared)
        calls(100)
        assert len(gpu.prepared) == prepared
    assert {*gpu.ran} == {guess}


@pytest.mark.parametrize("when", ["turns", "over"])
def test_call_prepared_as_turns_begin_is_not_kept(gpu, monkeypatch, when):
    """By another thread, after the search has dropped what was prepared."""
    fastest, cache = likely()[0], ops_spread.cache_launch
    gpu.times[fastest] = gpu.timed[fastest] = 80.0 if when == "turns" else 20.0

    def cached(*arguments, **how):
        gpu.search()
        cache(*arguments, **how)

    monkeypatch.setattr(ops_spread, "cache_launch", cached)
    calls(1)
    assert memo.CALLS == {}
    calls(300)
    assert gpu.ran[-1] == fastest
    assert len(memo.CALLS) == 1


def test_call_prepared_as_a_search_ends_is_not_kept(gpu):
    calls(1)
    (search,) = ops_spread._searches.values()
    memo.CALLS.clear()
    search._over = True  # in its thread, which goes on to drop what was prepared
    calls(1)
    assert memo.CALLS == {}


def test_forget_leaves_the_next_search_alone(gpu):
    guess = plan_of().config
    calls(1)
    (first,) = ops_spread._searches.values()
    tritile.forget()
    calls(1)
    (second,) = ops_spread._searches.values()
    assert second is not first
    first._end()
    assert [*ops_spread._searches.values()] == [second]
    assert {*gpu.ran} == {guess}


def test_transposes(gpu):
    """Those in place have one config."""
    x = torch.empty(6000, 6000)
    tritile.transpose(x, out=x)
    assert gpu.waiting == []
    tritile.transpose(x)
    assert len(gpu.waiting) == 1
    gpu.search()
    (task,) = gpu.tasks
    assert task.tunable.problem.op == "permute"
    for _ in range(3):
        tritile.transpose(x)
    (search,) = ops_spread._searches.values()
    assert (search.phase, search._calls) == ("turns", 3)
    memo.CALLS.clear()
    tritile.transpose(x, out=x)
    assert search._calls == 3
    for _ in range(300):
        tritile.transpose(x)
    assert search.phase == "over"


def test_guess_stays_in_a_tie(gpu):
    """With torch's kernel, which would run if the store held the same time for both."""
    a, b = torch.empty(2000, 2056, dtype=torch.bfloat16), torch.empty(2056, 4099, dtype=torch.bfloat16)
    guess, gpu.noise = plan_of(a, b).config, 0.0
    assert guess != aten.CONFIG
    calls(1, a, b)
    gpu.timed = {guess: 90.0, aten.CONFIG: 90.0}
    gpu.search()
    calls(300, a, b)
    assert aten.CONFIG in gpu.ran
    assert gpu.ran[-1] == guess


def test_wrong_arguments_take_no_turn(gpu):
    calls(1)
    gpu.search()
    ran = len(gpu.ran)
    with pytest.raises(OverlapError):
        tritile.matmul(A[:2056, :2056], B[:, :2056], out=A[:2056, :2056])
    assert len(gpu.ran) == ran


def test_few_copies_on_a_shared_gpu(monkeypatch):
    """And the least of several times."""
    problem = plan_of(A[:64, :64], B[:64, :64]).problem
    alone, shared = (subject.TunableProblem(problem, H200, shares) for shares in (False, True))
    assert (alone.copies, shared.copies) == (400, 2)
    monkeypatch.setattr(subject, "copies_of", lambda *_: [])
    monkeypatch.setattr(subject, "graph_of", lambda run, calls: SimpleNamespace(launches=len(calls)))
    monkeypatch.setattr(torch, "ones", lambda *_, **how: torch.zeros(1, 1))
    config = Config((), 1, 1, family=ATEN)
    kinds = [isinstance(each.harness(2).timed(config, None), Least) for each in (alone, shared)]
    assert kinds == [False, True]
