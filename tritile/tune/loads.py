"""Cases of products of groups: what a suite says of them, as a problem."""

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from tritile.core.problem import FP8_DTYPES, GROUPED_DTYPES, LOADS, GroupedProblem, alignment
from tritile.core.problem.checks import ITEMSIZE

Case = TypeVar("Case")
SHARED: Final = ("m", "k")  # by groups of a case
_LAYOUT_OF: Final = {"N": "row", "T": "column"}


def case_of(
    kind: Callable[..., Case],
    suite: str,
    sizes: Sequence[int],
    dtype: str,
    layout: str,
    precision: str = "ieee",
    ragged: str = "m",
    load: str = "skewed",
) -> Case:
    """The case, made by `kind`, of sizes groups, m, n and k."""
    groups, m, n, k = sizes
    return kind(suite, "grouped", dtype, layout, groups, m, n, k, precision, ragged=ragged, load=load)


def fault(case: Any) -> str | None:
    """What a case of op "grouped" should have, or None where it has that."""
    if case.ragged not in SHARED:
        return f"groups that share one of {', '.join(SHARED)}"
    if case.load not in LOADS:
        return f"a load of {', '.join(LOADS)}"
    if case.dtype not in GROUPED_DTYPES:
        return f"a dtype of {', '.join(GROUPED_DTYPES)}"
    if case.shape or case.dims or case.epilogue:
        return "batch (groups), m, n and k, no shape and no epilogue"
    return None


def problem_of(case: Any) -> GroupedProblem:
    """The problem of a case; fp8 operands have scales, as torch wants them."""
    a_layout, b_layout = (_LAYOUT_OF[letter] for letter in case.layout)
    fp8 = case.dtype in FP8_DTYPES
    size, out_dtype = ITEMSIZE[case.dtype], "bfloat16" if fp8 else case.dtype
    a_row = case.k if a_layout == "row" else case.m
    b_row = case.n if b_layout == "row" else case.k
    b_matrix = case.k * case.n if case.ragged == "m" else 0
    out_matrix = case.m * case.n if case.ragged == "k" else 0
    out_size = ITEMSIZE[out_dtype]
    return GroupedProblem(
        case.ragged, case.batch, case.m, case.n, case.k, case.dtype, out_dtype, a_layout, b_layout, "row",
        alignment(a_row * size), alignment(b_row * size, b_matrix * size),
        alignment(case.n * out_size, out_matrix * out_size), case.precision, fp8,
    )  # fmt: skip
