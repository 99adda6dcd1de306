"""`tritile.capabilities`: what a GPU runs, by the legality of the families' configs."""

import pytest
import torch

import tritile
from tritile.core.device import target_device
from tritile.core.problem import MATMUL_DTYPES, PRECISIONS_OF, MatmulProblem
from tritile.errors import InvalidValueError, UnsupportedError
from tritile.families.space import legal_configs
from tritile.lab import capabilities as module

A100, H100, MI300X = map(target_device, ("sm_80", "sm_90", "gfx942"))


def row(device, op, dtype, precision=""):
    (found,) = (r for r in tritile.capabilities(device).rows if r[:3] == (op, dtype, precision))
    return found


def test_hopper_has_its_families_and_an_a100_only_tiles():
    assert {"tile", "descriptor", "warpgroups"} <= set(row(H100, "matmul", "bfloat16").families)
    assert row("sm_80", "matmul", "bfloat16").families == ("tile", "few_rows", "few_rows_across")
    assert "scaled" in row(H100, "scaled_matmul", "float8_e4m3fn", "scales 1x128").families


def test_what_a_gpu_lacks_is_told_with_the_reason():
    lacking = row(A100, "matmul", "float8_e4m3fn", "ieee")
    assert lacking.families == ()
    assert "8.9" in lacking.reason
    assert "none: float8_e4m3fn needs" in repr(tritile.capabilities(A100))
    assert "none: float8_e4m3fn needs" in tritile.capabilities(A100)._repr_html_()


def test_every_dtype_and_precision_of_products_has_a_row():
    found = {(r.dtype, r.precision) for r in tritile.capabilities(H100).rows if r.op == "matmul"}
    assert found == {(d, p) for d in MATMUL_DTYPES for p in PRECISIONS_OF.get(d, ("",))}


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "float64"])
def test_a_row_says_what_the_space_says(dtype):
    """A sample of configs decides for a family that none of its configs is legal."""
    for device in (A100, MI300X):
        problem = MatmulProblem(1, 4096, 4096, 4096, dtype, dtype)
        try:
            families = {config.family for config in legal_configs(problem, device)}
        except UnsupportedError:
            families = set()
        assert families <= set(row(device, "matmul", dtype, "ieee" if dtype != "float16" else "").families)
        assert ("tile" in module._families(problem, device)) is ("tile" in families)


def test_runs_takes_every_operation_and_dtype():
    there, here = tritile.capabilities("sm_80"), tritile.capabilities(H100)
    assert not there.runs("matmul", torch.float8_e5m2)
    assert here.runs("scaled_matmul", "float8_e5m2", "fast")
    assert not here.runs("matmul", torch.float16, "fp16x3")
    assert there.runs("transpose", torch.complex128)
    assert there.runs("addmm", torch.complex64, "tf32")
    with pytest.raises(InvalidValueError, match="matmul, linear"):
        here.runs("convolve", torch.float16)
    with pytest.raises(InvalidValueError, match="op is"):
        here.runs(["matmul"], torch.float16)
    with pytest.raises(InvalidValueError, match="a dtype"):
        here.runs("matmul", "float17")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_one_has_to_be_named():
    with pytest.raises(UnsupportedError, match="sm_90"):
        tritile.capabilities()
    with pytest.raises(InvalidValueError, match="capabilities: device is 'sm_91'"):
        tritile.capabilities("sm_91")
