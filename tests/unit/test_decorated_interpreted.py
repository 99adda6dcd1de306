"""A decorated kernel's call in the interpreter: its answer is checked, and what its pruning leaves runs."""

import warnings

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import tritile
from tests.unit.test_decorated import (
    GOOD,
    H200,
    LIMIT,
    PROBLEM,
    call_of,
    even,
    named_grid,
    right,
    scale,
    staged,
)
from tests.unit.test_log import add_one, records
from tritile.core import device as devices
from tritile.core.config import Config
from tritile.core.device import HOST
from tritile.errors import TuningError, UntunedWarning
from tritile.tuner.decorated import TunableKernel
from tritile.tuner.measure.shipping import pack
from tritile.tuner.store.trials import store_of

pytestmark = pytest.mark.interpreted
__all__ = ["records"]


WRONG = r"wrong answer: out\[76\] is"


@pytest.mark.parametrize(
    ("reference", "stray", "found"),
    [
        (right, 0, 0.0),
        (None, 0, None),
        (None, 2, "outside the memory"),
        (lambda x, N: {"out": 3 * x[:N] + (torch.arange(N) == 76)}, 0, WRONG),
        (right, -1, f"{WRONG} never written"),
    ],
    ids=["right", "no reference", "a guard", "wrong", "not written whole"],
)
def test_answer_checked_between_guards(tmp_path, reference, stray, found):
    _, stage = staged(tmp_path, reference=reference)
    config = Config.of(BLOCK=32, STRAY=stray)
    if isinstance(found, str):
        with pytest.raises(TuningError, match=found):
            stage.check(config, None)
    else:
        assert stage.check(config, None) == found


def test_in_place_output_not_poisoned(tmp_path):
    x = torch.randn(77)
    call = call_of(x, x, reference=right)
    subject = TunableKernel(PROBLEM, HOST, "0" * 16, pack(call, tmp_path, LIMIT, host_too=True))
    assert subject.harness(1).check(GOOD, None) == 0.0


def host_call(reference, *strays, **told):
    """A kernel whose config of STRAY=-1 leaves an element unwritten, and arguments in host memory."""
    configs = [triton.Config({"BLOCK": 32, "STRAY": stray}) for stray in strays]
    kernel = tritile.autotune(configs, ["N"], reference=reference, **told)(even(scale))
    return kernel, (torch.randn(90), torch.full((77,), 5.0), 77)


@pytest.mark.parametrize("mode", [None, "strict", "cached"])
def test_host_tensors_first_pruned_config(mode):
    def prune(configs, named, **rest):
        return [config for config in configs if config.kwargs["STRAY"] >= 0]

    how = {"prune_configs_by": {"early_config_prune": prune}, "mode": mode}
    kernel, args = host_call(right, -1, 0, 1, **how)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UntunedWarning)
        kernel[named_grid](*args)
    assert kernel.best_config.kwargs["STRAY"] == 0
    assert torch.equal(args[1], 3 * args[0][:77])


def test_winner_measured_here_is_checked():
    strays, ran = (0, -1, 1), []

    def bench(call, quantiles):
        ran.append(strays[len(ran)])
        return 2.0 + ran[-1]

    kernel, args = host_call(right, *strays, do_bench=bench)
    with tritile.mode("tune"):
        kernel[named_grid](*args)
    assert kernel.best_config.kwargs["STRAY"] == 0
    found = {t.config["STRAY"]: t for t in store_of(HOST).trials(kernel.digest, kernel.problem(args, {}))}
    assert (found[0].us, found[0].error) == (2000.0, 0.0)
    assert found[-1].us is None
    assert "wrong answer" in found[-1].failure
    assert found[1].error is None  # slower than one that is right
    tritile.forget()
    with tritile.mode("strict"):
        kernel[named_grid](*args)
    assert kernel.best_config.kwargs["STRAY"] == 0


def test_interpreted_is_of_no_gpu(monkeypatch):
    monkeypatch.setattr(devices, "current_gpu", lambda: H200)
    kernel, args = host_call(None, 0)
    assert kernel.device_of(args, {}) is kernel.device_of((), {"N": 5}) is HOST


def test_log_measurements_winner_plan(records):
    configs = [
        triton.Config({"BLOCK": 64}),
        triton.Config({"BLOCK": 128}, pre_hook=lambda given: None),
        triton.Config({"BLOCK": 64}, num_warps=2, ir_override="none.ttir"),  # another program of that name
    ]
    kernel = tritile.autotune(configs, ["N"], do_bench=lambda call, quantiles: call() or 1.0)(add_one)
    for _ in range(2):
        kernel[(2,)](torch.zeros(100), 100)
    *measured, winner, plan = records
    assert [(record.name, record.levelname, record.us) for record in measured] == [
        ("tritile.tune", "DEBUG", 1000.0)
    ] * 3
    assert {record.config.split()[0] for record in measured} == {"BLOCK=64", "BLOCK=128"}
    assert (winner.levelname, winner.us, winner.config) == ("INFO", 1000.0, plan.config)
    assert (plan.name, plan.source) == ("tritile.plan", "exact")
    assert plan.problem.startswith("add_one")


# --- Arguments that Triton's interpreter takes by itself ---

OFFSET = tl.constexpr(1)


@triton.jit
def plus_offset(x):
    return x + OFFSET


@triton.jit
def applied(pair, described, n, CHANGE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = CHANGE(tl.load(pair[0] + at, mask=at < n)) + described.load([0])
    tl.store(pair[1] + at, x, mask=at < n)


def test_tuples_descriptors_functions_globals(monkeypatch):
    kernel = tritile.autotune([triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})], ["n"])(applied)
    x, out, more = torch.arange(16.0), torch.zeros(16), 10 * torch.ones(16)
    for offset in (1, 5):
        monkeypatch.setitem(globals(), "OFFSET", tl.constexpr(offset))
        kernel[(1,)]((x, out), TensorDescriptor.from_tensor(more, [16]), 16, plus_offset)
        assert torch.equal(out, x + offset + 10)
