"""Decide whether tritile handles a call of torch that is met for the first time."""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
import triton

from tritile.core import device as devices
from tritile.core.of_torch import DispatchKey, keys_of
from tritile.core.problem import MatmulProblem, PermuteProblem
from tritile.core.settings import current_mode
from tritile.core.views import Call, MatmulCall
from tritile.errors import TritileError, brief
from tritile.in_torch.state import paused
from tritile.in_torch.tally import Verdict
from tritile.ops.checks import name_of, overlaps_itself, reach
from tritile.ops.described import Extras, described
from tritile.ops.dispatch import PLAIN
from tritile.ops.memo import Ready, reaches_of, ready_of
from tritile.ops.permute import described as described_copy
from tritile.ops.products import check_gpu, unset_precision
from tritile.ops.run import measure_beside_torch, on_host, planned, prepared
from tritile.planning.beside import Judgement, judged, may_be_faster
from tritile.runtime.launch import Launch

DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OPS: Final = {"mm": "matmul", "bmm": "matmul", "addmm": "addmm", "baddbmm": "baddbmm"}
_FORMATS: Final = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
_OWN: Final = "a subclass of torch.Tensor with a __torch_dispatch__ of its own"
_POLICY: Final = Judgement(True, "policy always")

capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing


class Known(NamedTuple):
    """Hold the decision about calls that are alike.

    `ready` is how to launch them, None for calls that are passed through or in host memory. `reaches` are the
    lengths of their tensors in bytes, out being the last, 0 where one is not read; none without an out.
    """

    verdict: Verdict
    ready: Ready | None = None
    reaches: tuple[int, ...] = ()


def passed_through(call: str, problem: str, why: str) -> Known:
    """Return the decision that calls are passed through to torch."""
    return Known(Verdict(call, problem, False, why))


def describe_product(
    tensors: Sequence[torch.Tensor], weights: tuple[Any, Any], out: torch.Tensor, precision: str
) -> MatmulCall:
    """Return the call of a product, whose tensors are as torch's operator takes them."""
    *added, a, b = tensors
    beta, alpha = map(float, weights)
    return described(a, b, out, precision, Extras(bias=added[0] if added else None, alpha=alpha, beta=beta))


def result_shape(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return the shape of a product."""
    return (*tensors[-2].shape[:-1], tensors[-1].shape[-1])


def _unfit(
    call: str, tensors: Sequence[torch.Tensor], weights: tuple[Any, Any], out: torch.Tensor | None
) -> str:
    """Return why tritile does not support a product, whatever its sizes; "" where it does."""
    *added, a, b = tensors
    every = tensors if out is None else (*tensors, out)
    if any(_dispatches(tensor) for tensor in every):
        return _OWN
    if a.dtype not in DTYPES:
        return f"{name_of(a.dtype)} is not supported"
    if any((t.dtype, t.device, t.layout) != (a.dtype, a.device, torch.strided) for t in every):
        return "several dtypes, devices or layouts"
    if any(t.is_neg() or t.is_conj() for t in every):
        return "lazily negated or conjugated"
    rank = 3 if call in ("bmm", "baddbmm") else 2
    fits = a.ndim == b.ndim == rank and a.shape[:-2] == b.shape[:-2] and a.shape[-1] == b.shape[-2]
    if not fits or not all(_broadcasts(t, result_shape(tensors)) for t in added):
        return "shapes that do not fit"
    if not (a.numel() and b.numel()):
        return "no elements"
    if not all(type(weight) in (int, float) for weight in weights):
        return "alpha or beta is not a real number"
    if weights[1] == 0:
        return "alpha is 0: there is nothing to multiply"
    if out is not None and (tuple(out.shape) != result_shape(tensors) or overlaps_itself(out)):
        return "out needs to be resized, or overlaps itself"
    return ""


def _dispatches(tensor: torch.Tensor) -> bool:
    """Tell whether the tensor's class has a `__torch_dispatch__`, which defines its operations."""
    return type(tensor) not in PLAIN and keys_of(tensor).has(DispatchKey.Python)


def _broadcasts(tensor: torch.Tensor, shape: tuple[int, ...]) -> bool:
    behind = shape[len(shape) - tensor.ndim :]
    return tensor.ndim <= len(shape) and all(
        own in (1, wanted) for own, wanted in zip(tensor.shape, behind, strict=True)
    )


def _judged(policy: str, call: Call) -> Judgement:
    """Return what the policy decides about a call that tritile supports."""
    problem = call.problem
    if policy == "always":
        return _POLICY
    if call.tensors[0].device.type != "cuda" or triton.knobs.runtime.interpret:
        return Judgement(False, "in host memory, where kernels are interpreted")
    index = call.tensors[0].device.index
    device = devices.gpu(index)
    assert isinstance(problem, MatmulProblem | PermuteProblem)
    if current_mode() == "tune" and not capturing() and may_be_faster(problem):
        planned(problem, index)
        measure_beside_torch(problem, index)
    return judged(problem, device, lambda: planned(problem, index))


def _decide(
    name: str,
    policy: str,
    shown: str,
    unfit: str,
    quick: bool,
    describe: Callable[[], tuple[Call, Callable[[], Ready]]],
) -> Known:
    """Decide about calls that are alike; compile those that are handled.

    `shown` stands for their problem where none is described. `unfit` says why tritile does not support them,
    "" where it does. `quick`: calls like them skip Python. `describe` returns the call, and what prepares it.
    """
    if unfit:
        return passed_through(name, shown, unfit)
    with paused():
        try:
            call, ready = describe()
            label, found = call.problem.label, _judged(policy, call)
            if not found.take:
                return passed_through(name, label, found.why)
            if found.captured and not (quick or capturing()):
                return passed_through(
                    name, label, "host time dominates: handled only where a graph is captured"
                )
            return Known(Verdict(name, label, True, found.why), None if on_host(call.tensors[0]) else ready())
        except TritileError as error:
            return passed_through(name, shown, brief(error))


def decide_product(
    name: str,
    policy: str,
    tensors: Sequence[torch.Tensor],
    weights: tuple[Any, Any],
    out: Any,
    precision: str,
    quick: bool,
) -> Known:
    """Decide about products that are alike; compile those that are handled."""
    a, b = tensors[-2:]

    def describe() -> tuple[Call, Callable[[], Ready]]:
        check_gpu(name, a)
        result = a.new_empty(result_shape(tensors)) if out is None else out
        how = unset_precision(a, b) if precision == "none" else precision
        call = describe_product(tensors, weights, result, how)
        return call, lambda: ready_of(OPS[name], prepared(call), call, tensors, result)

    shown, unfit = f"{tuple(a.shape)} by {tuple(b.shape)}", _unfit(name, tensors, weights, out)
    known = _decide(name, policy, shown, unfit, quick, describe)
    if out is None or not known.verdict.taken:
        return known
    unread = tensors[0] if len(tensors) > 2 and weights[0] == 0 else None
    return known._replace(reaches=(*reaches_of(tensors, unread), reach(out)))


def outermost_first(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions in the order of their strides, the longest first."""
    return tuple(sorted(range(tensor.ndim), key=lambda dim: tensor.stride()[dim], reverse=True))


def _unfit_copy(x: torch.Tensor, form: torch.memory_format) -> str:
    """Return why tritile does not support a copy, whatever its sizes; "" where it does."""
    if _dispatches(x):
        return _OWN
    if x.layout != torch.strided or x.is_quantized:
        return "not a dense tensor"
    if form not in _FORMATS or x.is_neg() or x.is_conj():
        return "lazily negated or conjugated, or an unsupported memory format"
    if not x.numel() or x.is_contiguous(memory_format=form):
        return "the order of dimensions stays the same"
    return ""


def decide_copy(policy: str, x: torch.Tensor, form: torch.memory_format, quick: bool) -> Known:
    """Decide about copies that are alike; compile those that are handled."""

    def describe() -> tuple[Call, Callable[[], Ready]]:
        out = torch.empty_like(x.detach(), memory_format=form)
        dims = outermost_first(out)
        call = described_copy(x.permute(dims), out.permute(dims), range(x.ndim))

        def ready() -> Ready:
            launch = prepared(call)
            if type(launch) is not Launch:
                raise TritileError("the copy needs more than one launch")
            return Ready.of(launch, (0, 1), (x,), out)

        return call, ready

    return _decide("clone", policy, str(tuple(x.shape)), _unfit_copy(x, form), quick, describe)
