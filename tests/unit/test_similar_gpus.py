"""A kernel's table of another GPU: its config runs if it fits the GPU in hand, compiled for it."""

import json

import pytest
import triton
import triton.language as tl

import tritile
from tests.mock_gpu import on_gpu
from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.core.problem import problem_key
from tritile.errors import NotCompiledError, UntunedWarning
from tritile.tuner.store.tables import FORMAT

H100, H200 = target_device("h100"), target_device("h200")
FITS, LARGE = 32, 512  # of which LARGE rows take 512 KiB of shared memory


@triton.jit
def scores(a_ptr, out_ptr, n, B: tl.constexpr):
    """Multiplies [B, 128] by [128, 128] in tensor cores, which read it from shared memory."""
    rows, columns = tl.arange(0, B), tl.arange(0, 128)
    acc = tl.zeros((B, 128), tl.float32)
    for k in range(0, n, 128):
        a = tl.load(a_ptr + rows[:, None] * n + k + columns[None, :])
        b = tl.load(a_ptr + columns[:, None] * n + k + columns[None, :])
        acc = tl.dot(a, b, acc)
    tl.store(out_ptr + rows[:, None] * 128 + columns[None, :], acc)


def decorated(path, mode="cached"):
    configs = [triton.Config({"B": block}, num_warps=8, num_stages=1) for block in (FITS, LARGE)]
    return tritile.autotune(configs, ["n"], table=path, mode=mode)(triton.jit(scores.fn))


def call(kernel):
    kernel[(1,)](on_gpu(512, 512), on_gpu(512, 128), 512)
    return kernel.best_config.kwargs["B"]


def table_of(path, block):
    kernel = decorated(None)
    key = problem_key(kernel.problem((on_gpu(512, 512), on_gpu(512, 128), 512), {}))
    config = Config.of(B=block, num_warps=8, num_stages=1)
    entries = {key: {"config": config.to_dict(), "us": 1.0}}
    gpus = {f"{H100.name} {H100.arch}": {kernel.digest: entries}}
    path.write_text(json.dumps({"format": FORMAT, "gpus": gpus}))
    return path


def test_what_fits_runs(gpu, tmp_path):
    kernel = decorated(table_of(tmp_path / "t.json", FITS))
    with pytest.warns(UntunedWarning, match=f"{H200.name} with configs that were measured on {H100.name}"):
        assert call(kernel) == FITS
    assert len(gpu.launches) == 1


def test_what_does_not_fit_is_left_out(gpu, tmp_path, caplog):
    """Another config runs: the kernel's first, as nothing was measured."""
    kernel = decorated(table_of(tmp_path / "t.json", LARGE))
    with pytest.warns(UntunedWarning, match="was never measured on NVIDIA H200"):
        assert call(kernel) == FITS
    (said,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "shared memory, of 232448" in said.failure
    assert len(gpu.launches) == 1


def test_strict_compiles_nothing_to_find_out(gpu, tmp_path, monkeypatch):
    path = table_of(tmp_path / "t.json", FITS)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "empty"))
    with pytest.raises(NotCompiledError, match="scores with B: 32"):
        call(decorated(path, "strict"))
    assert gpu.launches == []
