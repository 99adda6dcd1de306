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
from tritile.families.common import products
from tritile.families.common.cost import Program
from tritile.families.common.descriptors import BARRIER, by_tma, k_major_copies, reachable, repack, tiles
from tritile.families.common.grids import options, polls
from tritile.families.common.products import MAX_WORDS
from tritile.families.common.rates import multiply_clocks, slowdown
from tritile.families.family import Family
from tritile.families.numerics import of_product
from tritile.runtime.counters import MAX_COUNTERS
from tritile.runtime.work import COUNTERS, Buffer, Kernel, Work, Workspace, step_of

gated_descriptor: Final = Kernel("tritile.families.matmul_tma.gated", "gated_descriptor")
matmul_descriptor: Final = Kernel("tritile.families.matmul_tma.kernel", "matmul_descriptor")

NAME: Final = "descriptor"
PARAMETERS: Final = ("BLOCK_K", "BLOCK_M", "BLOCK_N", "GROUP_M", "PERSISTENT", "SPLIT_K", "SUBTILES")
_SM_SHARED: Final = 228 << 10  # bytes of an SM of Hopper or Blackwell, 1 KiB of them taken for each program


def _configs() -> Iterator[Config]:
    blocks = itertools.product((16, 64, 128, 256), (16, 32, 64, 128, 256), (32, 64, 128, 256))
    for m, n, k in blocks:
        if not 256 <= m * n <= 128 * 256 or (k == 256 and m * n > 64 * 64) or (k == 64 and m * n < 64 * 64):
            continue
        if k == 32 and m * n < 128 * 128:
            continue
        # Whole warpgroups if a tile fills Hopper's tensor cores.
        small, large = (2, 4) if n > 16 else (1, 2), (4, 8) if m * n >= 128 * 128 else (4,)
        for warps, stages, group in itertools.product(small if m < 64 else large, (3, 4, 5, 6, 8), (1, 8)):
            if m * n // (32 * warps) > MAX_WORDS:
                continue
            config = functools.partial(
                Config.of, warps, stages, NAME, BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP_M=group
            )
            for split in (1, 2, 4, 8, 16, 32, 64, 128) if m * n <= 128 * 128 else (1,):
                yield config(PERSISTENT=False, SPLIT_K=split, SUBTILES=1)
            if group > 1 and m * n >= 64 * 64:
                for subtiles in (1, 2) if n >= 128 else (1,):
                    yield config(PERSISTENT=True, SPLIT_K=1, SUBTILES=subtiles)


def stage_bytes(config: Config, problem: Product) -> int:
    return int(
        (config["BLOCK_M"] + config["BLOCK_N"] * problem.rights) * config["BLOCK_K"] * problem.itemsize
    )


def shared_bytes(config: Config, problem: Product) -> int:
    out_size, stored = ITEMSIZE[problem.out_dtype], problem.out_align == 16
    if isinstance(problem, MatmulProblem):
        fused = problem.epilogue
        # 16-bit results that are stored by pointers take less, or none.
        stored = stored or out_size >= 4
        # An operand read tile by tile has another layout than sums, which then go through shared memory.
        out_size = 4 if "full" in (fused.bias, fused.residual, fused.bias_up) else out_size
    else:
        stored = stored and problem.out_layout == "row"
    part = config["BLOCK_M"] * config["BLOCK_N"] // config["SUBTILES"] * out_size
    staged = (stage_bytes(config, problem) + BARRIER) * config.num_stages
    return int(staged + part * (config["PERSISTENT"] and stored))


def fault(config: Config, problem: Product, device: Device, parameters: tuple[str, ...]) -> str | None:
    """Say why a product, of groups or not, cannot be made from tiles that TMA brings; None if it can."""
    if not device.has_tma:
        return f"{device.name} has no tensor memory accelerator"
    if not products.uses_tensor_cores(problem):
        return f"{problem.dtype} {problem.precision} is summed by the tile kernel only"
    reason = products.config_fault(config, parameters, warps=8, stages=(2, 8)) or products.dot_fault(
        config, problem
    )
    if reason is not None:
        return reason
    if config["SUBTILES"] > 2 or config["BLOCK_N"] // config["SUBTILES"] * ITEMSIZE[problem.out_dtype] < 16:
        return f"SUBTILES = {config['SUBTILES']} of {config['BLOCK_N']} columns"
    words = products.accumulator_words(config, problem, device)
    return products.late_fault(config, problem, device) or products.resource_fault(
        device, shared_bytes(config, problem), words
    )


def illegal(config: Config, problem: MatmulProblem, device: Device) -> str | None:
    reason = fault(config, problem, device, PARAMETERS) or reachable(problem)
    if reason is not None:
        return reason
    for name in ("BLOCK_K", "BLOCK_M", "BLOCK_N"):
        if config[name] * problem.itemsize < 16:
            return f"{name} = {config[name]} is under 16 bytes of {problem.dtype}"
    made, split = tiles(config, problem), config["SPLIT_K"]
    if split > 1:
        if problem.rights > 1:
            return "tiles of gated products are not shared: SPLIT_K must be 1"
        if config["PERSISTENT"]:
            return "SPLIT_K and PERSISTENT exclude each other"
        if config["SUBTILES"] > 1:
            return "SUBTILES has no meaning for tiles that programs share"
        if split * config["BLOCK_K"] > problem.k:
            return f"SPLIT_K = {split} leaves programs without a block of K = {problem.k}"
        if made > MAX_COUNTERS:
            return f"{made} tiles share their K, of {MAX_COUNTERS}"
    fused = problem.epilogue
    sums = products.accumulator_words(config, problem, device) // config["SUBTILES"]
    more = "full" in (fused.bias, fused.residual) or (problem.promoted and fused.activation == "gelu")
    if device.nvidia >= 100 and sums > MAX_WORDS // 2 and more:
        return f"{sums} sums a thread, with what is added to them, spill on {device.name}"
    return products.resource_fault(device, programs=made * split)


def is_shallow(config: Config, problem: Product, device: Device) -> bool:
    """True if there is room for two more stages."""
    return shared_bytes(config, problem) + 2 * stage_bytes(config, problem) <= device.shared_memory


def is_dominated(config: Config, problem: MatmulProblem, device: Device) -> bool:
    if products.is_disordered(config, problem):
        return True
    if config["BLOCK_K"] == 32 and problem.itemsize < 4:
        return True  # a longer block takes fewer K iterations
    made = tiles(config, problem)
    if config["PERSISTENT"] and made <= device.processors:
        return True
    if config["SPLIT_K"] > 1 and made * config["SPLIT_K"] > device.processors * _at_once(config, problem):
        return True  # the last program of a tile would sum all parts
    if config.num_stages < 5 and is_shallow(config, problem, device):
        return True
    return products.is_oversized(config, problem, 128)


def _at_once(config: Config, problem: MatmulProblem) -> int:
    """Return how many programs an SM holds for sure: by shared memory, and 255 registers a thread."""
    return max(1, min(8 // config.num_warps, _SM_SHARED // (shared_bytes(config, problem) + 1024)))


def tma_programs_per_sm(device: Device, shared: int, warps: int) -> int:
    """Return how many programs whose tiles TMA brings an SM holds at once, by shared memory and warps."""
    return max(1, min((device.shared_memory + 1024) // (shared + 1024), 16 // warps, 4))


def resident(config: Config, problem: MatmulProblem, device: Device) -> int:
    return tma_programs_per_sm(device, shared_bytes(config, problem), config.num_warps)


def cost(config: Config, problem: MatmulProblem, device: Device) -> Program:
    return Program(
        resident(config, problem, device),
        multiply_clocks(config, problem, device) * slowdown(problem, device, k_major_copies(problem)),
        products.warpgroup_mma(config, problem, device) or device.nvidia >= 100,
        config["BLOCK_M"] * config["BLOCK_N"] * ITEMSIZE[problem.out_dtype],
        config.num_warps,
        rights=problem.rights,
    )


def work(call: MatmulCall, config: Config, processors: int, early: bool) -> Work:
    problem, split, rounded = call.problem, config["SPLIT_K"], call.precision == "tf32"
    block_m, block_n, block_k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    if -(-problem.k // block_k) < split:
        raise TuningError(f"SPLIT_K = {split} leaves programs without a block of K = {problem.k}")
    moved = by_tma(call, config, split, processors, early)
    made, scratch = tiles(config, problem), moved.scratch
    values = moved.args | {
        "a_desc": moved.a.descriptor(block_m, block_k, rounded=rounded),
        "b_desc": moved.b.descriptor(block_k, block_n, rounded=rounded),
        "up_desc": moved.up.descriptor(block_k, block_n, rounded=rounded),
        "out_desc": moved.out and moved.out.descriptor(block_m, block_n // config["SUBTILES"]),
        "parts_ptr": None, "counters_ptr": None, "POLLS": 0,
        "PRECISION": "ieee" if problem.promoted else call.precision, "PROMOTE": problem.promoted,
    }  # fmt: skip
    if split > 1:
        at_once = processors * _at_once(config, problem)
        values |= {
            "parts_ptr": Buffer("parts"),
            "counters_ptr": Buffer(COUNTERS),
            "POLLS": polls(made * split, at_once),
        }
        kind = "int32" if call.dtype == "int8" else "float32"
        scratch = {**scratch, "parts": Workspace(kind, made * split * block_m * block_n)}
    kernel = matmul_descriptor if call.up is None else gated_descriptor
    step = step_of(kernel, moved.grid, values, options(config, launch_pdl=early))
    return Work((*moved.steps, step), scratch, made if split > 1 else 0)


FAMILY: Final = Family(
    MatmulProblem.op, NAME, matmul_descriptor, _configs, illegal, is_dominated, cost, work,
    also=(repack, gated_descriptor), resident=resident, copies=True,
    numerics=functools.partial(of_product, rounding="tma"),
)  # fmt: skip
