"""What a user has measured: `tritile.tune`, `tritile tune --model`, and mode "tune"; stand-ins measure."""

import contextlib
import copy
import importlib
import json
import pickle
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
import typer.testing
from torch import nn

import tritile
from tests.layers import TOKENS, Net
from tritile.choose import aten, pick
from tritile.cli import app, shared, tune_model
from tritile.core.device import target_device
from tritile.core.problem import MatmulProblem, QuantizedProblem
from tritile.core.settings import current_mode
from tritile.errors import InvalidValueError, ShapeError, TuningError, UnsupportedError
from tritile.families.registry import FAMILIES
from tritile.families.space import legal_configs
from tritile.lab import tune as tuning
from tritile.nn.exchanged import Comparison, ConvertedLinear
from tritile.tune import now
from tritile.tune.subject import problem as subject
from tritile.tune.subject import torch_calls
from tritile.tune.subject.problem import is_tuned
from tritile.tuner.measure.benchmark import ScreenResult
from tritile.tuner.measure.engine import Tuned
from tritile.tuner.measure.timing import Timing
from tritile.tuner.measure.workers import WorkerError
from tritile.tuner.store.trial import TORCH, Trial
from tritile.tuner.store.trials import store_of

H200 = target_device("nvidia-h200")
PROBLEM = MatmulProblem(1, 1234, 4096, 4096, "bfloat16", "bfloat16", b_layout="column")
PACKED = QuantizedProblem(1234, 4096, 4096, "bfloat16", 4, 128)
UNSERVED = replace(PROBLEM, dtype="float64", out_dtype="float64")


def remembered(us, config, problem=PROBLEM, error=0.0, **rest):
    trial = Trial(problem, config, us, error=error, **rest)
    store_of(H200).add(FAMILIES[problem.op][config.family].digest, trial)
    return trial


@pytest.fixture
def forgotten():
    pick.forget()
    yield
    pick.forget()


# --- tritile.tune


def operands():
    a, b = (torch.empty(size, 4096, dtype=torch.bfloat16, device="meta") for size in (1234, 4096))
    return a, b.mT


@pytest.fixture
def asked(monkeypatch, forgotten):
    """What the engine was asked for, on a machine with an H200 whose configs take 12 and 10 us."""
    found = []

    def search(problems, device, shop, keep, rules, force, among=()):
        found.append((problems, rules, force))
        first, second, third = legal_configs(PROBLEM, H200, "tile")[:3]
        remembered(None, third, failure="hung")
        remembered(12.0, first)
        yield Tuned(PROBLEM, remembered(10.0, second), 3, 0.5)

    def beside(problem, device, gpu):
        store_of(H200).add(TORCH, Trial(problem, aten.CONFIG, 15.0))

    monkeypatch.setattr(tuning.devices, "current_index", lambda: 0)
    monkeypatch.setattr(tuning.devices, "gpu", lambda index: H200)
    monkeypatch.setattr(tuning.now, "shared_runner", lambda gpu: contextlib.nullcontext("shop"))
    monkeypatch.setattr(tuning.now, "tune", search)
    monkeypatch.setattr(tuning.now, "time_torch", beside)
    return found


@pytest.mark.parametrize("what", [tritile.matmul, "matmul"], ids=["itself", "its name"])
def test_call_searched_with_torch_time(asked, what):
    found = tritile.tune(what, *operands())
    assert (found.problem, found.device, found.how) == (PROBLEM, H200, "searched")
    assert found.config == legal_configs(PROBLEM, H200, "tile")[1]
    assert (found.us, found.torch_us, found.ratio) == (10.0, 15.0, 1.5)
    assert (found.tried, found.failed) == (3, 1)
    assert "searched  3 configs, 1 of them failed" in repr(found)
    assert "15.0 us, 1.50 times as long" in repr(found)
    assert "<caption>Tuned 1234x4096x4096 NT bfloat16 on NVIDIA H200" in found._repr_html_()
    assert pick.plan_for(PROBLEM, H200, "cached").source == "exact"
    ((problems, rules, force),) = asked
    assert (problems, rules.exhaustive, force) == ([PROBLEM], False, False)


def test_options_reach_the_search(asked):
    tritile.tune(PROBLEM, exhaustive=True, budget=3, force=True)
    ((_, rules, force),) = asked
    assert (rules.exhaustive, rules.problem_s, force) == (True, 3, True)


def test_remembered_not_measured_again(asked, monkeypatch):
    tritile.tune(PROBLEM)
    monkeypatch.setattr(tuning, "is_tuned", lambda problem, device: True)
    again = tritile.tune(PROBLEM)
    assert (len(asked), again.how, again.us, again.tried) == (1, "remembered", 10.0, 0)
    assert "there was nothing left to measure" in repr(again)


def test_no_working_config_says_why(asked, monkeypatch):
    failed = Tuned(PROBLEM, None, 4, 1.0, "every config hung")
    monkeypatch.setattr(tuning.now, "tune", lambda *given, among: iter([failed]))
    with pytest.raises(TuningError, match="every config hung"):
        tritile.tune(PROBLEM)


@pytest.mark.parametrize(
    ("what", "args", "words", "error", "wanted"),
    [
        ("glue", (), {}, InvalidValueError, "tune: what is 'glue'"),
        (torch.matmul, (), {}, InvalidValueError, "tritile.matmul"),
        (PROBLEM, (1,), {}, InvalidValueError, "takes no arguments"),
        (PROBLEM, (), {"budget": 0}, InvalidValueError, "budget is 0"),
        ("matmul", (torch.zeros(3, 4), torch.zeros(5, 6)), {}, ShapeError, "K is 4"),
    ],
)
def test_bad_requests_are_refused(asked, what, args, words, error, wanted):
    with pytest.raises(error, match=wanted):
        tritile.tune(what, *args, **words)
    assert asked == []


def test_nothing_measured_if_forbidden(asked, monkeypatch):
    monkeypatch.setattr(tuning.devices, "capturing", lambda: True)
    with pytest.raises(UnsupportedError, match="captured"):
        tritile.tune(PROBLEM)
    x = torch.zeros(5, 5)
    with pytest.raises(InvalidValueError, match="in place"):
        tritile.tune("transpose", x, out=x)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_nothing_is_measured():
    with pytest.raises(UnsupportedError, match="tune: there is no GPU here"):
        tritile.tune("matmul", torch.zeros(3, 4), torch.zeros(4, 5))


def test_package_is_function_and_copies():
    import tritile.tuner.search

    assert callable(tritile.tuner.search.screening)
    assert callable(tritile.tune)
    assert pickle.loads(pickle.dumps(tritile.tune)) is tritile.tune
    assert copy.deepcopy({"how": tritile.tune})["how"] is copy.copy(tritile.tune) is tritile.tune


# --- tritile tune --model

CONVERT = importlib.import_module("tritile.nn.convert")
STEPS = """
value = 3
def step():
    net(tokens)
"""


@pytest.fixture
def steps(tmp_path, monkeypatch):
    (tmp_path / "steps_of_a_model.py").write_text(STEPS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module("steps_of_a_model")
    vars(module).update(net=Net(), tokens=TOKENS)
    return module


def run(*arguments):
    return typer.testing.CliRunner().invoke(app, ["tune", *arguments])


def test_step_layers_measured_in_turns(monkeypatch, steps):
    asked, sides = [], []

    def compared(call, weight, *rest):
        asked.append(current_mode())
        wins = weight.shape[0] == steps.net.up.out_features
        return Comparison(2.0 if wins else 0.5, wins, "measured", 100.0)

    def seconds(step):
        sides.append(type(steps.net.up))
        return {ConvertedLinear: 0.001, nn.Linear: 0.002}[sides[-1]]

    monkeypatch.setattr(CONVERT, "compare", compared)
    monkeypatch.setattr(CONVERT, "_target", lambda *given: (H200, 0))
    monkeypatch.setattr(tune_model, "gpu_here", lambda: H200)
    monkeypatch.setattr(tune_model, "_seconds", seconds)
    done = run("--model", "steps_of_a_model:step", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {"model": "steps_of_a_model:step", "torch_ms": 2.0, "tritile_ms": 1.0}
    assert set(asked) == {"tune"}
    assert current_mode() == "cached"
    assert sides[:4] == [ConvertedLinear, nn.Linear, nn.Linear, ConvertedLinear]
    assert not torch.nn.modules.module._global_forward_pre_hooks


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("steps_of_a_model", "module:name"),
        (":step", "module:name"),
        ("no_such_module_here:step", "no_such_module_here"),
        ("steps_of_a_model:other", "other"),
        ("steps_of_a_model:value", "int is not a function"),
    ],
)
def test_what_names_no_function_is_refused(name, text, steps):
    with pytest.raises(InvalidValueError, match=text):
        shared.function_named("--model", name)


# --- Mode "tune"


def fastest(problem):
    """The config that is on record as the fastest."""
    return remembered(40.0, legal_configs(problem, H200, "tile")[0], problem).config


@pytest.fixture
def shop(monkeypatch, forgotten):
    """Times by config, and configs whose answers are wrong. Without a list of configs it is "searched"."""
    times, wrong, searched_now = {}, set(), now.searched_now

    class Shop:
        max_resident = 1

        def compile(self, subject, config, for_check=False):
            done = Future()
            done.set_result(None)
            return done

        def begin(self, subject):
            if not times:
                raise TuningError("no memory")

        def screen(self, subject, config, fastest_us):
            if config not in times:
                raise WorkerError("it does not run")
            return ScreenResult(Timing(times[config], 0.0), None)

        def race(self, subject, configs):
            if not {*configs} <= times.keys():
                raise WorkerError("it does not run")
            return [[times[config]] * 5 for config in configs]

        def check(self, subject, config):
            if config in wrong:
                raise WorkerError("wrong answer")
            return 1e-3

        def end(self, subject):
            pass

    def searched(*given, among=()):
        return searched_now(*given, among=among) if among else "searched"

    monkeypatch.setattr(now, "shared_runner", lambda gpu: contextlib.nullcontext(Shop()))
    monkeypatch.setattr(now, "searched_now", searched)
    return times, wrong


def test_fastest_likely_runs_and_stays(shop):
    times, _ = shop
    likely = pick.likely(PROBLEM, H200, now.RACED)
    assert len(likely) == now.RACED
    times |= {config: 10.0 + place for place, config in enumerate(reversed(likely))}
    assert now.tuned_now(PROBLEM, H200, 0) == likely[-1]
    plan = pick.plan_for(PROBLEM, H200, "tune")
    assert (plan.source, plan.config, plan.us) == ("exact", likely[-1], 10.0)
    assert {trial.config for trial in pick.trials(PROBLEM, H200)} == {*likely}
    assert not is_tuned(PROBLEM, H200)  # `tritile tune` goes on from here


def test_wrong_answer_costs_config(shop):
    times, wrong = shop
    likely = pick.likely(PROBLEM, H200, now.RACED)
    times |= {config: 10.0 + place for place, config in enumerate(likely)}
    wrong.add(likely[0])
    assert now.tuned_now(PROBLEM, H200, 0) == likely[1]
    failed = [trial for trial in pick.trials(PROBLEM, H200) if trial.failure]
    assert [trial.config for trial in failed] == [likely[0]]
    wrong.update(likely)
    assert now.tuned_now(PROBLEM, H200, 0) == "searched"


def test_all_searched_without_predictor(shop):
    times, _ = shop
    assert now.tuned_now(UNSERVED, H200, 0) == "searched"
    assert now.tuned_now(PROBLEM, H200, 0) == "searched"  # there was no memory
    times[legal_configs(UNSERVED, H200)[0]] = 1.0
    assert now.tuned_now(PROBLEM, H200, 0) == "searched"  # nothing ran


@pytest.mark.parametrize(
    ("change", "run"),
    [
        ({}, torch_calls.multiply),
        ({"epilogue": "bias=row"}, torch_calls.add),
        ({"epilogue": "bias=row gelu"}, None),
        ({"epilogue": "bias=row", "batch": 3}, None),
        ({"epilogue": "gelu", "dtype": "float32", "out_dtype": "float32"}, torch_calls.compose),
        (PACKED, torch_calls.unpack_and_multiply),
    ],
)
def test_torch_timed_with_recorded_best(shop, change, run):
    """Its time on record is by as much longer than ours as it was in the race."""
    times, _ = shop
    problem = PACKED if change is PACKED else replace(PROBLEM, **change)
    found = torch_calls.run_of(problem)
    assert getattr(found, "func", found) == run
    times[aten.CONFIG] = 25.0
    now.time_torch(problem, H200, 0)
    assert store_of(H200).trials(TORCH, problem) == []  # nothing of ours is on record
    times[fastest(problem)] = 10.0
    now.time_torch(problem, H200, 0)
    best = store_of(H200).best(TORCH, problem)
    assert (best and best.us) == (None if run is None else pytest.approx(100.0))


def test_torch_failure_is_remembered(shop):
    times, _ = shop
    times[fastest(PROBLEM)] = 10.0
    now.time_torch(PROBLEM, H200, 0)
    (failed,) = store_of(H200).trials(TORCH, PROBLEM)
    assert failed.failure == "it does not run"


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_torch_timed_in_precision(monkeypatch, cuda_matmul, precision):
    seen, stage = [], object.__new__(subject._Harness)
    stage._problem = replace(PROBLEM, dtype="float32", out_dtype="float32", precision=precision)
    run = lambda call: seen.append((call, cuda_matmul.fp32_precision))  # noqa: E731
    monkeypatch.setattr(torch_calls, "run_of", lambda problem: run)
    cuda_matmul.fp32_precision = "ieee" if precision == "tf32" else "tf32"
    stage.prepared(aten.CONFIG)[0]("call")
    assert seen == [("call", precision)]
    assert cuda_matmul.fp32_precision != precision
