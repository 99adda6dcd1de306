"""Permute by boxes: short sides are read and written in long runs, and gathered in shared memory between.

A box has as much of out's densest dimensions as makes a run of BLOCK_M elements, as much of x's as makes a
run of BLOCK_N, and then more of out's, up to BLOCK elements.
"""

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from math import gcd, prod
from typing import Any, Final, NamedTuple

from tritile.core.call import PermuteCall
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.permutation import PermuteProblem, merged
from tritile.families.common import grids
from tritile.families.common.cost import overlapped
from tritile.families.common.products import config_fault, resource_fault
from tritile.families.common.work import Buffer, Kernel, Work, step_of
from tritile.families.family import Family
from tritile.families.permute.family import TILE, WORD, Parts, digits

permute_box: Final = Kernel("tritile.families.permute.box", "permute_box")

BOX: Final = "box"
PARAMETERS: Final = ("BLOCK", "BLOCK_M", "BLOCK_N")
_MOST: Final = 16384  # elements of a box: twice its bits are fewer than 32
_HELD: Final = 64  # elements of a box that a thread takes
_BANKS: Final = 32  # of shared memory, a word each
# BLOCK, BLOCK_M, BLOCK_N and warps: what is left of 96 that were measured (tuning/NOTES.md).
_CONFIGS: Final = (
    (4096, 64, 32, 4), (8192, 64, 32, 4), (2048, 64, 512, 4), (16384, 64, 512, 8), (8192, 256, 512, 4),
)  # fmt: skip


class Fit:
    """Hold the formula's constants, fitted to 200 measurements on an H200."""

    memory = 1.106  # time of a byte, by that at the peak of device memory
    short = 0.135  # slower by this power of 256 bytes over the length of a run
    piece = 80.0  # bytes that could move while the ends of a skewed piece are copied
    read = 5.53  # instructions to find where a read begins, for a dimension
    gathered = 6.38  # to find an element in shared memory
    written = 6.71  # to find where a word is written
    end = 4.2  # clocks of an SM for each element that may be an end, of 128 threads
    alone = 8.8  # bytes a clock of one program alone on its SM
    clock = 0.934  # share of the highest clock
    power = 3.1  # the larger, the less the faster bounds add to the slowest
    start_us = 1.96


class Box(NamedTuple):
    """Hold how boxes of a problem lie.

    `sides`: of each dimension. `read`: elements read at once. `lanes`: elements of a written word. `inner`:
    dimensions of a piece of out, innermost first; `outer`: those of pieces. `skewed`: pieces may start inside
    a word.
    """

    sides: tuple[int, ...]
    read: int
    lanes: int
    skewed: bool
    inner: tuple[int, ...]
    outer: tuple[int, ...]


def _by(strides: Sequence[int]) -> list[int]:
    """The dimensions, the densest first."""
    return sorted(range(len(strides)), key=lambda i: (strides[i], -i))


def _sides(problem: PermuteProblem, run_out: int, run_x: int, block: int) -> tuple[int, ...]:
    sides, shape = [1] * len(problem.shape), problem.shape
    for strides, wanted in ((problem.out_strides, run_out), (problem.x_strides, run_x)):
        have = 1
        for i in _by(strides):
            sides[i] = max(sides[i], min(shape[i], -(-wanted // have)))
            have *= sides[i]
            if have >= wanted:
                break
    for i in _by(problem.out_strides):
        sides[i] = max(sides[i], min(shape[i], sides[i] * block // prod(sides)))
    for i, side in enumerate(sides):
        if 16 <= side < shape[i]:
            words = side // 16
            sides[i] = 16 * (words - 1 | 1 if words > 7 else words)  # odd: rows begin in several banks
    return tuple(sides)


def _merged(sides: Sequence[int], *strides: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """Return sizes and, for each operand, strides of a run of dimensions, with those merged that may be."""
    sizes, columns = merged(sides[::-1], *(each[::-1] for each in strides))
    return [*sizes[::-1]] or [1], [[*column[::-1]] or [0] for column in columns]


@functools.lru_cache(4096)
def _box(problem: PermuteProblem, run_out: int, run_x: int, block: int) -> Box:
    sides, size, shape = _sides(problem, run_out, run_x, block), problem.itemsize, problem.shape
    x, out = problem.x_strides, problem.out_strides
    cut = [i for i, side in enumerate(sides) if side < shape[i]]
    # Elements, at most 16 bytes, in which runs of x, and boxes after the first, are whole.
    order = _by(x)
    runs, (steps,) = _merged([sides[i] for i in order], [x[i] for i in order])
    read = gcd(16 // size, runs[0], *steps[1:], *(x[i] * sides[i] for i in cut)) if steps[0] == 1 else 1
    inner: list[int] = []
    outer = [i for i in _by(out) if sides[i] > 1]
    while outer and out[outer[0]] == prod(sides[i] for i in inner):
        inner.append(outer.pop(0))
    lanes = max(1, WORD // size) if inner else 1
    # What divides a piece, and its starts, in elements.
    starts = [out[i] * gcd(sides[i], shape[i] - sides[i]) for i in inner if i in cut]
    even = gcd(max(1, problem.out_align // size), prod(sides[i] for i in inner), *starts)
    return Box(sides, read, lanes, lanes > 1 and even % lanes > 0, tuple(inner), tuple(outer))


def box_of(config: Config, problem: PermuteProblem) -> Box:
    return _box(problem, config["BLOCK_M"], config["BLOCK_N"], config["BLOCK"])


def ends(box: Box) -> int:
    """Return the elements, a power of two, among which are those that no whole word has."""
    pieces = prod(box.sides[i] for i in box.outer)
    return 2 * box.lanes << (pieces - 1).bit_length() if box.skewed else 1


def boxes_of(box: Box, problem: PermuteProblem) -> int:
    return prod(-(-size // side) for size, side in zip(problem.shape, box.sides, strict=True))


def illegal(config: Config, problem: PermuteProblem, device: Device) -> str | None:
    if not device.nvidia:
        return f"boxes were not tried on {device.name}, which is not NVIDIA's"
    if not contends(problem):
        return "boxes are of elements of 1 to 8 bytes that differ"
    if (reason := config_fault(config, PARAMETERS, _MOST)) is not None:
        return reason
    block, threads = config["BLOCK"], device.warp_size * config.num_warps
    if not threads <= block <= _HELD * threads:
        return f"{block} elements are too few or too many for {config.num_warps} warps"
    box = box_of(config, problem)
    if not block < 2 * prod(box.sides) <= 2 * block:
        return f"boxes of {prod(box.sides)} elements, not half of {block} to all"
    piece = prod(box.sides[i] for i in box.inner)
    if box.skewed and piece < 4 * box.lanes:
        return f"pieces of {piece} elements are too short"
    if ends(box) > block or boxes_of(box, problem) >= 2**31 or max(problem.shape) >= 2**31:
        return "too many pieces or boxes, or a side that 32 bits do not count"
    return resource_fault(device, block * problem.itemsize)


def configs() -> Iterator[Config]:
    for block, run_out, run_x, warps in _CONFIGS:
        yield Config.of(warps, 1, BOX, BLOCK=block, BLOCK_M=run_out, BLOCK_N=run_x)


def pointless(config: Config, problem: PermuteProblem, device: Device) -> bool:
    """True if another config has the same boxes, and is named by shorter runs."""
    block, run_out, run_x = (config[name] for name in PARAMETERS)
    shorter = ((m, n) for size, m, n, _ in _CONFIGS if size == block and (m, n) < (run_out, run_x))
    return any(_box(problem, m, n, block) == box_of(config, problem) for m, n in shorter)


def contends(problem: PermuteProblem) -> bool:
    return problem.itemsize <= 8 and 0 not in problem.x_strides


def runs(box: Box, problem: PermuteProblem) -> tuple[int, int]:
    """Return how many elements of a box lie side by side in x, and in out."""
    have = 1
    for i in _by(problem.x_strides):
        if problem.x_strides[i] != have:
            break
        have *= box.sides[i]
        if box.sides[i] < problem.shape[i]:
            break
    return have, prod(box.sides[i] for i in box.inner)


@functools.lru_cache(4096)
def _conflicts(box: Box, problem: PermuteProblem) -> float:
    """Return how many words of one bank a warp asks for at once where it gathers, the mean of its lanes."""
    starts, have = {}, 1
    for i in _by(problem.x_strides):
        starts[i] = have
        have *= box.sides[i]

    def word(index: int) -> int:
        place, index = 0, index % have
        for i in (*box.inner, *box.outer):
            index, at = divmod(index, box.sides[i])
            place += at * starts[i]
        return place * problem.itemsize // WORD

    most = 0
    for lane in range(box.lanes):
        words = {word(thread * box.lanes + lane) for thread in range(_BANKS)}
        most += max(Counter(each % _BANKS for each in words).values())
    return most / box.lanes


def _instructions(box: Box, problem: PermuteProblem) -> float:
    """Return instructions of an element: to read, gather and write it."""
    x, out = problem.x_strides, problem.out_strides

    def dims(of: Sequence[int], *strides: Sequence[int]) -> int:
        own = [i for i in of if box.sides[i] > 1]
        return len(_merged([box.sides[i] for i in own], *([each[i] for i in own] for each in strides))[0])

    read = Fit.read * (1 + dims(_by(x), x)) / box.read
    written = Fit.written * (1 + dims(box.outer, x, out)) / box.lanes
    return read + Fit.gathered * dims(box.inner, x) + written


def resident(config: Config, problem: PermuteProblem, device: Device) -> int:
    threads = config.num_warps * device.warp_size
    registers = 24 + 2 * config["BLOCK"] // threads
    taken = config["BLOCK"] * problem.itemsize + 1024
    return max(1, min(65536 // (threads * registers), device.shared_memory // taken, 2048 // threads, 32))


def parts_us(config: Config, problem: PermuteProblem, device: Device) -> Parts:
    size, block, box = problem.itemsize, config["BLOCK"], box_of(config, problem)
    read, written = (run * size for run in runs(box, problem))
    covered = prod(-(-n // side) * side / n for n, side in zip(problem.shape, box.sides, strict=True))
    short = (256 / min(256, read) * 256 / min(256, written)) ** Fit.short
    moved = Fit.memory * problem.bytes * short
    moved += box.skewed * Fit.piece * problem.bytes / 2 * covered / written
    turns = max(1.0, boxes_of(box, problem) / device.processors)
    waves = max(1.0, boxes_of(box, problem) / device.processors / resident(config, problem, device))
    issue = turns * (block * _instructions(box, problem) + Fit.end * ends(box)) / 128
    gather = turns * prod(box.sides) * _conflicts(box, problem) / _BANKS
    wait = waves * block * size / Fit.alone
    clocks = device.clock_ghz * Fit.clock * 1e3
    return Parts(moved / (device.memory_gbps * 1e3), gather / clocks, issue / clocks, wait / clocks)


def cost(config: Config, problem: PermuteProblem, device: Device) -> float:
    return float(overlapped(Fit.start_us, parts_us(config, problem, device), Fit.power))


def _magics(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return 2^32 over each size but the last, rounded up, as 32 signed bits; never empty."""
    magics = (-(-(1 << 32) // size) for size in sizes[:-1])
    return tuple(magic - 2**32 if magic >= 2**31 else magic for magic in magics) or (0,)


def _run(sides: Sequence[int], *strides: Sequence[int], unit: int = 1) -> tuple[Any, ...]:
    """Return magics and, for each operand, steps of a run of dimensions, innermost first.

    `unit`: the elements of the first dimension that count as one.
    """
    sizes, columns = _merged(sides, *strides)
    steps = []
    for own in columns:
        steps.append((unit * own[0], *(own[i] - own[i - 1] * sizes[i - 1] for i in range(1, len(own)))))
    return _magics([sizes[0] // unit, *sizes[1:]]), *steps


def work(call: PermuteCall, config: Config, processors: int, early: bool) -> Work:
    problem, box = call.problem, box_of(config, call.problem)
    shape, x, out, sides = problem.shape, problem.x_strides, problem.out_strides, box.sides
    order = [i for i in _by(x) if sides[i] > 1]
    places = {i: prod(sides[j] for j in order[:k]) for k, i in enumerate(order)}

    def of(values: Any, dims: Sequence[int]) -> list[int]:
        return [values[i] for i in dims]

    read_magics, read_steps = _run(of(sides, order), of(x, order), unit=box.read)
    pieces = _run(of(sides, box.outer), of(places, box.outer), of(x, box.outer), of(out, box.outer))
    inner = _run(of(sides, box.inner), of(places, box.inner), of(x, box.inner))
    piece_size = prod(of(sides, box.inner))
    words = (piece_size - (box.lanes - 1 if box.skewed else 0)) // box.lanes
    cut = [i for i in _by(out) if sides[i] < shape[i]]
    dims = [(*digits((-(-shape[i] // sides[i]), 1))[0], sides[i], shape[i] - sides[i]) for i in cut]
    values = {
        "x_ptr": Buffer("x"), "out_ptr": Buffer("out"),
        "box_dims": tuple(dims) or ((1, 0, 0, 1, 0),),
        "x_box_strides": tuple(of(x, cut)) or (0,), "out_box_strides": tuple(of(out, cut)) or (0,),
        "reads": prod(sides) // box.read, "read_magics": read_magics, "read_steps": read_steps,
        "pieces": prod(of(sides, box.outer)), "piece_size": piece_size,
        "word_magic": _magics((words, 1))[0],
        "piece_magics": pieces[0], "piece_places": pieces[1], "piece_x_steps": pieces[2],
        "piece_out_steps": pieces[3],
        "inner_magics": inner[0], "inner_places": inner[1], "inner_x_steps": inner[2],
        "READ": box.read, "LANES": box.lanes, "SKEWED": box.skewed, "ENDS": ends(box),
        "WIDE": max(problem.spans) >= grids.WIDE_FROM, "FLIP_LAST": call.flip[1], "WAIT": early,
        "BLOCK": config["BLOCK"],
    }  # fmt: skip
    how = grids.options(config, launch_pdl=early)
    return Work((step_of(permute_box, (boxes_of(box, problem), 1, 1), values, how),))


FAMILY: Final = Family(
    PermuteProblem.op, BOX, permute_box, configs, illegal, pointless, cost, work,
    resident=resident, numerics=TILE.numerics, canonical=TILE.canonical, contends=contends,
    margin=1.1,  # of 60 permutations 17 are taken, none of which was slower; of 25 without one two were
)  # fmt: skip
