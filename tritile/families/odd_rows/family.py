"""Make products of up to 256 rows, or columns, by a matrix of odd rows, on NVIDIA GPUs from Ampere on.

The few rows are x, the other operand is w, contiguous along K, whose rows begin inside 16-byte words.
Other kernels copy w into rows that do not. Here w is read once, as it lies, by asynchronous copies of whole
words, and x is copied instead: once for each place in a word at which rows of w begin.
"""

import itertools
from collections.abc import Iterator
from typing import Final

from tritile.core.call import MatmulCall
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import MatmulProblem
from tritile.families.common.grids import POLLS, options
from tritile.families.common.products import config_fault, programs_per_sm, resource_fault, warpgroup_mma
from tritile.families.common.skinny import Sides, arguments, fault, periodic_tiles, sides_of
from tritile.families.common.work import epilogue_arguments
from tritile.families.family import Family
from tritile.families.numerics import Numerics
from tritile.runtime.work import COUNTERS, Buffer, Kernel, Work, Workspace, step_of

copy_shifted: Final = Kernel("tritile.families.odd_rows.kernel", "copy_shifted")
odd_rows: Final = Kernel("tritile.families.odd_rows.kernel", "odd_rows")

NAME: Final = "odd_rows"
PARAMETERS: Final = ("BLOCK_K", "BLOCK_M", "BLOCK_N", "SPLIT_K")
MOST_ROWS: Final = 256
_WORD: Final = 8  # elements
_ROW: Final = 256  # elements: rows of the copies are padded to a multiple
_COPIED: Final = 2048  # elements of x that a program copies: with 256 starting programs takes the time
_ROWS_AT_ONCE: Final = 32  # rows of x that a program copies if these, and not K, are contiguous
# BLOCK_N, BLOCK_K, warps and stages, for BLOCK_M up to 128 and for 256.
_TILES: Final = (
    *itertools.product((16, 32, 64, 128), ((32, 128, 4, 5), (64, 64, 4, 5), (64, 128, 4, 4))),
    *itertools.product((256,), ((64, 64, 8, 5), (128, 64, 8, 4))),
)


class Fit:
    """Hold the formula's constants, in clocks and in what one SM does in a clock, unless said otherwise.

    Fitted to times of an H100: `tuning/NOTES.md` says how well.
    """

    start_us = 3.4  # to copy x, and to start and to end the product
    split_us = 2.0  # to sum what programs share
    latency = 2620.0  # from requesting a tile to having it
    bytes = 35.9  # of the L2 cache
    products = 1070.0  # of tensor cores
    copied = 1.78  # elements of the copies
    stored = 0.83  # elements of the result where they lie apart
    stored_rows = 1.03  # elements of a result that is transposed: they lie in rows


def _configs() -> Iterator[Config]:
    for (block_m, (block_n, block_k, warps, stages)), split in itertools.product(_TILES, (1, 2, 4, 8, 16)):
        blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "SPLIT_K": split}
        yield Config.of(warps, stages, NAME, **blocks)


def _is_transposed(problem: MatmulProblem) -> bool:
    return problem.n < problem.m


def _sides(problem: MatmulProblem) -> Sides:
    return sides_of(problem, _is_transposed(problem))


def shared_bytes(config: Config, problem: MatmulProblem, device: Device) -> int:
    tile = (config["BLOCK_N"] + config["BLOCK_M"]) * config["BLOCK_K"] * problem.itemsize
    return int(tile * max(1, config.num_stages - (not warpgroup_mma(config, problem, device))))


def tile_counts(config: Config, problem: MatmulProblem) -> tuple[int, int]:
    count = periodic_tiles(config, _sides(problem))
    return (count, 1) if _is_transposed(problem) else (1, count)


def tile_of(config: Config, problem: MatmulProblem) -> tuple[int, int]:
    rows, columns = config["BLOCK_M"], config["BLOCK_N"]
    return (columns, rows) if _is_transposed(problem) else (rows, columns)


def illegal(config: Config, problem: MatmulProblem, device: Device) -> str | None:
    seen = _sides(problem)
    if problem.batch > 1:
        return "matrices of a batch begin at places of their own"
    if seen.along == "k" and seen.period == 1:
        return "rows of the larger operand are whole words"
    reason = config_fault(config, PARAMETERS) or fault(
        config, problem, device, seen, "k", MOST_ROWS, ("float16", "bfloat16"), 16
    )
    if reason is not None:
        return reason
    if config["BLOCK_N"] < 16 or config["BLOCK_K"] < 16:
        return "a tile of tensor cores has 16 columns at least, and 16 of K"
    split, programs = config["SPLIT_K"], periodic_tiles(config, seen) * config["SPLIT_K"]
    if split > max(1, -(-problem.k // config["BLOCK_K"]) // 2):
        return f"SPLIT_K = {split} leaves programs with less than two blocks of K"
    if split > 1 and programs > device.processors * resident(config, problem, device):
        return f"{programs} programs: some would wait for others that cannot start"
    words, fused = config["BLOCK_M"] * config["BLOCK_N"] // (32 * config.num_warps), problem.epilogue
    most = 64 if fused.activation == "gelu" or "full" in (fused.bias, fused.residual) else 128  # more spill
    return resource_fault(device, shared_bytes(config, problem, device), words, most)


def is_dominated(config: Config, problem: MatmulProblem, device: Device) -> bool:
    return bool(config["BLOCK_N"] >= 2 * max(_sides(problem).columns, 32))


def contends(problem: MatmulProblem) -> bool:
    return min(problem.m, problem.n) <= MOST_ROWS


def resident(config: Config, problem: MatmulProblem, device: Device) -> int:
    threads = 32 * config.num_warps
    registers = min(255, 80 + config["BLOCK_M"] * config["BLOCK_N"] // threads)
    return programs_per_sm(device, threads, registers, shared_bytes(config, problem, device), 32)


def cost(config: Config, problem: MatmulProblem, device: Device) -> float:
    seen, split = _sides(problem), config["SPLIT_K"]
    programs = periodic_tiles(config, seen) * split
    busiest = -(-programs // device.processors)  # programs of the busiest SM
    together = min(busiest, resident(config, problem, device))
    iterations = -(-problem.k // config["BLOCK_K"] // split)
    tile = (min(config["BLOCK_M"], seen.rows) + config["BLOCK_N"]) * config["BLOCK_K"] * problem.itemsize
    waited = Fit.latency / max(1, config.num_stages - 1)
    products = config["BLOCK_M"] * config["BLOCK_N"] * config["BLOCK_K"]
    iteration = max(waited, together * max(tile / Fit.bytes, products / Fit.products))
    clocks = -(-busiest // together) * iterations * iteration
    clocks += copied(problem)[0] / (Fit.copied * device.processors)
    stored = Fit.stored_rows if _is_transposed(problem) else Fit.stored
    clocks += problem.m * problem.n / (stored * device.processors)
    moved_us = problem.bytes / (device.memory_gbps * 1e3)
    compute_us = clocks / (device.clock_ghz * 1e3)
    return Fit.start_us + Fit.split_us * (split > 1) + (compute_us**2 + moved_us**2) ** 0.5


def copied(problem: MatmulProblem) -> tuple[int, int]:
    """Return the elements that the copies of x read, and those that they write."""
    seen = _sides(problem)
    return seen.period * seen.rows * problem.k, seen.period * seen.rows * -(-problem.k // _ROW) * _ROW


def numerics(config: Config, problem: MatmulProblem, device: Device) -> Numerics:
    """Return what decides the bits of an element: never what other families have.

    Tensor cores add words in an order that depends on where w begins.
    """
    return Numerics("mma by words", config["SPLIT_K"], config["BLOCK_K"])


def work(call: MatmulCall, config: Config, processors: int, early: bool) -> Work:
    seen, split = _sides(call.problem), config["SPLIT_K"]
    tiles = periodic_tiles(config, seen)
    call = call.transposed if _is_transposed(call.problem) else call
    values = arguments(call, config, early)
    m, n, row = values["M"], values["N"], -(-values["K"] // _ROW) * _ROW
    rows = _ROWS_AT_ONCE if call.a.strides[0] == 1 and m > 1 else 1
    scratch = {"copies": Workspace(call.dtype, copied(call.problem)[1])}
    values |= {
        "copies_ptr": Buffer("copies"), "stride_w": values["stride_w"] if n > 1 else 0, "stride_cm": row,
        "parts_ptr": None, "counters_ptr": None, "POLLS": 0, **epilogue_arguments(call, 2),
        "PERIOD": seen.period, "WORD": _WORD, "ROW": _ROW, "ROWS": rows, "BLOCK": _COPIED // rows,
    }  # fmt: skip
    if split > 1:
        scratch["parts"] = Workspace("float32", tiles * split * config["BLOCK_M"] * config["BLOCK_N"])
        values |= {"parts_ptr": Buffer("parts"), "counters_ptr": Buffer(COUNTERS), "POLLS": POLLS}
    laid = {"num_warps": 8, "num_stages": 1, "launch_pdl": early}
    grid = (-(-row * rows // _COPIED), -(-m // rows), seen.period)
    copies = step_of(copy_shifted, grid, values, laid)
    product = step_of(odd_rows, (tiles, split, 1), values, options(config, launch_pdl=early))
    return Work((copies, product), scratch, tiles if split > 1 else 0)


FAMILY: Final = Family(
    MatmulProblem.op, NAME, odd_rows, _configs, illegal, is_dominated, cost, work,
    also=(copy_shifted,), resident=resident, numerics=numerics, contends=contends,
    margin=1.2,  # its formula errs by 12% (standard deviation) at its picks, and is 6% too low
)  # fmt: skip
