"""Which calls torch's dispatcher must see, and their way to it: operators of `torch.ops.tritile`.

A plain call on plain tensors goes to its kernel at once. Calls that torch keeps track of (gradients,
tangents, transforms, subclasses, modes, autocast, tracing) go to the operator of the same name, which
`tritile.ops.operators` registers, and whose kernels on CUDA and CPU are the plain call again.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from tritile.core.of_torch import (
    forward_level,
    innermost_transform,
    is_any_autocast_on,
    modes_entered,
    schema_of,
)
from tritile.errors import DtypeError, InvalidValueError
from tritile.ops.checks import check_may_change, check_tensor, describe

PLAIN = (torch.Tensor, torch.nn.Parameter)  # types that have nothing of their own to say about a call


def dispatched(*tensors: Any) -> bool:
    """Whether a call on these arguments, tensors or None, goes through torch's dispatcher.

    Not where one is no tensor at all: such calls are refused by the checks of the plain call.
    """
    if (
        is_dynamo_compiling()
        or modes_entered()
        or forward_level() >= 0
        or is_any_autocast_on()
        or innermost_transform() is not None
    ):
        return all(tensor is None or isinstance(tensor, torch.Tensor) for tensor in tensors)
    recording, found = torch.is_grad_enabled(), False
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) not in PLAIN:
            if not isinstance(tensor, torch.Tensor):
                return False
            found = True
        elif recording and tensor.requires_grad:
            found = True
    return found


def diverted(op: str, *args: Any, out: torch.Tensor | None = None, **words: Any) -> torch.Tensor:
    """The same call of the operator `tritile::op`; with out, of its overload that writes there.

    Raises DtypeError or InvalidValueError for words, and tensors, of no kind that an operator takes, and
    GradientError for an `out` of inference mode outside of it.
    """
    _check_words(op, words)
    if not is_dynamo_compiling():
        for tensor in (*args, *words.values(), out):
            if isinstance(tensor, torch.Tensor) and (tensor.is_nested or _is_no_dense(tensor)):
                check_tensor(op, "an argument", tensor)  # which torch would find no kernel for
        if out is not None:
            check_may_change(op, out)  # torch would write first
        know_shardings()
        _check_given(op, args)
    packet = getattr(torch.ops.tritile, op)
    if out is None:
        return packet.default(*args, **words)
    packet.out(*args, **words, out=out)
    return out


def _check_given(op: str, args: Sequence[Any]) -> None:
    """Raise DtypeError where None stands for a tensor that the operator cannot do without."""
    schema = schema_of(getattr(torch.ops.tritile, op).default)
    for argument, value in zip(schema.arguments, args, strict=False):
        if value is None and isinstance(argument.type, torch.TensorType):
            check_tensor(op, argument.name, value)


def _is_no_dense(tensor: torch.Tensor) -> bool:
    return type(tensor) in PLAIN and (tensor.layout != torch.strided or tensor.is_quantized)


def know_shardings() -> None:
    """Register sharding rules once torch's module of sharded tensors is there, which takes long to import."""
    if "torch.distributed.tensor" in sys.modules:
        from tritile.ops import sharding

        sharding.register()


def _check_words(op: str, words: dict[str, Any]) -> None:
    dtype = words.get("out_dtype")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise DtypeError(f"{op}: out_dtype is {describe(dtype)}: wanted a torch.dtype")
    for name in ("precision", "activation"):
        word = words.get(name)
        if word is not None and not isinstance(word, str):
            raise InvalidValueError(f"{op}: {name} is {word!r}: wanted a name, or None")
    for name in ("alpha", "beta"):
        number = words.get(name, 1)
        if isinstance(number, bool) or not isinstance(
            number, complex | torch.SymInt | torch.SymFloat | int | float
        ):
            raise InvalidValueError(f"{op}: {name} is {number!r}: wanted a number")
