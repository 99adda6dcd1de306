"""Check what configs of every family have in common: whole blocks, none larger than the problem."""

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import PROMOTED_EVERY, SCALE_K, GroupedProblem, PermuteProblem, Product
from tritile.families.common.products import warpgroup_mma


def names_fault(config: Config, names: tuple[str, ...]) -> str | None:
    found = tuple(name for name, _ in config.kwargs)
    return None if found == names else f"parameters {[*found]} are not {[*names]}"


def blocks_fault(config: Config, names: tuple[str, ...], most: int) -> str | None:
    reason = names_fault(config, names)
    if reason is not None:
        return reason
    for name, value in config.kwargs:
        if name == "PERSISTENT":
            if not isinstance(value, bool):
                return f"{name} = {value!r} is neither True nor False"
        elif not isinstance(value, int) or isinstance(value, bool) or value < 1 or value & (value - 1):
            return f"{name} = {value!r} is not a power of two"
        elif value > most:
            return f"{name} = {value} is above {most}"
    return None


def launch_fault(config: Config) -> str | None:
    if config.num_ctas != 1 or config.num_warps > 16 or not 1 <= config.num_stages <= 8:
        return "num_ctas must be 1, num_warps at most 16, num_stages 1 to 8"
    return None


def shared_fault(shared: int, device: Device) -> str | None:
    if shared <= device.shared_memory:
        return None
    return f"{shared} bytes of shared memory, of {device.shared_memory}"


def least_blocks(problem: Product) -> dict[str, int]:
    return {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 32 if problem.itemsize == 1 else 16}


def late_fault(config: Config, problem: Product, device: Device) -> str | None:
    """Say why tensor cores may not sum a whole block of K, None where they may.

    Hopper's truncate: what they sum of parts of fp32 and of fp8 goes to a total in fp32 after so many of K.
    """
    if problem.promoted:
        most = PROMOTED_EVERY
    elif problem.totals and device.nvidia == 90 and warpgroup_mma(config, problem, device):
        most = SCALE_K
    else:
        return None
    return f"BLOCK_K = {config['BLOCK_K']}: a sum of {most} is precise" if config["BLOCK_K"] > most else None


def order_fault(config: Config, problem: Product | PermuteProblem) -> bool:
    """Tell whether GROUP_M orders tiles that have no order, or leaves unordered those that have one."""
    if isinstance(problem, GroupedProblem):
        return False  # always in bands: groups may or may not have several rows of tiles
    matters = problem.m > config["BLOCK_M"] and problem.n > config["BLOCK_N"]
    if config["GROUP_M"] > 1 and not matters:
        return True
    # A product reads its operands again and again: bands never hurt.
    return config["GROUP_M"] == 1 and matters and not isinstance(problem, PermuteProblem)


def oversized(config: Config, problem: Product, least: dict[str, int]) -> bool:
    blocks = ((problem.m, "BLOCK_M"), (problem.n, "BLOCK_N"), (problem.k, "BLOCK_K"))
    return any(config[name] >= 2 * max(size, least[name]) for size, name in blocks)
