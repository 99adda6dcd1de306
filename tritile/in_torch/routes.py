"""Calls of torch made by tritile, or not: decided once for all alike, then one look-up and a launch."""

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
from tritile.ops.checks import entangled, overlaps_itself, reach, same_place
from tritile.ops.described import Extras, described
from tritile.ops.dispatch import PLAIN
from tritile.ops.matmul import check_gpu
from tritile.ops.permute import described as described_copy
from tritile.ops.recall import UNTELLABLE, Ready, default_precision, launched, reaches_of, ready_of
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
_MOST: Final = 1 << 16  # decisions remembered; a program with more kinds of calls decides them again
_OWN: Final = "a subclass of torch.Tensor that says itself what operations do"
_POLICY: Final = Judgement(True, "policy always")

FEW_ROWS: Final = 16  # of a product by a matrix of
SMALL: Final = 1 << 24  # elements at the most, whose 32 MiB of 16-bit weights take a GPU under 10 us to read
LITTLE: Final = 1 << 18  # bytes of a copy: half of what is moved at the least

_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing


class Known(NamedTuple):
    """What becomes of calls alike.

    `ready` is how they are launched, None where left and in host memory; `reaches` how far their tensors, out
    being the last, reach in bytes: 0 where one is not read.
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
    """What of a tensor decides what becomes of it. Raises RuntimeError where it has no dense memory."""
    address = tensor.data_ptr()
    if not address >> 40 and address == tensor.storage_offset() * tensor.itemsize and tensor.numel():
        raise RuntimeError("a storage that was resized to nothing")  # where torch counts from address 0
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
    """Tell whether calls may be left at a glance: none is where all are taken, or measured."""
    return entry.policy == "expected" and current_mode() != "tune"


def brief_product(call: str, entry: Entry, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a product is left at a glance: one of few rows by a small matrix, outside of a capture.

    Decoding makes hundreds of these in a row, each of which takes torch's host longer than the GPU. Asked
    where Python decides every time; of calls that C++ can learn only batches are, as attention makes them
    while its sizes grow with every token: to plan them would take longer than they do.
    """
    a, b = tensors[-2:]
    if not _glances(entry) or a.ndim < 2 or a.shape[-2] > FEW_ROWS or b.numel() > SMALL:
        return False  # of one dimension too, which torch refuses itself
    if a.is_cuda and _capturing():
        return False
    entry.report.add(BRIEF[call])
    return True


def brief_copy(entry: Entry, x: torch.Tensor) -> bool:
    """Whether a copy is left at a glance: a small one, outside of a capture."""
    if not _glances(entry) or x.nbytes > LITTLE or (x.is_cuda and _capturing()):
        return False
    entry.report.add(BRIEF["clone"])
    return True


Learn = Callable[[Verdict, Ready | None], None]


def product(
    call: str, entry: Entry, tensors: Sequence[torch.Tensor], words: Any, learn: Learn | None = None
) -> torch.Tensor | None:
    """The result of a call of torch's `mm`, `bmm`, `addmm` or `baddbmm`; None where it is left to torch.

    `tensors` are its positional arguments, `words` the others that it was given: beta, alpha, out. `learn`,
    if there is one, is told what becomes of calls alike, which then take the host less than torch's.
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
    """x in memory of this format, as torch's `clone` makes it; None where it is left to torch."""
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
    """Whether out shares memory with what is read, and does not lie just where what is added does."""
    *of_tensors, of_out = reaches
    factors = len(tensors) - 2
    return any(
        far and entangled(tensor, far, out, of_out) and not (i < factors and same_place(tensor, out))
        for i, (tensor, far) in enumerate(zip(tensors, of_tensors, strict=True))
    )


def _interpreted(
    tensors: Sequence[torch.Tensor], weights: tuple[Any, Any], out: torch.Tensor | None, precision: str
) -> torch.Tensor:
    """Made in the interpreter."""
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
    """Why a product is none of tritile's, whatever its sizes; "" for one that is."""
    *added, a, b = tensors
    every = tensors if out is None else (*tensors, out)
    if any(_dispatches(tensor) for tensor in every):
        return _OWN
    if a.dtype not in DTYPES:
        return f"{str(a.dtype).removeprefix('torch.')} is torch's"
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
        return "alpha or beta is no real number"
    if out is not None and (tuple(out.shape) != _result_shape(tensors) or overlaps_itself(out)):
        return "out is to be resized, or overlaps itself"
    return ""


def _dispatches(tensor: torch.Tensor) -> bool:
    """Whether its class has a `__torch_dispatch__`, by which an operation is what that says."""
    return type(tensor) not in PLAIN and keys_of(tensor).has(DispatchKey.Python)


def _broadcasts(tensor: torch.Tensor, shape: tuple[int, ...]) -> bool:
    behind = shape[len(shape) - tensor.ndim :]
    return tensor.ndim <= len(shape) and all(
        own in (1, wanted) for own, wanted in zip(tensor.shape, behind, strict=True)
    )


def _judged(policy: str, call: Call) -> Judgement:
    """What the policy says of a call that tritile can make."""
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
    """Decide of a described call; one that is taken is compiled. `quick`: calls like it skip Python."""
    label = call.problem.label
    found = _judged(policy, call)
    if not found.take:
        return _left(name, label, found.why)
    if found.captured and not (quick or _capturing()):
        return _left(name, label, "so short that the host's time decides: taken where a graph is captured")
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
    """Decide of products alike, and compile what is taken."""
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
    """Decide of copies alike, and compile what is taken."""
    if _dispatches(x):
        return _left("clone", str(tuple(x.shape)), _OWN)
    if x.layout != torch.strided or x.is_quantized:
        return _left("clone", str(tuple(x.shape)), "no dense tensor")
    if form not in _FORMATS or x.is_neg() or x.is_conj():
        return _left("clone", str(tuple(x.shape)), "lazily negated or conjugated, or of a format of its own")
    if not x.numel() or x.is_contiguous(memory_format=form):
        return _left("clone", str(tuple(x.shape)), "no dimension changes its place")
    with paused():
        try:
            out = torch.empty_like(x.detach(), memory_format=form)
            dims = _outermost_first(out)
            call = described_copy(x.permute(dims), out.permute(dims), range(x.ndim))

            def ready() -> Ready:
                launch = prepared(call)
                if type(launch) is not Launch:
                    raise TritileError("more than one launch counts")
                return Ready.of(launch, (0, 1), (0, 0), out)

            return _decided("clone", policy, call, ready, quick)
        except TritileError as error:
            return _left("clone", str(tuple(x.shape)), brief(error))
