"""The configs of the descriptor kernel of groups: tiles by TMA, on NVIDIA GPUs from Hopper on."""

import itertools
from collections.abc import Iterator
from typing import Final

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import ITEMSIZE, GroupedProblem
from tritile.families.common.blocks import least_blocks, oversized
from tritile.families.matmul_tile.family import accumulator_words
from tritile.families.matmul_tma.family import BARRIER, fault

NAME: Final = "descriptor"
PARAMETERS: Final = ("BLOCK_K", "BLOCK_M", "BLOCK_N", "GROUP_M", "PERSISTENT", "SUBTILES")
_MAX_SIZE: Final = 2**30  # of a descriptor that is cut at a group's end
_MAX_WORDS: Final = 128


def tiles(config: Config, problem: GroupedProblem) -> int:
    """The most tiles that groups can make: of rows, each group but the largest may leave one unfilled.

    Rows of no group are one more group: they are filled with zeros.
    """
    m, n = config["BLOCK_M"], -(-problem.n // config["BLOCK_N"])
    if problem.ragged != "m":
        return problem.groups * -(-problem.m // m) * n
    made = min(problem.groups + 1, problem.m)
    return (problem.m + made * (m - 1)) // m * n


def shared_bytes(config: Config, problem: GroupedProblem) -> int:
    """Shared memory that the compiled kernel will ask for, at the least, in bytes."""
    tile = (config["BLOCK_M"] + config["BLOCK_N"]) * config["BLOCK_K"] * problem.itemsize
    part = config["BLOCK_M"] * config["BLOCK_N"] // config["SUBTILES"] * ITEMSIZE[problem.out_dtype]
    stored = config["PERSISTENT"] and problem.out_align == 16 and problem.out_layout == "row"
    return (tile + BARRIER) * config.num_stages + (part if stored else 0)


def unreachable(problem: GroupedProblem) -> str | None:
    """Why no tensor descriptor can see the operands, or None where one can.

    A tile begins where its group does, at any row or column. Along the dimension that is contiguous TMA takes
    no such tile: the H200 reports an illegal instruction.
    """
    if "strided" in (problem.a_layout, problem.b_layout):
        return "an operand has no contiguous dimension"
    if min(problem.a_align, problem.b_align) < 16:
        return "an operand's rows do not start on 16 bytes"
    if problem.ragged == "m" and problem.a_layout != "row":
        return "groups begin anywhere along the contiguous dimension of a"
    if problem.ragged == "k" and (problem.a_layout, problem.b_layout) != ("column", "row"):
        return "groups begin anywhere along the contiguous dimension of an operand"
    if max(problem.m, problem.n, problem.k, problem.groups) > _MAX_SIZE:
        return f"sizes above {_MAX_SIZE}"
    return None


def illegal(config: Config, problem: GroupedProblem, device: Device) -> str | None:
    """Why `config` may not run `problem` on `device`, or None where it may."""
    reason = fault(config, problem, device, PARAMETERS) or unreachable(problem)
    if reason is not None:
        return reason
    if tiles(config, problem) >= 2**31:
        return "more programs than a launch counts"
    words = accumulator_words(config, problem, device)
    if words > _MAX_WORDS:
        return f"{words} accumulator registers a thread, of {_MAX_WORDS}"
    shared = shared_bytes(config, problem)
    if shared > device.shared_memory:
        return f"{shared} bytes of shared memory, of {device.shared_memory}"
    return None


def _configs() -> Iterator[Config]:
    for m, n, k in itertools.product((16, 32, 64, 128, 256), (32, 64, 128, 256), (64, 128)):
        if not 16 * 64 <= m * n <= 128 * 256 or (k == 64 and m * n < 64 * 64):
            continue
        warps = (4, 8) if m >= 64 and m * n >= 128 * 128 else (4,)
        for count, stages, persistent in itertools.product(warps, (2, 3, 4, 5, 6, 8), (False, True)):
            if m * n // (32 * count) > _MAX_WORDS or (persistent and m * n < 64 * 64):
                continue
            for subtiles in (1, 2) if n >= 128 and persistent else (1,):
                kwargs = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8}
                yield Config.of(count, stages, NAME, **kwargs, PERSISTENT=persistent, SUBTILES=subtiles)


CONFIGS: Final[dict[str, tuple[Config, ...]]] = {"grouped": tuple(_configs())}


def pointless(config: Config, problem: GroupedProblem, device: Device) -> bool:
    """Whether another config of the family does the same or strictly less work."""
    if config["PERSISTENT"] and tiles(config, problem) <= device.processors:
        return True
    stage = (config["BLOCK_M"] + config["BLOCK_N"]) * config["BLOCK_K"] * problem.itemsize
    if config.num_stages < 5 and shared_bytes(config, problem) + 2 * stage <= device.shared_memory:
        return True  # room for two more stages
    return oversized(config, problem, least_blocks(problem) | {"BLOCK_K": 128})
