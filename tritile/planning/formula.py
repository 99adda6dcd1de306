"""Predict a config's time at any size, by a formula with constants fitted to the config's measurements.

Four bounds overlap, and the slowest counts most: the wait for tiles, the work of an SM, device memory, and
the L2 cache. For a product they follow from its tiles and the K iterations of its programs, for a permutation
from its family's own estimates.

A formula takes numbers, tensors over many sizes (to fit constants) or arrays over many configs (to predict
all of a portfolio at once).
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import ITEMSIZE, MatmulProblem, PermuteProblem, Tiled
from tritile.families.common.operands import copied
from tritile.families.common.products import LINE, SECTOR, Facts
from tritile.families.permute import boxes
from tritile.families.permute import family as permute
from tritile.families.quantized import family as packed
from tritile.families.registry import FAMILIES
from tritile.planning.classes import MOVED, ROWS, SIDES


@dataclass(frozen=True)
class Constants:
    """Hold the constants of a config of a product, in microseconds unless said otherwise."""

    start: float = 2.0  # to start and end
    turn: float = 0.2  # latency of a K iteration
    missed: float = 0.1  # added to `turn` where tiles come from device memory
    fill: float = 1.5  # to fill the pipeline and store, for each round of programs
    work: float = 0.2  # of an SM for a K iteration
    store: float = 0.8  # of an SM for the rest of a tile
    memory: float = 4.1e6  # bytes per microsecond from device memory
    cache: float = 1.2e7  # bytes per microsecond from the L2 cache
    odd_a: float = 0.5  # share by which tiles of a take longer where rows do not start on sectors
    odd_b: float = 0.4  # the same for b
    odd_out: float = 0.2  # the same for the result
    odd_line: float = 0.1  # share by which tiles take longer where rows do not start on lines
    by_row: float = 0.05  # share of `work` added where b is row-major, and so read across K
    blend: float = 2.0  # the larger, the less the faster bounds add to the slowest
    parts: float = 3e6  # bytes per microsecond of sums that programs share
    copy: float = 1.5  # of an operand that is copied first, besides its bytes


class Shape(NamedTuple):
    """Hold what a config's time depends on: numbers, or arrays over many configs."""

    block_m: Any
    block_n: Any
    block_k: Any
    split: Any
    slots: Any  # programs resident on an SM; 1 where kernels are persistent
    shared: Any  # bytes of sums that the programs of a tile share


def _lesser(x: Any, y: Any) -> Any:
    return (x + y - abs(x - y)) / 2


def _product_parts(shape: Shape, facts: Facts, c: Any) -> tuple[Any, ...]:
    m, n, k = facts.m, facts.n, facts.k
    tiles_m, tiles_n = -(-m // shape.block_m), -(-n // shape.block_n)
    tiles = tiles_m * tiles_n * facts.batch
    blocks = -(-k // shape.block_k)
    iterations = -(-blocks // shape.split)
    busiest = -(-tiles * shape.split // facts.processors)  # programs of the busiest SM
    rounds = -(-busiest // shape.slots)

    row_a = _lesser(m, shape.block_m) * facts.size_a  # bytes of a tile per element of K
    row_b = _lesser(n, shape.block_n) * facts.size_b
    rows = row_a + row_b
    odd = (c.odd_a * facts.odd_a + c.odd_line * facts.off_a) * row_a
    odd = odd + (c.odd_b * facts.odd_b + c.odd_line * facts.off_b) * row_b
    slow = 1 + odd / rows
    stored = 1 + c.odd_out * facts.odd_out
    bands = -(-tiles_m // 8)
    moved = (facts.bytes_a + facts.bytes_b * (1 + (bands - 1) * facts.reread)) * facts.batch
    read = tiles * rows * k
    missed = _lesser(moved / read, 1)

    wait = rounds * (iterations * (c.turn + c.missed * missed) * slow + c.fill * stored)
    work = busiest * (iterations * c.work * (1 + c.by_row * facts.by_row) + c.store * stored)
    memory = (moved * slow + facts.bytes_out * stored) / c.memory
    cache = read * slow / c.cache
    power = 1 + c.blend
    us = c.start + (wait**power + work**power + memory**power + cache**power) ** (1 / power)
    us = us + shape.shared * tiles / c.parts + facts.copies * (c.copy + 2 * facts.copied / c.memory)
    waves = tiles * shape.split / (facts.processors * shape.slots)
    edges = tiles_m * shape.block_m / m, tiles_n * shape.block_n / n
    bounds = wait / us, work / us, memory / us, cache / us
    ratios = waves, rounds / waves, *edges, iterations, missed
    return us, *bounds, *ratios, *shape[:5]


def shape_of(config: Config, problem: Tiled, device: Device) -> Shape:
    """Return the shape of a config for all problems of this one's kind."""
    resident = FAMILIES[problem.op][config.family].resident
    kwargs: dict[str, Any] = dict(config.kwargs)
    core = getattr(problem, "core", problem)
    slots = 1 if resident is None or kwargs.get("PERSISTENT", False) else resident(config, core, device)
    m, n, k, split = kwargs["BLOCK_M"], kwargs["BLOCK_N"], kwargs["BLOCK_K"], kwargs.get("SPLIT_K", 1)
    return Shape(m, n, k, split, slots, 8.0 * split * m * n if split > 1 else 0.0)


def facts_of(problem: MatmulProblem, device: Device, copies: bool) -> Facts:
    """Return the facts of a product; `copies`: operands that TMA cannot read are copied first."""
    core = problem.core
    size, out_size = core.itemsize, ITEMSIZE[core.out_dtype]
    a_row, b_row, out_row = leading_strides(core)
    copy_a, copy_b = copied(core) if copies else (False, False)
    a_row, b_row = a_row * (not copy_a), b_row * (not copy_b)  # rows of copies start on lines
    moved = core.batch * core.k * (core.m * copy_a + core.n * core.rights * copy_b) * size
    if problem.in_parts:  # both are split first: read in fp32, and written three times in fp16
        moved += problem.batch * problem.k * (problem.m + problem.n) * (ITEMSIZE["float32"] + 3 * size) // 2
    m, n, k = core.m, core.n * core.rights, core.k
    reread = min(1.0, max(0.0, 2 * n * k * size / device.l2_bytes - 1))
    return Facts(
        m, n, k, core.batch, size, size,
        m * k * size, n * k * size, core.batch * m * core.n * out_size, reread,
        int(a_row % SECTOR != 0), int(b_row % SECTOR != 0), int(out_row % SECTOR != 0),
        int(a_row % LINE != 0), int(b_row % LINE != 0), int(core.b_layout == "row"),
        moved, int(moved > 0), device.processors,
    )  # fmt: skip


def leading_strides(core: Any) -> list[int]:
    """Return the leading strides of a, b and the result, in bytes."""
    layouts = core.a_layout, core.b_layout, core.out_layout
    strides = (
        int(operand.strides[2 if layout == "column" else 1])
        for operand, layout in zip(core.operands, layouts, strict=True)
    )
    sizes = core.itemsize, core.itemsize, ITEMSIZE[core.out_dtype]
    return [stride * size for stride, size in zip(strides, sizes, strict=True)]


def _within(size: float, least: float, most: float) -> float:
    return min(max(size, least), most)


def _logs(sizes: Iterable[float]) -> list[float]:
    return [math.log2(size) / 8 - 1 for size in sizes]  # from -1 to 1 or so


def _traits(problem: Any, rows: Iterable[int]) -> list[float]:
    m, n, k = problem.batch * problem.m, problem.n, problem.k
    sizes = _within(m, 1, ROWS), _within(n, *SIDES), _within(k, *SIDES)
    return _logs([*sizes, *(math.gcd(row, LINE) for row in rows)])


def _product_traits(problem: MatmulProblem) -> list[float]:
    core = problem.core  # of fp16x3, which has three parts along K, K counts once
    return [*_traits(problem, leading_strides(core)), (core.b_layout == "row") / 2]


def _packed_traits(problem: Any) -> list[float]:
    return _traits(problem, [row * problem.itemsize for row in (problem.k, problem.n)])


def _permute_traits(problem: PermuteProblem) -> list[float]:
    moved = _within(problem.bytes / 2, *MOVED) / 512
    return _logs((moved, problem.m, problem.n, problem.x_align, problem.out_align))


def _begin(shape: Shape) -> Constants:
    """Return the constants to begin a fit with: `work` and `turn` follow from the size of a block."""
    work = 2 * shape.block_m * shape.block_n * shape.block_k / 5.2e6
    return replace(Constants(), work=work, turn=max(work, 0.15))


@dataclass(frozen=True)
class PermuteConstants:
    """Hold factors by which the bounds of a permutation exceed its family's estimates."""

    start: float = 2.0  # microseconds to start, and to end
    memory: float = 1.0
    cache: float = 1.0
    instructions: float = 1.0
    wait: float = 1.0
    blend: float = 2.0  # the larger, the less the faster bounds add to the slowest


def _permute_facts(problem: PermuteProblem, device: Device, config: Config) -> tuple[float, ...]:
    """Return the estimates of a config's family; for boxes shared memory is in the place of the L2 cache."""
    return (boxes if config.family == boxes.BOX else permute).parts_us(config, problem, device)


def _permute_parts(shape: tuple[()], parts: Any, c: Any) -> tuple[Any, ...]:
    power = 1 + c.blend
    scaled = (c.memory * parts[0], c.cache * parts[1], c.instructions * parts[2], c.wait * parts[3])
    total = scaled[0] ** power + scaled[1] ** power + scaled[2] ** power + scaled[3] ** power
    us = c.start + total ** (1 / power)
    return us, *(each / us for each in scaled)


@dataclass(frozen=True)
class Formula:
    """Predict times of an operation's configs.

    - `constants`: the type of a config's constants.
    - `key(config)`: the part of a config that its facts depend on.
    - `facts(problem, device, key)`: what the time depends on in a problem, as numbers.
    - `shape(config, problem, device)`: what the time depends on in a config, for all problems of a kind.
    - `parts(shape, facts, constants)`: predicted microseconds, and more that a correction may depend on: the
      shares of bounds, waves and how full they are, the shape of tiles. Each is above zero or close to it.
    - `begin(shape)`: the constants to begin a fit with.
    - `traits(problem)`: sizes and alignments of rows, as numbers from -1 to 1 or so, by which a correction
      varies. Sizes beyond those that are drawn count as the nearest that is drawn.
    - `inputs`: how many parts and traits there are.
    - `beyond(config, problem)`: tells whether no such config is timed at such sizes, and the formula errs.
    """

    constants: type[Any]
    key: Callable[[Config], Any]
    facts: Callable[[Any, Device, Any], tuple[Any, ...]]
    shape: Callable[[Config, Any, Device], Any]
    parts: Callable[[Any, Any, Any], tuple[Any, ...]]
    begin: Callable[[Any], Any]
    traits: Callable[[Any], list[float]]
    inputs: int
    beyond: Callable[[Config, Any], bool] = lambda config, problem: False

    def us(self, shape: Any, facts: Any, constants: Any) -> Any:
        """Return predicted microseconds. Members of each may be numbers, tensors or arrays."""
        return self.parts(shape, facts, constants)[0]


_BY_POINTERS: Final = "tile"  # the family that never copies an operand first

FORMULAS: Final[dict[str, Formula]] = {
    MatmulProblem.op: Formula(
        Constants, lambda config: config.family != _BY_POINTERS, facts_of,
        shape_of, _product_parts, _begin, _product_traits, 23,
    ),
    packed.TILE.op: Formula(
        Constants, lambda config: None, lambda problem, device, key: packed.facts_of(problem, device),
        shape_of, _product_parts, _begin, _packed_traits, 21,
    ),
    PermuteProblem.op: Formula(
        PermuteConstants, lambda config: config, _permute_facts,
        lambda config, problem, device: (), _permute_parts,
        lambda shape: PermuteConstants(), _permute_traits, 10,
        lambda config, problem: config.family != boxes.BOX and permute.oversized(config, problem),
    ),
}  # fmt: skip
