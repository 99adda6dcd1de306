"""A formula that predicts the time of a product with a quantized weight, in microseconds.

As of other products: it follows one multiprocessor, whose programs go through K at the pace of the slowest of
tensor cores, the instructions that unpack the weight and ask for x, the L2 cache, and the latency that too
few stages leave uncovered; device memory bounds the whole.
"""

from dataclasses import dataclass

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import QuantizedProblem
from tritile.families.common.prediction import rate
from tritile.families.quantized.family import (
    NAME,
    accumulator_words,
    scales_sums,
    shared_bytes,
    tiles,
    weight_words,
)


@dataclass(frozen=True)
class QuantizedFit:
    """The formula's constants, in clocks and bytes a clock of one processor unless said otherwise.

    Those that a product of plain operands has too are of its fit to an H200; instructions are counted in
    what was compiled for it. `turn`, `shown` and `rendezvous` were chosen among a few by the trials of 17
    problems on an H200, of which the first pick takes 1.09 times as long as the best, at worst 1.21.
    """

    latency: float = 1220.0  # from asking for a block to having it, out of device memory
    start: float = 2220.0  # to start a program and fill the pipeline
    turn: float = 330.0  # barriers and bookkeeping in one turn of the K loop
    unpack: float = 2.4  # instructions of a thread for each number; of bytes for bfloat16 half as many more
    unscaled: float = 1.4  # the same where sums are scaled in the place of weights
    instructions: float = 128.0  # that a processor issues in a clock, over all lanes
    spared: float = 160.0  # registers of a thread that accumulator and unpacked weight can have
    copy: float = 7.0  # one warp-wide asynchronous copy of 16 bytes a lane, with its address
    shown: float = (
        0.9  # share of the shorter of unpacking and multiplying that is not hidden: one waits for it
    )
    l2_bytes: float = 64.0  # of the L2 cache, all processors reading
    bandwidth: float = 0.87  # share of the peak bandwidth of device memory that is reached
    reach: float = 2.5  # processors whose share of the bandwidth one can draw
    least_m: int = 32  # columns of an instruction below which tensor cores wait for the weight's registers
    epilogue: float = 359.0  # to store a tile, however small
    store_bytes: float = 100.0  # of the epilogue, which turns tiles over
    part_bytes: float = 12.8  # of partial sums, left and gathered where programs share a tile
    rendezvous: float = 1500.0  # for programs that share a tile to meet
    launch_us: float = 1.0


QUANTIZED_FITTED = QuantizedFit()


def resident(config: Config, problem: QuantizedProblem, device: Device) -> int:
    """How many programs one processor holds at once, by shared memory, registers and threads."""
    threads = config.num_warps * device.warp_size
    twice = scales_sums(config, problem.group_size)
    held = accumulator_words(config, device) * (1 + twice) + weight_words(config, device)
    registers = min(255, held + (64 if config.family == NAME else 32))  # pointers to x take some
    by_shared = (device.shared_memory + 4096) // (shared_bytes(config, problem, device) + 1024)
    return int(max(1, min(by_shared, 65536 // (threads * registers), 2048 // threads, 16)))


def _turn_clocks(config: Config, problem: QuantizedProblem, device: Device, fit: QuantizedFit) -> float:
    """Clocks that one turn of the K loop takes of a processor."""
    m, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    multiply = 2.0 * max(m, fit.least_m) * n * k / rate(problem.product, device)
    in_two = problem.bits == 8 and problem.dtype == "bfloat16"
    summed = scales_sums(config, problem.group_size)
    each = fit.unscaled if summed else fit.unpack
    issue = n * (k * each * (1.5 if in_two else 1.0) + m * summed) / fit.instructions
    if config.family == NAME:  # x through pointers
        issue += fit.copy * m * k * problem.itemsize / (16 * 32)
    used = min(m, problem.m)
    feed = (used * k * problem.itemsize + n * k * problem.bits / 8) / fit.l2_bytes
    held = accumulator_words(config, device) * (1 + summed) + weight_words(config, device)
    spilling = 1.0 + max(0.0, held - fit.spared) / 32
    return (max(multiply, issue, feed) + fit.shown * min(multiply, issue)) * spilling + fit.turn


def quantized_us(
    config: Config, problem: QuantizedProblem, device: Device, fit: QuantizedFit = QUANTIZED_FITTED
) -> float:
    """Predicted microseconds of a config."""
    m, n, split = config["BLOCK_M"], config["BLOCK_N"], config["SPLIT_K"]
    programs = tiles(config, problem) * split
    blocks = -(-problem.k // config["BLOCK_K"])
    turns = -(-blocks // split)
    together = min(resident(config, problem, device), -(-programs // device.processors))
    turn = _turn_clocks(config, problem, device, fit)
    alone = max(turn, (turn + fit.latency) / max(1, config.num_stages - 1))
    store = fit.epilogue + m * n * problem.itemsize / fit.store_bytes
    if split > 1:
        gathered = 1 if programs <= device.processors else split  # all sum together, or the last sums alone
        store += fit.rendezvous + m * n * 4 * (1 + gathered) / fit.part_bytes
    rounds = -(-programs // (device.processors * together))
    last = programs - (rounds - 1) * device.processors * together
    last_together = min(together, -(-last // device.processors))
    clocks = (rounds - 1) * (turns * max(alone, together * turn) + (fit.start + store * together) / 2)
    clocks += fit.start + turns * max(alone, last_together * turn) + store * last_together
    ahead = resident(config, problem, device) * (config.num_stages - 1) / 8  # blocks under way hide latency
    busy = max(0.05, min(1.0, fit.reach * min(1.0, ahead) * programs / device.processors))
    memory_us = problem.bytes / (device.memory_gbps * fit.bandwidth * 1e3 * busy)
    compute_us = clocks / (device.clock_ghz * 0.85 * 1e3)
    return float(max(compute_us, memory_us) + 0.1 * min(compute_us, memory_us) + fit.launch_us)
