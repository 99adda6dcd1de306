"""Send calls that torch must see through its dispatcher, to the operators of `torch.ops.tritile`.

A plain call on plain tensors launches its kernel at once. Calls that torch keeps track of (gradients,
tangents, transforms, subclasses, modes, autocast, tracing) go to the operator of the same name in
`tritile.ops.operators`. The operator's kernels for CUDA and CPU are the plain call again.
"""

import sys
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
from tritile.ops.checks import check_may_change, check_number, check_tensor, describe
from tritile.ops.signatures import NAMED, NAMES

PLAIN = (torch.Tensor, torch.nn.Parameter)  # types that do not override calls


def needs_dispatch(*tensors: Any) -> bool:
    """True if a call on these arguments, each a tensor or None, must go through torch's dispatcher.

    False where an argument is not a tensor: the checks of the plain call refuse it.
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


def call_operator(op: str, values: tuple[Any, ...], out: torch.Tensor | None = None) -> torch.Tensor:
    """Call the operator `tritile::op`, or its overload `out` where out is given.

    `values` are all other arguments in the order of the operator's schema.

    Raises:
        DtypeError, InvalidValueError: an argument is of a type that the operator does not take.
        GradientError: out is an inference tensor, outside of `torch.inference_mode()`.
    """
    given = dict(zip(NAMES[op], values, strict=True))
    _check_options(op, given)
    if not is_dynamo_compiling():
        _check_tensors(op, given, out)
        if out is not None:
            check_may_change(op, out)  # torch would write first
        register_shardings()
    return call_overload(op, *values, out=out)


def call_overload(op: str, *values: Any, out: torch.Tensor | None = None) -> torch.Tensor:
    """Call the operator `tritile::op` with all of its arguments in the order of its schema."""
    first, packet = len(values) - len(NAMED[op]), getattr(torch.ops.tritile, op)
    named = dict(zip(NAMED[op], values[first:], strict=True))
    if out is not None:
        packet.out(*values[:first], **named, out=out)
        return out
    result: torch.Tensor = packet.default(*values[:first], **named)
    return result


def _check_tensors(op: str, given: dict[str, Any], out: Any) -> None:
    """Raise DtypeError for tensors that torch finds no kernel for, and for None in place of one."""
    for argument in schema_of(getattr(torch.ops.tritile, op).default).arguments:
        if given[argument.name] is None and isinstance(argument.type, torch.TensorType):
            check_tensor(op, argument.name, None)
    for name, value in (*given.items(), ("out", out)):
        if isinstance(value, torch.Tensor) and (value.is_nested or _is_not_dense(value)):
            check_tensor(op, name, value)


def _is_not_dense(tensor: torch.Tensor) -> bool:
    return type(tensor) in PLAIN and (tensor.layout != torch.strided or tensor.is_quantized)


def register_shardings() -> None:
    """Register the sharding rules once torch.distributed.tensor, which is slow to import, is imported."""
    if "torch.distributed.tensor" in sys.modules:
        from tritile.ops import sharding

        sharding.register()


def _check_options(op: str, options: dict[str, Any]) -> None:
    dtype = options.get("out_dtype")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise DtypeError(f"{op}: out_dtype is {describe(dtype)}: wanted a torch.dtype")
    for name in ("precision", "activation"):
        word = options.get(name)
        if word is not None and not isinstance(word, str):
            raise InvalidValueError(f"{op}: {name} is {word!r}: wanted a name, or None")
    for name in ("alpha", "beta"):
        check_number(op, name, options.get(name, 1))
