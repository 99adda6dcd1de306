"""Reduce calls to what kernels take: matrices with strides, or an index space with two sets of them."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar, Final, NamedTuple

from tritile.core.problem import (
    SIDES,
    TURNED,
    Epilogue,
    GroupedProblem,
    MatmulProblem,
    PermuteProblem,
    QuantizedProblem,
    alignment,
)


@dataclass(frozen=True)
class View:
    """Hold a batch of matrices in memory. `tensor` has a dtype and a data_ptr(); strides count elements."""

    tensor: Any
    shape: tuple[int, int]
    strides: tuple[int, int]
    batch_strides: tuple[int, ...]
    itemsize: int

    @property
    def layout(self) -> str:
        """Say which dimension is contiguous: "row": the last; "column": the first; "strided": neither."""
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
        """Return the strides that are stepped over: all but that of the contiguous dimension.

        Of rows that overlap, one element apart, that is one of two strides of 1.
        """
        inner = [stride for size, stride in zip(self.shape, self.strides, strict=True) if size > 1]
        if 1 in inner:
            inner.remove(1)
        return (*inner, *self.batch_strides)

    @property
    def align(self) -> int:
        """Return the largest power of two, at most 16, that divides address and leading strides, in bytes."""
        return alignment(self.tensor.data_ptr(), *(stride * self.itemsize for stride in self.leading))

    @property
    def transposed(self) -> "View":
        rows, columns = self.shape
        return replace(self, shape=(columns, rows), strides=(self.strides[1], self.strides[0]))

    @property
    def span(self) -> int:
        return sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))


class Placed(NamedTuple):
    """Stand for a tensor in a buffer that has a name, as a workspace, which starts on 16 bytes."""

    buffer: str
    dtype: str
    address: int = 0

    def data_ptr(self) -> int:
        return self.address


def spread(view: View | None) -> str:
    """Say along which dimensions an operand varies over a result, by a word of `problem.epilogue.SPREADS`."""
    if view is None:
        return ""
    by_row, by_column = (step != 0 for step in view.strides)
    return "full" if by_row and by_column else "column" if by_row else "row" if by_column else "one"


@dataclass(frozen=True)
class Fused:
    """Describe what is done to a call's sums before they are stored: see `tritile.core.problem.Epilogue`.

    Operands are stretched to the size of the result by strides of 0.
    """

    scale_a: View | None = None
    scale_b: View | None = None
    bias: View | None = None
    residual: View | None = None
    activation: str = ""
    alpha: float = 1.0
    beta: float = 1.0
    bias_up: View | None = None
    gated: bool = False

    @property
    def views(self) -> tuple[View | None, ...]:
        return tuple(getattr(self, name) for name in SIDES)

    @property
    def named(self) -> tuple[tuple[str, View | None], ...]:
        return tuple(zip(SIDES, self.views, strict=True))

    @property
    def epilogue(self) -> Epilogue:
        """Return the part that decides how kernels are compiled."""
        weighted = (self.alpha, self.beta) != (1.0, 1.0)
        spreads = {name: spread(getattr(self, name)) for name in SIDES}
        return Epilogue(**spreads, activation=self.activation, weighted=weighted, gated=self.gated)

    def mapped(self, change: Callable[[View], View]) -> "Fused":
        changed = (view and change(view) for view in self.views)
        views: dict[str, Any] = dict(zip(SIDES, changed, strict=True))
        return replace(self, **views)

    @property
    def transposed(self) -> "Fused":
        turned = self.mapped(lambda view: view.transposed)
        return replace(turned, **{other: getattr(turned, name) for name, other in TURNED.items()})


UNFUSED: Final = Fused()


class Verdict(NamedTuple):
    """Hold the GPU's fallback flag, an int32 word: make the product where it is in `least` .. `end` - 1.

    See `tritile.families.common.fallback`.
    """

    word: Any
    least: int
    end: int


class BlockScales(NamedTuple):
    """Hold scales for each 128 of K; `shared` says by how many rows and columns, as in BLOCK_SCALES."""

    shared: str
    a: Any
    b: Any

    @property
    def transposed(self) -> "BlockScales":
        rows, columns = self.shared.split("x")
        return BlockScales(f"{columns}x{rows}", self.b, self.a)


class Buffered:
    """Name the tensors of a described call after its `buffers`."""

    swapped: bool = False

    @property
    def buffers(self) -> dict[str, Any]:
        """Return what the kernels' pointers point to, by name."""
        raise NotImplementedError

    @property
    def target(self) -> Any:
        return self.buffers["out"]

    @property
    def tensors(self) -> tuple[Any, ...]:
        return tuple(self.buffers.values())

    @property
    def roles(self) -> tuple[str, ...]:
        """Return the name of each of the caller's tensors, in the order of `tensors`."""
        return tuple(name.removeprefix("block_") for name in self.buffers)


@dataclass(frozen=True)
class MatmulCall(Buffered):
    """Describe out[i] = a[i] @ b[i] for every i of `batch_shape`, with the epilogue `fused`.

    - `b_dtype`: the dtype of b where it is not `dtype`.
    - `scales`: those within the sum, for each 128 of K.
    - `swapped`: a is the transpose of the caller's second operand, b that of the first.
    - `verdict`: the fallback flag that says whether to make the product; None: make it in any case.
    - `up`: the second matrix, where gated.
    - `invariant`: as in the problem.
    """

    op: ClassVar[str] = "matmul"
    a: View
    b: View
    out: View
    batch_shape: tuple[int, ...]
    dtype: str
    out_dtype: str
    precision: str
    fused: Fused = UNFUSED
    swapped: bool = False
    b_dtype: str = ""
    scales: "BlockScales | None" = None
    verdict: "Verdict | None" = None
    up: View | None = None
    invariant: bool = False

    @functools.cached_property
    def problem(self) -> MatmulProblem:
        a, b, out = self.a, self.b, self.out
        return MatmulProblem(
            prod(self.batch_shape), a.shape[0], b.shape[1], a.shape[1], self.dtype, self.out_dtype,
            a.layout, b.layout, out.layout, a.align, b.align, out.align, self.precision,
            self.fused.epilogue, self.b_dtype, self.scales.shared if self.scales else "", self.invariant,
        )  # fmt: skip

    @property
    def transposed(self) -> "MatmulCall":
        """Return the same product as out^T = b^T a^T: a column-major result becomes row-major."""
        a, b, out = self.b.transposed, self.a.transposed, self.out.transposed
        turned = replace(self, a=a, b=b, out=out, fused=self.fused.transposed, swapped=not self.swapped)
        if self.b_dtype:
            turned = replace(turned, dtype=self.b_dtype, b_dtype=self.dtype)
        return replace(turned, scales=self.scales and self.scales.transposed)

    @property
    def buffers(self) -> dict[str, Any]:
        found = {"a": self.a.tensor, "b": self.b.tensor, "out": self.out.tensor}
        found |= {name: view.tensor for name, view in self.fused.named if view is not None}
        if self.up is not None:
            found["up"] = self.up.tensor
        if self.scales is not None:
            found |= {"block_scale_a": self.scales.a, "block_scale_b": self.scales.b}
        if self.verdict is not None:
            found["verdict"] = self.verdict.word
        return found


@dataclass(frozen=True)
class GroupedCall(Buffered):
    """Describe a call of the products of all groups: see `tritile.core.problem.GroupedProblem`.

    b has a batch of one dimension, a and out have none.

    - `offs`: where each group's rows end, as int32.
    - `scales`: of the rows of a, and of the columns of each b, contiguous; None without.
    - `swapped`: a is the transpose of the caller's second operand, b that of the first.
    - `invariant`: as in the problem.
    """

    op: ClassVar[str] = "grouped"
    batch_shape: ClassVar[tuple[int, ...]] = ()  # no batch, so a launch cannot be split
    groups: int
    a: View
    b: View
    out: View
    offs: Any
    scales: tuple[Any, Any] | None
    dtype: str
    out_dtype: str
    precision: str
    swapped: bool = False
    invariant: bool = False

    @property
    def problem(self) -> GroupedProblem:
        a, b, out = self.a, self.b, self.out
        return GroupedProblem(
            self.groups, a.shape[0], b.shape[1], a.shape[1], self.dtype, self.out_dtype,
            a.layout, b.layout, out.layout, a.align, b.align, out.align, self.precision,
            self.scales is not None, self.invariant,
        )  # fmt: skip

    @property
    def buffers(self) -> dict[str, Any]:
        found = {"a": self.a.tensor, "b": self.b.tensor, "out": self.out.tensor, "offs": self.offs}
        if self.scales is not None:
            found |= dict(zip(("scale_a", "scale_b"), self.scales, strict=True))
        return found


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
        return tuple(self.problem.shape[i] for i in self.batch_dims)

    @property
    def buffers(self) -> dict[str, Any]:
        return {"x": self.x, "out": self.out}


@dataclass(frozen=True)
class QuantizedCall(Buffered):
    """Describe out = x @ weight^T + bias, the weight being `words`, `scales` and `zeros`.

    These are laid out as `tritile.core.quantized` says. x is (m, k) with strides; out is (m, n), contiguous.
    `fused` holds the bias, if any. `invariant`: as in the problem.
    """

    op: ClassVar[str] = "linear_quantized"
    batch_shape: ClassVar[tuple[int, ...]] = ()
    x: View
    words: Any
    scales: Any
    zeros: Any | None
    out: View
    dtype: str
    bits: int
    group_size: int
    fused: Fused = UNFUSED
    invariant: bool = False

    @property
    def problem(self) -> QuantizedProblem:
        layout = "row" if self.x.layout == "row" else "strided"
        return QuantizedProblem(
            *self.out.shape, self.x.shape[1], self.dtype, self.bits, self.group_size,
            self.zeros is not None, self.fused.bias is not None, layout, self.x.align, self.invariant,
        )  # fmt: skip

    @property
    def buffers(self) -> dict[str, Any]:
        bias = self.fused.bias and self.fused.bias.tensor
        found = {"x": self.x.tensor, "words": self.words, "scales": self.scales, "zeros": self.zeros}
        found |= {"bias": bias, "out": self.out.tensor}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


Call = MatmulCall | GroupedCall | PermuteCall | QuantizedCall
