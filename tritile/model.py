"""A formula that predicts a config's time, for ordering a search and for choosing with no measurement.

The matmul formula follows one multiprocessor: the tiles that fall to it, in rounds of as many as fit
at once; in each round the K loop runs at the pace of its slowest part (tensor cores, shared memory,
the L2 cache, the load instructions, or the latency that too few stages leave uncovered). It answers
in microseconds; only the order of its answers matters.
"""

from tritile.config import Config
from tritile.device import Device
from tritile.problem import ITEMSIZE, MatmulProblem, TransposeProblem
from tritile.space import accumulator_words, legal_configs, loads_per_thread, shared_bytes, uses_tensor_cores

# Multiply-adds counted as two, of one multiprocessor in one clock, dense 16-bit on tensor cores:
# the makers' peak rates divided by processors and boost clock.
_RATE_16BIT = {80: 2048, 86: 1024, 89: 1024, 90: 4096, 100: 8192, 120: 1024}
_RATE_AMD = 2048
_RATE_FMA = 46  # IEEE fp32 tl.dot as measured on H200: 12 TFLOP/s over 132 processors at 1.98 GHz
_RATE_FP64 = 128
_LATENCY = 900  # clocks from asking for a tile to having it, out of device memory
_START = 1800  # clocks to start a program, compute its addresses and fill the pipeline
_ROUND = 60  # clocks of barriers and bookkeeping in one turn of the K loop
_SHARED_BYTES = 128  # bytes a clock of shared memory
_L2_BYTES = 44  # bytes a clock and processor of the L2 cache, all processors reading
_LOAD_CLOCKS = 5.0  # clocks of one warp-wide load instruction with its address and mask
_LOAD_WORDS = 6  # registers that a load which is not asynchronous keeps busy
_STORE_BYTES = 40  # bytes a clock and processor of the epilogue
_LAUNCH_US = 2.0


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


def _turn_clocks(config: Config, problem: MatmulProblem, device: Device) -> float:
    """Clocks of one turn of the K loop of one program that has its processor to itself."""
    m, n, k, size = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"], problem.itemsize
    warpgroups = device.nvidia >= 90 and m >= 64 and config.num_warps >= 4
    per_thread = m * n / (config.num_warps * device.warp_size)
    plain = not uses_tensor_cores(problem)
    slow = max(1.0, 8 / per_thread**0.5) if plain else 1.0 if warpgroups or device.nvidia < 90 else 2.2
    multiply = 2.0 * m * n * k / _rate(problem, device) * slow
    rows_at_once = 64 if warpgroups else 32
    shared = -(-m // rows_at_once) * (min(rows_at_once, m) + n) * k * size / _SHARED_BYTES
    feed = (m + n) * k * size / _L2_BYTES
    warp_loads = loads_per_thread(config, problem, device) * config.num_warps
    loads = _LOAD_CLOCKS * warp_loads * (1.3 if min(problem.a_align, problem.b_align) < 4 else 1.0)
    held = accumulator_words(config, problem, device) + _LOAD_WORDS * warp_loads / config.num_warps
    room = min(255, 65536 // (config.num_warps * device.warp_size)) - 40
    spilling = 1.0 + max(0.0, held - room) / 64
    return max(multiply, shared, feed, loads) * spilling + _ROUND


def matmul_us(config: Config, problem: MatmulProblem, device: Device) -> float:
    """Predicted microseconds of `config` on `problem`."""
    tiles_m, tiles_n = -(-problem.m // config["BLOCK_M"]), -(-problem.n // config["BLOCK_N"])
    turns = -(-problem.k // config["BLOCK_K"])
    tiles = tiles_m * tiles_n * problem.batch
    together = min(resident(config, problem, device), -(-tiles // device.processors))
    out_bytes = config["BLOCK_M"] * config["BLOCK_N"] * ITEMSIZE[problem.out_dtype]
    turn = _turn_clocks(config, problem, device)
    fetch = (
        _LATENCY + (config["BLOCK_M"] + config["BLOCK_N"]) * config["BLOCK_K"] * problem.itemsize / _L2_BYTES
    )
    alone = max(turn, (turn + fetch) / max(1, config.num_stages - 1))
    fixed = _START * (1 + config.num_warps / 80) + out_bytes / _STORE_BYTES * together
    rounds = -(-tiles // (device.processors * together))
    last = tiles - (rounds - 1) * device.processors * together
    last_together = min(together, -(-last // device.processors))
    full_round = turns * max(alone, together * turn) + 0.7 * fixed
    clocks = (rounds - 1) * full_round + turns * max(alone, last_together * turn) + fixed
    memory_us = problem.bytes / (device.memory_gbps * 0.85 * 1e3)
    busy = min(1.0, tiles / device.processors)
    return max(clocks / (device.clock_ghz * 0.85 * 1e3), memory_us / max(busy, 0.05)) + _LAUNCH_US


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
    efficiency *= min(1.0, per_thread / 64) ** 0.5 * min(1.0, 256 / per_thread) ** 0.3
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
