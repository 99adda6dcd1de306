"""Products with quantized weights: interpreted at small sizes, on a GPU at full ones."""

import pytest
import torch

import tritile
from tests.configs import packed_weights
from tests.launched import DEVICE, INTERPRETED, launched
from tests.packed import KINDS, assert_linear, on_16_bytes, weight_of
from tests.reference import frame, guard_intact, placed, values
from tritile.families.quantized.family import scales_sums
from tritile.ops.linear_quantized import quantized_call

HALF = (torch.bfloat16, torch.float16)


def tma(m, n, k, warps, stages, split=1, group=8):
    return packed_weights(m, n, k, warps, stages, split, group, family="descriptor")


if INTERPRETED:
    CONFIGS = [
        packed_weights(16, 32, 128, 4, 2, group=2),
        tma(32, 16, 256, 4, 2, group=2),
        packed_weights(16, 32, 128, 4, 2, split=2, group=2),
        tma(16, 64, 128, 4, 2, split=4, group=1),
    ]
    # Every config by every kind; either type by every kind and by every config.
    DRAWN = [
        (config, kind, HALF[(i // 2 + i + j) % 2])
        for i, kind in enumerate(KINDS)
        for j, config in enumerate(CONFIGS)
    ]
    OF_KINDS, UNPACKED, UNPACKING = (5, 40, 700), (35, 150), [None]
    SIZES = [(1, 1, 512), (17, 33, 1023), (3, 130, 530), (33, 16, 1025)]
    OF_LAYOUTS = [(10, 40, 96, 4, 32, HALF[0], kind) for kind in (torch.float32, *HALF)]
else:
    CONFIGS = [
        packed_weights(16, 64, 128, 4, 4),
        packed_weights(16, 64, 256, 4, 3),
        packed_weights(16, 64, 128, 4, 5, split=8),
        packed_weights(32, 16, 128, 1, 3),
        packed_weights(64, 128, 128, 8, 3, split=4),
        packed_weights(128, 128, 128, 8, 2),
        tma(16, 64, 128, 4, 4),
        tma(16, 64, 256, 4, 5, split=2),
        tma(32, 16, 128, 1, 3),
        tma(64, 128, 128, 8, 4, split=4),
        tma(256, 128, 128, 8, 3),
    ]
    # Each config with four kinds of weights and both dtypes, each kind with configs of every family.
    DRAWN = [
        (config, KINDS[(i + 5 * j) % 12], HALF[(i + j) % 2])
        for i, config in enumerate(CONFIGS)
        for j in range(4)
    ]
    OF_KINDS, UNPACKED = (70, 200, 1096), (300, 712)
    UNPACKING = [CONFIGS[0], CONFIGS[5], tma(128, 128, 128, 8, 2)]
    SIZES = [(1, 1, 1), (1, 4096, 4096), (17, 33, 1023), (127, 4097, 2047), (256, 256, 4104)]
    OF_LAYOUTS = [(5, 320, 512, 8, 64, HALF[0], torch.float32), (200, 320, 512, 8, 64, HALF[1], HALF[0])]


def weight(*how, **more):
    return weight_of(*how, **more, device=DEVICE)


def run(config, x, other, out, bias=None):
    """Make a product by a config; return the launch and its call.

    The interpreter gets bfloat16 wrong: float32 stands for it, and torch rounds.
    """
    wide = INTERPRETED and x.dtype == torch.bfloat16
    into = torch.full(out.shape, float("nan")) if wide else out
    given = x.float() if wide else x
    if config.family == "descriptor" and given.stride(0) * given.itemsize % 16:
        given = on_16_bytes(given)
    call = quantized_call(given, other, bias.float() if wide and bias is not None else bias, into)
    found = launched(call, config)
    if wide:
        out.copy_(into)
    exact = scales_sums(config, other.group_size) if INTERPRETED else None
    assert_linear(out, x, other, bias, exact)
    return found, call


@pytest.mark.parametrize(("config", "kind", "dtype"), DRAWN, ids=str)
def test_configs_and_kinds_of_weights(config, kind, dtype):
    (m, n, k), (bits, group, zeros) = OF_KINDS, kind
    x, bias = values((m, k), dtype, 0, DEVICE), values((n,), dtype, 2, DEVICE)
    out = torch.empty(m, n, dtype=dtype, device=DEVICE)
    run(config, x, weight(n, k, dtype, bits, group, zeros), out, bias)


@pytest.mark.parametrize(("bits", "group", "zeros"), KINDS)
@pytest.mark.parametrize("config", UNPACKING, ids=str)
def test_weights_are_unpacked_bit_for_bit(config, bits, group, zeros):
    """Rows of x that pick one column each give the weight as `dequantize` does, rounding included."""
    dtype = HALF[KINDS.index((bits, group, zeros)) // 2 % 2]
    (n, k), one = UNPACKED, torch.eye(UNPACKED[1], dtype=dtype, device=DEVICE)
    other, out = weight(n, k, dtype, bits, group, zeros), torch.empty(k, n, dtype=dtype, device=DEVICE)
    if config is None:
        out = tritile.linear(one, other)
    else:
        launched(quantized_call(one, other, None, out), config)
    assert torch.equal(out.t(), other.dequantize())


@pytest.mark.parametrize(("m", "n", "k"), SIZES, ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_ragged_sizes(config, m, n, k):
    turn = 1 if INTERPRETED else CONFIGS.index(config) + SIZES.index((m, n, k))
    dtype = HALF[turn % 2]  # kinds of weights are drawn with both
    buffer, out = frame((m, n), dtype, "offset", DEVICE)
    run(config, values((m, k), dtype, 0, DEVICE), weight(n, k, dtype, 4, 64), out)
    assert guard_intact(buffer, out)


@pytest.mark.parametrize("layout", ["row", "column", "sliced", "strided", "sparse", "offset", "batched"])
@pytest.mark.parametrize(("m", "n", "k", "bits", "group", "dtype", "of_bias"), OF_LAYOUTS, ids=str)
def test_layouts_of_x_and_bias(m, n, k, bits, group, dtype, of_bias, layout):
    other, bias = weight(n, k, dtype, bits, group, True), values((2 * n,), of_bias, 2, DEVICE)[::2]
    x = values((m, k), dtype, 0, DEVICE)
    # Batched: rows that no one stride reaches.
    x = x.view(5, -1, k).transpose(0, 1) if layout == "batched" else placed(x, layout)
    for _ in range(2):
        out = tritile.linear(x, other, bias)
        assert out.is_contiguous()
        assert_linear(out, x, other, bias)
