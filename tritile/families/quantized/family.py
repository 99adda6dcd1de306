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
from tritile.core.epilogue import Epilogue
from tritile.core.problem import QuantizedProblem, unit_columns, unpacked_row
from tritile.errors import TuningError
from tritile.families.common.cost import Facts, Program
from tritile.families.common.descriptors import BARRIER
from tritile.families.common.grids import WIDE_FROM, options, polls, unit
from tritile.families.common.products import (
    LINE,
    MAX_WORDS,
    SECTOR,
    config_fault,
    programs_per_sm,
    resource_fault,
)
from tritile.families.common.rates import rate
from tritile.families.common.work import extra
from tritile.families.family import Family
from tritile.families.matmul_tile.family import NAME
from tritile.families.matmul_tma.family import NAME as DESCRIPTOR
from tritile.families.numerics import Numerics, fastest, matrix
from tritile.runtime.counters import MAX_COUNTERS
from tritile.runtime.work import COUNTERS, Buffer, Descriptor, Kernel, Work, Workspace, step_of

linear_quantized: Final = Kernel("tritile.families.quantized.kernel", "linear_quantized")
unpack: Final = Kernel("tritile.families.quantized.unpack", "unpack")

PARAMETERS: Final = ("BLOCK_K", "BLOCK_M", "BLOCK_N", "GROUP_M", "SPLIT_K")
MAGIC: Final = {"float16": 0x6400_6400, "bfloat16": 0x4300_4300}  # 1024 and 128, twice
WEIGHT: Final = "weight"  # the buffer of an unpacked weight
_SCALED_WEIGHTS: Final = "weights"  # weights are scaled, and rounded
_LARGE: Final = 128 * 128  # elements of a tile: one program sums more of them a part at a time
_FEW_ROWS: Final = 64  # of x: up to so many there are fewer sums to scale than weights
_REGISTERS: Final = 192  # of accumulator and unpacked weight; addresses need registers as well
# For the formula: instructions of a thread for each number, half as many more for bytes to bfloat16; the same
# if sums are scaled instead of weights; columns of an instruction below which tensor cores wait for the
# weight's registers.
_UNPACK: Final = 2.4
_UNSCALED: Final = 1.4
_LEAST_M: Final = 32
# Rows and columns of a tile that a program unpacks in memory, and its warps. A thread reads 16 bytes of 4-bit
# numbers, and the 16 rows that a weight is padded to are never overhung.
_UNPACKED: Final = (16, 256, 4)


def _configs() -> Iterator[Config]:
    for m, n, k in itertools.product((16, 32, 64, 128, 256), (64, 128, 256), (64, 128, 256)):
        for warps, stages in itertools.product((4, 8), (2, 3, 4, 5, 6, 8)):
            if m * n // (32 * warps) > MAX_WORDS or n // warps < 16:
                continue
            for group, split in itertools.product((1, 8), (1, 2, 4, 8, 16) if m <= 64 else (1, 2)):
                sides = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": group, "SPLIT_K": split}
                yield Config.of(warps, stages, NAME, **sides)


def interpreted(problem: QuantizedProblem) -> Config:
    m, n = (max(16, min(128, 1 << (size - 1).bit_length())) for size in (problem.m, problem.n))
    # More than a group, so that weights are scaled.
    k = max(unit_columns(problem.bits), 2 * problem.group_size, min(256, 1 << (problem.k - 1).bit_length()))
    return Config.of(4, 2, NAME, BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP_M=8, SPLIT_K=1)


def _words(config: Config, problem: QuantizedProblem, device: Device) -> tuple[int, int]:
    """Return 32-bit registers of each thread for sums, and for a block of the weight, unpacked to 16 bits."""
    n, threads = config["BLOCK_N"], config.num_warps * device.warp_size
    sums = config["BLOCK_M"] * n // threads * (1 + scales_sums(config, problem.group_size))
    return sums, n * config["BLOCK_K"] // (2 * threads)


def scales_at_once(config: Config, problem: QuantizedProblem) -> int:
    """Return how many scales of a row a block of K loads: one for each group, some several times.

    Triton 3.6 does not pipeline a load of fewer words than there are threads: two rows share a word.
    """
    groups = -(-config["BLOCK_K"] // problem.group_size)
    most = config["BLOCK_K"] * problem.bits // 128  # each is for all pairs of four words
    return int(max(groups, min(most, 64 * config.num_warps // config["BLOCK_N"])))


def scales_sums(config: Config, group_size: int) -> bool:
    """True if sums over a block of K are scaled, exactly, and not weights, which are then rounded.

    This needs a block within one group, and saves a multiplication for each weight: of some 3.5 instructions
    that Triton 3.6 compiles to unpack and multiply one, 2.1 to 2.5 are left.
    """
    return config["BLOCK_K"] <= group_size and config["BLOCK_M"] <= _FEW_ROWS


def _reads_shared_x(config: Config, device: Device) -> bool:
    """True if tensor cores read x from shared memory, which holds a stage meanwhile."""
    return device.has_tma and config["BLOCK_N"] >= 64 and config.num_warps >= 4


def shared_bytes(config: Config, problem: QuantizedProblem, device: Device) -> int:
    stages = config.num_stages
    x = config["BLOCK_M"] * config["BLOCK_K"] * problem.itemsize if problem.x_align >= 4 else 0
    words = config["BLOCK_N"] * config["BLOCK_K"] * problem.bits // 8
    scales = 2 * config["BLOCK_N"] * scales_at_once(config, problem) * (1 + problem.zero_points)
    kept = stages if _reads_shared_x(config, device) else stages - 1
    barriers = BARRIER * stages if config.family == DESCRIPTOR else 0
    return int(x * kept + (words + scales) * (stages - 1)) + barriers


def _tiles(config: Config, problem: QuantizedProblem) -> int:
    return int(-(-problem.m // config["BLOCK_M"]) * -(-problem.n // config["BLOCK_N"]))


def illegal(config: Config, problem: QuantizedProblem, device: Device) -> str | None:
    if config.family == DESCRIPTOR:
        if not device.has_tma:
            return f"{device.name} has no tensor memory accelerator"
        if problem.x_layout != "row" or problem.x_align < 16:
            return f"rows of x are {problem.x_layout}, {problem.x_align} bytes aligned: not on 16 bytes"
    if (reason := config_fault(config, PARAMETERS, warps=8, stages=(2, 8))) is not None:
        return reason
    if 0 < device.nvidia < 80:
        return f"{device.name} has no asynchronous copies, and no bfloat16"
    if max(problem.m, problem.n, problem.k) > WIDE_FROM:
        return f"sizes above {WIDE_FROM}"
    m, n, k, split = (config[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "SPLIT_K"))
    if min(m, n) < 16:
        return "BLOCK_M and BLOCK_N must be at least 16"
    if k < unit_columns(problem.bits):
        return f"BLOCK_K = {k} is below the {unit_columns(problem.bits)} columns that are packed together"
    made = _tiles(config, problem)
    if split > 1:
        if split > -(-problem.k // k):
            return f"SPLIT_K = {split} leaves programs without a block of K = {problem.k}"
        if made > MAX_COUNTERS:
            return f"{made} tiles share their K, of {MAX_COUNTERS}"
        if made * split > device.processors and m * n > _LARGE:
            return "one program would sum all parts of a large tile, as not all that share it run at once"
    sums, weight = _words(config, problem, device)
    if sums + weight > _REGISTERS:
        return f"{sums} accumulator and {weight} weight registers a thread, above {_REGISTERS}"
    if n * k < 32 * 32 * config.num_warps:
        return f"a block of the weight leaves some of {config.num_warps} warps idle"
    return resource_fault(device, shared_bytes(config, problem, device), sums, programs=made * split)


def is_dominated(config: Config, problem: QuantizedProblem, device: Device) -> bool:
    one_row = problem.m <= config["BLOCK_M"] or problem.n <= config["BLOCK_N"]
    if one_row != (config["GROUP_M"] == 1):
        return True  # tiles without an order, or unordered ones if bands exist
    if config["SPLIT_K"] > 1 and _tiles(config, problem) * config["SPLIT_K"] > 8 * device.processors:
        return True  # there are enough tiles
    least = (
        ("BLOCK_M", problem.m, 16),
        ("BLOCK_N", problem.n, 64),
        ("BLOCK_K", problem.k, unit_columns(problem.bits)),
    )
    return any(config[name] >= 2 * max(size, unit) for name, size, unit in least)


def resident(config: Config, problem: QuantizedProblem, device: Device) -> int:
    # As compiled by Triton 3.6.
    registers = min(255, sum(_words(config, problem, device)) + (32 if config.family == NAME else 46))
    threads = config.num_warps * device.warp_size
    return programs_per_sm(device, threads, registers, shared_bytes(config, problem, device), 16)


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


def numerics(config: Config, problem: QuantizedProblem, device: Device) -> Numerics:
    instruction = matrix(config)
    if device.nvidia:
        instruction = "warpgroup" if _reads_shared_x(config, device) else "warp"
    if scales_sums(config, problem.group_size):
        return Numerics(instruction, config["SPLIT_K"], config["BLOCK_K"], scaled="sums")
    return Numerics(instruction, config["SPLIT_K"], scaled=_SCALED_WEIGHTS)


def canonical(problem: QuantizedProblem, device: Device) -> Numerics:
    """Return the numerics of tiles of many rows, which batch-invariant calls have."""
    return Numerics(fastest(device), scaled=_SCALED_WEIGHTS)


def work(call: QuantizedCall, config: Config, processors: int, early: bool) -> Work:
    (m, n), k, problem, split = call.out.shape, call.x.shape[1], call.problem, config["SPLIT_K"]
    block_m, block_n, block_k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    tiles, shared = _tiles(config, problem), split > 1
    if -(-k // block_k) < split:
        raise TuningError(f"SPLIT_K = {split} leaves programs without a block of K = {k}")
    scratch = {"parts": Workspace("float32", tiles * split * block_m * block_n)} if shared else {}
    bias = call.bias and call.bias.transposed  # for out^T, which the kernel makes
    described = Descriptor("x", call.x.shape, (call.x.strides[0], 1), (block_m, block_k))
    values = {
        "x_ptr": Buffer("x"), "x_desc": described if config.family == DESCRIPTOR else None,
        "words_ptr": Buffer("words"), "scales_ptr": Buffer("scales"),
        "zeros_ptr": Buffer("zeros") if problem.zero_points else None, "out_ptr": Buffer("out"),
        "parts_ptr": Buffer("parts") if shared else None,
        "counters_ptr": Buffer(COUNTERS) if shared else None,
        "M": m, "N": n, "K": k, "stride_xm": call.x.strides[0], "stride_xk": call.x.strides[1],
        "magic": MAGIC[call.dtype], "extra": extra({"bias": bias}, 2) if bias else None,
        "EPILOGUE": Epilogue(bias=bias.spread).constants if bias else None,
        "ALIGN_X": unit(call.x.strides[0], call.x.itemsize),
        "ALIGN_N": unit(n, call.out.itemsize), "ALIGN_K": unit(k, call.x.itemsize),
        "BITS": call.bits, "GROUP_SIZE": call.group_size, "ZEROS": problem.zero_points,
        "MASK_M": m % block_m != 0, "MASK_N": n % block_n != 0, "MASK_K": k % block_k != 0,
        "WAIT": early, "POLLS": polls(tiles * split, processors) if shared else 0,
        "SCALES": scales_at_once(config, problem), "SCALE_SUMS": scales_sums(config, call.group_size),
        **dict(config.kwargs),
    }  # fmt: skip
    step = step_of(linear_quantized, (tiles, split, 1), values, options(config, launch_pdl=early))
    return Work((step,), scratch, tiles if shared else 0)


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
    return Work((step,), {WEIGHT: Workspace(problem.dtype, rows * row)})


TILE: Final = Family(
    QuantizedProblem.op, NAME, linear_quantized, _configs, illegal, is_dominated, cost, work,
    numerics=numerics, canonical=canonical, interpreted=interpreted, resident=resident,
)  # fmt: skip
TMA: Final = replace(
    TILE,
    name=DESCRIPTOR,
    space=lambda: (replace(config, family=DESCRIPTOR) for config in TILE.configs),
    interpreted=None,
)
