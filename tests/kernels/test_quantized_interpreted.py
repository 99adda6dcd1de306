"""Products with quantized weights in Triton's interpreter, by tests.cases.quantized, and calls of them."""

import itertools

import pytest
import torch

import tritile
from tests.cases.quantized import *  # noqa: F403
from tests.cases.quantized import CONFIGS, run
from tests.packed import assert_linear, weight_of
from tests.reference import values
from tritile.errors import TuningError

pytestmark = pytest.mark.interpreted


@pytest.mark.parametrize("k", [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("bits", [4, 8])
def test_short_rows(bits, k):
    for group, zeros in itertools.product((32, 128), (False, True)):
        weight = weight_of(20, k, torch.bfloat16, bits, group, zeros)
        x, bias = values((2, k), torch.bfloat16), values((20,), torch.float32, 2)
        assert_linear(tritile.linear(x, weight, bias), x, weight, bias)


def test_a_bias_alone_is_rounded_once():
    """The sum of a zero row and a bias in float32 is the bias, rounded to the result's type."""
    weight, bias = weight_of(40, 96, torch.bfloat16, 4, 64, False), values((40,), torch.float32)
    out = tritile.linear(torch.zeros(2, 96, dtype=torch.bfloat16), weight, bias)
    assert torch.equal(out, bias.to(torch.bfloat16).expand(2, 40))


@pytest.mark.parametrize("bias_dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_bias_of_another_dtype(bits, dtype, bias_dtype):
    for zeros in (False, True):
        weight, x = weight_of(20, 96, dtype, bits, 32, zeros), values((3, 96), dtype)
        bias = values((20,), bias_dtype, 2)
        assert_linear(tritile.linear(x, weight, bias), x, weight, bias)


def test_infinities_and_nan_of_x_pass():
    weight = tritile.quantize(torch.ones(16, 64, dtype=torch.float16), bits=4, group_size=32)
    x = torch.ones(3, 64, dtype=torch.float16)
    x[0, 5], x[1, 6] = float("inf"), float("nan")
    out = tritile.linear(x, weight)
    assert bool(out[0].isinf().all())
    assert bool(out[1].isnan().all())
    assert bool(out[2].isfinite().all())


def test_programs_without_a_block_are_refused():
    weight, x = weight_of(16, 128, torch.float16, 4, 64, False), values((1, 128), torch.float16)
    with pytest.raises(TuningError, match="SPLIT_K = 2 leaves programs without a block of K = 128"):
        run(CONFIGS[2], x, weight, torch.empty(1, 16, dtype=torch.float16))
