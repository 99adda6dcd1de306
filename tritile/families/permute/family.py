"""Permute by tiles.

Time is predicted from device memory, the L2 cache, the SMs' instructions and the wait of the few programs
that fit at once; the slowest counts most. L2 moves sectors of 32 bytes: a run that starts anywhere touches
more of them than it fills.
"""

import itertools
from collections.abc import Iterator
from math import gcd, prod
from typing import Any, Final, NamedTuple

from tritile.core.call import PermuteCall
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.permutation import PermuteProblem
from tritile.families.common import grids
from tritile.families.common.cost import overlapped
from tritile.families.common.products import config_fault, is_disordered, programs_per_sm, resource_fault
from tritile.families.family import Family
from tritile.families.numerics import Numerics
from tritile.runtime.work import Buffer, Kernel, Step, Work, step_of

permute_tile: Final = Kernel("tritile.families.permute.kernel", "permute_tile")
transpose_in_place: Final = Kernel("tritile.families.permute.kernel", "transpose_in_place")

NAME: Final = "tile"
PARAMETERS: Final = ("BLOCK_M", "BLOCK_N", "GROUP_M")
_MOST_WORDS: Final = 64  # 32-bit words of a tile that a thread can hold, each with an address of its own


def _configs() -> Iterator[Config]:
    for m, n, warps, group in itertools.product(_SIDES, _SIDES, (4, 8, 16), (1, 32, 256)):
        if 512 <= m * n <= 65536:
            yield Config.of(warps, 1, NAME, BLOCK_M=m, BLOCK_N=n, GROUP_M=group)


def in_place(problem: PermuteProblem) -> Config:
    """Return the config that transposes square matrices in place: always the same, not tuned."""
    block = 64 if problem.itemsize <= 4 else 32
    return Config.of(4, 1, NAME, BLOCK_M=block, BLOCK_N=block, GROUP_M=1)


def uneven(extent: int, block: int) -> bool:
    """True if tiles of `block` that overlap to cover `extent` copy more than an eighth of it twice."""
    return extent < block or 8 * (-(-extent // block) * block) > 9 * extent


def vectors(problem: PermuteProblem, runs: tuple[int, int]) -> tuple[int, int]:
    """Return the bytes that a thread reads and writes at once: as alignment and runs allow, at most 16."""
    size, (read, written) = problem.itemsize, runs
    return (
        max(size, min(problem.x_align, read * size, 16)),
        max(size, min(problem.out_align, written * size, 16)),
    )


def words_per_thread(config: Config, problem: PermuteProblem, device: Device) -> float:
    """Return the 32-bit registers of each thread that hold its part of a tile, one at least for reads."""
    m, n, size = config["BLOCK_M"], config["BLOCK_N"], problem.itemsize
    singly = min(vectors(problem, problem.runs(m, n))) < 4
    return float(m * n / (config.num_warps * device.warp_size) * (max(4, size) if singly else size) / 4)


def illegal(config: Config, problem: PermuteProblem, device: Device) -> str | None:
    if (reason := config_fault(config, PARAMETERS, 4096)) is not None:
        return reason
    m, n, threads = config["BLOCK_M"], config["BLOCK_N"], config.num_warps * device.warp_size
    if (reason := resource_fault(device, m * n * problem.itemsize)) is not None:
        return reason
    words = words_per_thread(config, problem, device)
    if len(problem.plane.n) > 1:  # what is divided, the compiler moves singly
        words = max(words, m * n / threads)
    if words > _MOST_WORDS:
        return f"{words:.0f} registers a thread for its part of the tile, of {_MOST_WORDS}"
    if m * n < threads:
        return f"a tile leaves some of {threads} threads idle"
    if config["GROUP_M"] * -(-problem.n // n) >= 2**31:
        return f"a band of {config['GROUP_M']} rows of tiles has more than 32 bits can count"
    return None


def oversized(config: Config, problem: PermuteProblem) -> bool:
    return bool(config["BLOCK_M"] >= 2 * max(problem.m, 16) or config["BLOCK_N"] >= 2 * max(problem.n, 16))


def is_dominated(config: Config, problem: PermuteProblem, device: Device) -> bool:
    return is_disordered(config, problem) or oversized(config, problem)


class Fit:
    """Hold the formula's constants, fitted to measured trials of an H200."""

    bandwidth = 1.0  # share of the peak bandwidth of device memory that is reached
    sector = 0.907  # time of a byte through L2 in whole sectors, by that of one of device memory
    short = 0.0664  # slower by this power of 256 bytes over the length of a run
    access = 2.02  # of a load or store, with its address
    digit = 7.51  # of one more dimension in a run
    mask = 1.54  # of an element if tiles are uneven
    reach = 1.31  # how many times its share of the bandwidth one SM can use
    one_program_bytes = 16.1  # bytes per clock of a program that has its SM to itself
    gap = 45.4  # clocks from one load of a thread to the next
    setup = 52.8  # instructions of a warp before its first element
    edge = 1.5  # extra cost, in sectors, of a sector that two runs in out share
    scatter = 0.0888  # slower by this share if neighbouring programs write short runs far apart
    launch_us = 1.19


def sectors(run: float, align: int, request: float) -> float:
    """Return the sectors that runs of so many bytes touch over those they fill, at `request` bytes a time."""
    ahead = 0.0 if align >= 16 else 1.0 - align / 32
    at_once = min(run, request)
    return max(32.0, at_once + 32 * ahead) / at_once


def resident(config: Config, problem: PermuteProblem, device: Device) -> int:
    threads = config.num_warps * device.warp_size
    registers = 16 + 2 * words_per_thread(config, problem, device)  # as compiled: a word and its address
    shared = config["BLOCK_M"] * config["BLOCK_N"] * problem.itemsize if problem.is_transposing else 0
    return programs_per_sm(device, threads, registers, shared, 32)


class Parts(NamedTuple):
    """Hold microseconds that each part of a GPU takes by itself."""

    memory: float
    l2: float
    instructions: float
    wait: float  # for data, of the programs that fit at once


def parts_us(config: Config, problem: PermuteProblem, device: Device) -> Parts:
    m, n, size = config["BLOCK_M"], config["BLOCK_N"], problem.itemsize
    runs = problem.runs(m, n)
    read, written = runs[0] * size, runs[1] * size
    x_vector, out_vector = vectors(problem, runs)
    tiles_m, tiles_n = -(-problem.m // m), -(-problem.n // n)
    tiles = tiles_m * tiles_n * problem.batch
    # Factors by which tiles cover more than each side, and whether they copy only part of that.
    covered = tiles_m * m / problem.m, tiles_n * n / problem.n
    parts = [uneven(problem.m, m), uneven(problem.n, n)]
    moved = problem.bytes / 2 * prod(1.0 if part else side for part, side in zip(parts, covered, strict=True))

    threads = config.num_warps * device.warp_size
    group, walked = config["GROUP_M"], config["GROUP_M"] * m / problem.m
    apart = 1 - min(1.0, walked) if problem.is_transposing else 1 - 1 / min(group, tiles_m)
    apart *= min(1.0, 256 / written) * (1.0 if problem.out_align >= 16 else 2.0)
    slow = (1 + Fit.scatter * apart) / min(1.0, Fit.reach * tiles / device.processors)

    reads = sectors(read, problem.x_align, read)  # the next warp finds the rest of a sector in L1
    writes = sectors(written, problem.out_align, 32.0 * out_vector)
    steps = (step * size for step in problem.out_strides if step != 1)
    starts = problem.out_align if problem.out_align < 16 else gcd(32, *steps)  # bytes that runs start on
    writes += Fit.edge * (1 - starts / 32) * 32 / written
    gbps = device.memory_gbps * Fit.bandwidth
    memory_us = 2 * moved / (gbps * 1e3) * (256 / min(256, read) * 256 / min(256, written)) ** Fit.short
    l2_us = Fit.sector * moved * (reads + writes) / (gbps * 1e3)

    digits = max(0, len(problem.plane.m) + len(problem.plane.n) - 2)
    reading, writing = size / x_vector, size / out_vector  # accesses of an element
    instructions = Fit.access * (reading + writing) + Fit.mask * any(parts)
    instructions += Fit.digit * digits * reading
    turns = max(1.0, tiles / device.processors)
    issue = turns * (m * n * instructions / 128 + Fit.setup * config.num_warps / 4)
    cycle = m * n * (size / Fit.one_program_bytes + Fit.gap * reading / threads)
    wait = max(1.0, turns / resident(config, problem, device)) * cycle
    issue_us, wait_us = (clocks / (device.clock_ghz * 0.85 * 1e3) for clocks in (issue, wait))
    return Parts(memory_us * slow, l2_us * slow, issue_us, wait_us)


def cost(config: Config, problem: PermuteProblem, device: Device) -> float:
    return float(overlapped(Fit.launch_us, parts_us(config, problem, device), 2))


def digits(sizes: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """Return (size, magic, shift) of each dimension but the last, to divide by multiplying; never empty.

    For index from 0 to 2^31 - 1, index // size is the upper half of the 64 bits of index * magic, shifted
    right by shift. The magic number, of 32 bits, is a signed one.
    """
    found = []
    for size in sizes[:-1]:
        bits = (size - 1).bit_length()
        found.append((size, -(-(1 << (31 + bits)) // size) - 2**32, bits - 1))
    return tuple(found) or ((1, 0, 0),)


def _in_place(call: PermuteCall, config: Config) -> Work:
    problem, shape, block = call.problem, call.batch_shape or (1,), config["BLOCK_M"]
    lanes = 2 if problem.itemsize == 16 else 1
    x = tuple(lanes * step for step in problem.x_strides)
    first, second = (i for i, out in enumerate(problem.out_strides) if problem.x_strides[i] != out)
    size = problem.shape[first]
    tiles, batch = -(-size // block), prod(shape)
    args = {
        "x_ptr": Buffer("x"), "N": size, "stride_m": x[first], "stride_n": x[second],
        "batch": batch, "batch_shape": shape, "tiles": tiles, "LANES": lanes, "BLOCK": block,
        "batch_strides": tuple(x[i] for i in call.batch_dims) or (0,),
        "WIDE": lanes * max(problem.spans) >= grids.WIDE_FROM,
        "FLIP_FIRST": call.flip[0], "FLIP_LAST": call.flip[1],
    }  # fmt: skip
    grid = grids.grid(tiles * tiles, batch)
    return Work((Step(transpose_in_place.jitted, grid, args, {"num_warps": config.num_warps}),))


def work(call: PermuteCall, config: Config, processors: int, early: bool) -> Work:
    if call.in_place:
        return _in_place(call, config)
    problem, (m_dims, n_dims, batch_dims) = call.problem, call.problem.plane
    lanes = 2 if problem.itemsize == 16 else 1  # words of an element
    word = problem.itemsize // lanes
    shape, (x_n_sizes, x_n) = problem.shape, problem.n_digits
    x, out, x_n = (
        tuple(lanes * step for step in steps) for steps in (problem.x_strides, problem.out_strides, x_n)
    )

    def of(values: tuple[int, ...], dims: tuple[int, ...], none: int = 0) -> tuple[int, ...]:
        return tuple(values[i] for i in dims) or (none,)

    x_m, x_batch = of(x, m_dims), of(x, batch_dims)
    out_m, out_n, out_batch = of(out, m_dims)[:1], of(out, n_dims), of(out, batch_dims)
    block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
    values: dict[str, Any] = {
        "x_ptr": Buffer("x"), "out_ptr": Buffer("out"),
        "M": problem.m, "N": problem.n,
        "m_digits": digits(of(shape, m_dims, 1)), "n_digits": digits(of(shape, n_dims, 1)),
        "x_m_strides": x_m, "x_n_digits": digits(x_n_sizes), "x_n_strides": x_n,
        "stride_om": out_m[0], "out_n_strides": out_n,
        "batch": problem.batch, "batch_shape": of(shape, batch_dims, 1),
        "x_batch_strides": x_batch, "out_batch_strides": out_batch,
        "ALIGN_M": grids.unit(problem.m, word), "ALIGN_N": grids.unit(problem.n, word),
        "ALIGN_X": tuple(grids.least_unit(steps, word) for steps in (x_m, x_n, x_batch)),
        "ALIGN_OUT": tuple(grids.least_unit(steps, word) for steps in (out_m, out_n, out_batch)),
        "WIDE": max(*(lanes * span for span in problem.spans), *problem.sizes) >= grids.WIDE_FROM,
        "TURN": problem.is_transposing, "LANES": lanes, "FLIP_FIRST": call.flip[0], "FLIP_LAST": call.flip[1],
        "UNEVEN_M": uneven(problem.m, block_m), "UNEVEN_N": uneven(problem.n, block_n), "WAIT": early,
        **dict(config.kwargs),
    }  # fmt: skip
    tiles = -(-problem.m // block_m) * -(-problem.n // block_n)
    grid, how = grids.grid(tiles, problem.batch), grids.options(config, launch_pdl=early)
    return Work((step_of(permute_tile, grid, values, how),))


def _exact(*_: Any) -> Numerics:
    return Numerics("exact")


_SIDES: Final = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048)
TILE: Final = Family(
    PermuteProblem.op, NAME, permute_tile, _configs, illegal, is_dominated, cost,
    work, resident=resident, numerics=_exact, canonical=_exact,
)  # fmt: skip
