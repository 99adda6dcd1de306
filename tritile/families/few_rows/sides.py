"""See a product of few rows, or columns, as few rows x by a large matrix w."""

from typing import Final, NamedTuple

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import MatmulProblem
from tritile.core.views import MatmulCall
from tritile.families.common.grids import WIDE_FROM
from tritile.families.common.upright import transposed

FAMILIES: Final = ("few_rows", "few_rows_across")  # without tensor cores
MOST_ROWS: Final = 8
WORD: Final = 16  # bytes
_DTYPES: Final = ("float16", "bfloat16", "float32")


class Sides(NamedTuple):
    """Hold a product as a kernel sees it: `rows` of x by w, which has so many `columns`.

    `along`: "k" or "n", the dimension along which w is contiguous, "" for neither. `align`: that of w, in
    bytes. `x_words`: rows of x are contiguous and begin at words.
    """

    rows: int
    columns: int
    along: str
    align: int
    x_words: bool


def turned(problem: MatmulProblem) -> bool:
    """Tell whether out.T = b.T @ a.T is made: the product has few columns and many rows."""
    return problem.m > MOST_ROWS >= problem.n


def sides(problem: MatmulProblem) -> Sides:
    """Return what a kernel sees of a product: of its transpose, where it has few columns and many rows."""
    if turned(problem):
        along = {"row": "k", "column": "n"}.get(problem.a_layout, "")
        words = problem.b_layout == "column" and problem.b_align == WORD
        return Sides(problem.n, problem.m, along, problem.a_align, words)
    along = {"row": "n", "column": "k"}.get(problem.b_layout, "")
    words = problem.a_layout == "row" and problem.a_align == WORD
    return Sides(problem.m, problem.n, along, problem.b_align, words)


def fault(problem: MatmulProblem, device: Device) -> str | None:
    """Say why no kernel of few rows may make a product, whichever way w is contiguous; None where one may."""
    if device.nvidia < 80:
        return f"{device.name} has no asynchronous copies to shared memory"
    if problem.dtype not in _DTYPES or problem.precision != "ieee" or problem.block_scales:
        return f"{problem.dtype} {problem.precision} is not summed by multiply-adds in fp32"
    if problem.rights > 1:
        return "gated products have kernels of their own"
    if min(problem.m, problem.n) > MOST_ROWS:
        return f"{problem.m} rows and {problem.n} columns, of {MOST_ROWS} at most on one side"
    if max(problem.m, problem.n, problem.k) > WIDE_FROM:
        return f"sizes above {WIDE_FROM}"
    return None


def rows_fault(config: Config, problem: MatmulProblem) -> str | None:
    """Say why a block has not the rows that the problem wants, None where it has."""
    rows = sides(problem).rows
    if rows <= config["BLOCK_M"] < 2 * rows:
        return None
    return f"BLOCK_M = {config['BLOCK_M']} is not {rows} rounded up to a power of two"


def contends(problem: MatmulProblem) -> bool:
    """Tell whether a config for few rows can be the fastest."""
    return min(problem.m, problem.n) <= MOST_ROWS


def tile_of(config: Config, problem: MatmulProblem) -> tuple[int, int]:
    """Return the rows and columns of the result in a tile."""
    rows, columns = config["BLOCK_M"], config["BLOCK_N"]
    return (columns, rows) if turned(problem) else (rows, columns)


def upright(call: MatmulCall) -> MatmulCall:
    """Return the call, or its transpose, with few rows; buffers keep the names that the caller's have."""
    return transposed(call) if turned(call.problem) else call
