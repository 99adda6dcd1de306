"""Make products by tiles that TMA brings, on NVIDIA GPUs from Hopper on.

An operand is copied into a workspace first if its rows do not start on 16 bytes, so that no descriptor can
read it, or if tensor cores do not take its layout. The result is stored directly, by descriptor or by
pointers.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Final

from tritile.core.call import MatmulCall
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import ITEMSIZE, MatmulProblem, Product
from tritile.errors import TuningError
from tritile.families.common.blocks import (
    blocks_fault,
    late_fault,
    least_blocks,
    order_fault,
    oversized,
    shared_fault,
)
from tritile.families.common.cost import Program
from tritile.families.common.descriptors import BARRIER, arguments, grid_of, output_of, sizes_of
from tritile.families.common.grids import options, polls
from tritile.families.common.numerics import of_product
from tritile.families.common.operands import inputs, reachable, repack, tiles, turned
from tritile.families.common.products import (
    accumulator_words,
    held_with_tma,
    in_parts,
    input_precision,
    uses_tensor_cores,
    warpgroup_mma,
)
from tritile.families.common.rates import multiply_clocks, turning
from tritile.families.common.work import COUNTERS, Buffer, Kernel, Section, Work, step_of
from tritile.families.family import Family

gated_descriptor: Final = Kernel("tritile.families.matmul_tma.gated", "gated_descriptor")
matmul_descriptor: Final = Kernel("tritile.families.matmul_tma.kernel", "matmul_descriptor")

NAME: Final = "descriptor"
PARAMETERS: Final = ("BLOCK_K", "BLOCK_M", "BLOCK_N", "GROUP_M", "PERSISTENT", "SPLIT_K", "SUBTILES")
MAX_SHARED: Final = 16384  # tiles that several programs may make together
_MAX_WORDS: Final = 128
_SM_SHARED: Final = 228 << 10  # bytes of an SM of Hopper or Blackwell, 1 KiB of them taken for each program


def shared_bytes(config: Config, problem: MatmulProblem) -> int:
    tile = (config["BLOCK_M"] + config["BLOCK_N"] * problem.rights) * config["BLOCK_K"] * problem.itemsize
    fused = problem.epilogue
    # An operand read tile by tile has another layout than sums, which then go through shared memory.
    size = 4 if "full" in (fused.bias, fused.residual, fused.bias_up) else ITEMSIZE[problem.out_dtype]
    part = config["BLOCK_M"] * config["BLOCK_N"] // config["SUBTILES"] * size
    # 16-bit results that are stored by pointers take less, or none.
    counted = problem.out_align == 16 or ITEMSIZE[problem.out_dtype] >= 4
    stored = part if config["PERSISTENT"] and counted else 0
    return (tile + BARRIER) * config.num_stages + stored


def fault(config: Config, problem: Product, device: Device, parameters: tuple[str, ...]) -> str | None:
    """Say why a product, of groups or not, cannot be made from tiles that TMA brings; None where it can."""
    if not device.has_tma:
        return f"{device.name} has no tensor memory accelerator"
    if not uses_tensor_cores(problem):
        return f"{problem.dtype} {problem.precision} is summed by the tile kernel alone"
    reason = blocks_fault(config, parameters, 256)
    if reason is not None:
        return reason
    if config.num_ctas != 1 or config.num_warps not in (1, 2, 4, 8) or not 2 <= config.num_stages <= 8:
        return "num_ctas must be 1, num_warps at most 8, num_stages 2 to 8"
    for name, least in least_blocks(problem).items():
        if config[name] < least:
            return f"{name} = {config[name]} is below the {least} that tl.dot takes for {problem.dtype}"
    if config["SUBTILES"] > 2 or config["BLOCK_N"] // config["SUBTILES"] * ITEMSIZE[problem.out_dtype] < 16:
        return f"SUBTILES = {config['SUBTILES']} of {config['BLOCK_N']} columns"
    return late_fault(config, problem, device)


def illegal(config: Config, problem: MatmulProblem, device: Device) -> str | None:
    reason = fault(config, problem, device, PARAMETERS) or reachable(problem)
    if reason is not None:
        return reason
    for name in ("BLOCK_K", "BLOCK_M", "BLOCK_N"):
        if config[name] * problem.itemsize < 16:
            return f"{name} = {config[name]} is under 16 bytes of {problem.dtype}"
    if config["SPLIT_K"] > 1:
        if problem.rights > 1:
            return "tiles of gated products are not shared: SPLIT_K must be 1"
        if config["PERSISTENT"]:
            return "SPLIT_K and PERSISTENT exclude each other"
        if config["SUBTILES"] > 1:
            return "SUBTILES has no meaning for tiles that programs share"
        if config["SPLIT_K"] * config["BLOCK_K"] > problem.k:
            return f"SPLIT_K = {config['SPLIT_K']} leaves programs without a block of K = {problem.k}"
        if tiles(config, problem) > MAX_SHARED:
            return f"{tiles(config, problem)} tiles share their K, of {MAX_SHARED}"
    if tiles(config, problem) * config["SPLIT_K"] >= 2**31:
        return "more programs than a launch counts"
    words = accumulator_words(config, problem, device)
    if words > _MAX_WORDS:
        return f"{words} accumulator registers a thread, of {_MAX_WORDS}"
    fused = problem.epilogue
    at_once = words // config["SUBTILES"]
    beside = "full" in (fused.bias, fused.residual) or (problem.promoted and fused.activation == "gelu")
    if device.nvidia >= 100 and at_once > _MAX_WORDS // 2 and beside:
        return f"{at_once} sums a thread beside what is added to them spill on {device.name}"
    return shared_fault(shared_bytes(config, problem), device)


def _warps(m: int, n: int) -> tuple[int, ...]:
    """Return the warps that suit a tile: whole warpgroups where it fills Hopper's tensor cores."""
    if m < 64:
        return (2, 4) if n > 16 else (1, 2)
    return (4, 8) if m * n >= 128 * 128 else (4,)


def _configs() -> Iterator[Config]:
    blocks = itertools.product((16, 64, 128, 256), (16, 32, 64, 128, 256), (32, 64, 128, 256))
    for m, n, k in blocks:
        if not 256 <= m * n <= 128 * 256 or (k == 256 and m * n > 64 * 64) or (k == 64 and m * n < 64 * 64):
            continue
        if k == 32 and m * n < 128 * 128:
            continue
        for warps, stages, group in itertools.product(_warps(m, n), (3, 4, 5, 6, 8), (1, 8)):
            if m * n // (32 * warps) > _MAX_WORDS:
                continue
            kwargs = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": group}
            for split in (1, 2, 4, 8, 16, 32, 64, 128) if m * n <= 128 * 128 else (1,):
                yield Config.of(warps, stages, NAME, **kwargs, PERSISTENT=False, SPLIT_K=split, SUBTILES=1)
            if group > 1 and m * n >= 64 * 64:
                for subtiles in (1, 2) if n >= 128 else (1,):
                    yield Config.of(
                        warps, stages, NAME, **kwargs, PERSISTENT=True, SPLIT_K=1, SUBTILES=subtiles
                    )


def pointless(config: Config, problem: MatmulProblem, device: Device) -> bool:
    if order_fault(config, problem):
        return True
    if config["BLOCK_K"] == 32 and problem.itemsize < 4:
        return True  # a longer block takes fewer K iterations
    made = tiles(config, problem)
    if config["PERSISTENT"] and made <= device.processors:
        return True
    if config["SPLIT_K"] > 1 and made * config["SPLIT_K"] > device.processors * at_once(config, problem):
        return True  # the last program of a tile would sum all parts
    stage = (config["BLOCK_M"] + config["BLOCK_N"] * problem.rights) * config["BLOCK_K"] * problem.itemsize
    if config.num_stages < 5 and shared_bytes(config, problem) + 2 * stage <= device.shared_memory:
        return True  # room for two more stages
    return oversized(config, problem, least_blocks(problem) | {"BLOCK_K": 128})


def at_once(config: Config, problem: MatmulProblem) -> int:
    """Return how many programs an SM holds for sure: by shared memory, and 255 registers a thread."""
    return max(1, min(8 // config.num_warps, _SM_SHARED // (shared_bytes(config, problem) + 1024)))


def resident(config: Config, problem: MatmulProblem, device: Device) -> int:
    return held_with_tma(device, shared_bytes(config, problem), config.num_warps)


def cost(config: Config, problem: MatmulProblem, device: Device) -> Program:
    return Program(
        resident(config, problem, device),
        multiply_clocks(config, problem, device) * turning(problem, device, turned(problem)),
        warpgroup_mma(config, problem, device) or device.nvidia >= 100,
        config["BLOCK_M"] * config["BLOCK_N"] * ITEMSIZE[problem.out_dtype],
        config.num_warps,
        rights=problem.rights,
    )


def work(call: MatmulCall, config: Config, processors: int, early: bool) -> Work:
    read, out = inputs(call, early), output_of(call)
    m, n, k, batch, _ = sizes_of(call)
    block_m, block_n, block_k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    tiles, split = batch * -(-m // block_m) * -(-n // block_n), config["SPLIT_K"]
    if -(-k // block_k) < split:
        raise TuningError(f"SPLIT_K = {split} leaves programs without a block of K = {k}")
    scratch = read.scratch
    by_descriptor = out.by_descriptor and split == 1  # shared tiles are stored by rows
    parts, counters, looks = None, None, 0
    if split > 1:
        parts, counters = Buffer("parts"), Buffer(COUNTERS)
        looks = polls(tiles * split, processors * at_once(config, call.problem))
        kind = "int32" if call.dtype == "int8" else "float32"
        scratch = {**scratch, "parts": Section(kind, tiles * split * block_m * block_n)}
    grid, flat = grid_of(call, config, split, processors)
    rounded = call.precision == "tf32"
    values = arguments(call, config, read, out, early) | {
        "a_desc": read.a.descriptor(block_m, block_k, rounded=rounded),
        "b_desc": read.b.descriptor(block_k, block_n, rounded=rounded),
        "up_desc": read.up.descriptor(block_k, block_n, rounded=rounded),
        "out_desc": out.seen.descriptor(block_m, block_n // config["SUBTILES"]) if by_descriptor else None,
        "parts_ptr": parts, "counters_ptr": counters, "BY_DESCRIPTOR": by_descriptor,
        "PRECISION": input_precision(call), "POLLS": looks, "FLAT": flat, "PROMOTE": in_parts(call),
    }  # fmt: skip
    kernel = matmul_descriptor if call.up is None else gated_descriptor
    step = step_of(kernel, grid, values, options(config) | {"launch_pdl": early})
    return Work((*read.steps, step), scratch, tiles if split > 1 else 0)


FAMILY: Final = Family(
    MatmulProblem.op, NAME, matmul_descriptor, _configs, illegal, pointless, cost, work,
    also=(repack, gated_descriptor), resident=resident,
    numerics=functools.partial(of_product, rounding="tma"),
)  # fmt: skip
