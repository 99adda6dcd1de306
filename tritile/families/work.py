"""Return what any call launches with a config, and the memory that it takes.

A product may be lowered to another one, its core: `MatmulProblem.core`. Small kernels lay out operands for
it. So are products of more digits than tensor cores hold made, or of slow layouts. A call of more programs
than a launch counts is cut into pieces.
"""

from dataclasses import replace
from math import prod
from typing import Final, TypeVar

from tritile.core.call import Call, MatmulCall, Memory, PermuteCall, QuantizedCall, View
from tritile.core.config import ATEN, Config
from tritile.core.device import Device
from tritile.errors import TuningError
from tritile.families.common.work import Lowered
from tritile.families.fp16x3 import lowering as fp16x3
from tritile.families.quantized.family import unpacking
from tritile.families.registry import FAMILIES
from tritile.families.rows import lowering as rows
from tritile.runtime.work import Work, laid_out

_Memory = TypeVar("_Memory", bound=Memory)  # or a view
# Of one launch: Triton's launcher counts programs in 32 bits, and drops the rest.
_MAX_PROGRAMS: Final = 2**31 - 1


def early(device: Device) -> bool:
    """True if kernels on this GPU use programmatic dependent launch."""
    return device.has_tma


def lowered(call: MatmulCall, early: bool) -> Lowered | None:
    """Return what a product is lowered to, None if kernels make it directly."""
    if call.problem.in_parts:
        return fp16x3.lowered(call, early)  # whose core is not lowered again
    return rows.lowered(call, early) if call.problem.by_rows else None


def work_of(call: Call, config: Config, processors: int, early: bool) -> Work:
    """Return the launches of `call` with `config`, on a GPU of so many SMs.

    `early`: kernels use programmatic dependent launch: they start before the kernel ahead in the stream is
    done, and wait themselves for their inputs. Of a call that torch makes, what unpacks its weight is ours.
    Raises TuningError if the family cannot make the call.
    """
    if isinstance(call, QuantizedCall) and config.family == ATEN:
        return unpacking(call.problem, early)
    if isinstance(call, MatmulCall) and (parts := lowered(call, early)) is not None:
        return parts.around(work_of(parts.core, config, processors, early))
    family = FAMILIES[call.op].get(config.family)
    if family is None:
        raise TuningError(f"{config} is of no family of {call.op}: {', '.join(FAMILIES[call.op])}")
    return family.work(call, config, processors, early)


def workspace_bytes(call: Call, config: Config, device: Device) -> int:
    return max(laid_out(work.scratch.values())[1] for _, work in pieces_of(call, config, device))


def _piece(call: Call, axis: int, start: int, size: int) -> Call:
    """Return the part of a call from `start` on along one axis of its batch."""

    def moved(memory: _Memory, stride: int, itemsize: int) -> _Memory:
        by, tensor = start * stride * itemsize, memory.tensor
        if tensor is not None:
            at = tensor.storage_offset() + by // tensor.element_size()
            tensor = tensor.as_strided((1,), (1,), at)
        return replace(memory, address=memory.address + by, tensor=tensor)

    if isinstance(call, PermuteCall):
        problem, axis = call.problem, call.batch_dims[axis]
        x, out = (
            moved(memory, strides[axis], problem.itemsize)
            for memory, strides in ((call.x, problem.x_strides), (call.out, problem.out_strides))
        )
        shape = (*problem.shape[:axis], size, *problem.shape[axis + 1 :])
        return replace(call, problem=replace(problem, shape=shape), x=x, out=out)
    assert isinstance(call, MatmulCall)  # others have no batch

    def part(view: View) -> View:
        return moved(view, view.batch_strides[axis], view.itemsize)

    return replace(
        call,
        a=part(call.a),
        b=part(call.b),
        out=part(call.out),
        batch_shape=(*call.batch_shape[:axis], size, *call.batch_shape[axis + 1 :]),
        sides={name: part(view) for name, view in call.sides.items()},
        up=call.up and part(call.up),
    )


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
