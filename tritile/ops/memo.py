"""Remember prepared calls: what tells one from another, and how it is launched.

A call that was prepared before costs one look-up and a launch.
"""

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
from tritile.ops.checks import overlap, ranges_meet, reach, same_memory
from tritile.ops.run import key_of, mark_written, may_be_kept, new_output
from tritile.runtime.launch import Launch, SplitLaunch

# The tensors of each operation in the order of its arguments: role in the product, and argument's name.
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
_ADDED: Final = ("bias", "residual", "bias_up")  # an element is read just before out's is written
_TRANSPOSED: Final = {"a": "b", "b": "a", **TURNED}
IN_FP32: Final = frozenset({torch.float32, torch.complex64})  # multiplied in the precision of torch's setting

Tensors = Sequence[Any]
Key = tuple[Any, ...]
Product = MatmulCall | GroupedCall


class Ready(NamedTuple):
    """Hold the launch of a prepared call and what it needs besides tensors.

    `order`: indices into the caller's tensors, out being the last, in the order in which the launch takes
    them. `reaches`: the length in bytes of each of the caller's tensors, 0 for one that is not read. `pick`:
    takes the tensors of `order` out of a tuple.
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
        """Return how to launch calls whose result has the shape, strides, dtype and device of out."""
        shape, pick = tuple(out.shape), itemgetter(*order)
        return cls(launch, order, reaches, shape, out.stride(), out.dtype, out.device, pick)


# Key: the operation, its arguments that are not tensors, the settings in force, and `key_of` of each tensor,
# out first. `look_up` looks a call up; operations that do so inline take a tenth less time.
CALLS: Final[dict[Key, Ready]] = new_memo()
NEVER_PREPARED: Final = (
    RuntimeError,
    AttributeError,
    TypeError,
)  # raised by what is never prepared


def default_precision() -> str:
    """Return what torch's own setting asks for in fp32: "ieee", "tf32", or "none" where nobody set it."""
    if fp32_precision is None:  # the other way saves a microsecond
        return torch.backends.cuda.matmul.fp32_precision
    return fp32_precision("cuda", "matmul")


def name_of_role(op: str, role: str) -> str:
    """Return the name of the argument that has this role in a product."""
    return next(name for own, name in ARGUMENTS[op] if own == role)


def look_up(op: str, a: Any, tensors: Tensors, out: Any, options: Key) -> tuple[Key | None, Ready | None]:
    """Return a call's key, and the launch that was prepared for it; None for what cannot be remembered.

    `a` is the first operand of the product, `options` are all arguments that are not tensors.
    """
    try:
        setting = default_precision() if a.dtype in IN_FP32 else None
        key = (op, options, setting, rules(), key_of(out), *map(key_of, tensors))
        return key, CALLS.get(key)
    except NEVER_PREPARED:
        return None, None


def check_out_apart(op: str, out: torch.Tensor, tensors: Tensors, reaches: Sequence[int]) -> None:
    """Raise OverlapError where out overlaps an input. It may be exactly a tensor that is added.

    A tensor with a reach of 0 bytes is not read.
    """
    for (role, name), tensor, far in zip(ARGUMENTS[op], tensors, reaches, strict=False):
        if far and overlap(out, tensor) and not (role in _ADDED and same_memory(out, tensor)):
            allowed = f", or exactly {name}'s" if role in _ADDED else ""
            raise OverlapError(f"{op}: out overlaps {name}: wanted memory of its own{allowed}")


def launch_again(op: str, ready: Ready, tensors: Tensors, out: torch.Tensor | None) -> torch.Tensor:
    """Launch a prepared call. Raise OverlapError where out, this time, overlaps an input."""
    if out is not None:
        of_out = ready.reaches[-1]
        for tensor, far in zip(tensors, ready.reaches, strict=False):
            if far and ranges_meet(tensor, far, out, of_out):
                check_out_apart(op, out, tensors, ready.reaches)
                break
        mark_written(op, out)
    return launch_ready(ready, tensors, out)


def launch_ready(ready: Ready, tensors: Tensors, out: torch.Tensor | None) -> torch.Tensor:
    """Launch a prepared call, into a new output where out is None."""
    if out is None:
        out = new_output(ready.shape, ready.strides, ready.dtype, ready.device)
    ready.launch(*ready.pick((*tensors, out)))
    return out


def reaches_of(tensors: Tensors, unread: Any = None) -> tuple[int, ...]:
    """Return the length of each tensor in bytes: 0 for None, for an empty tensor, and for `unread`."""
    return tuple(
        0 if tensor is None or tensor is unread or not tensor.numel() else reach(tensor) for tensor in tensors
    )


def ready_of(
    op: str, launch: Launch | SplitLaunch, call: Product, tensors: Tensors, out: torch.Tensor
) -> Ready:
    """Return how to launch products like this one. `tensors` are the caller's, as given."""
    indices = {role: i for i, (role, _) in enumerate(ARGUMENTS[op])} | {"out": len(tensors)}
    order = tuple(indices[_TRANSPOSED.get(role, role) if call.swapped else role] for role in call.roles)
    reaches = [reach(t) if i in order and t is not None else 0 for i, t in enumerate((*tensors, out))]
    return Ready.of(launch, order, tuple(reaches), out)


def remember(
    key: Key | None, op: str, launch: Launch | SplitLaunch, call: Product, tensors: Tensors, out: torch.Tensor
) -> None:
    """Remember the launch of a product. `tensors` are the caller's, as given."""
    # A split launch of a complex product has offsets in real elements; tensors of a later call are complex.
    fits = type(launch) is Launch or not out.is_complex()
    # A lazily negated tensor was copied: the launch does not read it.
    if fits and not any(tensor is not None and tensor.is_neg() for tensor in tensors):
        keep(key, ready_of(op, launch, call, tensors, out))


def keep(key: Key | None, ready: Ready) -> None:
    """Remember the launch of a call, where its plan may be kept."""
    if key is not None and may_be_kept():
        CALLS[key] = ready
