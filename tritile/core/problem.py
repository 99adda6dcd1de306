"""A problem: the facts of one call that decide which config is fast for it.

A problem is a frozen value of sizes, dtypes, layouts and alignments, without tensors, so it can be
remembered, compared and planned on a machine without the GPU. `sizes` are what differs between problems of
one class, and `kind` is all else that decides a config. `flops` counts multiplications and additions,
`bytes` what moves if every input is read once and the output written once. `label` is a short name for tables
of results. A field out of its range raises InvalidValueError.
"""

import functools
import itertools
import json
import math
import random
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, ClassVar, Final, Literal, get_args

from tritile.core.epilogue import BARE, Epilogue
from tritile.core.fields import ALIGNMENTS, Base, alignment, check, check_fields, check_sizes
from tritile.core.permutation import PermuteProblem
from tritile.errors import InvalidValueError

ITEMSIZE: Final = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "int32": 4,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
MATMUL_DTYPES: Final = tuple(name for name in ITEMSIZE if name != "int32")
FP8_DTYPES: Final = ("float8_e4m3fn", "float8_e5m2")
GATED_DTYPES: Final = ("float16", "bfloat16", "float32", "float64")
LAYOUTS: Final = ("row", "column", "strided")
Precision = Literal["ieee", "fp16x3", "tf32", "fast"]
# Dtypes whose precision may be named; of all others it is "ieee". "fast": sums stay in tensor cores.
PRECISIONS_OF: Final[dict[str, tuple[Precision, ...]]] = {
    "float32": ("ieee", "fp16x3", "tf32"),
    "float64": ("ieee",),
    **dict.fromkeys(FP8_DTYPES, ("ieee", "fast")),
}
PRECISIONS: Final[tuple[Precision, ...]] = get_args(Precision)
AS_TORCH: Final = "torch"  # the precision that torch is set to, if tritile does not know that setting
SCALE_K: Final = 128  # elements of K that share a scale within a sum, and that tensor cores sum of fp8
# How many rows of a, and columns of b, share a scale within a sum.
BLOCK_SCALES: Final = {"": None, "1x1": (1, 1), "1x128": (1, 128), "128x1": (128, 1), "128x128": (128, 128)}


class _Sized(Base):
    _SIZES: ClassVar[tuple[str, ...]]  # names of fields
    op: ClassVar[str]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in self._SIZES)

    @property
    def kind(self) -> tuple[Any, ...]:
        cls: Any = type(self)
        return (self.op, *(getattr(self, name) for name in _fields(cls) if name not in self._SIZES))


# --- Products ---


def _leading(extent: int, itemsize: int, align: int) -> int:
    """Return the smallest stride of at least `extent` elements that has just this alignment, in bytes."""
    unit = max(1, align // itemsize)
    stride = -(-extent // unit) * unit
    if align < 16 and stride * itemsize % (2 * align) == 0 and align >= itemsize:
        stride += unit
    return stride


class _Laid(_Sized):
    """What products of matrices a and b into out have in common: layouts, alignments and dtypes."""

    m: int
    n: int
    k: int
    dtype: str
    out_dtype: str
    precision: str
    a_layout: str
    b_layout: str
    out_layout: str
    a_align: int
    b_align: int
    out_align: int

    def _check_laid(self) -> None:
        check_fields(self, a_layout=LAYOUTS, b_layout=LAYOUTS, out_layout=LAYOUTS, invariant=(False, True))
        check_fields(self, a_align=ALIGNMENTS, b_align=ALIGNMENTS, out_align=ALIGNMENTS)

    @property
    def layouts(self) -> tuple[str, str, str]:
        return (self.a_layout, self.b_layout, self.out_layout)

    @property
    def aligns(self) -> tuple[int, int, int]:
        return (self.a_align, self.b_align, self.out_align)

    @property
    def leading(self) -> tuple[int, int, int]:
        """Elements from one row of a, b and out to the next, or one column, if these have no gaps.

        Of a strided matrix a row has every other element.
        """
        shapes = (self.m, self.k), (self.k, self.n), (self.m, self.n)
        extents = (
            rows if layout == "column" else columns * (1 + (layout == "strided"))
            for layout, (rows, columns) in zip(self.layouts, shapes, strict=True)
        )
        sizes = self.itemsize, self.itemsize, ITEMSIZE[self.out_dtype]
        a, b, out = map(_leading, extents, sizes, self.aligns)
        return (a, b, out)

    @property
    def letters(self) -> str:
        """The layouts of a and b as a BLAS names them: N by rows, T by columns, or S for strided."""
        names = {"row": "N", "column": "T", "strided": "S"}
        return names[self.a_layout] + names[self.b_layout]

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def promoted(self) -> bool:
        """True if sums of parts go from tensor cores to totals in fp32, in as many registers again."""
        return self.dtype == "float16" and self.precision == "fp16x3"

    @property
    def totals(self) -> bool:
        """True if sums move from tensor cores to totals in fp32: of parts, and of fp8 unless "fast"."""
        return self.promoted or (self.dtype in FP8_DTYPES and self.precision != "fast")


_BY_ROWS_FROM: Final = 128  # rows of a


@dataclass(frozen=True)
class MatmulProblem(_Laid):
    """`batch` products of an m x k matrix a by a k x n matrix b into out.

    Attributes:
        batch: how many products.
        m: rows of a and out.
        n: columns of b and out.
        k: columns of a and rows of b.
        dtype: dtype of a, and of b unless `b_dtype` is set, by its name in torch, such as "bfloat16".
        out_dtype: dtype of out.
        a_layout: "row" if contiguous along the last dimension, "column" along the first, "strided" along
            neither.
        b_layout: as for a.
        out_layout: as for a.
        a_align: largest power of two, up to 16, in bytes, that divides the address and every stride of a
            except the contiguous one.
        b_align: as for a.
        out_align: as for a.
        precision: as in `tritile.matmul`.
        epilogue: what is fused into the store, as an Epilogue or its text.
        b_dtype: dtype of b if it differs from that of a; only fp8 dtypes may be mixed.
        block_scales: how many rows of a and columns of b share the scale for each 128 of K: with "1x128" each
            row of a has one, and each 128 columns of b. "" without such scales. See BLOCK_SCALES.
        invariant: sums are made in the same order for all m and n; see `tritile.families.numerics`.

    Raises:
        InvalidValueError: a field is out of its range.
    """

    op: ClassVar[str] = "matmul"
    _SIZES: ClassVar = ("batch", "m", "n", "k")
    batch: int
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
    epilogue: Epilogue = BARE
    b_dtype: str = ""
    block_scales: str = ""
    invariant: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.epilogue, str):
            object.__setattr__(self, "epilogue", Epilogue.parse(self.epilogue))
        check(isinstance(self.epilogue, Epilogue), self, "an Epilogue, or its text")
        check_sizes(self, self.batch, self.m, self.n, self.k)
        check_fields(self, dtype=MATMUL_DTYPES, out_dtype=tuple(ITEMSIZE), block_scales=tuple(BLOCK_SCALES))
        check_fields(self, precision=(*PRECISIONS, AS_TORCH) if self.dtype == "float32" else PRECISIONS)
        self._check_laid()
        mixed = {self.dtype, self.b_dtype} == set(FP8_DTYPES)
        check(not self.b_dtype or mixed, self, "a b_dtype only if a and b have fp8 dtypes that differ")
        scalable = self.dtype in FP8_DTYPES and self.batch == 1
        check(not self.block_scales or scalable, self, "block scales of fp8, in one product")
        # fp8 needs scales, fp16x3 transforms both matrices: not offered
        gateable = self.dtype in GATED_DTYPES and self.precision != "fp16x3"
        check(gateable or not self.epilogue.gated, self, "gated products of real floating types")

    @property
    def rights(self) -> int:
        """How many matrices a is multiplied by: two if gated."""
        return 2 if self.epilogue.gated else 1

    @property
    def needs_torch(self) -> bool:
        """True if only torch has a kernel for it.

        fp8 with scales within the sum, and a setting of torch's that tritile does not know.
        """
        return bool(self.block_scales) or self.precision == AS_TORCH

    @property
    def flops(self) -> int:
        return 2 * self.rights * self.batch * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        inputs = self.k * (self.m + self.rights * self.n) * self.itemsize
        outputs = self.m * self.n * ITEMSIZE[self.out_dtype]
        read = [self.epilogue.bias, self.epilogue.residual].count("full")
        return self.batch * (inputs + outputs * (1 + read))

    @property
    def in_parts(self) -> bool:
        return self.dtype == "float32" and self.precision == "fp16x3"

    @property
    def by_rows(self) -> bool:
        """True if b is copied row by row first: see `tritile.families.rows.lowering`.

        The copy of an element takes as long as some 45 multiplications by it save.
        """
        plain = self.dtype == "float32" and self.precision == "ieee" and self.rights == 1
        return plain and self.b_layout == "column" and self.m >= _BY_ROWS_FROM

    @functools.cached_property
    def core(self) -> "MatmulProblem":
        """The product that kernels make: another one if operands are transformed first."""
        if self.by_rows:
            return replace(self, b_layout="row", b_align=16)
        if not self.in_parts:
            return self
        return replace(
            self,
            k=3 * part_length(self.k),
            dtype="float16",
            epilogue=replace(self.epilogue, scale_a="column", scale_b="row"),
            a_layout="column" if self.a_layout == "column" else "row",
            b_layout="row" if self.b_layout == "row" else "column",
            a_align=16,
            b_align=16,
        )

    @property
    def label(self) -> str:
        batch = f"{self.batch}x" if self.batch > 1 else ""
        precision = f" {self.precision}" if self.dtype in PRECISIONS_OF else ""
        epilogue = f" {self.epilogue}" if self.epilogue else ""
        dtype = f"{self.dtype} by {self.b_dtype}" if self.b_dtype else self.dtype
        scales = f" scales {self.block_scales}" if self.block_scales else ""
        mode = " invariant" if self.invariant else ""
        return f"{batch}{self.m}x{self.n}x{self.k} {self.letters} {dtype}{precision}{scales}{epilogue}{mode}"


# --- float32 products that are made of float16 parts: see `tritile.families.fp16x3.lowering` ---

PART_UNIT: Final = 64  # elements of K: whole cache lines of fp16
PROMOTED_EVERY: Final = 64  # elements of K that tensor cores, which truncate, sum at a time


def part_length(k: int) -> int:
    """Return K of each of the three parts that follow one another along the core's K."""
    return -(-k // PART_UNIT) * PART_UNIT


# --- Products of groups: many in one call, whose sizes only the GPU knows ---

GROUPED_DTYPES: Final = ("float32", "float16", "bfloat16", *FP8_DTYPES)
# Dtypes with a choice of precision, as in PRECISIONS_OF.
GROUPED_PRECISIONS: Final[dict[str, tuple[Precision, ...]]] = {
    "float32": ("ieee", "tf32"), **dict.fromkeys(FP8_DTYPES, ("ieee", "fast")),
}  # fmt: skip
MAX_GROUPS: Final = 1024  # a program holds the ends of all groups
MAX_RAGGED: Final = 2**31 - 2**16  # rows of all groups: offsets have 32 bits
LOADS: Final = ("even", "skewed", "sparse")


def ends_of(load: str, groups: int, total: int) -> tuple[int, ...]:
    """Return where groups that divide `total` end, for measuring; the same at every call.

    "even": all the same size, up to rounding. "skewed": the i-th largest has 1 / i of the largest's share, in
    random order. "sparse": every fourth group as in "even", and the others empty.
    Raises InvalidValueError for another load.
    """
    if load not in LOADS:
        raise InvalidValueError(f"load {load!r}: expected one of {', '.join(LOADS)}")
    weights = [1.0] * groups
    if load == "skewed":
        weights = [1 / (i + 1) for i in range(groups)]
        random.Random(groups).shuffle(weights)
    elif load == "sparse":
        weights = [float(i % 4 == 0) for i in range(groups)]
    whole = math.fsum(weights)
    return tuple(round(total * share / whole) for share in itertools.accumulate(weights))


@dataclass(frozen=True)
class GroupedProblem(_Laid):
    """`groups` products in one call: rows of a, m in all, by a k x n matrix b for each group.

    Only the GPU knows which rows belong to a group.

    Attributes:
        groups: how many groups.
        m: rows of a in all groups together.
        n: columns of each b.
        k: columns of a and rows of each b.
        dtype: dtype of a and b.
        out_dtype: dtype of out.
        a_layout: as in `MatmulProblem`, like the other layouts.
        b_layout: as in `MatmulProblem`.
        out_layout: as in `MatmulProblem`.
        a_align: as in `MatmulProblem`, like the other alignments.
        b_align: as in `MatmulProblem`; the stride from group to group counts too.
        out_align: as in `MatmulProblem`.
        precision: as in `tritile.grouped_matmul`.
        scaled: each row of a, and each column of each b, has a scale.
        invariant: as in `MatmulProblem`.

    Raises:
        InvalidValueError: a field is out of its range.
    """

    op: ClassVar[str] = "grouped"
    _SIZES: ClassVar = ("groups", "m", "n", "k")
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
    def needs_torch(self) -> bool:
        """True if only torch has a kernel for it: products of fp8."""
        return self.scaled or self.dtype in FP8_DTYPES

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        inputs = self.k * (self.m + self.groups * self.n) * self.itemsize
        return inputs + self.m * self.n * ITEMSIZE[self.out_dtype]

    @property
    def even(self) -> MatmulProblem:
        """The batch of products that it would be if all groups had the same size."""
        dtypes, m = (self.dtype, self.out_dtype), -(-self.m // self.groups)
        return MatmulProblem(
            self.groups, m, self.n, self.k, *dtypes, *self.layouts, *self.aligns, self.precision
        )

    @property
    def label(self) -> str:
        sizes = f"({self.m})x{self.n}x{self.k}"
        precision = f" {self.precision}" if self.dtype == "float32" else ""
        scaled, mode = " scaled" if self.scaled else "", " invariant" if self.invariant else ""
        return f"{self.groups} of {sizes} {self.letters} {self.dtype}{precision}{scaled}{mode}"


# --- Products with a weight of 4- or 8-bit integers, laid out as `tritile.core.quantized` says ---

WeightBits = Literal[4, 8]
GroupSize = Literal[32, 64, 128]
WEIGHT_BITS: Final[tuple[WeightBits, ...]] = get_args(WeightBits)
GROUP_SIZES: Final[tuple[GroupSize, ...]] = get_args(GroupSize)
ACTIVATION_DTYPES: Final = ("bfloat16", "float16")
UNIT_WORDS: Final = 128  # words of 32 bits that 8 rows of `unit_columns` are packed into
_ROWS: Final = 16  # rows of a weight are padded to a multiple


def _padded(extent: int, multiple: int) -> int:
    return -(-extent // multiple) * multiple


def unit_columns(bits: int) -> int:
    """Return how many columns of a weight are packed together: K is padded to a multiple."""
    return 512 // bits


def words_shape(n: int, k: int, bits: int) -> tuple[int, int]:
    """Return the shape of a packed weight (n, k): eights of rows, and 32-bit words of each."""
    unit = unit_columns(bits)
    return _padded(n, _ROWS) // 8, _padded(k, unit) // unit * UNIT_WORDS


def scales_shape(n: int, k: int, bits: int, group_size: int) -> tuple[int, int]:
    """Return the shape of scales and zero points: groups and rows, those of padding included."""
    return -(-_padded(k, unit_columns(bits)) // group_size), _padded(n, _ROWS)


def unpacked_row(k: int) -> int:
    """Return elements from one row of K 16-bit floats to the next, where a weight is unpacked in memory."""
    return _padded(k, 64)  # lines of 128 bytes


@dataclass(frozen=True)
class QuantizedProblem(_Sized):
    """x @ weight^T + bias: x (m, k) by a weight (n, k) of integers.

    Attributes:
        m: rows of x.
        n: rows of the weight.
        k: columns of x and the weight.
        dtype: dtype of x, the scales, the result and the bias: "bfloat16" or "float16".
        bits: 4 or 8, for each integer.
        group_size: how many columns of a row share a scale: 32, 64 or 128.
        zero_points: each group has a zero point.
        bias: a bias (n,) is added.
        x_layout: "row" or "strided".
        x_align: as `a_align` in `MatmulProblem`.
        invariant: as in `MatmulProblem`.

    Raises:
        InvalidValueError: a field is out of its range.
    """

    op: ClassVar[str] = "linear_quantized"
    _SIZES: ClassVar = ("m", "n", "k")
    batch: ClassVar[int] = 1
    itemsize: ClassVar[int] = 2  # bytes of an activation
    m: int
    n: int
    k: int
    dtype: str
    bits: int
    group_size: int
    zero_points: bool = False
    bias: bool = False
    x_layout: str = "row"
    x_align: int = 16
    invariant: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, self.m, self.n, self.k)
        check_fields(self, dtype=ACTIVATION_DTYPES, bits=WEIGHT_BITS, group_size=GROUP_SIZES)
        check_fields(self, x_layout=("row", "strided"), x_align=ALIGNMENTS)
        check_fields(self, zero_points=(False, True), bias=(False, True), invariant=(False, True))

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def words(self) -> tuple[int, int]:
        return words_shape(self.n, self.k, self.bits)

    @property
    def scales(self) -> tuple[int, int]:
        return scales_shape(self.n, self.k, self.bits, self.group_size)

    @property
    def weight_bytes(self) -> int:
        return 4 * math.prod(self.words) + 2 * math.prod(self.scales) * (1 + self.zero_points)

    @property
    def unpacked_bytes(self) -> int:
        """Bytes of the weight as a matrix of 16-bit floats: see `unpacked_row`."""
        return self.itemsize * self.scales[1] * unpacked_row(self.k)

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.itemsize * (self.m * (self.k + self.n) + self.n * self.bias)

    @functools.cached_property
    def product(self) -> MatmulProblem:
        """The same product with a weight that is not quantized, which lies row by row."""
        layouts, aligns = (self.x_layout, "column"), (self.x_align, 16, alignment(self.itemsize * self.n))
        dtypes, epilogue = (self.dtype, self.dtype), Epilogue(bias="row" if self.bias else "")
        return MatmulProblem(1, self.m, self.n, self.k, *dtypes, *layouts, "row", *aligns, epilogue=epilogue)

    @property
    def label(self) -> str:
        zeros, bias = " zeros" if self.zero_points else "", " bias" if self.bias else ""
        strided = " strided" if self.x_layout == "strided" else ""
        weight = f"int{self.bits}/{self.group_size}{zeros}"
        mode = " invariant" if self.invariant else ""
        return f"{self.m}x{self.n}x{self.k} {self.dtype} by {weight}{bias}{strided}{mode}"


# --- Calls of kernels under `tritile.autotune` ---


def _pairs(value: Any) -> bool:
    whole = isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value)
    return whole and all(isinstance(name, str) for name, _ in value)


def _plain(value: Any) -> bool:
    finite = not isinstance(value, float) or math.isfinite(value)
    return isinstance(value, int | float | bool | str | None) and finite


@dataclass(frozen=True)
class KernelProblem:
    """A call of a kernel decorated with `tritile.autotune`.

    Attributes:
        kernel: name of the kernel.
        key: names and values of its key arguments.
        dtypes: names and dtypes of its tensors.

    Raises:
        InvalidValueError: a field is out of its range.
    """

    op: ClassVar[str] = "kernel"
    kernel: str
    key: tuple[tuple[str, int | float | bool | str | None], ...]
    dtypes: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        check(isinstance(self.kernel, str), self, "the kernel's name")
        check(_pairs(self.key) and all(_plain(v) for _, v in self.key), self, "plain, finite key values")
        check(_pairs(self.dtypes) and all(isinstance(v, str) for _, v in self.dtypes), self, "dtypes by name")

    @property
    def sizes(self) -> tuple[int, ...]:
        """The integers of the key: by them two problems of one kernel are near or far."""
        return tuple(v for _, v in self.key if isinstance(v, int) and not isinstance(v, bool) and v > 0)

    @property
    def label(self) -> str:
        return f"{self.kernel} " + " ".join(f"{name}={value}" for name, value in self.key)


# --- Problems as JSON ---

Plain = MatmulProblem | PermuteProblem  # every operand is a plain tensor
Product = MatmulProblem | GroupedProblem
Tiled = Plain | GroupedProblem | QuantizedProblem  # made by tritile's own kernels, tile by tile
Problem = Tiled | KernelProblem
# Fields that older files lack, which have their defaults there.
_ADDED: Final = ("epilogue", "b_dtype", "block_scales", "invariant")
_ENCODER: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
_KINDS: Final[dict[str, type]] = {kind.op: kind for kind in get_args(Problem)}


@functools.cache
def _fields(kind: Any) -> dict[str, Any]:
    """Return the names of a problem's fields; of those that came later with their defaults."""
    return {field.name: field.default if field.name in _ADDED else MISSING for field in fields(kind)}


def problem_to_dict(problem: Problem) -> dict[str, Any]:
    """Return a dictionary that JSON holds and `problem_from_dict` reads back."""
    found = {"op": problem.op}
    kind: Any = type(problem)
    for name, default in _fields(kind).items():
        if (value := getattr(problem, name)) != default:
            found[name] = str(value) if name == "epilogue" else value
    return found


def problem_key(problem: Problem) -> str:
    return _ENCODER.encode(problem_to_dict(problem))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def problem_from_dict(data: Any) -> Problem:
    """Return the problem that `problem_to_dict` wrote. Raises InvalidValueError for anything else."""
    kind = _KINDS.get(str(data.get("op"))) if isinstance(data, Mapping) else None
    names = set() if kind is None else set(_fields(kind))
    if kind is None or not names - set(_ADDED) <= set(data) - {"op"} <= names:
        raise InvalidValueError(f"{str(data)[:200]!r} is no problem of {', '.join(_KINDS)}")
    try:
        problem: Problem = kind(**{name: _tuples(value) for name, value in data.items() if name != "op"})
        return problem
    except TypeError as error:
        raise InvalidValueError(f"{str(data)[:200]!r} is no problem: {error}") from error
