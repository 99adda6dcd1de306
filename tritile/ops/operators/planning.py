"""The choice of a config as a call is traced, so that under torch.compile none is left for the first run."""

import contextlib
from collections.abc import Callable
from typing import TypeAlias

import torch

from tritile.core.device import capturing
from tritile.core.of_torch import neg_view, without_modes
from tritile.core.problem import Tiled
from tritile.errors import UnsupportedError
from tritile.ops.run import planned

StandIn: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
_LINE = 16  # bytes on which memory is taken to start


def foresee(device: torch.device, problem: Callable[[StandIn], Tiled]) -> None:
    """Make the plan of a call on tensors that stand for others; in mode "tune" its problem is measured.

    A best effort, which raises nothing: on a GPU that is here, for sizes that are known. Memory is taken to
    start on 16 bytes, a view within it where its offset says. `problem` makes the problem, of tensors without
    memory that it asks for in place of those of the call.
    """
    if device.type != "cuda" or not torch.cuda.is_available() or capturing():
        return
    with contextlib.suppress(Exception), without_modes():
        index = torch.cuda.current_device() if device.index is None else device.index
        planned(problem(_stand_in), index)


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the meta device of the same sizes, its address as aligned."""
    offset = tensor.storage_offset()
    if any(type(n) is not int for n in (*tensor.shape, *tensor.stride(), offset)):
        raise UnsupportedError("sizes are not known yet")
    size = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    offset %= _LINE
    memory = torch.empty(offset + max(size, 1), dtype=tensor.dtype, device="meta")
    view = memory.as_strided(tensor.shape, tensor.stride(), offset)
    view = view.conj() if tensor.is_conj() else view
    return neg_view(view) if tensor.is_neg() else view
