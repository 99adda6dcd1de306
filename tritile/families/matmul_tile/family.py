"""The configs of the tile kernels, of any GPU: one program makes one tile, through pointers."""

import itertools
from collections.abc import Iterator
from typing import Final

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import FP8_DTYPES, PermuteProblem, Product
from tritile.families.common.blocks import blocks_fault, least_blocks, order_fault, oversized, promotes_late

NAME: Final = "tile"
PARAMETERS: Final = {
    "matmul": ("BLOCK_K", "BLOCK_M", "BLOCK_N", "GROUP_M"),
    "grouped": ("BLOCK_K", "BLOCK_M", "BLOCK_N", "GROUP_M"),
    "permute": ("BLOCK_M", "BLOCK_N", "GROUP_M"),
}
_MAX_BLOCK: Final = {"matmul": 256, "grouped": 256, "permute": 4096}
MAX_REGISTER_WORDS: Final = 128  # 32-bit words of accumulator a thread can hold and still not spill
MAX_MOVED_WORDS: Final = 64  # the same of a tile that is only moved, each with an address of its own
_REGISTER_SHARE: Final = 0.88  # of a thread's registers, what accumulator and loads together may take
_WORDS_PER_LOAD: Final = 2.5  # registers that a load keeps busy: address, mask, value
MAX_PLAIN_K: Final = 32  # without tensor cores a block of K is unrolled whole, and summed in plain fp32
PLAIN_FMA_WORDS: Final = 64  # the same where operands and partial sums are in registers too


def uses_tensor_cores(problem: Product) -> bool:
    """Whether tl.dot of this problem runs on tensor cores: not in fp64, nor in IEEE fp32."""
    return problem.dtype != "float64" and (problem.dtype != "float32" or problem.precision != "ieee")


def accumulator_bytes(problem: Product) -> int:
    """Bytes of one accumulated element."""
    return 8 if problem.dtype == "float64" else 4


def shared_bytes(config: Config, problem: Product | PermuteProblem, device: Device) -> int:
    """Shared memory that the compiled kernel will ask for, at the least, in bytes.

    A pipelined load of a tile keeps a buffer for each stage in flight: num_stages on tensor cores
    that read shared memory while it is held (wgmma, tcgen05), one less elsewhere.
    """
    if isinstance(problem, PermuteProblem):
        return config["BLOCK_M"] * config["BLOCK_N"] * problem.itemsize
    held = warpgroup_mma(config, problem, device)
    stages = max(1, config.num_stages if held else config.num_stages - 1)
    k_bytes = config["BLOCK_K"] * problem.itemsize
    columns = config["BLOCK_N"] * problem.rights
    operands = ((config["BLOCK_M"], problem.a_align), (columns, problem.b_align))
    # Copies of under 4 bytes are not asynchronous, and so not pipelined.
    return sum(size * k_bytes * (stages if align >= 4 else 1) for size, align in operands)


def warpgroup_mma(config: Config, problem: Product, device: Device) -> bool:
    """Whether tl.dot runs on tensor cores that read operands from shared memory: wgmma, tcgen05."""
    whole = config["BLOCK_M"] >= 64 and config.num_warps >= 4
    return device.nvidia >= 90 and device.nvidia < 120 and whole and uses_tensor_cores(problem)


def accumulator_words(config: Config, problem: Product, device: Device) -> int:
    """32-bit registers of each thread that hold sums."""
    threads = config.num_warps * device.warp_size
    # That of some blocks of K beside that of all: for scales, or to sum to fp32's precision.
    apart = problem.promoted or (problem.totals and device.nvidia == 90)
    sums = 2 if problem.block_scales or apart else problem.rights
    return sums * config["BLOCK_M"] * config["BLOCK_N"] * accumulator_bytes(problem) // (4 * threads)


def loads_per_thread(config: Config, problem: Product, device: Device) -> float:
    """Load instructions of each thread for one turn of the K loop: as wide as alignment lets them be."""
    m, n, k = config["BLOCK_M"], config["BLOCK_N"] * problem.rights, config["BLOCK_K"]
    size = problem.itemsize
    loads = m * k / max(1, problem.a_align // size) + k * n / max(1, problem.b_align // size)
    return float(loads / (config.num_warps * device.warp_size))


def _illegal_product(config: Config, problem: Product, device: Device) -> str | None:
    if problem.dtype in FP8_DTYPES and 0 < device.nvidia < 89:
        return f"{problem.dtype} needs compute capability 8.9, not {device.nvidia / 10}"
    for name, least in least_blocks(problem).items():
        if config[name] < least:
            return f"{name} = {config[name]} is below the {least} that tl.dot takes for {problem.dtype}"
    if not uses_tensor_cores(problem) and config["BLOCK_K"] > MAX_PLAIN_K:
        return f"BLOCK_K = {config['BLOCK_K']} unrolls too far without tensor cores, above {MAX_PLAIN_K}"
    if problem.block_scales and config["BLOCK_K"] > 128:
        return f"BLOCK_K = {config['BLOCK_K']} has several scales"
    if promotes_late(config, problem) or (
        problem.promoted and config["BLOCK_K"] > 64 and not warpgroup_mma(config, problem, device)
    ):  # a block that is summed apart is in registers whole
        return f"BLOCK_K = {config['BLOCK_K']} is too much of parts to be summed at once"
    words = accumulator_words(config, problem, device)
    most = MAX_REGISTER_WORDS if uses_tensor_cores(problem) else PLAIN_FMA_WORDS
    if words > most:
        return f"{words} accumulator registers a thread, of {most}"
    held = words + _WORDS_PER_LOAD * loads_per_thread(config, problem, device)
    if device.nvidia and uses_tensor_cores(problem) and not warpgroup_mma(config, problem, device):
        held += (config["BLOCK_M"] * config["BLOCK_N"] / config.num_warps) ** 0.5  # operand fragments
    room = _REGISTER_SHARE * min(255, 65536 // (config.num_warps * device.warp_size))
    if held > room:
        return f"{held:.0f} registers a thread for accumulator and loads, of {room:.0f}"
    return None


def uneven(extent: int, block: int) -> bool:
    """Whether tiles of `block` that overlap to cover `extent` would copy more than an eighth of it twice."""
    return extent < block or 8 * (-(-extent // block) * block) > 9 * extent


def vectors(config: Config, problem: PermuteProblem) -> tuple[int, int]:
    """Bytes that a thread reads, and writes, at once: as many as alignment and runs allow, up to 16."""
    read, written = (run * problem.itemsize for run in problem.runs(config["BLOCK_M"], config["BLOCK_N"]))
    wide = min(problem.x_align, read, 16), min(problem.out_align, written, 16)
    return max(problem.itemsize, wide[0]), max(problem.itemsize, wide[1])


def held_words(config: Config, problem: PermuteProblem, device: Device) -> float:
    """32-bit registers of each thread that hold its part of a tile: at least one for what is read alone."""
    elements = config["BLOCK_M"] * config["BLOCK_N"] / (config.num_warps * device.warp_size)
    alone = min(vectors(config, problem)) < 4
    return float(elements * (max(4, problem.itemsize) if alone else problem.itemsize) / 4)


def launch_fault(config: Config, problem: Product | PermuteProblem, device: Device) -> str | None:
    """What is wrong with a config's blocks, warps, stages or shared memory."""
    reason = blocks_fault(config, PARAMETERS[problem.op], _MAX_BLOCK[problem.op])
    if reason is not None:
        return reason
    if config.num_ctas != 1 or config.num_warps > 16 or not 1 <= config.num_stages <= 8:
        return "num_ctas must be 1, num_warps at most 16, num_stages 1 to 8"
    shared = shared_bytes(config, problem, device)
    if shared > device.shared_memory:
        return f"{shared} bytes of shared memory, of {device.shared_memory}"
    return None


def moved_fault(config: Config, problem: PermuteProblem, device: Device, words: float) -> str | None:
    """Why threads that hold so many 32-bit words each may not move tiles of a permutation."""
    threads = config.num_warps * device.warp_size
    if words > MAX_MOVED_WORDS:
        return f"{words:.0f} registers a thread for its part of the tile, of {MAX_MOVED_WORDS}"
    if config["BLOCK_M"] * config["BLOCK_N"] < threads:
        return f"a tile leaves some of {threads} threads idle"
    if config["GROUP_M"] * -(-problem.n // config["BLOCK_N"]) >= 2**31:
        return f"a band of {config['GROUP_M']} rows of tiles has more than 32 bits can count"
    return None


def illegal(config: Config, problem: Product | PermuteProblem, device: Device) -> str | None:
    """Why `config` may not run `problem` on `device`, or None where it may."""
    reason = launch_fault(config, problem, device)
    if reason is not None:
        return reason
    if isinstance(problem, PermuteProblem):
        return moved_fault(config, problem, device, held_words(config, problem, device))
    return _illegal_product(config, problem, device)


def _matmul_configs() -> Iterator[Config]:
    blocks = itertools.product((16, 32, 64, 128, 256), (16, 32, 64, 128, 256), (16, 32, 64, 128, 256))
    for (m, n, k), warps, stages, group in itertools.product(blocks, (2, 4, 8, 16), (2, 3, 4, 5, 6), (1, 8)):
        kwargs = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": group}
        yield Config.of(family=NAME, num_warps=warps, num_stages=stages, **kwargs)


def _grouped_configs() -> Iterator[Config]:
    """Those of products, in bands, as groups have several tiles or the order does not matter."""
    for config in _matmul_configs():
        if config["GROUP_M"] > 1 and config.num_warps in (4, 8) and config["BLOCK_K"] >= 32:
            yield config


def _permute_configs() -> Iterator[Config]:
    sides = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048)
    for m, n, warps, group in itertools.product(sides, sides, (4, 8, 16), (1, 32, 256)):
        if 512 <= m * n <= 65536:
            yield Config.of(family=NAME, num_warps=warps, num_stages=1, BLOCK_M=m, BLOCK_N=n, GROUP_M=group)


def in_place(problem: PermuteProblem) -> Config:
    """The config with which square matrices are transposed where they lie: one for all, not tuned."""
    block = 64 if problem.itemsize <= 4 else 32
    return Config.of(family=NAME, num_warps=4, num_stages=1, BLOCK_M=block, BLOCK_N=block, GROUP_M=1)


CONFIGS: Final[dict[str, tuple[Config, ...]]] = {
    "matmul": tuple(_matmul_configs()),
    "grouped": tuple(_grouped_configs()),
    "permute": tuple(_permute_configs()),
}


def pointless(config: Config, problem: Product | PermuteProblem, device: Device) -> bool:
    """Whether another config of the family does the same or strictly less work."""
    if order_fault(config, problem):
        return True
    if isinstance(problem, PermuteProblem):
        return config["BLOCK_M"] >= 2 * max(problem.m, 16) or config["BLOCK_N"] >= 2 * max(problem.n, 16)
    if min(problem.a_align, problem.b_align) < 4 and config.num_stages > 3:
        return True  # copies of under 4 bytes are not asynchronous: more stages hold nothing in flight
    return oversized(config, problem, least_blocks(problem))
