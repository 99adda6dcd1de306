"""A formula that predicts a config's time, for ordering a search and for choosing with no measurement.

The matmul formula follows one multiprocessor: the tiles that fall to it, in rounds of as many as fit
at once; in each round the K loop runs at the pace of its slowest part (tensor cores, shared memory,
the L2 cache, the load instructions, or the latency that too few stages leave uncovered). It answers
in microseconds; only the order of its answers matters.
"""

from dataclasses import dataclass

from tritile.config import Config
from tritile.device import Device
from tritile.problem import ITEMSIZE, MatmulProblem, TransposeProblem
from tritile.space import (
    accumulator_words,
    legal_configs,
    loads_per_thread,
    shared_bytes,
    uses_tensor_cores,
    warpgroup_mma,
)

# Multiply-adds counted as two, of one multiprocessor in one clock, dense 16-bit on tensor cores:
# the makers' peak rates divided by processors and boost clock.
_RATE_16BIT = {80: 2048, 86: 1024, 89: 1024, 90: 4096, 100: 8192, 120: 1024}
_RATE_AMD = 2048
_RATE_FMA = 46  # IEEE fp32 tl.dot as measured on H200: 12 TFLOP/s over 132 processors at 1.98 GHz
_RATE_FP64 = 128
_BANDWIDTH = 0.85  # share of the peak bandwidth of device memory that is reached
_LAUNCH_US = 2.0


@dataclass(frozen=True)
class Fit:
    """The formula's constants, in clocks and bytes a clock of one processor unless said otherwise.

    `tuning/fit_model.py` fits them to measured trials; these are from an H200's.
    """

    latency: float = 1685.0  # from asking for a tile to having it, out of device memory
    start: float = 1495.0  # to start a program, compute its addresses and fill the pipeline
    start_warp: float = 0.032  # the same for each warp, as a share of `start`
    turn: float = 57.0  # barriers and bookkeeping in one turn of the K loop
    turn_warp: float = 19.0  # the same for each warp
    shared_bytes: float = 95.0  # of shared memory
    l2_bytes: float = 183.0  # of the L2 cache, all processors reading
    load: float = 6.7  # one warp-wide load instruction with its address and mask
    narrow: float = 0.15  # how much longer one of under 4 bytes takes
    load_words: float = 10.6  # registers that a load which is not asynchronous keeps busy
    spared_words: float = 9.2  # registers that neither accumulator nor loads can have
    small_mma: float = 3.8  # how much slower tensor cores are without whole warpgroups, on Hopper and later
    store_bytes: float = 86.0  # of the epilogue
    overlap: float = 0.21  # share of the fixed cost of a round that the next one does not hide


FITTED = Fit()


def _rate(problem: MatmulProblem, device: Device) -> float:
    """Floating-point operations a clock of one processor."""
    if problem.dtype == "float64":
        return _RATE_FP64
    if not uses_tensor_cores(problem):
        return _RATE_FMA
    rate = float(_RATE_16BIT.get(device.nvidia, _RATE_AMD if not device.nvidia else 2048))
    if problem.dtype == "float32":
        return rate / (2 if problem.precision == "tf32" else 6)
    return rate * 2 / problem.itemsize


def resident(config: Config, problem: MatmulProblem, device: Device) -> int:
    """How many programs one processor holds at once, by shared memory, registers and threads."""
    threads = config.num_warps * device.warp_size
    registers = min(255, accumulator_words(config, problem, device) + 56)
    by_shared = (device.shared_memory + 4096) // (shared_bytes(config, problem, device) + 1024)
    by_threads = 2048 // threads
    return max(1, min(by_shared, 65536 // (threads * registers), by_threads, 16))


def _turn_clocks(config: Config, problem: MatmulProblem, device: Device, fit: Fit) -> float:
    """Clocks of one turn of the K loop of one program that has its processor to itself."""
    m, n, k, size = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"], problem.itemsize
    warps, threads = config.num_warps, config.num_warps * device.warp_size
    warpgroups = warpgroup_mma(config, problem, device)
    slow = 1.0 if warpgroups or not 90 <= device.nvidia < 120 else fit.small_mma
    if not uses_tensor_cores(problem):
        slow = max(1.0, 8 / (m * n / threads) ** 0.5)  # a thread with few elements reads much for each
    multiply = 2.0 * m * n * k / _rate(problem, device) * slow
    rows_at_once = 64 if warpgroups else 32
    shared = -(-m // rows_at_once) * (min(rows_at_once, m) + n) * k * size / fit.shared_bytes
    feed = (m + n) * k * size / fit.l2_bytes
    thread_loads = loads_per_thread(config, problem, device)
    narrow = fit.narrow if min(problem.a_align, problem.b_align) < 4 else 1.0
    loads = fit.load * narrow * thread_loads * warps
    held = accumulator_words(config, problem, device) + fit.load_words * thread_loads
    spilling = 1.0 + max(0.0, held - min(255, 65536 // threads) + fit.spared_words) / 64
    return max(multiply, shared, feed, loads) * spilling + fit.turn + fit.turn_warp * warps


def matmul_us(config: Config, problem: MatmulProblem, device: Device, fit: Fit = FITTED) -> float:
    """Predicted microseconds of `config` on `problem`."""
    m, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    turns = -(-problem.k // k)
    tiles = -(-problem.m // m) * -(-problem.n // n) * problem.batch
    together = min(resident(config, problem, device), -(-tiles // device.processors))
    turn = _turn_clocks(config, problem, device, fit)
    fetch = fit.latency + (m + n) * k * problem.itemsize / fit.l2_bytes
    alone = max(turn, (turn + fetch) / max(1, config.num_stages - 1))
    stored = m * n * ITEMSIZE[problem.out_dtype] / fit.store_bytes
    fixed = fit.start * (1 + fit.start_warp * config.num_warps) + stored * together
    rounds = -(-tiles // (device.processors * together))
    last = tiles - (rounds - 1) * device.processors * together
    last_together = min(together, -(-last // device.processors))
    full_round = turns * max(alone, together * turn) + fit.overlap * fixed
    clocks = (rounds - 1) * full_round + turns * max(alone, last_together * turn) + fixed
    busy = max(0.05, min(1.0, tiles / device.processors))
    memory_us = problem.bytes / (device.memory_gbps * _BANDWIDTH * 1e3) / busy
    compute_us = clocks / (device.clock_ghz * 0.85 * 1e3)
    # Never quite the larger of the two: of two configs that memory bounds, the one with less to do is safer.
    return max(compute_us, memory_us) + 0.1 * min(compute_us, memory_us) + _LAUNCH_US


def transpose_us(config: Config, problem: TransposeProblem, device: Device) -> float:
    """Predicted microseconds of `config` on `problem`: bytes over bandwidth, less what tiles waste."""
    m, n, size = config["BLOCK_M"], config["BLOCK_N"], problem.itemsize
    read = (n if problem.x_layout == "row" else m if problem.x_layout == "column" else 1) * size
    written = (n if problem.out_layout == "row" else m if problem.out_layout == "column" else 1) * size
    tiles_m, tiles_n = -(-problem.m // m), -(-problem.n // n)
    tiles = tiles_m * tiles_n * problem.batch
    used = (problem.m * problem.n) / (tiles_m * m * tiles_n * n)
    per_thread = m * n * size / (config.num_warps * device.warp_size)
    efficiency = 1.0
    for run, align in ((read, problem.x_align), (written, problem.out_align)):
        efficiency *= min(1.0, (run / 128) ** 0.7) / (1.0 + (0.0 if align >= 16 else 40.0 / run))
    efficiency *= min(1.0, written / 512) ** 0.15  # long writes are worth more than long reads
    enough = 256 if size < 16 else 64  # bytes a thread that hide latency; more only take registers
    efficiency *= min(1.0, per_thread / min(64, enough)) ** 0.5 * min(1.0, enough / per_thread) ** 0.3
    accesses = per_thread / max(size, min(problem.x_align, problem.out_align, 16))
    efficiency *= min(1.0, 64 / accesses)
    rounds = tiles / (device.processors * max(1.0, min(16.0, 2048 / (config.num_warps * 32))))
    efficiency *= max(rounds, 0.05) / -(-max(rounds, 0.05) // 1) if rounds < 4 else 1.0
    efficiency *= 1.0 + 0.01 * (config["GROUP_M"] == 32)
    return problem.bytes / (device.memory_gbps * 1e3 * max(efficiency * used, 1e-4)) + _LAUNCH_US


def predict_us(config: Config, problem: MatmulProblem | TransposeProblem, device: Device) -> float:
    """Predicted microseconds of a legal config on a problem."""
    if isinstance(problem, MatmulProblem):
        return matmul_us(config, problem, device)
    return transpose_us(config, problem, device)


def ranked(problem: MatmulProblem | TransposeProblem, device: Device) -> list[Config]:
    """The legal configs, fastest predicted first; ties broken by the config's text, for repeatability."""
    configs = legal_configs(problem, device)
    return sorted(configs, key=lambda config: (predict_us(config, problem, device), config.key))


def pick(problem: MatmulProblem | TransposeProblem, device: Device) -> Config:
    """The config predicted to be fastest."""
    return ranked(problem, device)[0]


def screened(problem: MatmulProblem | TransposeProblem, device: Device, count: int) -> list[Config]:
    """The `count` configs to try first: by predicted time, yet no tile shape twice before others had a turn.

    The formula cannot tell stages and warps of one tile apart as well as it can tell tiles, so a tile
    may take a place in each round of four configs.
    """
    rounds: dict[int, list[Config]] = {}
    seen: dict[tuple[int, int], int] = {}
    for config in ranked(problem, device)[: 40 * count]:
        tile = (config["BLOCK_M"], config["BLOCK_N"])
        seen[tile] = seen.get(tile, 0) + 1
        rounds.setdefault((seen[tile] - 1) // 4, []).append(config)
    ordered = [config for turn in sorted(rounds) for config in rounds[turn]]
    return ordered[:count]
