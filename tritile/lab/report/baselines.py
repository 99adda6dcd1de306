"""Baselines that tritile is measured against: torch and, on request, torch.compile and Triton's tutorial."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import torch

from tritile.core import of_torch
from tritile.core.views import UNFUSED, Call, GroupedCall, MatmulCall, PermuteCall, QuantizedCall
from tritile.errors import InvalidValueError
from tritile.lab.report import block_baselines, fused_baselines, grouped_baselines, tutorial_baseline
from tritile.tune.measure import timing
from tritile.tune.subject import answers, operands, torch_calls
from tritile.tune.subject.quantized import weight_rows
from tritile.tune.suites import Case

Baseline = Callable[[Call], torch.Tensor]


def _as_a_user_has_them(call: Call) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return a call's inputs (a, b, then the epilogue's tensors or the groups' offsets), and its output."""
    if isinstance(call, GroupedCall):
        return grouped_baselines.inputs(call), grouped_baselines.result(call)
    assert isinstance(call, MatmulCall)
    if call.scales is not None:
        inputs, out = block_baselines.inputs(call), torch_calls.matrices(call)[2][0]
        return [*inputs, *fused_baselines.sides(call)], out
    bare, out = torch_calls.in_one_batch(call)
    return [*bare, *fused_baselines.sides(call)], out


def _product(call: Call) -> Callable[..., torch.Tensor]:
    """Return what a torch user would call: it takes the inputs above and, except for groups, `out=`."""
    if isinstance(call, GroupedCall):
        return grouped_baselines.product(call)
    assert isinstance(call, MatmulCall)
    if call.fused != UNFUSED or call.scales is not None:
        return fused_baselines.product(call)
    return torch_calls.product(call)


def torch_matmul(call: Call) -> None:
    """Multiply as a torch user would, into the call's output."""
    assert isinstance(call, MatmulCall)
    inputs, out = _as_a_user_has_them(call)
    _product(call)(*inputs, out=out)


def torch_linear(call: Call) -> None:
    """Multiply by the unpacked weight with torch, into the call's output.

    The weight is unpacked at the first run, which must come before a capture: see `ready`.
    """
    assert isinstance(call, QuantizedCall)
    x, out = operands.matrix(call.x, 1)[0], operands.matrix(call.out, 1)[0]
    weight = _unpacked(call)
    if call.fused.bias is None:
        torch.matmul(x, weight.t(), out=out)
    else:
        torch.addmm(operands.matrix(call.fused.bias, 1)[0, 0], x, weight.t(), out=out)


_WEIGHTS: Final[dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}  # packed and unpacked, by address


def _unpacked(call: QuantizedCall) -> torch.Tensor:
    address = call.words.data_ptr()
    if address not in _WEIGHTS or _WEIGHTS[address][0] is not call.words:
        _WEIGHTS[address] = (call.words, weight_rows(call, 0, call.out.shape[1]))
    return _WEIGHTS[address][1]


def ready(calls: Sequence[Call]) -> None:
    """Unpack the weights that torch's side of these calls needs, and drop those of other calls.

    A capture may not unpack them.
    """
    _WEIGHTS.clear()
    for call in calls:
        if isinstance(call, QuantizedCall):
            _unpacked(call)


def _into_out(answer: Baseline) -> Callable[[Call], None]:
    """Return a function that copies a baseline's results into the call's output."""

    def run(call: Call) -> None:
        _as_a_user_has_them(call)[1].copy_(answer(call))

    return run


def _kept(answer: Baseline) -> Callable[[Call], None]:
    """Return a baseline that keeps its results, so that each launch of a graph writes to cold memory."""
    made: list[torch.Tensor] = []
    return lambda call: made.append(answer(call))


def torch_grouped(call: Call) -> torch.Tensor:
    """Multiply groups as a torch user would."""
    return _product(call)(*_as_a_user_has_them(call)[0])


_SIDES: Final[dict[str, Callable[[Case], Callable[[Call], None]]]] = {
    "matmul": lambda case: torch_matmul,
    "grouped": lambda case: _into_out(torch_grouped),
    "permute": lambda case: torch_calls.permute(case.dtype, case.shape, case.dims),
    "linear_quantized": lambda case: torch_linear,
}


def torch_side(case: Case) -> Callable[[Call], None]:
    """Return torch's side of a case; it writes into the call's output."""
    return _SIDES[case.op](case)


def torch_timed(case: Case) -> Callable[[Call], None]:
    """Return torch's side as it is timed: without a copy where torch takes no `out`."""
    return _kept(torch_grouped) if case.op == "grouped" else torch_side(case)


def torch_call(call: Call) -> str:
    """Name what torch's side calls where that depends on the operands, else return ""."""
    return block_baselines.way_of(call) if isinstance(call, MatmulCall) and call.scales is not None else ""


def device_copy(call: Call) -> None:
    """Copy as many bytes in their order: the speed limit of a permutation."""
    assert isinstance(call, PermuteCall)
    words = min(call.x.numel(), call.out.numel())
    call.out[:words].copy_(call.x[:words])


def inductor(call: Call) -> Baseline:
    """Return the product by torch.compile in its max-autotune mode; it allocates its results.

    The first call compiles. torch makes no CUDA graph of its own: the measurement captures every side.
    """
    of_torch.print_no_candidates()
    torch.compiler.reset()  # kernels compiled for other cases count towards a limit
    product = _product(call)
    compiled = torch.compile(
        lambda *inputs: product(*inputs), mode="max-autotune-no-cudagraphs", dynamic=False, fullgraph=True
    )
    return lambda call: compiled(*_as_a_user_has_them(call)[0])


def tutorials(call: Call) -> Baseline | None:
    """Return the matmul of Triton's tutorial, tuned in the first call; None for products it cannot make."""
    if not isinstance(call, MatmulCall):
        return None
    tensors = torch_calls.matrices(call)
    # The tutorial's kernel has 32-bit offsets within a matrix.
    wide = max(math.prod(t.shape[1:]) for t in tensors) >= 2**31
    if call.fused != UNFUSED or call.scales is not None or call.dtype not in tutorial_baseline.DTYPES or wide:
        return None
    multiply = tutorial_baseline.tuned(call.a.itemsize)

    def run(call: Call) -> torch.Tensor:
        assert isinstance(call, MatmulCall)
        a, b, out = torch_calls.matrices(call)
        multiply(a, b, out, call.precision)
        return out if call.problem.batch > 1 else out[0]

    return run


ON_REQUEST: Final[dict[str, Callable[[Call], Baseline | None]]] = {
    "inductor": inductor,
    "tutorial": tutorials,
}


def check_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of baselines, each once. Raises InvalidValueError for an unknown one."""
    found = tuple(dict.fromkeys(names))
    for name in found:
        if name not in ON_REQUEST:
            raise InvalidValueError(f"peer {name!r}: wanted one of {', '.join(ON_REQUEST)}")
    return found


def baseline_graph(name: str, calls: list[Call]) -> timing.Graph | None:
    """Capture a baseline over all calls, its first answer checked; return None where it takes no such call.

    Raises TuningError for a wrong answer, and whatever the baseline raises.
    """
    first = calls[0]
    baseline = None if isinstance(first, PermuteCall) else ON_REQUEST[name](first)
    if baseline is None:
        return None
    answers.check(_into_out(baseline), first, every=False)
    return timing.Graph(_kept(baseline), calls)
