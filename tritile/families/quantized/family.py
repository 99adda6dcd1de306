"""The configs of products with quantized weights: one program makes one tile, or a part of its sum."""

import itertools
from collections.abc import Iterator
from typing import Final

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import QuantizedProblem, unit_columns
from tritile.families.common.blocks import blocks_fault
from tritile.families.matmul_tile import family as tile
from tritile.families.matmul_tma.family import BARRIER, MAX_SHARED
from tritile.families.matmul_tma.family import NAME as DESCRIPTOR

NAME: Final = tile.NAME
PARAMETERS: Final = ("BLOCK_K", "BLOCK_M", "BLOCK_N", "GROUP_M", "SPLIT_K")
_MAX_SIZE: Final = 2**31 - 2**16  # indices are 32 bits
_MAX_WORDS: Final = 128  # 32-bit words of accumulator a thread can hold and still not spill
_FEW_ROWS: Final = 64  # of x, up to which there are fewer sums to scale than weights
_REGISTERS: Final = 192  # the same with the unpacked weight, and addresses beside them


def accumulator_words(config: Config, device: Device) -> int:
    """32-bit registers of each thread that hold the accumulator."""
    return config["BLOCK_M"] * config["BLOCK_N"] // (config.num_warps * device.warp_size)


def weight_words(config: Config, device: Device) -> int:
    """32-bit registers of each thread that hold a block of the weight, unpacked to 16 bits."""
    return config["BLOCK_N"] * config["BLOCK_K"] // (2 * config.num_warps * device.warp_size)


def scales_at_once(config: Config, problem: QuantizedProblem) -> int:
    """How many scales of a row come with a block of K: one for each group, some several times.

    A load of fewer words than there are threads is not pipelined by Triton 3.6: two rows share a word.
    """
    groups = -(-config["BLOCK_K"] // problem.group_size)
    most = config["BLOCK_K"] * problem.bits // 128  # each is for all pairs of four words
    return int(max(groups, min(most, 64 * config.num_warps // config["BLOCK_N"])))


def scales_sums(config: Config, group_size: int) -> bool:
    """Whether sums over a block of K are scaled, exactly, and not weights, which are rounded then.

    It takes a block within one group, and saves a multiplication for each weight: of some 3.5 instructions
    that Triton 3.6 compiles for each to unpack and multiply it, 2.1 to 2.5 are left.
    """
    return config["BLOCK_K"] <= group_size and config["BLOCK_M"] <= _FEW_ROWS


def held_in_shared(config: Config, device: Device) -> bool:
    """Whether tensor cores read x from shared memory, so that a stage is held while they do."""
    return 90 <= device.nvidia < 120 and config["BLOCK_N"] >= 64 and config.num_warps >= 4


def shared_bytes(config: Config, problem: QuantizedProblem, device: Device) -> int:
    """Shared memory that the compiled kernel will ask for, at the least, in bytes."""
    stages = config.num_stages
    x = config["BLOCK_M"] * config["BLOCK_K"] * problem.itemsize if problem.x_align >= 4 else 0
    words = config["BLOCK_N"] * config["BLOCK_K"] * problem.bits // 8
    scales = 2 * config["BLOCK_N"] * scales_at_once(config, problem) * (1 + problem.zero_points)
    kept = stages if held_in_shared(config, device) else stages - 1
    barriers = BARRIER * stages if config.family == DESCRIPTOR else 0
    return int(x * kept + (words + scales) * (stages - 1)) + barriers


def tiles(config: Config, problem: QuantizedProblem) -> int:
    """Tiles of the result."""
    return int(-(-problem.m // config["BLOCK_M"]) * -(-problem.n // config["BLOCK_N"]))


def illegal(config: Config, problem: QuantizedProblem, device: Device) -> str | None:
    """Why `config` may not run `problem` on `device`, or None where it may."""
    reason = blocks_fault(config, PARAMETERS, 256)
    if reason is not None:
        return reason
    if config.num_ctas != 1 or config.num_warps > 8 or not 2 <= config.num_stages <= 8:
        return "num_ctas must be 1, num_warps at most 8, num_stages 2 to 8"
    if 0 < device.nvidia < 80:
        return f"{device.name} has no asynchronous copies, and no bfloat16"
    if max(problem.m, problem.n, problem.k) > _MAX_SIZE:
        return f"sizes above {_MAX_SIZE}"
    if config["BLOCK_M"] < 16 or config["BLOCK_N"] < 16:
        return "BLOCK_M and BLOCK_N must be 16 at the least"
    unit = unit_columns(problem.bits)
    if config["BLOCK_K"] < unit:
        return f"BLOCK_K = {config['BLOCK_K']} is below the {unit} columns that are packed together"
    if config["SPLIT_K"] > 1:
        if config["SPLIT_K"] > -(-problem.k // config["BLOCK_K"]):
            return f"SPLIT_K = {config['SPLIT_K']} leaves programs without a block of K = {problem.k}"
        if tiles(config, problem) > MAX_SHARED:
            return f"{tiles(config, problem)} tiles share their K, of {MAX_SHARED}"
    if tiles(config, problem) * config["SPLIT_K"] >= 2**31:
        return "more programs than a launch counts"
    words = accumulator_words(config, device) * (1 + scales_sums(config, problem.group_size))
    if words > _MAX_WORDS or words + weight_words(config, device) > _REGISTERS:
        return f"{words} accumulator and {weight_words(config, device)} weight registers a thread"
    if config["BLOCK_N"] * config["BLOCK_K"] < 32 * 32 * config.num_warps:
        return f"a block of the weight leaves some of {config.num_warps} warps idle"
    shared = shared_bytes(config, problem, device)
    if shared > device.shared_memory:
        return f"{shared} bytes of shared memory, of {device.shared_memory}"
    return None


def _configs() -> Iterator[Config]:
    for m, n, k in itertools.product((16, 32, 64, 128, 256), (64, 128, 256), (64, 128, 256)):
        for warps, stages in itertools.product((4, 8), (2, 3, 4, 5, 6, 8)):
            if m * n // (32 * warps) > _MAX_WORDS or n // warps < 16:
                continue
            for group, split in itertools.product((1, 8), (1, 2, 4, 8, 16) if m <= 64 else (1, 2)):
                sides = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": group, "SPLIT_K": split}
                yield Config.of(warps, stages, NAME, **sides)


CONFIGS: Final[dict[str, tuple[Config, ...]]] = {QuantizedProblem.op: tuple(_configs())}


def interpreted(problem: QuantizedProblem) -> Config:
    """Large tiles, as the interpreter's time goes by how many tile operations it runs."""
    m, n = (max(16, min(128, 1 << (size - 1).bit_length())) for size in (problem.m, problem.n))
    # More than a group, so that weights are scaled.
    k = max(unit_columns(problem.bits), 2 * problem.group_size, min(256, 1 << (problem.k - 1).bit_length()))
    return Config.of(4, 2, NAME, BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP_M=8, SPLIT_K=1)


def pointless(config: Config, problem: QuantizedProblem, device: Device) -> bool:
    """Whether another config of the family does the same or strictly less work."""
    one_row = problem.m <= config["BLOCK_M"] or problem.n <= config["BLOCK_N"]
    if one_row != (config["GROUP_M"] == 1):
        return True  # the order of what has none, or bands left out where there are several
    if config["SPLIT_K"] > 1 and tiles(config, problem) * config["SPLIT_K"] > 8 * device.processors:
        return True  # there are tiles enough
    if config["BLOCK_M"] >= 2 * max(problem.m, 16) or config["BLOCK_N"] >= 2 * max(problem.n, 64):
        return True
    return bool(config["BLOCK_K"] >= 2 * max(problem.k, unit_columns(problem.bits)))
