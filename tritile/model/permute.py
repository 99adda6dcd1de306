"""A formula that predicts the time of a permutation with a config, in microseconds.

Device memory, the L2 cache and the processors' instructions each take their time; the slowest counts most.
What costs L2 is sectors of 32 bytes: a run that starts anywhere touches more of them than it fills, and
what is written to part of one costs more than the same to a whole.
"""

from dataclasses import dataclass

from tritile.config import Config
from tritile.device import Device
from tritile.problem import PermuteProblem
from tritile.space import packed, tile


@dataclass(frozen=True)
class PermuteFit:
    """The formula's constants; `tuning/fit_model.py` fits them to measured trials, these from an H200's."""

    bandwidth: float = 0.8  # share of the peak bandwidth of device memory that is reached
    sector: float = 0.894  # time of a byte through L2 in whole sectors, by that of one of device memory
    partial: float = 0.0355  # how much more a sector costs that is written in part
    apart: float = 0.0033  # how much more, where programs that run together write far apart
    short: float = 0.0167  # slower by this power of how much shorter than 512 bytes a written run is
    short_read: float = 0.0204  # and of how much shorter than 256 bytes one that is read
    base: float = 2.7  # instructions of an element, wherever it goes
    access: float = 6.04  # of a load or store, with its address
    digit: float = 6.34  # of a dimension more in a run
    mask: float = 3.01  # of an element where tiles are uneven
    line: float = 0.0164  # clocks for each line of 128 bytes that a warp's load or store touches
    registers: float = 0.711  # of a thread, beside the elements it holds
    flight: float = 38950.0  # bytes under way that keep a processor's share of memory busy
    waiting: float = 0.06  # slower by this power of how much fewer there are
    reach: float = 0.768  # processors whose share of the bandwidth one can draw
    start: float = 1325.0  # clocks to start a program
    overlap: float = 0.089  # share of what is not the slowest that shows
    launch_us: float = 0.915


PERMUTE_FITTED = PermuteFit()


def _sectors(run: float, align: int, request: float) -> float:
    """Sectors that runs of so many bytes touch, by those they fill, at `request` bytes a time."""
    ahead = 0.0 if align >= 16 else 1.0 - align / 32
    at_once = min(run, request)
    return max(32.0, at_once + 32 * ahead) / at_once


def _lines(run: float, align: int, request: float) -> float:
    """Lines of 128 bytes that a warp's access of `request` bytes touches, in runs of at most `run`."""
    at_once = min(run, request)
    return request / at_once * (at_once / 128 + (0.0 if align >= 16 else 1.0) + 0.2)


def permute_us(
    config: Config, problem: PermuteProblem, device: Device, fit: PermuteFit = PERMUTE_FITTED
) -> float:
    """Predicted microseconds of a config on a permutation."""
    m, n, size = config["BLOCK_M"], config["BLOCK_N"], problem.itemsize
    read, written = (run * size for run in problem.runs(m, n))
    x_vector, out_vector = tile.vectors(config, problem)
    tiles_m, tiles_n = -(-problem.m // m), -(-problem.n // n)
    tiles = tiles_m * tiles_n * problem.batch
    rows, columns = tiles_m * m / problem.m, tiles_n * n / problem.n
    again = (rows if rows <= 1.125 else 1.0) * (columns if columns <= 1.125 else 1.0)
    uneven = rows > 1.125 or columns > 1.125
    moved = again * problem.bytes / 2

    threads = config.num_warps * device.warp_size
    registers = fit.registers + 1.2 * tile.held_words(config, problem, device)
    spilling = max(1.0, registers / min(255.0, 65536 / threads)) ** 2
    resident = min(65536 / (min(255.0, registers) * threads), 2048 / threads, 32.0)
    resident = max(1.0, min(resident, device.shared_memory / (m * n * size + 1024)))
    used = again / (rows * columns)
    in_flight = min(resident, max(1.0, tiles / device.processors)) * m * n * size * used
    slow = max(1.0, fit.flight / in_flight) ** fit.waiting
    slow /= min(1.0, fit.reach * tiles / device.processors)

    packs = config.family == packed.NAME
    stride = packed.WORD if packs else x_vector  # bytes from one thread's element to the next one's
    reads = _sectors(read, problem.x_align, read)  # what a warp leaves of a sector, the next finds in L1
    writes = _sectors(written, problem.out_align, 32.0 * out_vector)
    partial = 0.0 if problem.out_align >= 16 else (32 - out_vector) / min(written, 32 * out_vector)
    far = fit.apart * (1.0 - min(config["GROUP_M"], tiles_m) / tiles_m)
    gbps = device.memory_gbps * fit.bandwidth
    memory_us = 2 * moved / (gbps * 1e3) * (512 / min(512, written)) ** fit.short
    memory_us *= (256 / min(256, read)) ** fit.short_read
    l2_us = fit.sector * moved * (reads + writes * (1 + far) + fit.partial * partial) / (gbps * 1e3)

    digits = max(0, len(problem.plane.m) + len(problem.plane.n) - 2)
    accesses = (size / x_vector, size / out_vector)  # of an element
    instructions = (
        fit.base + fit.access * sum(accesses) + fit.mask * uneven + fit.digit * digits * accesses[0]
    )
    lines = accesses[0] * _lines(read, problem.x_align, 32.0 * stride)
    lines += accesses[1] * _lines(written, problem.out_align, 32.0 * out_vector)
    a_tile = m * n * max(instructions / 128, fit.line * lines / 32) * spilling
    turns = max(1.0, tiles / device.processors)
    clocks = turns * a_tile + fit.start * max(1.0, turns / resident)
    issue_us = clocks / (device.clock_ghz * 0.85 * 1e3)
    parts = (memory_us * slow, l2_us * slow, issue_us)
    return max(parts) * (1 - fit.overlap) + fit.overlap * sum(parts) + fit.launch_us
