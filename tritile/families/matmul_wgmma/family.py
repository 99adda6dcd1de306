"""Make products of 16 and 8 bits by specialised warps, on Hopper."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final

from triton.experimental.gluon import language as gl

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import ITEMSIZE, SCALE_K, MatmulProblem, epilogue_of
from tritile.core.views import MatmulCall
from tritile.families.common import tma_time
from tritile.families.common.blocks import late_fault, order_fault
from tritile.families.common.descriptors import arguments, check_sizes, grid_of, output_of
from tritile.families.common.numerics import canonical_product, of_product
from tritile.families.common.operands import inputs, reachable, tiles
from tritile.families.common.repack import repack
from tritile.families.common.sums import in_parts, promoted_turns
from tritile.families.common.tma_time import TMA_FITTED, Programs, TmaFit, tma_us
from tritile.families.common.work import Work, step_of
from tritile.families.family import Family
from tritile.families.matmul_wgmma.kernel import matmul_warpgroups

NAME: Final = "warpgroups"
PARAMETERS: Final = (
    "BLOCK_K", "BLOCK_M", "BLOCK_N", "CONSUMERS", "GROUP_M", "PERSISTENT", "SUBTILES"
)  # fmt: skip
REGISTERS: Final = {1: 232, 2: 232, 3: 160}  # registers of a consumer's thread, by the number of consumers
_BARRIERS: Final = 512  # bytes of shared memory for barriers and the state of the warps
_ROWS: Final = (64, 128)  # of a tile, for one consumer
_COLUMNS: Final = (16, 32, 48, 64, 80, 96, 128, 144, 160, 192, 256)
_LARGEST: Final = 256 * 160  # elements of a tile
_GLUON_DTYPES: Final = {"float8_e4m3fn": gl.float8e4nv, "float8_e5m2": gl.float8e5}


def main_columns(config: Config) -> int:
    """Return the largest power of two in BLOCK_N: the columns of its first accumulator."""
    return 1 << (config["BLOCK_N"].bit_length() - 1)


def shared_bytes(config: Config, problem: MatmulProblem) -> int:
    """Return shared memory that the compiled kernel asks for, in bytes."""
    main = main_columns(config)
    stage = (config["BLOCK_M"] + config["BLOCK_N"]) * config["BLOCK_K"] * problem.itemsize
    stored = config["BLOCK_M"] * (main // config["SUBTILES"] + config["BLOCK_N"] - main)
    return stage * config.num_stages + stored * ITEMSIZE[problem.out_dtype] + _BARRIERS


def _values_fault(config: Config) -> str | None:
    if tuple(name for name, _ in config.kwargs) != PARAMETERS:
        return f"parameters {[name for name, _ in config.kwargs]} are not {list(PARAMETERS)}"
    numbers = [value for name, value in config.kwargs if name != "PERSISTENT"]
    if not all(isinstance(v, int) and not isinstance(v, bool) and 1 <= v <= 384 for v in numbers):
        return f"{config}: blocks are whole numbers from 1"
    if not isinstance(config["PERSISTENT"], bool):
        return f"PERSISTENT = {config['PERSISTENT']!r} is neither True nor False"
    if config["CONSUMERS"] not in REGISTERS or config["BLOCK_M"] not in [
        r * config["CONSUMERS"] for r in _ROWS
    ]:
        return f"BLOCK_M = {config['BLOCK_M']} is not 64 or 128 rows for each of 1 to 3 consumers"
    if config["BLOCK_N"] not in _COLUMNS:
        return f"BLOCK_N = {config['BLOCK_N']} is none of {_COLUMNS}"
    if config["BLOCK_K"] not in (32, 64, 128) or config["SUBTILES"] not in (1, 2):
        return "BLOCK_K must be 32, 64 or 128, SUBTILES 1 or 2"
    if config["GROUP_M"] & (config["GROUP_M"] - 1):
        return f"GROUP_M = {config['GROUP_M']} is not a power of two"
    if config.num_ctas != 1 or config.num_warps != 4 or not 2 <= config.num_stages <= 12:
        return "num_ctas must be 1, num_warps 4, num_stages 2 to 12"
    return None


def _accumulators(config: Config) -> int:
    """Return the registers of a thread that hold sums."""
    return int(config["BLOCK_M"] // config["CONSUMERS"] * config["BLOCK_N"] // 128)


def _sums_fault(config: Config, problem: MatmulProblem) -> str | None:
    """Say that the main loop has too few registers for a tile's sums, None where it has enough.

    A total takes as many again, but is only added to, and needs no room beside it except for scales.
    """
    words, most = _accumulators(config), REGISTERS[config["CONSUMERS"]]
    fits = most - 56
    if problem.totals:
        fits = min(fits, (most - (64 if problem.block_scales else 32)) // 2)
    return f"{words} accumulator registers a thread, above {fits}" if words > fits else None


def epilogue_fault(
    config: Config, problem: MatmulProblem, turned: bool = False, split: bool = False
) -> str | None:
    """Say that an epilogue would spill registers, by hundreds of bytes as compiled; None where it does not.

    Gelu holds steps of many elements at a time. It spills beside many sums where tiles are stored by
    pointers, and beside fewer where it reads a matrix. `turned`: tiles are stored turned over, and spill
    beside a matrix however they are stored. `split`: parts are summed too, by a second epilogue.
    """
    fused, most = epilogue_of(problem.epilogue), REGISTERS[config["CONSUMERS"]]
    gelu, reads = fused.activation == "gelu", "full" in (fused.bias, fused.residual)
    pointers = problem.out_align < 16 or problem.n * ITEMSIZE[problem.out_dtype] % 16 != 0
    words = fits = _accumulators(config)
    if pointers and (gelu or (reads and split)):
        fits = most * 9 // 16
    if gelu and reads and (pointers or turned):
        fits = (most - 40) // 2 if pointers else 96
    return f"{words} accumulator registers a thread, above {fits}" if words > fits else None


def fault(config: Config, problem: MatmulProblem, device: Device) -> str | None:
    """Say why `config` may not run `problem` on `device` whatever its epilogue, None where it may."""
    if device.nvidia != 90:
        return f"{device.name} has no warpgroup instructions of Hopper's kind"
    if problem.itemsize > 2 or problem.dtype == "int8":  # Gluon's compiler has no instruction for these
        return f"{problem.dtype} is no floating type of 16 or 8 bits"
    if problem.itemsize == 1 and (problem.a_layout, problem.b_layout) != ("row", "column"):
        return f"a is {problem.a_layout}, b {problem.b_layout}: bytes must lie along K"
    if problem.totals and not problem.promoted and SCALE_K % config["BLOCK_K"]:
        return f"BLOCK_K = {config['BLOCK_K']} does not divide {SCALE_K}"
    if problem.rights > 1:
        return "gated products are made by tile and descriptor"
    reason = _values_fault(config) or reachable(problem) or late_fault(config, problem, device)
    if reason is not None:
        return reason
    reason = _sums_fault(config, problem)
    if reason is not None:
        return reason
    if tiles(config, problem) >= 2**31:
        return "more tiles than a launch counts"
    shared = shared_bytes(config, problem)
    if shared > device.shared_memory:
        return f"{shared} bytes of shared memory, of {device.shared_memory}"
    return None


def illegal(config: Config, problem: MatmulProblem, device: Device) -> str | None:
    """Say why `config` may not run `problem` on `device`, None where it may."""
    return fault(config, problem, device) or epilogue_fault(config, problem)


def _configs() -> Iterator[Config]:
    shapes = itertools.product((64, 128, 192, 256), _COLUMNS, (1, 2, 3), (64, 128))
    for m, n, consumers, k in shapes:
        rows = m // consumers
        if (
            m % consumers
            or rows not in _ROWS
            or rows * n // 128 > REGISTERS[consumers] - 56
            or m * n > _LARGEST
        ):
            continue
        for stages, group, persistent in itertools.product((3, 4, 5, 6, 8, 10), (1, 8, 16), (False, True)):
            if (m + n) * k * stages > (2**18 if k == 128 else 2**17):
                continue
            for subtiles in (1, 2) if n >= 128 else (1,):
                kwargs = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "CONSUMERS": consumers, "GROUP_M": group}
                yield Config.of(4, stages, NAME, **kwargs, PERSISTENT=persistent, SUBTILES=subtiles)


def pointless(config: Config, problem: MatmulProblem, device: Device) -> bool:
    """Tell whether the config is dominated: another of the family does the same or strictly less work."""
    if order_fault(config, problem):
        return True
    if config["PERSISTENT"] and tiles(config, problem) <= device.processors:
        return True
    stage = (config["BLOCK_M"] + config["BLOCK_N"]) * config["BLOCK_K"] * problem.itemsize
    if config.num_stages < 10 and shared_bytes(config, problem) + 2 * stage <= device.shared_memory:
        return (
            True  # room for two more stages: a pipeline is as deep as shared memory allows, or one stage less
        )
    sides = (("BLOCK_M", 64, problem.m), ("BLOCK_N", 32, problem.n))
    return any(config[name] > least and config[name] >= 2 * size for name, least, size in sides)


def contends(problem: MatmulProblem) -> bool:
    """Tell whether the family can be the fastest: not where `scaled` makes what has scales within K."""
    return not problem.block_scales


def programs(config: Config, problem: MatmulProblem) -> Programs:
    """Return what the time of a config depends on."""
    main, consumers = main_columns(config), config["CONSUMERS"]
    rows, rest = config["BLOCK_M"] // consumers, config["BLOCK_N"] - main
    pieces = ([(rows, main)] + [(rows, rest)] * (rest > 0)) * consumers
    return Programs(pieces, shared_bytes(config, problem), 4 * consumers + 4, consumers, True, 1)


def resident(config: Config, problem: MatmulProblem, device: Device) -> int:
    """Return how many programs of a config an SM holds at once."""
    return tma_time.resident(programs(config, problem), device)


def predicted_us(config: Config, problem: MatmulProblem, device: Device, fit: TmaFit = TMA_FITTED) -> float:
    """Return predicted microseconds of a config."""
    return tma_us(config, problem, device, programs(config, problem), fit)


@functools.cache
def swizzled(dtype: str, second: tuple[int, ...] | None = None) -> Callable[[tuple[int, ...]], Any]:
    """Return the layout in shared memory of a block of this dtype, as a function of the block.

    `second`: where the second program of a cluster has its part of the block; None: there is no cluster.
    """
    kind = _GLUON_DTYPES.get(dtype) or getattr(gl, dtype)
    shared = {} if second is None else {"cga_layout": [[*second]]}
    return functools.cache(lambda block: gl.NVMMASharedLayout.get_default_for([*block], kind, **shared))


def work(call: MatmulCall, config: Config, processors: int, early: bool) -> Work:
    """Return the launches of `call` with a config, on a GPU of so many SMs.

    `early`: kernels use programmatic dependent launch: they start before the kernel ahead is done, and wait
    themselves. Raises TuningError where no descriptor can see the operands.
    """
    check_sizes(call)
    read, out = inputs(call, early), output_of(call)
    consumers, main = config["CONSUMERS"], main_columns(config)
    rows, rest = config["BLOCK_M"] // consumers, config["BLOCK_N"] - main
    grid, flat = grid_of(call, config, 1, processors)
    inward, outward = swizzled(call.dtype), swizzled(call.out_dtype)
    by = out.by_descriptor
    values = arguments(call, config, read, out, early) | {
        "a_desc": read.a.descriptor(rows, config["BLOCK_K"], inward),
        "b_desc": read.b.descriptor(config["BLOCK_K"], main, inward),
        "b_rest_desc": read.b.descriptor(config["BLOCK_K"], rest, inward) if rest else None,
        "out_desc": out.seen.descriptor(rows, main // config["SUBTILES"], outward) if by else None,
        "out_rest_desc": out.seen.descriptor(rows, rest, outward) if by and rest else None,
        "MAIN_N": main, "REGISTERS": REGISTERS[consumers], "STAGES": config.num_stages, "FLAT": flat,
        "PROMOTE": promoted_turns(call, config), "IN_PARTS": in_parts(call),
    }  # fmt: skip
    step = step_of(matmul_warpgroups, grid, values, {"num_warps": config.num_warps, "launch_pdl": early})
    return Work((*read.steps, step), read.scratch)


FAMILY: Final = Family(
    op=MatmulProblem.op,
    name=NAME,
    kernel=matmul_warpgroups,
    also=(repack,),
    space=_configs,
    illegal=illegal,
    pointless=pointless,
    predicted_us=predicted_us,
    resident=resident,
    work=work,
    numerics=functools.partial(of_product, specialised=True),
    canonical=canonical_product,
    contends=contends,
)
