"""Calls met before: what tells one from another, and how it was launched. One look-up, one launch."""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple

import torch

from tritile.core.forgetting import new_memo
from tritile.core.of_torch import fp32_precision
from tritile.core.problem import TURNED
from tritile.core.settings import rules
from tritile.core.views import GroupedCall, MatmulCall
from tritile.errors import OverlapError
from tritile.ops.checks import entangled, overlap, reach, same_place
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
    "grouped_matmul": tuple((name, name) for name in ("a", "b", "offs", "scale_a", "scale_b")),
}  # fmt: skip
_ADDED: Final = ("bias", "residual", "bias_up")  # of which elements are read just before theirs are written
_TURNED: Final = {"a": "b", "b": "a", **TURNED}
IN_FP32: Final = frozenset({torch.float32, torch.complex64})  # multiplied as torch's setting asks

Tensors = Sequence[Any]
Key = tuple[Any, ...]
Product = MatmulCall | GroupedCall


class Ready(NamedTuple):
    """A call's launch and what it needs besides tensors.

    `order`: of the caller's tensors, out being the last, those that the launch takes, in its order.
    `reaches`: how far each of the caller's reaches, in bytes, 0 where it is not read. `pick`: what takes the
    tensors of `order`.
    """

    launch: Launch | SplitLaunch
    order: tuple[int, ...]
    reaches: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    pick: Callable[[tuple[Any, ...]], tuple[Any, ...]]

    @classmethod
    def of(
        cls, launch: Launch | SplitLaunch, order: tuple[int, ...], reaches: tuple[int, ...], out: torch.Tensor
    ) -> "Ready":
        """How calls are launched whose result is as out."""
        shape, pick = tuple(out.shape), itemgetter(*order)
        return cls(launch, order, reaches, shape, out.stride(), out.dtype, out.device, pick)


# By the operation, its arguments that are no tensors, what is in force, and the places of its tensors, out's
# first. `met` looks a call up; operations that do so themselves take a tenth less time.
CALLS: Final[dict[Key, Ready]] = new_memo()
UNTELLABLE: Final = (RuntimeError, AttributeError, TypeError)  # raised for what is of no kind ever prepared


def default_precision() -> str:
    """The precision of products in fp32 that torch's own setting asks for: "ieee" or "tf32"."""
    if fp32_precision is None:  # else a microsecond sooner
        return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
    return "tf32" if fp32_precision("cuda", "matmul") == "tf32" else "ieee"


def name_of_role(op: str, role: str) -> str:
    """The name of the argument that plays this role in a product."""
    return next(name for own, name in ARGUMENTS[op] if own == role)


def met(op: str, a: Any, tensors: Tensors, out: Any, words: Key) -> tuple[Key | None, Ready | None]:
    """The key of a call, and how one of the same key was launched; None for what cannot be remembered.

    `a` is the first operand of the product, `words` all arguments that are no tensors.
    """
    try:
        setting = default_precision() if a.dtype in IN_FP32 else None
        key = (op, words, setting, rules(), place(out), *map(place, tensors))
        return key, CALLS.get(key)
    except UNTELLABLE:
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
    if out is not None:
        of_out = ready.reaches[-1]
        for tensor, far in zip(tensors, ready.reaches, strict=False):
            if far and entangled(tensor, far, out, of_out):
                check_apart(op, out, tensors, ready.reaches)
                break
        written(op, out)
    return launched(ready, tensors, out)


def launched(ready: Ready, tensors: Tensors, out: torch.Tensor | None) -> torch.Tensor:
    """Launch a call that was met before, into a fresh output where none came."""
    if out is None:
        out = fresh(ready.shape, ready.strides, ready.dtype, ready.device)
    ready.launch(*ready.pick((*tensors, out)))
    return out


def reaches_of(tensors: Tensors, unread: Any = None) -> tuple[int, ...]:
    """How far each tensor reaches, in bytes: 0 for none, for one without elements, and for `unread`."""
    return tuple(
        0 if tensor is None or tensor is unread or not tensor.numel() else reach(tensor) for tensor in tensors
    )


def ready_of(
    op: str, launch: Launch | SplitLaunch, call: Product, tensors: Tensors, out: torch.Tensor
) -> Ready:
    """How products like this one are launched. `tensors` are the caller's, as they came."""
    places = {role: i for i, (role, _) in enumerate(ARGUMENTS[op])} | {"out": len(tensors)}
    order = tuple(places[_TURNED.get(role, role) if call.swapped else role] for role in call.roles)
    reaches = [reach(t) if i in order and t is not None else 0 for i, t in enumerate((*tensors, out))]
    return Ready.of(launch, order, tuple(reaches), out)


def remember(
    key: Key | None, op: str, launch: Launch | SplitLaunch, call: Product, tensors: Tensors, out: torch.Tensor
) -> None:
    """Keep how a product was launched. `tensors` are the caller's, as they came."""
    if not any(tensor is not None and tensor.is_neg() for tensor in tensors):  # else what was launched is not
        keep(key, ready_of(op, launch, call, tensors, out))


def keep(key: Key | None, ready: Ready) -> None:
    """Keep how a call was launched, where its plan may be kept."""
    if key is not None and lasting():
        CALLS[key] = ready
