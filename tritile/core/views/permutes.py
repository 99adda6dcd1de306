"""Reduce permutations to what kernels take."""

from dataclasses import dataclass
from typing import Any, ClassVar

from tritile.core.problem import PermuteProblem
from tritile.core.views.products import Buffered, Make


@dataclass(frozen=True)
class PermuteCall(Buffered):
    """Describe the copy of `problem` from x to out, with bits `flip` of words inverted.

    x and out stand for their first elements: they have a dtype, of words, and a data_ptr(). An element of 16
    bytes is two words of 8. `in_place`: both are the same memory, and two dimensions of one size are
    exchanged.
    """

    op: ClassVar[str] = "permute"
    problem: PermuteProblem
    x: Any
    out: Any
    flip: tuple[int, int] = (0, 0)
    in_place: bool = False

    @property
    def batch_dims(self) -> tuple[int, ...]:
        """Return the dimensions over which tiles are repeated."""
        problem = self.problem
        steps = enumerate(zip(problem.x_strides, problem.out_strides, strict=True))
        return tuple(i for i, (x, out) in steps if x == out) if self.in_place else problem.plane.batch

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Return the sizes of `batch_dims`."""
        return tuple(self.problem.shape[i] for i in self.batch_dims)

    @property
    def buffers(self) -> dict[str, Any]:
        """Return what the kernel's pointers point to, by name."""
        return {"x": self.x, "out": self.out}


def posed_permute(problem: PermuteProblem, make: Make) -> PermuteCall:
    """Return a call that poses a permutation."""
    kind, lanes = f"int{8 * min(problem.itemsize, 8)}", 2 if problem.itemsize == 16 else 1
    x, out = (make(kind, lanes * span) for span in problem.spans)
    return PermuteCall(problem, x, out)
