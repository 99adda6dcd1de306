"""Cut a call into as many pieces as launches can count, and place its workspaces."""

from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import Final

import torch

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.views import Call, MatmulCall, PermuteCall, View
from tritile.errors import TuningError
from tritile.families.common.work import Section, Work
from tritile.families.work import early, work_of

# Of one launch: Triton's launcher counts programs in 32 bits, and drops the rest.
_MAX_PROGRAMS: Final = 2**31 - 1
ALIGNMENT: Final = 256  # bytes, of each workspace


def laid_out(scratch: Iterable[Section]) -> tuple[list[int], int]:
    """Return where each workspace begins in one piece of memory, and the bytes of that piece."""
    offsets, end = [], 0
    for section in scratch:
        offsets.append(end)
        size = section.elements * getattr(torch, section.dtype).itemsize
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end


def workspace_bytes(call: Call, config: Config, device: Device) -> int:
    return max(laid_out(work.scratch.values())[1] for _, work in pieces_of(call, config, device))


def shifted(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    return tensor.as_strided((1,), (1,), tensor.storage_offset() + elements)


def _piece(call: Call, axis: int, start: int, size: int) -> Call:
    """Return the part of a call from `start` on along one axis of its batch."""
    if isinstance(call, PermuteCall):
        problem, axis = call.problem, call.batch_dims[axis]
        shape = (*problem.shape[:axis], size, *problem.shape[axis + 1 :])
        x, out = (
            shifted(tensor, start * strides[axis] * problem.itemsize // tensor.element_size())
            for tensor, strides in ((call.x, problem.x_strides), (call.out, problem.out_strides))
        )
        return replace(call, problem=replace(problem, shape=shape), x=x, out=out)
    assert isinstance(call, MatmulCall)  # others have no batch

    def part(view: View) -> View:
        step = view.batch_strides[axis] * view.itemsize // view.tensor.element_size()
        return replace(view, tensor=shifted(view.tensor, start * step))

    batch_shape = (*call.batch_shape[:axis], size, *call.batch_shape[axis + 1 :])
    whole = replace(call, fused=call.fused.mapped(part), batch_shape=batch_shape)
    up = call.up and part(call.up)
    return replace(whole, a=part(call.a), b=part(call.b), out=part(call.out), up=up)


def pieces_of(call: Call, config: Config, device: Device) -> list[tuple[Call, Work]]:
    """Return parts of the call, each within what one launch can count, and what each launches."""
    work = work_of(call, config, device.processors, early(device))
    if max(prod(step.grid) for step in work.steps) <= _MAX_PROGRAMS:
        return [(call, work)]
    if max(call.batch_shape, default=1) == 1:
        raise TuningError(f"{call.problem.label} takes more programs than a launch counts")
    axis = max(range(len(call.batch_shape)), key=call.batch_shape.__getitem__)
    size = call.batch_shape[axis]
    halves = _piece(call, axis, 0, size // 2), _piece(call, axis, size // 2, size - size // 2)
    return [piece for half in halves for piece in pieces_of(half, config, device)]
