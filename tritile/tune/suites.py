"""Suites: the lists of problems, in TOML files, that are tuned for and measured.

A file holds a `description` and entries `[[cases]]`. An entry stands for every combination of its
`dtypes` (torch's names), `layouts`, `precisions` (left out: IEEE), `epilogues` (as `core.problem.Epilogue`
writes them; left out: none), `block_scales` (of fp8, as "1x128"; left out: none) and sizes. Sizes of op
"matmul" are one of `squares = [n]`, `mnk = [[m, n, k]]`, `bmnk = [[batch, m, n, k]]`, or `m = [m]` crossed
with `nk = [[n, k]]`; those of op "permute" are `shapes = [[d0, d1, ...]]` of x, and `dims = [[...]]` says
which of the dimensions comes at each place, for each shape or once for all (left out: the last two are
exchanged).
Those of op "linear_quantized" are as of "matmul", with no batch, and `weights` takes the place of layouts:
bits and group size, as "int4/128", and with zero points "int4/128 zeros".
Those of op "grouped" are `gmnk = [[groups, m, n, k]]`, its `ragged` says which of m and k groups share, and
its `loads` how (`tritile.core.problem.ends_of`).
"""

import itertools
import math
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tritile.core.problem import (
    ACTIVATION_DTYPES,
    ITEMSIZE,
    PRECISIONS_OF,
    GroupedProblem,
    MatmulProblem,
    PermuteProblem,
    QuantizedProblem,
    Tiled,
    alignment,
)
from tritile.errors import InvalidValueError
from tritile.tune import loads

OPS: Final = ("matmul", "grouped", "permute", "linear_quantized")
MATMUL_LAYOUTS: Final = ("NN", "NT", "TN", "TT")
PERMUTE_ITEMSIZE: Final = ITEMSIZE | {
    "bool": 1, "uint8": 1, "int16": 2, "int64": 8,
}  # fmt: skip

_WIDER_OUT: Final = {"int8": "int32", "float8_e4m3fn": "bfloat16", "float8_e5m2": "bfloat16"}
_LAYOUT_OF: Final = {"N": "row", "T": "column"}
_SIZE_KEYS: Final = {
    "squares": 1,
    "mnk": 3,
    "bmnk": 4,
    "gmnk": 4,
    "m": 1,
    "nk": 2,
    "shapes": 0,
}  # numbers in an item
_SIZES_WANTED: Final = {
    "matmul": ({"squares"}, {"mnk"}, {"bmnk"}, {"m", "nk"}),
    "grouped": ({"gmnk"},),
    "permute": ({"shapes"},),
    "linear_quantized": ({"squares"}, {"mnk"}, {"m", "nk"}),
}
_WEIGHT: Final = re.compile(r"int(4|8)/(32|64|128)( zeros)?")
_FORMS: Final = {
    "matmul": ("MxNxK or BxMxNxK", (3, 4)), "grouped": ("GxMxNxK", (4,)), "permute": ("MxN or BxMxN", (2, 3)),
    "linear_quantized": ("MxNxK or BxMxNxK", (3, 4)),
}  # fmt: skip
_OTHER_KEYS: Final = {
    "matmul": {"op", "dtypes", "layouts", "precisions", "epilogues", "block_scales"},
    "grouped": {"op", "dtypes", "layouts", "precisions", "ragged", "loads"},
    "permute": {"op", "dtypes", "dims"},
    "linear_quantized": {"op", "dtypes", "weights"},
}


def _matrix_alignment(itemsize: int, layout: str, batch: int, rows: int, columns: int) -> int:
    leading = columns if layout == "row" else rows
    return alignment(leading * itemsize, *[rows * columns * itemsize] * (batch > 1))


@dataclass(frozen=True)
class Case:
    """One line of a suite: what is measured, in the words of the result format.

    A "matmul" is `batch` products of m x k by k x n; the letters of its layout are those of a and b: N
    is stored as it is used, T is stored transposed (NT: b lies in memory as n x k). A "permute" moves
    dimension `dims[i]` of `shape` to place i. A "linear_quantized" is x (m, k) by a weight (n, k) of the kind
    that its layout names: "int4/128". A "grouped" is of `batch` groups, which share m or k, the
    one that `ragged` names, by `load`. Operands are contiguous.
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
        words = (self.suite, self.op, self.dtype, self.layout, self.precision)
        texts = (*words, self.epilogue, self.block_scales, self.ragged, self.load)
        self._check(all(isinstance(text, str) for text in texts), "words as text")
        self._check(
            isinstance(self.shape, tuple) and isinstance(self.dims, tuple), "shape and dims as tuples"
        )
        numbers = (self.batch, self.m, self.n, self.k, *self.shape, *self.dims)
        self._check(all(type(number) is int for number in numbers), "sizes as whole numbers")
        self._check(self.op in OPS, f"an op of {', '.join(OPS)}")
        if self.op in ("matmul", "grouped"):
            self._check(self.layout in MATMUL_LAYOUTS, f"a layout of {', '.join(MATMUL_LAYOUTS)}")
        if self.op != "grouped":
            self._check(not self.ragged and not self.load, "a ragged size and a load of groups only")
        if self.op == "grouped":
            wanted = loads.fault(self)
            self._check(wanted is None, wanted or "")
        elif self.op == "matmul":
            self._check(self.dtype in ITEMSIZE, "a dtype that matmul takes")
            self._check(not self.shape and not self.dims, "batch, m, n and k, no shape")
            allowed = PRECISIONS_OF.get(self.dtype, ("ieee",))
            self._check(self.precision in allowed, f"a precision of {', '.join(allowed)}")
        elif self.op == "linear_quantized":
            self._check(
                _WEIGHT.fullmatch(self.layout) is not None, 'a layout as "int4/128", or with " zeros"'
            )
            self._check(self.dtype in ACTIVATION_DTYPES, f"a dtype of {', '.join(ACTIVATION_DTYPES)}")
            others = (self.batch, self.precision, self.shape, self.dims)
            self._check(others == (1, "ieee", (), ()), "m, n and k only")
            self._check(self.epilogue in ("", "bias=row"), "an epilogue of bias=row, or none")
        else:
            self._check(self.dtype in PERMUTE_ITEMSIZE, f"a dtype of {', '.join(PERMUTE_ITEMSIZE)}")
            matmul = (self.layout, self.batch, self.m, self.n, self.k, self.precision)
            self._check(matmul == ("NN", 1, 0, 0, 0, "ieee"), "shape and dims only")
            self._check(self.epilogue == self.block_scales == "", "shape and dims only")
            self._check(all(size >= 1 for size in self.shape), "sizes of 1 and more")
            axes = list(range(len(self.shape)))
            self._check(len(axes) >= 1 and sorted(self.dims) == axes, "dims that order those of the shape")
        _ = self.problem  # checks the sizes

    def _check(self, condition: bool, wanted: str) -> None:
        if not condition:
            fields = {name: value for name, value in vars(self).items() if value not in ("", ())}
            raise InvalidValueError(f"case {str(fields)[:300]}: wanted {wanted}")

    @property
    def problem(self) -> Tiled:
        """The problem that contiguous tensors at aligned addresses pose."""
        posed: Tiled = getattr(self, f"_{self.op}")()
        return posed

    def _matmul(self) -> MatmulProblem:
        a_layout, b_layout = (_LAYOUT_OF[letter] for letter in self.layout)
        size, out_dtype = ITEMSIZE[self.dtype], _WIDER_OUT.get(self.dtype, self.dtype)
        if self.epilogue and out_dtype == "int32":
            out_dtype = "bfloat16"
        return MatmulProblem(
            batch=self.batch,
            m=self.m,
            n=self.n,
            k=self.k,
            dtype=self.dtype,
            out_dtype=out_dtype,
            a_layout=a_layout,
            b_layout=b_layout,
            a_align=_matrix_alignment(size, a_layout, self.batch, self.m, self.k),
            b_align=_matrix_alignment(size, b_layout, self.batch, self.k, self.n),
            out_align=_matrix_alignment(ITEMSIZE[out_dtype], "row", self.batch, self.m, self.n),
            precision=self.precision,
            epilogue=self.epilogue,
            block_scales=self.block_scales,
        )

    def _grouped(self) -> GroupedProblem:
        return loads.problem_of(self)

    def _linear_quantized(self) -> QuantizedProblem:
        found = _WEIGHT.fullmatch(self.layout)
        assert found is not None
        bits, group_size, align = int(found[1]), int(found[2]), alignment(2 * self.k)
        sizes = (self.m, self.n, self.k)
        weight, bias = (bits, group_size, found[3] is not None), bool(self.epilogue)
        return QuantizedProblem(*sizes, self.dtype, *weight, bias, x_align=align if self.m > 1 else 16)

    def _permute(self) -> PermuteProblem:
        def strides(sizes: Sequence[int]) -> list[int]:
            return [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]

        x_strides, shape = strides(self.shape), [self.shape[dim] for dim in self.dims]
        moved = [x_strides[dim] for dim in self.dims]
        return PermuteProblem.of(shape, moved, strides(shape), PERMUTE_ITEMSIZE[self.dtype])


def _exchanged(count: int) -> tuple[int, ...]:
    """The order of dimensions with the last two exchanged."""
    axes = tuple(range(count))
    return (*axes[:-2], *reversed(axes[-2:]))


def _sized_case(
    sizes: Sequence[int],
    suite: str,
    op: str,
    dtype: str,
    layout: str = "NN",
    precision: str = "ieee",
    epilogue: str = "",
    block_scales: str = "",
) -> Case:
    """The case of m, n, k (with the batch before them, if any), or of a shape to be transposed."""
    if op == "permute":
        shape = tuple(sizes)
        return Case(suite, op, dtype, shape=shape, dims=_exchanged(len(shape)))
    batch, m, n, k = (1, *sizes)[-4:]
    sized = Case(suite, op, dtype, layout, batch, m, n, k, precision, epilogue=epilogue)
    return replace(sized, block_scales=block_scales) if block_scales else sized


def _listed(entry: dict[str, Any], key: str, kind: type) -> list[Any]:
    """The list under `key`, not empty and all of one kind. Raises InvalidValueError otherwise."""
    value = entry.get(key)
    if not isinstance(value, list) or not value or any(type(item) is not kind for item in value):
        noun = {str: "words", int: "whole numbers", list: "lists of whole numbers", dict: "entries"}[kind]
        raise InvalidValueError(f"{key} = {str(value)[:100]}: wanted a list of {noun}, not empty")
    return value


def _rows(entry: dict[str, Any], key: str) -> list[list[int]]:
    count = _SIZE_KEYS.get(key, 0)  # 0: any, but not none
    if count == 1:
        return [[size] for size in _listed(entry, key, int)]
    rows = _listed(entry, key, list)
    for row in rows:
        fits = len(row) == count if count else row
        if not fits or any(type(size) is not int for size in row):
            raise InvalidValueError(f"{key} has {row!r}: wanted {count or '1 or more'} whole numbers")
    return rows


def _permutes(suite: str, entry: dict[str, Any], shapes: list[list[int]], dtypes: list[str]) -> list[Case]:
    """A case of every dtype and shape, with its own order of dimensions or the one of all."""
    orders = _rows(entry, "dims") if "dims" in entry else [list(_exchanged(len(s))) for s in shapes]
    if len(orders) not in (1, len(shapes)):
        raise InvalidValueError(f"dims has {len(orders)} orders: wanted one, or one for each shape")
    pairs = list(zip(shapes, orders if len(orders) > 1 else orders * len(shapes), strict=True))
    return [
        Case(suite, "permute", dtype, shape=tuple(shape), dims=tuple(dims))
        for dtype, (shape, dims) in itertools.product(dtypes, pairs)
    ]


def _entry_sizes(entry: dict[str, Any], op: str) -> list[list[int]]:
    given = set(entry) & set(_SIZE_KEYS)
    if given not in _SIZES_WANTED[op]:
        wanted = ", ".join(" with ".join(sorted(keys)) for keys in _SIZES_WANTED[op])
        raise InvalidValueError(f"sizes given by {sorted(given)}: wanted one of: {wanted}")
    if "nk" in given:
        return [[*m, *nk] for nk, m in itertools.product(_rows(entry, "nk"), _rows(entry, "m"))]
    rows = _rows(entry, given.pop())
    return [row * 3 for row in rows] if "squares" in entry else rows


def _entry_cases(suite: str, entry: Any) -> list[Case]:
    op = entry.get("op") if isinstance(entry, dict) else None
    if op not in OPS:
        raise InvalidValueError(f"op = {op!r}: wanted one of {', '.join(OPS)}")
    unknown = set(entry) - _OTHER_KEYS[op] - set(_SIZE_KEYS)
    if unknown:
        raise InvalidValueError(f"unknown keys {', '.join(sorted(unknown))}")
    sizes, dtypes = _entry_sizes(entry, op), _listed(entry, "dtypes", str)
    if op == "permute":
        return _permutes(suite, entry, sizes, dtypes)
    precisions = _listed(entry, "precisions", str) if "precisions" in entry else ["ieee"]
    if op == "grouped":
        layouts, ragged, how = (_listed(entry, key, str) for key in ("layouts", "ragged", "loads"))
        return [
            loads.case_of(Case, suite, *words)
            for words in itertools.product(sizes, dtypes, layouts, precisions, ragged, how)
        ]
    epilogues = _listed(entry, "epilogues", str) if "epilogues" in entry else [""]
    scales = _listed(entry, "block_scales", str) if "block_scales" in entry else [""]
    layouts = _listed(entry, "layouts" if op == "matmul" else "weights", str)
    ways = itertools.product(dtypes, layouts, precisions, epilogues, scales, sizes)
    return [_sized_case(row, suite, op, dtype, layout, *how) for dtype, layout, *how, row in ways]


def _suite_cases(suite: str, data: dict[str, Any]) -> list[Case]:
    unknown = set(data) - {"description", "cases"}
    if unknown:
        raise InvalidValueError(f"unknown keys {', '.join(sorted(unknown))}")
    if not isinstance(data.get("description", ""), str):
        raise InvalidValueError("description: wanted a line of text")
    cases: list[Case] = []
    for number, entry in enumerate(_listed(data, "cases", dict), start=1):
        try:
            cases += _entry_cases(suite, entry)
        except InvalidValueError as error:
            raise InvalidValueError(f"entry {number}: {error}") from error
    twice = [case for case, after in itertools.pairwise(sorted(cases, key=repr)) if case == after]
    if twice:
        raise InvalidValueError(f"{twice[0].problem.label} is listed twice")
    return cases


def load(path: Path) -> list[Case]:
    """The cases of a suite's file; the suite is named after the file.

    Raises InvalidValueError, with the file's name and what was wanted, if it cannot be read or holds
    anything but a suite.
    """
    try:
        return _suite_cases(path.stem, tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:  # ValueError: not TOML, not UTF-8, or not a suite
        raise InvalidValueError(f"suite {path}: {error}") from error


def find(names: Iterable[str], directory: Path) -> list[Case]:
    """The cases of the suites of these names in a folder, in the order given, each suite once.

    Raises InvalidValueError for a name that is not there, and as `load` does.
    """
    known = {path.stem: path for path in sorted(directory.glob("*.toml"))}
    cases: list[Case] = []
    for name in dict.fromkeys(names):
        if name not in known:
            raise InvalidValueError(f"no suite {name!r} in {directory}: it has {', '.join(known) or 'none'}")
        cases += load(known[name])
    return cases


def parse_shape(
    text: str, op: str = "matmul", dtype: str = "bfloat16", layout: str = "NN", precision: str = "ieee",
    suite: str = "given",
) -> Case:  # fmt: skip
    """The case of sizes written out: MxNxK or BxMxNxK, or for op "permute" MxN or BxMxN.

    Of op "grouped" GxMxNxK: groups share M by the skewed load. Layout and precision mean nothing to a
    permute; a layout of letters is "int4/128" to a "linear_quantized". Raises InvalidValueError if it is not
    a case.
    """
    if op not in OPS:
        raise InvalidValueError(f"op {op!r}: wanted one of {', '.join(OPS)}")
    parts = text.lower().split("x")
    form, counts = _FORMS[op]
    if len(parts) not in counts or not all(re.fullmatch("[0-9]{1,15}", part) for part in parts):
        raise InvalidValueError(f"shape {text!r}: wanted {form}, in whole numbers")
    sizes = [int(part) for part in parts]
    layout = "int4/128" if op == "linear_quantized" and layout in MATMUL_LAYOUTS else layout
    if op == "grouped":
        return loads.case_of(Case, suite, sizes, dtype, layout, precision)
    return _sized_case(sizes, suite, op, dtype, layout, precision)
