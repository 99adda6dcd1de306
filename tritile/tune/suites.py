"""Suites: lists of problems to tune and to measure, in TOML files.

A file holds a `description` and entries `[[cases]]`. An entry stands for every combination of what it lists:

- `op`: one of `OPS`; `dtypes`: names of torch's.
- "matmul": `layouts`; `precisions` (default: IEEE); `epilogues`, as `core.problem.Epilogue` writes them
  (default: none); `block_scales` of fp8, as "1x128" (default: none). Sizes are one of `squares = [n]`,
  `mnk = [[m, n, k]]`, `bmnk = [[batch, m, n, k]]`, or `m = [m]` crossed with `nk = [[n, k]]`.
- "permute": `shapes = [[d0, d1, ...]]` of x. `dims = [[...]]` tells which dimension comes at each place, for
  each shape or once for all (default: the last two are exchanged).
- "linear_quantized": sizes as for "matmul", without a batch. `weights` takes the place of layouts: bits and
  group size, as "int4/128", and with zero points "int4/128 zeros".
- "grouped": `layouts`, `precisions`, and sizes `gmnk = [[groups, m, n, k]]`. `ragged` tells which of m and k
  the groups share, `loads` how (`tritile.core.problem.ends_of`).
"""

import itertools
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tritile.errors import InvalidValueError
from tritile.tune.cases import MATMUL_LAYOUTS, OPS, PERMUTE_ITEMSIZE, Case, grouped_case

__all__ = ["MATMUL_LAYOUTS", "OPS", "PERMUTE_ITEMSIZE", "Case", "find", "load", "parse_shape"]

_SIZE_KEYS: Final = {
    "squares": 1, "mnk": 3, "bmnk": 4, "gmnk": 4, "m": 1, "nk": 2, "shapes": 0,
}  # numbers in an item  # fmt: skip
_SIZES_WANTED: Final = {
    "matmul": ({"squares"}, {"mnk"}, {"bmnk"}, {"m", "nk"}),
    "grouped": ({"gmnk"},),
    "permute": ({"shapes"},),
    "linear_quantized": ({"squares"}, {"mnk"}, {"m", "nk"}),
}
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


def _exchanged(count: int) -> tuple[int, ...]:
    """Return the order of dimensions with the last two exchanged."""
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
    """Return the case of sizes m, n, k, after a batch if there are four, or of a shape to be transposed."""
    if op == "permute":
        shape = tuple(sizes)
        return Case(suite, op, dtype, shape=shape, dims=_exchanged(len(shape)))
    batch, m, n, k = (1, *sizes)[-4:]
    sized = Case(suite, op, dtype, layout, batch, m, n, k, precision, epilogue=epilogue)
    return replace(sized, block_scales=block_scales) if block_scales else sized


def _listed(entry: dict[str, Any], key: str, kind: type) -> list[Any]:
    """Return the list under `key`. Raises InvalidValueError unless it holds items, all of this kind."""
    value = entry.get(key)
    if not isinstance(value, list) or not value or any(type(item) is not kind for item in value):
        noun = {str: "words", int: "whole numbers", list: "lists of whole numbers", dict: "entries"}[kind]
        raise InvalidValueError(f"{key} = {str(value)[:100]}: wanted a list of {noun}, not empty")
    return value


def _rows(entry: dict[str, Any], key: str) -> list[list[int]]:
    count = _SIZE_KEYS.get(key, 0)  # 0: any number, at least one
    if count == 1:
        return [[size] for size in _listed(entry, key, int)]
    rows = _listed(entry, key, list)
    for row in rows:
        fits = len(row) == count if count else row
        if not fits or any(type(size) is not int for size in row):
            raise InvalidValueError(f"{key} has {row!r}: wanted {count or '1 or more'} whole numbers")
    return rows


def _permutes(suite: str, entry: dict[str, Any], shapes: list[list[int]], dtypes: list[str]) -> list[Case]:
    """Return a case for each dtype and shape; `dims` holds an order for each shape, or one for all."""
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
            grouped_case(suite, *words)
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
    """Return the cases of a suite's file; the suite is named after the file.

    Raises InvalidValueError, with the file's name and what was wanted, where the file cannot be read or is no
    suite.
    """
    try:
        return _suite_cases(path.stem, tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:  # ValueError: not TOML, not UTF-8, or not a suite
        raise InvalidValueError(f"suite {path}: {error}") from error


def find(names: Iterable[str], directory: Path) -> list[Case]:
    """Return the cases of the named suites in a folder, in the order given, each suite once.

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
    """Return the case of sizes written out: MxNxK or BxMxNxK, or for op "permute" MxN or BxMxN.

    For op "grouped" GxMxNxK: groups share M by the skewed load. Op "permute" ignores layout and precision; op
    "linear_quantized" takes a layout of letters as "int4/128". Raises InvalidValueError where the text is no
    case.
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
        return grouped_case(suite, sizes, dtype, layout, precision)
    return _sized_case(sizes, suite, op, dtype, layout, precision)
