"""`tritile.bench`: one call is timed by the engine of the command line; stand-ins measure."""

import contextlib

import pytest
import torch

import tritile
from tests.unit.test_plan import BLOCKS, H200, _double, meta
from tritile.core.problem import MatmulProblem
from tritile.errors import InvalidValueError, UnsupportedError
from tritile.lab import bench as benching
from tritile.lab import tune as tuning
from tritile.lab.results import Measurement
from tritile.planning import model
from tritile.tune.autotuner import Autotuner

PROBLEM = MatmulProblem(1, 64, 32, 48, "bfloat16", "bfloat16")


@pytest.fixture
def here(monkeypatch):
    """A machine with an H200, on which the engine measures this."""
    found = Measurement(
        10.0, 15.0, None, 0.02, 1e-3, 2e-3, None, model.pick(PROBLEM, H200), "exact", "matmul"
    )
    asked = []

    def measured(problem, log):
        asked.append(problem)
        return found

    monkeypatch.setattr(tuning.devices, "current_index", lambda: 0)
    monkeypatch.setattr(tuning.devices, "gpu", lambda index: H200)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(benching, "measured", measured)
    return asked


@pytest.mark.parametrize(
    "what", [(PROBLEM,), ("matmul", meta(64, 48), meta(48, 32))], ids=["problem", "call"]
)
def test_a_call_is_timed_beside_torch(here, what):
    found = tritile.bench(*what)
    assert here == [PROBLEM]
    assert (found.tritile_us, found.torch_us, found.ratio, found.spread) == (10.0, 15.0, 1.5, 0.02)
    assert (found.config, found.source) == (model.pick(PROBLEM, H200), "exact")
    assert "15.0 us, 1.50 times as long: matmul" in repr(found)
    assert "64x32x48 NN bfloat16 on NVIDIA H200" in found._repr_html_()


def test_a_decorated_kernel_is_timed_in_a_process_of_its_own(here, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITILE_CACHE_DIR", str(tmp_path))
    asked = []

    class Shop:
        def begin(self, subject):
            asked.append(subject)

        def race(self, subject, configs):
            assert subject == asked[0]
            return [[5.0, 6.0, 7.0], [8.0, 9.0, 10.0]][: len(configs)]

        def end(self, subject):
            asked.append("end")

    monkeypatch.setattr(Autotuner, "device_of", lambda *given: H200)
    monkeypatch.setattr(benching, "elsewhere", lambda call: contextlib.nullcontext((Shop(), call.problem)))
    kernel = tritile.autotune(BLOCKS, ["n"])(_double)
    found = tritile.bench(kernel, meta(40), meta(40), 40, grid=(3,))
    assert (found.tritile_us, found.torch_us, found.ratio, found.config) == (6.0, None, None, BLOCKS[0])
    assert [getattr(each, "label", each) for each in asked] == ["_double n=40", "end"]
    assert "not timed: the kernel has no reference=" in repr(found)
    referred = tritile.autotune(BLOCKS, ["n"], reference=lambda x: {"out": 2 * x})(_double)
    found = tritile.bench(referred, meta(40), meta(40), 40, grid=(3,))
    assert (found.tritile_us, found.torch_us, found.ratio) == (6.0, 9.0, 1.5)
    assert "9.0 us, 1.50 times as long: the kernel's reference" in repr(found)
    with pytest.raises(InvalidValueError, match="grid="):
        tritile.bench(kernel, meta(40), meta(40), 40)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_nothing_is_measured():
    with pytest.raises(UnsupportedError, match="bench: there is no GPU here"):
        tritile.bench("matmul", torch.zeros(3, 4), torch.zeros(4, 5))
    with pytest.raises(InvalidValueError, match="bench: what is 'glue'"):
        tritile.bench("glue")
