"""Decorated kernels as public projects use them, checked for `triton.autotune` and `tritile.autotune`.

As in `test_like_triton`, kernels run in the interpreter and times are made up.
"""

import copy
import inspect
import linecache
import textwrap

import pytest
import torch
import triton
import triton.language as tl

from tests.unit.test_like_triton import of_blocks

pytestmark = [pytest.mark.interpreted, pytest.mark.filterwarnings("ignore::tritile.errors.UntunedWarning")]


def noted(used, N, BLOCK: tl.constexpr):
    tl.store(used, BLOCK)


def with_even(used, N, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(used, BLOCK + 1 if EVEN else BLOCK)


def with_constants(used, N, ROWS: tl.constexpr, FLAG: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(used, BLOCK + ROWS)


def two_tuned(used, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(used, BLOCK * 1000 + ROWS)


class Times:
    """Time a call by the number that its kernel writes into `used`, and note which were timed."""

    def __init__(self, **times):
        self.used, self.timed = torch.zeros(1, dtype=torch.int32), []
        self.times = times

    def __call__(self, call, quantiles=None):
        call()
        number = int(self.used)
        self.timed.append(number)
        ms = self.times.get(f"b{number}", 1 / number)
        return [ms, ms * 0.9, ms * 1.1]


@pytest.fixture
def times():
    """The larger BLOCK is, the faster."""
    return Times()


@pytest.fixture
def tuned(autotune, times):
    """Decorate a function of which the larger BLOCK is the faster; returns the kernel."""

    def decorated(function=noted, key=("N",), configs=None, **rest):
        rest = {"do_bench": times} | rest
        kernel = function if hasattr(function, "run") else triton.jit(function)
        return autotune(of_blocks(16, 32, 64) if configs is None else configs, list(key), **rest)(kernel)

    return decorated


def blocks(configs):
    return [config.kwargs["BLOCK"] for config in configs]


# Heuristics.


def constant(name, value):
    return triton.heuristics({name: lambda named: value})


def test_heuristics_below_see_each_config_and_heuristics_below_them(tuned, times):
    kernel = tuned(triton.heuristics({"EVEN": lambda at: at["N"] % at["BLOCK"] == 0})(triton.jit(with_even)))
    kernel[(1,)](times.used, 32)
    kernel[(1,)](times.used, N=48)
    assert times.timed == [17, 33, 64, 17, 32, 64]
    tuned(constant("ROWS", 3)(constant("FLAG", True)(triton.jit(with_constants))))[(1,)](times.used, 5)
    assert times.timed[6:] == [19, 35, 67]
    assert int(times.used) == 67


@pytest.mark.parametrize("key", ["N", "EVEN"])
def test_heuristics_above_set_arguments_of_the_tuned_kernel(tuned, times, key):
    seen = []

    def is_even(named):
        seen.append(sorted(name for name in named if name not in ("grid", "warmup")))
        return named["N"] % 2 == 0

    inner = tuned(with_even, key=(key,))
    kernel = triton.heuristics({"EVEN": is_even})(inner)
    for n in (2, 4, 3, 2):
        kernel[(1,)](times.used, N=n)
    assert seen == [["N", "used"]] * 4
    assert len(inner.cache) == (3 if key == "N" else 2)
    assert int(times.used) == 65


# Kernels decorated twice, and their layers.


def test_a_tuned_kernel_under_another_tuner(tuned, times):
    unset = dict.fromkeys(
        ("num_warps", "num_stages", "num_ctas")
    )  # those of the inner kernel's configs count
    inner = tuned(two_tuned)
    outer = tuned(inner, configs=[triton.Config({"ROWS": rows}, **unset) for rows in (1, 2)], key=())
    outer[(1,)](times.used, 5)
    assert int(times.used) == 64002
    assert outer.best_config.kwargs == {"ROWS": 2}
    assert inner.best_config.kwargs == {"BLOCK": 64}


def test_the_kernel_below_replaced(tuned, times):
    kernel = tuned()
    kernel[(1,)](times.used, 5)
    assert int(times.used) == 64
    launches, inner = [], kernel.fn

    class Counted:
        def run(self, *args, **kwargs):
            launches.append(kwargs["BLOCK"])
            return inner.run(*args, **kwargs)

        def __getattr__(self, name):
            return getattr(inner, name)

    kernel.fn = Counted()
    kernel[(1,)](times.used, 5)
    assert launches == [64]
    kernel[(1,)](times.used, 6)
    assert launches == [64, 16, 32, 64, 64]


def test_attributes_of_a_tuned_kernel(tuned, autotune):
    kernel = tuned()
    assert isinstance(kernel, triton.runtime.Autotuner)
    assert isinstance(kernel, triton.runtime.jit.KernelInterface)
    assert kernel.base_fn is noted
    assert kernel.base_fn.__name__ == "noted"
    assert list(kernel.keys) == ["N"]
    assert kernel.cache == {}
    assert [config.num_warps for config in kernel.configs] == [4] * 3
    names = list(inspect.signature(triton.autotune).parameters)
    assert list(inspect.signature(autotune).parameters)[: len(names)] == names


# Hooks.


def test_hooks_of_configs_run_before_each_launch_of_theirs(tuned, times):
    calls = []

    def hook(block):
        def before(named):
            assert named["N"] == 5
            assert named["used"] is times.used
            assert named["BLOCK"] == block
            assert named["num_warps"] == 4
            calls.append(block)

        return before

    configs = [triton.Config({"BLOCK": block}, pre_hook=hook(block)) for block in (16, 32)]
    kernel = tuned(configs=configs)
    kernel[(1,)](times.used, 5)
    assert calls == [16, 32, 32]
    kernel[(1,)](times.used, N=5)
    assert calls == [16, 32, 32, 32]
    assert kernel.best_config.pre_hook is configs[1].pre_hook


def test_hooks_of_the_tuner_enclose_each_launch_and_reset_once_more_at_the_end(tuned, times):
    seen = []
    kernel = tuned(
        pre_hook=lambda named, reset_only=False: seen.append((named["BLOCK"], reset_only)),
        post_hook=lambda named, exception: seen.append((named["BLOCK"], exception)),
    )
    for _ in range(2):
        kernel[(1,)](times.used, 5)
        assert seen == [(b, way) for b in (16, 32, 64) for way in (False, None)] + [(64, True)]


# What the tuner keeps.


def test_the_cache_by_keys_of_triton(tuned, times):
    kernel = tuned()
    kernel[(1,)](times.used, 5)
    kernel[(1,)](N=6, used=times.used)
    assert list(kernel.cache) == [(5, "torch.int32"), (6, "torch.int32")]
    assert all(isinstance(config, triton.Config) for config in kernel.cache.values())
    for key, config in kernel.cache.items():
        assert config.kwargs == {"BLOCK": 64}
        assert kernel.cache[key] is config
    kernel[(1,)](times.used.float(), 5)
    kernel[(1,)](times.used, 5)
    assert list(kernel.cache)[2:] == [(5, "torch.float32")]


def test_what_is_written_into_the_cache_runs(tuned, times):
    kernel = tuned()
    kernel.cache[(5, "torch.int32")] = kernel.configs[0]
    kernel[(1,)](times.used, 5)
    assert int(times.used) == 16
    assert times.timed == []
    assert kernel.best_config is kernel.configs[0]
    kernel[(1,)](times.used, 6)
    kernel.cache.update({(6, "torch.int32"): kernel.configs[1]})
    kernel[(1,)](times.used, 6)
    assert int(times.used) == 32
    other, timed = tuned(), list(times.timed)
    other.cache = dict(kernel.cache)
    other[(1,)](times.used, 6)
    assert (int(times.used), times.timed) == (32, timed)


@pytest.mark.parametrize("how", ["clear", "pop", "replaced"])
def test_a_cleared_cache_chooses_among_the_configs_there_are_then(tuned, times, how):
    kernel = tuned()
    kernel[(1,)](times.used, 5)
    kernel.configs = of_blocks(8, 24)
    kernel[(1,)](times.used, 5)
    assert int(times.used) == 64
    if how == "clear":
        kernel.cache.clear()
    elif how == "pop":
        kernel.cache.pop((5, "torch.int32"))
    else:
        kernel.cache = {}
    kernel[(1,)](times.used, 5)
    assert int(times.used) == 24


def test_configs_changed_in_place(tuned, times):
    kernel = tuned()
    kernel.configs.append(triton.Config({"BLOCK": 128}))
    kernel.configs[:] = [config for config in kernel.configs if config.kwargs["BLOCK"] != 64]
    kernel[(1,)](times.used, 5)
    assert times.timed == [16, 32, 128]
    assert int(times.used) == 128
    del kernel.configs[1:]
    kernel[(1,)](times.used, 7)
    assert int(times.used) == 16


def test_times_of_the_last_tuning(tuned, times):
    times.times = {"b16": 3.0, "b32": 1.0, "b64": 2.0}
    kernel = tuned()
    kernel[(1,)](times.used, 5)
    assert kernel.bench_time > 0
    assert {c.kwargs["BLOCK"]: ms[0] for c, ms in kernel.configs_timings.items()} == pytest.approx(
        {16: 3.0, 32: 1.0, 64: 2.0}
    )
    assert min(kernel.configs_timings, key=kernel.configs_timings.get) is kernel.best_config


def test_what_is_printed(tuned, times, monkeypatch, capsys):
    monkeypatch.setattr(triton.knobs.autotuning, "print", True)
    kernel = tuned()
    kernel[(1,)](times.used, 5)
    said = capsys.readouterr().out
    assert said.count("Autotuning kernel noted with config BLOCK: ") == 3
    assert "Triton autotuning for function noted,\nwith key as (5, 'torch.int32'),\nfinished after " in said
    assert said.endswith(f"best config selected: {kernel.best_config};\n")
    kernel[(1,)](times.used, 5)
    assert capsys.readouterr().out == ""


# Pruning.


def edited(configs, named, **kwargs):
    for config in configs:
        config.num_stages = 1
    return configs[:2]


# prune_configs_by, and the BLOCKs that are timed
PRUNED = [
    ({}, [16, 32, 64]),
    *(({"perf_model": lambda BLOCK, **rest: BLOCK, "top_k": top_k}, [16, 32, 64][:left])
      for top_k, left in ((2, 2), (1, 1), (0.67, 2), (5, 3))),
    ({"early_config_prune": lambda configs, named, **rest: configs[1:],
      "perf_model": lambda used, N, BLOCK, num_warps, num_stages, **rest: BLOCK, "top_k": 1}, [32]),
    ({"early_config_prune": edited}, [16, 32]),
]  # fmt: skip


@pytest.mark.parametrize(("how", "timed"), PRUNED)
def test_pruning(tuned, times, how, timed):
    kernel = tuned(prune_configs_by=how)
    kernel[(1,)](times.used, 5)
    assert int(times.used) == timed[-1]
    assert times.timed == timed
    if how.get("early_config_prune") is edited:
        assert (kernel.best_config.num_stages, kernel.best_config) == (1, kernel.configs[1])


def test_a_pruner_that_returns_configs_of_its_own(tuned, times):
    def early(configs, named, **kwargs):
        grown = copy.deepcopy(configs)
        for config in grown:
            config.kwargs["BLOCK"] *= named["N"]
        return [*grown, triton.Config({"BLOCK": 4}, num_warps=1)]

    kernel = tuned(prune_configs_by={"early_config_prune": early})
    kernel[(1,)](times.used, 5)
    assert times.timed == [80, 160, 320, 4]
    assert int(times.used) == 320
    assert kernel.best_config.kwargs == {"BLOCK": 320}
    assert blocks(kernel.cache.values()) == [320]
    assert blocks(kernel.configs) == [16, 32, 64]
    kernel[(1,)](times.used, 5)
    assert int(times.used) == 320


# Keys and arguments.


def test_constants_in_the_key_and_by_place(tuned, times):
    kernel = tuned(with_constants, key=("ROWS", "FLAG"))
    kernel[(1,)](times.used, 5, 1, True)
    kernel[(1,)](times.used, 9, 1, True)
    kernel[(1,)](times.used, 5, 2, True)
    kernel[(1,)](times.used, 5, FLAG=False, ROWS=2)
    assert list(kernel.cache) == [
        (1, True, "torch.int32"),
        (2, True, "torch.int32"),
        (2, False, "torch.int32"),
    ]
    assert int(times.used) == 66


@pytest.mark.parametrize("key", [("N",), [], ()], ids=str)
@pytest.mark.parametrize(
    ("configs", "timed"),
    [
        ([], []),
        (None, []),
        (of_blocks(16), []),
        (of_blocks(16, 64), [16, 64]),
        (tuple(triton.Config({}, num_warps=warps) for warps in (1, 2)), [16, 16]),
    ],
    ids=["empty", "None", "one", "two", "a tuple, without parameters"],
)
def test_forms_of_keys_and_configs(autotune, times, configs, timed, key):
    kernel = autotune(configs, key, do_bench=times)(triton.jit(noted))
    kernel[(1,)](times.used, 5, **({} if configs and configs[0].kwargs else {"BLOCK": 16}))
    assert times.timed == timed
    assert int(times.used) == (timed or [16])[-1]
    assert kernel.best_config in kernel.configs
    assert kernel.best_config.num_warps in (1, 2, 4)
    assert len(kernel.cache) == bool(timed)


# Benchmarks.


@pytest.mark.parametrize(
    "wrap", [list, tuple, torch.tensor, lambda ms: ms[0]], ids=["list", "tuple", "tensor", "one"]
)
def test_benchmarks_return_times_or_one(tuned, times, wrap):
    def bench(call, quantiles=None):
        return wrap(times(call))

    kernel = tuned(do_bench=bench)
    if wrap is torch.tensor:
        kernel.configs[:] = kernel.configs[:1]  # Triton compares times by <, which tensors of three have not
    kernel[(1,)](times.used, 5)
    assert int(times.used) in (16, 64)
    assert kernel.best_config is kernel.configs[-1]


# Where kernels are defined.


SOURCE = textwrap.dedent(
    """
    import triton, triton.language as tl

    @decorate
    @triton.jit
    def in_cell(used, N, BLOCK: tl.constexpr):
        tl.store(used, BLOCK + EXTRA_LINE)
    """
)


@pytest.mark.parametrize("name", ["<ipython-input-1-0123456789ab>", "/ipykernel_1/123.py"])
def test_kernels_in_cells_of_a_notebook(autotune, times, name):
    """A cell that is run again defines another kernel in a file of the same name."""
    for extra in (1, 2):
        source = SOURCE.replace("EXTRA_LINE", str(extra))
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        namespace = {
            "__name__": "__main__",
            "decorate": autotune(of_blocks(16, 64), ["N"], do_bench=times),
        }
        exec(compile(source, name, "exec"), namespace)
        times.timed.clear()
        namespace["in_cell"][(1,)](times.used, 5)
        assert times.timed == [16 + extra, 64 + extra]
        assert int(times.used) == 64 + extra


# torch.library.


def test_wrapped_for_torch_outside_of_a_compile(tuned, times):
    kernel = tuned()
    torch.library.wrap_triton(kernel)[(1,)](times.used, 5)
    assert int(times.used) == 64
    assert len(kernel.cache) == 1
