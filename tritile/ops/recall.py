"""Calls met before: what tells one from another, and how it was launched. One look-up, one launch."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch

from tritile.core.forgetting import new_memo
from tritile.core.problem import TURNED
from tritile.core.settings import rules
from tritile.core.views import MatmulCall
from tritile.errors import OverlapError
from tritile.ops.checks import entangled, overlap, reach, same_place
from tritile.ops.matmul import default_precision
from tritile.ops.run import fresh, lasting, place, written
from tritile.runtime.launch import Launch, SplitLaunch

# The tensors of each operation in the order of its arguments: by what they are to a product, and the
# argument's name.
ARGUMENTS: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "matmul": (("a", "input"), ("b", "other")),
    "linear": (("a", "input"), ("b", "weight"), ("bias", "bias"), ("residual", "residual")),
    "addmm": (("bias", "input"), ("a", "mat1"), ("b", "mat2")),
    "baddbmm": (("bias", "input"), ("a", "batch1"), ("b", "batch2")),
    "scaled_matmul": tuple(
        (name, name) for name in ("a", "b", "scale_a", "scale_b", "bias", "residual", "zero_a", "zero_b")
    ),
    "gated_linear": (
        ("a", "input"), ("b", "weight_gate"), ("up", "weight_up"), ("bias", "bias_gate"),
        ("bias_up", "bias_up"),
    ),
}  # fmt: skip
_ADDED: Final = ("bias", "residual", "bias_up")  # of which elements are read just before theirs are written
_TURNED: Final = {"a": "b", "b": "a", **TURNED}

Tensors = Sequence[Any]


class Ready(NamedTuple):
    """A call's launch and what it needs besides tensors.

    `order`: of the caller's tensors, out being the last, those that the launch takes, in its order.
    `reaches`: how far each of them reaches, in bytes, 0 where it is not read.
    """

    launch: Launch | SplitLaunch
    order: tuple[int, ...]
    reaches: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


_memo: dict[tuple[Any, ...], Ready] = new_memo()


def name_of_role(op: str, role: str) -> str:
    """The name of the argument that plays this role in a product."""
    return next(name for own, name in ARGUMENTS[op] if own == role)


def met(
    op: str, a: Any, tensors: Tensors, out: Any, words: tuple[Any, ...]
) -> tuple[tuple[Any, ...] | None, Ready | None]:
    """The key of a call, and how one of the same key was launched; None for what cannot be remembered.

    `a` is the first operand of the product, `words` all arguments that are no tensors.
    """
    try:
        for tensor in tensors:
            if tensor is not None and not tensor.is_cuda:
                return None, None
        setting = default_precision() if a.dtype is torch.float32 else None
        key = (op, words, setting, rules(), place(out), *map(place, tensors))
        return key, _memo.get(key)
    except (RuntimeError, AttributeError, TypeError):  # not of a kind that was ever prepared
        return None, None


def check_apart(op: str, out: torch.Tensor, tensors: Tensors, reaches: Sequence[int]) -> None:
    """An output that shares no memory with any input, or lies just where something that is added does.

    What reaches 0 bytes is not read.
    """
    for (role, name), tensor, far in zip(ARGUMENTS[op], tensors, reaches, strict=False):
        if far and overlap(out, tensor) and not (role in _ADDED and same_place(out, tensor)):
            allowed = f", or all of {name}'s" if role in _ADDED else ""
            raise OverlapError(f"{op}: out overlaps {name}: wanted memory of its own{allowed}")


def again(op: str, ready: Ready, tensors: Tensors, out: torch.Tensor | None) -> torch.Tensor:
    """Launch a call that was met before. Raises OverlapError where out is, this time, where it may not be."""
    if out is None:
        out = fresh(ready.shape, ready.strides, ready.dtype, ready.device)
    else:
        *reaches, of_out = ready.reaches
        for tensor, far in zip(tensors, reaches, strict=True):
            if far and entangled(tensor, far, out, of_out):
                check_apart(op, out, tensors, reaches)
                break
        written(op, out)
    given = (*tensors, out)
    ready.launch(*[given[i] for i in ready.order])
    return out


def reaches_of(tensors: Tensors, unread: Any = None) -> tuple[int, ...]:
    """How far each tensor reaches, in bytes: 0 for none, for one without elements, and for `unread`."""
    return tuple(
        0 if tensor is None or tensor is unread or not tensor.numel() else reach(tensor) for tensor in tensors
    )


def ready_of(
    op: str, launch: Launch | SplitLaunch, call: MatmulCall, tensors: Tensors, out: torch.Tensor
) -> Ready:
    """How calls like this one are launched. `tensors` are the caller's, as they came."""
    places = {role: i for i, (role, _) in enumerate(ARGUMENTS[op])} | {"out": len(tensors)}
    order = tuple(places[_TURNED.get(role, role) if call.swapped else role] for role in call.roles)
    reaches = [reach(t) if i in order and t is not None else 0 for i, t in enumerate((*tensors, out))]
    return Ready(launch, order, tuple(reaches), tuple(out.shape), out.stride(), out.dtype, out.device)


def remember(
    key: tuple[Any, ...] | None, op: str, launch: Launch | SplitLaunch, call: MatmulCall, tensors: Tensors,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """Keep how a call was launched, where its plan may be kept. `tensors` are the caller's, as they came."""
    if key is None or not lasting() or any(t is not None and t.is_neg() for t in tensors):
        return
    _memo[key] = ready_of(op, launch, call, tensors, out)
