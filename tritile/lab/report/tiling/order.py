"""The tiles of a kernel, and which program makes each of them when, as a frozen value."""

from dataclasses import dataclass
from math import prod
from typing import Final, NamedTuple

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import MatmulProblem, PermuteProblem
from tritile.core.views import posed
from tritile.errors import InvalidValueError, TuningError, UnsupportedError
from tritile.families.common import upright
from tritile.families.common.tiles import grouped_tile
from tritile.families.common.work import Buffer, Work
from tritile.families.matmul_clusters import transposed as transposed_clusters
from tritile.families.matmul_split import family as split
from tritile.families.matmul_transposed import family as transposed
from tritile.families.odd_rows import family as odd_rows
from tritile.families.permute import boxes
from tritile.families.registry import FAMILIES
from tritile.families.space import illegal
from tritile.families.work import work_of
from tritile.lab import traffic

TRANSPOSED: Final = (transposed.NAME, transposed_clusters.NAME)  # the families that make out^T


class Place(NamedTuple):
    """Name a tile: the matrix of the batch, then the tile's row and column."""

    matrix: int
    row: int
    column: int


@dataclass(frozen=True)
class Tiling:
    """Describe how a config's kernel cuts a problem into tiles, and which program makes which tile when.

    A *turn* is one work unit of a program: a tile or, where `parts` programs share each tile (SPLIT_K), one
    part of a tile. Turns are numbered in the order in which they start. Turn t belongs to program `t %
    programs` and is part `t // tiles` of tile `t % tiles`. A program that is not persistent has one turn.
    A cluster of programs counts as one, which makes the tiles of all as a single one.

    `rows` and `columns` count the tiles in each of `matrices` matrices. `group` counts the tile rows in a
    band; tiles are taken down a band, column by column. `by_columns`: a band is of tile columns, and its
    tiles are taken row by row. `resident` is how many programs an SM holds at once.
    `covers` has the rows and columns of a tile: those of its block or, in a permutation, fewer where tiles
    would overlap too far. `copied` names operands that are copied first, as the kernel cannot read them, or
    not fast.
    """

    problem: MatmulProblem | PermuteProblem
    config: Config
    device: Device
    rows: int
    columns: int
    matrices: int
    group: int
    programs: int
    resident: int
    covers: tuple[int, int]
    parts: int = 1
    copied: tuple[str, ...] = ()
    by_columns: bool = False

    @property
    def banded(self) -> tuple[int, int]:
        """Count the rows of tiles that bands divide, and the columns; `by_columns` the other way round."""
        return (self.columns, self.rows) if self.by_columns else (self.rows, self.columns)

    @property
    def tiles(self) -> int:
        """Count the tiles of the result, over all matrices."""
        return self.rows * self.columns * self.matrices

    @property
    def turns(self) -> int:
        """Count the turns of all programs."""
        return self.tiles * self.parts

    @property
    def blocks(self) -> int:
        """Count the blocks of K of a tile; 1 in a permutation."""
        problem = self.problem
        return -(-problem.k // self.config["BLOCK_K"]) if isinstance(problem, MatmulProblem) else 1

    @property
    def at_once(self) -> int:
        """Count the programs that the device runs at the same time: a wave, which makes as many turns."""
        return min(self.programs, self.device.processors // self.config.num_ctas * self.resident)

    def program(self, turn: int) -> int:
        """Return the program of a turn; programs count from 0 in the order of their start."""
        return turn % self.programs

    def part(self, turn: int) -> int:
        """Return which part of its tile a turn makes."""
        return turn // self.tiles

    def place(self, turn: int) -> Place:
        """Return the tile of a turn, going down bands of `group` tile rows, matrix after matrix.

        Raises InvalidValueError where there is no such turn.
        """
        if not 0 <= turn < self.turns:
            raise InvalidValueError(f"tile {turn}: wanted one of 0 to {self.turns - 1}")
        matrix, index = divmod(turn % self.tiles, self.rows * self.columns)
        at = grouped_tile.fn(index, *self.banded, self.group)  # the kernels' own function
        return Place(matrix, *(at[::-1] if self.by_columns else at))

    @property
    def ranges(self) -> bool:
        """Tell whether each part of a tile takes a range of K, and not every few blocks of it."""
        return self.config.family == split.NAME

    def k_blocks(self, turn: int) -> range:
        """Return the blocks of K that a turn goes through, step by step."""
        part = self.part(turn)
        if self.ranges:
            return range(part * self.blocks // self.parts, (part + 1) * self.blocks // self.parts)
        return range(part, self.blocks, self.parts)


def _resident_of(problem: MatmulProblem | PermuteProblem, config: Config, device: Device) -> int:
    """Estimate how many programs of a legal config an SM holds at once; of a persistent kernel, one."""
    if dict(config.kwargs).get("PERSISTENT"):
        return 1
    resident = FAMILIES[problem.op][config.family].resident
    assert resident is not None  # families of products and permutations tell it
    return resident(config, problem, device)


def _launched(problem: MatmulProblem | PermuteProblem, config: Config, device: Device) -> Work:
    """Return the work of a call of the problem; a tiling is read from its grid and arguments."""
    reason = illegal(config, problem, device)
    if reason is not None:
        raise InvalidValueError(f"{config} cannot run {problem.label} on {device.name}: {reason}")
    call = posed(problem)
    try:
        return work_of(call, config, device.processors, False)
    except TuningError as error:
        raise UnsupportedError(f"{config} cannot run {problem.label}: {error}") from error


def _copied(work: Work) -> tuple[str, ...]:
    """Name the operands that a launch before the last one reads."""
    read = {arg.buffer for step in work.steps[:-1] for arg in step.args.values() if isinstance(arg, Buffer)}
    return tuple(name.upper() for name in "ab" if name in read)


def tiling_of(problem: MatmulProblem | PermuteProblem, config: Config, device: Device) -> Tiling:
    """Return the tiling of a problem by a config's kernel, as a launch on a device would have it.

    Raises InvalidValueError where the config is not legal for the problem on the device; UnsupportedError for
    families of few rows, and for boxes of several dimensions.
    """
    if config.family == boxes.BOX:
        raise UnsupportedError(f"{config} has no tiles to draw: its boxes have several dimensions")
    if config.family in (*upright.FAMILIES, odd_rows.NAME):
        raise UnsupportedError(f"{config} has no tiles to draw: its programs make few rows")
    if not isinstance(problem, MatmulProblem | PermuteProblem):
        raise InvalidValueError(f"{problem!r} has no tiles: wanted a MatmulProblem or a PermuteProblem")
    work = _launched(problem, config, device)
    step = work.steps[work.main]
    values = step.args
    by_columns = config.family in TRANSPOSED
    if isinstance(problem, PermuteProblem):
        of = traffic.covers(problem, config)
        rows, columns, covers = of.tiles_m, of.tiles_n, (of.m, of.n)
    else:
        covers = traffic.tile_of(config, problem)
        rows, columns = -(-problem.m // covers[0]), -(-problem.n // covers[1])
    tiles, parts = rows * columns * problem.batch, values.get("SPLIT_K", 1)
    if config.family == split.NAME and not values["whole"]:  # else the parts of the last wave are not shown
        parts = values["split"]
    return Tiling(
        problem, config, device, rows, columns, problem.batch,
        group=(columns if by_columns else rows) if values.get("FLAT") else config["GROUP_M"],
        programs=min(prod(step.grid), tiles * parts),  # further programs find no matrix
        resident=_resident_of(problem, config, device),
        covers=covers,
        parts=parts,
        copied=_copied(work),
        by_columns=by_columns,
    )  # fmt: skip
