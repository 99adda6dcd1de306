"""Name the class of a problem: problems of one class share a portfolio of configs.

A class holds what a compiled kernel depends on besides its config. Problems of dtypes, layouts and epilogues
without a class of their own use the class that is most like them. Sizes and strides never matter.
"""

from typing import Final, NamedTuple

from tritile.core.permutation import PermuteProblem
from tritile.core.problem import FP8_DTYPES, MatmulProblem, Tiled


class Class(NamedTuple):
    """Name the operation of a class, and describe the problems that are measured for it."""

    op: str
    what: str


# The least and the most of problems that are drawn to measure a class.
OPERATIONS: Final = 2e7, 2e12  # of a product of 16-bit types
ROWS: Final = 16384  # the largest M
SIDES: Final = 32, 32768  # N and K
MOVED: Final = 1e6, 1e9  # bytes of a tensor that is permuted
_HALVES: Final = ("float16", "bfloat16")
MEASURED: Final = {
    "halves-nn": Class("matmul", "bfloat16 NN, rows on 16 bytes"),
    "halves-nt": Class("matmul", "bfloat16 NT, rows on 16 bytes"),
    "halves-odd": Class("matmul", "bfloat16 NN and NT, rows off 16 bytes"),
    "parts": Class("matmul", "float32 by fp16x3, NN and NT"),
    "fp8": Class("matmul", "float8_e4m3fn NT, rows on 16 bytes"),
    "int8": Class("matmul", "int8 NT, rows on 16 bytes"),
    "weights": Class("linear_quantized", "bfloat16 by int4 in groups of 128"),
    **{f"permute-{size}": Class("permute", f"{size}-byte elements, transposed") for size in (1, 2, 4, 8, 16)},
    "kept": Class("permute", "elements of 1 to 16 bytes, the densest dimension kept"),
}


def class_of(problem: Tiled) -> str | None:
    """Return the class whose portfolio serves a problem, None where none does.

    Products of 16-bit types go by b's layout, whatever a's, and whether or not they are batched, gated or
    have an epilogue. A result whose rows do not start on 16 bytes counts as odd.
    """
    if isinstance(problem, PermuteProblem):
        return f"permute-{problem.itemsize}" if problem.is_transposing else "kept"
    if not isinstance(problem, MatmulProblem):
        return "weights" if problem.op == MEASURED["weights"].op else None
    core = problem.core
    if core.promoted:
        return "parts"
    odd = min(core.a_align, core.b_align, core.out_align) < 16
    if odd or "strided" in (core.a_layout, core.b_layout) or core.out_layout != "row":
        return "halves-odd" if core.dtype in _HALVES else None
    if core.dtype in _HALVES:
        return "halves-nn" if core.b_layout == "row" else "halves-nt"
    if core.dtype in FP8_DTYPES:
        return "fp8"
    return "int8" if core.dtype == "int8" else None
