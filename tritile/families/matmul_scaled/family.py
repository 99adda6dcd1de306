"""Make fp8 products with a scale for each 128 of K by specialised warps, on Hopper."""

import functools
import itertools
from collections.abc import Iterator
from typing import Final

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import FP8_DTYPES, ITEMSIZE, SCALE_K, MatmulProblem
from tritile.core.views import MatmulCall
from tritile.families.common import tma_time
from tritile.families.common.blocks import order_fault, shared_fault
from tritile.families.common.descriptors import arguments, grid_of, output_of
from tritile.families.common.numerics import of_product
from tritile.families.common.operands import inputs, reachable, repack, tiles
from tritile.families.common.tma_time import Programs, tma_us
from tritile.families.common.warpgroups import numbers_fault, swizzled
from tritile.families.common.work import Kernel, Work, step_of
from tritile.families.family import Family

matmul_scaled: Final = Kernel("tritile.families.matmul_scaled.kernel", "matmul_scaled")

NAME: Final = "scaled"
PARAMETERS: Final = ("BLOCK_K", "BLOCK_M", "BLOCK_N", "CONSUMERS", "GROUP_M", "PERSISTENT", "PIECE")
REGISTERS: Final = {1: 240, 2: 240, 3: 160}  # registers of a consumer's thread, by the number of consumers
# Rows, columns, consumers, columns of a piece, and stages.
_TILES: Final = (
    (64, 64, 1, 64, 12), (64, 128, 1, 128, 8), (64, 256, 1, 64, 4), (128, 64, 2, 64, 8),
    (128, 128, 2, 128, 5), (128, 192, 2, 64, 4), (192, 128, 3, 128, 4), (256, 128, 2, 64, 3),
    (256, 128, 2, 128, 3),
)  # fmt: skip
_BARRIERS: Final = 512  # bytes of shared memory for barriers and the state of the warps
_ROWS: Final = 64  # of a piece
_PIECES: Final = (64, 128)  # columns of a piece
_SPARE: Final = 16  # registers of a thread for all but sums and scales
# Clocks of a K iteration, fitted to times on an H200.
_WAIT: Final = 220.0  # for sums
_SCALED: Final = 140.0  # to scale 128 x 128 sums
_OWN: Final = 350.0  # the same where each column has scales of its own


def shared_bytes(config: Config, problem: MatmulProblem) -> int:
    stage = (config["BLOCK_M"] + config["BLOCK_N"]) * config["BLOCK_K"]
    stored = config["BLOCK_M"] * config["BLOCK_N"] * ITEMSIZE[problem.out_dtype]
    return int(stage * config.num_stages + stored + _BARRIERS)


def pieces(config: Config) -> int:
    return int(config["BLOCK_M"] // config["CONSUMERS"] // _ROWS * (config["BLOCK_N"] // config["PIECE"]))


def _own(problem: MatmulProblem) -> bool:
    return not problem.block_scales.endswith("x128")


def _words(config: Config, problem: MatmulProblem, sums: int) -> int:
    """Return registers of a thread for totals, for scales, and for the sums of so many pieces."""
    rows, piece = config["BLOCK_M"] // config["CONSUMERS"], config["PIECE"]
    each = piece // 2 + _own(problem) * piece // 4
    return int(rows * config["BLOCK_N"] // 128 + sums * each + rows // 16)


def ahead(config: Config, problem: MatmulProblem) -> bool:
    """Tell whether a consumer has registers to sum a piece while it scales another."""
    return _words(config, problem, 2) <= REGISTERS[config["CONSUMERS"]] - _SPARE


def _values_fault(config: Config) -> str | None:
    reason = numbers_fault(config, PARAMETERS)
    if reason is not None:
        return reason
    if config["CONSUMERS"] not in REGISTERS or config["BLOCK_M"] % (_ROWS * config["CONSUMERS"]):
        return f"BLOCK_M = {config['BLOCK_M']} is no multiple of 64 rows for each of 1 to 3 consumers"
    if config["PIECE"] not in _PIECES or config["BLOCK_N"] % config["PIECE"]:
        return f"PIECE = {config['PIECE']} is none of {_PIECES}, or does not divide BLOCK_N"
    if config["BLOCK_K"] != SCALE_K:
        return f"BLOCK_K must be {SCALE_K}"
    return None


def illegal(config: Config, problem: MatmulProblem, device: Device) -> str | None:
    if device.nvidia != 90:
        return f"{device.name} has no warpgroup instructions of Hopper's kind"
    if not problem.block_scales or problem.dtype not in FP8_DTYPES:
        return f"no product of fp8 with scales for each {SCALE_K} of K"
    if (problem.a_layout, problem.b_layout) != ("row", "column"):
        return f"a is {problem.a_layout}, b {problem.b_layout}: bytes must lie along K"
    reason = _values_fault(config) or reachable(problem)
    if reason is not None:
        return reason
    words = _words(config, problem, 1)
    if words > REGISTERS[config["CONSUMERS"]] - _SPARE:
        return f"{words} registers a thread for sums and scales, of {REGISTERS[config['CONSUMERS']]}"
    if tiles(config, problem) >= 2**31:
        return "more tiles than a launch counts"
    return shared_fault(shared_bytes(config, problem), device)


def _configs() -> Iterator[Config]:
    for m, n, consumers, piece, stages in _TILES:
        kwargs = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": SCALE_K, "CONSUMERS": consumers, "PIECE": piece}
        for group, persistent in itertools.product((1, 8), (False, True)):
            yield Config.of(4, stages, NAME, **kwargs, GROUP_M=group, PERSISTENT=persistent)


def pointless(config: Config, problem: MatmulProblem, device: Device) -> bool:
    if order_fault(config, problem):
        return True
    if config["PERSISTENT"] and tiles(config, problem) <= device.processors:
        return True
    sides = (("BLOCK_M", problem.m), ("BLOCK_N", problem.n))
    return any(config[name] > 64 and config[name] >= 2 * size for name, size in sides)


def _added(config: Config, problem: MatmulProblem) -> float:
    count, area = pieces(config), config["BLOCK_M"] * config["BLOCK_N"] / 2**14
    if _own(problem):
        return _WAIT * count + _OWN * area
    return _WAIT / (1 + (ahead(config, problem) and count == 1)) + _SCALED * area


def programs(config: Config, problem: MatmulProblem) -> Programs:
    consumers, added = config["CONSUMERS"], _added(config, problem)
    made = [(_ROWS, config["PIECE"])] * (pieces(config) * consumers)
    return Programs(made, shared_bytes(config, problem), 4 * consumers + 4, consumers, True, 1, added)


def resident(config: Config, problem: MatmulProblem, device: Device) -> int:
    return tma_time.resident(programs(config, problem), device)


def predicted_us(config: Config, problem: MatmulProblem, device: Device) -> float:
    return tma_us(config, problem, device, programs(config, problem))


def work(call: MatmulCall, config: Config, processors: int, early: bool) -> Work:
    read, out = inputs(call, early), output_of(call)
    grid, flat = grid_of(call, config, 1, processors)
    inward, outward = swizzled(call.dtype), swizzled(call.out_dtype)
    piece = config["PIECE"]
    values = arguments(call, config, read, out, early) | {
        "a_desc": read.a.descriptor(_ROWS, config["BLOCK_K"], inward),
        "b_desc": read.b.descriptor(config["BLOCK_K"], piece, inward),
        "out_desc": out.seen.descriptor(_ROWS, piece, outward) if out.by_descriptor else None,
        "REGISTERS": REGISTERS[config["CONSUMERS"]], "STAGES": config.num_stages, "FLAT": flat,
        "AHEAD": ahead(config, call.problem),
    }  # fmt: skip
    step = step_of(matmul_scaled, grid, values, {"num_warps": config.num_warps, "launch_pdl": early})
    return Work((*read.steps, step), read.scratch)


FAMILY: Final = Family(
    MatmulProblem.op, NAME, matmul_scaled, _configs, illegal, pointless, predicted_us, work,
    also=(repack,), resident=resident, numerics=functools.partial(of_product, specialised=True),
)  # fmt: skip
