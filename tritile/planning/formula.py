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
from typing import Any, Final

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import MatmulProblem, Tiled
from tritile.families.common import cost
from tritile.families.common.cost import (
    Constants,
    Shape,
    facts_of,
    leading_strides,
    overlapped,
    product_parts,
)
from tritile.families.common.products import LINE
from tritile.families.permute import boxes
from tritile.families.permute import family as permute
from tritile.families.quantized import family as packed
from tritile.families.registry import FAMILIES
from tritile.planning.classes import MOVED, ROWS, SIDES


def shape_of(config: Config, problem: Tiled, device: Device) -> Shape:
    """Return the shape of a config for all problems of this one's kind."""
    resident, core = FAMILIES[problem.op][config.family].resident, problem.core
    return cost.shape_of(config, 1 if resident is None else resident(config, core, device))


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
    """Return sizes, alignments, the bytes of either's densest dimension, and how many dimensions a tile has.

    What rows of x and of out start on counts up to a line of the cache.
    """
    moved, (m, n, _) = _within(problem.bytes / 2, *MOVED) / 512, problem.plane
    rows, starts = [], []
    for strides in (problem.x_strides, problem.out_strides):
        rows.append(min(zip(strides, problem.shape, strict=True), default=(1, 1))[1] * problem.itemsize)
        starts.append(math.gcd(LINE, *(step * problem.itemsize for step in strides if step != 1)))
    sizes = (moved, problem.m, problem.n, problem.batch, problem.x_align, problem.out_align, *rows, *starts)
    return [*_logs(sizes), *(count / 4 - 1 for count in (len(m), len(n), len(problem.n_digits[0])))]


def _begin(shape: Shape) -> Constants:
    """Return the constants to begin a fit with: `work` and `turn` follow from the size of a block."""
    work = 2 * shape.block_m * shape.block_n * shape.block_k / shape.ctas / 5.2e6
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
    us = overlapped(c.start, scaled, power)
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
    - `beyond(config, problem)`: true if no such config is timed at such sizes, and the formula errs. None
      if there are no such configs.
    """

    constants: type[Any]
    key: Callable[[Config], Any]
    facts: Callable[[Any, Device, Any], tuple[Any, ...]]
    shape: Callable[[Config, Any, Device], Any]
    parts: Callable[[Any, Any, Any], tuple[Any, ...]]
    begin: Callable[[Any], Any]
    traits: Callable[[Any], list[float]]
    inputs: int
    beyond: Callable[[Config, Any], bool] | None = None

    def us(self, shape: Any, facts: Any, constants: Any) -> Any:
        """Return predicted microseconds. Members of each may be numbers, tensors or arrays."""
        return self.parts(shape, facts, constants)[0]


_BY_POINTERS: Final = "tile"  # the family that never copies an operand first

FORMULAS: Final[dict[str, Formula]] = {
    MatmulProblem.op: Formula(
        Constants, lambda config: config.family != _BY_POINTERS, facts_of,
        shape_of, product_parts, _begin, _product_traits, 23,
    ),
    packed.TILE.op: Formula(
        Constants, lambda config: None, lambda problem, device, key: packed.facts_of(problem, device),
        shape_of, product_parts, _begin, _packed_traits, 21,
    ),
    PermuteProblem.op: Formula(
        PermuteConstants, lambda config: config, _permute_facts,
        lambda config, problem, device: (), _permute_parts,
        lambda shape: PermuteConstants(), _permute_traits, 18,
        lambda config, problem: config.family != boxes.BOX and permute.oversized(config, problem),
    ),
}  # fmt: skip
