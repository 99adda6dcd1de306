"""Make products of 16 and 8 bits by specialised warps, on Hopper."""

import functools
import itertools
from collections.abc import Iterator
from typing import Final

from tritile.core.call import MatmulCall
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import ITEMSIZE, MatmulProblem
from tritile.families.common.blocks import order_fault
from tritile.families.common.cost import Program
from tritile.families.common.descriptors import arguments, grid_of, output_of
from tritile.families.common.numerics import of_product
from tritile.families.common.operands import Seen, inputs, repack, tiles, turned
from tritile.families.common.products import held_with_tma, in_parts, promoted_turns
from tritile.families.common.rates import multiply_clocks, turning
from tritile.families.common.warpgroups import (
    COLUMNS,
    NAME,
    REGISTERS,
    ROWS,
    epilogue_fault,
    fault,
    main_columns,
    shared_bytes,
    swizzled,
)
from tritile.families.common.work import Descriptor, Kernel, Work, step_of
from tritile.families.family import Family

matmul_warpgroups: Final = Kernel("tritile.families.matmul_wgmma.kernel", "matmul_warpgroups")

_LARGEST: Final = 256 * 160  # elements of a tile


def _configs() -> Iterator[Config]:
    for m, n, consumers, k in itertools.product((64, 128, 192, 256), COLUMNS, (1, 2, 3), (64, 128)):
        rows = m // consumers
        if m % consumers or rows not in ROWS or m * n > _LARGEST:
            continue
        if rows * n // 128 > REGISTERS[consumers] - 56:
            continue
        for stages, group, persistent in itertools.product((3, 4, 5, 6, 8, 10), (1, 8, 16), (False, True)):
            if (m + n) * k * stages > (2**18 if k == 128 else 2**17):
                continue
            for subtiles in (1, 2) if n >= 128 else (1,):
                kwargs = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "CONSUMERS": consumers, "GROUP_M": group}
                yield Config.of(4, stages, NAME, **kwargs, PERSISTENT=persistent, SUBTILES=subtiles)


def illegal(config: Config, problem: MatmulProblem, device: Device) -> str | None:
    return fault(config, problem, device) or epilogue_fault(config, problem)


def pointless(config: Config, problem: MatmulProblem, device: Device) -> bool:
    if order_fault(config, problem):
        return True
    if config["PERSISTENT"] and tiles(config, problem) <= device.processors:
        return True
    if config.num_stages < 10:
        stage = (config["BLOCK_M"] + config["BLOCK_N"]) * config["BLOCK_K"] * problem.itemsize
        if shared_bytes(config, problem) + 2 * stage <= device.shared_memory:
            return True  # a pipeline is as deep as shared memory allows, or one stage less
    sides = (("BLOCK_M", 64, problem.m), ("BLOCK_N", 32, problem.n))
    return any(config[name] > least and config[name] >= 2 * size for name, least, size in sides)


def resident(config: Config, problem: MatmulProblem, device: Device) -> int:
    return held_with_tma(device, shared_bytes(config, problem), 4 * config["CONSUMERS"] + 4)


def cost(config: Config, problem: MatmulProblem, device: Device) -> Program:
    return Program(
        resident(config, problem, device),
        multiply_clocks(config, problem, device) * turning(problem, device, turned(problem)),
        True,
        config["BLOCK_M"] * config["BLOCK_N"] * ITEMSIZE[problem.out_dtype],
    )


def _tile(seen: Seen | None, dtype: str, rows: int, columns: int) -> Descriptor | None:
    return seen.descriptor(rows, columns, swizzled(dtype)) if seen and rows and columns else None


def work(call: MatmulCall, config: Config, processors: int, early: bool) -> Work:
    read, out = inputs(call, early), output_of(call)
    consumers, main, depth = config["CONSUMERS"], main_columns(config), config["BLOCK_K"]
    rows, rest = config["BLOCK_M"] // consumers, config["BLOCK_N"] - main
    stored = out.seen if out.by_descriptor else None
    grid, flat = grid_of(call, config, 1, processors)
    values = arguments(call, config, read, out, early) | {
        "a_desc": _tile(read.a, call.dtype, rows, depth),
        "b_desc": _tile(read.b, call.dtype, depth, main),
        "b_rest_desc": _tile(read.b, call.dtype, depth, rest),
        "out_desc": _tile(stored, call.out_dtype, rows, main // config["SUBTILES"]),
        "out_rest_desc": _tile(stored, call.out_dtype, rows, rest),
        "MAIN_N": main, "REGISTERS": REGISTERS[consumers], "STAGES": config.num_stages, "FLAT": flat,
        "PROMOTE": promoted_turns(call, config), "IN_PARTS": in_parts(call),
    }  # fmt: skip
    step = step_of(matmul_warpgroups, grid, values, {"num_warps": config.num_warps, "launch_pdl": early})
    return Work((*read.steps, step), read.scratch)


FAMILY: Final = Family(
    MatmulProblem.op, NAME, matmul_warpgroups, _configs, illegal, pointless, cost, work,
    also=(repack,), resident=resident,
    numerics=functools.partial(of_product, specialised=True),
)  # fmt: skip
