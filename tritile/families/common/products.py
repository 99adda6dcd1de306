"""Say what products by tiles have in common: what takes them time, and how their terms are summed."""

from typing import Any, Final, NamedTuple

from tritile.core.call import MatmulCall
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import FP8_DTYPES, PROMOTED_EVERY, SCALE_K, Product

SECTOR: Final = 32  # bytes that device memory moves at once
LINE: Final = 128  # bytes that a cache looks up at once


class Facts(NamedTuple):
    """Hold what a product's time depends on beside its config: numbers, or tensors over many products."""

    m: Any
    n: Any
    k: Any
    batch: Any
    size_a: Any  # bytes an element
    size_b: Any
    bytes_a: Any  # of one matrix
    bytes_b: Any
    bytes_out: Any  # of all results
    reread: Any  # share of b that each band of tiles after the first reads again from device memory
    odd_a: Any  # 1 where rows of a do not start on sectors, else 0
    odd_b: Any
    odd_out: Any
    off_a: Any  # 1 where rows of a do not start on lines
    off_b: Any
    by_row: Any  # 1 where b is contiguous along N, 0 where along K
    copied: Any  # bytes of operands that are copied first
    copies: Any  # 1 where any operand is copied, else 0
    processors: Any


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
