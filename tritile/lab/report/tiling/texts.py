"""Texts beside pictures of tilings."""

from tritile.core.config import Config
from tritile.core.problem import MatmulProblem, PermuteProblem
from tritile.families.common.operands import realigned, turned
from tritile.families.matmul_scaled import family as scaled
from tritile.families.matmul_split import family as split
from tritile.families.matmul_tma import family as descriptor
from tritile.families.matmul_wgmma import family as warpgroups
from tritile.lab import traffic
from tritile.lab.report.tiling.order import TRANSPOSED, Tiling
from tritile.lab.report.tiling.steps import lanes_of, total_bytes

_SPECIALISED = {warpgroups.NAME, split.NAME, scaled.NAME, *TRANSPOSED, *traffic.CLUSTERED}
_UNITS = ("bytes", "KB", "MB", "GB", "TB", "PB", "EB")


def size(count: float) -> str:
    """Write a number of bytes in decimal units, as memory rates are given: "12.5 KB"."""
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    shown = int(count * 10 + 0.5) / 10
    return f"{shown:,.1f}".removesuffix(".0") + f" {_UNITS[unit]}"


def times(ratio: float) -> str:
    """Write a ratio in few digits: "7.4", "128"."""
    return f"{ratio:,.1f}".removesuffix(".0") if ratio < 10 else f"{ratio:,.0f}"


def by(rows: int, columns: int) -> str:
    """Write the size of a matrix with a multiplication sign."""
    return f"{rows:,} \u00d7 {columns:,}"


def span(first: int, count: int) -> str:
    """Write the first and last of `count` numbers in a row: "128 to 255"."""
    return f"{first:,}" if count == 1 else f"{first:,} to {first + count - 1:,}"


def label(problem: MatmulProblem | PermuteProblem) -> str:
    """Name a problem; a transpose by the rows and columns of x, as the pictures and the command have it."""
    if isinstance(problem, PermuteProblem) and problem.turns and len(problem.shape) == 2:
        return f"transpose of {problem.m}x{problem.n}, {problem.itemsize} bytes an element"
    return problem.label


def title(tiling: Tiling) -> str:
    """Return a picture's title."""
    if isinstance(tiling.problem, MatmulProblem):
        return "C = A \u00d7 B, one tile at a time"
    return "A transpose, one tile at a time" if tiling.problem.turns else "A permutation, one tile at a time"


def plain_name(tiling: Tiling) -> str:
    """Name the order in which tiles go where each band has a single row of them, or a single column."""
    return "column by column" if tiling.by_columns else "row by row"


def _within(tiling: Tiling) -> str:
    """Name the order of tiles within a band."""
    return "row by row" if tiling.by_columns else "column by column"


def order_name(tiling: Tiling) -> str:
    """Name the order of tiles, "" where it is the plain one."""
    if tiling.group == 1 or min(tiling.banded) == 1 or tiling.problem.op != "matmul":
        return ""
    return f"GROUP_M = {tiling.group}" if tiling.group < tiling.banded[0] else _within(tiling)


def _order(tiling: Tiling) -> str:
    shape = f"{tiling.rows:,} x {tiling.columns:,} tiles"
    shape += f" in each of {tiling.matrices:,} matrices" if tiling.matrices > 1 else ""
    if min(tiling.rows, tiling.columns) == 1:
        return f"{shape}, one after the other."
    if tiling.group == 1:
        return f"{shape}, taken {plain_name(tiling)}."
    lines, shared = ("columns", "A") if tiling.by_columns else ("rows", "B")
    taken, why = _within(tiling), f"neighbours in time share blocks of {shared}"
    if tiling.group < tiling.banded[0]:
        taken = f"down bands of {tiling.group} {lines} of tiles (GROUP_M), {taken} in each"
        why = "tiles made at the same time then lie together, and find each other's blocks in the L2 cache"
    return f"{shape}, taken {taken}{f': {why}' if isinstance(tiling.problem, MatmulProblem) else ''}."


def _programs(tiling: Tiling) -> str:
    if tiling.programs < tiling.turns:
        return (
            f"{tiling.programs:,} programs stay on the GPU (persistent); each makes up to "
            f"{-(-tiling.turns // tiling.programs):,} tiles, {tiling.programs:,} places apart."
        )
    held = f"{tiling.at_once:,} of {tiling.programs:,} programs run at once"
    ctas, processors = tiling.config.num_ctas, tiling.device.processors
    seats = f"{processors} SMs" if ctas == 1 else f"{processors // ctas} groups of {ctas} SMs"
    return f"{held}, by an estimate of {tiling.resident} on each of {seats}."


def _edges(tiling: Tiling, config: Config) -> str:
    problem = tiling.problem
    if not isinstance(problem, MatmulProblem):
        blocks = config["BLOCK_M"], config["BLOCK_N"]
        if tiling.covers != blocks:
            return (
                f"Whole blocks of {by(*blocks)} would overlap too far, or are larger than the matrix: each "
                f"tile covers {by(*tiling.covers)}, and the rest of its block stays idle."
            )
        if (tiling.rows * blocks[0], tiling.columns * blocks[1]) == (problem.m, problem.n):
            return "Tiles divide both sides: nothing is moved twice, and nothing is masked."
        return (
            "The last tile of a row or column ends where the matrix does, and overlaps the one before. "
            "Both move the same values there, so no tile needs masks."
        )
    sides = *tiling.covers, config["BLOCK_K"]
    extents = zip("MNK", (problem.m, problem.n, problem.k), sides, strict=True)
    ragged = [name for name, extent, side in extents if extent % side]
    if not ragged:
        return "Blocks divide M, N and K: nothing is masked."
    how = "by the copy engine (TMA)" if config.family != "tile" else "by masked loads"
    return f"Blocks overhang the edge of {', '.join(ragged)}: beyond it they are zero-filled, {how}."


def _copied_for(tiling: Tiling, name: str) -> str:
    """Say why operand A or B of a product is copied first."""
    problem = tiling.problem
    assert isinstance(problem, MatmulProblem)
    if problem.by_rows:
        return "row by row: without tensor cores, contiguous columns are read element by element"
    if problem.core != problem:
        return "and converted, for the product that makes this one"
    if turned(problem)["AB".index(name)]:
        return "so that K is contiguous: tensor cores take TF32 only so"
    if realigned(problem)["AB".index(name)]:
        return "to rows that start on memory lines: tiles of other rows take longer to read"
    return "to rows that start on 16 bytes: TMA reads no others"


def _tail(tiling: Tiling) -> str:
    """Say how programs share the K of the last tiles."""
    assert isinstance(tiling.problem, MatmulProblem)
    tail = split.tail(tiling.config, tiling.problem.core, tiling.device)
    return (
        f"The last {tail.rest:,} tiles would leave SMs idle: {tail.split} programs share each tile, "
        "with a range of K each. Then each of them adds up all sums of some of its rows, in the order of K."
    )


def notes(tiling: Tiling) -> list[str]:
    """Describe how a tiling's kernel works, a sentence or two a note."""
    problem, config, found = tiling.problem, tiling.config, [_order(tiling), _programs(tiling)]
    if config.family == split.NAME:
        found.append(_tail(tiling))
    elif tiling.parts > 1:
        found.append(
            f"{tiling.parts} programs share each tile (SPLIT_K): each takes every {tiling.parts}th block of "
            "K, and their sums are added in a fixed order."
        )
    found += [
        f"{name} is first copied {_copied_for(tiling, name)}; its blocks are the copy's."
        for name in tiling.copied
    ]
    found.append(_edges(tiling, config))
    if config.family in traffic.CLUSTERED:
        found.append(
            "Each of these programs is a cluster of two, on two SMs. Each of the two makes half of the tile, "
            "and the blocks that both need are fetched once for both."
        )
    if config.family in TRANSPOSED:
        found.append(
            "The transpose of C is made, of those of B and A: columns of a tile are the rows of the tensor "
            "cores, which come by 64. The tile is turned as it is stored."
        )
    if config.family in _SPECIALISED:
        share = "columns" if config.family in TRANSPOSED else "rows"
        found.append(
            f"One warp of a program fetches blocks by TMA, up to {config.num_stages} steps ahead, and "
            f"{config['CONSUMERS']} warpgroups multiply, each its share of the tile's {share}."
        )
    elif config.family == descriptor.NAME:
        found.append(
            f"Blocks come by TMA, up to {config.num_stages} steps ahead of the one that is multiplied."
        )
    if isinstance(problem, MatmulProblem):
        tiled, untiled = total_bytes(tiling)
        found.append(
            f"All programs together ask for {size(tiled)} of A and B. Element by element it would be "
            f"{size(untiled)}, {times(untiled / tiled)} times as much."
        )
    elif lanes_of(tiling) > 1:
        found.append(
            "Elements are packed into words of 4 bytes, aligned as out is; the few rows before the first "
            "and after the last word of a column are copied by the first row of tiles."
        )
    return found
