"""Predict the time of products whose tiles travel by tensor descriptor, in microseconds.

As in the tile family, the formula follows one SM: its tiles come in rounds of as many as fit at once. In each
round the main loop runs at the pace of its slowest part.
"""

from typing import NamedTuple

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import ITEMSIZE, MatmulProblem
from tritile.families.common.operands import copied, tiles, turned
from tritile.families.common.products import warpgroup_mma
from tritile.families.common.rates import memory_us, rate, turning


class TmaFit:
    """Hold the same constants for kernels whose tiles travel by TMA, in clocks and bytes a clock of an SM."""

    latency = 1220.0  # from requesting a tile to having it, from device memory
    start = 2220.0  # to start a program and fill the pipeline
    start_specialised = 1560.0  # the same for specialised warps
    short = 0.18  # share by which rows of half of 128 bytes are slower
    turn = 53.6  # barriers and bookkeeping in a K iteration
    shared_bytes = 139.0  # of shared memory
    l2_bytes = 64.0  # of the L2 cache, with all SMs reading
    epilogue = 359.0  # to store a tile, however small
    store_bytes = 450.0  # of the epilogue
    odd_store = 28.7  # factor of storing by pointers beside the next tile's loads
    bandwidth = 0.804  # share of the peak bandwidth of device memory that is reached
    reach = 2.97  # how many times its share of the bandwidth one SM can use
    exposed = 0.0466  # share of the epilogue that a persistent program does not hide
    part_bytes = 12.8  # of partial sums, stored and loaded where programs share a tile
    rendezvous = 3860.0  # for programs that share a tile to meet
    lone = 1.13  # factor by which one warpgroup feeds tensor cores slower than two
    small_mma = 2.67  # factor by which tensor cores are slower without whole warpgroups
    repack_us = 0.835  # of another launch
    repack_share = 0.811  # share of the peak bandwidth that copying an operand reaches


class Programs(NamedTuple):
    """Hold what the time of a config of either family depends on.

    - `pieces`: (rows, columns) of each instruction's tile in a K iteration: every consumer's, main and rest.
    - `shared`: bytes of a program.
    - `warps`: of a program, with those that only load.
    - `groups`: warpgroups that multiply.
    - `specialised`: other warps load.
    - `split`: programs that share a tile's K.
    """

    pieces: list[tuple[int, int]]
    shared: int
    warps: int
    groups: int
    specialised: bool
    split: int


def resident(made: Programs, device: Device) -> int:
    return max(1, min((device.shared_memory + 1024) // (made.shared + 1024), 512 // (32 * made.warps), 4))


def _repack_us(problem: MatmulProblem, device: Device) -> float:
    """Return microseconds of copying the operands that no descriptor can read, or not fast."""
    a, b = copied(problem)
    moved = 2 * problem.batch * problem.k * (problem.m * a + problem.n * b) * problem.itemsize
    return TmaFit.repack_us + moved / (device.memory_gbps * TmaFit.repack_share * 1e3) if moved else 0.0


def tma_us(config: Config, problem: MatmulProblem, device: Device, made: Programs) -> float:
    m, n, k, size = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"], problem.itemsize
    specialised, split = made.specialised, made.split
    whole = specialised or warpgroup_mma(config, problem, device) or device.nvidia >= 100
    speed = rate(problem, device) / (1.0 if whole else TmaFit.small_mma)
    speed /= turning(problem, device, turned(problem))
    clocks = 0.0
    for rows, columns in made.pieces * problem.rights:
        read = (-(-rows // 64) * (min(64, rows) + columns)) * k * size / TmaFit.shared_bytes
        clocks += max(2.0 * rows * columns * k / speed, read)
    lone = TmaFit.lone if made.groups < 2 else 1.0
    if not whole:
        lone = max(1.0, 4 / config.num_warps)  # each warp has a quarter of the tensor cores
    feed = (m + n * problem.rights) * k * size / TmaFit.l2_bytes
    turn = max(clocks, feed) + TmaFit.turn
    turns = max(1.0, -(-problem.k // k) / split)
    programs = tiles(config, problem) * split
    together = min(resident(made, device), -(-programs // device.processors))
    alone = max(
        max(clocks * lone, feed) + TmaFit.turn, (turn + TmaFit.latency) / max(1, config.num_stages - 1)
    )
    start = TmaFit.start_specialised if specialised else TmaFit.start
    store = m * n * ITEMSIZE[problem.out_dtype] / TmaFit.store_bytes
    if problem.out_align < 16 and (specialised or config["PERSISTENT"]):
        store *= TmaFit.odd_store
    if split > 1:
        # All programs sum together, or the last one alone.
        gathered = 1 if programs <= device.processors else split
        store += TmaFit.rendezvous + m * n * 4 * (1 + gathered) / TmaFit.part_bytes
    rounds = -(-programs // (device.processors * together))
    loop = turns * max(alone, together * turn)
    if config["PERSISTENT"]:
        most = -(-programs // device.processors)  # tiles of the busiest SM
        total = start + most * (turns * alone + TmaFit.epilogue + TmaFit.exposed * store)
        total += (1 - TmaFit.exposed) * store
    else:
        last = programs - (rounds - 1) * device.processors * together
        last_together = min(together, -(-last // device.processors))
        store += TmaFit.epilogue
        total = (rounds - 1) * (loop + (start / 2 + store * together) / (1 + (together > 1)))
        total += start + turns * max(alone, last_together * turn) + store * last_together
    busy = max(0.05, min(1.0, TmaFit.reach * programs / device.processors))
    moved_us = memory_us(config, problem, device, TmaFit.short, TmaFit.bandwidth) / busy
    compute_us = total / (device.clock_ghz * 0.82 * 1e3)
    us = max(compute_us, moved_us) + 0.1 * min(compute_us, moved_us) + 1.0
    return us + _repack_us(problem, device)
