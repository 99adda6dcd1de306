"""Pose problems: calls on memory of their own, or on placeholders where nothing runs."""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch

from tritile.core.problem import (
    FP8_DTYPES,
    ITEMSIZE,
    SIDES,
    GroupedProblem,
    MatmulProblem,
    Operand,
    PermuteProblem,
    Product,
    QuantizedProblem,
    Tiled,
)
from tritile.core.views import (
    Call,
    Fused,
    GroupedCall,
    MatmulCall,
    PermuteCall,
    QuantizedCall,
    View,
)
from tritile.errors import UnsupportedError

Make = Callable[[str, int], Any]  # makes memory for so many elements of torch's dtype of this name


class Pointer:
    """Stand for a tensor where only its dtype and the alignment of its address matter.

    An offset of 0, in elements, is aligned like torch's allocations, which start at multiples of 512 bytes.
    """

    def __init__(self, dtype: torch.dtype, offset: int = 0) -> None:
        self.dtype, self._offset = dtype, offset

    @classmethod
    def named(cls, dtype: str, elements: int = 0) -> "Pointer":
        """Return one for memory of torch's dtype of this name, however many elements it has."""
        return cls(getattr(torch, dtype))

    def data_ptr(self) -> int:
        return 4096 + self._offset * self.dtype.itemsize

    def element_size(self) -> int:
        return self.dtype.itemsize

    def storage_offset(self) -> int:
        return self._offset

    def as_strided(self, size: tuple[int, ...], strides: tuple[int, ...], offset: int) -> "Pointer":
        return Pointer(self.dtype, offset)


def posed(problem: Tiled, make: Make = Pointer.named) -> Call:
    """Return a call that poses `problem`, on memory that `make(dtype, elements)` provides.

    Without it, stand-ins for memory serve, as where nothing runs. Memory is made in the order of the call's
    `tensors`. An element of 16 bytes of a permutation is made as two of int64. Raises UnsupportedError for
    products of fp8 that torch's kernels alone make.
    """
    if isinstance(problem, Product) and problem.dtype in FP8_DTYPES and problem.is_torchs:
        raise UnsupportedError(f"{problem.label}: only torch computes it")
    if isinstance(problem, MatmulProblem):
        return _product(problem, make)
    if isinstance(problem, GroupedProblem):
        return _groups(problem, make)
    if isinstance(problem, QuantizedProblem):
        return _quantized(problem, make)
    return _permute(problem, make)


def _view(operand: Operand, itemsize: int, batch: int, make: Make) -> View:
    """Return an operand on memory of its own."""
    tensor = make(operand.dtype, operand.elements)
    return View(
        tensor, operand.shape[1:], operand.strides[1:], operand.strides[:1] if batch > 1 else (), itemsize
    )


def _side(problem: MatmulProblem, name: str, how: str, make: Make) -> View | None:
    """Return an operand of an epilogue: scales in float32, others in the result's type.

    Full ones are a matrix each.
    """
    if not how:
        return None
    dtype = "float32" if name.startswith("scale") else problem.out_dtype
    strides = {"one": (0, 0), "row": (0, 1), "column": (1, 0), "full": (problem.n, 1)}[how]
    elements = {"one": 1, "row": problem.n, "column": problem.m, "full": problem.m * problem.n}[how]
    each = elements if how == "full" else 0
    batch = (each,) if problem.batch > 1 else ()
    tensor = make(dtype, elements * (problem.batch if each else 1))
    return View(tensor, (problem.m, problem.n), strides, batch, ITEMSIZE[dtype])


def _fused(problem: MatmulProblem, make: Make) -> Fused:
    """Return an epilogue's operands on memory of their own; alpha and beta are 0.5 where they are given."""
    epilogue = problem.epilogue
    sides = {name: _side(problem, name, getattr(epilogue, name), make) for name in SIDES}
    weight = 0.5 if epilogue.weighted else 1.0
    return Fused(**sides, activation=epilogue.activation, alpha=weight, beta=weight, gated=epilogue.gated)


def _product(problem: MatmulProblem, make: Make) -> MatmulCall:
    batch = (problem.batch,) if problem.batch > 1 else ()
    sizes = (problem.itemsize, problem.itemsize, ITEMSIZE[problem.out_dtype])
    a, b, out = (
        _view(operand, size, problem.batch, make)
        for operand, size in zip(problem.operands, sizes, strict=True)
    )
    dtypes = (problem.dtype, problem.out_dtype)
    call = MatmulCall(a, b, out, batch, *dtypes, problem.precision, _fused(problem, make))
    up = _view(problem.operands[1], problem.itemsize, problem.batch, make) if call.fused.gated else None
    return replace(call, b_dtype=problem.b_dtype, up=up, invariant=problem.invariant)


def _groups(problem: GroupedProblem, make: Make) -> GroupedCall:
    sizes = (problem.itemsize, problem.itemsize, ITEMSIZE[problem.out_dtype])
    a, b, out = (
        _view(operand, size, batch, make)  # a batch of 2 or more has a stride
        for operand, size, batch in zip(problem.operands, sizes, (1, 2, 1), strict=True)
    )
    return GroupedCall(
        problem.groups, a, b, out, make("int32", problem.groups), None,
        problem.dtype, problem.out_dtype, problem.precision, invariant=problem.invariant,
    )  # fmt: skip


def _permute(problem: PermuteProblem, make: Make) -> PermuteCall:
    kind, lanes = f"int{8 * min(problem.itemsize, 8)}", 2 if problem.itemsize == 16 else 1
    x, out = (make(kind, lanes * span) for span in problem.spans)
    return PermuteCall(problem, x, out)


def _quantized(problem: QuantizedProblem, make: Make) -> QuantizedCall:
    m, n, size = problem.m, problem.n, problem.itemsize
    x = _view(problem.x, size, 1, make)
    words, scales = make("int32", prod(problem.words)), make(problem.dtype, prod(problem.scales))
    zeros = make("int16", prod(problem.scales)) if problem.zero_points else None
    bias = View(make(problem.dtype, n), (m, n), (0, 1), (), size) if problem.bias else None
    out = View(make(problem.dtype, m * n), (m, n), (n, 1), (), size)
    weight = (problem.dtype, problem.bits, problem.group_size)
    return QuantizedCall(x, words, scales, zeros, out, *weight, Fused(bias=bias), problem.invariant)
