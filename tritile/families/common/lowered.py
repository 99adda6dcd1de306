"""Describe a lowered product: `Lowered`."""

from collections.abc import Mapping
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from tritile.core.views import MatmulCall, View
from tritile.families.common.work import Section, Step, Work


class Lowered(NamedTuple):
    """Describe what a product is lowered to: launches before the core, the core, launches after it.

    Steps name the buffers of the call and of `scratch`. A view of the core holds the tensor that the call has
    under the same name, or a `Placed` that names a buffer.
    """

    before: tuple[Step, ...]
    core: MatmulCall
    after: tuple[Step, ...] = ()
    scratch: Mapping[str, Section] = MappingProxyType({})

    def around(self, core: Work) -> Work:
        """Return all launches of a call: its core's work between the launches before and after."""
        assert not self.scratch.keys() & core.scratch.keys()
        scratch, main = {**self.scratch, **core.scratch}, core.main - len(self.after)
        return Work((*self.before, *core.steps, *self.after), scratch, core.counters, main)


def copied_batch(
    view: View, batch_shape: tuple[int, ...]
) -> tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return how the matrices of an operand are copied side by side, those of a stretched dimension once.

    That is their number, their batch's sizes and strides, and the strides of the whole batch over the copies,
    in copies.
    """
    dims = [(n, step) for n, step in zip(batch_shape, view.batch_strides, strict=True) if n > 1 and step]
    count = before = prod(n for n, _ in dims)
    steps = []
    for n, step in zip(batch_shape, view.batch_strides, strict=True):
        own = n > 1 and step != 0
        before //= n if own else 1
        steps.append(before if own else 0)
    shape, strides = zip(*dims, strict=True) if dims else ((1,), (0,))
    return count, tuple(shape), tuple(strides), tuple(steps)
