"""Say what a program of `warpgroups` can do: specialised warps on Hopper, of which one loads tiles."""

import functools
from collections.abc import Callable
from typing import Any, Final

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import ITEMSIZE, SCALE_K, MatmulProblem
from tritile.core.threads import import_late
from tritile.core.versions import parsed
from tritile.families.common.blocks import late_fault, names_fault, shared_fault
from tritile.families.common.operands import reachable, tiles

NAME: Final = "warpgroups"
PARAMETERS: Final = ("BLOCK_K", "BLOCK_M", "BLOCK_N", "CONSUMERS", "GROUP_M", "PERSISTENT", "SUBTILES")
REGISTERS: Final = {1: 232, 2: 232, 3: 160}  # registers of a consumer's thread, by the number of consumers
ROWS: Final = (64, 128)  # of a tile, for one consumer
COLUMNS: Final = (16, 32, 48, 64, 80, 96, 128, 144, 160, 192, 256)
_RIGHT_ON_3_6: Final = (64, 96, 128, 192)  # columns of tiles whose promoted sums are right with Triton 3.6
_BARRIERS: Final = 512  # bytes of shared memory for barriers and the state of the warps
_GLUON_DTYPES: Final = {"float8_e4m3fn": "float8e4nv", "float8_e5m2": "float8e5"}


def main_columns(config: Config) -> int:
    """Return the largest power of two in BLOCK_N: the columns of its first accumulator."""
    return 1 << (config["BLOCK_N"].bit_length() - 1)


def shared_bytes(config: Config, problem: MatmulProblem) -> int:
    main = main_columns(config)
    stage = (config["BLOCK_M"] + config["BLOCK_N"]) * config["BLOCK_K"] * problem.itemsize
    stored = config["BLOCK_M"] * (main // config["SUBTILES"] + config["BLOCK_N"] - main)
    return stage * config.num_stages + stored * ITEMSIZE[problem.out_dtype] + _BARRIERS


def numbers_fault(config: Config, names: tuple[str, ...]) -> str | None:
    reason = names_fault(config, names)
    if reason is not None:
        return reason
    numbers = [value for name, value in config.kwargs if name != "PERSISTENT"]
    if not all(isinstance(v, int) and not isinstance(v, bool) and 1 <= v <= 384 for v in numbers):
        return f"{config}: blocks are whole numbers from 1"
    if not isinstance(config["PERSISTENT"], bool):
        return f"PERSISTENT = {config['PERSISTENT']!r} is neither True nor False"
    if config["GROUP_M"] & (config["GROUP_M"] - 1):
        return f"GROUP_M = {config['GROUP_M']} is not a power of two"
    if config.num_ctas != 1 or config.num_warps != 4 or not 2 <= config.num_stages <= 12:
        return "num_ctas must be 1, num_warps 4, num_stages 2 to 12"
    return None


def _tile_fault(config: Config) -> str | None:
    consumers = config["CONSUMERS"]
    if consumers not in REGISTERS or config["BLOCK_M"] not in [rows * consumers for rows in ROWS]:
        return f"BLOCK_M = {config['BLOCK_M']} is not 64 or 128 rows for each of 1 to 3 consumers"
    if config["BLOCK_N"] not in COLUMNS:
        return f"BLOCK_N = {config['BLOCK_N']} is none of {COLUMNS}"
    if config["BLOCK_K"] not in (32, 64, 128) or config["SUBTILES"] not in (1, 2):
        return "BLOCK_K must be 32, 64 or 128, SUBTILES 1 or 2"
    return None


def _accumulators(config: Config) -> int:
    return int(config["BLOCK_M"] // config["CONSUMERS"] * config["BLOCK_N"] // 128)


def _sums_fault(config: Config, problem: MatmulProblem) -> str | None:
    """Say that the main loop has too few registers for a tile's sums, None where it has enough.

    A total takes as many again, but is only added to, and needs no room beside it except for scales.
    """
    words, most = _accumulators(config), REGISTERS[config["CONSUMERS"]]
    fits = most - 56
    if problem.totals:
        fits = min(fits, (most - 32) // 2)
    return f"{words} accumulator registers a thread, above {fits}" if words > fits else None


def epilogue_fault(config: Config, problem: MatmulProblem) -> str | None:
    """Say that an epilogue would spill registers, by hundreds of bytes as compiled; None where it does not.

    Gelu holds steps of many elements at a time. It spills beside many sums where tiles are stored by
    pointers, and beside fewer where it reads a matrix.
    """
    fused, most = problem.epilogue, REGISTERS[config["CONSUMERS"]]
    gelu, reads = fused.activation == "gelu", "full" in (fused.bias, fused.residual)
    pointers = problem.out_align < 16 or problem.n * ITEMSIZE[problem.out_dtype] % 16 != 0
    if not (gelu and pointers):
        return None
    words, fits = _accumulators(config), (most - 40) // 2 if reads else most * 9 // 16
    return f"{words} accumulator registers a thread, above {fits}" if words > fits else None


def fault(config: Config, problem: MatmulProblem, device: Device) -> str | None:
    """Say why a config of `warpgroups` may not run `problem` whatever its epilogue, None where it may."""
    if device.nvidia != 90:
        return f"{device.name} has no warpgroup instructions of Hopper's kind"
    if (reason := numbers_fault(config, PARAMETERS) or _tile_fault(config)) is not None:
        return reason
    if problem.itemsize > 2 or problem.dtype == "int8":  # Gluon's compiler has no instruction for these
        return f"{problem.dtype} is no floating type of 16 or 8 bits"
    if problem.itemsize == 1 and (problem.a_layout, problem.b_layout) != ("row", "column"):
        return f"a is {problem.a_layout}, b {problem.b_layout}: bytes must lie along K"
    if problem.totals and not problem.promoted and SCALE_K % config["BLOCK_K"]:
        return f"BLOCK_K = {config['BLOCK_K']} does not divide {SCALE_K}"
    if problem.promoted and parsed(device.triton) < (3, 7) and config["BLOCK_N"] not in _RIGHT_ON_3_6:
        return f"with Triton 3.6 promoted sums of 160 columns are NaN; right as tested are {_RIGHT_ON_3_6}"
    if problem.rights > 1:
        return "gated products are made by tile and descriptor"
    reason = reachable(problem) or late_fault(config, problem, device) or _sums_fault(config, problem)
    if reason is None and tiles(config, problem) >= 2**31:
        return "more tiles than a launch counts"
    return reason or shared_fault(shared_bytes(config, problem), device)


@functools.cache
def swizzled(dtype: str) -> Callable[[tuple[int, ...]], Any]:
    """Return the layout in shared memory of a block of this dtype, as a function of the block."""
    gl = import_late("triton.experimental.gluon.language")  # a twentieth of a second
    kind = getattr(gl, _GLUON_DTYPES.get(dtype, dtype))
    return functools.cache(lambda block: gl.NVMMASharedLayout.get_default_for([*block], kind))
