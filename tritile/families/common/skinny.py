"""See a skinny product, of few rows or columns, as few rows x by a large matrix w."""

from collections.abc import Sequence
from math import prod
from typing import Any, Final, NamedTuple

from tritile.core.call import MatmulCall
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import MatmulProblem
from tritile.families.common.grids import WIDE_FROM
from tritile.families.common.work import epilogue_arguments
from tritile.runtime.work import Buffer

FAMILIES: Final = ("skinny_k", "skinny_n")  # without tensor cores
MOST_ROWS: Final = 8  # that these make
DTYPES: Final = ("float16", "bfloat16", "float32")
LANES: Final = 128  # FMA lanes per SM per clock
WORD: Final = 16  # bytes
_TRANSPOSED: Final = {"row": "column", "column": "row"}


class Sides(NamedTuple):
    """Hold a product as a kernel sees it: `rows` of x by w, which has so many `columns`.

    `along`: "k" or "n", the dimension along which w is contiguous, "" for neither. `align`: that of w, in
    bytes. `x_words`: rows of x are contiguous and begin at words. `period`: after how many columns of w, at
    the most, they begin at the same place in a word again. `whole`: columns of w are whole words.
    """

    rows: int
    columns: int
    along: str
    align: int
    x_words: bool
    period: int
    whole: bool


def is_transposed(problem: MatmulProblem) -> bool:
    """True if out.T = b.T @ a.T is made without tensor cores: of few columns and many rows."""
    return problem.m > MOST_ROWS >= problem.n


def sides_of(problem: MatmulProblem, transposed: bool) -> Sides:
    """Return what a kernel sees of a product, or if `transposed` of its transpose."""
    x, w = (problem.m, problem.a_layout, problem.a_align), (problem.n, problem.b_layout, problem.b_align)
    if transposed:
        x, w = ((size, _TRANSPOSED.get(layout, layout), align) for size, layout, align in (w, x))
    (rows, x_layout, x_align), (columns, layout, align) = x, w
    whole = align == WORD and problem.k * problem.itemsize % WORD == 0
    along, period = {"row": "n", "column": "k"}.get(layout, ""), WORD // max(align, problem.itemsize)
    return Sides(rows, columns, along, align, x_layout == "row" and x_align == WORD, period, whole)


def sides(problem: MatmulProblem) -> Sides:
    return sides_of(problem, is_transposed(problem))


def periodic_tiles(config: Config, seen: Sides) -> int:
    """Return the tiles of a matrix: columns that begin at different places in a word have different ones."""
    return int(-(-seen.columns // (config["BLOCK_N"] * seen.period)) * seen.period)


def fault(
    config: Config, problem: MatmulProblem, device: Device, seen: Sides, along: str,
    most: int = MOST_ROWS, dtypes: Sequence[str] = DTYPES, least: int = 1,
) -> str | None:  # fmt: skip
    """Say why no kernel for `most` rows of x by w, contiguous `along` a dimension, makes a product.

    BLOCK_M is the rows, or `least`, rounded up to a power of two.
    """
    if device.nvidia < 80:
        return f"{device.name} has no asynchronous copies to shared memory"
    if problem.dtype not in dtypes or problem.precision != "ieee":
        return f"{problem.dtype} {problem.precision} is not one of {', '.join(dtypes)}"
    if problem.rights > 1:
        return "gated products have kernels of their own"
    if min(problem.m, problem.n) > most:
        return f"{problem.m} rows and {problem.n} columns, of {most} at most on one side"
    if seen.along != along:
        return f"the larger operand is not contiguous along {along.upper()}"
    if max(problem.m, problem.n, problem.k) > WIDE_FROM:
        return f"sizes above {WIDE_FROM}"
    rows = max(least, seen.rows)
    if not rows <= config["BLOCK_M"] < 2 * rows:
        return f"BLOCK_M = {config['BLOCK_M']} is not {rows} rounded up to a power of two"
    return None


def contends(problem: MatmulProblem) -> bool:
    return min(problem.m, problem.n) <= MOST_ROWS


def tile_of(config: Config, problem: MatmulProblem) -> tuple[int, int]:
    rows, columns = config["BLOCK_M"], config["BLOCK_N"]
    return (columns, rows) if is_transposed(problem) else (rows, columns)


def arguments(call: MatmulCall, config: Config, early: bool) -> dict[str, Any]:
    """Return the arguments of kernels of skinny products by name, with w contiguous along K."""
    x, w, out = call.a, call.b, call.out
    (m, k), n, sizes = x.shape, w.shape[1], call.batch_shape or (1,)
    batch = [view.batch_strides if call.batch_shape else (0,) for view in (x, w, out)]
    return {
        "x_ptr": Buffer(x.buffer), "w_ptr": Buffer(w.buffer), "out_ptr": Buffer(out.buffer),
        "M": m, "N": n, "K": k,
        "stride_xm": x.strides[0] if m > 1 else 0, "stride_xk": x.strides[1],
        "stride_w": w.strides[1], "stride_om": out.strides[0], "stride_on": out.strides[1],
        "batch": prod(sizes), "batch_shape": sizes, "x_batch_strides": batch[0],
        "w_batch_strides": batch[1], "out_batch_strides": batch[2],
        "X_WORDS": x.align == WORD and (k == 1 or x.strides[1] == 1),
        **epilogue_arguments(call, len(sizes)),
        "COMPENSATED": call.dtype == "float32", "WAIT": early, "STAGES": config.num_stages,
        **dict(config.kwargs),
    }  # fmt: skip
