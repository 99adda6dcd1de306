"""Products by quantized weights that torch makes, after our kernel has unpacked the weight in memory.

The kernel runs in Triton's interpreter, on host tensors that pass for a GPU's; torch really multiplies.
"""

import pytest
import torch

import tritile
from tests.packed import KINDS, assert_linear, weight_of
from tests.reference import assert_product, values
from tritile.choose import aten
from tritile.core.call import call_for
from tritile.core.device import target_device
from tritile.core.problem import QuantizedProblem
from tritile.core.quantized import QuantizedWeight
from tritile.errors import TuningError
from tritile.families.quantized import unpacked
from tritile.ops import request as ops_request
from tritile.runtime import launch
from tritile.tune.subject import operands, torch_calls

pytestmark = pytest.mark.interpreted

HALF = (torch.bfloat16, torch.float16)


def interpreted(work, tensors, index, fault):
    """Stand for a launch. The interpreter gets bfloat16 wrong: float32 stands for it, and torch rounds."""

    def run(*given):
        given = dict(zip(tensors, given, strict=True))
        memory = given["weight"]
        wide = memory.fill_(torch.nan)
        wide = wide.float() if memory.dtype == torch.bfloat16 else wide
        for step in work.steps:
            assert memory.numel() == step.args["rows"] * step.args["row"], "padding is written too"
            bound = [launch._bound(value, given | {"weight": wide}) for value in step.values]
            step.kernel[step.grid](*bound)
        assert bool(wide.isfinite().all()), "to the ends of rows, and the rows that fill up the last 16"
        memory.copy_(wide)

    return run


@pytest.fixture
def unpacking(monkeypatch):
    """Interprets what unpacks a weight; returns the buffers of each launch that was prepared."""
    prepared = []

    def bound(work, tensors, index, fault):
        prepared.append(tensors)
        return interpreted(work, tensors, index, fault)

    monkeypatch.setattr(unpacked, "bound", bound)
    monkeypatch.setattr(unpacked.devices, "gpu", lambda index: target_device("sm_80"))
    tritile.forget()
    yield prepared
    tritile.forget()


@pytest.fixture
def by_torch(unpacking, monkeypatch):
    """Has torch make what it may; returns the problems that it was asked for."""
    problems = []
    monkeypatch.setenv("TRITILE_BACKENDS", "triton,aten")
    monkeypatch.setattr(ops_request, "on_host", lambda tensor: False)
    monkeypatch.setattr(
        ops_request,
        "is_by_aten",
        lambda problem, index: problems.append(problem) or aten.illegal(problem) is None,
    )
    monkeypatch.setattr(
        ops_request, "prepared", lambda call, *how: pytest.fail("tritile's kernel was to run")
    )
    return problems


def unpack(weight):
    unpack = unpacked.Unpack(*weight.shape, weight.bits, weight.group_size)
    return unpack(weight.packed, weight.scales, weight.zeros)


RAGGED = (1, 1), (16, 64), (17, 65), (31, 127), (32, 128), (5, 191), (16, 192), (33, 256), (2, 257), (48, 513)
SHAPES = [
    *((35, 600, dtype, *kind) for dtype in HALF for kind in KINDS),
    *((*shape, HALF[1], bits, 32, True) for shape in RAGGED for bits in (4, 8)),
    *((*shape, HALF[1], bits, 128, False) for shape in RAGGED for bits in (4, 8)),
]


@pytest.mark.usefixtures("unpacking")
@pytest.mark.parametrize(("n", "k", "dtype", "bits", "group", "zeros"), SHAPES)
def test_unpacked_bit_for_bit(n, k, dtype, bits, group, zeros):
    weight = weight_of(n, k, dtype, bits, group, zeros)
    found = unpack(weight)
    assert torch.equal(found, weight.dequantize())
    assert found.stride(0) % 64 == 0  # rows on 128 bytes


@pytest.mark.usefixtures("unpacking")
def test_numbers_of_every_pattern():
    """All 256 bytes, beside scales from the smallest to the largest, with zero points at both ends."""
    for dtype in HALF:
        numbers = torch.arange(256).repeat(32, 1).float()
        original = (numbers - 128) * torch.logspace(-6, 1.5, 32)[:, None]
        for bits in (4, 8):
            for zeros in (False, True):
                weight = tritile.quantize(original.to(dtype), bits=bits, group_size=64, zero_points=zeros)
                assert torch.equal(unpack(weight), weight.dequantize())


CALLS = [  # bits, group, zero points, (N, K), the shape of x without K, its dtype, a bias
    (4, 128, False, (40, 136), (20,), HALF[0], True),
    (4, 32, True, (48, 72), (3, 5), HALF[1], True),
    (4, 32, True, (37, 72), (3, 5), HALF[1], False),
    (8, 64, True, (16, 65), (2, 1, 9), HALF[0], False),
    (8, 32, False, (33, 200), (7,), HALF[1], False),
]


@pytest.mark.parametrize(("bits", "group", "zeros", "shape", "rows", "dtype", "with_bias"), CALLS, ids=str)
def test_calls(by_torch, unpacking, bits, group, zeros, shape, rows, dtype, with_bias):
    """Later calls are remembered, with the weight of each."""
    n, k = shape
    for seed in (1, 2, 3):
        weight = weight_of(n, k, dtype, bits, group, zeros, seed)
        x = values((*rows, k), dtype, seed)
        bias = values((n,), dtype, seed + 1) if with_bias else None
        out = tritile.linear(x, weight, bias)
        assert (out.shape, out.dtype, out.is_contiguous()) == ((*rows, n), dtype, True)
        assert_linear(out, x, weight, bias, exact=False)
    assert len(by_torch) == len(unpacking) == 1
    problem = by_torch[0]
    assert (problem.bits, problem.group_size, problem.zero_points) == (bits, group, zeros)


def test_rows_with_gaps_and_gradient(by_torch):
    weight, wide = weight_of(40, 72, torch.float16), values((6, 80), torch.float16)
    x = wide[:, :72]
    assert_linear(tritile.linear(x, weight), x, weight, exact=False)
    leaf, by = x.clone().requires_grad_(), values((6, 40), torch.float16, 2)
    tritile.linear(leaf, weight).backward(by)
    assert_product(leaf.grad, by, weight.dequantize())
    assert [problem.op for problem in by_torch] == ["linear_quantized", "linear_quantized", "matmul"]


def test_weight_elsewhere_launches_anew(by_torch, unpacking):
    """A kernel that was compiled for 16 bytes reads them at once."""
    x, weight = values((6, 72), torch.float16), weight_of(40, 72, torch.float16, zeros=True)
    tritile.linear(x, weight)
    for places in ((1, 0, 0), (0, 4, 0), (0, 0, 2), (0, 0, 0)):
        parts = []
        for part, place in zip((weight.packed, weight.scales, weight.zeros), places, strict=True):
            room = torch.zeros(part.numel() + 8, dtype=part.dtype)
            parts.append(room[place:][: part.numel()].view(part.shape).copy_(part))
        there = QuantizedWeight(*parts, weight.bits, weight.group_size, weight.shape)
        assert_linear(tritile.linear(x, there), x, weight, exact=False)
    assert len(unpacking) == 4
    assert len(by_torch) == 1


def test_tritile_kernel_without_unpacking(by_torch, monkeypatch):
    weight, x = weight_of(40, 72, torch.float16), values((6, 72), torch.float16)

    def refused(*given):
        raise TuningError("does not compile")

    monkeypatch.setattr(unpacked, "bound", refused)
    with pytest.raises(pytest.fail.Exception, match="tritile's kernel"):
        tritile.linear(x, weight)


@pytest.mark.usefixtures("unpacking")
@pytest.mark.parametrize(("zeros", "bias"), [(False, False), (True, True)])
def test_what_is_timed_answers_rightly(zeros, bias):
    problem = QuantizedProblem(20, 40, 136, "float16", 4, 32, zeros, bias)
    weight, x = weight_of(40, 136, torch.float16, 4, 32, zeros), values((20, 136), torch.float16)
    side = values((40,), torch.float16, 2) if bias else None
    given = [x, weight.packed, weight.scales, weight.zeros, side]
    memory = iter([tensor.flatten() for tensor in given if tensor is not None])
    out = torch.full((20 * 40,), torch.nan, dtype=torch.float16)
    call = call_for(problem, lambda dtype, elements: next(memory, out)[:elements])
    torch_calls.run_of(problem)(call)
    assert_linear(operands.matrix(call.out, 1)[0], x, weight, side, exact=False)
    assert torch_calls.run_of(QuantizedProblem(20, 40, 136, "float16", 4, 32, x_layout="strided")) is None
