"""Remember prepared calls: what tells one from another, and how it is launched.

A call that was prepared before costs one look-up and a launch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Final

import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling

from tritile.core.forgetting import new_memo
from tritile.core.of_torch import alike, forward_level, fp32_precision
from tritile.core.problem import TURNED
from tritile.core.settings import rules
from tritile.core.views import Call
from tritile.errors import OverlapError
from tritile.ops.checks import overlap, reach, same_memory
from tritile.ops.run import mark_written, may_be_kept, new_output
from tritile.ops.signatures import TENSORS
from tritile.runtime.launch import Launch, SplitLaunch

_ADDED: Final = ("bias", "residual", "bias_up")  # an element is read just before out's is written
# The place of the first operand of each product, None for other operations.
_FIRST: Final = {
    op: next((i for i, (role, _) in enumerate(each) if role == "a"), None) for op, each in TENSORS.items()
}
_TRANSPOSED: Final = {"a": "b", "b": "a", **TURNED}
IN_FP32: Final = frozenset({torch.float32, torch.complex64})  # multiplied in the precision of torch's setting

_COMPLEX: Final = frozenset({torch.complex32, torch.complex64, torch.complex128})

Tensors = Sequence[Any]
Addresses = list[Any]  # an int, or None
Key = tuple[Any, ...]


def addresses_of(*tensors: torch.Tensor | None) -> Addresses:
    """Return where each tensor begins, None for None."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


@dataclass(frozen=True, slots=True)
class Ready:
    """Hold the launch of a prepared call and what it needs besides addresses.

    `order`: indices into the caller's tensors, out being the last, in the order in which the launch takes
    them. `reaches`: the length in bytes of each of the caller's tensors, 0 for one that is not read or
    begins where out does. `read`: the index and reach of those that are. `pick`: takes the addresses of
    `order` out of all.
    """

    launch: Launch | SplitLaunch
    order: tuple[int, ...]
    reaches: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    read: tuple[tuple[int, int], ...]
    pick: Callable[[Sequence[Any]], tuple[int, ...]]


# Key: the operation, its arguments that are not tensors, the settings in force, what of each tensor decides
# how a call is launched, out last, and which tensor begins where out does.
CALLS: Final[dict[Key, Ready]] = new_memo()
# Calls that torch need not see, each family's latest first: the test of their tensors, what takes these out
# of all, pairs of places with one tensor, addresses modulo 16, the first tensor that begins where out does,
# torch's setting where it counts, and the launch by the addresses of the tensors tested and of out.
_LEARNT: Final[dict[Key, tuple[Any, ...]]] = new_memo()
_MOST: Final = 8
NEVER_PREPARED: Final = (RuntimeError, AttributeError, TypeError)  # raised by what is never prepared


def default_precision() -> str:
    """Return what torch's own setting asks for in fp32: "ieee", "tf32", or "none" where nobody set it."""
    if fp32_precision is None:  # the other way saves a microsecond
        return torch.backends.cuda.matmul.fp32_precision
    return fp32_precision("cuda", "matmul")


def look_up(op: str, tensors: Tensors, out: Any, options: Key) -> tuple[Key | None, Ready | None, Addresses]:
    """Return a call's key, the launch that was prepared for it, and the addresses of its tensors, out last.

    None for a key where an argument is not a tensor or has no dense memory, and for what was not prepared.
    `options` are all arguments that are not tensors.
    """
    addresses: Addresses = []
    try:
        first = _FIRST[op]
        setting = default_precision() if first is not None and tensors[first].dtype in IN_FP32 else None
        parts: list[Any] = [op, options, setting, rules()]
        for tensor in (*tensors, out):
            if tensor is None:
                parts.append(None)
                addresses.append(None)
                continue
            at, dtype = tensor.data_ptr(), tensor.dtype
            conjugated = dtype in _COMPLEX and tensor.is_conj()
            size, device = tensor.shape, tensor.get_device()
            parts.append((size, tensor.stride(), dtype, device, at % 16, tensor.is_neg(), conjugated))
            addresses.append(at)
        if out is not None:
            parts.append(addresses.index(at))
        key = tuple(parts)
        return key, CALLS.get(key), addresses
    except NEVER_PREPARED:
        return None, None, addresses


def check_out_apart(op: str, out: torch.Tensor, tensors: Tensors, reaches: Sequence[int]) -> None:
    """Raise OverlapError where out overlaps an input. It may be exactly a tensor that is added.

    A tensor with a reach of 0 bytes is not read.
    """
    for (role, name), tensor, far in zip(TENSORS[op], tensors, reaches, strict=False):
        if far and overlap(out, tensor) and not (role in _ADDED and same_memory(out, tensor)):
            allowed = f", or exactly {name}'s" if role in _ADDED else ""
            raise OverlapError(f"{op}: out overlaps {name}: wanted memory of its own{allowed}")


def launch_again(
    op: str, ready: Ready, tensors: Tensors, out: torch.Tensor | None, addresses: Addresses
) -> torch.Tensor:
    """Launch a prepared call. Raise OverlapError where out, this time, overlaps an input."""
    if out is not None:
        if _meets(ready, addresses):
            check_out_apart(op, out, tensors, ready.reaches)
        mark_written(op, out)
    return launch_ready(ready, addresses, out)


def _meets(ready: Ready, addresses: Addresses) -> bool:
    """True if out's range of addresses meets that of a tensor that is read."""
    start = addresses[-1]
    end = start + ready.reaches[-1]
    for index, far in ready.read:
        at = addresses[index]
        if at < end and start < at + far:
            return True
    return False


def launch_ready(ready: Ready, addresses: Addresses, out: torch.Tensor | None) -> torch.Tensor:
    """Launch a prepared call with these addresses, out's last; into a new output where out is None."""
    if out is None:
        out = new_output(ready.shape, ready.strides, ready.dtype, ready.device)
        addresses[-1] = out.data_ptr()
    ready.launch.at(ready.pick(addresses))
    return out


def _family(op: str, tensors: Tensors, out: Any, options: Key) -> Key:
    """Return what few calls share that are not alike. What is no tensor raises one of NEVER_PREPARED."""
    sizes = tensors[0].shape, tensors[len(tensors) > 1].shape
    return (op, options, rules(), is_grad_enabled(), sizes, *map(type, tensors), out is None)


def recall(
    op: str, tensors: Tensors, out: Any, options: Key, otherwise: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Launch a call that torch need not see, if `learnt` was told of one like it; else call `otherwise`.

    Torch's own test, in C++, compares types, dtypes, devices, sizes, strides, `requires_grad`, and each
    tensor's dispatch keys in this thread. These tell laziness, modes, autocast and transforms.
    """
    if is_dynamo_compiling() or forward_level() >= 0:
        return otherwise(op, tensors, out, options)
    try:
        known = _LEARNT.get(_family(op, tensors, out, options), ())
    except NEVER_PREPARED:
        known = ()
    everything = (*tensors, out)
    for like, given_of, same, low, own, setting, ready in known:
        given = given_of(everything)
        if not like(*given) or (same and any(everything[i] is not everything[j] for i, j in same)):
            continue
        addresses = [tensor.data_ptr() for tensor in given]
        if [at & 15 for at in addresses] != low or not (setting is None or setting == default_precision()):
            continue
        if out is None:
            addresses.append(None)
        else:
            addresses.append(out.data_ptr())
            if addresses.index(addresses[-1]) != own or _meets(ready, addresses):
                break  # checked more closely where the call is looked up
            mark_written(op, out)
        return launch_ready(ready, addresses, out)
    return otherwise(op, tensors, out, options)


def learnt(op: str, tensors: Tensors, out: Any, options: Key, result: torch.Tensor) -> torch.Tensor:
    """Have `recall` know calls like this one, which torch need not see; return its result."""
    key, ready, addresses = look_up(op, tensors, out, options)
    if key is None or ready is None:
        return result
    everything, places = (*tensors, out), dict[int, int]()
    for i, tensor in enumerate(everything):
        if tensor is not None:
            places.setdefault(id(tensor), i)
    firsts = list(places.values())  # torch's test takes each tensor once
    same = [(i, places[id(t)]) for i, t in enumerate(everything) if t is not None and i not in firsts]
    starts = [addresses[i] for i in firsts]
    own = None if out is None else starts.index(addresses[-1])
    turned = [firsts.index(places.get(id(tensor), firsts[0])) for tensor in tensors] + [len(firsts)]
    read = tuple((turned[i], far) for i, far in ready.read)
    ready = replace(ready, read=read, pick=itemgetter(*(turned[i] for i in ready.order)))
    given_of = itemgetter(*firsts) if len(firsts) > 1 else itemgetter(slice(0, 1))
    family, like = _family(op, tensors, out, options), alike(*given_of(everything))
    latest = like, given_of, same, [at & 15 for at in starts], own, key[2], ready
    _LEARNT[family] = (latest, *_LEARNT.get(family, ())[: _MOST - 1])
    return result


def reaches_of(tensors: Tensors, unread: Any = None) -> tuple[int, ...]:
    """Return the length of each tensor in bytes: 0 for None, for an empty tensor, and for `unread`."""
    return tuple(
        0 if tensor is None or tensor is unread or not tensor.numel() else reach(tensor) for tensor in tensors
    )


def remember(
    key: Key | None, op: str, launch: Launch | SplitLaunch, call: Call, tensors: Tensors, out: torch.Tensor
) -> None:
    """Remember the launch of a call, where its plan may be kept. `tensors` are the caller's, as given."""
    if key is None or not may_be_kept():
        return
    indices, everything = {role: i for i, (role, _) in enumerate(TENSORS[op])}, (*tensors, out)
    indices["out"] = len(tensors)
    order = tuple(indices[_TRANSPOSED.get(role, role) if call.swapped else role] for role in call.roles)
    if any(everything[i].data_ptr() != t.data_ptr() for i, t in zip(order, call.tensors, strict=True)):
        return  # the launch reads a copy
    reaches = [reach(tensor) if i in order else 0 for i, tensor in enumerate(everything)]
    starts = addresses_of(*everything)
    own = starts.index(starts[-1])
    if own < len(tensors):  # a tensor that is overwritten, or not read: other calls have another key
        reaches[own] = 0
    read = tuple((i, far) for i, far in enumerate(reaches[:-1]) if far)
    result = tuple(out.shape), out.stride(), out.dtype, out.device
    CALLS[key] = Ready(launch, order, tuple(reaches), *result, read, itemgetter(*order))
