"""Preparing a call: in which order configs are tried, and when the space is ranked for more of them."""

import contextlib

import pytest
import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from tritile.choose import pick, waves
from tritile.core.device import target_device
from tritile.errors import DtypeError, TuningError, UnsupportedError
from tritile.families import launching
from tritile.ops import request as ops_request
from tritile.ops.products import matmul_call
from tritile.runtime import launch
from tritile.runtime.work import Step, Work

HOPPER = target_device("nvidia-h200")


@pytest.fixture
def call(monkeypatch):
    monkeypatch.setattr(ops_request.devices, "gpu", lambda index: HOPPER)
    shapes = (64, 65536), (65536, 64), (64, 64)  # faster by tritile, says the table
    a, b, out = (torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)
    pick.forget()
    return matmul_call(a, b, out, "ieee")


def preparing(monkeypatch, fail):
    """Stands for compiling: fails for the first `fail` configs; returns those that were tried."""
    tried = []

    def prepare(call, config):
        tried.append(config)
        if len(tried) <= fail:
            raise TuningError(f"refused {len(tried)}")
        return config

    monkeypatch.setattr(launching, "prepare", prepare)
    return tried


@pytest.mark.parametrize("by_torch", [False, True])
def test_first_call_planned_once(call, monkeypatch, by_torch):
    tried, planned, choose = preparing(monkeypatch, fail=0), [], pick._chosen
    monkeypatch.setattr(pick, "_chosen", lambda *given: planned.append(given) or choose(*given))
    monkeypatch.setattr(waves, "screened", lambda *_: pytest.fail("the space was ranked for nothing"))
    assert not (by_torch and ops_request.is_by_aten(call.problem, 0))
    found = ops_request.prepared(call, by_torch)
    assert len(tried) == len(planned) == 1
    assert found == pick.plan_for(call.problem, HOPPER).config


def test_failing_config_gives_way(call, monkeypatch):
    tried = preparing(monkeypatch, fail=3)
    assert ops_request.prepared(call) == tried[3]
    wanted = [pick.plan_for(call.problem, HOPPER).config]
    wanted += [config for config in waves.screened(call.problem, HOPPER, 8) if config not in wanted]
    assert tried == wanted[:4]


def test_none_running_says_why(call, monkeypatch):
    tried = preparing(monkeypatch, fail=100)
    with pytest.raises(UnsupportedError, match="refused 1; refused 2; refused 3") as raised:
        ops_request.prepared(call)
    assert 1 < len(tried) <= 9
    assert str(raised.value.__cause__) == f"refused {len(tried)}"


def swaps(parameter):
    """Give a parameter the content of another, as `Module.to` may: torch refuses one that others hold."""
    torch.utils.swap_tensors(parameter, torch.nn.Parameter(parameter.detach().half()))


@pytest.mark.parametrize("fail", [1, 100], ids=["one", "all"])
def test_failing_configs_keep_no_tensor(call, monkeypatch, uncollected, fail):
    tried = []

    def prepare(call, config):
        tried.append(config)
        try:
            if len(tried) <= fail:
                raise RuntimeError("of the assembler")
        except RuntimeError as error:
            raise TuningError("refused") from error

    monkeypatch.setattr(launching, "prepare", prepare)
    weight = torch.nn.Parameter(torch.empty(64, 65536, dtype=torch.bfloat16))

    def run():
        own = matmul_call(call.a.tensor, weight.mT, call.out.tensor, "ieee")
        with contextlib.suppress(UnsupportedError):
            ops_request.prepared(own)

    run()
    assert len(tried) > 1
    swaps(weight)


class Kernel:
    """Fails as it is compiled."""

    def __init__(self, error):
        self.error, self.compiles = error, 0

    def warmup(self, **given):
        self.compiles += 1
        raise self.error


def failing(call, monkeypatch, error):
    """Has every kernel fail so; returns the kernel."""
    kernel = Kernel(error)
    work = Work(steps=(Step(kernel, (1, 1, 1), {}, {}),), main=0)
    monkeypatch.setattr(launching, "pieces_of", lambda call, config, device: iter([(call, work)]))
    monkeypatch.setattr(launch.torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(launch.devices, "gpu", lambda index: HOPPER)
    return kernel


@pytest.mark.parametrize("kind", [AttributeError, TypeError, NameError, ImportError, ModuleNotFoundError])
def test_a_programming_error_passes_at_once(call, monkeypatch, kind):
    kernel = failing(call, monkeypatch, kind("a name that is gone"))
    with pytest.raises(kind, match="a name that is gone"):
        ops_request.prepared(call)
    assert kernel.compiles == 1


@pytest.mark.parametrize(
    "error",
    [
        CompilationError(None, None, "AttributeError: of the kernel's own Python"),
        OutOfResources(300000, 232448, "shared memory"),
        RuntimeError("PassManager::run failed"),
        ValueError("type not supported"),
        AssertionError("of a layout"),
        DtypeError("of tritile's own checks"),
    ],
)
def test_compiler_refusal_costs_config(call, monkeypatch, error):
    kernel = failing(call, monkeypatch, error)
    with pytest.raises(UnsupportedError, match="no config runs") as raised:
        ops_request.prepared(call)
    assert kernel.compiles > 1
    assert raised.value.__cause__.__cause__ is error
