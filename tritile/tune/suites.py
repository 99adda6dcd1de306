"""Suites: lists of problems to tune and to measure, in TOML files. `SHIPPED` is the folder of tritile's own.

A file holds a `description` and entries `[[cases]]`. An entry stands for every combination of what it lists:

- `op`: one of `OPS`; `dtypes`: names of torch's.
- `sizes`: as the command line takes them, "4096x4096x1024". `m = [...]` stands for a first size of each.
- "matmul": sizes MxNxK or BxMxNxK; `layouts`; `precisions` (default: IEEE); `epilogues`, as
  `core.epilogue.Epilogue` writes them (default: none).
- "permute": sizes of x, of any rank. `dims = [[...]]` is the order of dimensions as `torch.permute` takes it,
  for each x or once for all (default: the last two are exchanged).
- "linear_quantized": sizes MxNxK. `weights` takes the place of layouts: bits and group size, as "int4/128",
  and with zero points "int4/128 zeros".
- "grouped": sizes GxMxNxK; `layouts`; `precisions`. `loads`: how groups share m
  (`tritile.core.problem.ends_of`).
"""

import dataclasses
import itertools
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from tritile.core.epilogue import Epilogue
from tritile.core.fields import alignment
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import (
    ACTIVATION_DTYPES,
    FP8_DTYPES,
    GROUPED_DTYPES,
    ITEMSIZE,
    LOADS,
    MATMUL_DTYPES,
    PRECISIONS_OF,
    GroupedProblem,
    MatmulProblem,
    QuantizedProblem,
    Tiled,
)
from tritile.errors import FileError, InvalidValueError

SHIPPED: Final = Path(__file__).parents[1] / "suites"
MATMUL_LAYOUTS: Final = ("NN", "NT", "TN", "TT")
PERMUTE_ITEMSIZE: Final = ITEMSIZE | {
    "bool": 1, "uint8": 1, "int16": 2, "int64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip
OF_ITEMSIZE: Final = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "int64", 16: "complex128"}  # to permute
_WIDER_OUT: Final = {"int8": "int32", "float8_e4m3fn": "bfloat16", "float8_e5m2": "bfloat16"}
_LAYOUT_OF: Final = {"N": "row", "T": "column"}
_WEIGHT: Final = re.compile(r"int(4|8)/(32|64|128)( zeros)?")
_MATRICES: Final = ("batch", "m", "n", "k")
_OPTIONAL: Final = {"precisions", "epilogues"}


@dataclass(frozen=True)
class Case:
    """Describe one line of a suite: an operation on contiguous operands, in the words of the result format.

    A "matmul" is `batch` products of m x k by k x n. The letters of its layout are those of a and b: N is
    stored as it is used, T is stored transposed (NT: b lies in memory as n x k). A "permute" moves dimension
    `dims[i]` of `shape` to place i. A "linear_quantized" is x (m, k) by a weight (n, k) of the kind that its
    layout names: "int4/128". A "grouped" is of `batch` groups, which share m by `load`.

    Raises InvalidValueError if a field does not fit its op.
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
    load: str = ""

    def __post_init__(self) -> None:
        if expected := _misfit(self):
            fields = {name: value for name, value in vars(self).items() if value not in ("", ())}
            raise InvalidValueError(f"case {str(fields)[:300]}: expected {expected}")
        _ = self.problem  # checks the sizes

    @property
    def problem(self) -> Tiled:
        """The problem of a call on contiguous tensors at aligned addresses."""
        return _TABLE[self.op].problem(self)


def _misfit(case: Case) -> str:
    """Return what was expected of a case whose strings or types of values are wrong, else ""."""
    if case.op not in OPS:
        return f"an op of {', '.join(OPS)}"
    op = _TABLE[case.op]
    words, allowed = op.words, {"suite", "op", *op.listed.values(), *op.sizes, *op.words}
    for field in dataclasses.fields(case):
        value, default = getattr(case, field.name), field.default
        if type(value) is not (str if default is dataclasses.MISSING else type(default)):
            return "words as text, sizes as whole numbers, shape and dims as tuples"
        if field.name not in allowed and value != default:
            return f"no {field.name}"
        if value not in words.get(field.name, (value,)):
            return f"a {field.name} of {', '.join(filter(None, words[field.name]))}"
    precisions = PRECISIONS_OF.get(case.dtype, ("ieee",))
    if case.precision not in precisions:
        return f"a precision of {', '.join(precisions)}"
    if case.op == "linear_quantized" and (case.batch != 1 or _WEIGHT.fullmatch(case.layout) is None):
        return 'no batch, and a layout as "int4/128", or with " zeros"'
    if not all(type(size) is int and size >= 1 for size in case.shape):
        return "sizes of 1 and more"
    axes = list(range(len(case.shape)))
    if case.op == "permute" and not (axes and sorted(case.dims) == axes):
        return "dims that order those of the shape"
    return ""


def _matrix_alignment(itemsize: int, layout: str, batch: int, rows: int, columns: int) -> int:
    leading = columns if layout == "row" else rows
    steps = [leading * itemsize, rows * columns * itemsize] if batch > 1 else [leading * itemsize]
    return alignment(*steps)


def _matmul(case: Case) -> MatmulProblem:
    a_layout, b_layout = (_LAYOUT_OF[letter] for letter in case.layout)
    size, out_dtype = ITEMSIZE[case.dtype], _WIDER_OUT.get(case.dtype, case.dtype)
    if case.epilogue and out_dtype == "int32":
        out_dtype = "bfloat16"
    aligns = (
        _matrix_alignment(size, a_layout, case.batch, case.m, case.k),
        _matrix_alignment(size, b_layout, case.batch, case.k, case.n),
        _matrix_alignment(ITEMSIZE[out_dtype], "row", case.batch, case.m, case.n),
    )
    return MatmulProblem(
        case.batch, case.m, case.n, case.k, case.dtype, out_dtype, a_layout, b_layout, "row",
        *aligns, case.precision, Epilogue.parse(case.epilogue),
    )  # fmt: skip


def _grouped(case: Case) -> GroupedProblem:
    """Return the problem of groups; fp8 operands have scales, as torch requires."""
    a_layout, b_layout = (_LAYOUT_OF[letter] for letter in case.layout)
    fp8 = case.dtype in FP8_DTYPES
    size, out_dtype = ITEMSIZE[case.dtype], "bfloat16" if fp8 else case.dtype
    a_row = case.k if a_layout == "row" else case.m
    b_row = case.n if b_layout == "row" else case.k
    return GroupedProblem(
        case.batch, case.m, case.n, case.k, case.dtype, out_dtype, a_layout, b_layout, "row",
        alignment(a_row * size), alignment(b_row * size, case.k * case.n * size),
        alignment(case.n * ITEMSIZE[out_dtype]), case.precision, fp8,
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


class _Op(NamedTuple):
    listed: dict[str, str]  # what an entry may list, and the field of a case that takes each word
    words: dict[str, Iterable[str]]  # the words that a field takes, where these are a list
    sizes: tuple[str, ...]  # the fields that hold sizes
    form: str  # of sizes
    counts: range  # of sizes in one
    problem: Callable[[Case], Tiled]


_TABLE: Final = {
    "matmul": _Op(
        {"dtypes": "dtype", "layouts": "layout", "precisions": "precision", "epilogues": "epilogue"},
        {"dtype": MATMUL_DTYPES, "layout": MATMUL_LAYOUTS},
        _MATRICES, "MxNxK or BxMxNxK, like 4096x4096x4096", range(3, 5), _matmul,
    ),
    "grouped": _Op(
        {"dtypes": "dtype", "layouts": "layout", "precisions": "precision", "loads": "load"},
        {"dtype": GROUPED_DTYPES, "layout": MATMUL_LAYOUTS, "load": LOADS},
        _MATRICES, "GxMxNxK, like 8x4096x4096x4096", range(4, 5), _grouped,
    ),
    "permute": _Op(
        {"dtypes": "dtype"}, {"dtype": PERMUTE_ITEMSIZE},
        ("shape", "dims"), "MxN, like 8192x8192, or more sizes ahead of these", range(2, 65), _permute,
    ),
    "linear_quantized": _Op(
        {"dtypes": "dtype", "weights": "layout"}, {"dtype": ACTIVATION_DTYPES, "epilogue": ("", "bias=row")},
        _MATRICES, "MxNxK, like 16x4096x4096", range(3, 4), _quantized,
    ),
}  # fmt: skip
OPS: Final = tuple(_TABLE)


def _sized(op: str, text: str) -> dict[str, Any]:
    """Return the fields of m, n and k, after a batch if there are four, or of a shape to be transposed."""
    parts = text.lower().split("x")
    if len(parts) not in _TABLE[op].counts or not all(re.fullmatch("[0-9]{1,15}", part) for part in parts):
        raise InvalidValueError(f"shape {text!r}: expected {_TABLE[op].form}, in whole numbers")
    sizes = [int(part) for part in parts]
    if min(sizes) < 1:
        raise InvalidValueError(f"{text}: sizes must be at least 1")
    if op == "permute":
        axes = tuple(range(len(sizes)))
        return {"shape": tuple(sizes), "dims": (*axes[:-2], *reversed(axes[-2:]))}
    return dict(zip(_MATRICES, (1, *sizes)[-4:], strict=True))


def _listed(entry: dict[str, Any], key: str, kind: type) -> list[Any]:
    """Return the list under `key`. Raises InvalidValueError unless it holds items, all of this kind."""
    value = entry.get(key)
    if not isinstance(value, list) or not value or any(type(item) is not kind for item in value):
        noun = {str: "words", int: "whole numbers", list: "lists of whole numbers", dict: "entries"}[kind]
        raise InvalidValueError(f"{key} = {str(value)[:100]}: expected a list of {noun}, not empty")
    return value


def _entry_sizes(entry: dict[str, Any], op: str) -> list[dict[str, Any]]:
    texts = _listed(entry, "sizes", str)
    if "m" in entry:
        texts = [f"{m}x{text}" for text, m in itertools.product(texts, _listed(entry, "m", int))]
    found = [_sized(op, text) for text in texts]
    if "dims" in entry:
        orders = _listed(entry, "dims", list)
        if len(orders) not in (1, len(found)):
            raise InvalidValueError(f"dims has {len(orders)} orders: expected one, or one for each shape")
        orders = orders if len(orders) > 1 else orders * len(found)
        found = [sizes | {"dims": tuple(dims)} for sizes, dims in zip(found, orders, strict=True)]
    return found


def _entry_cases(suite: str, entry: Any) -> list[Case]:
    op = entry.get("op") if isinstance(entry, dict) else None
    if op not in OPS:
        raise InvalidValueError(f"op = {op!r}: expected one of {', '.join(OPS)}")
    unknown = set(entry) - {"op", "sizes", "dims" if op == "permute" else "m", *_TABLE[op].listed}
    if unknown:
        raise InvalidValueError(f"unknown keys {', '.join(sorted(unknown))}")
    words = [
        [(field, word) for word in _listed(entry, key, str)]
        for key, field in _TABLE[op].listed.items()
        if key in entry or key not in _OPTIONAL
    ]
    sizes = _entry_sizes(entry, op)
    return [Case(suite, op, **dict(way), **size) for way in itertools.product(*words) for size in sizes]


def _suite_cases(suite: str, data: dict[str, Any]) -> list[Case]:
    unknown = set(data) - {"description", "cases"}
    if unknown:
        raise InvalidValueError(f"unknown keys {', '.join(sorted(unknown))}")
    if not isinstance(data.get("description", ""), str):
        raise InvalidValueError("description: expected a line of text")
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
    """Return the cases of a suite's file; the suite is named after the file.

    Raises FileError, with the file's name and what was expected, if it cannot be read or is not a suite.
    """
    try:
        return _suite_cases(path.stem, tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:  # ValueError: not TOML, not UTF-8, or not a suite
        raise FileError(f"suite {path}: {error}") from error


def find(names: Iterable[str], directory: Path) -> list[Case]:
    """Return the cases of the named suites in a folder, each suite once.

    Raises InvalidValueError for a name that is not there, and whatever `load` raises.
    """
    paths = {path.stem: path for path in sorted(directory.glob("*.toml"))}
    cases: list[Case] = []
    for name in dict.fromkeys(names):
        if name not in paths:
            raise InvalidValueError(f"no suite {name!r} in {directory}: it has {', '.join(paths) or 'none'}")
        cases += load(paths[name])
    return cases


def parse_shape(
    text: str, op: str = "matmul", dtype: str = "bfloat16", layout: str = "NN", precision: str = "ieee",
    suite: str = "given",
) -> Case:  # fmt: skip
    """Return the case of sizes written out: MxNxK or BxMxNxK, or for op "permute" MxN or more.

    For op "grouped" GxMxNxK: groups share M by the skewed load. Op "permute" ignores layout and precision; op
    "linear_quantized" takes a layout of letters as "int4/128". Raises InvalidValueError if the text is no
    case.
    """
    if op not in OPS:
        raise InvalidValueError(f"op {op!r}: expected one of {', '.join(OPS)}")
    for name, value in (("dtype", dtype), ("layout", layout)):
        words = _TABLE[op].words.get(name, (value,))
        if value not in words:
            raise InvalidValueError(f"{name} {value!r}: {op} takes {', '.join(words)}")
    how: dict[str, Any] = {} if op == "permute" else {"layout": layout, "precision": precision}
    if op == "linear_quantized" and layout in MATMUL_LAYOUTS:
        how["layout"] = "int4/128"
    if op == "grouped":
        how["load"] = "skewed"
    return Case(suite, op, dtype, **how, **_sized(op, text))
