"""Whom tritile is measured against: torch, and on request torch.compile and Triton's tutorial."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import torch

from tritile.core import of_torch
from tritile.core.views import UNFUSED, Call, GroupedCall, MatmulCall, PermuteCall, QuantizedCall
from tritile.errors import InvalidValueError
from tritile.lab.report import block_peers, fused_peers, grouped_peers, tutorial
from tritile.tune.measure import timing
from tritile.tune.subject import answers, operands, torch_calls
from tritile.tune.subject.quantized import weight_rows
from tritile.tune.suites import Case

Peer = Callable[[Call], torch.Tensor]


def _as_a_user_has_them(call: Call) -> tuple[list[torch.Tensor], torch.Tensor]:
    """a, b and the epilogue's tensors, or those of groups, and the output."""
    if isinstance(call, GroupedCall):
        return grouped_peers.inputs(call), grouped_peers.result(call)
    assert isinstance(call, MatmulCall)
    if call.scales is not None:
        inputs, out = block_peers.inputs(call), torch_calls.matrices(call)[2][0]
        return [*inputs, *fused_peers.sides(call)], out
    bare, out = torch_calls.in_one_batch(call)
    return [*bare, *fused_peers.sides(call)], out


def _product(call: Call) -> Callable[..., torch.Tensor]:
    """What a torch user would call for this product, with a, b, the epilogue's tensors and `out=` or none.

    Of groups, without `out`.
    """
    if isinstance(call, GroupedCall):
        return grouped_peers.product(call)
    assert isinstance(call, MatmulCall)
    if call.fused != UNFUSED or call.scales is not None:
        return fused_peers.product(call)
    return torch_calls.product(call)


def torch_matmul(call: Call) -> None:
    """What a torch user would call for this product, into the same output."""
    assert isinstance(call, MatmulCall)
    inputs, out = _as_a_user_has_them(call)
    _product(call)(*inputs, out=out)


def torch_linear(call: Call) -> None:
    """torch's product with the weight as it was before it was packed, into the same output.

    The weight is unpacked the first time that its call is met, which must be before a capture: see `ready`.
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
    """Make what torch's side of these calls needs, which a capture may not; drop what was made for others."""
    _WEIGHTS.clear()
    for call in calls:
        if isinstance(call, QuantizedCall):
            _unpacked(call)


def _into_out(answer: Peer) -> Callable[[Call], None]:
    """What copies the results that a peer makes to where a call's own go."""

    def run(call: Call) -> None:
        _as_a_user_has_them(call)[1].copy_(answer(call))

    return run


def _kept(answer: Peer) -> Callable[[Call], None]:
    """The peer as it is timed: its results are kept, so that in a graph each has memory of its own, cold."""
    made: list[torch.Tensor] = []
    return lambda call: made.append(answer(call))


def torch_grouped(call: Call) -> torch.Tensor:
    """What a torch user would call for products of groups."""
    return _product(call)(*_as_a_user_has_them(call)[0])


_SIDES: Final[dict[str, Callable[[Case], Callable[[Call], None]]]] = {
    "matmul": lambda case: torch_matmul,
    "grouped": lambda case: _into_out(torch_grouped),
    "permute": lambda case: torch_calls.permute(case.dtype, case.shape, case.dims),
    "linear_quantized": lambda case: torch_linear,
}


def torch_side(case: Case) -> Callable[[Call], None]:
    """What a torch user would call for this case, into the same output."""
    return _SIDES[case.op](case)


def torch_timed(case: Case) -> Callable[[Call], None]:
    """The same as it is timed: without the copy where torch takes no output."""
    return _kept(torch_grouped) if case.op == "grouped" else torch_side(case)


def torch_call(call: Call) -> str:
    """What of torch that is, where it depends on what torch takes; else ""."""
    return block_peers.way_of(call) if isinstance(call, MatmulCall) and call.scales is not None else ""


def device_copy(call: Call) -> None:
    """A plain copy of the same bytes in their order: the speed limit of a permutation."""
    assert isinstance(call, PermuteCall)
    words = min(call.x.numel(), call.out.numel())
    call.out[:words].copy_(call.x[:words])


def inductor(call: Call) -> Peer:
    """The product by torch.compile in its max-autotune mode; it allocates its results.

    CUDA graphs are left to the measurement, which puts every side into one. The first call compiles.
    """
    of_torch.print_no_candidates()  # for every case
    torch.compiler.reset()  # what was compiled for other cases counts towards a limit
    product = _product(call)
    compiled = torch.compile(
        lambda *inputs: product(*inputs), mode="max-autotune-no-cudagraphs", dynamic=False, fullgraph=True
    )
    return lambda call: compiled(*_as_a_user_has_them(call)[0])


def tutorials(call: Call) -> Peer | None:
    """The kernel of Triton's tutorial, tuned in the first call; None for products that it does not take."""
    if not isinstance(call, MatmulCall):
        return None
    tensors = torch_calls.matrices(call)
    # Its offsets within a matrix have 32 bits.
    wide = max(math.prod(t.shape[1:]) for t in tensors) >= 2**31
    if call.fused != UNFUSED or call.scales is not None or call.dtype not in tutorial.DTYPES or wide:
        return None
    multiply = tutorial.tuned(call.a.itemsize)

    def run(call: Call) -> torch.Tensor:
        assert isinstance(call, MatmulCall)
        a, b, out = torch_calls.matrices(call)
        multiply(a, b, out, call.precision)
        return out if call.problem.batch > 1 else out[0]

    return run


PEERS: Final[dict[str, Callable[[Call], Peer | None]]] = {"inductor": inductor, "tutorial": tutorials}


def check_names(names: Iterable[str]) -> tuple[str, ...]:
    """These names of peers, each once. Raises InvalidValueError for one that is none."""
    found = tuple(dict.fromkeys(names))
    for name in found:
        if name not in PEERS:
            raise InvalidValueError(f"peer {name!r}: wanted one of {', '.join(PEERS)}")
    return found


def peer_graph(name: str, calls: list[Call]) -> timing.Graph | None:
    """A graph of this peer over all calls, its answer to the first checked; None where it takes no such call.

    Raises TuningError for a wrong answer, and whatever the peer raises.
    """
    first = calls[0]
    peer = None if isinstance(first, PermuteCall) else PEERS[name](first)
    if peer is None:
        return None
    answers.check(_into_out(peer), first, every=False)
    return timing.Graph(_kept(peer), calls)
