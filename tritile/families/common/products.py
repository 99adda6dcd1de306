"""Say what products by tiles have in common: what takes them time, and how their terms are summed."""

from typing import Final

from tritile.core.call import MatmulCall
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import FP8_DTYPES, PROMOTED_EVERY, SCALE_K, Product

SECTOR: Final = 32  # bytes that device memory moves at once
LINE: Final = 128  # bytes that a cache looks up at once


def uses_tensor_cores(problem: Product) -> bool:
    """Tell whether tl.dot of this problem runs on tensor cores: not in fp64, nor in IEEE fp32."""
    return problem.dtype != "float64" and (problem.dtype != "float32" or problem.precision != "ieee")


def accumulator_bytes(problem: Product) -> int:
    return 8 if problem.dtype == "float64" else 4


def warpgroup_mma(config: Config, problem: Product, device: Device) -> bool:
    """Tell whether tl.dot runs on tensor cores that read operands from shared memory: wgmma, tcgen05."""
    whole = config["BLOCK_M"] >= 64 and config.num_warps >= 4
    return device.has_tma and whole and uses_tensor_cores(problem)


def accumulator_words(config: Config, problem: Product, device: Device) -> int:
    threads = config.num_warps * device.warp_size
    # That of some blocks of K beside that of all: for scales, or to sum to fp32's precision.
    apart = problem.promoted or (problem.totals and device.nvidia == 90)
    sums = 2 if apart else problem.rights
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


def held_with_tma(device: Device, shared: int, warps: int) -> int:
    """Return how many programs whose tiles TMA brings an SM holds at once, by shared memory and warps."""
    return max(1, min((device.shared_memory + 1024) // (shared + 1024), 16 // warps, 4))


def in_parts(call: MatmulCall) -> bool:
    """Tell whether operands are parts of float32 ones, and sums of the large terms move to totals in fp32."""
    return call.dtype == "float16" and call.precision == "fp16x3"


def input_precision(call: MatmulCall) -> str:
    return "ieee" if in_parts(call) else call.precision


def promoted_turns(call: MatmulCall, config: Config) -> int:
    """Return after how many blocks of K sums move from tensor cores to a total in fp32; 0 for never."""
    if in_parts(call):
        return PROMOTED_EVERY // int(config["BLOCK_K"])
    if call.dtype in FP8_DTYPES and call.precision != "fast":
        return max(1, SCALE_K // int(config["BLOCK_K"]))
    return 0
