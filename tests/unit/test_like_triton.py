"""Decorated kernels as Triton tests and projects use them, under `triton.autotune` and `tritile.autotune`.

Answers come from the interpreter, on host tensors; times are made up. What only a compiler or a driver can
say is in `test_forms`.
"""

import copy
import inspect
import linecache
import textwrap

import pytest
import torch
import triton
import triton.language as tl

from tritile.core.versions import parsed

pytestmark = [pytest.mark.interpreted, pytest.mark.filterwarnings("ignore::tritile.errors.UntunedWarning")]


def of_blocks(*blocks):
    return [triton.Config({"BLOCK": block}) for block in blocks]


def noted(used, N, BLOCK: tl.constexpr, ROWS: tl.constexpr = 0, EVEN: tl.constexpr = False):
    tl.store(used, BLOCK + 1000 * ROWS + EVEN)


def increment_either(x, other, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if x is not None:
        tl.store(x + at, tl.load(x + at, mask=at < N) + 1, mask=at < N)
    else:
        tl.store(other + at, tl.full([BLOCK], 5.0, tl.float32), mask=at < N)


class Bench:
    """Make each call once, and note what kernels write into `used`; each call is faster than those before."""

    def __init__(self):
        self.used, self.timed, self.times = torch.zeros(1, dtype=torch.int32), [], {}

    def __call__(self, call, quantiles=None):
        call()
        self.timed.append(int(self.used))
        ms = self.times.get(self.timed[-1], 1 / len(self.timed))
        return [ms, ms * 0.9, ms * 1.1]


@pytest.fixture
def bench():
    return Bench()


@pytest.fixture
def used(bench):
    return bench.used


@pytest.fixture
def tuned(autotune, bench):
    """Decorate a function, of which the last config is the fastest; returns the kernel."""

    def decorated(function=noted, key=("N",), configs=None, **rest):
        kernel = function if hasattr(function, "run") else triton.jit(function)
        configs = of_blocks(16, 32, 64) if configs is None else configs
        return autotune(configs, list(key), **{"do_bench": bench} | rest)(kernel)

    return decorated


def is_tritons(kernel):
    return type(kernel) is triton.runtime.Autotuner


# Heuristics and layers.


def test_heuristics_below_see_configs(tuned, bench, used):
    rows = triton.heuristics({"ROWS": lambda named: 3})(triton.jit(noted))
    kernel = tuned(triton.heuristics({"EVEN": lambda at: at["N"] % at["BLOCK"] == 0})(rows))
    kernel[(1,)](used, 32)
    kernel[(1,)](used, N=48)
    assert bench.timed == [3017, 3033, 3064, 3017, 3032, 3064]
    assert int(used) == 3064


@pytest.mark.parametrize(("key", "tunings"), [("N", 3), ("EVEN", 2)])
def test_heuristics_above_set_arguments(tuned, used, key, tunings):
    seen = []

    def is_even(named):
        seen.append(sorted(name for name in named if name not in ("grid", "warmup")))
        return named["N"] % 2 == 0

    inner = tuned(key=(key,))
    kernel = triton.heuristics({"EVEN": is_even})(inner)
    for n in (2, 4, 3, 2):
        kernel[(1,)](used, N=n)
    assert seen == [["N", "used"]] * 4
    assert len(inner.cache) == tunings
    assert int(used) == 65


def test_a_tuned_kernel_under_another_tuner(tuned, used):
    unset = dict.fromkeys(("num_warps", "num_stages", "num_ctas"))  # those of the inner configs count
    inner = tuned()
    outer = tuned(inner, configs=[triton.Config({"ROWS": rows}, **unset) for rows in (1, 2)], key=())
    outer[(1,)](used, 5)
    assert int(used) == 2064
    assert (outer.best_config.kwargs, inner.best_config.kwargs) == ({"ROWS": 2}, {"BLOCK": 64})


def test_the_kernel_below_replaced(tuned, used):
    kernel, launches = tuned(), []
    kernel[(1,)](used, 5)
    inner = kernel.fn

    class Counted:
        def run(self, *args, **kwargs):
            launches.append(kwargs["BLOCK"])
            return inner.run(*args, **kwargs)

        def __getattr__(self, name):
            return getattr(inner, name)

    kernel.fn = Counted()
    kernel[(1,)](used, 5)
    kernel[(1,)](used, 6)
    assert launches == [64, 16, 32, 64, 64]


def test_attributes_of_a_tuned_kernel(tuned, autotune):
    kernel = tuned()
    assert isinstance(kernel, triton.runtime.Autotuner)
    assert isinstance(kernel, triton.runtime.jit.KernelInterface)
    assert (kernel.base_fn, kernel.base_fn.__name__) == (noted, "noted")
    assert (list(kernel.keys), kernel.cache) == (["N"], {})
    assert [config.num_warps for config in kernel.configs] == [4] * 3
    names = list(inspect.signature(triton.autotune).parameters)
    assert list(inspect.signature(autotune).parameters)[: len(names)] == names


# Hooks, and what is restored.


def test_config_hooks_before_launches(tuned, used):
    calls = []

    def hook(block):
        def before(named):
            assert {name: named[name] for name in ("N", "BLOCK", "num_warps")} == {
                "N": 5, "BLOCK": block, "num_warps": 4
            }  # fmt: skip
            assert named["used"] is used
            calls.append(block)

        return before

    configs = [triton.Config({"BLOCK": block}, pre_hook=hook(block)) for block in (16, 32)]
    kernel = tuned(configs=configs)
    kernel[(1,)](used, 5)
    assert calls == [16, 32, 32]
    kernel[(1,)](used, N=5)
    assert calls == [16, 32, 32, 32]
    assert kernel.best_config.pre_hook is configs[1].pre_hook


def test_tuner_hooks_enclose_launches(tuned, used):
    seen = []
    kernel = tuned(
        pre_hook=lambda named, reset_only=False: seen.append((named["BLOCK"], reset_only)),
        post_hook=lambda named, exception: seen.append((named["BLOCK"], exception)),
    )
    for _ in range(2):
        kernel[(1,)](used, 5)
        assert seen == [(b, way) for b in (16, 32, 64) for way in (False, None)] + [(64, True)]


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize(("what", "before"), [("restore_value", 0.0), ("reset_to_zero", 7.0)])
def test_tensors_restored_or_zeroed(tuned, bench, what, before, by_name):
    for x in (torch.full((200,), before), None):
        bench.timed.clear()
        kernel, other = tuned(increment_either, **{what: ["x"]}), torch.zeros(200)
        try:
            if by_name:
                kernel[(13,)](x=x, other=other, N=200)
            else:
                kernel[(13,)](x, other, 200)
        except AttributeError:
            if not is_tritons(kernel) or x is not None:
                raise
            pytest.skip("this Triton restores no None")
        assert (other == 5).all() if x is None else (x == 1).all()
        assert len(bench.timed) == 3


# What the tuner keeps, and says.


def test_the_cache_by_keys_of_triton(tuned, used):
    kernel = tuned()
    kernel[(1,)](used, 5)
    kernel[(1,)](N=6, used=used)
    kernel[(1,)](used.float(), 5)
    kernel[(1,)](used, 5)
    assert list(kernel.cache) == [(5, "torch.int32"), (6, "torch.int32"), (5, "torch.float32")]
    for key, config in kernel.cache.items():
        assert isinstance(config, triton.Config)
        assert config.kwargs == {"BLOCK": 64}
        assert kernel.cache[key] is config


def test_cache_entry_written_runs(tuned, bench, used):
    kernel = tuned()
    kernel.cache[(5, "torch.int32")] = kernel.configs[0]
    kernel[(1,)](used, 5)
    assert (int(used), bench.timed) == (16, [])
    assert kernel.best_config is kernel.configs[0]
    kernel[(1,)](used, 6)
    kernel.cache.update({(6, "torch.int32"): kernel.configs[1]})
    kernel[(1,)](used, 6)
    assert int(used) == 32
    other, timed = tuned(), list(bench.timed)
    other.cache = dict(kernel.cache)
    other[(1,)](used, 6)
    assert (int(used), bench.timed) == (32, timed)


@pytest.mark.parametrize("how", ["clear", "pop", "replaced"])
def test_cleared_cache_chooses_again(tuned, used, how):
    kernel = tuned()
    kernel[(1,)](used, 5)
    kernel.configs = of_blocks(8, 24)
    kernel[(1,)](used, 5)
    assert int(used) == 64
    if how == "clear":
        kernel.cache.clear()
    elif how == "pop":
        kernel.cache.pop((5, "torch.int32"))
    else:
        kernel.cache = {}
    kernel[(1,)](used, 5)
    assert int(used) == 24


def test_configs_changed_in_place(tuned, bench, used):
    kernel = tuned()
    kernel.configs.append(triton.Config({"BLOCK": 128}))
    kernel.configs[:] = [config for config in kernel.configs if config.kwargs["BLOCK"] != 64]
    kernel[(1,)](used, 5)
    assert (bench.timed, int(used)) == ([16, 32, 128], 128)
    del kernel.configs[1:]
    kernel[(1,)](used, 7)
    assert int(used) == 16


def test_last_times_kept_and_printed(tuned, bench, used, monkeypatch, capsys):
    monkeypatch.setattr(triton.knobs.autotuning, "print", True)
    bench.times = {16: 3.0, 32: 1.0, 64: 2.0}
    kernel = tuned()
    kernel[(1,)](used, 5)
    assert kernel.bench_time > 0
    timings = {config.kwargs["BLOCK"]: ms[0] for config, ms in kernel.configs_timings.items()}
    assert timings == pytest.approx(bench.times)
    assert min(kernel.configs_timings, key=kernel.configs_timings.get) is kernel.best_config
    said = capsys.readouterr().out
    assert said.count("Autotuning kernel noted with config BLOCK: ") == 3
    assert "Triton autotuning for function noted,\nwith key as (5, 'torch.int32'),\nfinished after " in said
    assert said.endswith(f"best config selected: {kernel.best_config};\n")
    kernel[(1,)](used, 5)
    assert capsys.readouterr().out == ""


# Pruning.


def last_two(configs, named, **rest):
    return configs[1:]


def edited(configs, named, **kwargs):
    for config in configs:
        config.num_stages = 1
    return configs[:2]


def smallest(used, N, BLOCK, num_warps, num_stages, **rest):
    return BLOCK


# prune_configs_by, and the BLOCKs that are timed
PRUNED = {
    "none": ({}, [16, 32, 64]),
    "model, two": ({"perf_model": smallest, "top_k": 2}, [16, 32]),
    "model, one": ({"perf_model": smallest, "top_k": 1}, [16]),
    "model, a share": ({"perf_model": smallest, "top_k": 0.67}, [16, 32]),
    "model, more than all": ({"perf_model": smallest, "top_k": 5}, [16, 32, 64]),
    "early and model": ({"early_config_prune": last_two, "perf_model": smallest, "top_k": 1}, [32]),
    "early, editing": ({"early_config_prune": edited}, [16, 32]),
}


@pytest.mark.parametrize("name", PRUNED)
def test_pruning(tuned, bench, used, name, request):
    how, timed = PRUNED[name]
    kernel = tuned(prune_configs_by=how)
    kernel[(1,)](used, 5)
    assert int(used) == timed[-1]
    by_triton = request.node.callspec.id.startswith("triton-")
    # Triton 3.9 times no config that is the only one left.
    is_untimed = by_triton and len(timed) == 1 and parsed(triton.__version__) >= (3, 9)
    assert bench.timed == ([] if is_untimed else timed)
    if name == "early, editing":
        assert (kernel.best_config.num_stages, kernel.best_config) == (1, kernel.configs[1])


def test_pruners_are_given_the_call(tuned, used):
    seen = []

    def early(configs, named, **kwargs):
        seen.append((sorted(named), kwargs["N"]))
        return configs

    def model(used, N, BLOCK, num_warps, num_stages, **named):
        seen.append((N, BLOCK))
        return BLOCK

    kernel = tuned(prune_configs_by={"early_config_prune": early, "perf_model": model, "top_k": 1})
    kernel[(1,)](used, N=5)
    assert seen == [(["used"], 5), (5, 16), (5, 32), (5, 64)]
    assert kernel.best_config == kernel.configs[0]  # one that is left runs


def test_tiny_share_leaves_one(tuned, used):
    kernel = tuned(prune_configs_by={"perf_model": lambda BLOCK, **rest: -BLOCK, "top_k": 0.3})
    try:
        kernel[(1,)](used, 5)
    except ValueError:
        if not is_tritons(kernel):
            raise
        pytest.skip("this Triton takes the share by itself, here none")
    assert int(used) == 64


def test_pruner_leaving_none_is_error(tuned, used):
    kernel = tuned(prune_configs_by={"early_config_prune": lambda configs, named, **rest: []})
    with pytest.raises(triton.TritonError, match="at least one config"):
        kernel[(1,)](used, 5)


def test_pruner_returns_own_configs(tuned, bench, used):
    def early(configs, named, **kwargs):
        grown = copy.deepcopy(configs)
        for config in grown:
            config.kwargs["BLOCK"] *= named["N"]
        return [triton.Config({"BLOCK": 4}, num_warps=1), *grown]

    kernel = tuned(prune_configs_by={"early_config_prune": early})
    for _ in range(2):
        kernel[(1,)](used, 5)
        assert (int(used), bench.timed) == (320, [4, 80, 160, 320])
    assert kernel.best_config.kwargs == {"BLOCK": 320}
    assert [config.kwargs["BLOCK"] for config in kernel.cache.values()] == [320]
    assert [config.kwargs["BLOCK"] for config in kernel.configs] == [16, 32, 64]


# Keys, configs and benchmarks.


def test_constants_in_key_and_place(tuned, used):
    kernel = tuned(key=("ROWS", "EVEN"), configs=[triton.Config({}, num_warps=warps) for warps in (1, 2)])
    kernel[(1,)](used, 5, 16, 1, True)
    kernel[(1,)](used, 9, 16, 1, True)
    kernel[(1,)](used, 5, 16, 2, True)
    kernel[(1,)](used, 5, EVEN=False, ROWS=2, BLOCK=16)
    assert [key[:2] for key in kernel.cache] == [(1, True), (2, True), (2, False)]
    assert int(used) == 2016


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
def test_forms_of_keys_and_configs(autotune, bench, used, configs, timed, key):
    kernel = autotune(configs, key, do_bench=bench)(triton.jit(noted))
    kernel[(1,)](used, 5, **({} if configs and configs[0].kwargs else {"BLOCK": 16}))
    assert (bench.timed, int(used)) == (timed, (timed or [16])[-1])
    assert kernel.best_config in kernel.configs
    assert kernel.best_config.num_warps in (1, 2, 4)
    assert len(kernel.cache) == bool(timed)


@pytest.mark.parametrize(
    "wrap", [list, tuple, torch.tensor, lambda ms: ms[0]], ids=["list", "tuple", "tensor", "one"]
)
def test_benchmarks_return_times_or_one(tuned, bench, used, wrap):
    kernel = tuned(do_bench=lambda call, quantiles=None: wrap(bench(call)))
    if wrap is torch.tensor:
        kernel.configs[:] = kernel.configs[:1]  # Triton compares times by <, which tensors of three have not
    kernel[(1,)](used, 5)
    assert int(used) in (16, 64)
    assert kernel.best_config is kernel.configs[-1]


def test_driver_benchmark_by_default(tuned, gpu, bench, used):
    gpu.get_benchmarker = lambda: lambda call, quantiles=None, **rest: bench(call)
    kernel = tuned(do_bench=None)
    kernel[(1,)](used, 200)
    assert len(kernel.cache) == 1
    assert kernel.best_config in kernel.configs


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
def test_kernels_in_cells_of_a_notebook(autotune, bench, used, name):
    """A cell that is run again defines another kernel in a file of the same name."""
    for extra in (1, 2):
        source = SOURCE.replace("EXTRA_LINE", str(extra))
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        decorate = autotune(of_blocks(16, 64), ["N"], do_bench=bench)
        namespace = {"__name__": "__main__", "decorate": decorate}
        exec(compile(source, name, "exec"), namespace)
        bench.timed.clear()
        namespace["in_cell"][(1,)](used, 5)
        assert bench.timed == [16 + extra, 64 + extra]
        assert int(used) == 64 + extra
