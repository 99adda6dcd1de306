"""tritile.autotune around a stranger's kernel: what is measured, when, and what is remembered.

The kernel writes its BLOCK into `used`, which tells a stand-in for the benchmark, and the test, which
config ran. Times are made up; every run is real, in Triton's interpreter.
"""

import importlib.util
import multiprocessing
import os
import textwrap
import threading
import time
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

import tritile
from tests.unit.helpers_for_fork_servers import run_script
from tritile.core.config import Config
from tritile.core.device import INTERPRETER
from tritile.core.source import source_hash
from tritile.errors import InvalidValueError, NotTunedError, TuningError, UntunedWarning
from tritile.planning.store import store_of

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


@triton.jit
def count(count_ptr, kept_ptr, used_ptr, N, BLOCK: tl.constexpr):
    tl.store(count_ptr, tl.load(count_ptr) + 1)
    tl.store(kept_ptr, tl.load(kept_ptr) * 2)
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
        if isinstance(self.times[block], Exception):
            raise self.times[block]
        ms = self.times[block]
        return [ms, ms * 0.9, ms * 1.1]


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
    found = store_of(INTERPRETER).everything()
    mine = [t for facts, t in found if facts["kernel"] == kernel.digest and ("N", n) in t.problem.key]
    return {trial.config["BLOCK"]: trial.failure or trial.us for trial in mine}


def another_process(kernel):
    """As far as this process can play one: nothing it remembers but the store."""
    tritile.forget()
    return kernel


def test_mode_tune_measures_each_config_once():
    bench = Bench()
    kernel = tuned(bench)
    assert isinstance(kernel, triton.runtime.Autotuner)
    with tritile.mode("tune"):
        assert run(kernel, bench.used) == 128
        assert bench.measured == [64, 128, 256]
        assert run(kernel, bench.used) == 128
    assert bench.measured == [64, 128, 256]
    assert trials(kernel) == {64: 3000.0, 128: 1000.0, 256: 2000.0}
    assert kernel.best_config.kwargs == {"BLOCK": 128}
    assert kernel.best_config.num_warps == 4


SCRIPT = """
import os
import sys
import torch, triton, tritile
import triton.language as tl

@triton.jit
def double(x_ptr, N, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + columns, mask=columns < N)
    tl.store(x_ptr + columns, x * 2, mask=columns < N)

measured = []

def bench(call, quantiles):
    call()
    measured.append(1)
    return [[2.0, 1.0, 3.0][len(measured) - 1]] * 3

configs = [triton.Config({"BLOCK": block}) for block in (64, 128, 256)]
kernel = tritile.autotune(configs, ["N"], restore_value=["x_ptr"], do_bench=bench)(double)
x = torch.ones(50)
with tritile.mode(sys.argv[1]):
    kernel[(1,)](x, 50)
assert (x == 2).all(), x
print(len(measured), kernel.best_config.kwargs["BLOCK"])
"""


def test_a_real_second_process_measures_nothing(server, tmp_path):
    script = tmp_path / "stranger.py"
    script.write_text(SCRIPT)

    def start(mode):
        told = tmp_path / mode
        process = server.Process(target=run_script, args=(script, mode, dict(os.environ), told))
        process.start()
        process.join()
        assert process.exitcode == 0
        return told.read_text().split()

    assert [start(mode) for mode in ("tune", "strict")] == [["3", "128"], ["0", "128"]]


def test_an_edited_config_list_measures_only_what_is_new():
    first = Bench()
    with tritile.mode("tune"):
        run(tuned(first, 64, 128), first.used)
        assert first.measured == [64, 128]
        second = Bench({256: 0.5, 512: 4.0})
        assert run(another_process(tuned(second, 128, 256, 512)), second.used) == 256
        assert second.measured == [256, 512]
        third = Bench({})
        assert (
            run(another_process(tuned(third, 64, 128)), third.used) == 128
        )  # the winner is no longer listed
    assert third.measured == []


@pytest.mark.parametrize("change", [{"n": 51}, {"dtype": torch.float16}], ids=str)
def test_a_new_key_or_dtype_is_a_new_problem(change):
    bench = Bench()
    kernel = tuned(bench)
    with tritile.mode("tune"):
        run(kernel, bench.used)
        run(kernel, bench.used, **change)
        assert len(bench.measured) == 6
        run(kernel, bench.used, rows=7)  # not in the key
    assert len(bench.measured) == 6


def test_values_of_one_bucket_are_one_problem():
    bench = Bench()
    kernel = tuned(bench, bucket={"N": triton.next_power_of_2})
    with tritile.mode("tune"):
        assert [run(kernel, bench.used, n) for n in (33, 50, 64, 35)] == [128] * 4
        assert len(bench.measured) == 3
        run(kernel, bench.used, 32)
        assert len(bench.measured) == 6
    assert {t.problem.key for _, t in store_of(INTERPRETER).everything()} == {(("N", 64),), (("N", 32),)}
    with warnings.catch_warnings(), tritile.mode("strict"):
        warnings.simplefilter("error", UntunedWarning)
        assert run(another_process(kernel), bench.used, 40) == 128
    bench.times = {64: 1.0, 128: 2.0, 256: 3.0}
    with tritile.mode("tune"):
        assert run(kernel, bench.used, 5) == 64
    with (
        warnings.catch_warnings(),
        tritile.mode("cached"),
    ):  # the nearest bucket that something is remembered of
        warnings.simplefilter("error", UntunedWarning)
        assert [run(kernel, bench.used, n) for n in (14, 3)] == [128, 64]
    assert len(bench.measured) == 9


@pytest.mark.parametrize("bucket", [{"M": int}, {"N": 64}, [int], {"BLOCK": int}])
def test_buckets_are_functions_by_names_of_the_key(bucket):
    with pytest.raises(InvalidValueError, match="bucket"):
        tuned(Bench(), bucket=bucket)


def test_strict_raises_and_names_the_problem():
    bench = Bench()
    with tritile.mode("strict"), pytest.raises(NotTunedError, match="softmax N=50"):
        run(tuned(bench), bench.used)
    assert bench.measured == []
    assert int(bench.used) == 0  # nothing ran


def test_cached_never_measures_and_says_so_once_for_each_problem():
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


def test_cached_takes_a_measured_neighbours_config():
    bench = Bench()
    kernel = tuned(bench)
    with tritile.mode("tune"):
        run(kernel, bench.used, 50)
        bench.times = {64: 1.0, 128: 2.0, 256: 3.0}
        run(kernel, bench.used, 8)
    with warnings.catch_warnings(), tritile.mode("cached"):
        warnings.simplefilter("error", UntunedWarning)
        assert run(kernel, bench.used, 55) == 128
        assert run(kernel, bench.used, 9) == 64
    assert len(bench.measured) == 6
    with pytest.warns(UntunedWarning, match="N=55"), tritile.mode("cached"):
        assert run(kernel, bench.used, 55, dtype=torch.float16) == 64  # the first: nothing is known of it


def test_nothing_is_measured_while_a_graph_is_captured(monkeypatch):
    bench = Bench()
    kernel = tuned(bench)
    with tritile.mode("tune"):
        with monkeypatch.context() as during:
            during.setattr("tritile.tune.autotuner.capturing", lambda: True)
            assert run(kernel, bench.used) == 64
        assert bench.measured == []
        assert run(kernel, bench.used) == 128  # what was taken in its place is not kept
    assert bench.measured == [64, 128, 256]


def test_off_ignores_what_is_remembered():
    bench = Bench()
    kernel = tuned(bench)
    with tritile.mode("cached"):
        assert run(kernel, bench.used) == 64
    run(kernel, bench.used)
    with tritile.mode("cached"):
        assert run(kernel, bench.used) == 128  # a measurement replaces an earlier guess
    with tritile.mode("off"):
        assert run(kernel, bench.used) == 64
        assert run(kernel, bench.used, 51) == 64
    assert len(bench.measured) == 3


def test_its_own_mode_overrides_the_one_in_force():
    bench = Bench()
    with tritile.mode("strict"):
        assert run(tuned(bench, mode="tune"), bench.used) == 128
    assert len(bench.measured) == 3
    with pytest.raises(InvalidValueError, match="'always'"):
        tuned(bench, mode="always")


def test_one_config_needs_no_measurement():
    bench = Bench()
    for mode in ("tune", "strict", "cached"):
        with tritile.mode(mode):
            assert run(tuned(bench, 128), bench.used) == 128
    assert bench.measured == []


FAILURES = [
    RuntimeError("PassManager::run failed\nmany\nlines"),
    AssertionError("tile too small"),
    OutOfResources(300000, 232448, "shared memory"),
    ValueError(),
    float("nan"),
    float("inf"),
]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__ + str(failure)[:5])
def test_a_config_that_fails_costs_itself_alone(failure):
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


def test_where_all_fail_the_reasons_are_named():
    bench = Bench(
        {64: RuntimeError("first reason"), 128: ValueError("second reason"), 256: RuntimeError("third")}
    )
    with tritile.mode("tune"), pytest.raises(TuningError, match=r"softmax N=50.*first reason.*second reason"):
        run(tuned(bench), bench.used)
    assert set(trials(tuned(bench))) == {64, 128, 256}


def test_a_benchmark_may_answer_with_one_number():
    times = iter([3.0, 0.5, 2.0])
    kernel = tuned(lambda call, quantiles: call() or next(times))
    with tritile.mode("tune"):
        assert run(kernel, torch.zeros(1, dtype=torch.int32)) == 128


def test_a_time_below_the_clocks_resolution_is_no_crash():
    bench = Bench(TIMES | {64: 0.0})
    with tritile.mode("tune"):
        assert run(tuned(bench), bench.used) in TIMES


def test_the_budget_stops_measuring_once_something_works(monkeypatch):
    monkeypatch.setenv("TRITILE_TUNE_BUDGET", "1.5")
    bench = Bench({64: RuntimeError("no"), 128: 1.0, 256: 0.1})
    clock = SimpleNamespace(monotonic=lambda: len(bench.measured))  # each config takes a second
    monkeypatch.setattr("tritile.tune.measuring.time", clock)
    with tritile.mode("tune"):
        assert run(tuned(bench), bench.used) == 128
    assert bench.measured == [64, 128]


def counted(bench, **rest):
    return tuned(bench, kernel=count, **rest)


def run_count(kernel, bench):
    counter, kept = torch.full((1,), 5, dtype=torch.int32), torch.full((1,), 7, dtype=torch.int32)
    with tritile.mode("tune"):
        kernel[(1,)](counter, kept, bench.used, 4)
    return int(counter), int(kept)


def test_without_hooks_each_measured_run_counts():
    bench = Bench()
    assert run_count(counted(bench), bench) == (5 + 3 + 1, 7 * 2**4)


def test_reset_to_zero_and_restore_value():
    bench = Bench()
    kernel = counted(bench, reset_to_zero=["count_ptr"], restore_value=["kept_ptr"])
    assert run_count(kernel, bench) == (1, 14)
    assert len(bench.measured) == 3


def test_hooks_are_called_as_upstream_does():
    seen = []

    def before(values, reset_only=False):
        seen.append(("before", values["BLOCK"], values["N"], reset_only))

    def after(values, exception):
        seen.append(("after", values["BLOCK"], values["N"], exception))

    bench = Bench()
    run_count(counted(bench, pre_hook=before, post_hook=after), bench)
    pairs = [[("before", block, 4, False), ("after", block, 4, None)] for block in TIMES]
    assert seen == [*pairs[0], *pairs[1], *pairs[2], ("before", 128, 4, True)]


def test_a_configs_own_hook_runs_before_each_run():
    bench, seen = Bench(), []
    listed = [
        triton.Config({"BLOCK": block}, pre_hook=lambda values: seen.append((values["BLOCK"], values["N"])))
        for block in (64, 128)
    ]
    kernel = tritile.autotune(listed, ["N"], do_bench=bench)(count)
    assert run_count(kernel, bench) == (5 + 3, 7 * 2**3)
    assert run_count(kernel, bench) == (5 + 1, 7 * 2)
    assert seen == [(64, 4), (128, 4), (128, 4), (128, 4)]  # also ahead of a call that was met before


def test_early_prune_sees_the_arguments():
    bench, seen = Bench(), []

    def prune(listed, named, **rest):
        seen.append((len(listed), named["N"], sorted(named)))
        return [c for c in listed if c.kwargs["BLOCK"] != 128]

    kernel = tuned(bench, prune_configs_by={"early_config_prune": prune})
    with tritile.mode("tune"):
        assert run(kernel, bench.used) == 256
    assert bench.measured == [64, 256]
    assert seen[0] == (3, 50, ["N", "out_ptr", "used_ptr", "x_ptr"])


@pytest.mark.parametrize("top_k", [1, 2, 0.34, 0.67])
def test_a_perf_model_orders_and_cuts(top_k):
    bench = Bench()
    by = {"perf_model": lambda BLOCK, N, num_warps, **rest: -BLOCK * N * num_warps, "top_k": top_k}
    kernel = tuned(bench, prune_configs_by=by)
    with tritile.mode("tune"):
        run(kernel, bench.used)
    few = top_k in (1, 0.34)
    assert bench.measured == ([256] if few else [256, 128])


def test_a_perf_model_chooses_where_nothing_was_measured():
    bench = Bench()
    kernel = tuned(bench, prune_configs_by={"perf_model": lambda BLOCK, **rest: abs(BLOCK - 128), "top_k": 2})
    with warnings.catch_warnings(), tritile.mode("cached"):
        warnings.simplefilter("error", UntunedWarning)
        assert run(kernel, bench.used) == 128
    assert bench.measured == []


def test_heuristics_under_autotune():
    bench = Bench()
    kernel = tuned(bench, kernel=triton.heuristics({"BLOCK2": lambda values: values["BLOCK"] // 2})(halves))
    x, out = torch.arange(100.0), torch.full((100,), float("nan"))
    grid = lambda meta: (triton.cdiv(100, meta["BLOCK"]),)  # noqa: E731 the usual form of a grid
    with tritile.mode("tune"):
        kernel[grid](x, out, bench.used, 100)
    assert torch.equal(out, x)
    assert bench.measured == [64, 128, 256]
    assert int(bench.used) == 128


@triton.jit
def halves(x_ptr, out_ptr, used_ptr, N, BLOCK: tl.constexpr, BLOCK2: tl.constexpr):
    for half in range(0, 2):
        columns = tl.program_id(0) * BLOCK + half * BLOCK2 + tl.arange(0, BLOCK2)
        tl.store(out_ptr + columns, tl.load(x_ptr + columns, mask=columns < N), mask=columns < N)
    tl.store(used_ptr, BLOCK)


def test_arguments_by_name_and_a_callable_grid():
    bench = Bench()
    kernel = tuned(bench)
    x = torch.randn(3, 50)
    out = torch.empty_like(x)
    with tritile.mode("tune"):
        kernel[lambda meta: (3 if meta["BLOCK"] else 0,)](N=50, used_ptr=bench.used, out_ptr=out, x_ptr=x)
    torch.testing.assert_close(out, x.softmax(-1))
    with tritile.mode("strict"):
        assert run(kernel, bench.used) == 128  # the same problem, by position


@pytest.mark.parametrize("mode", ["tune", "cached", "off"])
@pytest.mark.parametrize(("placed", "named"), [((), {"BLOCK": 64}), ((64,), {}), ((), {"num_warps": 8})])
def test_what_is_tuned_may_not_be_passed_as_well(mode, placed, named):
    x, wanted = torch.zeros(3, 50), f"{next(iter(named), 'BLOCK')} given, but the tuner sets it"
    with tritile.mode(mode), pytest.raises(InvalidValueError, match=wanted):
        tuned(Bench())[(3,)](x, x.clone(), torch.zeros(1, dtype=torch.int32), 50, *placed, **named)


def test_two_threads_measure_once(monkeypatch):
    bench = Bench(pause=0.02)
    kernel, barrier, results = tuned(bench, mode="tune"), threading.Barrier(2), []
    searches, measure = [], kernel.measure
    monkeypatch.setattr(kernel, "measure", lambda *given: searches.append(1) or measure(*given))

    def call():
        x = torch.randn(3, 50)
        out = torch.empty_like(x)
        barrier.wait()
        kernel[(3,)](x, out, bench.used, 50)
        results.append(torch.allclose(out, x.softmax(-1)))

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True, True]
    assert sorted(bench.measured) == [64, 128, 256]
    assert len(searches) == 1


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_forked_while_another_thread_measures_can_choose():
    measuring, go_on, bench = threading.Event(), threading.Event(), Bench()

    def hang(call, quantiles):
        measuring.set()
        go_on.wait()
        return bench(call, quantiles)

    kernel = tuned(hang)
    x = torch.randn(3, 50)
    given = (x, torch.empty_like(x), bench.used, 50)
    found = kernel.problem(given, {}), kernel.offered(given, {})
    thread = threading.Thread(target=kernel.measure, args=(*found, given, {"grid": (3,)}, INTERPRETER))
    thread.start()
    measuring.wait()
    choose = multiprocessing.get_context("fork").Process
    process = choose(target=kernel.choose, args=(given, {}, "cached"), daemon=True)
    process.start()
    process.join()
    go_on.set()
    thread.join()
    assert process.exitcode == 0


KERNEL = """
import triton
import triton.language as tl

SCALE = tl.constexpr({scale})

@triton.jit
def helper(x):
    return x * {factor}

{decorators}
@triton.jit
def stranger(x_ptr, used_ptr, N, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + columns, mask=columns < N)
    tl.store(x_ptr + columns, helper(x) * SCALE + {term}, mask=columns < N)
    tl.store(used_ptr, BLOCK)
"""
PLAIN = {"scale": 1, "factor": 2, "decorators": "", "term": 0}


def load(folder, tag, **changes):
    """The kernel of a module written afresh, of the same name unless `module` says another."""
    name = changes.pop("module", "a_strangers_module")
    path = folder / f"version_{tag}.py"
    path.write_text(changes.pop("before", "") + KERNEL.format(**(PLAIN | changes)))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.stranger


def run_stranger(kernel, used):
    x = torch.ones(50)
    kernel[(1,)](x, used, 50)
    return float(x[0])


@pytest.mark.parametrize(
    "change", [{"term": 3}, {"factor": 5}, {"scale": 7}], ids=["body", "callee", "constant"]
)
def test_an_edit_of_the_source_is_measured_anew(tmp_path, change):
    first, second = Bench(), Bench({64: 1.0, 128: 2.0, 256: 3.0})
    before = tuned(first, kernel=load(tmp_path, "a"), mode="tune", restore_value=["x_ptr"])
    after = tuned(second, kernel=load(tmp_path, "b", **change), mode="tune", restore_value=["x_ptr"])
    assert before.digest != after.digest
    run_stranger(before, first.used)
    run_stranger(after, second.used)
    assert (first.measured, second.measured) == ([64, 128, 256], [64, 128, 256])
    assert (int(first.used), int(second.used)) == (128, 64)
    again = tuned(Bench({}), kernel=load(tmp_path, "c"), mode="strict")
    assert run_stranger(again, first.used) == 2.0  # an edit taken back finds what was measured


def test_the_digest_is_of_the_source_alone(tmp_path):
    plain = source_hash(load(tmp_path, "a"))
    moved = load(tmp_path, "b", before="# a comment\nX = 1\n\n\n")
    listed = textwrap.dedent("""
        import tritile
        @tritile.autotune([triton.Config({{'BLOCK': {block}}}), triton.Config({{'BLOCK': 32}})], key=['N'])
        @triton.heuristics({{}})""")
    short, long = (load(tmp_path, str(block), decorators=listed.format(block=block)) for block in (64, 128))
    elsewhere, third = (load(tmp_path, name, module=name) for name in ("another", "a_third"))
    elsewhere.fn.__globals__["helper"] = third.fn.__globals__["helper"]
    assert {source_hash(kernel) for kernel in (moved, short, long, elsewhere)} == {plain}
    assert short.digest == plain
    assert len(plain) == 16


def test_a_config_that_is_no_plain_data_is_remembered():
    bench = Bench({64: 2.0, 128: 1.0})
    listed = [*configs(64), triton.Config({"BLOCK": 128, "TYPE": tl.float32})]
    kernel = tritile.autotune(listed, ["N"], do_bench=bench)(with_type)
    kernel[(1,)](bench.used, 4)
    assert (bench.measured, int(bench.used)) == ([64, 128], 128)
    assert trials(kernel, 4) == {64: 2000.0, 128: 1000.0}
    tritile.forget()
    with tritile.mode("strict"):
        kernel[(1,)](bench.used, 4)
    assert int(bench.used) == 128


@triton.jit
def with_type(used_ptr, N, BLOCK: tl.constexpr, TYPE: tl.constexpr = tl.int32):
    tl.store(used_ptr, BLOCK)


def test_what_is_remembered_is_plain_text():
    bench = Bench()
    kernel = tuned(bench)
    with tritile.mode("tune"):
        run(kernel, bench.used)
    (facts, trial), *_ = store_of(INTERPRETER).everything()
    assert trial.config == Config.of(BLOCK=64, num_warps=2)
    assert trial.spread == pytest.approx(0.2)
    assert facts["kernel"] == kernel.digest == source_hash(softmax)
    assert dict(trial.problem.dtypes) == {"x_ptr": "float32", "out_ptr": "float32", "used_ptr": "int32"}
    assert trial.measured_utc


def test_a_tuner_is_what_it_was_told_and_keeps_no_arguments():
    bench = Bench()
    kernel = tuned(bench, mode="tune")
    x = torch.randn(3, 50)
    out, gone = torch.empty_like(x), weakref.ref(x)
    kernel[(3,)](x, out, bench.used, 50)
    del x
    assert gone() is None
    kernel.configs = configs(64, 256)
    run(kernel, bench.used, 60)
    assert int(bench.used) == 256
    kernel.early_config_prune = lambda configs, named_args, **_: configs[:1]
    run(kernel, bench.used, 61)
    assert int(bench.used) == 64
    last = weakref.ref(kernel)
    del kernel
    assert last() is None
