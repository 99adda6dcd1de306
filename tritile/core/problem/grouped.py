"""Describe products of groups: many products in one call, whose sizes only the GPU knows."""

import itertools
import math
import random
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from tritile.core.problem.checks import (
    FP8_DTYPES,
    ITEMSIZE,
    Laid,
    Precision,
    check,
    check_fields,
    check_sizes,
)
from tritile.core.problem.matmul import MatmulProblem, Operand, operand_of
from tritile.errors import InvalidValueError

GROUPED_DTYPES: Final = ("float32", "float16", "bfloat16", *FP8_DTYPES)
# Dtypes with a choice of precision, as in `MatmulProblem`.
GROUPED_PRECISIONS: Final[dict[str, tuple[Precision, ...]]] = {
    "float32": ("ieee", "tf32"), **dict.fromkeys(FP8_DTYPES, ("ieee", "fast")),
}  # fmt: skip
MAX_GROUPS: Final = 1024  # a program holds the ends of all groups
MAX_RAGGED: Final = 2**31 - 2**16  # rows of all groups: offsets have 32 bits
LOADS: Final = ("even", "skewed", "sparse")


def ends_of(load: str, groups: int, total: int) -> tuple[int, ...]:
    """Return where groups end that share `total`, for measuring, the same at every call.

    "even": all as large, but for what does not divide; "skewed": in any order, the i-th largest has 1 / i of
    the largest's share; "sparse": as "even" of every fourth group, the others being empty.
    Raises InvalidValueError for another load.
    """
    if load not in LOADS:
        raise InvalidValueError(f"load {load!r}: wanted one of {', '.join(LOADS)}")
    weights = [1.0] * groups
    if load == "skewed":
        weights = [1 / (i + 1) for i in range(groups)]
        random.Random(groups).shuffle(weights)
    elif load == "sparse":
        weights = [float(i % 4 == 0) for i in range(groups)]
    whole = math.fsum(weights)
    return tuple(round(total * share / whole) for share in itertools.accumulate(weights))


@dataclass(frozen=True)
class GroupedProblem(Laid):
    """Describe `groups` products in one call: of rows of a, m in all, by a k x n matrix b for each group.

    Which rows belong to a group only the GPU knows. `scaled`: rows of a, and columns of each b, have a scale
    each. Layouts, alignments and `invariant` are as in `MatmulProblem`; b has an aligned stride over groups
    too.

    Raises InvalidValueError where a field is out of its range.
    """

    op: ClassVar[str] = "grouped"
    rights: ClassVar[int] = 1  # groups have one b
    groups: int
    m: int
    n: int
    k: int
    dtype: str
    out_dtype: str
    a_layout: str = "row"
    b_layout: str = "row"
    out_layout: str = "row"
    a_align: int = 16
    b_align: int = 16
    out_align: int = 16
    precision: str = "ieee"
    scaled: bool = False
    invariant: bool = False

    def __post_init__(self) -> None:
        outs = ("float32", "float16", "bfloat16")
        check_fields(self, dtype=GROUPED_DTYPES, out_dtype=outs, scaled=(False, True))
        check_fields(self, precision=GROUPED_PRECISIONS.get(self.dtype, ("ieee",)))
        check_sizes(self, self.groups, self.m, self.n, self.k)
        self._check_laid()
        check(self.groups <= MAX_GROUPS, self, f"at most {MAX_GROUPS} groups")
        check(self.m <= MAX_RAGGED, self, f"m of at most {MAX_RAGGED}")

    @property
    def is_torchs(self) -> bool:
        """True if no kernel of tritile's makes it, and torch's does: products of fp8."""
        return self.scaled or self.dtype in FP8_DTYPES

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        a, b, out = (operand.shape[0] * operand.shape[1] * operand.shape[2] for operand in self.operands)
        return (a + b) * self.itemsize + out * ITEMSIZE[self.out_dtype]

    @property
    def even(self) -> MatmulProblem:
        """Return the batch of products that it is where groups are as large as each other."""
        dtypes, m = (self.dtype, self.out_dtype), -(-self.m // self.groups)
        return MatmulProblem(
            self.groups, m, self.n, self.k, *dtypes, *self.layouts, *self.aligns, self.precision
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.groups, self.m, self.n, self.k)

    @property
    def kind(self) -> tuple[Any, ...]:
        dtypes = (self.dtype, self.out_dtype, self.precision, self.scaled)
        return (self.op, *dtypes, *self.layouts, *self.aligns)

    @property
    def operands(self) -> tuple[Operand, Operand, Operand]:
        """Return a, b and out as tensors that pose this problem, the first dimension of b for groups."""
        return (
            operand_of(self.dtype, self.a_layout, self.a_align, (1, self.m, self.k)),
            operand_of(self.dtype, self.b_layout, self.b_align, (self.groups, self.k, self.n)),
            operand_of(self.out_dtype, self.out_layout, self.out_align, (1, self.m, self.n)),
        )

    @property
    def label(self) -> str:
        sizes = f"({self.m})x{self.n}x{self.k}"
        precision = f" {self.precision}" if self.dtype == "float32" else ""
        flags = " scaled" * self.scaled + " invariant" * self.invariant
        return f"{self.groups} of {sizes} {self.letters} {self.dtype}{precision}{flags}"
