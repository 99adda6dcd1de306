"""What a compiler or a driver says of decorated kernels, for `triton.autotune` and `tritile.autotune`.

Kernels are compiled for a GPU that is not here; times are made up.
"""

import pytest
import torch
import triton
from triton.runtime.errors import OutOfResources

import tritile
from tests.mock_gpu import on_gpu
from tests.unit.test_like_triton import Bench, copy, grid, of_blocks, staged

pytestmark = pytest.mark.filterwarnings("ignore::tritile.errors.UntunedWarning")
REFUSED = r"active drivers|cannot be accessed from Triton"


def test_hooks_see_what_the_compiler_refuses(autotune, gpu):
    """256 KiB of shared memory are 64 stages of 1024 floats."""
    begun, failures = [], []
    kernel = autotune(
        of_blocks(1024, 32),
        ["N"],
        pre_hook=lambda named, reset_only=False: begun.append(reset_only),
        post_hook=lambda named, exception: failures.append(exception),
        do_bench=Bench(),
    )(triton.heuristics({"STAGES": lambda named: 64 if named["N"] == 4096 else 4})(triton.jit(staged)))
    kernel[(1,)](on_gpu(4096), 4096)
    assert begun.count(False) == len(failures) == 2
    assert isinstance(failures[0], OutOfResources)
    assert "shared memory" in str(failures[0])
    assert failures[1] is None
    assert gpu.launches[-1].args["BLOCK"] == 32


TTIR = """
module {
  tt.func public @copy(%out: !tt.ptr<f32>, %x: !tt.ptr<f32>, %n: i32) attributes {noinline = false} {
    %ten = arith.constant 1.000000e+01 : f32
    tt.store %out, %ten : !tt.ptr<f32>
    tt.return
  }
}
"""


def test_a_config_may_bring_code_of_its_own(autotune, gpu, tmp_path):
    path = tmp_path / "own.ttir"
    path.write_text(TTIR)
    configs = [triton.Config({"BLOCK": 32, "ir_override": str(path)})]
    kernel = autotune(configs, ["N"], do_bench=Bench())(triton.jit(copy))
    compiled = kernel[grid](on_gpu(1024), on_gpu(1024), N=1024)
    assert "ld.global" not in compiled.asm["ptx"]
    plain = autotune(of_blocks(32), ["N"], do_bench=Bench())(triton.jit(copy))
    assert "ld.global" in plain[grid](on_gpu(1024), on_gpu(1024), N=1024).asm["ptx"]


def test_compiled_ahead_for_each_config(autotune, gpu):
    configs = [triton.Config({"BLOCK": block}, num_warps=warps) for block, warps in ((64, 2), (128, 4))]
    kernel = autotune(configs, ["N"], do_bench=Bench())(triton.jit(copy))
    compiled = kernel.warmup(torch.float32, torch.float32, 100, grid=(1,))
    assert [each.metadata.num_warps for each in compiled] == [2, 4]
    assert gpu.launches == []


@pytest.mark.parametrize("blocks", [(32,), (32, 64)], ids=["one config", "two"])
@pytest.mark.parametrize("mode", ["tune", "cached", "strict", "off"])
def test_host_tensors_are_refused_in_tritons_words(mode, blocks):
    """There is no driver for them, or the driver refuses their address."""
    kernel = tritile.autotune(of_blocks(*blocks), ["N"], mode=mode)(triton.jit(copy))
    out = torch.zeros(40)
    for _ in range(2):  # what was chosen before the error is no other
        with pytest.raises((RuntimeError, ValueError), match=REFUSED):
            kernel[grid](out, torch.ones(40), N=40)
    assert not out.any()
