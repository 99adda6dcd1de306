"""Decide which calls of torch tritile handles: once for all alike, then by one look-up and a launch."""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
import triton

from tritile.core import device as devices
from tritile.core.forgetting import new_memo
from tritile.core.of_torch import DispatchKey, keys_of
from tritile.core.problem import MatmulProblem, PermuteProblem
from tritile.core.settings import current_mode, rules
from tritile.core.views import Call, MatmulCall
from tritile.errors import TritileError, brief
from tritile.in_torch.state import Entry, paused
from tritile.in_torch.tally import BRIEF, Verdict
from tritile.ops.checks import entangled, name_of, overlaps_itself, reach, same_place
from tritile.ops.described import Extras, described
from tritile.ops.dispatch import PLAIN
from tritile.ops.memo import UNTELLABLE, Ready, default_precision, launched, reaches_of, ready_of
from tritile.ops.permute import described as described_copy
from tritile.ops.products import check_gpu
from tritile.ops.run import (
    interpret,
    interpret_product,
    lasting,
    measure_beside_torch,
    on_host,
    planned,
    prepared,
)
from tritile.planning.beside import Judgement, judged, may_be_faster
from tritile.runtime.launch import Launch

DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_OPS: Final = {"mm": "matmul", "bmm": "matmul", "addmm": "addmm", "baddbmm": "baddbmm"}
_FORMATS: Final = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
_MOST: Final = 1 << 16  # decisions remembered; beyond these, all are decided again
_OWN: Final = "a subclass of torch.Tensor with a __torch_dispatch__ of its own"
_POLICY: Final = Judgement(True, "policy always")

# Limits of brief calls, which take torch's host longer than the GPU.
FEW_ROWS: Final = 16
SMALL: Final = 1 << 24  # elements of the second factor: a GPU reads 32 MiB of 16-bit weights in under 10 us
LITTLE: Final = 1 << 18  # bytes of a copy's source

_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing


class Known(NamedTuple):
    """Hold the decision about calls that are alike.

    `ready` is how to launch them, None for calls that are passed through or in host memory. `reaches` are the
    lengths of their tensors in bytes, out being the last, 0 where one is not read.
    """

    verdict: Verdict
    ready: Ready | None = None
    reaches: tuple[int, ...] = ()


_memo: dict[tuple[Any, ...], Known] = new_memo()


def _left(call: str, problem: str, why: str) -> Known:
    return Known(Verdict(call, problem, False, why))


_BARE: Final = {call: _left(call, "", "a tensor without memory of its own") for call in (*_OPS, "clone")}
_APART: Final = {call: _left(call, "", "out shares memory with an input") for call in _OPS}


def _seen(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what of a tensor decides about a call. Raise RuntimeError where it has no dense memory."""
    address = tensor.data_ptr()
    if not address >> 40 and address == tensor.storage_offset() * tensor.itemsize and tensor.numel():
        raise RuntimeError("a storage that was resized to nothing")  # its address is the offset
    return (
        type(tensor),
        tensor.dtype,
        tensor.get_device(),
        address % 16,
        tensor.shape,
        tensor.stride(),
        tensor.is_neg(),
        tensor.is_conj(),
    )


def _glances(entry: Entry) -> bool:
    """Tell whether brief calls are passed through undecided: not where all calls are handled, or measured."""
    return entry.policy == "expected" and current_mode() != "tune"


def brief_product(call: str, entry: Entry, tensors: Sequence[torch.Tensor]) -> bool:
    """Tell whether a product is passed through as brief: few rows by a small matrix, outside a capture.

    Decoding makes hundreds of these in a row, each of which takes torch's host longer than the GPU. Asked
    where Python decides every time. Of calls that C++ can learn, only batches are passed through so: the
    sizes of attention grow with every token, and planning each takes longer than multiplying.
    """
    a, b = tensors[-2:]
    if not _glances(entry) or a.ndim < 2 or a.shape[-2] > FEW_ROWS or b.numel() > SMALL:
        return False  # torch refuses one dimension itself
    if a.is_cuda and _capturing():
        return False
    entry.report.add(BRIEF[call])
    return True


def brief_copy(entry: Entry, x: torch.Tensor) -> bool:
    """Tell whether a copy is passed through as brief: a small one, outside a capture."""
    if not _glances(entry) or x.nbytes > LITTLE or (x.is_cuda and _capturing()):
        return False
    entry.report.add(BRIEF["clone"])
    return True


Learn = Callable[[Verdict, Ready | None], None]


def product(
    call: str, entry: Entry, tensors: Sequence[torch.Tensor], words: Any, learn: Learn | None = None
) -> torch.Tensor | None:
    """Return the result of torch's `mm`, `bmm`, `addmm` or `baddbmm`; None where it is passed through.

    `tensors` are the positional arguments, `words` the others that were given: beta, alpha, out. `learn`,
    where given, is told the decision, so that C++ handles calls alike.
    """
    out, beta, alpha = words.get("out"), words.get("beta", 1), words.get("alpha", 1)
    try:
        setting = default_precision() if tensors[-1].dtype is torch.float32 else "ieee"
        quick = learn is not None
        modes = (call, entry.policy, setting, rules(), quick, tensors[-1].is_cuda and _capturing())
        weights = (beta, type(beta), alpha, type(alpha))
        key = (modes, weights, None if out is None else _seen(out), *map(_seen, tensors))
        known = _memo.get(key)
    except UNTELLABLE:
        entry.report.add(_BARE[call].verdict)
        return None
    if known is None:
        known = _kept(key, _product(call, entry.policy, tensors, (beta, alpha), out, setting, quick))
    if learn is not None and (known.ready is not None or not known.verdict.taken):
        learn(known.verdict, known.ready)
    if out is not None and known.verdict.taken and _clashes(tensors, out, known.reaches):
        known = _APART[call]
    entry.report.add(known.verdict)
    if not known.verdict.taken:
        return None
    if known.ready is None:
        return _interpreted(tensors, (beta, alpha), out, setting)
    return launched(known.ready, tensors, out)


def copy(
    entry: Entry, x: torch.Tensor, form: torch.memory_format, learn: Learn | None = None
) -> torch.Tensor | None:
    """Return x in memory of this format, as torch's `clone` does; None where it is passed through."""
    try:
        quick = learn is not None
        modes = ("clone", entry.policy, rules(), quick, x.is_cuda and _capturing())
        key = (modes, _seen(x), form)
        known = _memo.get(key)
    except UNTELLABLE:
        entry.report.add(_BARE["clone"].verdict)
        return None
    if known is None:
        known = _kept(key, _copy(entry.policy, x, form, quick))
    if learn is not None and (known.ready is not None or not known.verdict.taken):
        learn(known.verdict, known.ready)
    entry.report.add(known.verdict)
    if not known.verdict.taken:
        return None
    if known.ready is not None:
        return launched(known.ready, (x,), None)
    with paused():
        out = torch.empty_like(x.detach(), memory_format=form)
        dims = _outermost_first(out)
        interpret(described_copy(x.detach().permute(dims), out.permute(dims), range(x.ndim)))
    return out


def _kept(key: tuple[Any, ...], known: Known) -> Known:
    if lasting():
        if len(_memo) >= _MOST:
            _memo.clear()
        _memo[key] = known
    return known


def _clashes(tensors: Sequence[torch.Tensor], out: torch.Tensor, reaches: tuple[int, ...]) -> bool:
    """Tell whether out shares memory with an input that is read. It may be exactly what is added."""
    *of_tensors, of_out = reaches
    factors = len(tensors) - 2
    return any(
        far and entangled(tensor, far, out, of_out) and not (i < factors and same_place(tensor, out))
        for i, (tensor, far) in enumerate(zip(tensors, of_tensors, strict=True))
    )


def _interpreted(
    tensors: Sequence[torch.Tensor], weights: tuple[Any, Any], out: torch.Tensor | None, precision: str
) -> torch.Tensor:
    """Compute a product in the interpreter."""
    if out is None:
        out = tensors[-1].new_empty(_result_shape(tensors))
    with paused():
        interpret_product(
            lambda read, *rest: _described([read(tensor.detach()) for tensor in tensors], weights, *rest),
            tensors,
            out.detach(),
            precision,
        )
    return out


def _described(
    tensors: Sequence[torch.Tensor], weights: tuple[Any, Any], out: torch.Tensor, precision: str
) -> MatmulCall:
    *added, a, b = tensors
    beta, alpha = map(float, weights)
    return described(a, b, out, precision, Extras(bias=added[0] if added else None, alpha=alpha, beta=beta))


def _result_shape(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
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
    if not fits or not all(_broadcasts(t, _result_shape(tensors)) for t in added):
        return "shapes that do not fit"
    if not (a.numel() and b.numel()):
        return "no elements"
    if not all(type(weight) in (int, float) for weight in weights):
        return "alpha or beta is not a real number"
    if out is not None and (tuple(out.shape) != _result_shape(tensors) or overlaps_itself(out)):
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
    if current_mode() == "tune" and not _capturing() and may_be_faster(problem):
        planned(problem, index)
        measure_beside_torch(problem, index)
    return judged(problem, device, lambda: planned(problem, index))


def _decided(name: str, policy: str, call: Call, ready: Callable[[], Ready], quick: bool) -> Known:
    """Decide about a described call; compile one that is handled. `quick`: calls like it skip Python."""
    label = call.problem.label
    found = _judged(policy, call)
    if not found.take:
        return _left(name, label, found.why)
    if found.captured and not (quick or _capturing()):
        return _left(name, label, "so brief that host time dominates: handled only where a graph is captured")
    return Known(Verdict(name, label, True, found.why), None if on_host(call.tensors[0]) else ready())


def _product(
    name: str,
    policy: str,
    tensors: Sequence[torch.Tensor],
    weights: tuple[Any, Any],
    out: Any,
    precision: str,
    quick: bool,
) -> Known:
    """Decide about products that are alike; compile those that are handled."""
    why = _unfit(name, tensors, weights, out)
    if why:
        return _left(name, " by ".join(str(tuple(t.shape)) for t in tensors[-2:]), why)
    a, b = tensors[-2:]
    with paused():
        try:
            check_gpu(name, a)
            result = a.new_empty(_result_shape(tensors)) if out is None else out
            call = _described(tensors, weights, result, precision)
            known = _decided(
                name,
                policy,
                call,
                lambda: ready_of(_OPS[name], prepared(call), call, tensors, result),
                quick,
            )
            unread = tensors[0] if len(tensors) > 2 and weights[0] == 0 else None
            return known._replace(reaches=(*reaches_of(tensors, unread), reach(result)))
        except TritileError as error:
            return _left(name, f"{tuple(a.shape)} by {tuple(b.shape)}", brief(error))


def _outermost_first(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(sorted(range(tensor.ndim), key=lambda dim: tensor.stride()[dim], reverse=True))


def _copy(policy: str, x: torch.Tensor, form: torch.memory_format, quick: bool) -> Known:
    """Decide about copies that are alike; compile those that are handled."""
    if _dispatches(x):
        return _left("clone", str(tuple(x.shape)), _OWN)
    if x.layout != torch.strided or x.is_quantized:
        return _left("clone", str(tuple(x.shape)), "not a dense tensor")
    if form not in _FORMATS or x.is_neg() or x.is_conj():
        why = "lazily negated or conjugated, or an unsupported memory format"
        return _left("clone", str(tuple(x.shape)), why)
    if not x.numel() or x.is_contiguous(memory_format=form):
        return _left("clone", str(tuple(x.shape)), "the order of dimensions stays the same")
    with paused():
        try:
            out = torch.empty_like(x.detach(), memory_format=form)
            dims = _outermost_first(out)
            call = described_copy(x.permute(dims), out.permute(dims), range(x.ndim))

            def ready() -> Ready:
                launch = prepared(call)
                if type(launch) is not Launch:
                    raise TritileError("the copy needs more than one launch")
                return Ready.of(launch, (0, 1), (0, 0), out)

            return _decided("clone", policy, call, ready, quick)
        except TritileError as error:
            return _left("clone", str(tuple(x.shape)), brief(error))
