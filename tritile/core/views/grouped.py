"""Reduce products of groups to what kernels take."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from tritile.core.problem import ITEMSIZE, GroupedProblem
from tritile.core.views.products import Buffered, Make, View, view_of


class Scales(NamedTuple):
    """Hold scales of an operand's rows or columns, contiguous; `stride` leads from group to group."""

    tensor: Any
    stride: int


@dataclass(frozen=True)
class GroupedCall(Buffered):
    """Describe a call of the products of all groups: see `tritile.core.problem.GroupedProblem`.

    Those of a, b and out that have a matrix for each group have a batch of one dimension, the others none.

    - `offs`: where each group ends in what groups share, as int32; None where they share nothing.
    - `swapped`: a is the transpose of the caller's second operand, b that of the first.
    - `invariant`: as in the problem.
    """

    op: ClassVar[str] = "grouped"
    batch_shape: ClassVar[tuple[int, ...]] = ()  # no batch, so a launch cannot be split
    ragged: str
    groups: int
    a: View
    b: View
    out: View
    offs: Any
    scales: tuple[Scales, Scales] | None
    dtype: str
    out_dtype: str
    precision: str
    swapped: bool = False
    invariant: bool = False

    @property
    def problem(self) -> GroupedProblem:
        """Return the problem that this call poses."""
        a, b, out = self.a, self.b, self.out
        return GroupedProblem(
            self.ragged, self.groups, a.shape[0], b.shape[1], a.shape[1], self.dtype, self.out_dtype,
            a.layout, b.layout, out.layout, a.align, b.align, out.align, self.precision,
            self.scales is not None, self.invariant,
        )  # fmt: skip

    @property
    def buffers(self) -> dict[str, Any]:
        """Return what the kernel's pointers point to, by name."""
        found = {"a": self.a.tensor, "b": self.b.tensor, "out": self.out.tensor}
        if self.offs is not None:
            found["offs"] = self.offs
        if self.scales is not None:
            found |= {"scale_a": self.scales[0].tensor, "scale_b": self.scales[1].tensor}
        return found


def posed_groups(problem: GroupedProblem, make: Make) -> GroupedCall:
    """Return a call that poses products of groups; the caller writes into `offs` where groups end."""
    sizes = (problem.itemsize, problem.itemsize, ITEMSIZE[problem.out_dtype])
    a, b, out = (
        view_of(operand, size, 2 if own else 1, make)  # a batch of 2 or more has a stride
        for operand, size, own in zip(problem.operands, sizes, problem.of_groups, strict=True)
    )
    offs = None if problem.ragged == "none" else make("int32", problem.groups)
    scales = None
    if problem.scaled:
        rows, columns = (make("float32", count) for count in problem.scales)
        scales = Scales(rows, 0 if problem.ragged == "m" else problem.m), Scales(columns, problem.n)
    return GroupedCall(
        problem.ragged, problem.groups, a, b, out, offs, scales,
        problem.dtype, problem.out_dtype, problem.precision, invariant=problem.invariant,
    )  # fmt: skip
