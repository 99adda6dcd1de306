"""Predict a config's time at a problem, in microseconds: a roofline of four bounds that overlap.

Programs wait for tiles, an SM works, device memory and the L2 cache move bytes; the slowest counts most. For
a product the bounds follow from its tiles and from the K iterations of its programs, by `Constants`. Those of
a portfolio are each config's own, fitted to its measurements. Elsewhere `product_us` derives them from what a
program does and from `Fit`, which all products share, on any GPU.

The formula takes numbers, tensors over many sizes (to fit constants) or arrays over many configs (to predict
all of a portfolio at once).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import ITEMSIZE, MatmulProblem
from tritile.families.common.descriptors import copied
from tritile.families.common.products import LINE, SECTOR


def overlapped(start: Any, bounds: Iterable[Any], power: Any) -> Any:
    """Return the time of parts that overlap: the larger `power`, the less the faster add to the slowest."""
    return start + sum(bound**power for bound in bounds) ** (1 / power)


class Facts(NamedTuple):
    """Hold what a product's time depends on other than its config: numbers, or tensors over many products."""

    m: Any
    n: Any
    k: Any
    batch: Any
    size_a: Any  # bytes an element
    size_b: Any
    bytes_a: Any  # of one matrix
    bytes_b: Any
    bytes_out: Any  # of all results
    reread: Any  # share of b that each band of tiles after the first reads again from device memory
    odd_a: Any  # 1 if rows of a do not start on sectors, else 0
    odd_b: Any
    odd_out: Any
    off_a: Any  # 1 if rows of a do not start on lines
    off_b: Any
    by_row: Any  # 1 if b is contiguous along N, 0 if along K
    copied: Any  # bytes of operands that are copied first
    copies: Any  # 1 if any operand is copied, else 0
    processors: Any


@dataclass(frozen=True)
class Constants:
    """Hold the constants of a config of a product, in microseconds unless said otherwise."""

    start: float = 2.0  # to start and end
    turn: float = 0.2  # latency of a K iteration
    missed: float = 0.1  # added to `turn` if tiles come from device memory
    fill: float = 1.5  # to fill the pipeline and store, for each round of programs
    work: float = 0.2  # of an SM for a K iteration
    store: float = 0.8  # of an SM for the rest of a tile
    memory: float = 4.1e6  # bytes per microsecond from device memory
    cache: float = 1.2e7  # bytes per microsecond from the L2 cache
    odd_a: float = 0.5  # share by which tiles of a take longer if rows do not start on sectors
    odd_b: float = 0.4  # the same for b
    odd_out: float = 0.2  # the same for the result
    odd_line: float = 0.1  # share by which tiles take longer if rows do not start on lines
    by_row: float = 0.05  # share of `work` added if b is row-major, and so read across K
    blend: float = 2.0  # the larger, the less the faster bounds add to the slowest
    parts: float = 3e6  # bytes per microsecond of sums that programs share
    copy: float = 1.5  # of an operand that is copied first, besides its bytes


class Shape(NamedTuple):
    """Hold what a config's time depends on: numbers, or arrays over many configs."""

    block_m: Any
    block_n: Any
    block_k: Any
    split: Any
    slots: Any  # programs resident on an SM; 1 if kernels are persistent
    shared: Any  # bytes of sums that the programs of a tile share
    ctas: Any  # that make such a tile together
    tail: Any  # 1 if tiles of the last wave are split along K, else 0


def shape_of(config: Config, resident: int, rights: int = 1) -> Shape:
    kwargs: dict[str, Any] = dict(config.kwargs)
    m, n = kwargs["BLOCK_M"] * config.num_ctas, kwargs["BLOCK_N"] * rights
    split, tail = kwargs.get("SPLIT_K", 1), int(kwargs.get("SPLIT_TAIL", False))
    slots = 1 if kwargs.get("PERSISTENT", False) else resident
    shared = 8.0 * split * m * n * (split > 1)
    return Shape(m, n, kwargs["BLOCK_K"], split, slots, shared, config.num_ctas, tail)


def _lesser(x: Any, y: Any) -> Any:
    return (x + y - abs(x - y)) / 2


def _larger(x: Any, y: Any) -> Any:
    return (x + y + abs(x - y)) / 2


TURNS: Final = 4  # the fewest K iterations of a part of a split tile
MOST_PARTS: Final = 255  # of a split tile


def tail_parts(rest: Any, blocks: Any, processors: Any) -> Any:
    """Return in how many parts of K each of `rest` tiles is made, which are fewer than there are SMs."""
    return _larger(_lesser(_lesser(processors // _larger(rest, 1), blocks // TURNS), MOST_PARTS), 1)


def product_parts(shape: Shape, facts: Facts, c: Any) -> tuple[Any, ...]:
    m, n, k = facts.m, facts.n, facts.k
    tiles_m, tiles_n = -(-m // shape.block_m), -(-n // shape.block_n)
    tiles = tiles_m * tiles_n * facts.batch
    blocks = -(-k // shape.block_k)
    iterations = -(-blocks // shape.split)
    processors = facts.processors // shape.ctas
    busiest = -(-tiles * shape.split // processors)  # programs of the busiest SM
    rounds = -(-busiest // shape.slots)
    rest = shape.tail * (tiles % processors)
    parts = tail_parts(rest, blocks, processors)
    saved = _lesser(rest, 1) * (1 - 1 / parts)  # of the last wave
    busiest, rounds = busiest - saved, rounds - saved

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
    us = overlapped(c.start, (wait, work, memory, cache), power)
    shared = shape.shared * tiles + 8.0 * shape.block_m * shape.block_n * rest * (parts - 1)
    us = us + shared / c.parts + facts.copies * (c.copy + 2 * facts.copied / c.memory)
    waves = tiles * shape.split / (processors * shape.slots)
    edges = tiles_m * shape.block_m / m, tiles_n * shape.block_n / n
    bounds = wait / us, work / us, memory / us, cache / us
    ratios = waves, rounds / waves, *edges, iterations, missed
    return us, *bounds, *ratios, *shape[:5]


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
    sizes = core.itemsize, core.itemsize, ITEMSIZE[core.out_dtype]
    return [stride * size for stride, size in zip(core.leading, sizes, strict=True)]


class Program(NamedTuple):
    """Hold what a program of a product's config does in a K iteration, and for a tile."""

    resident: int  # programs that an SM holds at once
    multiply: float  # clocks of an SM that multiplies, at its peak rate
    whole: bool  # by instructions of whole warpgroups, or if there are none
    stored: float  # bytes of a tile's result
    warps: int = 0  # that wait for tiles and multiply them; 0 if other warps wait
    loads: float = 0.0  # loads through pointers, of a whole warp each
    instructions: float = 0.0  # clocks of further instructions of an SM
    rights: int = 1  # matrices that a is multiplied by


@dataclass(frozen=True)
class Fit:
    """Hold what all products share, fitted to half of the sweeps, and to ten whole spaces of configs.

    In clocks of an SM, and bytes a clock, unless said otherwise. Bounds add to each other, so rates are above
    those that units reach by themselves. tuning/cost.py fits anew, and says what picks lose.
    """

    start: float = 1.28  # microseconds of a launch
    fill: float = 1.85  # microseconds to fill the pipeline, and to store
    rendezvous: float = 1.33  # microseconds for programs that share a tile to meet
    latency: float = 840.0  # from requesting a tile to having it
    turn: float = 111.0  # barriers and bookkeeping in a K iteration
    warp: float = 10.6  # the same for each warp that waits for tiles
    multiply: float = 0.485  # factor of clocks that multiply
    small: float = 3.68  # the same without whole warpgroups, if tensor cores take them
    load: float = 1.1  # of a load through pointers, with its address
    stored: float = 21.6  # bytes of a result
    l2: float = 72.3  # bytes of the L2 cache for each SM, with all reading
    memory: float = 1.06  # share of the peak bandwidth of device memory


FIT: Final = Fit()


def product_us(config: Config, facts: Facts, device: Device, made: Program, fit: Fit = FIT) -> float:
    """Return predicted microseconds of a product by a config."""
    shape, clocks = shape_of(config, made.resident, made.rights), device.clock_ghz * 1e3
    persistent, split = bool(dict(config.kwargs).get("PERSISTENT", False)), shape.split
    work = fit.multiply * (1.0 if made.whole else fit.small) * made.multiply
    work += fit.load * made.loads + made.instructions
    work += fit.turn + fit.warp * made.warps
    turn = max(work, (work + fit.latency) / max(1, config.num_stages - 1))
    constants = Constants(
        # A persistent program fills its pipeline once: the next tile's loads overlap the end of the last.
        start=fit.start + fit.fill * persistent + fit.rendezvous * (split > 1),
        turn=turn / clocks, missed=0.0, fill=fit.fill * (not persistent), work=work / clocks,
        store=made.stored / fit.stored / clocks, memory=device.memory_gbps * fit.memory * 1e3,
        cache=fit.l2 * device.processors * clocks, blend=0.5, parts=5e6, copy=1.0,
    )  # fmt: skip
    return float(product_parts(shape, facts, constants)[0])
