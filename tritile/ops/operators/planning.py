"""Choose a config while a call is traced, so that compiled code does not have to."""

import contextlib
from collections.abc import Callable
from typing import TypeAlias

import torch

from tritile.core.device import capturing
from tritile.core.of_torch import neg_view, without_modes
from tritile.core.problem import Tiled
from tritile.errors import UnsupportedError
from tritile.ops.asked import Asked
from tritile.ops.run import planned

StandIn: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
_LINE = 16  # assumed alignment of memory, in bytes


def fake_of(of: Asked, out: torch.Tensor | None) -> torch.Tensor:
    """Return the result of a call of fake tensors, and plan the call."""
    shape, dtype, how = of.checked(out)
    result = of.first.new_empty(shape, dtype=dtype) if out is None else out
    _plan_ahead(of.first.device, lambda like: of.call(like, like(result), how).problem)
    return result


def _plan_ahead(device: torch.device, problem: Callable[[StandIn], Tiled]) -> None:
    """Plan a call on fake tensors; in mode "tune", measure its problem.

    A best effort, which raises nothing: for a GPU of this machine and known sizes. Memory is assumed to start
    on 16 bytes, plus the offset of a view. `problem` returns the problem; it replaces each tensor by the
    stand-in, on the meta device, that its argument returns.
    """
    if device.type != "cuda" or not torch.cuda.is_available() or capturing():
        return
    with contextlib.suppress(Exception), without_modes():
        index = torch.cuda.current_device() if device.index is None else device.index
        planned(problem(_stand_in), index)


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the meta device of the same sizes, strides and alignment."""
    offset = tensor.storage_offset()
    if any(type(n) is not int for n in (*tensor.shape, *tensor.stride(), offset)):
        raise UnsupportedError("sizes are not known yet")
    size = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    offset %= _LINE
    memory = torch.empty(offset + max(size, 1), dtype=tensor.dtype, device="meta")
    view = memory.as_strided(tensor.shape, tensor.stride(), offset)
    view = view.conj() if tensor.is_conj() else view
    return neg_view(view) if tensor.is_neg() else view
