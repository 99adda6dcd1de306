"""tritile's own kernel, launched as any kernel of Triton, and a user's, as the documents show them."""

import re
import runpy
from pathlib import Path

import pytest
import torch
import triton

import autotune
import tritile
from tests.reference import values
from tests.unit.test_like_triton import Bench
from tritile.families.matmul_tile.family import FAMILY
from tritile.ops.products import matmul_call
from tritile.runtime.launch import _bound
from tritile.tune import kernels

pytestmark = pytest.mark.interpreted


def arguments(a, b, out):
    """The arguments of a product's launch that no config decides, by name."""
    call = matmul_call(a, b, out, "ieee")
    (step,) = FAMILY.work(call, FAMILY.configs[0], 1, False).steps
    decided = {*dict(FAMILY.configs[0].kwargs), "MASK_M", "MASK_N", "MASK_K"}
    buffers = dict(zip(call.buffers, call.tensors, strict=True))
    return {name: _bound(v, buffers) for name, v in step.args.items() if name not in decided}


def tiles(m, n):
    return lambda meta: (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]), 1, 1)


def test_product_searched_remembered_made(monkeypatch):
    """By each precision for itself. Another tuner, as in another process, times nothing."""
    monkeypatch.setattr(kernels, "_MEASURED", 4)
    a, b, bench, timed = values((70, 50), torch.float32), values((50, 90), torch.float32, 1), Bench(), []
    tuners = [kernels.tuned(do_bench=bench) for _ in range(2)]
    for kernel, precision in zip((*tuners, *tuners), ("ieee", "ieee", "tf32", "tf32"), strict=True):
        out = torch.full((70, 90), float("nan"))
        with tritile.mode("tune"):
            kernel[tiles(70, 90)](**arguments(a, b, out) | {"PRECISION": precision})
        assert torch.allclose(out, a @ b, atol=1e-4)
        assert {"BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M"} <= set(kernel.best_config.kwargs)
        timed.append(len(bench.timed))
    assert timed == [4, 4, 8, 8]
    shapes = {tuple(config.kwargs[f"BLOCK_{side}"] for side in "MNK") for config in kernel.configs}
    assert len(shapes) == 125


@pytest.mark.parametrize("layout", ["row", "column", "apart"])
def test_configs_of_requested_product(layout):
    a, b = torch.empty(2, 64, 48), torch.empty(2, 48, 32)
    a = a.mT.contiguous().mT if layout == "column" else a
    a = a if layout != "apart" else torch.empty(2, 64 * 48 + 1)[:, :-1].unflatten(1, (64, 48))
    out = torch.empty(2, 64, 32)
    assert kernels.problem_of(arguments(a, b, out)) == matmul_call(a, b, out, "ieee").problem


def test_only_legal_configs_are_measured():
    a, b, out = (torch.empty(shape, dtype=torch.float64) for shape in ((70, 50), (50, 90), (70, 90)))
    configs = {str(config.to_triton()): config for config in FAMILY.configs}
    left = kernels.likeliest([config.to_triton() for config in FAMILY.configs], {}, **arguments(a, b, out))
    device, problem = tritile.target_device("nvidia-h200"), matmul_call(a, b, out, "ieee").problem
    assert len(left) == 48
    assert not any(FAMILY.illegal(configs[str(config)], problem, device) for config in left)


def test_wrapper_made_once_on_demand():
    assert tritile.kernels is kernels
    assert kernels.matmul_tile is kernels.matmul_tile
    assert dir(kernels) == ["matmul_tile"]
    with pytest.raises(AttributeError, match="matmul_untiled"):
        kernels.matmul_untiled  # noqa: B018


ROOT = Path(tritile.__file__).parents[1]


def test_the_guide_runs(tmp_path):
    guide = (ROOT / "docs" / "guides" / "own_kernel.md").read_text()
    script = tmp_path / "snippets.py"  # a kernel is read from a file
    snippets = re.findall(r"^```python\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    script.write_text("\n".join(snippets).replace('"cuda"', '"cpu"'))
    runpy.run_path(str(script))


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs at real size on a GPU: start the script by hand")
def test_the_example_runs(capsys):
    runpy.run_path(str(ROOT / "examples" / "rms_norm.py"), run_name="__main__")
    assert "5x300 runs with BLOCK" in capsys.readouterr().out


def test_make_tune_interprets_kernels(capsys):
    """As it does in a process of its own where there is no GPU."""
    assert autotune.interpret() == 0
    assert "equal" in capsys.readouterr().out
