"""A decorated kernel's call, packed and sent: rebuilt, compiled and checked in another place."""

import functools
import importlib
import math
import runpy
import sys
import threading
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

import tritile
from tests.unit.helpers_for_fork_servers import LONG_S, QuickWorkers, QuickWorkshop
from tritile.core.config import Config
from tritile.core.device import HOST, target_device
from tritile.core.problem import KernelProblem
from tritile.core.source import source_hash
from tritile.errors import InvalidValueError, UnsupportedError
from tritile.tuner import decorated
from tritile.tuner.decorated import REFERENCE, KernelCall, TunableKernel, measured_config, tune_in_workers
from tritile.tuner.measure import workers
from tritile.tuner.measure.engine import Rules, TuningTask
from tritile.tuner.measure.outputs import poison
from tritile.tuner.measure.shipping import HOST_GUARD, GuardedMemory, StandIn, pack, unpack
from tritile.tuner.search import Listed
from tritile.tuner.store.trial import Trial
from tritile.tuner.store.trials import store_of

H200 = target_device("nvidia-h200")
PROBLEM = KernelProblem("scale", (("N", 77),), (("x", "float32"),))
GOOD = Config.of(BLOCK=32, STRAY=0)
LIMIT = 1 << 24
FACTOR = tl.constexpr(3)


@triton.jit
def tripled(x):
    return x * FACTOR


@triton.jit
def scale(x, out, N, BLOCK: tl.constexpr, STRAY: tl.constexpr, EVEN: tl.constexpr):
    """Writes `STRAY` elements further than it should; with -1 one less."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=(at < N) | EVEN)
    tl.store(out + at, tripled(value), mask=at < N + STRAY)


def even(kernel):
    return triton.heuristics({"EVEN": lambda args: args["N"] % args["BLOCK"] == 0})(kernel)


def named_grid(meta):
    return (triton.cdiv(meta["N"], meta["BLOCK"]),)


def call_of(x, out, device=HOST, **rest):
    args = (x, out, out.numel())
    launched = {"grid": named_grid, "warmup": False}
    return KernelCall(PROBLEM, device, "0" * 16, even(scale), ("x", "out", "N"), args, launched, **rest)


def right(x, N):
    return {"out": 3 * x[:N]}


def staged(tmp_path, **rest):
    x, out = torch.randn(90), torch.zeros(77)
    call = call_of(x, out, **rest)
    subject = TunableKernel(PROBLEM, HOST, "0" * 16, pack(call, tmp_path, LIMIT, host_too=True))
    return subject, subject.harness(2)


def sent(value, tmp_path):
    """Return a value as another process rebuilds it, and the memory that it gets there."""
    shipment = pack(value, tmp_path, LIMIT, host_too=True)
    memory = GuardedMemory(shipment.blocks, torch.load(shipment.file), "cpu")
    return unpack(shipment, memory.tensor), memory


def test_packed_comes_back_with_memory(tmp_path):
    base = torch.randn(3, 40)
    left, both = base[1:, ::2], base.view(-1)[7:100]
    got, memory = sent({"left": left, "both": [both, 5]}, tmp_path)
    assert [part.numel() for part in memory.contents()] == [4 * (119 - 7)]  # a storage, as far as it is used
    assert torch.equal(got["left"], left)
    assert got["left"].stride() == left.stride()
    assert torch.equal(got["both"][0], both)
    assert got["left"].untyped_storage().data_ptr() == got["both"][0].untyped_storage().data_ptr()
    assert got["both"][0].data_ptr() % 16 == both.data_ptr() % 16  # as host memory is aligned
    got["left"].fill_(0)
    assert not torch.equal(base[1:, ::2], got["left"])
    assert memory.is_intact()


@pytest.mark.parametrize("at", [0, -1])
def test_written_guard_is_found(tmp_path, at):
    (got,), memory = sent([torch.zeros(50)], tmp_path)
    around = torch.empty(0, dtype=torch.uint8).set_(got.untyped_storage())
    assert around.numel() == 2 * HOST_GUARD + 200
    assert memory.is_intact()
    around[at] = 0
    assert not memory.is_intact()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.zeros(LIMIT), "bytes of memory"),
        (torch.zeros(4).to_sparse(), "no plain memory"),
        (threading.Lock(), "cannot be sent"),
    ],
    ids=["too large", "sparse", "a lock"],
)
def test_unsendable_has_a_reason(tmp_path, value, reason, monkeypatch):
    with pytest.raises(UnsupportedError, match=reason):
        pack([value], tmp_path, LIMIT, host_too=True)
    with pytest.raises(UnsupportedError, match="cannot be written"):
        pack([torch.zeros(5)], tmp_path / "missing", LIMIT, host_too=True)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    with pytest.raises(UnsupportedError, match="pinned"):
        pack([torch.zeros(5)], tmp_path, LIMIT)


SOURCE = """
import triton
import triton.language as tl
import tritile

@triton.constexpr_function
def half(number):
    return number // 2

@triton.jit
def helper(x):
    return x * 2

@tritile.autotune([triton.Config({"BLOCK": 64})], key=[])
@triton.jit
def kernel(x, BLOCK: tl.constexpr):
    at = tl.arange(0, half(BLOCK))
    tl.store(x + at, helper(tl.load(x + at)))

grid = lambda meta: (meta["BLOCK"] // 64,)
"""


def test_script_kernel_compiled_elsewhere(server, tmp_path, monkeypatch):
    """Kernels, and what they call, go whole: that process cannot import what is defined in `__main__`."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "script.py").write_text(SOURCE)
    script = runpy.run_path(str(tmp_path / "script.py"), run_name="__main__")
    kernel, launched = script["kernel"].fn, {"grid": script["grid"]}
    call = KernelCall(PROBLEM, H200, "0" * 16, kernel, ("x",), (torch.zeros(64),), launched)
    shipment = pack(call, tmp_path, LIMIT, host_too=True)
    subject = TunableKernel(PROBLEM, H200, "0" * 16, shipment)
    with QuickWorkers(1, server=server) as pool:
        assert pool.submit(subject.compile, Config.of(BLOCK=64), limit_s=LONG_S).result() is None
        bad = pool.submit(subject.compile, Config.of(BLOCK=66), limit_s=LONG_S)
        assert "power of 2" in str(bad.exception())
    assert len(list((tmp_path / "cache").rglob("kernel.cubin"))) == 1
    # Copies share one kernel: one for each would be loaded for each, amid the capture of a graph.
    first, second = TunableKernel(PROBLEM, HOST, "0" * 16, shipment).harness(2).calls
    assert first.fn is second.fn
    assert first.fn is not kernel


def test_check_needs_gpu_or_interpreter():
    kernel = tritile.autotune([triton.Config({"BLOCK": 32, "STRAY": 0})], ["N"], reference=right)(even(scale))
    with pytest.raises(InvalidValueError, match=r"host memory.*TRITON_INTERPRET=1"):
        tritile.check(kernel, torch.zeros(77), torch.zeros(77), 77, grid=named_grid)


def test_reference_timed_for_config(tmp_path):
    _, stage = staged(tmp_path, reference=right)
    run, taken = stage.prepared(REFERENCE)
    call = stage.calls[1]
    assert torch.equal(run(call)["out"], 3 * call.named["x"][:77])
    assert taken is None


def test_kernel_as_jitted_after_edit(tmp_path, monkeypatch):
    """Another process would otherwise run what its file, or a module of its name, holds by then."""
    (tmp_path / "edited.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "edited", None)
    del sys.modules["edited"]
    module = importlib.import_module("edited")
    kernel, helper = module.kernel.fn, module.helper
    digest = source_hash(kernel)
    (tmp_path / "edited.py").write_text(SOURCE.replace("* 2", "* 33 + 4").replace("@", "\n\n@"))
    assert source_hash(kernel) == digest  # what was measured is of the kernel that runs
    shipment = pack(kernel, tmp_path, LIMIT)
    edited = importlib.reload(module)
    assert "* 33" in edited.helper.src
    assert source_hash(edited.kernel.fn) != digest
    got = unpack(shipment, StandIn)
    assert got is not kernel
    assert (got.src, got.__globals__["helper"].src) == (kernel.src, helper.src)


def test_call_that_does_not_start_elsewhere(server, monkeypatch):
    """As where a module that it needs is not found there: it can be measured here all the same."""
    quick = functools.partial(QuickWorkshop, jobs=1, server=server)
    monkeypatch.setattr(workers, "PoolRunner", quick)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1 << 20)  # which no process can use
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (LIMIT, LIMIT))
    call, kept = call_of(torch.randn(90), torch.zeros(77), device=H200), []
    task = TuningTask(TunableKernel(PROBLEM, H200, "0" * 16), Listed([GOOD]))
    rules = Rules(exhaustive=True, problem_s=math.inf)
    with pytest.raises(UnsupportedError, match="cannot run in another process: its operands cannot be made"):
        tune_in_workers(call, task, rules, lambda *trial: kept.append(trial))
    assert not kept


def test_all_known_packs_nothing(monkeypatch):
    """Else a call would write its memory to a file in each process that makes it."""
    kernel = tritile.autotune([GOOD.to_triton()], ["N"])(scale)
    monkeypatch.setattr(decorated, "tune_in_workers", None)
    call = kernel.call((torch.randn(77), torch.ones(77), 77), {}, H200)
    store_of(H200).add(kernel.digest, Trial(call.problem, GOOD, 3.0))
    assert Config.from_triton(measured_config(kernel, call)) == GOOD


@pytest.mark.parametrize(
    ("reference", "reason"),
    [(lambda x, N: {"y": x}, "'y'"), (lambda x, N: 1 / 0, "division")],
    ids=["no such argument", "raises"],
)
def test_failing_reference_blames_no_config(tmp_path, reference, reason):
    """It is found before any is measured: what is remembered of a config outlives what is mended."""
    with pytest.raises((InvalidValueError, ZeroDivisionError), match=reason):
        staged(tmp_path, reference=reference)


WHOLE = [torch.uint8, torch.uint16, torch.uint32, torch.int8, torch.int64, torch.bool]


@pytest.mark.parametrize("dtype", [*WHOLE, torch.float8_e4m3fn, torch.bfloat16, torch.float64])
def test_no_poison_is_what_is_right(dtype):
    """Of whole numbers too, where any value may be the right one."""
    wanted = (torch.arange(-1, 3) if dtype.is_signed else torch.arange(254, 257) % 256).to(dtype)
    out = wanted.clone()
    poison(out, wanted)
    assert not (out == wanted).any()


def test_hooks_make_copies_alike(tmp_path):
    _, stage = staged(tmp_path, restore_value=("x",), reset_to_zero=("out",))
    for call in stage.calls:
        call.named["x"].fill_(5)
        call.named["out"].fill_(5)
    stage._before(GOOD)
    for call in stage.calls:
        assert torch.equal(call.named["x"], stage._original.named["x"])
        assert not call.named["out"].any()


def test_hook_gets_config_instead_of_resets(tmp_path):
    def hook(values, reset_only=False):
        values["out"].fill_(values["BLOCK"])

    _, stage = staged(tmp_path, pre_hook=hook, reset_to_zero=("out",))
    stage._before(GOOD)
    assert all(bool((call.named["out"] == GOOD["BLOCK"]).all()) for call in stage.calls)


def test_space_searched_on_copies(monkeypatch):
    """By the rules of every search, on copies of a call's tensors."""
    monkeypatch.delenv("TRITILE_TUNE_BUDGET")
    rules, out = [], torch.ones(77)

    def tuned(call, task, given, keep):
        """Stand for a search in another process, in which one config worked."""
        rules.append(given)
        keep(call.source, Trial(call.problem, GOOD, 3.0))

    monkeypatch.setattr(decorated, "tune_in_workers", tuned)
    space = tritile.Space({"BLOCK": (32,), "STRAY": (0,)})
    kernel = tritile.autotune(space, ["N"], reset_to_zero=["out"])(scale)
    assert (
        Config.from_triton(measured_config(kernel, kernel.call((torch.randn(77), out, 77), {}, H200))) == GOOD
    )
    assert rules == [replace(Rules(), most=96, by_trials=True)]
    assert bool((out == 1).all())


SPACE = tritile.Space({"BLOCK": (16, 32), "STRAY": (0, 1)})


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"key": "N"}, r"key is 'N': expected a list of names.*scale"),
        ({"restore_value": ["y"]}, r"restore_value names 'y'.*scale"),
        ({"restore_value": ["BLOCK"]}, r"restore_value names 'BLOCK'.*scale"),
        ({"reset_to_zero": ["x", "z"]}, r"reset_to_zero names 'z'.*scale"),
        ({"configs": tritile.Space({"BLOC": (16, 32)})}, r"Space names 'BLOC'.*scale"),
        (
            {"configs": [triton.Config({"BLOCK": 16}), triton.Config({"BLOK": 16})]},
            r"triton.Config names 'BLOK' \(did you mean 'BLOCK'\?\): expected arguments of scale",
        ),
        (
            {"configs": [triton.Config({"BLOCK": 16, "num_warps": 8})]},
            r"has num_warps among arguments of the kernel.*expected triton.Config.*num_warps=\.\.\.",
        ),
        ({"configs": 3}, r"configs is 3: expected a list of triton.Config, or a tritile.Space"),
        ({"configs": [{"BLOCK": 16}]}, r"configs is \[\{'BLOCK': 16\}\]: expected a list of triton.Config"),
        ({"tolerance": -1.0, "reference": right}, r"tolerance is -1.0"),
        ({"tolerance": math.nan, "reference": right}, r"tolerance is nan"),
        ({"tolerance": True, "reference": right}, r"tolerance is True"),
        ({"tolerance": "1e-3", "reference": right}, r"tolerance is '1e-3'"),
        ({"tolerance": 1e-3}, r"tolerance without a reference"),
        ({"reference": {"out": 3}}, r"reference is .*scale"),
        ({"reference": lambda x, rows: {}}, r"reference of scale: missing .* 'rows'"),
        ({"reference": lambda x, BLOCK: {}}, r"reference of scale: missing .* 'BLOCK'.*tuned"),
        ({"reference": lambda x, EVEN: {}}, r"reference of scale: missing .* 'EVEN'.*heuristic"),
        ({"reference": lambda x, /: {}}, r"reference of scale: 'x' parameter is positional only"),
        ({"prune_configs_by": {"top_k": 1}}, r"a Space has `where`"),
        ({"mode": "always"}, r"mode is 'always'"),
        *(({"bucket": bucket}, r"bucket is .*by names of key") for bucket in ({"N": 64}, [int])),
        ({"bucket": {"M": int}}, r"bucket of scale names 'M'.*: expected names of key, \["),
        (
            {"prune_configs_by": {"early_config_pruner": int}},
            r"has 'early_config_pruner' \(did you mean 'early_config_prune'\?\): expected early_config_prune",
        ),
    ],
)
def test_misfits_refused_when_decorated(told, message):
    with pytest.raises(InvalidValueError, match=message):
        tritile.autotune(**{"configs": SPACE, "key": ["N"]} | told)(even(scale))


def test_what_fits_the_kernel_is_taken():
    def with_more(x, N, eps=0.0, **rest):
        return right(x, N)

    choices = {"BLOCK": (16, 32), "num_warps": (2, 4), "maxnreg": (None, 64), "waves_per_eu": (0, 2)}
    options = {"restore_value": ("x",), "reset_to_zero": ["out"], "tolerance": 0}
    for reference in (right, with_more, lambda **named: {}, dict):
        decorate = tritile.autotune(tritile.Space(choices), ["N", "STRAY"], reference=reference, **options)
        assert decorate(even(scale)).restore_value == ["x"]
    assert tritile.autotune([], ["N"])(scale).configs[0].kwargs == {}  # as in Triton
    with pytest.raises(InvalidValueError, match=r"triton\.jit"):
        tritile.autotune(SPACE, [])(right)


@pytest.mark.parametrize(
    ("given", "named"),
    [({"warmup": 25}, "warmup:"), ({"rep": 100, "use_cuda_graph": True}, "rep, use_cuda_graph:")],
)
def test_deprecated_arguments_warn_at_line(given, named):
    with pytest.warns(DeprecationWarning, match=named) as caught:
        kernel = tritile.autotune([triton.Config({"BLOCK": 16})], ["N"], **given)(scale)
    assert [warning.filename for warning in caught] == [__file__]
    assert kernel.do_bench is tritile.autotune([], [])(scale).do_bench
