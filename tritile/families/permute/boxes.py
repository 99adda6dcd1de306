"""Permute by boxes: short rows are read and written in long runs, and gathered in shared memory between.

A box has as much of out's densest dimensions as makes a run of RUN elements, then as much of x's as fits, and
then more of out's, in BLOCK elements of shared memory.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import gcd, prod
from typing import Any, Final, NamedTuple

from triton import next_power_of_2

from tritile.core.call import PermuteCall
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.permutation import PermuteProblem, merged
from tritile.families.common import grids
from tritile.families.common.cost import overlapped
from tritile.families.common.products import config_fault, resource_fault
from tritile.families.family import Family
from tritile.families.permute.family import TILE, Parts, digits
from tritile.runtime.work import Buffer, Kernel, Work, step_of

permute_box: Final = Kernel("tritile.families.permute.box", "permute_box")

BOX: Final = "box"
PARAMETERS: Final = ("BLOCK", "READ", "RUN")
_MOST: Final = 16384  # elements of a box: twice its bits are fewer than 32
_MOST_PER_THREAD: Final = 64  # elements of a box
WORD: Final = 4  # bytes of a bank of shared memory
_BANKS: Final = 32  # of shared memory, a word each
_FILLED: Final = 15 / 16  # of BLOCK: the rest is for what keeps a warp's elements in different banks
_MAX_CONFLICTS: Final = 2  # words of one bank at once, above which rows that lie side by side are moved apart
_SLANT: Final = 3  # a box reads extra rows only if it has this many of its own for each
# If pieces begin anywhere in a word, stores of 8 and 16 bytes pay if a piece has this many of them, and
# the box this many rows for each extra one that they need.
_WIDE_PIECE: Final = 4
_WIDE_SLANT: Final = 16
_LANES: Final = 8  # most elements a store if pieces lie on words; with 16 of 1 byte, gathers meet in banks
# BLOCK, RUN, READ and warps: of 13 that were measured these lose 0.4% to all (tuning/NOTES.md).
_CONFIGS: Final = (
    (2048, 64, 16, 4), (4096, 64, 16, 4), (4096, 64, 4, 4), (8192, 64, 16, 4), (8192, 64, 8, 4),
    (16384, 128, 16, 8), (16384, 128, 4, 8),
)  # fmt: skip


class Fit:
    """Hold the formula's constants, fitted to 18,000 measurements on an H200."""

    memory = 1.16  # time of a byte, by that at the peak of device memory
    short = 0.086  # slower by this power of 256 bytes over the length of a run
    read = 9.83  # instructions to find where a word is read from
    written = 6.48  # to find where a word is written
    dimension = 12.6  # of one more dimension of either
    division = 6.97  # of one more dimension of an element in its piece
    one_program = 12.8  # bytes per clock of a program that has its SM to itself
    clock = 1.06  # share of the highest clock
    power = 2.68  # the larger, the less the faster bounds add to the slowest
    start_us = 2.26


class Pieces(NamedTuple):
    """Hold how a box lies in out.

    `inner`: dimensions of a piece, which lie in a row in out, innermost first; `outer`: those of pieces.
    `size`: elements of a piece; `number`: of pieces. `lanes`: elements of a written word. `skewed`: pieces
    may start inside a word. `more`: rows of the last dimension of a piece that are read beyond it, as its
    last word goes on there.
    """

    inner: tuple[int, ...]
    outer: tuple[int, ...]
    size: int
    number: int
    lanes: int
    skewed: bool
    more: int

    @property
    def words(self) -> int:
        """Words of a piece, or that begin in it."""
        return -(-self.size // self.lanes) + (self.skewed and self.size % self.lanes > 0)

    @property
    def elements(self) -> int:
        """Elements of the words of all pieces."""
        return self.number * self.words * self.lanes


class Box(NamedTuple):
    """Hold how boxes of a problem lie.

    `sides`: of each dimension; `rows`: what is read of each. `read`: elements read at once. `run`: elements
    that lie side by side in x, of the dimensions `runs`; `others`: the rest, the densest in x first.
    `places`: from an element to its neighbour in each dimension, where it was read to; `jump`: how much more
    after each word's worth of the innermost of out. `extent`: elements of all that. `conflicts`: the most
    words of one bank of shared memory that a warp gathers at once.
    """

    sides: tuple[int, ...]
    pieces: Pieces
    rows: tuple[int, ...]
    read: int
    runs: tuple[int, ...]
    run: int
    others: tuple[int, ...]
    places: tuple[int, ...]
    jump: int
    extent: int
    conflicts: int


def _by(strides: Sequence[int]) -> list[int]:
    """The dimensions, the densest first."""
    return sorted(range(len(strides)), key=lambda i: (strides[i], -i))


def _part(size: int, most: int) -> int:
    """The smallest side that gives as few parts of `size` as `most` does, in whole words if possible."""
    if most >= size:
        return size
    unit = gcd(size, 16 if most >= 48 else 4 if most >= 8 else 1)
    even = -(-size // -(-size // most) // unit) * unit
    return even if even <= most else even - unit


def _pieces(problem: PermuteProblem, sides: Sequence[int]) -> Pieces:
    shape, out, size = problem.shape, problem.out_strides, 1
    inner: list[int] = []
    outer = _by(out)
    while outer and out[outer[0]] == size:
        i = outer.pop(0)
        inner.append(i)
        size *= sides[i]
        if sides[i] < shape[i]:
            break
    starts = (out[i] * gcd(sides[i], shape[i] - sides[i]) for i in inner)
    even = gcd(max(1, problem.out_align // problem.itemsize), size, *starts)
    narrow = max(1, WORD // problem.itemsize) if inner else 1
    lanes, skewed, more = narrow, even % narrow > 0, 0
    if skewed:
        side, cut = sides[inner[-1]], sides[inner[-1]] < shape[inner[-1]]
        for lanes in (4 * narrow, 2 * narrow, narrow):
            more = -(-(lanes - 1) // out[inner[-1]]) if cut else 0
            if size >= _WIDE_PIECE * lanes and _WIDE_SLANT * more <= side:
                break
        more *= _SLANT * more <= side
    elif narrow > 1:
        lanes = gcd(even, _LANES)
    outer = [i for i in outer if sides[i] > 1]
    return Pieces(tuple(inner), tuple(outer), size, prod(sides[i] for i in outer), lanes, skewed, more)


def _walk(pieces: Pieces, sides: Sequence[int]) -> dict[int, list[int]]:
    """Return for each dimension the indices of the first elements of words that a warp gathers at once."""
    words = range(min(_BANKS, pieces.number * pieces.words))
    piece, index = [word // pieces.words for word in words], [word % pieces.words for word in words]
    index, found = [each * pieces.lanes for each in index], {}
    for i in pieces.inner[:-1]:
        found[i], index = [each % sides[i] for each in index], [each // sides[i] for each in index]
    if pieces.inner:
        found[pieces.inner[-1]] = index
    for i in pieces.outer:
        found[i], piece = [each % sides[i] for each in piece], [each // sides[i] for each in piece]
    return found


class _Layout:
    """Lay what a box reads out in shared memory, dimension by dimension, the densest in x first."""

    def __init__(self, problem: PermuteProblem, sides: Sequence[int], pieces: Pieces) -> None:
        self.size, self.lanes, self.jump = problem.itemsize, pieces.lanes, 0
        self.places = [0] * len(sides)
        self.first = pieces.inner[0] if pieces.inner else -1
        self.whole_words = len(pieces.inner) < 2 or sides[self.first] % self.lanes == 0
        # Of a warp's words. What has no place yet counts as 0, and words that differ in it alone as one.
        self.walk = _walk(pieces, sides)
        self.at = [0] * min(_BANKS, pieces.number * pieces.words)

    def moved(self, index: Sequence[int], step: int) -> list[int]:
        return [at + each * step for at, each in zip(self.at, index, strict=True)]

    def conflicts(self, places: Sequence[int]) -> int:
        """Return the bank conflicts of a warp's gather: the most of its words in one bank."""
        words = {place * self.size // WORD for place in places}
        return max(Counter([word % _BANKS for word in words]).values())

    def least(self, index: Sequence[int], steps: Iterable[int]) -> tuple[int, int]:
        """Return the first step with the fewest bank conflicts, and their number."""
        tried = []
        for step in steps:
            tried.append((self.conflicts(self.moved(index, step)), step))
            if tried[-1][0] == 1:
                break
        conflicts, step = min(tried)
        return step, conflicts

    def put(self, i: int, steps: Sequence[int]) -> int:
        """Place neighbours of dimension `i` by the first step with the fewest bank conflicts; return it."""
        index = self.walk.get(i)  # None: those words differ in others
        self.places[i] = self.least(index, steps)[0] if index and len(steps) > 1 else steps[0]
        if index:
            self.at = self.moved(index, self.places[i])
        return self.places[i]

    def split(self, rows: int, read: int) -> int:
        """Pad between groups of rows by the smallest jump that reduces bank conflicts most; return it."""
        if self.lanes > 1 and self.whole_words and rows > self.lanes and self.conflicts(self.at) > 1:
            index = [each // self.lanes for each in self.walk[self.first]]
            most = min(8 * read, self.lanes * self.places[self.first] // 8)
            self.jump, _ = self.least(index, range(0, most + 1, read))
            self.at = self.moved(index, self.jump)
        return self.jump


def _laid(problem: PermuteProblem, sides: Sequence[int], width: int) -> Box:
    shape, x, pieces = problem.shape, problem.x_strides, _pieces(problem, sides)
    rows = [*sides]
    if pieces.more:
        rows[pieces.inner[-1]] += pieces.more
    order = [i for i in _by(x) if rows[i] > 1]
    layout, runs, run = _Layout(problem, sides, pieces), list[int](), 1
    for i in order:
        if x[i] != run:
            break
        if i == layout.first and 4 * width <= run * problem.itemsize:
            if layout.conflicts(layout.moved(layout.walk[i], x[i])) > _MAX_CONFLICTS:
                break
        layout.put(i, (x[i],))
        runs.append(i)
        run *= rows[i]
        if sides[i] < shape[i]:
            break
    others = [i for i in order if i not in runs]
    read = min(max(1, width // problem.itemsize), 1 << (run - 1).bit_length())
    # Words of memory that a run begins and ends in have a place of their own, unless runs are whole words.
    starts = (part * x[i] for i in order if sides[i] < shape[i] for part in (sides[i], shape[i] - sides[i]))
    whole = gcd(max(1, problem.x_align // problem.itemsize), *starts, *(x[i] for i in others)) % read == 0
    extent = run + (0 if whole else read - 1)
    for i in others:
        least = max(2, extent + (x[i] - extent) % read)  # that differs from the stride in whole words
        most = least + min(least // 8, 8 * read)
        extent = rows[i] * layout.put(i, range(least, most + 1, read))
        if i == layout.first:
            extent += layout.split(rows[i], read) * -(-rows[i] // pieces.lanes)
    extent += 0 if whole else read - 1
    return Box(
        tuple(sides), pieces, tuple(rows), read, tuple(runs), run, tuple(others), tuple(layout.places),
        layout.jump, extent, layout.conflicts(layout.at),
    )  # fmt: skip


@functools.lru_cache(4096)
def _box(problem: PermuteProblem, block: int, run: int, width: int) -> Box:
    shape, x, out = problem.shape, problem.x_strides, problem.out_strides
    by_x, by_out = _by(x), _by(out)
    read = max(1, width // problem.itemsize)
    sides, have = [1] * len(shape), 1
    for i in by_out:
        needed = max(run // have, _SLANT if 1 < have < run else 1)
        if out[i] != have or (needed == 1 and have > 1):
            break
        sides[i] = shape[i] if shape[i] <= 2 * needed else _part(shape[i], needed)
        have *= sides[i]
        if sides[i] < shape[i]:
            break
    pieces, grown = _pieces(problem, sides), by_x[0] if shape else 0
    aligned = gcd(
        max(1, problem.x_align // problem.itemsize), *(size for i, size in enumerate(x) if size > 1)
    )
    slack = read - 1 if aligned % read else 0

    def room() -> float:
        """Return about how many times a box of these sides fits."""
        extent: float = 1
        dense, apart = True, slack
        for i in by_x:
            rows = sides[i] + (pieces.more if i == pieces.inner[-1] else 0) if pieces.more else sides[i]
            if dense and x[i] == extent:
                extent *= rows
                dense = sides[i] == shape[i]
            elif rows > 1:
                extent += apart
                extent = (extent + (x[i] - extent) % read) * rows
                dense, apart = False, 0
        return _FILLED * block / max(extent + slack, prod(sides))

    for i, least in (*((i, 1.0) for i in by_x), *((i, 1.5) for i in by_out)):
        before = sides[i]
        while sides[i] < shape[i] and (side := min(shape[i], int(sides[i] * room()))) > sides[i]:
            sides[i] = side
        sides[i] = _part(shape[i], sides[i]) if sides[i] >= least * before else before
        if sides[i] > before:
            grown, pieces = i, _pieces(problem, sides)
    while True:
        box = _laid(problem, sides, width)
        if max(box.extent, box.pieces.elements) <= block or shape == () or sides[grown] == 1:
            return box
        sides[grown] = _part(shape[grown], max(1, sides[grown] * 15 // 16))


def box_of(config: Config, problem: PermuteProblem) -> Box:
    return _box(problem, config["BLOCK"], config["RUN"], config["READ"])


def boxes_of(box: Box, problem: PermuteProblem) -> int:
    return prod(-(-size // side) for size, side in zip(problem.shape, box.sides, strict=True))


def ends(box: Box) -> int:
    """Return how many elements, a power of two, hold those at the ends, which no whole word covers."""
    return 2 * box.pieces.lanes << (box.pieces.number - 1).bit_length() if box.pieces.skewed else 1


def illegal(config: Config, problem: PermuteProblem, device: Device) -> str | None:
    if not device.nvidia:
        return f"boxes were not tried on {device.name}, which is not NVIDIA's"
    if not contends(problem):
        return "boxes are of elements of 1 to 8 bytes that differ"
    if (reason := config_fault(config, PARAMETERS, _MOST)) is not None:
        return reason
    block, threads = config["BLOCK"], device.warp_size * config.num_warps
    if not threads <= block <= _MOST_PER_THREAD * threads:
        return f"{block} elements are too few or too many for {config.num_warps} warps"
    box = box_of(config, problem)
    if box.pieces.skewed and box.pieces.size < box.pieces.lanes:
        return "pieces are shorter than a word"
    if max(box.extent, box.pieces.elements, ends(box)) > block:
        return f"a box takes more than {block} elements of shared memory, or words"
    if boxes_of(box, problem) >= 2**31 or max(problem.shape, default=1) >= 2**31:
        return "more boxes, or a longer side, than 32 bits count"
    return resource_fault(device, block * problem.itemsize)


def configs() -> Iterator[Config]:
    for block, run, read, warps in _CONFIGS:
        yield Config.of(warps, 1, BOX, BLOCK=block, RUN=run, READ=read)


def is_dominated(config: Config, problem: PermuteProblem, device: Device) -> bool:
    """True if a config before it has the same boxes."""
    own = config["BLOCK"], config["RUN"], config["READ"], config.num_warps
    before = itertools.takewhile(lambda each: each != own, _CONFIGS)
    return any(_box(problem, *each[:3]) == box_of(config, problem) for each in before if each[3] == own[3])


def contends(problem: PermuteProblem) -> bool:
    return problem.itemsize <= 8 and problem.shape != () and 0 not in problem.x_strides


def resident(config: Config, problem: PermuteProblem, device: Device) -> int:
    threads = config.num_warps * device.warp_size
    registers = 24 + 2 * config["BLOCK"] // threads
    taken = config["BLOCK"] * problem.itemsize + 1024
    return max(1, min(65536 // (threads * registers), device.shared_memory // taken, 2048 // threads, 32))


def shared(box: Box) -> bool:
    """True if elements of a word differ only in the innermost dimension of out."""
    pieces = box.pieces
    return not pieces.skewed and pieces.inner != () and box.sides[pieces.inner[0]] % pieces.lanes == 0


def parts_us(config: Config, problem: PermuteProblem, device: Device) -> Parts:
    size, box = problem.itemsize, box_of(config, problem)
    pieces, boxes = box.pieces, boxes_of(box, problem)
    elements = next_power_of_2(pieces.elements)
    short = (256 / min(256, box.run * size) * 256 / min(256, pieces.size * size)) ** Fit.short
    covered = boxes * prod(box.rows) / prod(problem.shape)
    moved = Fit.memory * problem.bytes * short * (1 + covered) / 2
    turns = max(1.0, boxes / device.processors)
    waves = max(1.0, turns / resident(config, problem, device))
    issue = next_power_of_2(box.extent) / box.read * (Fit.read + Fit.dimension * len(box.others))
    issue += elements / pieces.lanes * (Fit.written + Fit.dimension * len(pieces.outer))
    issue += 0 if shared(box) else elements * Fit.division * (len(pieces.inner) - 1)
    gather = turns * elements / _BANKS * box.conflicts
    wait = waves * elements * size / Fit.one_program
    clocks = device.clock_ghz * Fit.clock * 1e3
    return Parts(
        moved / (device.memory_gbps * 1e3), gather / clocks, turns * issue / 128 / clocks, wait / clocks
    )


def cost(config: Config, problem: PermuteProblem, device: Device) -> float:
    return float(overlapped(Fit.start_us, parts_us(config, problem, device), Fit.power))


def _magic(size: int, bits: int = 32) -> int:
    """Return 2^bits over a size, rounded up, as 32 signed bits."""
    magic = -(-(1 << bits) // size)
    return magic - 2**32 if magic >= 2**31 else magic


def _run(sides: Sequence[int], *strides: Sequence[int]) -> tuple[Any, ...]:
    """Return magics and, for each operand, steps of a run of dimensions, innermost first; none is empty."""
    sizes, columns = merged(sides[::-1], *(each[::-1] for each in strides))
    sizes, steps = sizes[::-1], []
    for own in (column[::-1] for column in columns):
        steps.append(
            tuple(step - own[k - 1] * sizes[k - 1] if k else step for k, step in enumerate(own)) or (0,)
        )
    return tuple(_magic(size) for size in sizes[:-1]) or (0,), *steps


def work(call: PermuteCall, config: Config, processors: int, early: bool) -> Work:
    problem, box = call.problem, box_of(config, call.problem)
    shape, x, out = problem.shape, problem.x_strides, problem.out_strides
    sides, pieces = box.sides, box.pieces
    lanes, inner, last = pieces.lanes, pieces.inner, pieces.inner[-1] if pieces.inner else -1

    def of(values: Any, dims: Sequence[int]) -> list[int]:
        return [values[i] for i in dims]

    read: list[tuple[int, int, int, int]] = []
    index = {}  # of digits, by dimension
    for i in reversed(box.others):
        pitch = lanes * box.places[i] + box.jump
        if box.jump and i == inner[0]:
            read.append((pitch, _magic(pitch), 2**30, lanes * x[i] - pitch))
        index[i] = len(read)
        read.append((box.places[i], _magic(box.places[i]), box.rows[i], x[i] - box.places[i]))
    places = [*box.places]  # less the jumps of all words before, which the kernel counts from the first
    for k, i in enumerate(inner[1:], 1):
        places[i] -= box.jump * (prod(of(sides, inner[:k])) // lanes)
    piece = _run(*(of(values, pieces.outer) for values in (sides, box.places, x, out)))
    within = _run(*(of(values, inner) for values in (box.rows, places, x)))
    cut = [i for i in _by(out) if sides[i] < shape[i]]
    if pieces.more:
        cut.sort(key=lambda i: i != last)
    dims = [(*digits((-(-shape[i] // sides[i]), 1))[0], sides[i], shape[i] - sides[i]) for i in cut]
    values = {
        "x_ptr": Buffer("x"), "out_ptr": Buffer("out"),
        "box_dims": tuple(dims) or ((1, 0, 0, 1, 0),),
        "x_box_strides": tuple(of(x, cut)) or (0,), "out_box_strides": tuple(of(out, cut)) or (0,),
        "span": problem.spans[0],
        "reach": sum((box.rows[i] - 1) * x[i] for i in range(len(x)) if i != last),
        "far": box.rows[last] if inner else 1, "row_step": x[last] if inner else 0,
        "run": box.run, "run_step": x[last] if pieces.more and last in box.runs else 0,
        "read_digits": tuple(read) or ((2 * _MOST, _magic(2 * _MOST), 1, 0),),
        "pieces": pieces.number, "words": pieces.words, "word_magic": _magic(pieces.words, 31),
        "piece_size": pieces.size, "row_size": out[last] if inner else 1,
        "line": shape[last] if pieces.more else sides[last],
        "piece_magics": piece[0], "piece_places": piece[1], "piece_x_steps": piece[2],
        "piece_out_steps": piece[3],
        "inner_magics": within[0], "inner_places": within[1], "inner_x_steps": within[2], "jump": box.jump,
        "single": (single := pieces.size + (lanes - 1 if pieces.more else 0)),
        "single_magic": _magic(single, 31), "EACH": 4 * 32 * config.num_warps,
        "last_word": pieces.size - (1 if pieces.more else lanes),
        "READ": box.read, "CUT": index.get(last, -1) if pieces.more else -1,
        "SPLIT": index[inner[0]] - 1 if box.jump else -1, "LANES": lanes,
        "SLANTED": pieces.more > 0, "SKEWED": pieces.skewed, "WHOLE": pieces.size % lanes == 0,
        "SHARED": shared(box), "SEVERAL": pieces.number > 1, "ENDS": ends(box),
        "WIDE": max(problem.spans) >= grids.WIDE_FROM, "FLIP_LAST": call.flip[1], "WAIT": early,
        "BLOCK_X": next_power_of_2(box.extent), "BLOCK": next_power_of_2(pieces.elements),
    }  # fmt: skip
    how = grids.options(config, launch_pdl=early)
    return Work((step_of(permute_box, (boxes_of(box, problem), 1, 1), values, how),))


FAMILY: Final = Family(
    PermuteProblem.op, BOX, permute_box, configs, illegal, is_dominated, cost, work,
    resident=resident, numerics=TILE.numerics, canonical=TILE.canonical, contends=contends,
    margin=1.2,  # of 160 permutations of 4 bytes 7 are taken, none of which was slower
)  # fmt: skip
