"""Send calls that torch must see through its dispatcher, to the operators of `torch.ops.tritile`.

A plain call on plain tensors launches its kernel at once. Calls that torch keeps track of (gradients,
tangents, transforms, subclasses, modes, autocast, tracing) go to the operator of the same name in
`tritile.ops.operators`. The operator's kernels for CUDA and CPU are the plain call again.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from tritile.core.of_torch import (
    forward_level,
    innermost_transform,
    is_any_autocast_on,
    modes_entered,
)
from tritile.errors import TritileError
from tritile.ops.checks import check_may_change
from tritile.ops.signatures import NAMED

PLAIN = (torch.Tensor, torch.nn.Parameter)  # types that do not override calls


def sees_every_call() -> bool:
    """True inside a mode, a level of tangents, autocast or a transform, whatever the tensors."""
    return bool(modes_entered() or is_any_autocast_on() or forward_level() >= 0 or innermost_transform())


def needs_dispatch(*tensors: Any) -> bool:
    """True if a call on these arguments, each a tensor or None, must go through torch's dispatcher.

    False where an argument is not a tensor: the checks of the plain call refuse it.
    """
    if is_dynamo_compiling() or sees_every_call():
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


def call_operator(
    op: str, values: tuple[Any, ...], out: torch.Tensor | None, check: Callable[[], Any]
) -> torch.Tensor:
    """Call the operator `tritile::op`, or its overload `out` where out is given.

    `values` are all other arguments in the order of the operator's schema. Where torch refuses the call in
    its own words, `check` raises ours. Raises GradientError where out is an inference tensor, outside of
    `torch.inference_mode()`.
    """
    if is_dynamo_compiling():
        return call_overload(op, *values, out=out)
    if isinstance(out, torch.Tensor):
        check_may_change(op, out)  # torch would write first
    register_shardings()
    try:
        return call_overload(op, *values, out=out)
    except TritileError:
        raise
    except Exception:
        check()
        raise


def call_overload(op: str, *values: Any, out: torch.Tensor | None = None) -> torch.Tensor:
    """Call the operator `tritile::op` with all of its arguments in the order of its schema."""
    first, packet = len(values) - len(NAMED[op]), getattr(torch.ops.tritile, op)
    named = dict(zip(NAMED[op], values[first:], strict=True))
    if out is not None:
        packet.out(*values[:first], **named, out=out)
        return out
    result: torch.Tensor = packet.default(*values[:first], **named)
    return result


def register_shardings() -> None:
    """Register the sharding rules once torch.distributed.tensor, which is slow to import, is imported."""
    if "torch.distributed.tensor" in sys.modules:
        from tritile.ops import sharding

        sharding.register()
