"""Formulas that predict the time of a product with a config, in microseconds.

They follow one multiprocessor: the tiles that fall to it, in rounds of as many as fit at once; in each
round the K loop runs at the pace of its slowest part (tensor cores, shared memory, the L2 cache, the load
instructions, or the latency that too few stages leave uncovered).
"""

from dataclasses import dataclass

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import ITEMSIZE, MatmulProblem
from tritile.families.matmul_tile.family import (
    accumulator_words,
    loads_per_thread,
    shared_bytes,
    uses_tensor_cores,
    warpgroup_mma,
)
from tritile.families.matmul_tma import family as descriptor
from tritile.families.matmul_wgmma import family as warpgroups

# Multiply-adds counted as two, of one multiprocessor in one clock, dense 16-bit on tensor cores:
# the makers' peak rates divided by processors and boost clock.
_RATE_16BIT = {80: 2048, 86: 1024, 89: 1024, 90: 4096, 100: 8192, 120: 1024}
_RATE_AMD = 2048
# IEEE fp32 `tl.dot`, by whether columns of b are contiguous, of which a thread reads element by element. As
# measured on H200: 38 and 20 TFLOP/s of 8192^3 over 132 processors.
_RATE_FMA = {False: 180, True: 88}
_RATE_FP64 = {90: 210}  # tensor cores, as measured on H200: 47 TFLOP/s of 8192^3
_RATE_FP64_ELSEWHERE = 128
# The same peak of fp32 without tensor cores, and of fp64 on whatever is fastest, by `Device.arch`.
_PEAK_FP32 = {80: 128, 86: 256, 89: 256, 90: 256, 100: 256, 120: 256, "gfx942": 256}
_PEAK_FP64 = {80: 128, 90: 256, 100: 128, "gfx942": 256}
_LAUNCH_US = 2.0


@dataclass(frozen=True)
class Fit:
    """The formula's constants, in clocks and bytes a clock of one processor unless said otherwise.

    `tuning/fit_model.py` fits them to measured trials; these are from an H200's.
    """

    latency: float = 1330.0  # from asking for a tile to having it, out of device memory
    start: float = 1350.0  # to start a program, compute its addresses and fill the pipeline
    start_warp: float = 0.0385  # the same for each warp, as a share of `start`
    turn: float = 24.2  # barriers and bookkeeping in one turn of the K loop
    turn_warp: float = 21.2  # the same for each warp
    shared_bytes: float = 138.0  # of shared memory
    l2_bytes: float = 417.0  # of the L2 cache, all processors reading
    load: float = 7.06  # one warp-wide load instruction with its address and mask
    narrow: float = 0.544  # how much longer one of under 4 bytes takes
    load_words: float = 7.99  # registers that a load which is not asynchronous keeps busy
    copy_words: float = 1.3  # the same of one that is
    piece: float = 3.0  # how much longer an asynchronous load of 4 or 8 bytes a thread takes than one of 16
    piece_words: float = 4.0  # registers that it keeps busy
    spared_words: float = 16.6  # registers that neither accumulator nor loads can have
    small_mma: float = 3.12  # how much slower tensor cores are without whole warpgroups, on Hopper and later
    bandwidth: float = 0.879  # share of the peak bandwidth of device memory that is reached
    reach: float = 2.19  # processors whose share of the bandwidth one can draw
    short: float = 0.181  # slower by this share where rows of a tile are half of 128 bytes
    overlap: float = 0.0576  # share of the fixed cost of a round that the next one does not hide


FITTED = Fit()


@dataclass(frozen=True)
class TmaFit:
    """The same for kernels whose tiles travel by tensor descriptor."""

    latency: float = 1220.0  # from asking for a tile to having it, out of device memory
    start: float = 2220.0  # to start a program and fill the pipeline
    start_specialised: float = 1560.0  # the same, of specialised warps
    short: float = 0.18  # slower by this share where rows of a tile are half of 128 bytes
    turn: float = 53.6  # barriers and bookkeeping in one turn of the K loop
    shared_bytes: float = 139.0  # of shared memory
    l2_bytes: float = 64.0  # of the L2 cache, all processors reading
    epilogue: float = 359.0  # to store a tile, however small
    store_bytes: float = 450.0  # of the epilogue
    odd_store: float = 28.7  # how much longer what no descriptor can store takes beside the next tile's loads
    bandwidth: float = 0.804  # share of the peak bandwidth of device memory that is reached
    reach: float = 2.97  # processors whose share of the bandwidth one can draw
    exposed: float = 0.0466  # share of the epilogue that a persistent program does not hide
    part_bytes: float = 12.8  # of partial sums, left and gathered where programs share a tile
    rendezvous: float = 3860.0  # for programs that share a tile to meet
    lone: float = 1.13  # how much slower tensor cores are fed by one warpgroup than by two
    small_mma: float = 2.67  # how much slower tensor cores are without whole warpgroups
    repack_us: float = 0.835  # of one more launch
    repack_share: float = 0.811  # share of the peak bandwidth that copying an operand reaches


TMA_FITTED = TmaFit()


def rate(problem: MatmulProblem, device: Device) -> float:
    """Floating-point operations a clock of one processor, as `tl.dot` reaches them on that type."""
    if problem.dtype == "float64":
        return _RATE_FP64.get(device.nvidia, _RATE_FP64_ELSEWHERE)
    if not uses_tensor_cores(problem):
        return _RATE_FMA[problem.b_layout == "column"]
    half = float(_RATE_16BIT.get(device.nvidia, _RATE_AMD if not device.nvidia else 2048))
    if problem.dtype == "float32":
        return half / {"tf32": 2, "fp16x3": 3}.get(problem.precision, 6)
    return half * 2 / problem.itemsize


def peak_tflops(problem: MatmulProblem, device: Device) -> float | None:
    """The most that the hardware could do of this product's kind, in TFLOP/s; None where it is not known.

    The makers' dense rate of a processor and clock, by processors and the device's clock: a clock that long
    runs on tensor cores do not hold, so that no kernel reaches it. fp32 counts by its precision: each of
    tf32x3's multiplications is three on tensor cores. A product made through another counts as that one.
    """
    peak: float | None
    problem = problem.core
    if problem.dtype == "float64":
        peak = _PEAK_FP64.get(device.arch)
    elif not uses_tensor_cores(problem):
        peak = _PEAK_FP32.get(device.arch)
    else:
        known = device.nvidia in _RATE_16BIT or device.arch == "gfx942"
        peak = rate(problem, device) if known else None
    return None if peak is None else peak * device.processors * device.clock_ghz / 1e3


def resident(config: Config, problem: MatmulProblem, device: Device) -> int:
    """How many programs one processor holds at once, by shared memory, registers and threads."""
    threads = config.num_warps * device.warp_size
    registers = min(255, accumulator_words(config, problem, device) + 56)
    by_shared = (device.shared_memory + 4096) // (shared_bytes(config, problem, device) + 1024)
    by_threads = 2048 // threads
    return max(1, min(by_shared, 65536 // (threads * registers), by_threads, 16))


def _memory_us(config: Config, problem: MatmulProblem, device: Device, fit: Fit | TmaFit) -> float:
    """Microseconds of moving every operand once, slower where rows of a tile are short."""
    row = config["BLOCK_N" if problem.b_layout == "row" else "BLOCK_K"]  # b is the larger where it counts
    short = 1.0 + fit.short * max(0.0, 128 / (row * problem.itemsize) - 1.0)
    return problem.bytes * short / (device.memory_gbps * fit.bandwidth * 1e3)


def _turn_clocks(config: Config, problem: MatmulProblem, device: Device, together: int, fit: Fit) -> float:
    """Clocks that one turn of the K loop takes of a processor, where so many programs run together."""
    m, n, k = config["BLOCK_M"], config["BLOCK_N"] * problem.rights, config["BLOCK_K"]
    size = problem.itemsize
    warps, threads = config.num_warps, config.num_warps * device.warp_size
    warpgroups = warpgroup_mma(config, problem, device)
    slow = 1.0 if warpgroups or not 90 <= device.nvidia < 120 else fit.small_mma
    if problem.dtype == "float64":
        # Hopper has instructions of a warp only; a block is asked for when the last of two is done with.
        slow = 1.0 if config.num_stages > 2 else 1.35
    elif not uses_tensor_cores(problem):
        slow = max(1.0, 8 / (m * n / threads) ** 0.5)  # a thread with few elements reads much for each
    slow *= max(1.0, 4 / (warps * together))  # each warp has a quarter of the tensor cores
    multiply = 2.0 * m * n * k / rate(problem, device) * slow * _turning(config, problem, device)
    rows_at_once = 64 if warpgroups else 32
    shared = -(-m // rows_at_once) * (min(rows_at_once, m) + n) * k * size / fit.shared_bytes
    feed = (m + n) * k * size / fit.l2_bytes
    thread_loads = loads_per_thread(config, problem, device)
    narrow, load_words = _load_costs(min(problem.a_align, problem.b_align), fit)
    loads = fit.load * narrow * thread_loads * warps
    held = accumulator_words(config, problem, device) + load_words * thread_loads
    spilling = 1.0 + max(0.0, held - min(255, 65536 // threads) + fit.spared_words) / 64
    return max(multiply, shared, feed, loads) * spilling + fit.turn + fit.turn_warp * warps


def _load_costs(alignment: int, fit: Fit) -> tuple[float, float]:
    """How much longer a load of so many bytes takes than one of 16, and the registers it keeps busy."""
    if alignment < 4:
        return fit.narrow, fit.load_words
    return (fit.piece, fit.piece_words) if alignment < 16 else (1.0, fit.copy_words)


def _repack_us(problem: MatmulProblem, device: Device, fit: TmaFit) -> float:
    """Microseconds of copying the operands that no descriptor can read."""
    a, b = descriptor.copied(problem)
    moved = 2 * problem.batch * problem.k * (problem.m * a + problem.n * b) * problem.itemsize
    return fit.repack_us + moved / (device.memory_gbps * fit.repack_share * 1e3) if moved else 0.0


def _turning(config: Config, problem: MatmulProblem, device: Device) -> float:
    """How much slower tensor cores of Hopper are where tiles of TF32 pass through registers first.

    By pointers all do, to be rounded; and those whose K is not contiguous, to be turned over. Measured on an
    H200, beside tiles that descriptors round: 2.4 to 3.5 times, 4.5 to 6.1, and by descriptor 1.8.
    """
    if problem.precision != "tf32" or device.nvidia != 90:
        return 1.0
    by_pointers = config.family not in (descriptor.NAME, warpgroups.NAME)
    across = problem.a_layout == "column", problem.b_layout != "column"
    copied = (False, False) if by_pointers else descriptor.turned(problem)
    turned = any(own and not copy for own, copy in zip(across, copied, strict=True))
    return (2.7 if by_pointers else 1.0) * (1.8 if turned else 1.0)


def _tma_pieces(config: Config) -> list[tuple[int, int]]:
    """(rows, columns) of each instruction's tile in one turn: every consumer's, main and rest."""
    if config.family != warpgroups.NAME:
        count = max(1, config.num_warps // 4)
        if config["BLOCK_M"] < 64 * count:  # too few rows: columns are shared out
            return [(config["BLOCK_M"], config["BLOCK_N"] // count)] * count
        return [(config["BLOCK_M"] // count, config["BLOCK_N"])] * count
    main = warpgroups.main_columns(config)
    rows, rest = config["BLOCK_M"] // config["CONSUMERS"], config["BLOCK_N"] - main
    return ([(rows, main)] + [(rows, rest)] * (rest > 0)) * config["CONSUMERS"]


def tma_resident(config: Config, problem: MatmulProblem, device: Device) -> int:
    """How many programs one processor holds at once of a kernel whose tiles travel by tensor descriptor."""
    specialised = config.family == warpgroups.NAME
    taken = (warpgroups if specialised else descriptor).shared_bytes(config, problem)
    threads = 32 * (config.num_warps if not specialised else 4 * config["CONSUMERS"] + 4)
    return max(1, min(device.shared_memory // (taken + 1024), 512 // threads, 4))


def tma_us(config: Config, problem: MatmulProblem, device: Device, fit: TmaFit = TMA_FITTED) -> float:
    """Predicted microseconds of a config of the descriptor or warpgroups family."""
    m, n, k, size = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"], problem.itemsize
    specialised = config.family == warpgroups.NAME
    split = 1 if specialised else config["SPLIT_K"]
    whole = specialised or warpgroup_mma(config, problem, device) or device.nvidia >= 100
    speed = rate(problem, device) / (1.0 if whole else fit.small_mma) / _turning(config, problem, device)
    clocks = 0.0
    for rows, columns in _tma_pieces(config) * problem.rights:
        read = (-(-rows // 64) * (min(64, rows) + columns)) * k * size / fit.shared_bytes
        clocks += max(2.0 * rows * columns * k / speed, read)
    groups = config["CONSUMERS"] if specialised else config.num_warps // 4
    lone = fit.lone if groups < 2 else 1.0
    if not whole:
        lone = max(1.0, 4 / config.num_warps)  # each warp has a quarter of the tensor cores
    feed = (m + n * problem.rights) * k * size / fit.l2_bytes
    turn = max(clocks, feed) + fit.turn
    turns = max(1.0, -(-problem.k // k) / split)
    programs = descriptor.tiles(config, problem) * split
    together = min(tma_resident(config, problem, device), -(-programs // device.processors))
    alone = max(max(clocks * lone, feed) + fit.turn, (turn + fit.latency) / max(1, config.num_stages - 1))
    start = fit.start_specialised if specialised else fit.start
    store = m * n * ITEMSIZE[problem.out_dtype] / fit.store_bytes
    if problem.out_align < 16 and (specialised or config["PERSISTENT"]):
        store *= fit.odd_store
    if split > 1:
        gathered = 1 if programs <= device.processors else split  # all sum together, or the last sums alone
        store += fit.rendezvous + m * n * 4 * (1 + gathered) / fit.part_bytes
    rounds = -(-programs // (device.processors * together))
    loop = turns * max(alone, together * turn)
    if config["PERSISTENT"]:
        most = -(-programs // device.processors)  # tiles of the busiest processor
        total = start + most * (turns * alone + fit.epilogue + fit.exposed * store)
        total += (1 - fit.exposed) * store
    else:
        last = programs - (rounds - 1) * device.processors * together
        last_together = min(together, -(-last // device.processors))
        store += fit.epilogue
        total = (rounds - 1) * (loop + (start / 2 + store * together) / (1 + (together > 1)))
        total += start + turns * max(alone, last_together * turn) + store * last_together
    busy = max(0.05, min(1.0, fit.reach * programs / device.processors))
    memory_us = _memory_us(config, problem, device, fit) / busy
    compute_us = total / (device.clock_ghz * 0.82 * 1e3)
    return (
        max(compute_us, memory_us) + 0.1 * min(compute_us, memory_us) + 1.0 + _repack_us(problem, device, fit)
    )


def matmul_us(config: Config, problem: MatmulProblem, device: Device, fit: Fit = FITTED) -> float:
    """Predicted microseconds of a config of the tile family."""
    m, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    turns = -(-problem.k // k)
    tiles = -(-problem.m // m) * -(-problem.n // n) * problem.batch
    together = min(resident(config, problem, device), -(-tiles // device.processors))
    turn = _turn_clocks(config, problem, device, together, fit)
    fetch = fit.latency + (m + n * problem.rights) * k * problem.itemsize / fit.l2_bytes
    alone = max(turn, (turn + fetch) / max(1, config.num_stages - 1))
    fixed = fit.start * (1 + fit.start_warp * config.num_warps)
    rounds = -(-tiles // (device.processors * together))
    last = tiles - (rounds - 1) * device.processors * together
    last_together = min(together, -(-last // device.processors))
    full_round = turns * max(alone, together * turn) + fit.overlap * fixed
    clocks = (rounds - 1) * full_round + turns * max(alone, last_together * turn) + fixed
    busy = max(0.05, min(1.0, fit.reach * tiles / device.processors))
    memory_us = _memory_us(config, problem, device, fit) / busy
    compute_us = clocks / (device.clock_ghz * 0.85 * 1e3)
    # Never quite the larger of the two: of two configs that memory bounds, the one with less to do is safer.
    return max(compute_us, memory_us) + 0.1 * min(compute_us, memory_us) + _LAUNCH_US
