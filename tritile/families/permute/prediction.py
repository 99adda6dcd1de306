"""A formula that predicts the time of a permutation with a config, in microseconds.

Device memory, the L2 cache, the processors' instructions and the wait of the few programs that fit at once
each take their time; the slowest counts most. What costs L2 is sectors of 32 bytes: a run that starts
anywhere touches more of them than it fills.
"""

from dataclasses import dataclass
from math import gcd, prod
from typing import Any, NamedTuple

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import PermuteProblem
from tritile.families.matmul_tile import family as tile
from tritile.families.permute import family as packed


@dataclass(frozen=True)
class PermuteFit:
    """The formula's constants; `tuning/fit_model.py` fits them to measured trials, these from an H200's."""

    bandwidth: float = 1.0  # share of the peak bandwidth of device memory that is reached
    sector: float = 0.907  # time of a byte through L2 in whole sectors, by that of one of device memory
    short: float = 0.0664  # slower by this power of how much shorter than 256 bytes a run is
    access: float = 2.02  # of a load or store, with its address
    digit: float = 7.51  # of a dimension more in a run
    mask: float = 1.54  # of an element where tiles are uneven
    reach: float = 1.31  # processors whose share of the bandwidth one can draw
    alone_bytes: float = 16.1  # bytes a clock that one program has to its processor alone
    gap: float = 45.4  # clocks from one load of a thread to the next
    setup: float = 52.8  # instructions of a warp before its first element
    edge: float = 1.5  # what the sector that a run in out shares with another one costs more, in whole ones
    scatter: float = 0.0888  # slower by this share where programs side by side write short runs far apart
    overlap: float = 0.25  # share of what is not the slowest that shows
    launch_us: float = 1.19


PERMUTE_FITTED = PermuteFit()


def _sectors(run: float, align: int, request: float) -> float:
    """Sectors that runs of so many bytes touch, by those they fill, at `request` bytes a time."""
    ahead = 0.0 if align >= 16 else 1.0 - align / 32
    at_once = min(run, request)
    return max(32.0, at_once + 32 * ahead) / at_once


def _family(config: Config) -> Any:
    return packed if config.family == packed.NAME else tile


def resident(config: Config, problem: PermuteProblem, device: Device) -> int:
    """How many programs one processor holds at once, by shared memory, registers and threads."""
    threads = config.num_warps * device.warp_size
    # As compiled: a word, and where it goes.
    registers = 16 + 2 * _family(config).held_words(config, problem, device)
    taken = config["BLOCK_M"] * config["BLOCK_N"] * problem.itemsize + 1024
    by_shared = device.shared_memory // taken if problem.turns else 32
    return max(1, min(int(65536 / (threads * registers)), by_shared, 2048 // threads, 32))


class Parts(NamedTuple):
    """Microseconds that each part of a GPU takes by itself."""

    memory: float
    l2: float
    instructions: float
    wait: float  # for data, of the programs that fit at once


def parts_us(
    config: Config, problem: PermuteProblem, device: Device, fit: PermuteFit = PERMUTE_FITTED
) -> Parts:
    """Predicted microseconds of each part of the GPU on a permutation."""
    m, n, size = config["BLOCK_M"], config["BLOCK_N"], problem.itemsize
    read, written = (run * size for run in problem.runs(m, n))
    family = _family(config)
    x_vector, out_vector = family.vectors(config, problem)
    tiles_m, tiles_n = -(-problem.m // m), -(-problem.n // n)
    tiles = tiles_m * tiles_n * problem.batch
    # By how much tiles cover more than each side, and whether they copy only part of that.
    covered = tiles_m * m / problem.m, tiles_n * n / problem.n
    parts = [tile.uneven(problem.m, m), tile.uneven(problem.n, n)]
    moved = problem.bytes / 2 * prod(1.0 if part else side for part, side in zip(parts, covered, strict=True))

    threads = config.num_warps * device.warp_size
    group, walked = config["GROUP_M"], config["GROUP_M"] * m / problem.m
    apart = 1 - min(1.0, walked) if problem.turns else 1 - 1 / min(group, tiles_m)
    apart *= min(1.0, 256 / written) * (1.0 if problem.out_align >= 16 else 2.0)
    slow = (1 + fit.scatter * apart) / min(1.0, fit.reach * tiles / device.processors)

    reads = _sectors(read, problem.x_align, read)  # what a warp leaves of a sector, the next finds in L1
    writes = _sectors(written, problem.out_align, 32.0 * out_vector)
    steps = (step * size for step in problem.out_strides if step != 1)
    starts = problem.out_align if problem.out_align < 16 else gcd(32, *steps)  # bytes that runs start on
    writes += fit.edge * (1 - starts / 32) * 32 / written
    gbps = device.memory_gbps * fit.bandwidth
    memory_us = 2 * moved / (gbps * 1e3) * (256 / min(256, read) * 256 / min(256, written)) ** fit.short
    l2_us = fit.sector * moved * (reads + writes) / (gbps * 1e3)

    digits = max(0, len(problem.plane.m) + len(problem.plane.n) - 2)
    reading, writing = size / x_vector, size / out_vector  # accesses of an element
    instructions = fit.access * (reading + writing) + fit.mask * any(parts)
    instructions += fit.digit * digits * reading
    turns = max(1.0, tiles / device.processors)
    issue = turns * (m * n * instructions / 128 + fit.setup * config.num_warps / 4)
    cycle = m * n * (size / fit.alone_bytes + fit.gap * reading / threads)
    wait = max(1.0, turns / resident(config, problem, device)) * cycle
    issue_us, wait_us = (clocks / (device.clock_ghz * 0.85 * 1e3) for clocks in (issue, wait))
    return Parts(memory_us * slow, l2_us * slow, issue_us, wait_us)


def permute_us(
    config: Config, problem: PermuteProblem, device: Device, fit: PermuteFit = PERMUTE_FITTED
) -> float:
    """Predicted microseconds of a config on a permutation."""
    times = parts_us(config, problem, device, fit)
    return max(times) * (1 - fit.overlap) + fit.overlap * sum(times) + fit.launch_us
