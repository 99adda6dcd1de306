"""Make products with packed weights, unpacked in registers: a program makes a tile, or a part of its sum.

x comes through pointers, or by tensor descriptor (TMA).
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from tritile.core.call import QuantizedCall
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import Epilogue, QuantizedProblem, unit_columns, unpacked_row
from tritile.errors import TuningError
from tritile.families.common.blocks import blocks_fault, shared_fault
from tritile.families.common.cost import Facts, Program
from tritile.families.common.descriptors import BARRIER
from tritile.families.common.grids import WIDE_FROM, options, polls, unit
from tritile.families.common.numerics import Numerics, fastest, matrix
from tritile.families.common.products import LINE, SECTOR, held
from tritile.families.common.rates import rate
from tritile.families.common.work import COUNTERS, Buffer, Descriptor, Kernel, Section, Work, extra, step_of
from tritile.families.family import Family
from tritile.families.matmul_tile import family as tile
from tritile.families.matmul_tma.family import MAX_SHARED
from tritile.families.matmul_tma.family import NAME as DESCRIPTOR

linear_quantized: Final = Kernel("tritile.families.quantized.kernel", "linear_quantized")
unpack: Final = Kernel("tritile.families.quantized.unpack", "unpack")

NAME: Final = tile.NAME
PARAMETERS: Final = ("BLOCK_K", "BLOCK_M", "BLOCK_N", "GROUP_M", "SPLIT_K")
_LARGE: Final = 128 * 128  # elements of a tile: one program sums more of them a part at a time
BLOCKS_M: Final = (16, 32, 64, 128, 256)
_MAX_WORDS: Final = 128  # 32-bit words of accumulator a thread can hold and still not spill
_FEW_ROWS: Final = 64  # of x: up to so many there are fewer sums to scale than weights
_REGISTERS: Final = 192  # the same with the unpacked weight, and addresses beside them

MAGIC: Final = {"float16": 0x6400_6400, "bfloat16": 0x4300_4300}  # 1024 and 128, twice


def accumulator_words(config: Config, device: Device) -> int:
    return config["BLOCK_M"] * config["BLOCK_N"] // (config.num_warps * device.warp_size)


def weight_words(config: Config, device: Device) -> int:
    """Return the 32-bit registers of each thread that hold a block of the weight, unpacked to 16 bits."""
    return config["BLOCK_N"] * config["BLOCK_K"] // (2 * config.num_warps * device.warp_size)


def scales_at_once(config: Config, problem: QuantizedProblem) -> int:
    """Return how many scales of a row a block of K loads: one for each group, some several times.

    Triton 3.6 does not pipeline a load of fewer words than there are threads: two rows share a word.
    """
    groups = -(-config["BLOCK_K"] // problem.group_size)
    most = config["BLOCK_K"] * problem.bits // 128  # each is for all pairs of four words
    return int(max(groups, min(most, 64 * config.num_warps // config["BLOCK_N"])))


def scales_sums(config: Config, group_size: int) -> bool:
    """Tell whether sums over a block of K are scaled, exactly, and not weights, which are then rounded.

    This needs a block within one group, and saves a multiplication for each weight: of some 3.5 instructions
    that Triton 3.6 compiles to unpack and multiply one, 2.1 to 2.5 are left.
    """
    return config["BLOCK_K"] <= group_size and config["BLOCK_M"] <= _FEW_ROWS


def held_in_shared(config: Config, device: Device) -> bool:
    """Tell whether tensor cores read x from shared memory, which holds a stage meanwhile."""
    return device.has_tma and config["BLOCK_N"] >= 64 and config.num_warps >= 4


def shared_bytes(config: Config, problem: QuantizedProblem, device: Device) -> int:
    stages = config.num_stages
    x = config["BLOCK_M"] * config["BLOCK_K"] * problem.itemsize if problem.x_align >= 4 else 0
    words = config["BLOCK_N"] * config["BLOCK_K"] * problem.bits // 8
    scales = 2 * config["BLOCK_N"] * scales_at_once(config, problem) * (1 + problem.zero_points)
    kept = stages if held_in_shared(config, device) else stages - 1
    barriers = BARRIER * stages if config.family == DESCRIPTOR else 0
    return int(x * kept + (words + scales) * (stages - 1)) + barriers


def tiles(config: Config, problem: QuantizedProblem) -> int:
    return int(-(-problem.m // config["BLOCK_M"]) * -(-problem.n // config["BLOCK_N"]))


def illegal(config: Config, problem: QuantizedProblem, device: Device) -> str | None:
    reason = blocks_fault(config, PARAMETERS, 256)
    if reason is not None:
        return reason
    if config.num_ctas != 1 or config.num_warps > 8 or not 2 <= config.num_stages <= 8:
        return "num_ctas must be 1, num_warps at most 8, num_stages 2 to 8"
    if 0 < device.nvidia < 80:
        return f"{device.name} has no asynchronous copies, and no bfloat16"
    if max(problem.m, problem.n, problem.k) > WIDE_FROM:
        return f"sizes above {WIDE_FROM}"
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
        waits = tiles(config, problem) * config["SPLIT_K"] > device.processors
        if waits and config["BLOCK_M"] * config["BLOCK_N"] > _LARGE:
            return "one program would sum all parts of a large tile, as not all that share it run at once"
    if tiles(config, problem) * config["SPLIT_K"] >= 2**31:
        return "more programs than a launch counts"
    words = accumulator_words(config, device) * (1 + scales_sums(config, problem.group_size))
    if words > _MAX_WORDS or words + weight_words(config, device) > _REGISTERS:
        return f"{words} accumulator and {weight_words(config, device)} weight registers a thread"
    if config["BLOCK_N"] * config["BLOCK_K"] < 32 * 32 * config.num_warps:
        return f"a block of the weight leaves some of {config.num_warps} warps idle"
    return shared_fault(shared_bytes(config, problem, device), device)


def _tma_illegal(config: Config, problem: QuantizedProblem, device: Device) -> str | None:
    if not device.has_tma:
        return f"{device.name} has no tensor memory accelerator"
    if problem.x_layout != "row" or problem.x_align < 16:
        return f"rows of x are {problem.x_layout}, {problem.x_align} bytes aligned: not on 16 bytes"
    return illegal(config, problem, device)


def _configs() -> Iterator[Config]:
    for m, n, k in itertools.product(BLOCKS_M, (64, 128, 256), (64, 128, 256)):
        for warps, stages in itertools.product((4, 8), (2, 3, 4, 5, 6, 8)):
            if m * n // (32 * warps) > _MAX_WORDS or n // warps < 16:
                continue
            for group, split in itertools.product((1, 8), (1, 2, 4, 8, 16) if m <= 64 else (1, 2)):
                sides = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": group, "SPLIT_K": split}
                yield Config.of(warps, stages, NAME, **sides)


def interpreted(problem: QuantizedProblem) -> Config:
    m, n = (max(16, min(128, 1 << (size - 1).bit_length())) for size in (problem.m, problem.n))
    # More than a group, so that weights are scaled.
    k = max(unit_columns(problem.bits), 2 * problem.group_size, min(256, 1 << (problem.k - 1).bit_length()))
    return Config.of(4, 2, NAME, BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP_M=8, SPLIT_K=1)


def pointless(config: Config, problem: QuantizedProblem, device: Device) -> bool:
    one_row = problem.m <= config["BLOCK_M"] or problem.n <= config["BLOCK_N"]
    if one_row != (config["GROUP_M"] == 1):
        return True  # tiles without an order, or unordered ones where bands exist
    if config["SPLIT_K"] > 1 and tiles(config, problem) * config["SPLIT_K"] > 8 * device.processors:
        return True  # there are enough tiles
    if config["BLOCK_M"] >= 2 * max(problem.m, 16) or config["BLOCK_N"] >= 2 * max(problem.n, 64):
        return True
    return bool(config["BLOCK_K"] >= 2 * max(problem.k, unit_columns(problem.bits)))


_UNPACK: Final = 2.4  # instructions of a thread for each number; half as many more for bytes to bfloat16
_UNSCALED: Final = 1.4  # the same where sums are scaled instead of weights
_LEAST_M: Final = 32  # columns of an instruction below which tensor cores wait for the weight's registers


def resident(config: Config, problem: QuantizedProblem, device: Device) -> int:
    threads = config.num_warps * device.warp_size
    twice = scales_sums(config, problem.group_size)
    words = accumulator_words(config, device) * (1 + twice) + weight_words(config, device)
    registers = min(255, words + (32 if config.family == NAME else 46))  # as compiled by Triton 3.6
    return held(device, threads, registers, shared_bytes(config, problem, device), 16)


def facts_of(problem: QuantizedProblem, device: Device) -> Facts:
    m, n, k, size, weight = problem.m, problem.n, problem.k, problem.itemsize, problem.weight_bytes
    reread = min(1.0, max(0.0, 2 * weight / device.l2_bytes - 1))
    odd_x, odd_out = (int(row * size % SECTOR != 0) for row in (k, n))
    return Facts(
        m, n, k, 1, size, problem.bits / 8, m * k * size, weight, m * n * size, reread,
        odd_x, 0, odd_out, int(k * size % LINE != 0), 0, 0, 0, 0, device.processors,
    )  # fmt: skip


def cost(config: Config, problem: QuantizedProblem, device: Device) -> Program:
    m, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    in_two = problem.bits == 8 and problem.dtype == "bfloat16"
    summed = scales_sums(config, problem.group_size)
    each = (_UNSCALED if summed else _UNPACK) * (1.5 if in_two else 1.0)
    return Program(
        resident(config, problem, device),
        2.0 * max(m, _LEAST_M) * n * k / rate(problem.product, device),
        True,
        m * n * problem.itemsize,
        config.num_warps,
        m * k * problem.itemsize / (16 * device.warp_size) if config.family == NAME else 0.0,
        n * (k * each + m * summed) / 128,
    )


def work(call: QuantizedCall, config: Config, processors: int, early: bool) -> Work:
    (m, n), k = call.out.shape, call.x.shape[1]
    block_m, block_n, block_k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    tiles, split = -(-m // block_m) * -(-n // block_n), config["SPLIT_K"]
    if -(-k // block_k) < split:
        raise TuningError(f"SPLIT_K = {split} leaves programs without a block of K = {k}")
    scratch = {"parts": Section("float32", tiles * split * block_m * block_n)} if split > 1 else {}
    bias = call.bias and call.bias.transposed  # for out^T, which the kernel makes
    described = Descriptor("x", call.x.shape, (call.x.strides[0], 1), (block_m, block_k))
    values = {
        "x_ptr": Buffer("x"), "x_desc": described if config.family == DESCRIPTOR else None,
        "words_ptr": Buffer("words"), "scales_ptr": Buffer("scales"),
        "zeros_ptr": Buffer("zeros") if call.zeros is not None else None, "out_ptr": Buffer("out"),
        "parts_ptr": Buffer("parts") if split > 1 else None,
        "counters_ptr": Buffer(COUNTERS) if split > 1 else None,
        "M": m, "N": n, "K": k, "stride_xm": call.x.strides[0], "stride_xk": call.x.strides[1],
        "magic": MAGIC[call.dtype], "extra": extra({"bias": bias}, 2) if bias else None,
        "EPILOGUE": Epilogue(bias=bias.spread).constants if bias else None,
        "ALIGN_X": unit(call.x.strides[0], call.x.itemsize),
        "ALIGN_N": unit(n, call.out.itemsize), "ALIGN_K": unit(k, call.x.itemsize),
        "BITS": call.bits, "GROUP_SIZE": call.group_size, "ZEROS": call.zeros is not None,
        "MASK_M": m % block_m != 0, "MASK_N": n % block_n != 0, "MASK_K": k % block_k != 0,
        "WAIT": early, "POLLS": polls(tiles * split, processors) if split > 1 else 0,
        "SCALES": scales_at_once(config, call.problem),
        "SCALE_SUMS": scales_sums(config, call.group_size),
    }  # fmt: skip
    values |= dict(config.kwargs)
    step = step_of(linear_quantized, (tiles, split, 1), values, options(config) | {"launch_pdl": early})
    return Work((step,), scratch, tiles if split > 1 else 0)


# Rows and columns of a tile that a program unpacks in memory, and its warps. A thread reads 16 bytes of 4-bit
# numbers, and the 16 rows that a weight is padded to are never overhung.
_UNPACKED: Final = (16, 256, 4)
WEIGHT: Final = "weight"  # the buffer of an unpacked weight


def unpacking(problem: QuantizedProblem, early: bool) -> Work:
    """Return the launch that writes the weight (N, K), row by row, to a workspace of 16-bit floats.

    Its rows are padded: see `unpacked_row` and `words_shape`. Padding is written too.
    """
    block_n, block_k, warps = _UNPACKED
    rows, row = problem.words[0] * 8, unpacked_row(problem.k)
    values = {
        "words_ptr": Buffer("words"), "scales_ptr": Buffer("scales"),
        "zeros_ptr": Buffer("zeros") if problem.zero_points else None,
        "out_ptr": Buffer(WEIGHT), "rows": rows, "row": row, "magic": MAGIC[problem.dtype],
        "BITS": problem.bits, "GROUP_SIZE": problem.group_size, "ZEROS": problem.zero_points,
        "MASK_K": row % block_k != 0, "WAIT": early, "BLOCK_N": block_n, "BLOCK_K": block_k,
    }  # fmt: skip
    programs = rows // block_n * -(-row // block_k)
    step = step_of(unpack, (programs, 1, 1), values, {"num_warps": warps, "launch_pdl": early})
    return Work((step,), {WEIGHT: Section(problem.dtype, rows * row)})


WEIGHTS: Final = "weights"  # weights are scaled, and rounded


def numerics(config: Config, problem: QuantizedProblem, device: Device) -> Numerics:
    instruction = matrix(config)
    if device.nvidia:
        instruction = "warpgroup" if held_in_shared(config, device) else "warp"
    sums = scales_sums(config, problem.group_size)
    step = config["BLOCK_K"] if sums else 0
    return Numerics(instruction, config["SPLIT_K"], step, scaled="sums" if sums else WEIGHTS)


def canonical(problem: QuantizedProblem, device: Device) -> Numerics:
    """Return the numerics of tiles of many rows, which batch-invariant calls have."""
    return Numerics(fastest(device), scaled=WEIGHTS)


TILE: Final = Family(
    QuantizedProblem.op, NAME, linear_quantized, _configs, illegal, pointless, cost, work,
    numerics=numerics, canonical=canonical, interpreted=interpreted, resident=resident,
)  # fmt: skip
TMA: Final = replace(
    TILE,
    name=DESCRIPTOR,
    space=lambda: (replace(config, family=DESCRIPTOR) for config in TILE.configs),
    illegal=_tma_illegal,
    interpreted=None,
)
