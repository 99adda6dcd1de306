"""Make products of 16 and 8 bits by specialised warps, on Hopper: one of them loads tiles."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final

from tritile.core.call import MatmulCall
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import ITEMSIZE, PROMOTED_EVERY, SCALE_K, MatmulProblem
from tritile.core.threads import import_late
from tritile.core.versions import parsed
from tritile.families.common import products
from tritile.families.common.cost import Program
from tritile.families.common.descriptors import Seen, by_tma, k_major_copies, reachable, repack, tiles
from tritile.families.common.rates import multiply_clocks, slowdown
from tritile.families.common.work import Descriptor, Kernel, Work, step_of
from tritile.families.family import Family
from tritile.families.matmul_tma.family import held, stage_bytes
from tritile.families.numerics import of_product

matmul_warpgroups: Final = Kernel("tritile.families.matmul_wgmma.kernel", "matmul_warpgroups")

NAME: Final = "warpgroups"
PARAMETERS: Final = ("BLOCK_K", "BLOCK_M", "BLOCK_N", "CONSUMERS", "GROUP_M", "PERSISTENT", "SUBTILES")
REGISTERS: Final = {1: 232, 2: 232, 3: 160}  # registers of a consumer's thread, by the number of consumers
_ROWS: Final = (64, 128)  # of a tile, for one consumer
_COLUMNS: Final = (16, 32, 48, 64, 80, 96, 128, 144, 160, 192, 256)
_LARGEST: Final = 256 * 160  # elements of a tile
_RIGHT_ON_3_6: Final = (64, 96, 128, 192)  # columns of tiles whose promoted sums are right with Triton 3.6
_BARRIERS: Final = 512  # bytes of shared memory for barriers and the state of the warps
_GLUON_DTYPES: Final = {"float8_e4m3fn": "float8e4nv", "float8_e5m2": "float8e5"}


def _configs() -> Iterator[Config]:
    for m, n, consumers, k in itertools.product((64, 128, 192, 256), _COLUMNS, (1, 2, 3), (64, 128)):
        rows = m // consumers
        if m % consumers or rows not in _ROWS or m * n > _LARGEST:
            continue
        if rows * n // 128 > REGISTERS[consumers] - 56:
            continue
        for stages, group, persistent in itertools.product((3, 4, 5, 6, 8, 10), (1, 8, 16), (False, True)):
            if (m + n) * k * stages > (2**18 if k == 128 else 2**17):
                continue
            for subtiles in (1, 2) if n >= 128 else (1,):
                kwargs = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "CONSUMERS": consumers, "GROUP_M": group}
                yield Config.of(4, stages, NAME, **kwargs, PERSISTENT=persistent, SUBTILES=subtiles)


def _main_columns(config: Config) -> int:
    """Return the largest power of two in BLOCK_N: the columns of its first accumulator."""
    return 1 << (config["BLOCK_N"].bit_length() - 1)


def shared_bytes(config: Config, problem: MatmulProblem) -> int:
    main = _main_columns(config)
    stored = config["BLOCK_M"] * (main // config["SUBTILES"] + config["BLOCK_N"] - main)
    staged = stage_bytes(config, problem) * config.num_stages
    return int(staged + stored * ITEMSIZE[problem.out_dtype] + _BARRIERS)


def _config_fault(config: Config) -> str | None:
    free = ("BLOCK_M", "BLOCK_N", "CONSUMERS")
    reason = products.config_fault(config, PARAMETERS, 384, 4, (2, 12), free)
    if reason is not None:
        return reason
    consumers = config["CONSUMERS"]
    if consumers not in REGISTERS or config["BLOCK_M"] not in [rows * consumers for rows in _ROWS]:
        return f"BLOCK_M = {config['BLOCK_M']} is not 64 or 128 rows for each of 1 to 3 consumers"
    if config["BLOCK_N"] not in _COLUMNS:
        return f"BLOCK_N = {config['BLOCK_N']} is none of {_COLUMNS}"
    if config["BLOCK_K"] not in (32, 64, 128) or config["SUBTILES"] > 2:
        return "BLOCK_K must be 32, 64 or 128, SUBTILES 1 or 2"
    return "num_warps must be 4" if config.num_warps != 4 else None


def _most_words(config: Config, problem: MatmulProblem) -> int:
    """Return the registers of a thread that a tile's sums may take.

    A total takes as many again, but is only added to, and needs no other room except for scales. Gelu holds
    steps of many elements at a time: it would spill hundreds of bytes, as compiled, where tiles are stored by
    pointers, and sooner where the epilogue reads a matrix.
    """
    registers, fused = REGISTERS[config["CONSUMERS"]], problem.epilogue
    most = registers - 56
    if problem.totals:
        most = min(most, (registers - 32) // 2)
    if fused.activation == "gelu" and (
        problem.out_align < 16 or problem.n * ITEMSIZE[problem.out_dtype] % 16 != 0
    ):
        reads = "full" in (fused.bias, fused.residual)
        most = min(most, (registers - 40) // 2 if reads else registers * 9 // 16)
    return most


def illegal(config: Config, problem: MatmulProblem, device: Device) -> str | None:
    if device.nvidia != 90:
        return f"{device.name} has no warpgroup instructions of Hopper's kind"
    if (reason := _config_fault(config)) is not None:
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
    words = config["BLOCK_M"] // config["CONSUMERS"] * config["BLOCK_N"] // 128
    shared, most, made = shared_bytes(config, problem), _most_words(config, problem), tiles(config, problem)
    reason = reachable(problem) or products.late_fault(config, problem, device)
    return reason or products.resource_fault(device, shared, words, most, made)


def pointless(config: Config, problem: MatmulProblem, device: Device) -> bool:
    if products.is_disordered(config, problem):
        return True
    if config["PERSISTENT"] and tiles(config, problem) <= device.processors:
        return True
    deeper = shared_bytes(config, problem) + 2 * stage_bytes(config, problem)
    if config.num_stages < 10 and deeper <= device.shared_memory:
        return True  # a pipeline is as deep as shared memory allows, or one stage less
    sides = (("BLOCK_M", 64, problem.m), ("BLOCK_N", 32, problem.n))
    return any(config[name] > least and config[name] >= 2 * size for name, least, size in sides)


def resident(config: Config, problem: MatmulProblem, device: Device) -> int:
    return held(device, shared_bytes(config, problem), 4 * config["CONSUMERS"] + 4)


def cost(config: Config, problem: MatmulProblem, device: Device) -> Program:
    return Program(
        resident(config, problem, device),
        multiply_clocks(config, problem, device) * slowdown(problem, device, k_major_copies(problem)),
        True,
        config["BLOCK_M"] * config["BLOCK_N"] * ITEMSIZE[problem.out_dtype],
    )


@functools.cache
def _swizzled(dtype: str) -> Callable[[tuple[int, ...]], Any]:
    """Return the layout in shared memory of a block of this dtype, as a function of the block."""
    gl = import_late("triton.experimental.gluon.language")  # a twentieth of a second
    kind = getattr(gl, _GLUON_DTYPES.get(dtype, dtype))
    return functools.cache(lambda block: gl.NVMMASharedLayout.get_default_for([*block], kind))


def _tile(seen: Seen | None, dtype: str, rows: int, columns: int) -> Descriptor | None:
    return seen.descriptor(rows, columns, _swizzled(dtype)) if seen and columns else None


def work(call: MatmulCall, config: Config, processors: int, early: bool) -> Work:
    moved, problem = by_tma(call, config, 1, processors, early), call.problem
    consumers, main, depth = config["CONSUMERS"], _main_columns(config), config["BLOCK_K"]
    rows, rest = config["BLOCK_M"] // consumers, config["BLOCK_N"] - main
    promoted = 0  # blocks of K after which sums move from tensor cores to a total in fp32; 0 for never
    if problem.totals:
        promoted = max(1, (PROMOTED_EVERY if problem.promoted else SCALE_K) // depth)
    values = moved.args | {
        "a_desc": _tile(moved.a, call.dtype, rows, depth),
        "b_desc": _tile(moved.b, call.dtype, depth, main),
        "b_rest_desc": _tile(moved.b, call.dtype, depth, rest),
        "out_desc": _tile(moved.out, call.out_dtype, rows, main // config["SUBTILES"]),
        "out_rest_desc": _tile(moved.out, call.out_dtype, rows, rest),
        "MAIN_N": main, "REGISTERS": REGISTERS[consumers], "STAGES": config.num_stages,
        "PROMOTE": promoted, "IN_PARTS": problem.promoted,
    }  # fmt: skip
    step = step_of(
        matmul_warpgroups, moved.grid, values, {"num_warps": config.num_warps, "launch_pdl": early}
    )
    return Work((*moved.steps, step), moved.scratch)


FAMILY: Final = Family(
    MatmulProblem.op, NAME, matmul_warpgroups, _configs, illegal, pointless, cost, work,
    also=(repack,), resident=resident,
    numerics=functools.partial(of_product, specialised=True),
)  # fmt: skip
