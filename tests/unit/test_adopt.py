"""Kernels under somebody else's `triton.autotune` that tritile adopts: what programs do to them and see of
them.

`test_like_triton`, `test_traced` and `test_forms` run adopted kernels, too: there, as Triton's.
"""

import copy
import functools
import os
import re
import sys
import threading
import warnings
from contextlib import nullcontext
from types import MethodType

import cloudpickle
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner

import tritile
from tests.ahead import H200
from tests.unit.test_like_triton import Bench, of_blocks
from tritile.errors import (
    GpuTakenError,
    InvalidValueError,
    NotTunedError,
    RetuningWarning,
    SettingWarning,
    UntunedWarning,
)
from tritile.tuner import adopted as adopted_module
from tritile.tuner import adoption, decorated
from tritile.tuner.adopted import Adopted
from tritile.tuner.adoption import tuner_of
from tritile.tuner.adoption_options import of_environment
from tritile.tuner.measure import engine

pytestmark = [pytest.mark.interpreted, pytest.mark.filterwarnings("ignore::tritile.errors.UntunedWarning")]
TRITONS_RUN = Autotuner.run


@triton.jit
def body(used, N, BLOCK: tl.constexpr):
    tl.store(used, BLOCK)


@pytest.fixture(autouse=True)
def _released():
    yield
    for each in [*adoption._adoptions]:
        each.release()
    assert Autotuner.run is TRITONS_RUN
    assert not isinstance(vars(Autotuner).get("early_config_prune"), property)


@pytest.fixture
def bench():
    return Bench()


@pytest.fixture
def made(bench):
    """Decorate `body` by `triton.autotune`, of whose configs the last is the fastest."""

    def made(kind=triton.autotune, **rest):
        return kind(of_blocks(16, 32, 64), key=["N"], **{"do_bench": bench} | rest)(body)

    return made


@pytest.fixture
def run(bench):
    """Call a kernel and return the BLOCK that it ran with."""

    def run(kernel, n=5):
        kernel[(1,)](bench.used, n)
        assert kernel.best_config.kwargs["BLOCK"] == int(bench.used)
        return int(bench.used)

    return run


def key(n=5):
    return n, "torch.int32"


# What is adopted.


def test_before_and_after(made, run, bench):
    before = made()
    with tritile.adopt() as adopted:
        after = made()
        assert (run(before), run(after), run(after, 6)) == (64, 64, 64)
        assert len(bench.timed) == 6  # two problems of one source, whichever kernel called first
        (row,) = adopted.report
    assert (row.measured, row.remembered, row.guessed) == (2, 1, 0)
    assert re.fullmatch(
        r"\S+test_adopt\.body: 2 problems measured now, in \S+ s; 1 problem remembered", str(adopted)
    )


def test_seconds_that_another_process_measured(made, run, monkeypatch):
    """Without pauses, as between two processes that measured the same problem."""
    moments = iter(["12:00:00", "12:00:04", "12:30:00"])
    monkeypatch.setattr(engine, "now", lambda: f"2026-01-01T{next(moments)}+00:00")
    with tritile.adopt():
        run(made())
    tritile.forget()
    with tritile.adopt() as adopted:
        run(made())
    assert str(adopted) == "tests.unit.test_adopt.body: 1 problem remembered, which saved 4 s"


def test_release_gives_it_back_to_triton(made, run, bench):
    kernel = made()
    adopted = tritile.adopt()
    run(kernel)
    adopted.release()
    adopted.release()
    assert run(kernel) == 64  # of the kernel's own cache
    bench.timed.clear()
    assert run(kernel, 7) == 64
    assert bench.timed == [16, 32, 64]
    assert len(adopted.report) == 1


@pytest.mark.parametrize(
    ("patterns", "is_adopted"),
    [
        ({"kernels": "*"}, True),
        ({"kernels": "body"}, True),
        ({"kernels": "*.test_adopt.body"}, True),
        ({"kernels": ["nothing", "bo?y"]}, True),
        ({"kernels": "*softmax*"}, False),
        ({"exclude": "*test_adopt*"}, False),
        ({"exclude": ("other", "body")}, False),
    ],
)
@pytest.mark.filterwarnings("ignore:tritile.adopt. no kernel")
def test_patterns(made, run, patterns, is_adopted):
    kernel = made()
    with tritile.adopt(**patterns):
        assert run(kernel) == 64
        assert (tuner_of(kernel) is not None) == is_adopted


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("*bodi*", "body"),
        ("test.*", "tests.*"),
        ("tests", "tests.*"),
        ("tests.unit.test_adapt", "tests.unit.test_adopt.*"),
        ("tests.unit.test_adopt.bodi", "tests.unit.test_adopt.body"),
        ("other.module.bodi", "body"),
    ],
)
def test_unmet_pattern_names_near_one(made, run, pattern, meant):
    why = f"no kernel that was called is named {pattern!r} (did you mean {meant!r}?)"
    with pytest.warns(UserWarning, match=re.escape(why)), tritile.adopt(pattern):
        run(made())


def test_unmet_exclude_says_nothing(made, run, recwarn):
    with tritile.adopt(exclude="nothing") as adopted:
        run(made())
    assert [each for each in recwarn if each.category is UserWarning] == []
    assert "nothing" not in str(adopted)


def test_one_config_is_left_alone(bench):
    kernel = triton.autotune(of_blocks(16), key=["N"])(body)
    with tritile.adopt() as adopted:
        kernel[(1,)](bench.used, 5)
    assert int(bench.used) == 16
    assert adopted.report == []


def test_tritiles_own_decorator_is_not_adopted(made, run):
    with tritile.adopt() as adopted:
        assert run(made(tritile.autotune)) == 64
    assert adopted.report == []


def test_subclass_ending_in_super_run(made, run, bench):
    class Cached(Autotuner):
        def run(self, *args, **kwargs):
            self.seen = True
            return super().run(*args, **kwargs)

    class Whole(Autotuner):
        def run(self, used, N, **kwargs):
            self.best_config = self.configs[0]
            return self.fn.run(used, N, **kwargs, **self.best_config.all_kwargs())

    with tritile.adopt() as adopted:
        kernels = [
            kind(body, body.arg_names, of_blocks(16, 32, 64), ["N"], None, None, do_bench=bench)
            for kind in (Cached, Whole)
        ]
        assert [run(kernel) for kernel in kernels] == [64, 16]
    assert kernels[0].seen
    assert "Whole has a run of its own, without super().run: its kernels are left to Triton" in str(adopted)
    assert "Cached" not in str(adopted)


# Another patch of `Autotuner.run`.


@pytest.mark.parametrize(
    "decorate", [lambda patch: patch, functools.wraps(Autotuner.run)], ids=["plain", "wraps"]
)
def test_earlier_patch_stays(made, run, monkeypatch, decorate):
    @decorate
    def first(kernel, *args, **kwargs):
        kernel.best_config = kernel.configs[0]
        return kernel.fn.run(*args, **kwargs, **kernel.configs[0].all_kwargs())

    with monkeypatch.context() as patch:
        patch.setattr(Autotuner, "run", first)
        with tritile.adopt() as adopted:
            assert run(made()) == 16
            assert "stands in for Autotuner.run of Triton" in str(adopted)
        assert Autotuner.run is first


def test_patch_swaps_configs_once(made, run, monkeypatch):
    kernel = made()
    with tritile.adopt():
        adopted = Autotuner.run

        def policy(kernel, *args, **kwargs):
            kept, kernel.configs = kernel.configs, kernel.configs[1:2]
            try:
                return adopted(kernel, *args, **kwargs)
            finally:
                kernel.configs = kept

        with monkeypatch.context() as patch:
            patch.setattr(Autotuner, "run", policy)
            assert run(kernel) == 32
        assert run(kernel) == 64


def test_an_instances_own_run_wins(made, run, bench):
    kernel = made()
    kernel.run = MethodType(lambda kernel, *args, **kwargs: "mine", kernel)
    with tritile.adopt():
        assert kernel[(1,)](bench.used, 5) == "mine"


# What programs write.


@pytest.mark.parametrize("when", ["before", "after"])
def test_written_cache_entry_runs(made, run, when):
    kernel = made()
    with tritile.adopt():
        if when == "after":
            run(kernel)
        kernel.cache[key()] = kernel.configs[1]
        assert run(kernel) == 32
        kernel.cache.clear()
        assert run(kernel) == 64
        assert [*kernel.cache] == [key()]


def test_a_cache_that_answers_every_key(made, run):
    class First(dict):
        def __contains__(self, key):
            return len(self) > 0

        def __getitem__(self, key):
            return next(iter(self.values()))

    kernel = made()
    with tritile.adopt():
        kernel.cache = First()
        kernel.cache["any"] = kernel.configs[1]
        assert (run(kernel), run(kernel, 6)) == (32, 32)


def test_copies_own_caches_and_configs(made, run):
    kernel = made()
    with tritile.adopt():
        run(kernel)
        other = copy.copy(kernel)
        other.cache, other.configs = {}, of_blocks(32, 16)
        assert (run(other, 6), run(kernel, 6)) == (16, 64)
        for again in (copy.deepcopy(kernel), cloudpickle.loads(cloudpickle.dumps(made(do_bench=None)))):
            again.cache[key(9)] = again.configs[1]
            assert run(again, 9) == 32


@pytest.mark.parametrize("edit", ["in place", "an equal list", "replaced"])
def test_edited_configs_at_next_miss(made, run, edit):
    kernel = made()
    with tritile.adopt():
        run(kernel)
        tuner = tuner_of(kernel)
        if edit == "an equal list":
            kernel.configs = of_blocks(16, 32, 64)
        elif edit == "in place":
            kernel.configs[2] = triton.Config({"BLOCK": 8})
        else:
            kernel.configs = of_blocks(16, 8)
        assert run(kernel, 6) == (64 if edit == "an equal list" else 8)
        assert (tuner_of(kernel) is tuner) == (edit == "an equal list")


@pytest.mark.parametrize("name", ["keys", "fn", "pre_hook", "_do_bench", "early_config_prune"])
def test_other_attributes_that_a_program_replaces(made, run, bench, name):
    kernel, called = made(), []

    @triton.jit
    def doubled(used, N, BLOCK: tl.constexpr):
        tl.store(used, 2 * BLOCK)

    def hook(named, reset_only=False):
        called.append("hook")

    def other(call, quantiles=None):
        called.append("bench")
        return bench(call, quantiles)

    def early(configs, named, **kwargs):
        called.append("early")
        return configs[:2]

    replaced = {"keys": [], "fn": doubled, "pre_hook": hook, "_do_bench": other, "early_config_prune": early}
    with tritile.adopt():
        run(kernel)
        setattr(kernel, name, replaced[name])
        if name == "_do_bench":
            kernel.do_bench = other
        kernel.cache.clear()
        kernel[(1,)](bench.used, 8)
        assert int(bench.used) == {"fn": 128, "early_config_prune": 32}.get(name, 64)
        assert [*kernel.cache] == [key(8)[1:] if name == "keys" else key(8)]
    wanted = {"pre_hook": ["hook"] * 4, "_do_bench": ["bench"] * 3, "early_config_prune": ["early"]}
    assert called == wanted.get(name, [])


def test_unmarked_hook_of_constructor(bench):
    """As a library's subclass writes Triton's hooks again, so that they take None."""

    class Tolerant(Autotuner):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)

            def hook(named, reset_only=False):
                raise AssertionError("it stands for reset_to_zero")

            self.pre_hook = hook

        def run(self, *args, **kwargs):
            return super().run(*args, **kwargs)

    kernel = Tolerant(body, body.arg_names, of_blocks(16, 32), ["N"], ["used"], None, do_bench=bench)
    with tritile.adopt():
        kernel[(1,)](bench.used, 5)
        assert not tuner_of(kernel).user_defined_pre_hook
        assert tuner_of(kernel).reset_to_zero == ["used"]


@pytest.mark.filterwarnings("ignore:warmup, rep")
@pytest.mark.parametrize("options", [{"warmup": 1}, {"rep": 2}, {"use_cuda_graph": True}])
def test_tritons_own_benchmark_is_no_programs(options):
    kernel = triton.autotune(of_blocks(16, 32), key=["N"], **options)(body)
    with tritile.adopt():
        tuner = tuner_of(kernel)
        assert not tuner._is_timed_by_user
        assert tuner.isolate


# What programs read.


def test_what_programs_read_after_a_call(made, run):
    kernel = made()
    with tritile.adopt():
        run(kernel)
        assert {config.kwargs["BLOCK"] for config in kernel.configs_timings} == {16, 32, 64}
        assert kernel.bench_time > 0
        assert kernel.nargs is None
        assert kernel.cache == {key(): kernel.best_config}
    guessed = made(do_bench=None)
    with tritile.adopt(mode="cached"):
        run(guessed, 77)
        assert (guessed.configs_timings, guessed.bench_time) == ({}, 0.0)


def test_pruning_finds_nargs(bench):
    def early(configs, named, **kwargs):
        assert kernel.nargs["N"] == named["N"]
        return configs[:2]

    kernel = triton.autotune(
        of_blocks(16, 32, 64), ["N"], prune_configs_by={"early_config_prune": early}, do_bench=bench
    )(body)
    with tritile.adopt():
        kernel[(1,)](bench.used, 5)
    assert int(bench.used) == 32


# Options.


def test_modes(made, run, bench):
    kernel = made()
    with (
        tritile.adopt(mode="strict"),
        pytest.raises(NotTunedError, match=r"nothing measured is remembered for .*body"),
    ):
        run(kernel)
    with tritile.adopt(mode="cached") as adopted:
        assert run(kernel) == 16
        assert adopted.report[0].guessed == 1
    assert bench.timed == []
    kernel.cache.clear()
    with tritile.adopt():
        assert run(kernel) == 64
    kernel.cache.clear()
    with tritile.adopt(mode="strict"):
        assert run(kernel) == 64


def test_bucket_by_adopter(made, run, bench):
    kernel = made()
    with tritile.adopt(bucket={"*body*": {"N": triton.next_power_of_2}}):
        assert [run(kernel, n) for n in (5, 6, 8, 9)] == [64] * 4
    assert len(bench.timed) == 6
    with (
        tritile.adopt(bucket={"body": {"n": triton.next_power_of_2}}),
        pytest.raises(
            InvalidValueError,
            match=r"bucket names 'n' of \S*body \(did you mean 'N'\?\): expected one of its key, \['N'\]",
        ),
    ):
        run(made())


def test_bucket_for_those_with_the_argument(run, bench):
    """A library's pattern meets kernels with other keys."""
    kernels = [triton.autotune(of_blocks(16, 32), key=key, do_bench=bench)(body) for key in (["N"], [])]
    buckets = {"*body*": dict.fromkeys("MN", triton.next_power_of_2)}
    why = "no kernel that was called and matches '*body*' has 'M' in its key; their keys hold N"
    adopted = tritile.adopt(bucket=buckets)
    assert [run(kernel, n) for kernel in kernels for n in (5, 6)] == [32] * 4
    assert len(bench.timed) == 4
    assert why in str(adopted)
    with pytest.warns(UserWarning, match=re.escape(why)) as warned:
        adopted.release()
    assert len(warned) == 1


def test_effort_by_adopter(run, bench):
    kernel = triton.autotune(of_blocks(*range(16, 48)), key=["N"], do_bench=bench)(body)
    with tritile.adopt(effort="quick"):
        run(kernel)
    assert len(bench.timed) == 8


def test_many_values_advise_bucket(made, run, recwarn):
    kernel = made()
    with tritile.adopt():
        for n in range(11):
            run(kernel, n)
            told = [str(each.message) for each in recwarn if each.category is RetuningWarning]
            assert len(told) == (n >= 8)
    assert "body was tuned for 9 values of N in its key: bucket={'N': triton.next_power_of_2}" in told[0]


def test_a_reference_finds_a_wrong_winner(made, run):
    def right(used, N):
        return {"used": torch.full_like(used, 64)}

    def wrong(used, N):
        return {"used": torch.full_like(used, 65)}

    with tritile.adopt(reference={"body": right}):
        assert run(made()) == 64
    with (
        tritile.adopt(reference={"body": wrong}),
        pytest.warns(RuntimeWarning, match="Triton tunes it: .*wrong answer"),
    ):
        assert run(made(), 9) == 64


def test_adoptions_that_disagree(made, run):
    kernel = made()
    with tritile.adopt("*body*", mode="cached"), tritile.adopt("*adopt*", mode="cached"):
        assert run(kernel) == 16
    with tritile.adopt(mode="cached"):
        other = tritile.adopt("other")
        assert run(made()) == 16
        with pytest.warns(UserWarning, match="'other'"):
            other.release()
    with (
        tritile.adopt(mode="cached"),
        tritile.adopt(),
        pytest.raises(InvalidValueError, match=r"disagree about .*body"),
    ):
        run(made())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"kernels": 3}, "kernels is 3: expected names"),
        ({"kernels": ["a", ""]}, "kernels is"),
        ({"exclude": [None]}, "exclude is"),
        ({"mode": "fast"}, "mode is 'fast': expected one of"),
        ({"effort": "some"}, "effort is 'some': expected one of"),
        ({"bucket": {"N": triton.next_power_of_2}}, "bucket is"),
        ({"bucket": {"*": {"N": 16}}}, "bucket is"),
        ({"bucket": "text"}, r"bucket is 'text': expected functions by pattern and argument, as \{'\*conv"),
        ({"reference": {"*": 1}}, "reference is"),
    ],
)
def test_bad_options_are_refused(options, why):
    with pytest.raises(InvalidValueError, match=why):
        tritile.adopt(**options)
    assert Autotuner.run is TRITONS_RUN


# Functions of tritile that take a kernel.


@pytest.mark.parametrize("is_adopted", [True, False])
def test_kernels_that_functions_of_tritile_take(made, bench, is_adopted):
    def right(used, N):
        return {"used": torch.full_like(used, 64)}

    kernel = made(do_bench=bench)
    with tritile.adopt(reference={"body": right}) if is_adopted else nullcontext():
        result = tritile.tune(kernel, bench.used, 5, grid=(1,))
        assert result.config.kwargs["BLOCK"] == 64
        assert tritile.plan(kernel, bench.used, 5).source == "exact"
        assert kernel.cache == {}
        if is_adopted:
            checked = tritile.check(kernel, bench.used, 5, grid=(1,))
            assert [each.config.kwargs["BLOCK"] for each in checked.right] == [64]
        else:
            with pytest.raises(InvalidValueError, match="reference"):
                tritile.check(kernel, bench.used, 5, grid=(1,))
    assert Autotuner.run is TRITONS_RUN


# What lies between modes, programs and adoptions.


def test_guess_is_no_measurement(made, run, bench):
    kernel = made()
    with tritile.adopt(mode="cached"):
        assert run(kernel) == 16
        assert run(kernel) == 16
        with tritile.adopt("nothing.*", mode="cached"), pytest.warns(UserWarning, match="nothing"):
            adoption._adoptions[-1].release()
    assert kernel.cache == {}  # Triton would take it for measured
    with tritile.adopt(mode="strict"), pytest.raises(NotTunedError):
        run(kernel)
    with tritile.adopt():
        assert run(kernel) == 64
        with tritile.mode("strict"):
            assert run(kernel) == 64
    assert kernel.cache[key()].kwargs["BLOCK"] == 64
    assert len(bench.timed) == 3


def test_programs_entries_count_in_every_mode(made, run):
    kernel = made()
    with tritile.adopt():
        kernel.cache[key()] = kernel.configs[1]
        for mode in ("cached", "tune", "strict", "cached"):
            with tritile.mode(mode):
                assert run(kernel) == 32
        with tritile.mode("cached"):
            assert run(kernel, 6) == 16
        assert run(kernel, 6) == 64  # which clears what was guessed, and nothing of the program's
        tritile.forget()
        assert kernel.cache[key()] is kernel.configs[1]
        assert (run(kernel), run(kernel, 6)) == (32, 64)


def test_equal_cache_in_place_of_another(made, run):
    kernel = made()
    with tritile.adopt():
        run(kernel)
        kernel.cache = dict(kernel.cache)
        run(kernel, 6)
        assert {*kernel.cache} == {key(), key(6)}


def test_configs_to_and_fro_keep_their_tuners(made, run, bench):
    kernel = made()
    lists = [kernel.configs, kernel.configs[:1], kernel.configs[1:]]
    with tritile.adopt():
        tuners = []
        for _ in range(3):
            for n, configs in enumerate(lists):
                kernel.configs = configs
                run(kernel, n)
                tuners.append(tuner_of(kernel))
    assert tuners[:3] == tuners[3:6] == tuners[6:]
    assert tuners[1] is None
    assert len(bench.timed) == 3 + 2


@pytest.mark.parametrize("traces", [False, True])
def test_pruning_that_a_program_puts_back(made, run, traces, monkeypatch):
    """Once torch may trace, it is tritile's that is read, and the program's own that is put back."""

    def early(configs, named, **kwargs):
        return configs[:2]

    if traces:
        monkeypatch.setitem(sys.modules, "torch._dynamo", sys)
    else:
        monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    kernel = made()
    with tritile.adopt():
        for n in range(3):
            kept, kernel.early_config_prune = kernel.early_config_prune, early
            assert (kernel.early_config_prune is early) == (not traces)
            assert kernel.early_config_prune(kernel.configs, {}) == kernel.configs[:2]
            assert run(kernel, 2 * n) == 32
            kernel.early_config_prune = kept
            assert vars(kernel)["early_config_prune"] is None
            assert run(kernel, 2 * n + 1) == 64
        del kernel.early_config_prune
    assert "early_config_prune" not in vars(kernel)


def test_hook_of_config_reads_nargs(bench):
    seen = []
    configs = [
        triton.Config({"BLOCK": b}, pre_hook=lambda named: seen.append(kernel.nargs["N"])) for b in (16, 32)
    ]
    kernel = triton.autotune(configs, key=["N"], do_bench=bench)(body)
    with tritile.adopt():
        kernel[(1,)](bench.used, 7)
        seen.clear()
        kernel[(1,)](bench.used, 7)
    assert seen == [7]


@pytest.mark.parametrize("lacks", ["_do_bench", "early_config_prune", "pre_hook"])
def test_kernel_that_lacks_an_attribute(made, bench, lacks):
    kernel = made()
    vars(kernel).pop(lacks)
    if lacks == "pre_hook":
        kernel.cache[key()] = kernel.configs[2]  # Triton times nothing without it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with tritile.adopt(mode="cached"):
            kernel[(1,)](bench.used, 5)
    assert int(bench.used) in (16, 64)


def test_forked_process_waits_for_nobody():
    held, done = threading.Event(), threading.Event()

    def hold():
        with adoption._lock:
            held.set()
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that a process with threads forks
        child = os.fork()
    if child == 0:
        os._exit(0 if adoption._lock.acquire(timeout=60) else 1)
    done.set()
    holder.join()
    assert os.waitpid(child, 0)[1] == 0


def test_what_is_printed_after_the_with(made, run):
    with tritile.adopt("*body*") as adopted:
        run(made())
    assert str(adopted).startswith("tests.unit.test_adopt.body: 1 problem measured now, in ")
    assert "stands in" not in str(adopted)
    assert "named" not in str(adopted)


def test_what_is_printed_before_a_call(monkeypatch):
    monkeypatch.setattr(adoption, "_called", {})
    with tritile.adopt() as adopted:
        assert str(adopted).startswith("tritile.adopt: kernels under triton.autotune: none was called so far")
    with tritile.adopt("fla.*", exclude="*rotary*") as adopted:
        (line, *_) = str(adopted).splitlines()
        assert "triton.autotune named fla.*, except *rotary*: none was called so far, or only" in line
        assert "is named" not in str(adopted)
        with pytest.warns(UserWarning, match=r"is named 'fla\.\*'"):
            adopted.release()


# What fails costs the adoption alone.


def test_strict_is_a_gate_where_a_choice_fails(made, run, bench, monkeypatch):
    def broken(value):
        raise OSError("no bucket")

    kernel = made()
    with (
        tritile.adopt(mode="strict", bucket={"*": {"N": broken}}),
        pytest.raises(NotTunedError, match="no bucket"),
    ):
        run(kernel)
    monkeypatch.setattr(Adopted, "__init__", broken)
    with tritile.adopt(mode="strict"), pytest.raises(NotTunedError, match="cannot adopt"):
        run(kernel)
    assert bench.timed == []


def test_refusals_are_repeated(made, run, bench, monkeypatch):
    """The second call of a kernel that cannot be adopted as it is asked does not run by Triton either."""
    kernel = made()
    with tritile.adopt():
        run(kernel)
        with tritile.adopt(mode="cached"):
            for _ in range(3):
                with pytest.raises(InvalidValueError, match="disagree about"):
                    run(kernel)
    monkeypatch.setattr(Adopted, "__init__", lambda *args: 1 / 0)
    bench.timed.clear()
    with tritile.adopt(mode="strict"):
        for _ in range(3):
            with pytest.raises(NotTunedError, match="cannot adopt"):
                run(kernel, 6)
    assert bench.timed == []


def test_warnings_point_at_the_call(made, run, monkeypatch, bench):
    monkeypatch.setattr(Adopted, "__init__", lambda *args: 1 / 0)
    kernel = made()
    with tritile.adopt(["*body*", "nothing"]) as adopted:
        with pytest.warns(RuntimeWarning, match="does not adopt") as warned:
            kernel[(1,)](bench.used, 5)
        with pytest.warns(UserWarning, match="'nothing'") as released:
            adopted.release()
    assert [each.filename for each in (*warned, *released)] == [__file__] * 2


def test_warnings_as_errors_break_nothing(made, run, bench):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tritile.adopt(mode="cached"):
            assert run(made()) == 16
        with tritile.adopt("nothing"):
            for n in range(10):
                run(made(), n)
    assert len(bench.timed) == 30


@pytest.mark.parametrize("where", ["__init__", "choose"])
def test_where_adoption_fails_triton_tunes(made, run, monkeypatch, bench, where):
    def broken(*args, **kwargs):
        raise OSError("no store")

    monkeypatch.setattr(Adopted, where, broken)
    kernel = made()
    with tritile.adopt() as adopted, pytest.warns(RuntimeWarning, match="OSError: no store") as warned:
        assert [run(kernel, n) for n in (5, 6, 5)] == [64] * 3
    assert len(warned) == 1
    assert bench.timed == [16, 32, 64] * 2
    assert "left to Triton: OSError: no store" in str(adopted)


def test_full_gpu_measures_nothing_and_warns_once(run, bench, monkeypatch):
    tried = []

    def tune_in_workers(call, task, rules, keep):
        tried.append(call.problem)
        raise GpuTakenError("its operands cannot be made: CUDA out of memory")

    monkeypatch.setattr(decorated, "tune_in_workers", tune_in_workers)
    monkeypatch.setattr(adopted_module, "_taken", set())
    monkeypatch.setattr(Adopted, "device_of", lambda *args: H200)
    kernel = triton.autotune(of_blocks(16, 32, 64), key=["N"])(body)
    with warnings.catch_warnings(record=True) as warned, tritile.adopt() as adoption:
        warnings.simplefilter("always")
        assert [run(kernel, n) for n in (5, 6, 5)] == [16, 16, 16]
    (text,) = [str(each.message) for each in warned if each.category is UntunedWarning]
    assert "no room for it" in text
    assert "tritile run --mode tune" in text
    assert len(tried) == 1
    (row,) = adoption.report
    assert (row.measured, row.guessed) == (0, 2)


def test_call_too_large_to_copy_leaves_others(run, monkeypatch):
    """That one is not measured; the next is tried."""
    tried = []

    def tune_in_workers(call, task, rules, keep):
        tried.append(call.problem)
        raise GpuTakenError("its tensors take more than 5 bytes of memory", for_all=False)

    monkeypatch.setattr(decorated, "tune_in_workers", tune_in_workers)
    monkeypatch.setattr(adopted_module, "_taken", set())
    monkeypatch.setattr(Adopted, "device_of", lambda *args: H200)
    kernel = triton.autotune(of_blocks(16, 32, 64), key=["N"])(body)
    with tritile.adopt(), pytest.warns(UntunedWarning, match=r"no call of .*body of this size"):
        assert [run(kernel, n) for n in (5, 6, 5)] == [16, 16, 16]
    assert len(tried) == 2


def test_errors_of_a_program_are_tritons(made, bench):
    with (
        tritile.adopt(),
        pytest.raises(ValueError, match="Conflicting meta-parameters: BLOCK"),
        pytest.warns(RuntimeWarning),
    ):
        made()[(1,)](bench.used, 5, BLOCK=16)


def test_threads_measure_once(made, bench):
    kernel, answers = made(), []

    def call():
        used = torch.zeros(1, dtype=torch.int32)
        kernel[(1,)](used, 5)
        answers.append(int(used))

    with tritile.adopt():
        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == [64] * 4
    assert len(bench.timed) == 3


# What the environment asks for.


@pytest.fixture
def by_environment(monkeypatch):
    def by_environment(**variables):
        adoption.install_later({"TRITILE_ADOPT": "1"} | variables, triton.runtime.autotuner)

    return by_environment


def test_programs_adoption_before_environments(made, run, by_environment, bench):
    """But for the mode, unless the program names one."""
    by_environment(TRITILE_ADOPT_MODE="cached", TRITILE_ADOPT_BUCKETS="*:N=next_power_of_2")
    kernel = made()
    assert run(kernel) == 16
    with tritile.adopt():
        assert run(kernel, 6) == 16
    with tritile.adopt(mode="tune"):
        assert [run(kernel), run(kernel, 6)] == [64, 64]
    assert len(bench.timed) == 6


def test_a_file_of_options(made, run, by_environment, bench, tmp_path):
    path = tmp_path / "adopt.toml"
    path.write_text('kernels = ["*body*"]\n[bucket."*body*"]\nN = "next_power_of_2"\n')
    by_environment(TRITILE_ADOPT_FILE=str(path))
    kernel = made()
    assert [run(kernel, n) for n in (5, 6)] == [64] * 2
    assert len(bench.timed) == 3


def test_buckets_by_a_variable(made, run, by_environment, bench):
    by_environment(TRITILE_ADOPT_BUCKETS="*body*:N=triton:next_power_of_2; *other*:M=math:isqrt")
    kernel = made()
    assert [run(kernel, n) for n in (5, 6)] == [64] * 2
    assert len(bench.timed) == 3


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"TRITILE_ADOPT_MODE": "fast"}, "TRITILE_ADOPT_MODE is 'fast'"),
        ({"TRITILE_ADOPT_BUCKETS": "N=next_power_of_2"}, "expected PATTERN:ARGUMENT=FUNCTION"),
        ({"TRITILE_ADOPT_BUCKETS": "*:N=nothing"}, "function 'nothing'"),
        ({"TRITILE_ADOPT_BUCKETS": "*:N=tests.unit.raising:f"}, "function 'tests.unit.raising:f'"),
        ({"TRITILE_ADOPT_FILE": "/nowhere.toml"}, "from /nowhere.toml: No such file or directory: tritile"),
        ({"TRITILE_ADOPT_FILE": __file__}, f"cannot take options from {re.escape(__file__)}: "),
    ],
)
def test_bad_variables_adopt_nothing(made, run, by_environment, variables, why):
    by_environment(**variables)
    kernel = made()
    with pytest.warns(SettingWarning, match=why):
        assert run(kernel) == 64
    assert tuner_of(kernel) is None
    tritile.adopt().release()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('kernel = "x"', "unknown 'kernel' (did you mean 'kernels'?): expected kernels, exclude"),
        ("is_default = true", "'is_default'"),
        ('mode = "fast"', "adopt.toml: mode is 'fast'"),
        ('[bucket."*"]\nN = 16', "adopt.toml: function 16: expected module:name"),
        ("[reference]\nbody = 16", "adopt.toml: function 16: expected module:name"),
        ("bucket = 3", "bucket is 3"),
        ('[bucket]\n"*" = "f"', "bucket is {'*': 'f'}: expected a table, [bucket.\"PATTERN\"]"),
        ('reference = "x"', "reference is 'x'"),
        ("table = 3", "table is 3"),
        ("kernels = [1]", "kernels is"),
        ("= 1", "adopt.toml: Invalid"),
    ],
)
def test_bad_files(tmp_path, text, why):
    path = tmp_path / "adopt.toml"
    path.write_text(text)
    with pytest.raises(InvalidValueError, match=re.escape(why)):
        of_environment({"TRITILE_ADOPT_FILE": str(path)})


def test_table_of_a_file_lies_beside_it(tmp_path):
    path = tmp_path / "adopt.toml"
    path.write_text('table = "kernels.json"')
    assert of_environment({"TRITILE_ADOPT_FILE": str(path)}).table == str(tmp_path / "kernels.json")
