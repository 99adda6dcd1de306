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
RAGGED: Final = ("m", "k", "none")
MAX_GROUPS: Final = 1024  # a program holds the ends of all groups
MAX_RAGGED: Final = 2**31 - 2**16  # rows, or K, that groups share: offsets have 32 bits
LOADS: Final = ("even", "skewed", "sparse")


def ends_of(load: str, groups: int, total: int) -> tuple[int, ...]:
    """Tell where groups end that share `total`, for measuring, the same at every call.

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
    """Describe `groups` products in one call.

    `ragged` names the dimension that groups share, each with a part of its own that only the GPU knows:

    - "m": rows of a and of out; each group has a k x n matrix b.
    - "k": columns of a and rows of b; each group has an m x n product.
    - "none": nothing is shared; each group is an m x k by a k x n matrix.

    m, or k, counts all that is shared. `scaled`: for each group, rows of a and columns of b have a scale
    each. Layouts, alignments and `invariant` are as in `MatmulProblem`; an operand with a matrix for each
    group has an aligned stride over groups too.

    Raises InvalidValueError where a field is out of its range.
    """

    op: ClassVar[str] = "grouped"
    block_scales: ClassVar[str] = ""  # groups have none
    rights: ClassVar[int] = 1  # groups have one b
    ragged: str
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
        check_fields(self, ragged=RAGGED, dtype=GROUPED_DTYPES, out_dtype=outs, scaled=(False, True))
        check_fields(self, precision=GROUPED_PRECISIONS.get(self.dtype, ("ieee",)))
        check_sizes(self, self.groups, self.m, self.n, self.k)
        self._check_laid()
        if self.ragged != "none":
            check(self.groups <= MAX_GROUPS, self, f"at most {MAX_GROUPS} groups")
            shared = self.m if self.ragged == "m" else self.k
            check(shared <= MAX_RAGGED, self, f"{self.ragged} of at most {MAX_RAGGED}")

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * (self.groups if self.ragged == "none" else 1)

    @property
    def bytes(self) -> int:
        a, b, out = (operand.shape[0] * operand.shape[1] * operand.shape[2] for operand in self.operands)
        return (a + b) * self.itemsize + out * ITEMSIZE[self.out_dtype]

    @property
    def even(self) -> MatmulProblem:
        """Return the batch of products that it is where groups are as large as each other."""
        m = -(-self.m // self.groups) if self.ragged == "m" else self.m
        k = -(-self.k // self.groups) if self.ragged == "k" else self.k
        dtypes, precision = (self.dtype, self.out_dtype), self.precision
        return MatmulProblem(self.groups, m, self.n, k, *dtypes, *self.layouts, *self.aligns, precision)

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.groups, self.m, self.n, self.k)

    @property
    def kind(self) -> tuple[Any, ...]:
        dtypes = (self.dtype, self.out_dtype, self.precision, self.scaled)
        return (self.op, self.ragged, *dtypes, *self.layouts, *self.aligns)

    @property
    def of_groups(self) -> tuple[bool, bool, bool]:
        return self.ragged == "none", self.ragged != "k", self.ragged != "m"

    @property
    def operands(self) -> tuple[Operand, Operand, Operand]:
        """Return a, b and out as tensors that pose this problem, their first dimension for groups."""
        of_a, of_b, of_out = (self.groups if own else 1 for own in self.of_groups)
        return (
            operand_of(self.dtype, self.a_layout, self.a_align, (of_a, self.m, self.k)),
            operand_of(self.dtype, self.b_layout, self.b_align, (of_b, self.k, self.n)),
            operand_of(self.out_dtype, self.out_layout, self.out_align, (of_out, self.m, self.n)),
        )

    @property
    def scales(self) -> tuple[int, int]:
        """Tell how many scales a and b have, over all groups."""
        rows = self.m if self.ragged == "m" else self.groups * self.m
        return rows, self.groups * self.n

    @property
    def label(self) -> str:
        sizes = "x".join(f"({size})" if name == self.ragged else str(size)
                         for name, size in (("m", self.m), ("n", self.n), ("k", self.k)))  # fmt: skip
        precision = f" {self.precision}" if self.dtype == "float32" else ""
        flags = " scaled" * self.scaled + " invariant" * self.invariant
        return f"{self.groups} of {sizes} {self.letters} {self.dtype}{precision}{flags}"
