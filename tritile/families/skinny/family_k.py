"""Make skinny products, of one to eight rows or columns, without tensor cores, on NVIDIA GPUs from Ampere on.

The few rows are x, the other operand is w, contiguous along K: it is read once, as it lies, and bounds the
time. A product of few columns is made as out.T = b.T @ a.T.
"""

from collections.abc import Iterator
from math import hypot
from typing import Final

from tritile.core.call import MatmulCall
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import MatmulProblem
from tritile.families.common import skinny
from tritile.families.common.grids import grid, options
from tritile.families.common.products import config_fault, programs_per_sm, resource_fault
from tritile.families.family import Family
from tritile.families.numerics import Numerics
from tritile.runtime.work import Kernel, Work, step_of

skinny_k: Final = Kernel("tritile.families.skinny.kernel_k", "skinny_k")

NAME: Final = "skinny_k"
PARAMETERS: Final = ("BLOCK_K", "BLOCK_M", "BLOCK_N")
_WORDS: Final = (4, 8)  # that a thread multiplies in a K iteration
_MOST_SUMS: Final = 32  # of a thread
# BLOCK_N, bytes of BLOCK_K, warps, stages and the largest BLOCK_M.
_TILES: Final = (
    (4, 2048, 4, 5, 4),
    (8, 1024, 2, 4, 4),
    (16, 512, 4, 4, 8),
    (16, 1024, 4, 1, 2),
    (32, 256, 2, 5, 4),
)


class Fit:
    """Hold the formula's constants, in clocks unless said otherwise.

    Fitted to times of an H200: `tuning/NOTES.md` says how well.
    """

    start_us = 1.9
    latency = 740.0  # from requesting a tile to having it
    program = 510.0  # to start a program, and to sum over its threads
    element = 2.9  # instructions for an element of w
    multiply = 2.0  # for each row of x
    load = 17.5  # for an element of x, if it is not in words; half as many if it is
    fp32 = 0.65  # share by which instructions are more in fp32


def _configs() -> Iterator[Config]:
    for itemsize in (2, 4):
        for block_n, row_bytes, warps, stages, most in _TILES:
            for block_m in (m for m in (1, 2, 4, 8) if m <= most):
                blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": row_bytes // itemsize}
                yield Config.of(warps, stages, NAME, **blocks)


def _words(config: Config, problem: MatmulProblem) -> float:
    """Return the words of a tile of w that a thread has."""
    size = config["BLOCK_N"] * config["BLOCK_K"] * problem.itemsize
    return float(size / (skinny.WORD * 32 * config.num_warps))


def shared_bytes(config: Config, problem: MatmulProblem) -> int:
    tile = (config["BLOCK_N"] + config["BLOCK_M"]) * config["BLOCK_K"] * problem.itemsize
    return int(tile * (config.num_stages - 1))


def illegal(config: Config, problem: MatmulProblem, device: Device) -> str | None:
    reason = config_fault(config, PARAMETERS, 2048) or skinny.fault(
        config, problem, device, skinny.sides(problem), "k"
    )
    if reason is not None:
        return reason
    word, words = skinny.WORD // problem.itemsize, _words(config, problem)
    if words not in _WORDS:
        return f"a thread has {words:g} words of a tile, not {_WORDS}"
    if words * config["BLOCK_M"] > _MOST_SUMS:
        return f"a thread sums more than {_MOST_SUMS} products"
    if config["BLOCK_K"] < 2 * word * word:
        return f"BLOCK_K = {config['BLOCK_K']} is below {2 * word * word}"
    programs = problem.batch * skinny.periodic_tiles(config, skinny.sides(problem))
    return resource_fault(device, shared_bytes(config, problem), programs=programs)


def is_dominated(config: Config, problem: MatmulProblem, device: Device) -> bool:
    tile = config["BLOCK_N"], config["BLOCK_K"] * problem.itemsize, config.num_warps, config.num_stages
    if tile not in [each[:4] for each in _TILES]:
        return True
    return bool(config["BLOCK_N"] >= 2 * max(skinny.sides(problem).columns, 8))


def resident(config: Config, problem: MatmulProblem, device: Device) -> int:
    sums = config["BLOCK_M"] * _words(config, problem) * (2 if problem.dtype == "float32" else 1)
    return programs_per_sm(
        device, 32 * config.num_warps, min(255, 64 + sums), shared_bytes(config, problem), 32
    )


def cost(config: Config, problem: MatmulProblem, device: Device) -> float:
    seen = skinny.sides(problem)
    programs = problem.batch * skinny.periodic_tiles(config, seen)
    busiest = -(-programs // device.processors)  # programs of the busiest SM
    slots = resident(config, problem, device)
    iterations = -(-problem.k // config["BLOCK_K"])
    block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
    lanes = min(skinny.LANES, min(slots, busiest) * config.num_warps * 32)
    element = Fit.element + Fit.multiply * block_m + Fit.load * block_m / block_n / (1 + seen.whole)
    element *= 1 + Fit.fp32 * (problem.dtype == "float32")
    issue = busiest * (iterations * block_n * config["BLOCK_K"] * element / lanes + Fit.program)
    # If x is not read in words, its elements are requested but one iteration ahead.
    waits = 1 / max(1, config.num_stages - 1) + (not seen.whole)
    wait = -(-busiest // slots) * iterations * waits * Fit.latency
    clocks = device.clock_ghz * 1e3
    return Fit.start_us + hypot(issue / clocks, wait / clocks, problem.bytes / (device.memory_gbps * 1e3))


def numerics(config: Config, problem: MatmulProblem, device: Device) -> Numerics:
    """Return what decides the bits of an element: never what other families have.

    Threads sum words of their own, and which these are depends on where w begins.
    """
    return Numerics("fma by words", 1, config["BLOCK_K"])


def work(call: MatmulCall, config: Config, processors: int, early: bool) -> Work:
    seen = skinny.sides(call.problem)
    tiles = skinny.periodic_tiles(config, seen)
    call = call.transposed if skinny.is_transposed(call.problem) else call
    values = skinny.arguments(call, config, early)
    values["X_WORDS"] &= seen.whole
    values |= {"PERIOD": seen.period, "EDGES": not seen.whole, "WORD": skinny.WORD // call.a.itemsize}
    return Work((step_of(skinny_k, grid(tiles, values["batch"]), values, options(config, launch_pdl=early)),))


FAMILY: Final = Family(
    MatmulProblem.op, NAME, skinny_k, _configs, illegal, is_dominated, cost, work,
    resident=resident, numerics=numerics, contends=skinny.contends,
    margin=1.1,  # its formula errs by 11% (standard deviation) at its picks
)  # fmt: skip
