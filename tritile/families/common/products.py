"""Count what a tile of a product takes of an SM: instructions, registers, loads."""

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import Product


def uses_tensor_cores(problem: Product) -> bool:
    """Tell whether tl.dot of this problem runs on tensor cores: not in fp64, nor in IEEE fp32."""
    return problem.dtype != "float64" and (problem.dtype != "float32" or problem.precision != "ieee")


def accumulator_bytes(problem: Product) -> int:
    return 8 if problem.dtype == "float64" else 4


def warpgroup_mma(config: Config, problem: Product, device: Device) -> bool:
    """Tell whether tl.dot runs on tensor cores that read operands from shared memory: wgmma, tcgen05."""
    whole = config["BLOCK_M"] >= 64 and config.num_warps >= 4
    return device.nvidia >= 90 and device.nvidia < 120 and whole and uses_tensor_cores(problem)


def accumulator_words(config: Config, problem: Product, device: Device) -> int:
    threads = config.num_warps * device.warp_size
    # That of some blocks of K beside that of all: for scales, or to sum to fp32's precision.
    apart = problem.promoted or (problem.totals and device.nvidia == 90)
    sums = 2 if problem.block_scales or apart else problem.rights
    return sums * config["BLOCK_M"] * config["BLOCK_N"] * accumulator_bytes(problem) // (4 * threads)


def loads_per_thread(config: Config, problem: Product, device: Device) -> float:
    """Return load instructions of each thread in a K iteration, as wide as alignment and edges allow.

    A row of odd length ends amid a word, however it is aligned: a mask then tells elements apart.
    """
    m, n, k = config["BLOCK_M"], config["BLOCK_N"] * problem.rights, config["BLOCK_K"]
    size = problem.itemsize
    a_ends = problem.k if problem.a_layout == "row" else problem.m
    b_ends = problem.k if problem.b_layout == "column" else problem.n
    a_wide, b_wide = (
        min(problem.a_align // size, a_ends & -a_ends),
        min(problem.b_align // size, b_ends & -b_ends),
    )
    loads = m * k / max(1, a_wide) + k * n / max(1, b_wide)
    return float(loads / (config.num_warps * device.warp_size))


def held(device: Device, threads: int, registers: float, shared: int, most: int) -> int:
    """Return how many programs, of `most`, an SM holds at once: by shared memory, registers and threads."""
    by_shared = (device.shared_memory + 1024) // (shared + 1024)
    return int(max(1, min(by_shared, 65536 // (threads * registers), 2048 // threads, most)))
