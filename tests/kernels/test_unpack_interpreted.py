"""The launch that unpacks a quantized weight in memory, and what follows it, in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch

import tritile
from tests.packed import KINDS, assert_linear, weight_of
from tests.reference import frame, guard_intact, name, values
from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.core.views import View
from tritile.families.matmul_tma import family as descriptor
from tritile.families.quantized import unpacked
from tritile.families.work import work_of
from tritile.ops.linear_quantized import described
from tritile.runtime import launch

pytestmark = pytest.mark.interpreted

HALF = (torch.bfloat16, torch.float16)
SIDES = {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 64, "GROUP_M": 1, "PERSISTENT": False, "SUBTILES": 1}
CONFIG = Config.of(4, 4, "unpacked", CONSUMERS=1, **SIDES)
DENSE = Config.of(4, 2, "descriptor", SPLIT_K=1, **SIDES)  # which the interpreter takes
H200 = target_device("nvidia-h200")


def run(step, buffers):
    step.kernel[step.grid](*[launch._bound(value, buffers) for value in step.values])


def unpacked_weight(weight):
    """The workspace as rows, those of padding too, after the first launch; in float32 for bfloat16."""
    n, k = weight.shape
    x, out = torch.zeros(3, k, dtype=weight.dtype), torch.zeros(3, n, dtype=weight.dtype)
    call = described(x, weight, None, out)
    work = work_of(call, CONFIG, H200.processors, False)
    dtype = torch.float32 if weight.dtype == torch.bfloat16 else weight.dtype
    elements = work.scratch["weight"].elements
    memory = torch.full((elements + 64,), float("nan"), dtype=dtype)
    run(work.steps[0], call.buffers | {"weight": memory})
    assert bool(memory[elements:].isnan().all())
    row = -(-k // 64) * 64
    assert elements == -(-n // 16) * 16 * row
    return memory[:elements].view(-1, row)


@pytest.mark.parametrize("dtype", HALF, ids=name)
@pytest.mark.parametrize(("bits", "group", "zeros"), KINDS)
def test_as_the_numbers_stand_for_it_bit_for_bit(bits, group, zeros, dtype):
    weight = weight_of(35, 600, dtype, bits, group, zeros)
    found = unpacked_weight(weight)
    assert torch.equal(found[:35, :600], weight.dequantize().to(found.dtype))
    assert bool(found.isfinite().all())  # to the ends of rows, and the rows that fill up the last 16


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("n", "k"),
    [(1, 1), (16, 64), (17, 65), (31, 127), (32, 128), (5, 191), (16, 192), (33, 256), (2, 257), (48, 513)],
    ids=str,
)
def test_ragged_sizes(bits, n, k):
    for group, zeros in ((32, True), (128, False)):
        weight = weight_of(n, k, torch.float16, bits, group, zeros)
        found = unpacked_weight(weight)
        assert torch.equal(found[:n, :k], weight.dequantize())


def test_numbers_of_every_pattern():
    """All 256 bytes, beside scales from the smallest to the largest, with zero points at both ends."""
    for dtype in HALF:
        numbers = torch.arange(256).repeat(32, 1).float()
        original = (numbers - 128) * torch.logspace(-6, 1.5, 32)[:, None]
        for bits in (4, 8):
            for zeros in (False, True):
                weight = tritile.quantize(original.to(dtype), bits=bits, group_size=64, zero_points=zeros)
                found = unpacked_weight(weight)
                assert torch.equal(found[:32, :256], weight.dequantize().to(found.dtype))


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize(("zeros", "bias"), [(False, False), (False, True), (True, False), (True, True)])
def test_the_launches_find_what_those_before_them_wrote(zeros, bias, aligned):
    """All launches of a call, the dense kernel by descriptors in the place of the one in Gluon."""
    m, n, k = 20, 40, 136
    weight = weight_of(n, k, torch.float16, 4, 32, zeros)
    x = values((m, k if aligned else k + 1), torch.float16)[:, :k]
    side = values((n,), torch.float32, 2) if bias else None
    buffer, out = frame((m, n), torch.float16, "offset")
    call = described(x, weight, side, out)
    parts = unpacked.lowered(call, False)
    work = parts.around(descriptor.work(parts.core, DENSE, 3, False))
    assert len(work.steps) == len(work.scratch) + 1 == (2 if aligned else 3)
    empty = {name: torch.empty(s.elements, dtype=torch.float16) for name, s in work.scratch.items()}
    scratch = {name: memory.fill_(float("nan")) for name, memory in empty.items()}
    for step in work.steps:
        run(step, call.buffers | scratch)
    assert_linear(out, x, weight, side, exact=False)
    assert guard_intact(buffer, out)


def test_x_in_columns_is_read_where_it_lies():
    weight, x = weight_of(40, 64, torch.float16), values((64, 24), torch.float16).t()
    call = described(x, weight, None, torch.zeros(24, 40, dtype=torch.float16))
    assert call.problem.x_layout == "strided"
    work = work_of(call, CONFIG, H200.processors, True)
    assert len(work.steps) == 2
    gaps = replace(call, x=View(x, (12, 64), (2, 24), (), 2), out=replace(call.out, shape=(12, 40)))
    assert len(work_of(gaps, CONFIG, H200.processors, True).steps) == 3
