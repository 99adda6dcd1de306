"""Cases: single problems of a suite, in the words of the result format, and the problems that they pose."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tritile.core.problem import (
    ACTIVATION_DTYPES,
    FP8_DTYPES,
    GROUPED_DTYPES,
    ITEMSIZE,
    LOADS,
    PRECISIONS_OF,
    GroupedProblem,
    MatmulProblem,
    PermuteProblem,
    QuantizedProblem,
    Tiled,
    alignment,
)
from tritile.errors import InvalidValueError

OPS: Final = ("matmul", "grouped", "permute", "linear_quantized")
MATMUL_LAYOUTS: Final = ("NN", "NT", "TN", "TT")
PERMUTE_ITEMSIZE: Final = ITEMSIZE | {"bool": 1, "uint8": 1, "int16": 2, "int64": 8}

_SHARED: Final = ("m", "k")  # dimensions that groups may share
_WIDER_OUT: Final = {"int8": "int32", "float8_e4m3fn": "bfloat16", "float8_e5m2": "bfloat16"}
_LAYOUT_OF: Final = {"N": "row", "T": "column"}
_WEIGHT: Final = re.compile(r"int(4|8)/(32|64|128)( zeros)?")

Checks = Iterator[tuple[bool, str]]  # conditions of a case, each with what was wanted


@dataclass(frozen=True)
class Case:
    """Describe one line of a suite: an operation on contiguous operands, in the words of the result format.

    A "matmul" is `batch` products of m x k by k x n. The letters of its layout are those of a and b: N is
    stored as it is used, T is stored transposed (NT: b lies in memory as n x k). A "permute" moves dimension
    `dims[i]` of `shape` to place i. A "linear_quantized" is x (m, k) by a weight (n, k) of the kind that its
    layout names: "int4/128". A "grouped" is of `batch` groups. They share m or k, which `ragged` names, by
    `load`.

    Raises InvalidValueError where a field does not fit its op.
    """

    suite: str
    op: str
    dtype: str
    layout: str = "NN"
    batch: int = 1
    m: int = 0
    n: int = 0
    k: int = 0
    precision: str = "ieee"
    shape: tuple[int, ...] = ()
    dims: tuple[int, ...] = ()
    epilogue: str = ""
    ragged: str = ""
    load: str = ""
    block_scales: str = ""

    def __post_init__(self) -> None:
        for holds, wanted in _checks(self):
            if not holds:
                fields = {name: value for name, value in vars(self).items() if value not in ("", ())}
                raise InvalidValueError(f"case {str(fields)[:300]}: wanted {wanted}")
        _ = self.problem  # checks the sizes

    @property
    def problem(self) -> Tiled:
        """Return the problem that contiguous tensors at aligned addresses pose."""
        return _PROBLEMS[self.op](self)


def grouped_case(
    suite: str,
    sizes: Sequence[int],
    dtype: str,
    layout: str,
    precision: str = "ieee",
    ragged: str = "m",
    load: str = "skewed",
) -> Case:
    """Return the case of op "grouped" with sizes (groups, m, n, k)."""
    groups, m, n, k = sizes
    return Case(suite, "grouped", dtype, layout, groups, m, n, k, precision, ragged=ragged, load=load)


def _checks(case: Case) -> Checks:
    """Yield all that a case must fulfil, each condition once those before it hold."""
    words = (case.suite, case.op, case.dtype, case.layout, case.precision)
    texts = (*words, case.epilogue, case.block_scales, case.ragged, case.load)
    yield all(isinstance(text, str) for text in texts), "words as text"
    yield isinstance(case.shape, tuple) and isinstance(case.dims, tuple), "shape and dims as tuples"
    numbers = (case.batch, case.m, case.n, case.k, *case.shape, *case.dims)
    yield all(type(number) is int for number in numbers), "sizes as whole numbers"
    yield case.op in OPS, f"an op of {', '.join(OPS)}"
    if case.op in ("matmul", "grouped"):
        yield case.layout in MATMUL_LAYOUTS, f"a layout of {', '.join(MATMUL_LAYOUTS)}"
    if case.op != "grouped":
        yield not case.ragged and not case.load, "a ragged size and a load of groups only"
    yield from _CHECKS_OF[case.op](case)


def _matmul_checks(case: Case) -> Checks:
    yield case.dtype in ITEMSIZE, "a dtype that matmul takes"
    yield not case.shape and not case.dims, "batch, m, n and k, no shape"
    allowed = PRECISIONS_OF.get(case.dtype, ("ieee",))
    yield case.precision in allowed, f"a precision of {', '.join(allowed)}"


def _grouped_checks(case: Case) -> Checks:
    yield case.ragged in _SHARED, f"groups that share one of {', '.join(_SHARED)}"
    yield case.load in LOADS, f"a load of {', '.join(LOADS)}"
    yield case.dtype in GROUPED_DTYPES, f"a dtype of {', '.join(GROUPED_DTYPES)}"
    bare = not (case.shape or case.dims or case.epilogue)
    yield bare, "batch (groups), m, n and k, no shape and no epilogue"


def _quantized_checks(case: Case) -> Checks:
    yield _WEIGHT.fullmatch(case.layout) is not None, 'a layout as "int4/128", or with " zeros"'
    yield case.dtype in ACTIVATION_DTYPES, f"a dtype of {', '.join(ACTIVATION_DTYPES)}"
    others = (case.batch, case.precision, case.shape, case.dims)
    yield others == (1, "ieee", (), ()), "m, n and k only"
    yield case.epilogue in ("", "bias=row"), "an epilogue of bias=row, or none"


def _permute_checks(case: Case) -> Checks:
    yield case.dtype in PERMUTE_ITEMSIZE, f"a dtype of {', '.join(PERMUTE_ITEMSIZE)}"
    matmul = (case.layout, case.batch, case.m, case.n, case.k, case.precision)
    yield matmul == ("NN", 1, 0, 0, 0, "ieee"), "shape and dims only"
    yield case.epilogue == case.block_scales == "", "shape and dims only"
    yield all(size >= 1 for size in case.shape), "sizes of 1 and more"
    axes = list(range(len(case.shape)))
    yield len(axes) >= 1 and sorted(case.dims) == axes, "dims that order those of the shape"


def _matrix_alignment(itemsize: int, layout: str, batch: int, rows: int, columns: int) -> int:
    leading = columns if layout == "row" else rows
    return alignment(leading * itemsize, *[rows * columns * itemsize] * (batch > 1))


def _matmul(case: Case) -> MatmulProblem:
    a_layout, b_layout = (_LAYOUT_OF[letter] for letter in case.layout)
    size, out_dtype = ITEMSIZE[case.dtype], _WIDER_OUT.get(case.dtype, case.dtype)
    if case.epilogue and out_dtype == "int32":
        out_dtype = "bfloat16"
    return MatmulProblem(
        batch=case.batch,
        m=case.m,
        n=case.n,
        k=case.k,
        dtype=case.dtype,
        out_dtype=out_dtype,
        a_layout=a_layout,
        b_layout=b_layout,
        a_align=_matrix_alignment(size, a_layout, case.batch, case.m, case.k),
        b_align=_matrix_alignment(size, b_layout, case.batch, case.k, case.n),
        out_align=_matrix_alignment(ITEMSIZE[out_dtype], "row", case.batch, case.m, case.n),
        precision=case.precision,
        epilogue=case.epilogue,
        block_scales=case.block_scales,
    )


def _grouped(case: Case) -> GroupedProblem:
    """Return the problem of groups; fp8 operands have scales, as torch wants them."""
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


def _quantized(case: Case) -> QuantizedProblem:
    found = _WEIGHT.fullmatch(case.layout)
    assert found is not None
    bits, group_size, align = int(found[1]), int(found[2]), alignment(2 * case.k)
    sizes = (case.m, case.n, case.k)
    weight, bias = (bits, group_size, found[3] is not None), bool(case.epilogue)
    return QuantizedProblem(*sizes, case.dtype, *weight, bias, x_align=align if case.m > 1 else 16)


def _permute(case: Case) -> PermuteProblem:
    def strides(sizes: Sequence[int]) -> list[int]:
        return [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]

    x_strides, shape = strides(case.shape), [case.shape[dim] for dim in case.dims]
    moved = [x_strides[dim] for dim in case.dims]
    return PermuteProblem.of(shape, moved, strides(shape), PERMUTE_ITEMSIZE[case.dtype])


_CHECKS_OF: Final[dict[str, Callable[[Case], Checks]]] = {
    "matmul": _matmul_checks,
    "grouped": _grouped_checks,
    "permute": _permute_checks,
    "linear_quantized": _quantized_checks,
}
_PROBLEMS: Final[dict[str, Callable[[Case], Tiled]]] = {
    "matmul": _matmul,
    "grouped": _grouped,
    "permute": _permute,
    "linear_quantized": _quantized,
}
