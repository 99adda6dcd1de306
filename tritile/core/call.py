"""Describe a call: a problem with its tensors, as views that kernels take.

A call is the only description of its tensors between an operation and the launch. Where a tensor begins, its
dtype and its strides are plain values: what is only planned, or compiled ahead, has a call without tensors.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch

from tritile.core.epilogue import SIDES, Epilogue
from tritile.core.fields import alignment
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import (
    FP8_DTYPES,
    ITEMSIZE,
    GroupedProblem,
    MatmulProblem,
    QuantizedProblem,
    Tiled,
)
from tritile.errors import UnsupportedError

Make = Callable[[str, int], torch.Tensor]  # makes memory for so many elements of torch's dtype of this name


@dataclass(frozen=True)
class Memory:
    """Where a tensor begins: its buffer's name, which is its role or a workspace's, dtype and address.

    `tensor` is None for a workspace, and in a call that is not to run.
    """

    buffer: str
    dtype: str
    address: int = 0
    tensor: Any = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, buffer: str, tensor: torch.Tensor) -> "Memory":
        return Memory(buffer, str(tensor.dtype).removeprefix("torch."), tensor.data_ptr(), tensor)

    def view(
        self, shape: tuple[int, int], strides: tuple[int, int], batch_strides: tuple[int, ...] = ()
    ) -> "View":
        start = self.buffer, self.dtype, self.address, self.tensor
        return View(*start, shape=shape, strides=strides, batch_strides=batch_strides)


@dataclass(frozen=True)
class View(Memory):
    """A batch of matrices in memory. Strides count elements."""

    shape: tuple[int, int] = field(kw_only=True)
    strides: tuple[int, int] = field(kw_only=True)
    batch_strides: tuple[int, ...] = field(kw_only=True)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def layout(self) -> str:
        """Which dimension is contiguous: "row": the last; "column": the first; "strided": neither."""
        rows, columns = self.shape
        if columns == 1:
            return "column" if rows > 1 and self.strides[0] == 1 else "row"
        if self.strides[1] == 1:
            return "row"
        if self.strides[0] == 1 or rows == 1:
            return "column"
        return "strided"

    @property
    def align(self) -> int:
        """The largest power of two, at most 16, that divides address and leading strides, in bytes.

        Leading strides are all but that of the contiguous dimension. Of rows that overlap, one element apart,
        that is one of two strides of 1.
        """
        inner = [stride for size, stride in zip(self.shape, self.strides, strict=True) if size > 1]
        if 1 in inner:
            inner.remove(1)
        return alignment(self.address, *(stride * self.itemsize for stride in (*inner, *self.batch_strides)))

    @property
    def spread(self) -> str:
        """How an epilogue's operand varies over a result: see `core.epilogue.SPREADS`."""
        by_row, by_column = (step != 0 for step in self.strides)
        return "full" if by_row and by_column else "column" if by_row else "row" if by_column else "one"

    @property
    def transposed(self) -> "View":
        rows, columns = self.shape
        return replace(self, shape=(columns, rows), strides=(self.strides[1], self.strides[0]))

    @property
    def span(self) -> int:
        return sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))


class Fallback(NamedTuple):
    """The GPU's fallback flag, an int32 word: make the product if it is in `least` .. `end` - 1.

    See `tritile.families.common.fallback`.
    """

    flag: Memory
    least: int
    end: int


class _Call:
    """The memory of a call, which the pointers of kernels point to, by the names of its buffers."""

    @property
    def memory(self) -> tuple[Memory, ...]:
        raise NotImplementedError

    @property
    def buffers(self) -> dict[str, Memory]:
        return {memory.buffer: memory for memory in self.memory}

    @property
    def tensors(self) -> tuple[Any, ...]:
        return tuple(memory.tensor for memory in self.memory)


class _ProductCall(_Call):
    a: View
    b: View
    out: View

    @property
    def dtype(self) -> str:
        return self.a.dtype

    @property
    def out_dtype(self) -> str:
        return self.out.dtype


@dataclass(frozen=True)
class MatmulCall(_ProductCall):
    """Describe out[i] = a[i] @ b[i] for every i of `batch_shape`, with an epilogue.

    - `sides`: the epilogue's operands by name, as `SIDES` lists them, stretched to the size of the result by
      strides of 0; with `activation`, `alpha`, `beta` and `up`, the second matrix of a gated product.
    - `scales`: those within the sum, of a and of b; `block_scales` says how many rows and columns share one.
    - `fallback`: the flag that says whether to make the product; None: make it in any case.
    - `invariant`: as in the problem.

    A transposed call computes out^T = b^T a^T. Its memory keeps the buffers that the caller's tensors name.
    """

    op: ClassVar[str] = "matmul"
    a: View
    b: View
    out: View
    batch_shape: tuple[int, ...]
    precision: str
    sides: Mapping[str, View] = field(default_factory=dict)
    activation: str = ""
    alpha: Any = 1.0
    beta: Any = 1.0
    up: View | None = None
    scales: tuple[Memory, ...] = ()
    block_scales: str = ""
    fallback: Fallback | None = None
    invariant: bool = False

    @functools.cached_property
    def epilogue(self) -> Epilogue:
        spreads: dict[str, Any] = {name: view.spread for name, view in self.sides.items()}
        weighted, gated = (self.alpha, self.beta) != (1.0, 1.0), self.up is not None
        return Epilogue(**spreads, activation=self.activation, weighted=weighted, gated=gated)

    @functools.cached_property
    def problem(self) -> MatmulProblem:
        a, b, out = self.a, self.b, self.out
        return MatmulProblem(
            prod(self.batch_shape), a.shape[0], b.shape[1], a.shape[1], a.dtype, out.dtype,
            a.layout, b.layout, out.layout, a.align, b.align, out.align, self.precision, self.epilogue,
            b.dtype if b.dtype != a.dtype else "", self.block_scales, self.invariant,
        )  # fmt: skip

    @property
    def transposed(self) -> "MatmulCall":
        """The same product as out^T = b^T a^T: a column-major result becomes row-major."""
        names = {"scale_a": "scale_b", "scale_b": "scale_a"}
        return replace(
            self,
            a=self.b.transposed,
            b=self.a.transposed,
            out=self.out.transposed,
            sides={names.get(name, name): view.transposed for name, view in self.sides.items()},
            scales=self.scales[::-1],
            block_scales="x".join(self.block_scales.split("x")[::-1]),
        )

    @property
    def memory(self) -> tuple[Memory, ...]:
        up = () if self.up is None else (self.up,)
        flags = () if self.fallback is None else (self.fallback.flag,)
        return (self.a, self.b, self.out, *self.sides.values(), *up, *self.scales, *flags)


@dataclass(frozen=True)
class GroupedCall(_ProductCall):
    """Describe a call of the products of all groups: see `tritile.core.problem.GroupedProblem`.

    b has a batch of one dimension, a and out have none.

    - `offs`: where each group's rows end, as int32.
    - `scales`: of the rows of a, and of the columns of each b, contiguous; () without.
    - `invariant`: as in the problem.
    """

    op: ClassVar[str] = "grouped"
    batch_shape: ClassVar[tuple[int, ...]] = ()  # no batch, so a launch cannot be split
    groups: int
    a: View
    b: View
    out: View
    offs: Memory
    precision: str
    scales: tuple[Memory, ...] = ()
    invariant: bool = False

    @property
    def problem(self) -> GroupedProblem:
        a, b, out = self.a, self.b, self.out
        return GroupedProblem(
            self.groups, a.shape[0], b.shape[1], a.shape[1], a.dtype, out.dtype,
            a.layout, b.layout, out.layout, a.align, b.align, out.align, self.precision,
            bool(self.scales), self.invariant,
        )  # fmt: skip

    @property
    def memory(self) -> tuple[Memory, ...]:
        return (self.a, self.b, self.out, self.offs, *self.scales)


@dataclass(frozen=True)
class PermuteCall(_Call):
    """Describe the copy of `problem` from x to out, with bits `flip` of words inverted.

    Their dtype is that of words: an element of 16 bytes is two words of 8. `in_place`: both are the same
    memory, and two dimensions of one size are exchanged.
    """

    op: ClassVar[str] = "permute"
    problem: PermuteProblem
    x: Memory
    out: Memory
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
        return tuple(self.problem.shape[i] for i in self.batch_dims)

    @property
    def memory(self) -> tuple[Memory, ...]:
        return (self.x, self.out)


@dataclass(frozen=True)
class QuantizedCall(_Call):
    """Describe out = x @ weight^T + bias, the weight being `words`, `scales` and `zeros`.

    These are laid out as `tritile.core.quantized` says. x is (m, k) with strides; out is (m, n), contiguous.
    `bias` is stretched over the rows. `invariant`: as in the problem.
    """

    op: ClassVar[str] = "linear_quantized"
    batch_shape: ClassVar[tuple[int, ...]] = ()
    x: View
    words: Memory
    scales: Memory
    zeros: Memory | None
    bias: View | None
    out: View
    bits: int
    group_size: int
    invariant: bool = False

    @property
    def dtype(self) -> str:
        return self.scales.dtype

    @property
    def problem(self) -> QuantizedProblem:
        layout = "row" if self.x.layout == "row" else "strided"
        return QuantizedProblem(
            *self.out.shape, self.x.shape[1], self.dtype, self.bits, self.group_size,
            self.zeros is not None, self.bias is not None, layout, self.x.align, self.invariant,
        )  # fmt: skip

    @property
    def memory(self) -> tuple[Memory, ...]:
        found = (self.x, self.words, self.scales, self.zeros, self.bias, self.out)
        return tuple(memory for memory in found if memory is not None)


Call = MatmulCall | GroupedCall | PermuteCall | QuantizedCall


# --- A call of a problem ---


def call_for(problem: Tiled, make: Make | None = None) -> Call:
    """Return a call that has `problem`, on memory that `make(dtype, elements)` provides, or on none.

    Memory is made in the order of the call's `buffers`. An element of 16 bytes of a permutation is made as
    two of int64. Raises UnsupportedError for products of fp8 that only torch's kernels compute.
    """

    def memory(buffer: str, dtype: str, elements: int) -> Memory:
        tensor = None if make is None else make(dtype, elements)
        return Memory(buffer, dtype, 0 if tensor is None else tensor.data_ptr(), tensor)

    def matrices(
        buffer: str, dtype: str, laid: tuple[str, int], shape: tuple[int, int], batch: int | None = None
    ) -> View:
        (layout, leading), (rows, columns) = laid, shape
        strides = (1, leading) if layout == "column" else (leading, 1 + (layout == "strided"))
        each = leading * (columns if layout == "column" else rows)
        last = (rows - 1) * strides[0] + (columns - 1) * strides[1]
        place = memory(buffer, dtype, 1 + last + each * ((batch or 1) - 1))
        return place.view(shape, strides, () if batch is None else (each,))

    if isinstance(problem, PermuteProblem):
        kind, lanes = f"int{8 * min(problem.itemsize, 8)}", 2 if problem.itemsize == 16 else 1
        x, to = problem.spans
        return PermuteCall(problem, memory("x", kind, lanes * x), memory("out", kind, lanes * to))
    m, n, k, dtype = problem.m, problem.n, problem.k, problem.dtype
    if isinstance(problem, QuantizedProblem):
        scales = prod(problem.scales)
        return QuantizedCall(
            matrices("x", dtype, (problem.x_layout, problem.product.leading[0]), (m, k)),
            memory("words", "int32", prod(problem.words)),
            memory("scales", dtype, scales),
            memory("zeros", "int16", scales) if problem.zero_points else None,
            memory("bias", dtype, n).view((m, n), (0, 1)) if problem.bias else None,
            matrices("out", dtype, ("row", n), (m, n)),
            problem.bits, problem.group_size, problem.invariant,
        )  # fmt: skip
    if dtype in FP8_DTYPES and problem.needs_torch:
        raise UnsupportedError(f"{problem.label}: only torch computes it")
    of_a, of_b, of_out = zip(problem.layouts, problem.leading, strict=True)
    if isinstance(problem, GroupedProblem):
        return GroupedCall(
            problem.groups,
            matrices("a", dtype, of_a, (m, k)),
            matrices("b", dtype, of_b, (k, n), problem.groups),
            matrices("out", problem.out_dtype, of_out, (m, n)),
            memory("offs", "int32", problem.groups),
            problem.precision,
            invariant=problem.invariant,
        )
    batch = problem.batch if problem.batch > 1 else None
    a = matrices("a", dtype, of_a, (m, k), batch)
    b = matrices("b", problem.b_dtype or dtype, of_b, (k, n), batch)
    out = matrices("out", problem.out_dtype, of_out, (m, n), batch)
    epilogue, sides = problem.epilogue, {}
    for name in SIDES:
        if how := getattr(epilogue, name):
            # Full ones are a matrix for each product.
            strides = {"one": (0, 0), "row": (0, 1), "column": (1, 0), "full": (n, 1)}[how]
            elements = {"one": 1, "row": n, "column": m, "full": m * n * problem.batch}[how]
            kind = "float32" if name.startswith("scale") else problem.out_dtype
            steps = () if batch is None else (m * n if how == "full" else 0,)
            sides[name] = memory(name, kind, elements).view((m, n), strides, steps)
    weight = 0.5 if epilogue.weighted else 1.0
    up = matrices("up", dtype, of_b, (k, n), batch) if epilogue.gated else None
    return MatmulCall(
        a, b, out, () if batch is None else (batch,), problem.precision,
        sides, epilogue.activation, weight, weight, up, invariant=problem.invariant,
    )  # fmt: skip
