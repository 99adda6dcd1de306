"""A decorated kernel's call in the interpreter: its answer is checked, and what its pruning leaves runs."""

import contextlib
import warnings
from dataclasses import replace

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
from tritile.planning.store import store_of
from tritile.tune.decorated import KernelCall, KernelSubject
from tritile.tune.measure.shipping import pack

pytestmark = pytest.mark.interpreted
__all__ = ["records"]


WRONG = "wrong answer: relative error of out"


@pytest.mark.parametrize(
    ("reference", "stray", "found"),
    [
        (right, 0, 0.0),
        (None, 0, None),
        (None, 2, "outside the memory"),
        (lambda x, N: {"out": 3 * x[:N] * 1.001}, 0, WRONG),
        (right, -1, f"{WRONG} inf|nan"),
    ],
    ids=["right", "no reference", "a guard", "wrong", "not written whole"],
)
def test_an_answer_is_checked_on_copies_between_guards(tmp_path, reference, stray, found):
    _, stage = staged(tmp_path, reference=reference)
    config = Config.of(BLOCK=32, STRAY=stray)
    if isinstance(found, str):
        with pytest.raises(TuningError, match=found):
            stage.check(config, None)
    else:
        assert stage.check(config, None) == found


def test_what_is_read_is_checked_between_guards_of_numbers_too(tmp_path):
    """NaN times three is the NaN that it was: a load and a store without a mask change no guard of NaN."""
    x = torch.randn(64)
    launched = {"EVEN": True, "grid": (3,), "warmup": False}
    call = KernelCall(PROBLEM, HOST, "0" * 16, scale, ("x", "out", "N"), (x, x, 64), launched)
    for restored, found in (((), None), (("x", "out"), "outside the memory")):
        own = replace(call, restore_value=restored)
        shipment = pack(own, tmp_path, LIMIT, host_too=True)
        stage = KernelSubject(PROBLEM, HOST, "0" * 16, shipment).stage(1)
        with pytest.raises(TuningError, match=found) if found else contextlib.nullcontext():
            stage.check(Config.of(BLOCK=32, STRAY=2), None)


def test_an_output_that_is_an_input_too_is_not_poisoned(tmp_path):
    x = torch.randn(77)
    call = call_of(x, x, reference=right)
    subject = KernelSubject(PROBLEM, HOST, "0" * 16, pack(call, tmp_path, LIMIT, host_too=True))
    assert subject.stage(1).check(GOOD, None) == 0.0


def host_call(reference, *, strays=(1, 0), configs=None, **told):
    """A kernel whose config of STRAY=-1 leaves an element unwritten, and arguments in host memory."""
    configs = configs or [triton.Config({"BLOCK": 32, "STRAY": stray}) for stray in strays]
    kernel = tritile.autotune(configs, ["N"], reference=reference, **told)(even(scale))
    x, out = torch.randn(90), torch.full((90,), 5.0)
    return kernel, (x, out[:77], 77), out


def test_host_tensors_run_with_the_first_config_that_the_pruning_leaves():
    def prune(configs, named, **rest):
        return [config for config in configs if config.kwargs["STRAY"] >= 0]

    kernel, args, out = host_call(right, strays=(-1, 0, 1), prune_configs_by={"early_config_prune": prune})
    kernel[named_grid](*args)
    assert kernel.best_config.kwargs["STRAY"] == 0
    assert torch.equal(args[1], 3 * args[0][:77])
    assert bool((out[77:] == 5).all())


def test_a_winner_measured_in_this_process_is_checked():
    times = {-1: 1.0, 0: 2.0, 1: 3.0}
    ran = []

    def bench(call, quantiles):
        ran.append(strays[len(ran)])
        return times[ran[-1]]

    strays = (0, -1, 1)
    kernel, args, _ = host_call(right, strays=strays, do_bench=bench)
    with tritile.mode("tune"):
        kernel[named_grid](*args)
    assert kernel.best_config.kwargs["STRAY"] == 0
    problem = kernel.problem(args, {})
    found = {t.config["STRAY"]: t for t in store_of(HOST).trials(kernel.digest, problem)}
    assert (found[0].us, found[0].error) == (2000.0, 0.0)
    assert found[-1].us is None
    assert "wrong answer" in found[-1].failure
    assert found[1].error is None  # slower than one that is right
    tritile.forget()
    with tritile.mode("strict"):
        kernel[named_grid](*args)
    assert kernel.best_config.kwargs["STRAY"] == 0


def test_strict_and_cached_run_host_tensors_as_matmul_does():
    a = torch.randn(3, 5)
    for mode in ("strict", "cached"):
        kernel, args, _ = host_call(None, strays=(0, 1))
        with tritile.mode(mode), warnings.catch_warnings():
            warnings.simplefilter("error", UntunedWarning)
            kernel[named_grid](*args)
            assert torch.equal(args[1], 3 * args[0][:77])
            torch.testing.assert_close(tritile.matmul(a, a.mT), a @ a.mT)


def test_what_is_interpreted_is_of_no_gpu_where_there_is_one(monkeypatch):
    monkeypatch.setattr(devices, "current_gpu", lambda: H200)
    kernel, args, _ = host_call(None)
    assert kernel.device_of(args, {}) is HOST
    assert kernel.device_of((), {"N": 5}) is HOST


# --- The log ---


def test_a_decorated_kernels_choice_is_logged_once(records):
    kernel = tritile.autotune([triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], ["N"])(add_one)
    x = torch.zeros(100)
    for _ in range(3):
        kernel[(2,)](x, 100)
    (record,) = records
    assert (record.name, record.source) == ("tritile.plan", "model")
    assert record.problem.startswith("add_one")
    assert record.config == "BLOCK=64 num_warps=4 num_stages=3"


def test_measurements_of_a_decorated_kernel_are_logged_then_its_winner_then_its_plan(records):
    def bench(call, quantiles):
        call()
        return [1.0, 1.0, 1.0]

    configs = [triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128}, pre_hook=lambda given: None)]
    configs.append(
        triton.Config({"BLOCK": 64}, num_warps=2, ir_override="none.ttir")
    )  # another program of that name
    kernel = tritile.autotune(configs, ["N"], do_bench=bench, mode="tune")(add_one)
    kernel[(2,)](torch.zeros(100), 100)
    kernel[(2,)](torch.zeros(100), 100)
    *measured, winner, plan = records
    assert {(record.name, record.levelname) for record in measured} == {("tritile.tune", "DEBUG")}
    assert {record.config.split()[0] for record in measured} == {"BLOCK=64", "BLOCK=128"}
    assert [record.us for record in measured] == [1000.0] * 3
    assert (winner.levelname, winner.us, winner.config) == ("INFO", 1000.0, plan.config)
    assert (plan.name, plan.source) == ("tritile.plan", "exact")


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


def test_tuples_descriptors_functions_and_changed_globals_are_taken(monkeypatch):
    kernel = tritile.autotune([triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})], ["n"])(applied)
    x, out, more = torch.arange(16.0), torch.zeros(16), 10 * torch.ones(16)
    for offset in (1, 5):
        monkeypatch.setitem(globals(), "OFFSET", tl.constexpr(offset))
        kernel[(1,)]((x, out), TensorDescriptor.from_tensor(more, [16]), 16, plus_offset)
        assert torch.equal(out, x + offset + 10)
