"""tritile.autotune around a stranger's kernel: what is measured, when, and what is remembered.

The kernel writes its BLOCK into `used`, which tells a stand-in for the benchmark, and the test, which
config ran. Times are made up; every run is real, in Triton's interpreter.
"""

import contextlib
import logging
import os
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

import tritile
from tritile.core.config import Config
from tritile.core.device import HOST
from tritile.core.source import source_hash
from tritile.errors import InvalidValueError, NotTunedError, TuningError, UntunedWarning
from tritile.tuner import autotuner
from tritile.tuner.store.trials import store_of

pytestmark = [pytest.mark.interpreted, pytest.mark.filterwarnings("ignore::tritile.errors.UntunedWarning")]
TIMES = {64: 3.0, 128: 1.0, 256: 2.0}
WARPS = {64: 2, 128: 4, 256: 8}


@triton.jit
def softmax(x_ptr, out_ptr, used_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + columns, mask=columns < N, other=-float("inf"))
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + row * N + columns, e / tl.sum(e, axis=0), mask=columns < N)
    tl.store(used_ptr, BLOCK)


def configs(*blocks):
    return [triton.Config({"BLOCK": block}, num_warps=WARPS.get(block, 4)) for block in blocks or TIMES]


class Bench:
    """Runs each call once and answers with the time made up for its BLOCK, or raises what stands there."""

    def __init__(self, times=TIMES, pause=0.0):
        self.used, self.times, self.pause = torch.zeros(1, dtype=torch.int32), times, pause
        self.measured = []

    def __call__(self, call, quantiles):
        call()
        block = int(self.used)
        self.measured.append(block)
        time.sleep(self.pause)
        ms = self.times[block]
        if isinstance(ms, Exception):
            raise ms
        return [ms, ms * 0.9, ms * 1.1] if isinstance(ms, float) else ms


def tuned(bench, *blocks, kernel=softmax, key=("N",), **rest):
    return tritile.autotune(configs(*blocks), list(key), do_bench=bench, **rest)(kernel)


def run(kernel, used, n=50, rows=3, dtype=torch.float32):
    """Call the softmax, check its answer, and say which BLOCK ran."""
    used.zero_()
    x = torch.randn(rows, n, generator=torch.Generator().manual_seed(n)).to(dtype)
    out = torch.full_like(x, float("nan"))
    kernel[(rows,)](x, out, used, n)
    torch.testing.assert_close(
        out, x.softmax(-1), rtol=4 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps
    )
    return int(used)


def trials(kernel, n=50):
    """What the store holds for this size: config -> failure or time."""
    found = store_of(HOST).all_trials()
    mine = [t for facts, t in found if facts["kernel"] == kernel.digest and ("N", n) in t.problem.key]
    return {trial.config["BLOCK"]: trial.failure or trial.us for trial in mine}


def another_process(kernel):
    """As far as this process can play one: nothing it remembers but the store."""
    tritile.forget()
    return kernel


@pytest.mark.parametrize("mode", [None, "tune"])
def test_each_config_measured_once(mode, caplog):
    """Without a mode, too: who decorates a kernel wants it tuned."""
    bench = Bench()
    kernel = tuned(bench)
    assert isinstance(kernel, triton.runtime.Autotuner)
    asked = tritile.mode(mode) if mode else contextlib.nullcontext()
    with caplog.at_level(logging.INFO, "tritile.tune"), warnings.catch_warnings(), asked:
        warnings.simplefilter("error", UntunedWarning)
        for each in (kernel, kernel, another_process(tuned(Bench({})))):
            assert run(each, bench.used) == 128
    assert bench.measured == [64, 128, 256]
    assert trials(kernel) == {64: 3000.0, 128: 1000.0, 256: 2000.0}
    assert (kernel.best_config.kwargs, kernel.best_config.num_warps) == ({"BLOCK": 128}, 4)
    (said,) = [record.getMessage() for record in caplog.records]
    assert all(part in said for part in ("softmax N=50", "BLOCK: 128", "3 configs"))
    (facts, trial), *_ = store_of(HOST).all_trials()
    assert facts["kernel"] == kernel.digest
    assert (trial.config, trial.spread) == (Config.of(BLOCK=64, num_warps=2), pytest.approx(0.2))
    assert dict(trial.problem.dtypes) == {"x_ptr": "float32", "out_ptr": "float32", "used_ptr": "int32"}
    assert trial.measured_utc


def run_anew(environment, mode, answers):
    """Run in a fresh process; say which BLOCK ran, and how many configs were measured."""
    os.environ.update(environment)
    bench = Bench()
    with tritile.mode(mode):
        answers.put((run(tuned(bench), bench.used), len(bench.measured)))


@pytest.mark.slow
def test_a_real_second_process_measures_nothing(server):
    found, answers = [], server.SimpleQueue()
    for mode in ("tune", "strict"):
        process = server.Process(target=run_anew, args=(dict(os.environ), mode, answers))
        process.start()
        process.join()
        assert process.exitcode == 0
        found.append(answers.get())
    assert found == [(128, 3), (128, 0)]


def test_edited_list_measures_new_configs():
    first = Bench()
    with tritile.mode("tune"):
        run(tuned(first, 64, 128), first.used)
        assert first.measured == [64, 128]
        second = Bench({256: 0.5, 512: 4.0})
        assert run(another_process(tuned(second, 128, 256, 512)), second.used) == 256
        assert second.measured == [256, 512]
        third = Bench({})
        assert run(another_process(tuned(third, 64, 128)), third.used) == 128  # 256 is no longer listed
    assert third.measured == []


def test_values_of_one_bucket():
    bench = Bench()
    kernel = tuned(bench, bucket={"N": triton.next_power_of_2})
    with tritile.mode("tune"):
        assert [run(kernel, bench.used, n) for n in (33, 50, 64, 35)] == [128] * 4
        assert len(bench.measured) == 3
        run(kernel, bench.used, 32)
        assert len(bench.measured) == 6
    assert {t.problem.key for _, t in store_of(HOST).all_trials()} == {(("N", 64),), (("N", 32),)}
    with warnings.catch_warnings(), tritile.mode("strict"):
        warnings.simplefilter("error", UntunedWarning)
        assert run(another_process(kernel), bench.used, 40) == 128
    bench.times = {64: 1.0, 128: 2.0, 256: 3.0}
    with tritile.mode("tune"):
        assert run(kernel, bench.used, 5) == 64
    with warnings.catch_warnings(), tritile.mode("cached"):
        warnings.simplefilter("error", UntunedWarning)  # of the nearest bucket something is remembered
        assert [run(kernel, bench.used, n) for n in (14, 3)] == [128, 64]
    assert len(bench.measured) == 9


def test_own_mode_before_the_current():
    bench = Bench()
    with tritile.mode("strict"):
        with pytest.raises(NotTunedError, match="softmax N=50"):
            run(tuned(bench), bench.used)
        assert (bench.measured, int(bench.used)) == ([], 0)  # nothing ran
        assert run(tuned(bench, mode="tune"), bench.used) == 128


def test_cached_never_measures():
    """It says so once for each problem."""
    bench = Bench()
    kernel = tuned(bench, mode="cached")
    for n, expected in ((50, 1), (50, 0), (60, 1), (50, 0), (60, 0)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert run(kernel, bench.used, n) == 64
        texts = [str(w.message) for w in caught if w.category is UntunedWarning]
        assert len(texts) == expected
        assert all(f"softmax N={n}" in text and "tune" in text for text in texts)
        assert all(w.filename == __file__ for w in caught if w.category is UntunedWarning)
    assert bench.measured == []
    assert trials(kernel) == {}


# By mode, the BLOCK that runs at each N, where 128 is the fastest of N = 50, and 256 of N = 8.
REMEMBERED = {"cached": {50: 128, 55: 128, 9: 256}, "strict": {8: 256}, "off": {50: 64, 51: 64}}


def test_neighbours_use_remembered():
    """Problems of the same key, by the mode."""
    bench = Bench()
    kernel = tuned(bench)
    run(kernel, bench.used, 50)
    bench.times = {64: 3.0, 128: 2.0, 256: 1.0}
    run(kernel, bench.used, 8)
    for mode, blocks in REMEMBERED.items():
        with warnings.catch_warnings(), tritile.mode(mode):
            warnings.simplefilter("error", UntunedWarning)
            assert {n: run(kernel, bench.used, n) for n in blocks} == blocks, mode
    with pytest.warns(UntunedWarning, match="N=55"), tritile.mode("cached"):
        assert run(kernel, bench.used, 55, dtype=torch.float16) == 64  # the first: nothing is known of it
    assert len(bench.measured) == 6


def test_capture_measures_nothing(monkeypatch):
    bench = Bench()
    kernel = tuned(bench)
    with tritile.mode("tune"):
        with monkeypatch.context() as during:
            during.setattr("tritile.tuner.autotuner.capturing", lambda: True)
            assert run(kernel, bench.used) == 64
        assert bench.measured == []
        assert run(kernel, bench.used) == 128  # what was taken in its place is not kept
    assert bench.measured == [64, 128, 256]


FAILURES = [
    RuntimeError("PassManager::run failed\nmany\nlines"),
    AssertionError("tile too small"),
    OutOfResources(300000, 232448, "shared memory"),
    ValueError(),
    float("nan"),
    float("inf"),
    *(None, "x", [None], [[1]], {}, []),  # what a benchmark answers that is no time
]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__ + str(failure)[:5])
def test_failing_config_costs_itself(failure):
    bench = Bench(TIMES | {128: failure})
    kernel = tuned(bench)
    with tritile.mode("tune"):
        assert run(kernel, bench.used) == 256
    held = trials(kernel)
    assert (held[64], held[256]) == (3000.0, 2000.0)
    assert isinstance(held[128], str)
    assert "\n" not in held[128]
    with tritile.mode("strict"):
        assert run(another_process(tuned(Bench({}))), bench.used) == 256


def test_all_failing_names_reasons():
    bench = Bench(
        {64: RuntimeError("first reason"), 128: ValueError("second reason"), 256: RuntimeError("third")}
    )
    with tritile.mode("tune"), pytest.raises(TuningError, match=r"softmax N=50.*first reason.*second reason"):
        run(tuned(bench), bench.used)
    assert set(trials(tuned(bench))) == {64, 128, 256}


def test_budget_stops_measuring(monkeypatch):
    """As soon as one config works."""
    monkeypatch.setenv("TRITILE_TUNE_BUDGET", "1.5")
    bench = Bench({64: RuntimeError("no"), 128: 1.0, 256: 0.1})
    clock = SimpleNamespace(monotonic=lambda: len(bench.measured))  # each config takes a second
    monkeypatch.setattr("tritile.tuner.measure.engine.time", clock)
    with tritile.mode("tune"):
        assert run(tuned(bench), bench.used) == 128
    assert bench.measured == [64, 128]


@triton.jit
def noted(used, N, BLOCK: tl.constexpr):
    tl.store(used, BLOCK)


def test_quick_measures_likeliest_few_once():
    """A sample of the list, and for the next size what was fastest at the last; "full" measures the rest."""
    times = {block: 10.0 + abs(block - 26) for block in range(1, 41)}

    def chosen(n, effort):
        bench = Bench(times)
        kernel = tuned(bench, *times, kernel=noted, effort=effort)
        another_process(kernel)[(1,)](bench.used, n)
        return int(bench.used), bench.measured

    assert chosen(50, "quick") == (26, [1, 6, 11, 16, 21, 26, 31, 36])
    assert chosen(50, "quick") == (26, [])
    best, measured = chosen(60, "quick")
    assert (best, measured[0], len(measured)) == (26, 26, 8)
    assert chosen(50, None) == (26, [block for block in times if block % 5 != 1])
    assert chosen(70, "full") == (26, [*times])


@pytest.mark.parametrize(("effort", "count"), [("quick", 1), ("full", 3)])
def test_seconds_of_an_effort(effort, count, monkeypatch):
    monkeypatch.setenv("TRITILE_TUNE_BUDGET", "1")
    bench = Bench()
    clock = SimpleNamespace(monotonic=lambda: 2.5 * len(bench.measured))  # each config takes 2.5 seconds
    monkeypatch.setattr("tritile.tuner.measure.engine.time", clock)
    for measured in (count, 0):
        bench.measured.clear()
        run(another_process(tuned(bench, effort=effort)), bench.used)
        assert len(bench.measured) == measured


def test_perf_model_without_measurements():
    bench = Bench()
    kernel = tuned(bench, prune_configs_by={"perf_model": lambda BLOCK, **rest: abs(BLOCK - 128), "top_k": 2})
    with warnings.catch_warnings(), tritile.mode("cached"):
        warnings.simplefilter("error", UntunedWarning)
        assert run(kernel, bench.used) == 128
    assert bench.measured == []


@pytest.mark.parametrize("mode", ["tune", "cached", "off"])
@pytest.mark.parametrize(("placed", "named"), [((), {"BLOCK": 64}), ((64,), {}), ((), {"num_warps": 8})])
def test_tuned_arguments_may_not_be_passed(mode, placed, named):
    x, wanted = torch.zeros(3, 50), f"{next(iter(named), 'BLOCK')} given, but configs set it"
    with tritile.mode(mode), pytest.raises(InvalidValueError, match=wanted):
        tuned(Bench())[(3,)](x, x.clone(), torch.zeros(1, dtype=torch.int32), 50, *placed, **named)


def test_two_threads_measure_once(monkeypatch):
    bench, barrier, searches, search = Bench(pause=0.02), threading.Barrier(2), [], autotuner.measured_config
    kernel = tuned(bench, mode="tune")
    monkeypatch.setattr(
        autotuner, "measured_config", lambda *given, **how: searches.append(1) or search(*given, **how)
    )

    def call():
        x = torch.randn(3, 50)
        out = torch.empty_like(x)
        barrier.wait()
        kernel[(3,)](x, out, bench.used, 50)
        return torch.allclose(out, x.softmax(-1))

    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(call) for _ in range(2)]
    assert all(answer.result() for answer in answers)
    assert (bench.measured, len(searches)) == ([64, 128, 256], 1)


def test_grid_calls_measured_kernel():
    """The one that runs waits for the measurement, which needs the interpreter."""
    in_grid, measuring = threading.Event(), threading.Event()
    used, x = torch.zeros(1, dtype=torch.int32), torch.randn(3, 50)
    outs = [torch.empty_like(x) for _ in range(3)]

    def bench(call, quantiles):
        measuring.set()
        assert in_grid.wait(30)
        call()
        return [1.0, 1.0, 1.0]

    measured, running = tuned(bench, mode="tune"), tuned(Bench(), 64, mode="off")

    def grid(named):
        in_grid.set()
        measured[(3,)](x, outs[0], used, 50)
        return (3,)

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(lambda: measured[(3,)](x, outs[1], used, 50))
        assert measuring.wait(30)
        two = pool.submit(lambda: running[grid](x, outs[2], used, 50))
        for each in (one, two):
            each.result(60)
    for out in outs:
        torch.testing.assert_close(out, x.softmax(-1))


@triton.jit
def called(x):
    return x


@triton.jit
def called_after_an_edit(x):
    return x + 0


@triton.jit
def calling(used_ptr, N, BLOCK: tl.constexpr):
    tl.store(used_ptr, called(BLOCK))


def test_edited_source_is_measured_anew(monkeypatch):
    first, second, none = Bench(), Bench({64: 1.0, 128: 2.0, 256: 3.0}), Bench({})
    for bench, callee, block in (
        (first, called, 128), (second, called_after_an_edit, 64), (none, called, 128)  # taken back
    ):  # fmt: skip
        monkeypatch.setitem(globals(), "called", callee)
        tuned(bench, kernel=calling, mode="tune")[(1,)](bench.used, 50)
        assert int(bench.used) == block
    assert (first.measured, second.measured, none.measured) == ([64, 128, 256], [64, 128, 256], [])


def test_tuner_keeps_no_arguments():
    bench = Bench()
    kernel = tuned(bench, mode="tune")
    x = torch.randn(3, 50)
    out, gone = torch.empty_like(x), weakref.ref(x)
    kernel[(3,)](x, out, bench.used, 50)
    del x
    assert gone() is None
    last = weakref.ref(kernel)
    del kernel
    assert last() is None


def test_other_benchmarks_do_not_compare():
    def in_units(bench, unit):
        return lambda call, quantiles: [each * unit for each in bench(call, quantiles)]

    class InUnits:
        def __init__(self, bench, unit):
            self.bench, self.unit = bench, unit

        def time(self, call, quantiles):
            return [each * self.unit for each in self.bench(call, quantiles)]

    first, second = Bench(), Bench()
    assert run(tuned(in_units(first, 1.0), 64, 256), first.used) == 256
    assert len({tuned(InUnits(Bench(), unit).time).digest for unit in (1.0, 1000.0, 1.0)}) == 2
    in_us = tuned(in_units(second, 1000.0), 64, 256, 128)
    assert run(in_us, second.used) == 128
    assert second.measured == [64, 256, 128]
    again = Bench()
    assert run(another_process(tuned(in_units(again, 1000.0), 64, 256, 128)), again.used) == 128
    assert again.measured == []


def test_kernel_names_own_benchmark_times():
    own = tritile.autotune(configs(), ["N"])(softmax)
    given = tritile.autotune(configs(), ["N"], do_bench=own.do_bench, isolate=False)(softmax)
    assert own.digest == given.digest == source_hash(softmax)
    times = []

    def counting(call, quantiles):
        times.append(1.0)
        return times

    before = tuned(counting).digest
    counting(None, None)
    assert before == tuned(counting).digest != own.digest


def test_listener_hears_tunings(monkeypatch):
    heard = []
    monkeypatch.setattr(
        triton.knobs.autotuning, "listener", lambda **facts: heard.append(facts), raising=False
    )
    kernel = tuned(bench := Bench())
    for _ in range(2):
        run(kernel, bench.used)
    (fresh,) = heard
    assert (fresh["fn"], fresh["key"], fresh["cache_hit"]) == (softmax, next(iter(kernel.cache)), False)
    assert fresh["best_config"].kwargs == {"BLOCK": 128}
    assert {config.kwargs["BLOCK"]: times[0] for config, times in fresh["configs_timings"].items()} == TIMES
    assert fresh["duration"] > 0
    run(another_process(kernel), bench.used)
    with tritile.mode("cached"):
        run(kernel, bench.used)
    run(tuned(bench, 64), bench.used)  # without a choice nobody is told
    assert [(facts["cache_hit"], facts["duration"]) for facts in heard[1:]] == [(True, None)] * 2
    assert all(facts["best_config"].kwargs == {"BLOCK": 128} for facts in heard)


@pytest.mark.parametrize("inner", [tritile.autotune, triton.autotune])
@pytest.mark.parametrize("between", [lambda kernel: kernel, triton.heuristics({"N": lambda named: 50})])
def test_autotune_twice_is_refused(inner, between):
    """Over another autotuner that sets the same parameters, as it is decorated."""
    kernel = between(inner(configs(), ["N"])(softmax))
    for listed in (configs(), [], [triton.Config({})], tritile.Space({"BLOCK": (64, 128)})):
        with pytest.raises(InvalidValueError, match=r"softmax is autotuned already.*num_warps"):
            tritile.autotune(listed, ["N"])(kernel)


def test_triton_over_tritile_is_refused():
    bench = Bench()
    kernel = triton.autotune(configs(64, 128), ["N"], do_bench=bench)(tuned(bench))
    with pytest.raises(InvalidValueError, match=r"BLOCK, .*an autotuner around this one"):
        run(kernel, bench.used)


@pytest.mark.parametrize(
    "what", [run, [softmax], type("Kernel", (), {"kernel": softmax})], ids=["function", "list", "class"]
)
def test_only_kernels_are_decorated(what):
    with pytest.raises(InvalidValueError, match=r"expected a kernel of triton\.jit"):
        tritile.autotune(configs(), ["N"])(what)
