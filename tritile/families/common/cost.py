"""Predict a config's time at a problem, in microseconds: a roofline of four bounds that overlap.

Programs wait for tiles, an SM works, device memory and the L2 cache move bytes; the slowest counts most. For
a product the bounds follow from its tiles, from the K iterations of its programs and what these
do, and from `Fit`, which all products share, on any GPU.
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
    """Hold what a product's time depends on other than its config."""

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


class Shape(NamedTuple):
    """Hold what a product's time depends on in a config."""

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


TURNS: Final = 4  # the fewest K iterations of a part of a split tile
MOST_PARTS: Final = 255  # of a split tile


def tail_parts(rest: int, blocks: int, processors: int) -> int:
    """Return in how many parts of K each of `rest` tiles is made, which are fewer than there are SMs."""
    return max(1, min(processors // max(rest, 1), blocks // TURNS, MOST_PARTS))


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


_ODD_A, _ODD_B, _ODD_OUT = 0.5, 0.4, 0.2  # share by which tiles take longer if rows start on no sectors
_OFF_LINE: Final = 0.1  # the same if rows of a or b do not start on lines
_BY_ROW: Final = 0.05  # share of an SM's work added if b is row-major, so that its tiles are strided along K
_POWER: Final = 1.5  # the larger, the less the faster bounds add to the slowest
_SUMS: Final = 5e6  # bytes a microsecond of sums that programs share
_COPY_US: Final = 1.0  # of an operand that is copied first, besides its bytes


def product_us(config: Config, facts: Facts, device: Device, made: Program, fit: Fit = FIT) -> float:
    """Return predicted microseconds of a product by a config."""
    shape, clocks, f = shape_of(config, made.resident, made.rights), device.clock_ghz * 1e3, facts
    persistent = bool(dict(config.kwargs).get("PERSISTENT", False))
    tiles_m, tiles_n = -(-f.m // shape.block_m), -(-f.n // shape.block_n)
    tiles, blocks = tiles_m * tiles_n * f.batch, -(-f.k // shape.block_k)
    turns, processors = -(-blocks // shape.split), f.processors // shape.ctas
    busiest = -(-tiles * shape.split // processors)  # programs of the busiest SM
    rounds = -(-busiest // shape.slots)
    rest = shape.tail * (tiles % processors)  # tiles of the last wave that are made in parts of K
    parts = tail_parts(rest, blocks, processors)
    saved = min(rest, 1) * (1 - 1 / parts)  # of the last wave

    row_a, row_b = min(f.m, shape.block_m) * f.size_a, min(f.n, shape.block_n) * f.size_b  # bytes along K
    odd = (_ODD_A * f.odd_a + _OFF_LINE * f.off_a) * row_a + (_ODD_B * f.odd_b + _OFF_LINE * f.off_b) * row_b
    slow, stored = 1 + odd / (row_a + row_b), 1 + _ODD_OUT * f.odd_out
    moved = (f.bytes_a + f.bytes_b * (1 + (-(-tiles_m // 8) - 1) * f.reread)) * f.batch

    work = fit.multiply * (1.0 if made.whole else fit.small) * made.multiply
    work += fit.load * made.loads + made.instructions + fit.turn + fit.warp * made.warps
    turn = max(work, (work + fit.latency) / max(1, config.num_stages - 1)) / clocks
    # A persistent program fills its pipeline once: the next tile's loads overlap the end of the last.
    fill = 0.0 if persistent else fit.fill
    bounds = (
        (rounds - saved) * (turns * turn * slow + fill * stored),  # the wait for tiles
        (busiest - saved)
        * (turns * work * (1 + _BY_ROW * f.by_row) + made.stored / fit.stored * stored)
        / clocks,
        (moved * slow + f.bytes_out * stored) / (device.memory_gbps * fit.memory * 1e3),
        tiles * (row_a + row_b) * f.k * slow / (fit.l2 * device.processors * clocks),
    )
    start = fit.start + fit.fill * persistent + fit.rendezvous * (shape.split > 1)
    us = overlapped(start, bounds, _POWER)
    us += (shape.shared * tiles + 8.0 * shape.block_m * shape.block_n * rest * (parts - 1)) / _SUMS
    us += f.copies * (_COPY_US + 2 * f.copied / (device.memory_gbps * fit.memory * 1e3))
    return float(us)
