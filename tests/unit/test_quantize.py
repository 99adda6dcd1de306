"""Quantized weights: how near the numbers come, how they lie in memory, what is kept; configs of products."""

import io
import math
from dataclasses import replace

import pytest
import torch

import tritile
from tests.packed import KINDS
from tests.reference import name, values
from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.core.problem import QuantizedProblem
from tritile.core.quantized import by_row, packed, unpacked
from tritile.errors import DeviceError, DtypeError, InvalidValueError, ShapeError, UnsupportedError
from tritile.families.space import illegal

HALF = (torch.bfloat16, torch.float16)
H200 = target_device("nvidia-h200")
PROBLEM = QuantizedProblem(16, 4096, 8192, "bfloat16", 4, 128)
SIZES = [(1, 1), (16, 128), (33, 130), (40, 1000)]


def steps_of(weight):
    """The scale of each element, (N, K), in float64."""
    n, k = weight.shape
    scales = by_row(weight.scales, n, -(-k // weight.group_size)).double()
    return scales.repeat_interleave(weight.group_size, 1)[:, :k]


def assert_near(weight, original):
    """Within half a scale, but for the quotient that is rounded to fp32 before it is rounded to a number.

    A quotient of up to 255 errs by 2^-17 at the most.
    """
    error = (original.double() - weight.dequantize(torch.float64)).abs()
    assert bool((error <= (0.5 + 2.0**-16) * steps_of(weight)).all())


@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=name)
@pytest.mark.parametrize(("bits", "group", "zeros"), KINDS)
def test_within_half_a_scale(bits, group, zeros, dtype, shape):
    for shift in (0.0, 3.0, -3.0):
        original = values(shape, dtype) + shift
        weight = tritile.quantize(original, bits=bits, group_size=group, zero_points=zeros)
        assert_near(weight, original)
        assert weight.shape == shape
        assert weight.dtype in HALF
        assert (weight.zeros is not None) == zeros


@pytest.mark.parametrize(("bits", "group", "zeros"), KINDS)
def test_scales_are_the_least_that_reach(bits, group, zeros):
    """Rounded up to the scales' type: by less than a unit in their last place."""
    original = values((20, 4 * group), torch.float32, 3) + 0.5
    weight = tritile.quantize(original, bits=bits, group_size=group, zero_points=zeros)
    apart = original.reshape(20, 4, group)
    low, high = apart.amin(-1).clamp(max=0), apart.amax(-1).clamp(min=0)
    top = 2**bits - 1
    half = 2 ** (bits - 1)
    least = (high - low) / top if zeros else torch.maximum(high / (half - 1), -low / half)
    scales = by_row(weight.scales, 20, 4).float()
    assert bool((scales >= least * (1 - 2.0**-22)).all())
    assert bool((scales <= least * (1 + torch.finfo(weight.dtype).eps)).all())


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", HALF, ids=name)
def test_zeros_and_subnormals(dtype, bits, zeros):
    words = {"bits": bits, "group_size": 32, "zero_points": zeros}
    original = torch.zeros(5, 96, dtype=dtype)
    original[2, 40] = 1.0
    weight = tritile.quantize(original, **words)
    assert_near(weight, original)
    got = weight.dequantize()
    got[2, 32:64] = 0  # the one group that is not all zeros
    assert bool((got == 0).all())
    small = values((8, 64), torch.float32) * torch.finfo(dtype).smallest_normal * 0.1
    assert_near(tritile.quantize(small, dtype=dtype, **words), small)


@pytest.mark.parametrize("bits", [4, 8])
def test_where_a_number_lies(bits):
    """By the words of the module's head, one number at a time."""
    unit = 512 // bits
    generator = torch.Generator().manual_seed(1)
    for _ in range(60):
        n, k = (int(torch.randint(0, size, (), generator=generator)) for size in (32, 3 * unit))
        numbers = torch.zeros(32, 3 * unit, dtype=torch.uint8)
        numbers[n, k] = 2**bits - 1
        words = packed(numbers, bits).reshape(4, 3, 32, 4)
        run, t, half = k % unit // 8, k % 8 // 2, k % 2
        pairs = 16 // bits
        wanted = torch.zeros_like(words)
        value = (2**bits - 1) << (16 * half + bits * (run % pairs))
        wanted[n // 8, k // unit, n % 8 * 4 + t, run // pairs] = value - (value >> 31 << 32)
        assert torch.equal(words, wanted)
        assert torch.equal(unpacked(packed(numbers, bits), 32, 3 * unit, bits), numbers)


@pytest.mark.parametrize("bits", [4, 8])
def test_many_rows_and_strides(bits, monkeypatch):
    original, words = values((200, 70), torch.bfloat16).t(), {"bits": bits, "group_size": 64}
    whole = tritile.quantize(original, zero_points=True, **words)
    monkeypatch.setattr("tritile.ops.quantize._AT_ONCE", 16 * 200)
    other = tritile.quantize(original.contiguous(), zero_points=True, **words)
    for part in ("packed", "scales", "zeros"):
        assert torch.equal(getattr(whole, part), getattr(other, part)), part


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("weights_only", [False, True])
def test_saved_and_loaded(weights_only, zeros):
    weight = tritile.quantize(values((20, 100), torch.bfloat16), bits=4, group_size=32, zero_points=zeros)
    file = io.BytesIO()
    torch.save({"layer": weight}, file)
    file.seek(0)
    again = torch.load(file, weights_only=weights_only)["layer"]
    assert (again.bits, again.group_size, again.shape) == (4, 32, (20, 100))
    assert torch.equal(again.dequantize(), weight.dequantize())
    assert (again.zeros is None) == (not zeros)


def test_moved():
    weight = tritile.quantize(values((20, 100), torch.bfloat16), bits=8, zero_points=True)
    assert weight.to("cpu") is weight
    there = weight.to("meta")
    assert {part.device.type for part in (there, there.packed, there.scales, there.zeros)} == {"meta"}
    assert there.nbytes == weight.nbytes


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_named(value):
    original = torch.ones(20, 40)
    original[17, 3] = value
    with pytest.raises(InvalidValueError, match=rf"weight\[17, 3\] is {value}: expected finite numbers"):
        tritile.quantize(original, bits=8)


@pytest.mark.parametrize(
    ("name", "change", "error", "match"),
    [
        ("packed", torch.Tensor.long, DtypeError, "packed is torch.int64: expected a tensor of int32"),
        (
            "scales",
            torch.Tensor.float,
            DtypeError,
            "scales is torch.float32: expected .* bfloat16 or float16",
        ),
        ("zeros", list, DtypeError, "zeros is list"),
        ("shape", lambda _: (20, 300), ShapeError, r"packed has shape \(4, 128\)"),
        ("shape", lambda _: (20, 0), ShapeError, "shape .* expected two sizes"),
        ("scales", lambda t: t.t().contiguous().t(), ShapeError, "expected .*, contiguous"),
        ("bits", lambda _: 5, InvalidValueError, "bits 5"),
        ("scales", lambda t: t.to("meta"), DeviceError, "scales is on meta: expected cpu"),
    ],
)
def test_parts_that_do_not_fit(name, change, error, match):
    good = tritile.quantize(values((20, 100), torch.bfloat16), bits=4, group_size=32, zero_points=True)
    with pytest.raises(error, match=match):
        replace(good, **{name: change(getattr(good, name))})
    with pytest.raises(InvalidValueError, match="expected bits, group_size"):
        good.__setstate__({"packed": good.packed})
    with pytest.raises(DtypeError, match="expected a floating dtype"):
        good.dequantize(torch.int8)


# Products with them.


def config(m=16, n=64, k=128, split=1, warps=4, stages=4):
    sides = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 1, "SPLIT_K": split}
    return Config.of(warps, stages, "tile", **sides)


@pytest.mark.parametrize(
    ("config", "changes", "reason"),
    [
        (config(k=64), {}, "below the 128 columns that are packed together"),
        (config(m=8), {}, "must be at least 16"),
        (config(split=128), {}, "SPLIT_K = 128 leaves programs without a block"),
        (config(m=256, n=256), {}, "accumulator and"),
        (config(n=16, warps=8), {}, "leaves some of 8 warps idle"),
        (config(m=128, n=128, k=256, warps=8, stages=8), {}, "bytes of shared memory"),
        (config(split=2), {"n": 2**21}, "tiles share their K"),
        (config(m=128, n=256, split=2, warps=8, stages=2), {"m": 4096}, "sum all parts"),
        (config(), {"k": 2**31}, "sizes above"),
    ],
)
def test_illegal_configs(config, changes, reason):
    assert reason in illegal(config, replace(PROBLEM, **changes), H200)


def test_product_with_weight_not_explained():
    with pytest.raises(UnsupportedError, match="expected a product or permutation of plain tensors"):
        tritile.explain(PROBLEM, device=H200)


@pytest.mark.parametrize("amp", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_autocast_changes_no_weight(dtype, amp):
    weight = torch.randn(20, 100).to(dtype)
    wanted = tritile.quantize(weight, bits=4, zero_points=True)
    with torch.autocast("cpu", dtype=amp):
        found = tritile.quantize(weight, bits=4, zero_points=True)
    for part in ("packed", "scales", "zeros"):
        assert torch.equal(getattr(found, part), getattr(wanted, part))


def test_layers_are_converted_inside_autocast():
    model = torch.nn.Sequential(torch.nn.Linear(64, 48, dtype=torch.float16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tritile.nn.convert(model, "int8").exchanged == ("0",)
