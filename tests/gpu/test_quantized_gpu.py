"""Products with quantized weights on a GPU: each kind of weight, layout and edge, the same bits each time."""

import pytest
import torch

import tritile
from tests.cases.quantized import *  # noqa: F403
from tests.cases.quantized import CONFIGS, HALF, run, tma
from tests.cases.quantized import weight as weight_of
from tests.configs import packed_weights
from tests.launched import captured, in_threads
from tests.packed import KINDS, assert_linear
from tests.reference import guard_intact, name, placed, poisoned, values
from tritile.choose import aten, gpu_tables, waves
from tritile.core import device as devices
from tritile.core.problem import QuantizedProblem
from tritile.errors import TuningError
from tritile.families import launching
from tritile.families.space import legal_configs
from tritile.lab import baselines
from tritile.tune.subject import answers, operands

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]


@pytest.mark.parametrize(
    "config", [make(16, 64, 128, 4, 3, s) for make in (packed_weights, tma) for s in (1, 2)], ids=str
)
@pytest.mark.parametrize("dtype", HALF, ids=name)
def test_columns_that_end_at_every_residue(config, dtype):
    """A result's first row starts on 16 bytes, and its rows end at every residue modulo 16 bytes."""
    sizes = [(129 + r % 2, 128 + r, 288 + 20 * (r % 2)) for r in range(8)]
    for m, n, k in [(3, 1, 260), (3, 7, 288), *sizes]:
        weight, x = weight_of(n, k, dtype, 4, 32), placed(values((m, k), dtype, 0, "cuda"), "padded")
        room = poisoned((16 + m * n + 16,), dtype, "cuda")
        out = room[16 : 16 + m * n].view(m, n)
        run(config, x, weight, out)
        assert guard_intact(room, out), (m, n, k)


@pytest.mark.parametrize("config", [c for c in CONFIGS if c["SPLIT_K"] > 1], ids=str)
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


def replayed(x, weight, wanted):
    """Checks a captured graph's results, and those of four threads on their own streams; returns both."""
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
    return graph, got


def test_graphs_streams_and_threads():
    weight = weight_of(4096, 4096, torch.bfloat16)
    x = values((16, 4096), torch.bfloat16, 0, "cuda")
    replayed(x, weight, tritile.linear(x, weight))


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
def test_quantized_as_on_host(bits, group, zeros, dtype):
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
    prepared = launching.prepare(calls[0], waves.pick(problem, device))
    run = operands.run_of(prepared)
    for call in calls:
        assert 0 < answers.check(run, call) < 1e-3
    calls[0].out.tensor[17] += 1000
    with pytest.raises(TuningError, match="wrong answer"):
        answers.answer_error(calls[0])
    torchs = baselines.torch_baselines(calls[0])[baselines.WIDE_WEIGHT]
    assert answers.check(baselines.into_out(torchs), calls[0], every=False) > 0
    call, memory = operands.guarded(operands.ragged(problem))
    answers.check(operands.run_of(launching.prepare(call, waves.pick(call.problem, device))), call)
    assert memory.is_intact()


@pytest.mark.parametrize("part", range(6))
@pytest.mark.parametrize(("m", "bits"), [(1, 4), (240, 4), (1000, 8)])
def test_sample_of_space_is_right(m, bits, part):
    """Every ninth legal config, at sizes that end amid every tile; in parts, which compile side by side."""
    problem = QuantizedProblem(m, 1008, 2000, "bfloat16", bits, {4: 64, 8: 32}[bits], True, bias=True)
    device = devices.gpu(0)
    (call,) = operands.copies_of(problem, device, 1)
    for config in legal_configs(problem, device)[9 * part :: 54]:
        answers.check(operands.run_of(launching.prepare(call, config)), call)


# Products by torch, of weights that our kernel unpacks in memory first.


BY_TORCH = [(256, 512, 1024), (1000, 1008, 2000), (4096, 384, 2048), (257, 333, 1001), (300, 1, 96)]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", HALF, ids=name)
@pytest.mark.parametrize(("bits", "group", "zeros"), KINDS[::3])
@pytest.mark.parametrize(("m", "n", "k"), BY_TORCH, ids=str)
def test_products_by_torch(by_torch, m, n, k, bits, group, zeros, dtype, with_bias):
    for seed in (1, 2):  # the second call is a remembered one
        weight, x = weight_of(n, k, dtype, bits, group, zeros, seed), values((m, k), dtype, seed, "cuda")
        bias = values((n,), dtype, seed + 2, "cuda") if with_bias else None
        out = tritile.linear(x, weight, bias)
        assert (out.shape, out.dtype, out.is_contiguous()) == ((m, n), dtype, True)
        assert_linear(out, x, weight, bias, exact=False)
        whole = tritile.linear(torch.eye(k, dtype=dtype, device="cuda"), weight)
        assert torch.equal(whole.t(), weight.dequantize())  # unpacked bit for bit
    assert len(by_torch) == (4 if n % 8 == 0 or not with_bias else 2)


@pytest.mark.parametrize("bias_dtype", [torch.float16, torch.bfloat16, torch.float32], ids=name)
@pytest.mark.parametrize("dtype", HALF, ids=name)
@pytest.mark.parametrize("m", [1, 40, 300])
def test_a_bias_of_another_dtype(m, dtype, bias_dtype):
    weight, x = weight_of(320, 512, dtype), values((m, 512), dtype, 0, "cuda")
    bias = values((320,), bias_dtype, 1, "cuda")
    assert_linear(tritile.linear(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("amp", HALF, ids=name)
@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=name)
def test_autocast_changes_no_weight(dtype, amp):
    weight = values((77, 300), dtype, 0, "cuda")
    wanted = tritile.quantize(weight, bits=4, zero_points=True)
    with torch.autocast("cuda", dtype=amp):
        found = tritile.quantize(weight, bits=4, zero_points=True)
    for part in ("packed", "scales", "zeros"):
        assert torch.equal(getattr(found, part), getattr(wanted, part))


def test_ours_where_torch_may_not(by_torch):
    weight, x = weight_of(320, 512, torch.float16), values((300, 512), torch.float16, 0, "cuda")
    bias = values((320,), torch.float32, 1, "cuda")
    assert_linear(tritile.linear(x, weight, bias), x, weight, bias)
    assert_linear(tritile.linear(x[0], weight), x[0], weight)
    with tritile.batch_invariant():
        whole = tritile.linear(x, weight)
        assert torch.equal(whole[:7], tritile.linear(x[:7], weight))
    torch.use_deterministic_algorithms(True)
    try:
        assert_linear(tritile.linear(x, weight), x, weight)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not by_torch


def test_workspaces_do_not_mix(by_torch):
    """Calls share memory, and each launch of ours starts before the kernel ahead of it is done."""
    weights = [weight_of(1008, 2048, torch.bfloat16, seed=seed) for seed in (1, 2)]
    x = values((300, 2048), torch.bfloat16, 0, "cuda")
    outs = [tritile.linear(x, weights[i % 2]) for i in range(100)]
    for weight, out in zip(weights, outs, strict=False):
        assert_linear(out, x, weight, exact=False)
    assert not torch.equal(outs[0], outs[1])
    assert all(torch.equal(out, outs[i % 2]) for i, out in enumerate(outs))
    assert len(by_torch) == 100


def test_weights_written_before_unpacking(by_torch):
    """The launch waits for whatever wrote the packed weight, its scales and zero points."""
    source = [weight_of(1008, 2048, torch.bfloat16, zeros=True, seed=seed) for seed in (1, 2)]
    weight = weight_of(1008, 2048, torch.bfloat16, zeros=True, seed=3)
    x, outs = values((300, 2048), torch.bfloat16, 0, "cuda"), []
    for i in range(50):
        for part in ("packed", "scales", "zeros"):
            getattr(weight, part).copy_(getattr(source[i % 2], part))
        outs.append(tritile.linear(x, weight))
    for one, out in zip(source, outs, strict=False):
        assert_linear(out, x, one, exact=False)
    assert all(torch.equal(out, outs[i % 2]) for i, out in enumerate(outs))
    assert by_torch


def test_graphs_streams_and_threads_by_torch(by_torch):
    weight, other = (weight_of(1024, 2048, torch.bfloat16, seed=seed) for seed in (1, 2))
    x = values((300, 2048), torch.bfloat16, 0, "cuda")
    wanted, after = tritile.linear(x, weight), tritile.linear(x, other)
    graph, got = replayed(x, weight, wanted)
    for part in ("packed", "scales"):
        getattr(weight, part).copy_(getattr(other, part))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(one, after) for one in got), "a graph unpacks the weight as it is then"
    assert by_torch


@pytest.mark.serial
@pytest.mark.usefixtures("fresh")
def test_packed_planned_and_tuned(monkeypatch):
    monkeypatch.setenv("TRITILE_BACKENDS", "triton,aten")
    device = devices.gpu(0)
    if gpu_tables.predictor("bf16_nt", device) is None:
        pytest.skip("no table of this GPU has torch's times")
    weight, x = weight_of(8192, 8192, torch.bfloat16), values((4096, 8192), torch.bfloat16, 0, "cuda")
    plan = tritile.plan(tritile.linear, x, weight)
    assert plan.other_us, "both are predicted"
    assert plan.workspace == (2 * 8192 * 8192 if plan.config == aten.CONFIG else 0)
    weight, x = weight_of(500, 776, torch.bfloat16), values((700, 776), torch.bfloat16, 0, "cuda")
    with tritile.mode("tune"):
        assert_linear(tritile.linear(x, weight), x, weight)
        plan = tritile.plan(tritile.linear, x, weight)
    assert plan.source == "exact"
    assert plan.other_us, "both were timed"
