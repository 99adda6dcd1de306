"""Products with quantized weights on a GPU: each kind of weight, layout and edge, the same bits each time."""

import functools

import pytest
import torch

import tritile
from tests.configs import packed_weights as tile
from tests.configs import warpgroups
from tests.launched import captured, in_threads, launched
from tests.packed import KINDS, assert_linear, on_16_bytes
from tests.packed import weight_of as weight_on
from tests.reference import frame, guard_intact, name, placed, values
from tritile.core import device as devices
from tritile.core.problem import QuantizedProblem
from tritile.errors import TuningError
from tritile.families.space import legal_configs
from tritile.lab import baselines
from tritile.ops.linear_quantized import described
from tritile.planning import model
from tritile.runtime import launch
from tritile.tune.subject import answers, operands
from tritile.tune.suites import parse_shape

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]
HALF = (torch.bfloat16, torch.float16)


def tma(m, n, k, warps, stages, split=1):
    return tile(m, n, k, warps, stages, split, family="descriptor")


def unpacked(*sides, **how):
    return warpgroups(*sides, **how, family="unpacked")


weight_of = functools.partial(weight_on, device="cuda")
FUSED = [
    tile(16, 64, 128, 4, 4),
    tile(16, 64, 256, 4, 3),
    tile(16, 64, 128, 4, 5, split=8),
    tile(32, 16, 128, 1, 3),
    tile(64, 128, 128, 8, 3, split=4),
    tile(128, 128, 128, 8, 2),
    tma(16, 64, 128, 4, 4),
    tma(16, 64, 256, 4, 5, split=2),
    tma(32, 16, 128, 1, 3),
    tma(64, 128, 128, 8, 4, split=4),
    tma(256, 128, 128, 8, 3),
]
UNPACKED = [
    unpacked(64, 64, 64, 1, 4),
    unpacked(128, 256, 64, 2, 4, persistent=True, subtiles=2),
    unpacked(192, 96, 64, 3, 4),
    unpacked(128, 160, 128, 2, 2),
]
CONFIGS = [*FUSED, *UNPACKED]


def run(config, x, weight, out, bias=None):
    call = described(x, weight, bias, out)
    return launched(call, config), call


# Each config with four kinds of weights and both dtypes, each kind with configs of every family.
DRAWN = [
    (config, KINDS[(i + 5 * j) % 12], HALF[(i + j) % 2]) for i, config in enumerate(CONFIGS) for j in range(4)
]


@pytest.mark.parametrize(("config", "kind", "dtype"), DRAWN, ids=str)
def test_configs_and_kinds_of_weights(config, kind, dtype):
    bits, group, zeros = kind
    weight = weight_of(200, 1096, dtype, bits, group, zeros)
    x, bias = values((70, 1096), dtype, 0, "cuda"), values((200,), dtype, 2, "cuda")
    out = torch.empty(70, 200, dtype=dtype, device="cuda")
    run(config, x, weight, out, bias)
    assert_linear(out, x, weight, bias)


@pytest.mark.parametrize(("bits", "group", "zeros"), KINDS)
@pytest.mark.parametrize("config", [FUSED[0], FUSED[5], tma(128, 128, 128, 8, 2), UNPACKED[1]], ids=str)
def test_weights_are_unpacked_bit_for_bit(config, bits, group, zeros):
    """Rows of x that pick one column each give the weight as `dequantize` does, rounding included."""
    dtype = HALF[KINDS.index((bits, group, zeros)) // 2 % 2]
    weight = weight_of(300, 712, dtype, bits, group, zeros)
    out = torch.empty(712, 300, dtype=dtype, device="cuda")
    run(config, torch.eye(712, dtype=dtype, device="cuda"), weight, out)
    assert torch.equal(out.t(), weight.dequantize())


SIZES = [(1, 1, 1), (1, 4096, 4096), (17, 33, 1023), (127, 4097, 2047), (256, 256, 4104)]


@pytest.mark.parametrize(("m", "n", "k"), SIZES, ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_ragged_sizes(config, m, n, k):
    dtype = HALF[(CONFIGS.index(config) + SIZES.index((m, n, k))) % 2]  # kinds of weights are drawn with both
    weight = weight_of(n, k, dtype, 4, 64)
    x = values((m, k), dtype, 0, "cuda")
    x = on_16_bytes(x) if config.family == "descriptor" else x
    buffer, out = frame((m, n), dtype, "offset", "cuda")
    run(config, x, weight, out)
    assert_linear(out, x, weight)
    assert guard_intact(buffer, out)


@pytest.mark.parametrize("layout", ["row", "column", "sliced", "strided", "sparse", "offset"])
@pytest.mark.parametrize(("m", "dtype"), [(5, HALF[0]), (200, HALF[1])])
def test_layouts_of_x(m, dtype, layout):
    weight = weight_of(320, 512, dtype, 8, 64, True)
    x = placed(values((m, 512), dtype, 0, "cuda"), layout)
    assert_linear(tritile.linear(x, weight), x, weight)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=name)
def test_bias_of_any_type_and_stride(dtype):
    weight, x = weight_of(320, 512, torch.bfloat16), values((9, 512), torch.bfloat16, 0, "cuda")
    bias = values((640,), dtype, 2, "cuda")[::2]
    for _ in range(2):
        assert_linear(tritile.linear(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("config", [c for c in FUSED if c["SPLIT_K"] > 1], ids=str)
def test_shared_sums_repeat_bit_for_bit(config):
    weight = weight_of(1000, 4000, torch.bfloat16)
    x = values((64, 4000), torch.bfloat16, 0, "cuda")
    out = torch.empty(64, 1000, dtype=torch.bfloat16, device="cuda")
    prepared, call = run(config, x, weight, out)
    wanted = out.clone()
    for _ in range(200):
        out.fill_(float("nan"))
        prepared(*call.tensors)
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("k", [2048, 2051])  # read where it lies, and copied
@pytest.mark.parametrize("config", UNPACKED, ids=str)
def test_unpacked_weights_of_calls_in_a_row_do_not_mix(config, k):
    """Calls share a workspace, and each launch starts before the one ahead of it is done."""
    weights = [weight_of(1008, k, torch.bfloat16, seed=seed) for seed in (1, 2)]
    x = values((300, k), torch.bfloat16, 0, "cuda")
    outs = [torch.empty(300, 1008, dtype=torch.bfloat16, device="cuda") for _ in range(100)]
    calls = [described(x, weights[i % 2], None, out) for i, out in enumerate(outs)]
    prepared, _ = run(config, x, weights[0], outs[0])
    for call in calls:
        prepared(*call.tensors)
    for weight, out in zip(weights, outs, strict=False):
        assert_linear(out, x, weight)
    assert not torch.equal(outs[0], outs[1])
    assert all(torch.equal(out, outs[i % 2]) for i, out in enumerate(outs))


@pytest.mark.parametrize("config", UNPACKED[:2], ids=str)
def test_weights_written_just_before_they_are_unpacked(config):
    """The launch waits for whatever wrote the packed weight, its scales and zero points."""
    source = [weight_of(1008, 2048, torch.bfloat16, zeros=True, seed=seed) for seed in (1, 2)]
    weight = weight_of(1008, 2048, torch.bfloat16, zeros=True, seed=3)
    x = values((300, 2048), torch.bfloat16, 0, "cuda")
    outs = [torch.empty(300, 1008, dtype=torch.bfloat16, device="cuda") for _ in range(50)]
    prepared, _ = run(config, x, weight, outs[0])
    for i, out in enumerate(outs):
        for part in ("packed", "scales", "zeros"):
            getattr(weight, part).copy_(getattr(source[i % 2], part))
        prepared(*described(x, weight, None, out).tensors)
    for one, out in zip(source, outs, strict=False):
        assert_linear(out, x, one)
    assert all(torch.equal(out, outs[i % 2]) for i, out in enumerate(outs))


def test_graphs_streams_and_threads():
    weight = weight_of(4096, 4096, torch.bfloat16)
    x = values((16, 4096), torch.bfloat16, 0, "cuda")
    wanted = tritile.linear(x, weight)
    graph, got = captured(lambda: [tritile.linear(x, weight) for _ in range(3)])
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(one, wanted) for one in got)

    def work():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            found = [tritile.linear(x, weight) for _ in range(50)]
        stream.synchronize()
        assert all(torch.equal(one, wanted) for one in found)

    in_threads(*[work] * 4)


def test_what_follows_sees_the_result():
    """A kernel that starts early waits for x; what reads the result waits for it."""
    weight = weight_of(4096, 4096, torch.bfloat16)
    x = values((16, 4096), torch.bfloat16, 0, "cuda")
    wanted = tritile.linear(tritile.linear(x, weight) * 2**-8, weight)
    for _ in range(50):
        middle = tritile.linear(x, weight)
        middle.mul_(2**-8)
        got = tritile.linear(middle, weight)
        middle.fill_(float("nan"))
        assert torch.equal(got, wanted)


@pytest.mark.serial
def test_results_beyond_32_bits():
    weight = weight_of(65600, 128, torch.bfloat16)
    try:
        x = values((33000, 128), torch.bfloat16, 0, "cuda")
        out = tritile.linear(x, weight)
    except torch.cuda.OutOfMemoryError:
        pytest.skip("no memory for a result of 2^31 elements")
    assert out.numel() > 2**31
    for rows in (slice(0, 40), slice(-40, None)):
        assert_linear(out[rows], x[rows], weight)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=name)
@pytest.mark.parametrize(("bits", "group", "zeros"), KINDS[1::3])
def test_quantized_on_the_gpu_as_on_the_host(bits, group, zeros, dtype):
    original = values((100, 333), dtype)
    here = tritile.quantize(original, bits=bits, group_size=group, zero_points=zeros)
    there = tritile.quantize(original.cuda(), bits=bits, group_size=group, zero_points=zeros)
    assert torch.equal(there.packed.cpu(), here.packed)
    assert torch.equal(there.scales.cpu(), here.scales)
    assert not zeros or torch.equal(there.zeros.cpu(), here.zeros)
    assert torch.equal(here.to("cuda").dequantize(), there.dequantize())


@pytest.mark.parametrize("m", [1, 16, 300])
@pytest.mark.parametrize(("bits", "zeros"), [(4, False), (4, True), (8, False), (8, True)])
def test_posed_problems_are_checked(bits, zeros, m):
    problem = QuantizedProblem(m, 1000, 1024, "float16", bits, 32, zeros, bias=True)
    device = devices.gpu(0)
    calls = operands.copies_of(problem, device, 2)
    prepared = launch.prepare(calls[0], model.pick(problem, device))
    run = operands.run_of(prepared)
    for call in calls:
        assert 0 < answers.check(run, call) < 1e-3
    calls[0].out.tensor[17] += 1000
    with pytest.raises(TuningError, match="wrong answer"):
        answers.answer_error(calls[0])
    assert (
        answers.check(
            baselines.into_out(baselines.torch_ways(calls[0])[baselines.WIDE_WEIGHT]),
            calls[0],
            every=False,
        )
        > 0
    )
    guarded = operands.Guarded(operands.ragged(problem))
    launch.prepare(guarded.call, model.pick(guarded.call.problem, device))(*guarded.call.tensors)
    answers.answer_error(guarded.call)
    guarded.check()


@pytest.mark.parametrize("part", range(6))
@pytest.mark.parametrize(("m", "bits", "family"), [(1, 4, None), (240, 4, None), (1000, 8, "unpacked")])
def test_a_sample_of_the_space_is_right(m, bits, family, part):
    """Every ninth legal config, at sizes that end amid every tile; in parts, which compile side by side."""
    problem = QuantizedProblem(m, 1008, 2000, "bfloat16", bits, {4: 64, 8: 32}[bits], True, bias=True)
    device = devices.gpu(0)
    if family and family not in model.families(problem, device):
        pytest.skip(f"{device.name} unpacks in registers alone")
    (call,) = operands.copies_of(problem, device, 1)
    for config in legal_configs(problem, device, family)[9 * part :: 54]:
        answers.check(operands.run_of(launch.prepare(call, config)), call)


@pytest.mark.serial
def test_measured_beside_torch():
    """Decode reads a quarter of the bytes: it must at the least not be slower than torch's own product."""
    from tritile.lab.bench import measured

    found = measured(parse_shape("16x8192x8192", "linear_quantized"))
    assert found.error < 5e-3
    assert found.torch_error < 5e-3
