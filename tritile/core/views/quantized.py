"""Reduce products with packed weights to what kernels take."""

from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from tritile.core.problem import QuantizedProblem
from tritile.core.views.products import UNFUSED, Buffered, Fused, Make, View, view_of


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
        """Return the problem that this call poses."""
        layout = "row" if self.x.layout == "row" else "strided"
        return QuantizedProblem(
            *self.out.shape, self.x.shape[1], self.dtype, self.bits, self.group_size,
            self.zeros is not None, self.fused.bias is not None, layout, self.x.align, self.invariant,
        )  # fmt: skip

    @property
    def buffers(self) -> dict[str, Any]:
        """Return what the kernel's pointers point to, by name."""
        bias = self.fused.bias and self.fused.bias.tensor
        found = {"x": self.x.tensor, "words": self.words, "scales": self.scales, "zeros": self.zeros}
        found |= {"bias": bias, "out": self.out.tensor}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


def posed_quantized(problem: QuantizedProblem, make: Make) -> QuantizedCall:
    """Return a call that poses a product with a packed weight."""
    m, n, size = problem.m, problem.n, problem.itemsize
    x = view_of(problem.x, size, 1, make)
    words, scales = make("int32", prod(problem.words)), make(problem.dtype, prod(problem.scales))
    zeros = make("int16", prod(problem.scales)) if problem.zero_points else None
    bias = View(make(problem.dtype, n), (m, n), (0, 1), (), size) if problem.bias else None
    out = View(make(problem.dtype, m * n), (m, n), (n, 1), (), size)
    weight = (problem.dtype, problem.bits, problem.group_size)
    return QuantizedCall(x, words, scales, zeros, out, *weight, Fused(bias=bias), problem.invariant)
