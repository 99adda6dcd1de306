"""A call reduced to what kernels take: matrices with strides, and one list of batch dimensions."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from tritile.problem import ITEMSIZE, MatmulProblem, Operand, PermuteProblem, alignment


@dataclass(frozen=True)
class View:
    """A batch of matrices in memory. `tensor` has a dtype and a data_ptr(); strides count elements."""

    tensor: Any
    shape: tuple[int, int]
    strides: tuple[int, int]
    batch_strides: tuple[int, ...]
    itemsize: int

    @property
    def layout(self) -> str:
        """Which dimension is contiguous: "row" (the last), "column" (the first), or neither."""
        rows, columns = self.shape
        if columns == 1:
            return "column" if rows > 1 and self.strides[0] == 1 else "row"
        if self.strides[1] == 1:
            return "row"
        if self.strides[0] == 1 or rows == 1:
            return "column"
        return "strided"

    @property
    def leading(self) -> tuple[int, ...]:
        """The strides that are stepped over: all but that of the contiguous dimension."""
        pairs = zip(self.shape, self.strides, strict=True)
        inner = tuple(stride for size, stride in pairs if size > 1 and stride != 1)
        return (*inner, *self.batch_strides)

    @property
    def align(self) -> int:
        """The largest power of two, up to 16, that divides the address and all leading strides, in bytes."""
        return alignment(self.tensor.data_ptr(), *(stride * self.itemsize for stride in self.leading))

    @property
    def transposed(self) -> "View":
        """The same matrices, rows for columns."""
        rows, columns = self.shape
        strides = (self.strides[1], self.strides[0])
        return View(self.tensor, (columns, rows), strides, self.batch_strides, self.itemsize)

    @property
    def span(self) -> int:
        """The offset of the last element of one matrix, in elements."""
        return sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))


class Placed(NamedTuple):
    """Stands for a tensor in a workspace, by the number of its buffer; workspaces start on 16 bytes."""

    buffer: int
    dtype: str

    def data_ptr(self) -> int:
        """An address as aligned as the workspace's."""
        return 0


@dataclass(frozen=True)
class MatmulCall:
    """out[i] = a[i] @ b[i] for every i of `batch_shape`.

    `swapped`: a is the transpose of the caller's second operand, b that of the first.
    """

    a: View
    b: View
    out: View
    batch_shape: tuple[int, ...]
    dtype: str
    out_dtype: str
    precision: str
    swapped: bool = False

    @property
    def problem(self) -> MatmulProblem:
        """What planning needs to know of this call."""
        return MatmulProblem(
            prod(self.batch_shape),
            self.a.shape[0],
            self.b.shape[1],
            self.a.shape[1],
            self.dtype,
            self.out_dtype,
            self.a.layout,
            self.b.layout,
            self.out.layout,
            self.a.align,
            self.b.align,
            self.out.align,
            self.precision,
        )

    @property
    def transposed(self) -> "MatmulCall":
        """The same product as out^T = b^T a^T: a result that lies in columns is then made row by row."""
        a, b, out = self.b.transposed, self.a.transposed, self.out.transposed
        return replace(self, a=a, b=b, out=out, swapped=not self.swapped)

    @property
    def tensors(self) -> tuple[Any, ...]:
        """What the kernel's pointers point to."""
        return (self.a.tensor, self.b.tensor, self.out.tensor)


@dataclass(frozen=True)
class PermuteCall:
    """The copy that `problem` tells of, from x to out, words of `flip` bits inverted.

    x and out stand for their first elements: they have a dtype, of words, and a data_ptr(). An element of
    16 bytes is two words of 8. `in_place`: both are the same memory, and two dimensions of one size are
    exchanged.
    """

    problem: PermuteProblem
    x: Any
    out: Any
    flip: tuple[int, int] = (0, 0)
    in_place: bool = False

    @property
    def batch_dims(self) -> tuple[int, ...]:
        """The dimensions over which tiles are repeated."""
        problem = self.problem
        steps = enumerate(zip(problem.x_strides, problem.out_strides, strict=True))
        return tuple(i for i, (x, out) in steps if x == out) if self.in_place else problem.plane.batch

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Their sizes."""
        return tuple(self.problem.shape[i] for i in self.batch_dims)

    @property
    def tensors(self) -> tuple[Any, ...]:
        """What the kernel's pointers point to."""
        return (self.x, self.out)


Call = MatmulCall | PermuteCall


Make = Callable[[str, int], Any]


def _view(operand: Operand, itemsize: int, batch: int, make: Make) -> View:
    batch_stride, *strides = operand.strides
    tensor = make(operand.dtype, operand.elements * (2 if itemsize == 16 else 1))
    return View(
        tensor, operand.shape[1:], (strides[0], strides[1]), (batch_stride,) if batch > 1 else (), itemsize
    )


def posed(problem: MatmulProblem | PermuteProblem, make: Make) -> Call:
    """A call that poses `problem`, on memory that `make(dtype, elements)` provides.

    An element of 16 bytes is asked for as two of int64.
    """
    batch = (problem.batch,) if problem.batch > 1 else ()
    if isinstance(problem, MatmulProblem):
        a, b, out = (
            _view(operand, size, problem.batch, make)
            for operand, size in zip(
                problem.operands,
                (problem.itemsize, problem.itemsize, ITEMSIZE[problem.out_dtype]),
                strict=True,
            )
        )
        return MatmulCall(a, b, out, batch, problem.dtype, problem.out_dtype, problem.precision)
    kind, lanes = f"int{8 * min(problem.itemsize, 8)}", 2 if problem.itemsize == 16 else 1
    x, out = (make(kind, lanes * span) for span in problem.spans)
    return PermuteCall(problem, x, out)
