"""Every element of an answer is looked at: right ones pass in each type, one wrong one does not."""

import math
import re

import pytest
import torch

from tritile.core.call import call_for
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import GroupedProblem, MatmulProblem, QuantizedProblem
from tritile.errors import TuningError
from tritile.tune.subject import answers, operands
from tritile.tune.subject.operands import with_group_ends

M, N, K = 600, 48, 512
PRODUCTS = [
    ("float16", "float16", "ieee", ""),
    ("bfloat16", "bfloat16", "ieee", ""),
    ("bfloat16", "float32", "ieee", ""),
    ("float8_e4m3fn", "bfloat16", "ieee", ""),
    ("float8_e5m2", "float16", "fast", ""),
    ("float32", "float32", "ieee", ""),
    ("float32", "float32", "tf32", ""),
    ("float64", "float64", "ieee", ""),
    ("int8", "int32", "ieee", ""),
    ("bfloat16", "bfloat16", "ieee", "bias=row gelu"),
    ("float16", "float16", "ieee", "scale_a=column scale_b=row bias=full residual=full weighted silu"),
    ("float32", "float32", "tf32", "bias=row bias_up=row gated silu"),
    ("int8", "bfloat16", "ieee", "scale_a=column scale_b=row"),
]
PROBLEMS = [
    *(MatmulProblem(1, M, N, K, *case[:2], precision=case[2], epilogue=case[3]) for case in PRODUCTS),
    MatmulProblem(70, 30, N, K, "bfloat16", "bfloat16", out_layout="column"),
    GroupedProblem(3, M, N, K, "bfloat16", "bfloat16"),
    QuantizedProblem(M, N, K, "bfloat16", 4, 128, True, bias=True),
]


def answered(problem, monkeypatch):
    """A call on random operands, its result that of float64 rounded once."""
    generator = torch.Generator().manual_seed(7)

    def make(dtype, elements):
        kind = getattr(torch, dtype)
        if kind.is_floating_point:
            return torch.randn(elements, generator=generator).to(kind)
        return torch.randint(-99, 99, (elements,), generator=generator).to(kind)

    call = with_group_ends(call_for(problem, make))
    with monkeypatch.context() as patch:
        patch.setattr(answers, "_wider", lambda dtype: torch.float64)
        patch.setattr(answers, "compare", lambda out, right, bound, place: out.copy_(right))
        call.out.tensor.zero_()
        answers.check_elements(call)
    return call


def outputs(call, monkeypatch):
    """The blocks of a result, and where each begins."""
    found = []
    with monkeypatch.context() as patch:
        patch.setattr(answers, "compare", lambda out, right, bound, place: found.append((out, place)))
        answers.check_elements(call)
    return found


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.label.replace(" ", "_"))
def test_wrong_last_column_element_fails(problem, monkeypatch):
    monkeypatch.setattr(answers, "_AT_ONCE", 200 * (N + K))  # several blocks
    call = answered(problem, monkeypatch)
    answers.answer_error(call)
    out, place = outputs(call, monkeypatch)[-1]
    column = out.reshape(-1, out.shape[-2], out.shape[-1])[-1, :, -1]
    row = int(column.abs().argmax())
    column[row] = 0
    *_, first, last = place
    with pytest.raises(TuningError, match=re.escape(f"{first + row}, {last + out.shape[-1] - 1}): 0")):
        answers.check_elements(call)


@pytest.mark.parametrize("rounds", [True, False], ids=["rounded", "exact"])
def test_weights_rounded_all_or_none(monkeypatch, rounds):
    problem = QuantizedProblem(64, 256, 128, "bfloat16", 8, 128, True)
    call = answered(problem, monkeypatch)
    scale = 1e-2 + 1e-2 * torch.rand(call.scales.tensor.numel(), generator=torch.Generator().manual_seed(8))
    call.scales.tensor.view(-1).copy_(scale)
    right = {
        how: torch.cat([part.right for part in answers._of_weights(call, torch.float64, False, how)])
        for how in (True, False)
    }
    out = operands.matrix(call.out, 1)[0]
    out.copy_(right[rounds])
    answers.check_elements(call)
    out[:8] = right[not rounds][:8]
    with pytest.raises(TuningError, match="wrong answer"):
        answers.check_elements(call)


def test_unsampled_row_is_checked(monkeypatch):
    call = answered(PROBLEMS[1], monkeypatch)
    sampled = operands.sampled(M, torch.device("cpu")).tolist()
    ((out, _),) = outputs(call, monkeypatch)
    row = next(row for row in range(M) if row not in sampled)
    out[0, row, -1] += 10
    answers.answer_error(call, every=False)
    with pytest.raises(TuningError, match=f"1 elements, the first at \\(0, {row}, {N - 1}\\)"):
        answers.answer_error(call)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_is_wrong_anywhere(monkeypatch, value):
    call = answered(PROBLEMS[1], monkeypatch)
    call.out.tensor[-1] = value
    with pytest.raises(TuningError, match="1 elements"):
        answers.check_elements(call)


@pytest.mark.parametrize("where", ["ahead of", "behind"])
@pytest.mark.parametrize("name", ["a", "out"])
@pytest.mark.parametrize("problem", [PROBLEMS[1], PROBLEMS[9]], ids=["floating", "whole"])
def test_element_after_buffer_guarded(problem, name, where, monkeypatch):
    monkeypatch.setattr(
        operands, "random_elements", lambda dtype, n: torch.empty(n, dtype=getattr(torch, dtype))
    )
    call, memory = operands.guarded(problem)
    assert call.problem == problem
    tensor = call.buffers[name].tensor
    tensor.zero_()
    assert memory.is_intact()
    place = tensor.storage_offset() + (-1 if where == "ahead of" else tensor.numel())
    tensor.as_strided((1,), (1,), place).zero_()
    assert not memory.is_intact()


def test_output_poisoned_before_check(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for problem in (PROBLEMS[1], PROBLEMS[8], PermuteProblem.of((64, 32), (1, 64), (32, 1), 2)):
        call = with_group_ends(
            call_for(problem, lambda dtype, n: torch.zeros(n, dtype=getattr(torch, dtype)))
        )
        with pytest.raises(TuningError, match="wrong answer"):
            answers.check(lambda call: None, call)  # zeros would be right


@pytest.mark.parametrize("order", [(0, 2, 1), (2, 1, 0), (1, 2, 0)], ids=str)
def test_permutation_siblings_are_dense(order):
    """Dimensions in the order in which they lay, from the one side and from the other."""
    shape, wide = (40, 200, 1000), (300_000, 1100, 1)
    sizes = [shape[dim] for dim in order]
    out = torch.empty(sizes, device="meta").stride()
    problem = PermuteProblem.of(sizes, [wide[dim] for dim in order], out, 4)
    sibling = operands.ragged(problem)
    assert sibling.shape != problem.shape
    assert set(sibling.spans) == {math.prod(sibling.shape)}


@pytest.mark.parametrize("measured", ["ieee", "tf32"])
@pytest.mark.parametrize("of_all", ["none", "ieee", "tf32"])
@pytest.mark.parametrize("of_cuda", ["none", "ieee", "tf32"])
@pytest.mark.parametrize("own", ["none", "ieee", "tf32"])
def test_products_inherit_torch_precision(cuda_matmul, own, of_cuda, of_all, measured):
    backends = torch.backends
    cuda_matmul.fp32_precision, backends.cudnn.fp32_precision, backends.fp32_precision = own, of_cuda, of_all
    try:
        with answers.torch_fp32(measured):
            assert cuda_matmul.fp32_precision == measured
        assert backends.fp32_precision == of_all
        for later in ("ieee", "tf32"):
            backends.fp32_precision = later
            for_cuda = later if of_cuda == "none" else of_cuda
            assert backends.cudnn.fp32_precision == for_cuda
            assert cuda_matmul.fp32_precision == (for_cuda if own == "none" else own)
        backends.cudnn.fp32_precision = "none"
        assert cuda_matmul.fp32_precision == (later if own == "none" else own)
    finally:
        backends.cudnn.fp32_precision = backends.fp32_precision = "none"
