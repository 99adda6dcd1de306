"""Name the class of a problem: problems of one class choose among the same configs.

A class is a dtype, a layout and an alignment: what a compiled kernel depends on besides its config. Sizes and
strides do not matter. A problem whose dtype, layout or epilogue has no class of its own uses the closest one.
"""

from typing import Final, NamedTuple

from tritile.core.permutation import PermuteProblem
from tritile.core.problem import FP8_DTYPES, MatmulProblem, Tiled


class Class(NamedTuple):
    """Name the operation of a class, and describe the problems that are measured for it."""

    op: str
    what: str


# Ranges from which the problems are drawn that measure a class.
OPERATIONS: Final = 2e7, 2e12  # of a product of 16-bit types
ROWS: Final = 16384  # the largest M
SIDES: Final = 32, 32768  # N and K
MOVED: Final = 1e6, 1e9  # bytes of a tensor that is permuted
_SIXTEEN_BIT: Final = ("float16", "bfloat16")
MEASURED: Final = {
    "bf16_nn": Class("matmul", "bfloat16 NN, rows on 16 bytes"),
    "bf16_nt": Class("matmul", "bfloat16 NT, rows on 16 bytes"),
    "unaligned_16bit": Class("matmul", "bfloat16 NN and NT, rows off 16 bytes"),
    "fp16x3": Class("matmul", "float32 by fp16x3, NN and NT"),
    "fp8": Class("matmul", "float8_e4m3fn NT, rows on 16 bytes"),
    "int8": Class("matmul", "int8 NT, rows on 16 bytes"),
    "int4": Class("linear_quantized", "bfloat16 by int4 in groups of 128"),
    **{f"permute_{size}": Class("permute", f"{size}-byte elements, transposed") for size in (1, 2, 4, 8, 16)},
    "inner_dim_kept": Class("permute", "elements of 1 to 16 bytes, the densest dimension kept"),
}

_HALVES: Final = ("bf16_nn", "bf16_nt", "unaligned_16bit", "fp16x3")


def group_of(name: str) -> str:
    """Return the group of a class: classes of one share what is learnt of a config."""
    if name in _HALVES:
        return "16bit"
    op = MEASURED[name].op
    return op if op == PermuteProblem.op else name


def class_of(problem: Tiled) -> str | None:
    """Return the class whose configs serve a problem, None if none does.

    Products of 16-bit types go by b's layout, whatever a's, and whether or not they are batched, gated or
    have an epilogue. A result whose rows do not start on 16 bytes counts as unaligned, as an operand does.
    """
    if isinstance(problem, PermuteProblem):
        return f"permute_{problem.itemsize}" if problem.is_transposing else "inner_dim_kept"
    if not isinstance(problem, MatmulProblem):
        return "int4" if problem.op == MEASURED["int4"].op else None
    core = problem.core
    if core.promoted:
        return "fp16x3"
    unaligned = min(core.a_align, core.b_align, core.out_align) < 16
    if unaligned or "strided" in (core.a_layout, core.b_layout) or core.out_layout != "row":
        return "unaligned_16bit" if core.dtype in _SIXTEEN_BIT else None
    if core.dtype in _SIXTEEN_BIT:
        return "bf16_nn" if core.b_layout == "row" else "bf16_nt"
    if core.dtype in FP8_DTYPES:
        return "fp8"
    return "int8" if core.dtype == "int8" else None
