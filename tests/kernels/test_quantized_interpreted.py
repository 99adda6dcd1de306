"""Products with quantized weights in Triton's interpreter, and the calls around them."""

import itertools

import pytest
import torch

import tritile
from tests.configs import packed_weights
from tests.packed import KINDS, assert_linear, on_16_bytes, weight_of
from tests.reference import frame, guard_intact, placed, values
from tritile.errors import TuningError
from tritile.families.quantized.family import scales_sums
from tritile.ops.linear_quantized import quantized_call
from tritile.runtime import launch

pytestmark = pytest.mark.interpreted

HALF = (torch.bfloat16, torch.float16)


def config(m=16, n=32, k=128, split=1, group=2, family="tile"):
    return packed_weights(m, n, k, 4, 2, split, group, family)


CONFIGS = [
    config(),
    config(32, 16, 256, family="descriptor"),
    config(split=2),
    config(n=64, split=4, group=1, family="descriptor"),
]


def run(config, x, weight, out, bias=None):
    """As the operation runs it on host tensors, with a config of one's own."""
    x, wide = on_16_bytes(x) if config.family == "descriptor" else x, x.dtype == torch.bfloat16
    into = torch.full(out.shape, float("nan")) if wide else out
    widened = on_16_bytes(x.float()) if wide else x
    call = quantized_call(widened, weight, None if bias is None else bias.float(), into)
    launch.run_interpreted(call, config)
    if wide:
        out.copy_(into)
    assert_linear(out, x, weight, bias, scales_sums(config, weight.group_size))


# Every config by every kind; either type by every kind and by every config.
BY_KIND = [
    (*kind, HALF[(i // 2 + i + j) % 2], config)
    for i, kind in enumerate(KINDS)
    for j, config in enumerate(CONFIGS)
]


@pytest.mark.parametrize(("bits", "group", "zeros", "dtype", "config"), BY_KIND, ids=str)
def test_kinds_of_weights(bits, group, zeros, dtype, config):
    weight = weight_of(40, 700, dtype, bits, group, zeros)
    x, bias = values((5, 700), dtype), values((40,), dtype, 2)
    run(config, x, weight, torch.empty(5, 40, dtype=dtype), bias)


@pytest.mark.parametrize(("bits", "group", "zeros"), KINDS)
def test_weights_are_unpacked_bit_for_bit(bits, group, zeros):
    """Rows of x that pick one column each give the weight as `dequantize` does, rounding included."""
    dtype = HALF[KINDS.index((bits, group, zeros)) // 2 % 2]
    weight = weight_of(35, 150, dtype, bits, group, zeros)
    out = tritile.linear(torch.eye(150, dtype=dtype), weight)
    assert torch.equal(out.t(), weight.dequantize())


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 1, 512), (17, 33, 1023), (3, 130, 530), (33, 16, 1025)],
    ids=str,
)
def test_ragged_sizes(config, m, n, k):
    weight = weight_of(n, k, torch.float16, 4, 64, False)
    buffer, out = frame((m, n), torch.float16, "offset")
    run(config, values((m, k), torch.float16), weight, out)
    assert guard_intact(buffer, out)


@pytest.mark.parametrize("k", [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("bits", [4, 8])
def test_short_rows(bits, k):
    for group, zeros in itertools.product((32, 128), (False, True)):
        weight = weight_of(20, k, torch.bfloat16, bits, group, zeros)
        x, bias = values((2, k), torch.bfloat16), values((20,), torch.float32, 2)
        assert_linear(tritile.linear(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("layout", ["column", "sliced", "sparse", "offset", "turned"])
def test_layouts_of_x_and_of_a_bias_of_any_type(layout):
    weight, x = weight_of(40, 96, torch.bfloat16, 4, 32, True), values((5, 2, 96), torch.bfloat16)
    # Turned: rows that no one stride reaches.
    x = x.transpose(0, 1) if layout == "turned" else placed(x.view(10, 96), layout)
    for dtype in (torch.float32, *HALF):
        bias = values((80,), dtype)[::2]
        out = tritile.linear(x, weight, bias)
        assert out.is_contiguous()
        assert_linear(out, x, weight, bias)


def test_a_bias_alone_is_rounded_once():
    """The sum of a zero row and a bias in float32 is the bias, rounded to the result's type."""
    weight, bias = weight_of(40, 96, torch.bfloat16, 4, 64, False), values((40,), torch.float32)
    out = tritile.linear(torch.zeros(2, 96, dtype=torch.bfloat16), weight, bias)
    assert torch.equal(out, bias.to(torch.bfloat16).expand(2, 40))


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
        run(config(split=2), x, weight, torch.empty(1, 16, dtype=torch.float16))
