"""Say what families have in common: what a config may be, and what it takes of an SM."""

from typing import Final

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import PROMOTED_EVERY, SCALE_K, GroupedProblem, Product

SECTOR: Final = 32  # bytes that device memory moves at once
LINE: Final = 128  # bytes that a cache looks up at once
MAX_WORDS: Final = 128  # 32-bit words of accumulator that a thread can hold and still not spill


# --- Legality. Each returns a reason, or None if there is none against a config. ---


def config_fault(
    config: Config, names: tuple[str, ...], most: int = 256, warps: int = 16,
    stages: tuple[int, int] = (1, 8), free: tuple[str, ...] = (),
) -> str | None:  # fmt: skip
    """Check parameters, which are powers of two up to `most` unless they are `free`, warps and stages."""
    found = tuple(name for name, _ in config.kwargs)
    if found != names:
        return f"parameters {[*found]} are not {[*names]}"
    for name, value in config.kwargs:
        if name == "PERSISTENT":
            if not isinstance(value, bool):
                return f"{name} = {value!r} is neither True nor False"
        elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
            return f"{name} = {value!r} is not a whole number from 1"
        elif value & (value - 1) and name not in free:
            return f"{name} = {value!r} is not a power of two"
        elif value > most:
            return f"{name} = {value} is above {most}"
    least, deepest = stages
    if config.num_ctas != 1 or config.num_warps > warps or not least <= config.num_stages <= deepest:
        return f"num_ctas must be 1, num_warps at most {warps}, num_stages {least} to {deepest}"
    return None


def resource_fault(
    device: Device, shared: int = 0, words: int = 0, most: int = MAX_WORDS, programs: int = 0
) -> str | None:
    """Check bytes of shared memory, accumulator registers of a thread, and programs of a launch."""
    if programs >= 2**31:
        return "more programs than a launch counts"
    if words > most:
        return f"{words} accumulator registers a thread, above {most}"
    if shared > device.shared_memory:
        return f"{shared} bytes of shared memory, of {device.shared_memory}"
    return None


def dot_fault(config: Config, problem: Product) -> str | None:
    for name, least in least_blocks(problem).items():
        if config[name] < least:
            return f"{name} = {config[name]} is below the {least} that tl.dot takes for {problem.dtype}"
    return None


def late_fault(config: Config, problem: Product, device: Device) -> str | None:
    """Say why tensor cores may not sum a whole block of K.

    Hopper's truncate: what they sum of parts of fp32 and of fp8 goes to a total in fp32 after so many of K.
    """
    if problem.promoted:
        most = PROMOTED_EVERY
    elif problem.totals and device.nvidia == 90 and warpgroup_mma(config, problem, device):
        most = SCALE_K
    else:
        return None
    return f"BLOCK_K = {config['BLOCK_K']}: a sum of {most} is precise" if config["BLOCK_K"] > most else None


# --- Dominated configs. ---


def least_blocks(problem: Product) -> dict[str, int]:
    return {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 32 if problem.itemsize == 1 else 16}


def is_disordered(config: Config, problem: Product | PermuteProblem) -> bool:
    """True if GROUP_M orders tiles that have no order, or leaves unordered those that have one."""
    if isinstance(problem, GroupedProblem):
        return False  # always in bands: groups may or may not have several rows of tiles
    matters = problem.m > config["BLOCK_M"] and problem.n > config["BLOCK_N"]
    if config["GROUP_M"] > 1 and not matters:
        return True
    # A product reads its operands again and again: bands never hurt.
    return config["GROUP_M"] == 1 and matters and not isinstance(problem, PermuteProblem)


def is_oversized(config: Config, problem: Product, block_k: int = 0) -> bool:
    """True if a block is twice a side of the problem, and K's twice `block_k` too."""
    least = least_blocks(problem)
    least["BLOCK_K"] = max(least["BLOCK_K"], block_k)
    sides = ((problem.m, "BLOCK_M"), (problem.n, "BLOCK_N"), (problem.k, "BLOCK_K"))
    return any(config[name] >= 2 * max(size, least[name]) for size, name in sides)


# --- What a program takes. ---


def uses_tensor_cores(problem: Product) -> bool:
    """True if tl.dot of this problem runs on tensor cores: not in fp64, nor in IEEE fp32."""
    return problem.dtype != "float64" and (problem.dtype != "float32" or problem.precision != "ieee")


def warpgroup_mma(config: Config, problem: Product, device: Device) -> bool:
    """True if tl.dot runs on tensor cores that read operands from shared memory: wgmma, tcgen05."""
    whole = config["BLOCK_M"] >= 64 and config.num_warps >= 4
    return device.has_tma and whole and uses_tensor_cores(problem)


def accumulator_words(config: Config, problem: Product, device: Device) -> int:
    threads = config.num_warps * device.warp_size
    # Some blocks of K have sums of their own: for scales, or to sum to fp32's precision.
    apart = problem.promoted or (problem.totals and device.nvidia == 90)
    words = (2 if apart else problem.rights) * (2 if problem.dtype == "float64" else 1)
    return words * config["BLOCK_M"] * config["BLOCK_N"] // threads


def loads_per_thread(config: Config, problem: Product, device: Device) -> float:
    """Return load instructions of each thread in a K iteration, as wide as alignment and edges allow.

    A row of odd length ends in the middle of a word, however it is aligned: masks are then by element.
    """
    m, n, k = config["BLOCK_M"], config["BLOCK_N"] * problem.rights, config["BLOCK_K"]
    size = problem.itemsize
    a_ends = problem.k if problem.a_layout == "row" else problem.m
    b_ends = problem.k if problem.b_layout == "column" else problem.n
    a_wide = min(problem.a_align // size, a_ends & -a_ends)
    b_wide = min(problem.b_align // size, b_ends & -b_ends)
    loads = m * k / max(1, a_wide) + k * n / max(1, b_wide)
    return float(loads / (config.num_warps * device.warp_size))


def programs_per_sm(device: Device, threads: int, registers: float, shared: int, most: int) -> int:
    """Return how many programs, of `most`, an SM holds at once: by shared memory, registers and threads."""
    by_shared = (device.shared_memory + 1024) // (shared + 1024)
    return int(max(1, min(by_shared, 65536 // (threads * registers), 2048 // threads, most)))
