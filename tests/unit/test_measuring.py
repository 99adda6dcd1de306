"""What `tritile.autotune` measures and remembers: any config, any tensor, told apart by what they launch.

Times are made up; every run is real, in Triton's interpreter, but for calls that say they are on a GPU.
"""

import ast
import errno
import functools
import inspect
import io
import logging
import math
import os
import sys
import warnings
from concurrent.futures import Future

import pytest
import torch
import triton
import triton.language as tl

import tritile
from tests.unit.test_autotune import TIMES, Bench, another_process, configs, run, trials, tuned
from tritile.core.device import HOST, target_device
from tritile.core.problem import KernelProblem
from tritile.errors import (
    InvalidValueError,
    IsolationWarning,
    TuningError,
    UnsupportedError,
    UntunedWarning,
)
from tritile.tuner import decorated
from tritile.tuner.arguments import identified, identity
from tritile.tuner.measure.benchmark import ScreenResult
from tritile.tuner.measure.engine import Rules, TuningTask, tune
from tritile.tuner.measure.outputs import OUTSIDE
from tritile.tuner.measure.timing import Timing
from tritile.tuner.measure.workers import WorkerError
from tritile.tuner.search import Listed
from tritile.tuner.store import claims
from tritile.tuner.store.trial import Trial, is_final_failure
from tritile.tuner.store.trials import store_of

pytestmark = pytest.mark.interpreted

H200 = target_device("nvidia-h200")

# --- One word tunes ---


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_terminal_shows_progress_and_winner(monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    bench = Bench()
    run(tuned(bench), bench.used)
    shown = terminal.getvalue().split("\r\x1b[K")
    assert [line for line in shown if "tuning softmax N=50: 2 of 3 configs" in line]
    assert shown[-1].startswith("tritile: tuned softmax N=50")
    assert shown[-1].endswith("\n")


def test_budget_cut_is_said_and_resumed(monkeypatch, caplog):
    monkeypatch.setenv("TRITILE_TUNE_BUDGET", "1e-9")
    monkeypatch.setattr(claims, "_STARTED", math.inf)  # each search is that of an earlier process
    max_resident = [Bench({block: 1.0 / block for block in TIMES}) for _ in range(4)]
    chosen = [run(another_process(tuned(bench)), bench.used) for bench in max_resident]
    assert [bench.measured for bench in max_resident] == [[64], [128], [256], []]
    assert chosen == [64, 128, 256, 256]
    cut = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text.split(": ")[1].split()[0] for text in cut] == ["2", "1"]
    assert all("TRITILE_TUNE_BUDGET" in text and "next process" in text for text in cut)


# --- Configs are told apart by what they launch ---


@triton.jit
def helper(x):
    return x + 1


@triton.jit
def other_helper(x):
    return x + 2


@triton.jit
def with_value(used_ptr, N, A: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(used_ptr, BLOCK)


def noted(values):
    return values["BLOCK"]


VALUES = {
    "dtype": tl.float16,
    "torch's dtype": torch.float16,
    "tuple": (1, (2, tl.float32)),
    "constexpr": tl.constexpr(3),
    "long text": "x" * 500,
    "line": "a\nb",
    "2^31": 2**31,
    "negative zero": -0.0,
    "infinity": float("inf"),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_config_may_hold_any_value(value):
    bench = Bench({64: 2.0, 128: 1.0})
    listed = [triton.Config({"A": value, "BLOCK": block}) for block in (64, 128)]
    kernel = tritile.autotune(listed, ["N"], do_bench=bench)(with_value)
    for mode in ("tune", "cached", "strict"):
        with tritile.mode(mode):
            kernel[(1,)](bench.used, 4)
        assert int(bench.used) == 128, mode
        another_process(kernel)
    assert bench.measured == [64, 128]


ALIKE = [
    ({"A": 1}, {"A": True}, {"A": 1.0}),
    ({"A": 0}, {"A": False}, {"A": None}),
    ({"A": "1"}, {"A": 1}, {"A": tl.constexpr(1)}),
    ({"A": helper}, {"A": other_helper}, {"A": helper.fn}),
    ({"A": (1,)}, {"A": (True,)}, {"A": (1.0,)}),
]


@pytest.mark.parametrize("alike", ALIKE, ids=["1", "0", "text", "functions", "tuples"])
def test_equal_configs_all_measured(alike):
    times = iter([3.0, 1.0, 2.0])
    ran = []

    def bench(call, quantiles):
        ran.append(1)
        return [next(times)] * 3

    listed = [triton.Config(values | {"BLOCK": 64}) for values in alike]
    assert len(identified(listed)) == 3
    kernel = tritile.autotune(listed, ["N"], do_bench=bench)(with_value)
    kernel.fn = Launches(kernel.fn)
    used = torch.zeros(1, dtype=torch.int32)
    for mode in ("tune", "strict"):
        with tritile.mode(mode):
            kernel[(1,)](used, 4)
        assert kernel.best_config is listed[1]
        another_process(kernel)
    assert len(ran) == 3


class Launches:
    """Stands for a kernel; launches nothing."""

    def __init__(self, fn):
        self.base = fn

    def __getattr__(self, name):
        return getattr(self.base, name)

    def run(self, *args, **kwargs):
        pass


def test_configs_told_apart_by_hooks():
    def hook(number):
        return lambda values: number

    def by_keyword(number):
        def hooked(values, *, own=number):
            return own

        return hooked

    def logging_to(log):
        return lambda values: log.append(values)

    log = []
    hooks = [None, noted, hook(1), hook(2), functools.partial(noted), logging_to(log), logging_to([])]
    hooks += [by_keyword(1), by_keyword(2), functools.partial(noted, own=noted)]
    listed = [triton.Config({"BLOCK": 64}, pre_hook=each) for each in hooks]
    names = list(identified(listed))
    assert len({identity(each) for each in listed[:3]}) == 3
    assert list(identified(listed).values()) == listed
    assert len({own.key for own in names}) == len(hooks)
    assert [decorated.Config.from_dict(name.to_dict()) for name in names] == names
    again = [triton.Config({"BLOCK": 64}, pre_hook=each) for each in [None, noted, hook(1), hook(2)]]
    assert list(identified(again)) == names[:4]  # as another process makes them
    assert len({identity(each) for each in listed[-3:]}) == 3
    assert " at 0x" not in str(identity(listed[-1]))
    log.append(1)  # what a hook holds may change
    assert list(identified(listed[6:7], listed)) == names[6:7]
    assert identity(listed[5]) == identity(triton.Config({"BLOCK": 64}, pre_hook=logging_to([])))
    equal = [triton.Config(kw) for kw in ({"BLOCK": 64, "A": tl.float16}, {"A": tl.float16, "BLOCK": 64})]
    assert len(identified(equal)) == 1


# --- Winners ---


def done():
    future = Future()
    future.set_result(None)
    return future


class Timed:
    """Stands for a workshop in which quick timings and those of the race disagree."""

    max_resident = 1

    def __init__(self, quick, raced):
        self.quick, self.raced_us = quick, raced

    def compile(self, subject, config, for_check=False):
        return done()

    def begin(self, subject):
        pass

    end = begin

    def screen(self, subject, config, fastest_us):
        return ScreenResult(Timing(self.quick[config["A"]], 0.0), None)

    def race(self, subject, finalists):
        return [[self.raced_us[config["A"]]] * 5 for config in finalists]

    def check(self, subject, config):
        return None


@pytest.mark.parametrize(
    ("quick", "raced"),
    [
        ({1: 1.0, 2: 1.01, 3: 1.02}, {1: 1.003, 2: 1.001, 3: 1.002}),  # ties, which go by name elsewhere
        ({n: 1.0 + n / 100 for n in range(1, 9)}, {n: 1.2 - n / 1000 for n in range(1, 9)}),
    ],
    ids=["ties", "quick timings that no race reaches"],
)
def test_later_process_finds_winner(quick, raced):
    listed = identified([triton.Config({"A": n}) for n in quick])
    problem = KernelProblem("stranger", (("N", 1),), ())
    subject = decorated.TunableKernel(problem, HOST, "0" * 16)
    rules = Rules(exhaustive=True, by_trials=True)
    (done,) = tune([TuningTask(subject, Listed(listed))], Timed(quick, raced), rules, store_of(HOST).add)
    assert store_of(HOST).best("0" * 16, problem).config == done.best.config
    assert raced[done.best.config["A"]] <= min(raced[n] for n in list(quick)[:3])


# --- Failures ---


@pytest.mark.parametrize(
    ("failure", "settled"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("PassManager::run failed"), True),
        (AssertionError("BLOCK too small"), True),
    ],
    ids=["no memory", "a lost GPU", "the compiler", "an assertion"],
)
def test_machine_failures_retried(failure, settled):
    bench = Bench({64: 3.0, 128: failure, 256: 2.0})
    kernel = tuned(bench)
    assert run(kernel, bench.used) == 256
    assert bench.measured == [64, 128, 256]
    bench.times = TIMES
    assert run(another_process(kernel), bench.used) == (256 if settled else 128)
    assert bench.measured == [64, 128, 256] + [128] * (not settled)


def test_failed_problem_retried():
    bench = Bench(dict.fromkeys(TIMES, torch.OutOfMemoryError("CUDA out of memory")))
    kernel = tuned(bench)
    with pytest.raises(TuningError, match="out of memory"):
        run(kernel, bench.used)
    bench.times = TIMES
    assert run(another_process(kernel), bench.used) == 128
    lost = ["hung: no answer in 10 s", "the process died: SIGSEGV", "garbled: its answer"]
    assert not any(map(is_final_failure, lost))
    assert is_final_failure("wrong answer: relative error of out 1, above 0.1")


def elsewhere(*failures, works=()):
    """Stands for the search in another process, where configs fail so."""

    def tune_in_workers(call, task, rules, keep):
        for config, failure in zip(task.space.configs(), failures, strict=False):
            us = 5.0 if failure is None else None
            keep(task.tunable.source, Trial(task.tunable.problem, config, us, failure=failure))
        return WorkerError(failure) if failure else None

    return tune_in_workers


@pytest.mark.parametrize(
    ("failures", "here"),
    [
        (["RuntimeError: CUDA error: an illegal memory access"] * 3, [64, 128, 256]),
        ([OUTSIDE] * 3, [64, 128, 256]),
        ([OUTSIDE, "OutOfResources: shared memory", OUTSIDE], [64, 256]),
        ([OUTSIDE, None, OUTSIDE], []),
        (["OutOfResources: shared memory"] * 3, None),
        (["hung: no answer in 10 s"] * 3, None),
    ],
    ids=["addresses", "beyond a view", "one refused", "one works", "all refused", "hung"],
)
def test_failing_elsewhere_measured_here(failures, here, monkeypatch):
    monkeypatch.setattr(decorated, "tune_in_workers", elsewhere(*failures))
    bench = Bench()
    kernel = tuned(bench)
    kernel.isolate = True
    monkeypatch.setattr(kernel, "device_of", lambda args, kwargs: H200)
    if here is None:
        with pytest.raises(TuningError, match=failures[0][:10]) as raised:
            run(kernel, bench.used)
        assert str(raised.value.__cause__) == failures[0]
    elif here:
        with pytest.warns(IsolationWarning, match="measured in this process.*every config fails"):
            run(kernel, bench.used)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error", IsolationWarning)
            assert run(kernel, bench.used) == 128
    assert bench.measured == (here or [])


def test_last_error_is_cause():
    """Though a program's own error costs no other config its turn."""
    bench = Bench(dict.fromkeys(TIMES, error := AttributeError("a name that is gone")))
    with pytest.raises(TuningError, match=r"no config works.*AttributeError: a name") as raised:
        run(tuned(bench), bench.used)
    assert len(bench.measured) == len(TIMES)
    assert raised.value.__cause__.__cause__ is error
    bench = Bench(TIMES | {min(TIMES): error})
    assert run(tuned(bench), bench.used) != min(TIMES)


# --- Tensors, hooks and keys ---


@triton.jit
def doubled(pair, extra, used_ptr, N, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(pair[0] + at, mask=at < N)
    tl.store(pair[1] + at, tl.load(pair[1] + at, mask=at < N) + x, mask=at < N)
    tl.store(used_ptr, BLOCK)


@pytest.mark.parametrize("checked", [False, True])
def test_tuple_tensors_restored(checked):
    def right(pair, N):
        return {"used_ptr": torch.tensor([128], dtype=torch.int32)}

    bench, more = Bench(), {"reference": right} if checked else {}
    restored = {"restore_value": ["pair", "extra"], "reset_to_zero": ["extra"]}
    kernel = tritile.autotune(configs(), ["N"], do_bench=bench, **restored, **more)(doubled)
    x, out = torch.arange(50.0), torch.ones(50)
    kernel[(1,)]((x, out), None, bench.used, 50)
    assert bench.measured == [64, 128, 256]
    assert torch.equal(out, x + 1)
    assert torch.equal(x, torch.arange(50.0))


@triton.jit
def added(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x_ptr + at, mask=at < N) + tl.load(out_ptr + at, mask=at < N)
    tl.store(out_ptr + at, value, mask=at < N)


@pytest.mark.parametrize("of", ["the tuner", "a config"])
def test_poison_before_zeroing_hooks(of):
    def zero(named, reset_only=False):
        named["out_ptr"].zero_()

    times = iter([2.0, 1.0])
    blocks = [triton.Config({"BLOCK": b}, pre_hook=zero if of == "a config" else None) for b in (64, 128)]
    more = {"pre_hook": zero} if of == "the tuner" else {}
    kernel = tritile.autotune(
        blocks, ["N"], reference=lambda x_ptr: {"out_ptr": x_ptr},
        do_bench=lambda call, quantiles: call() or [next(times)] * 3, **more,
    )(added)  # fmt: skip
    x, out = torch.randn(50), torch.zeros(50)
    kernel[(1,)](x, out, 50)
    assert torch.equal(out, x)
    assert kernel.best_config is blocks[1]


def test_tensor_in_key_dtype_shape():
    bench = Bench()
    kernel = tuned(bench, key=("N", "x_ptr"))
    run(kernel, bench.used)
    (problem,) = {trial.problem for _, trial in store_of(HOST).all_trials()}
    assert dict(problem.key)["x_ptr"] == "float32[3, 50]"
    assert trials(kernel) == {64: 3000.0, 128: 1000.0, 256: 2000.0}


def test_unknown_names_warn_once():
    bench = Bench()
    with pytest.warns(UserWarning, match="key of softmax names 'M', 'K'") as caught:
        kernel = tuned(bench, key=("M", "N", "K"))
    assert len(caught) == 1
    assert caught[0].filename.endswith("test_autotune.py")
    assert run(kernel, bench.used) == 128


def test_decorating_reads_no_source(monkeypatch):
    """A project decorates hundreds of kernels as it is imported."""

    def read(*args, **kwargs):
        raise AssertionError("read")

    for owner, name in ((inspect, "getsource"), (inspect, "getsourcelines"), (ast, "parse")):
        monkeypatch.setattr(owner, name, read)
    monkeypatch.setattr("tritile.core.source.source_hash", read)
    tritile.autotune(configs(), ["N"], restore_value=["x_ptr"])(tuned(Bench()).fn)


@triton.jit
def noting(used_ptr, N, BLOCK: tl.constexpr):
    tl.store(used_ptr, BLOCK)


def test_pruning_in_place_keeps_entries():
    def stages(listed, named, **rest):
        for config in listed:
            config.num_stages = 2 if named["N"] < 10 else 5
        return listed

    bench = Bench({64: 1.0, 128: 2.0, 256: 3.0})
    kernel = tuned(bench, prune_configs_by={"early_config_prune": stages}, kernel=noting)
    for mode in ("tune", "cached", "strict"):
        with tritile.mode(mode):
            seen = []
            for n in (4, 20, 4):
                kernel[(1,)](bench.used, n)
                seen.append(kernel.best_config.num_stages)
        assert seen == [2, 5, 2], mode


def test_later_reference_is_asked():
    def right(N):
        return {"used_ptr": torch.tensor([64], dtype=torch.int32)}

    bench = Bench()
    kernel = tritile.autotune(configs(), ["N"], do_bench=bench)(noting)
    kernel[(1,)](bench.used, 4)
    assert int(bench.used) == 128
    tritile.forget()
    kernel = tritile.autotune(configs(), ["N"], do_bench=bench, reference=right)(noting)
    kernel[(1,)](bench.used, 4)
    assert int(bench.used) == 64
    assert len(bench.measured) == 3


def test_benchmark_calling_own_kernel():
    bench, nested = Bench(), []

    def calling(call, quantiles):
        if not nested:
            nested.append(1)
            kernel[(1,)](bench.used, 4)
        return bench(call, quantiles)

    kernel = tritile.autotune(configs(), ["N"], do_bench=calling)(noting)
    kernel[(1,)](bench.used, 4)
    assert int(bench.used) == 128


def test_replaced_names_of_the_key_count():
    bench = Bench()
    kernel = tritile.autotune(configs(), [], do_bench=bench)(noting)
    for n in (4, 5):
        kernel[(1,)](bench.used, n)
    assert len(bench.measured) == 3
    kernel.keys = ["N"]
    for n in (4, 5):
        kernel[(1,)](bench.used, n)
    assert len(bench.measured) == 9


def test_warnings_of_unmeasured_problems_end():
    bench = Bench()
    kernel = tritile.autotune(configs(), ["N"], do_bench=bench, mode="cached")(noting)
    kernel._warnings = 3
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UntunedWarning)
        for n in range(9):
            kernel[(1,)](bench.used, n)
    assert [warning.category for warning in caught] == [UntunedWarning] * 3


def test_call_searched_by_tune():
    bench = Bench()
    kernel = tritile.autotune(configs(), ["N"], do_bench=bench)(noting)
    found = tritile.tune(kernel, bench.used, 40, grid=(1,))
    assert (found.config.kwargs, found.us, found.tried, found.how) == ({"BLOCK": 128}, 1000.0, 3, "searched")
    assert (found.device, found.problem.label) == (HOST, "noting N=40")
    plan = tritile.plan(kernel, bench.used, 40)
    assert (plan.source, plan.config.kwargs, plan.us) == ("exact", {"BLOCK": 128}, 1000.0)
    again = tritile.tune(kernel, bench.used, 40, grid=(1,))
    assert (again.config.kwargs, again.tried, again.how) == ({"BLOCK": 128}, 0, "remembered")
    bench.times = {64: 4.0, 128: 6.0, 256: 5.0}
    anew = tritile.tune(kernel, bench.used, 40, grid=(1,), force=True)
    assert (anew.config.kwargs, anew.us, anew.tried) == ({"BLOCK": 64}, 4000.0, 3)
    with pytest.raises(InvalidValueError, match="grid="):
        tritile.tune(kernel, bench.used, 40)
    with pytest.raises(UnsupportedError, match="no GPU here"):
        tritile.tune(tritile.autotune(configs(), ["N"])(noting), bench.used, 40, grid=(1,))


OF_THE_MOMENT = [
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB",
    "RuntimeError: Triton Error [CUDA]: out of memory",
    "RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered",
    "RuntimeError: Triton Error [CUDA]: misaligned address",
    "RuntimeError: Triton Error [HIP]:  Code: 719, Messsage: unspecified launch failure",
    "RuntimeError: Triton Error [CUDA]: unknown error",
    "RuntimeError: CUDA error: MPS server is not ready to accept new MPS client requests",
    "RuntimeError: CUDA error: operation would make the legacy stream depend on a capturing blocking stream",
    "AcceleratorError: CUDA error: unspecified launch failure",
    "AcceleratorError: CUDA error: device-side assert triggered",
    "AcceleratorError: CUDA error: an illegal instruction was encountered",
    "AcceleratorError: CUDA error: the launch timed out and was terminated",
    "AcceleratorError: CUDA error: uncorrectable ECC error encountered",
    "AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
    "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable",
    "RuntimeError: No CUDA-capable device is detected",
    "AcceleratorError: CUDA error: operation not permitted when stream is capturing",
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "RuntimeError: [enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you",
    *(f"OSError: [Errno {number}] {os.strerror(number)}" for number in (
        errno.ENOMEM, errno.ENOSPC, errno.EMFILE, errno.ENFILE, errno.ETXTBSY, errno.EBUSY, errno.EAGAIN,
        errno.EDQUOT,
    )),
    "MemoryError: no message",
    "PTXASError: PTXAS error: Internal Triton PTX codegen error: ptxas died with <Signals.SIGKILL: 9>",
    "TuningError: no process can be started: OSError: fork",
    "hung: no answer in 10 s",
    "the process died: SIGSEGV",
    "garbled: its answer cannot be read: EOFError",
]  # fmt: skip
ITS_OWN = [
    "OutOfResources: out of resource: shared memory, Required: 262144, Hardware limit: 232448.",
    "RuntimeError: unspecified layout of the accumulator",
    "AssertionError: BUSY_WAIT must be a power of two",
    "ValueError: busy",
    "ValueError: unknown error",
    "CompilationError: the CUDA driver error code must be a constexpr",
    "RuntimeError: PassManager::run failed",
    "RuntimeError: Triton Error [CUDA]: invalid argument",
    "RuntimeError: Triton Error [CUDA]: device kernel image is invalid",
    "AcceleratorError: CUDA error: too many resources requested for launch",
    "AcceleratorError: CUDA error: no kernel image is available for execution on the device",
    "wrong answer: out[0, 1] is 1.01, and 1 is right",
    "wrote outside the memory of its arguments",
]


@pytest.mark.parametrize("text", OF_THE_MOMENT)
def test_momentary_errors_retried(text):
    assert not is_final_failure(text)


@pytest.mark.parametrize("text", ITS_OWN)
def test_refusals_are_settled(text):
    assert is_final_failure(text)
