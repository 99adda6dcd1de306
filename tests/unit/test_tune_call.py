"""`tritile.tune`: one call is searched by the engine of the command line; stand-ins measure."""

import contextlib
import copy
import pickle

import pytest
import torch
import triton
import triton.language as tl

import tritile
from tritile.core.device import HOST, target_device
from tritile.core.problem import MatmulProblem
from tritile.errors import InvalidValueError, TuningError, UnsupportedError
from tritile.families.registry import FAMILIES
from tritile.lab import tune as tuning
from tritile.planning import aten, model, plans
from tritile.planning.store import store_of
from tritile.planning.trial import TORCH, Trial
from tritile.tune.measure.engine import Tuned

pytestmark = pytest.mark.interpreted
H200 = target_device("nvidia-h200")
PROBLEM = MatmulProblem(1, 1234, 4096, 4096, "bfloat16", "bfloat16", b_layout="column")


def operands():
    a, b = (torch.empty(size, 4096, dtype=torch.bfloat16, device="meta") for size in (1234, 4096))
    return a, b.mT


@pytest.fixture
def asked(monkeypatch):
    """What the engine was asked for, on a machine with an H200 whose configs take 12 and 10 us."""
    plans.forget()
    found = []

    def remember(us, config, **rest):
        trial = Trial(PROBLEM, config, us, error=0.0, **rest)
        store_of(H200).add(FAMILIES["matmul"][config.family].digest, trial)
        return trial

    def search(problems, device, shop, keep, rules, force):
        found.append((problems, rules, force))
        first, second, third = model.ranked(PROBLEM, H200)[:3]
        remember(None, third, failure="hung")
        remember(12.0, first)
        yield Tuned(PROBLEM, remember(10.0, second), 3, 0.5)

    def beside(problem, device, gpu):
        store_of(H200).add(TORCH, Trial(problem, aten.CONFIG, 15.0))

    monkeypatch.setattr(tuning.devices, "current_index", lambda: 0)
    monkeypatch.setattr(tuning.devices, "gpu", lambda index: H200)
    monkeypatch.setattr(tuning.now, "borrowed", lambda gpu: contextlib.nullcontext("shop"))
    monkeypatch.setattr(tuning.now, "tune", search)
    monkeypatch.setattr(tuning.now, "time_torch", beside)
    yield found
    plans.forget()


@pytest.mark.parametrize("what", [tritile.matmul, "matmul"], ids=["itself", "its name"])
def test_a_call_is_searched_and_the_best_is_told_with_torchs_time(asked, what):
    found = tritile.tune(what, *operands())
    assert (found.problem, found.device, found.how) == (PROBLEM, H200, "searched")
    assert found.config == model.ranked(PROBLEM, H200)[1]
    assert (found.us, found.torch_us, found.ratio) == (10.0, 15.0, 1.5)
    assert (found.tried, found.failed) == (3, 1)
    assert "searched  3 configs, 1 of them failed" in repr(found)
    assert "15.0 us, 1.50 times as long" in repr(found)
    assert "<caption>Tuned 1234x4096x4096 NT bfloat16 on NVIDIA H200" in found._repr_html_()
    assert plans.plan_for(PROBLEM, H200, "cached").source == "exact"
    ((problems, rules, force),) = asked
    assert (problems, rules.exhaustive, force) == ([PROBLEM], False, False)


def test_options_reach_the_search(asked):
    tritile.tune(PROBLEM, exhaustive=True, budget=3, force=True)
    ((_, rules, force),) = asked
    assert (rules.exhaustive, rules.problem_s, force) == (True, 3, True)


def test_what_is_remembered_is_not_measured_again(asked, monkeypatch):
    tritile.tune(PROBLEM)
    monkeypatch.setattr(tuning, "is_tuned", lambda problem, device: True)
    again = tritile.tune(PROBLEM)
    assert (len(asked), again.how, again.us, again.tried) == (1, "remembered", 10.0, 0)
    assert "nothing was left to measure" in repr(again)


def test_where_no_config_works_the_reason_is_told(asked, monkeypatch):
    failed = Tuned(PROBLEM, None, 4, 1.0, "every config hung")
    monkeypatch.setattr(tuning.now, "tune", lambda *given: iter([failed]))
    with pytest.raises(TuningError, match="every config hung"):
        tritile.tune(PROBLEM)


@pytest.mark.parametrize(
    ("what", "args", "words", "error", "wanted"),
    [
        ("glue", (), {}, InvalidValueError, "tune: what is 'glue'"),
        (torch.matmul, (), {}, InvalidValueError, "tritile.matmul"),
        (PROBLEM, (1,), {}, InvalidValueError, "takes no arguments"),
        (PROBLEM, (), {"budget": 0}, InvalidValueError, "budget is 0"),
        ("matmul", (torch.zeros(3, 4), torch.zeros(5, 6)), {}, tritile.errors.ShapeError, "K is 4"),
    ],
)
def test_bad_requests_are_refused(asked, what, args, words, error, wanted):
    with pytest.raises(error, match=wanted):
        tritile.tune(what, *args, **words)
    assert asked == []


def test_nothing_is_measured_where_nothing_may_be(asked, monkeypatch):
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
    with pytest.raises(UnsupportedError, match="no GPU here"):
        tritile.tune(doubled(), torch.zeros(8), torch.zeros(8), 8, grid=(1,))


@triton.jit
def _double(x, out, n, BLOCK: tl.constexpr):
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(out + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


def doubled(**words):
    configs = [triton.Config({"BLOCK": block}) for block in (16, 32, 64)]
    return tritile.autotune(configs, ["n"], **words)(_double)


def test_a_decorated_kernel_is_searched_by_its_own_engine():
    times = iter((3.0, 1.0, 2.0, 6.0, 5.0, 4.0))

    def bench(call, quantiles):
        call()
        return [next(times)] * 3

    kernel, x, out = doubled(do_bench=bench), torch.ones(40), torch.zeros(40)
    found = tritile.tune(kernel, x, out, 40, grid=(1,))
    assert (found.config.kwargs, found.us, found.tried, found.how) == ({"BLOCK": 32}, 1000.0, 3, "searched")
    assert (found.device, found.problem.label) == (HOST, "_double n=40")
    plan = tritile.plan(kernel, x, out, 40)
    assert (plan.source, plan.config.kwargs, plan.us) == ("exact", {"BLOCK": 32}, 1000.0)
    again = tritile.tune(kernel, x, out, 40, grid=(1,))
    assert (again.config.kwargs, again.tried, again.how) == ({"BLOCK": 32}, 0, "remembered")
    anew = tritile.tune(kernel, x, out, 40, grid=(1,), force=True)
    assert (anew.config.kwargs, anew.us, anew.tried) == ({"BLOCK": 64}, 4000.0, 3)
    with pytest.raises(InvalidValueError, match="grid="):
        tritile.tune(kernel, x, out, 40)


def test_copies_and_pickles_of_the_package_are_the_package():
    assert pickle.loads(pickle.dumps(tritile.tune)) is tritile.tune
    assert copy.deepcopy({"how": tritile.tune})["how"] is copy.copy(tritile.tune) is tritile.tune


def test_the_package_of_the_same_name_is_the_function_too():
    import tritile.tune.search

    assert callable(tritile.tune.search.screening)
    assert callable(tritile.tune)
