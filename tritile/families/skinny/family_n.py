"""Make skinny products without tensor cores, by a matrix contiguous along N.

As `family_k`, for the other layout of w: it is read once, as wide as its rows are aligned. Programs share
K, so that the GPU is full: each leaves the sums of its part, and a second kernel adds the parts up in order.
"""

import itertools
from collections.abc import Iterator
from math import hypot
from typing import Final, NamedTuple

from tritile.core.call import MatmulCall
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import MatmulProblem
from tritile.families.common import skinny
from tritile.families.common.grids import grid, options, unit
from tritile.families.common.products import config_fault, resource_fault
from tritile.families.family import Family
from tritile.families.numerics import Numerics
from tritile.runtime.work import Buffer, Kernel, Work, Workspace, step_of

skinny_n: Final = Kernel("tritile.families.skinny.kernel_n", "skinny_n")
sum_parts: Final = Kernel("tritile.families.skinny.kernel_n", "sum_parts")

NAME: Final = "skinny_n"
PARAMETERS: Final = ("BLOCK_K", "BLOCK_M", "BLOCK_N")
_UNROLLS: Final = (2, 4, 8)  # rows of w that a thread multiplies in a K iteration; of x at most a word
_MOST: Final = 32  # sums of a thread, and elements of x that it multiplies in a K iteration
_LEAST: Final = 2  # K iterations of a part
# What a program of the second kernel adds up: parts at once, and columns.
_PARTS: Final = 64
_COLUMNS: Final = 32
_SUM_WARPS: Final = 4
# BLOCK_N, warps, rows of w that a thread multiplies in a K iteration.
_TILES: Final = ((64, 4, 4), (128, 4, 4), (512, 4, 4))


class Fit:
    """Hold the formula's constants, in clocks unless said otherwise.

    Fitted to times of an H100: `tuning/NOTES.md` says how well.
    """

    start_us = 3.13
    latency = 1440.0  # from requesting the elements of a K iteration to having them
    program = 921.0  # to start a program, and to sum over its threads
    element = 4.37  # instructions for an element of w
    load = 0.205  # for each of its loads
    multiply = 3.63  # for each row of x
    x = 1.02  # for an element of x that a thread loads; three times as many if it is not in words
    fp32 = 0.248  # share by which instructions are more in fp32
    sum_us = 0.927  # to start the second kernel
    reads = 992.0  # for it to have the parts that are under way at once
    l2_bytes = 10.7  # of parts that an SM moves in a clock


def _configs() -> Iterator[Config]:
    found = dict[Config, None]()
    for itemsize, block_m, (block_n, warps, unroll) in itertools.product((2, 4), (1, 2, 4, 8), _TILES):
        if unroll * block_m <= _MOST and unroll * itemsize <= skinny.WORD:
            own = min(skinny.WORD // itemsize, _MOST // block_m)
            blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": 32 * warps * own * unroll // block_n}
            found[Config.of(warps, 1, NAME, **blocks)] = None
    yield from found


class Shape(NamedTuple):
    """Hold how threads share a tile.

    A thread multiplies `own` columns of `unroll` rows of w in a K iteration, `wide` of them in a load.
    """

    own: int
    unroll: int
    wide: int


def _shape(config: Config, problem: MatmulProblem) -> Shape:
    seen, itemsize = skinny.sides(problem), problem.itemsize
    own = min(skinny.WORD // itemsize, _MOST // config["BLOCK_M"])
    unroll = config["BLOCK_N"] * config["BLOCK_K"] // (32 * config.num_warps * own)
    return Shape(own, unroll, min(own, max(1, seen.align // itemsize), unit(seen.columns, itemsize)))


def illegal(config: Config, problem: MatmulProblem, device: Device) -> str | None:
    reason = config_fault(config, PARAMETERS, 1024) or skinny.fault(
        config, problem, device, skinny.sides(problem), "n"
    )
    if reason is not None:
        return reason
    own, unroll, _ = _shape(config, problem)
    if not own <= config["BLOCK_N"] <= 32 * config.num_warps * own:
        return f"BLOCK_N = {config['BLOCK_N']} is not {own} to {32 * config.num_warps * own}"
    if unroll not in _UNROLLS or unroll * problem.itemsize > skinny.WORD:
        return f"a thread has {unroll} rows of w, not one of {_UNROLLS}, up to a word of {problem.dtype}"
    if unroll * config["BLOCK_M"] > _MOST:
        return f"a thread has {unroll} elements of {config['BLOCK_M']} rows of x"
    programs = _tiles(config, problem) * parts(config, problem, device.processors)
    return resource_fault(device, programs=programs)


def is_dominated(config: Config, problem: MatmulProblem, device: Device) -> bool:
    if (config["BLOCK_N"], config.num_warps, _shape(config, problem).unroll) not in _TILES:
        return True
    return bool(config["BLOCK_N"] >= 2 * max(skinny.sides(problem).columns, _TILES[0][0]))


def resident(config: Config, problem: MatmulProblem, device: Device | None = None) -> int:
    """Return how many programs the registers and threads of an SM hold at once."""
    own, unroll, wide = _shape(config, problem)
    loaded = unroll * own * max(1, wide * problem.itemsize // 4) // wide
    sums = config["BLOCK_M"] * own * (1 + (problem.dtype == "float32"))
    x = unroll * config["BLOCK_M"] * (1 if skinny.sides(problem).x_words else 4)  # with pointers to each
    registers = 24 + loaded + x + sums * (1 + (config["BLOCK_M"] > 1)) + 16 * (unroll > 4)
    threads = 32 * config.num_warps
    return max(1, min(65536 // (threads * min(registers, 255)), 1024 // threads))


def _tiles(config: Config, problem: MatmulProblem) -> int:
    return int(problem.batch * -(-skinny.sides(problem).columns // config["BLOCK_N"]))


def parts(config: Config, problem: MatmulProblem, processors: int) -> int:
    blocks = -(-problem.k // config["BLOCK_K"])
    most = resident(config, problem) * processors // _tiles(config, problem)
    split = max(1, min(most, blocks // _LEAST))
    return -(-blocks // -(-blocks // split))


def cost(config: Config, problem: MatmulProblem, device: Device) -> float:
    (own, _, wide), seen = _shape(config, problem), skinny.sides(problem)
    split, tiles = parts(config, problem, device.processors), _tiles(config, problem)
    busiest = -(-tiles * split // device.processors)  # programs of the busiest SM
    slots = resident(config, problem)
    iterations = -(-problem.k // config["BLOCK_K"] // split)
    block_m, block = config["BLOCK_M"], config["BLOCK_N"] * config["BLOCK_K"]
    lanes = min(skinny.LANES, min(slots, busiest) * config.num_warps * 32)
    x = Fit.x * (1 if seen.x_words else 3) * block_m / own
    element = Fit.element + Fit.load / wide + Fit.multiply * block_m + x
    element *= 1 + Fit.fp32 * (problem.dtype == "float32")
    issue = busiest * (iterations * block * element / lanes + Fit.program)
    wait = -(-busiest // slots) * iterations * Fit.latency
    clocks = device.clock_ghz * 1e3
    us = Fit.start_us + hypot(issue / clocks, wait / clocks, problem.bytes / (device.memory_gbps * 1e3))
    if split == 1:
        return us
    programs = problem.batch * seen.rows * -(-seen.columns // _COLUMNS)  # of the second kernel
    waits = -(-split // _PARTS) * -(-programs // (8 * device.processors))
    moved = 8 * split * problem.batch * seen.rows * seen.columns / device.processors
    return us + (Fit.sum_us + (waits * Fit.reads + moved / Fit.l2_bytes) / clocks)


def numerics(config: Config, problem: MatmulProblem, device: Device) -> Numerics:
    """Return numerics that are never canonical: sizes and SMs decide which parts of K are summed apart."""
    return Numerics("fma by words", 0, config["BLOCK_K"])


def work(call: MatmulCall, config: Config, processors: int, early: bool) -> Work:
    shape, split = _shape(config, call.problem), parts(config, call.problem, processors)
    call = call.transposed if skinny.is_transposed(call.problem) else call
    values = skinny.arguments(call, config, early)
    m, n, k, batch, xk = (values[name] for name in ("M", "N", "K", "batch", "stride_xk"))
    tiles = -(-n // config["BLOCK_N"])
    across = tiles * config["BLOCK_N"]
    values |= {
        "stride_xk": xk if k > 1 else 0, "stride_w": call.b.strides[0] if k > 1 else 0,
        "parts_ptr": Buffer("parts") if split > 1 else None, "split": split, "across": across,
        "WIDE": shape.wide, "X_WORDS": values["X_WORDS"] and k > 1, "OWN": shape.own, "UNROLL": shape.unroll,
        "PARTS": _PARTS, "COLUMNS": _COLUMNS,
    }  # fmt: skip
    kept = values if split == 1 else values | {"extra": None, "EPILOGUE": None}
    how = options(config, launch_pdl=early)
    made = step_of(skinny_n, grid(tiles * split, batch), kept, how)
    if split == 1:
        return Work((made,))
    added = step_of(sum_parts, grid(-(-n // _COLUMNS), batch * m), values, how | {"num_warps": _SUM_WARPS})
    return Work((made, added), {"parts": Workspace("float32", split * batch * m * across)}, main=-2)


FAMILY: Final = Family(
    MatmulProblem.op, NAME, skinny_n, _configs, illegal, is_dominated, cost, work,
    also=(sum_parts,), resident=resident, numerics=numerics, contends=skinny.contends,
    margin=1.2,  # its formula errs by 15% (standard deviation) at its picks
)  # fmt: skip
