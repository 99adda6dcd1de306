"""The configs of the descriptor kernel: tiles by TMA, on NVIDIA GPUs from Hopper on."""

import itertools
from collections.abc import Iterator
from typing import Final

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import ITEMSIZE, MatmulProblem, Product, epilogue_of
from tritile.families.common.blocks import blocks_fault, least_blocks, order_fault, oversized, promotes_late
from tritile.families.matmul_tile.family import accumulator_words, uses_tensor_cores

NAME: Final = "descriptor"
PARAMETERS: Final = (
    "BLOCK_K", "BLOCK_M", "BLOCK_N", "GROUP_M", "PERSISTENT", "SPLIT_K", "SUBTILES"
)  # fmt: skip
MAX_SHARED: Final = 16384  # tiles that several programs may make together
BARRIER: Final = 8  # bytes of shared memory that a stage of a pipeline with TMA takes beside its tiles
_MAX_SIZE: Final = 2**31 - 2**16  # coordinates are 32 bits
_MAX_WORDS: Final = 128
_TURNED_FROM: Final = 512  # rows or columns that read an element whose copy moves 8 bytes


def reachable(problem: MatmulProblem) -> str | None:
    """Why no kernel with tensor descriptors can make this product, or None where one can.

    An operand that no descriptor can see is copied first (see `copied`); the result is stored either way.
    """
    if problem.out_layout != "row":
        return f"out is {problem.out_layout}, not row by row"
    if max(problem.m, problem.n, problem.k) > _MAX_SIZE:
        return f"sizes above {_MAX_SIZE}"
    return None


def turned(problem: MatmulProblem) -> tuple[bool, bool]:
    """Which of a and b are copied so that K is contiguous: TF32's tensor cores on Hopper take no other.

    Left as they are, the kernel turns each tile over in registers, at half the speed. Where the other operand
    is thin, an element is read too few times to be copied for that alone.
    """
    if problem.precision != "tf32":
        return False, False
    a, b = _unreadable(problem)
    return (
        problem.a_layout == "column" and (a or problem.n >= _TURNED_FROM),
        problem.b_layout != "column" and (b or problem.m >= _TURNED_FROM),
    )


def _unreadable(problem: MatmulProblem) -> tuple[bool, bool]:
    """Which of a and b no descriptor can see where they lie."""
    sides = (problem.a_layout, problem.a_align), (problem.b_layout, problem.b_align)
    a, b = (align < 16 or layout == "strided" for layout, align in sides)
    return a, b


def copied(problem: MatmulProblem) -> tuple[bool, bool]:
    """Which of a and b are copied before kernels by descriptor read them."""
    a, b = (any(pair) for pair in zip(_unreadable(problem), turned(problem), strict=True))
    return a, b


def shared_bytes(config: Config, problem: MatmulProblem) -> int:
    """Shared memory that the compiled kernel will ask for, at the least, in bytes."""
    tile = (config["BLOCK_M"] + config["BLOCK_N"] * problem.rights) * config["BLOCK_K"] * problem.itemsize
    fused = epilogue_of(problem.epilogue)
    # What is read tile by tile comes in another layout than sums are in, which go through shared memory then.
    size = 4 if "full" in (fused.bias, fused.residual, fused.bias_up) else ITEMSIZE[problem.out_dtype]
    part = config["BLOCK_M"] * config["BLOCK_N"] // config["SUBTILES"] * size
    # Stored by pointers, 16-bit results take less, or none.
    counted = problem.out_align == 16 or ITEMSIZE[problem.out_dtype] >= 4
    stored = part if config["PERSISTENT"] and counted else 0
    return (tile + BARRIER) * config.num_stages + stored


def tiles(config: Config, problem: MatmulProblem) -> int:
    """Tiles of the result, over all of the batch."""
    return problem.batch * -(-problem.m // config["BLOCK_M"]) * -(-problem.n // config["BLOCK_N"])


def fault(config: Config, problem: Product, device: Device, parameters: tuple[str, ...]) -> str | None:
    """Why no product may be made so from tiles that TMA brings, be it one of groups or not."""
    if device.nvidia < 90 or device.nvidia >= 120:
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
    return None


def illegal(config: Config, problem: MatmulProblem, device: Device) -> str | None:
    """Why `config` may not run `problem` on `device`, or None where it may."""
    reason = fault(config, problem, device, PARAMETERS) or reachable(problem)
    if reason is not None:
        return reason
    if problem.block_scales and config["BLOCK_K"] > 128:
        return f"BLOCK_K = {config['BLOCK_K']} has several scales"
    for name, extent in (
        ("BLOCK_K", config["BLOCK_K"]),
        ("BLOCK_M", config["BLOCK_M"]),
        ("BLOCK_N", config["BLOCK_N"]),
    ):
        if extent * problem.itemsize < 16:
            return f"{name} = {extent} is under 16 bytes of {problem.dtype}"
    if promotes_late(config, problem):
        return f"BLOCK_K = {config['BLOCK_K']} is too much of parts to be summed at once"
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
    shared = shared_bytes(config, problem)
    if shared > device.shared_memory:
        return f"{shared} bytes of shared memory, of {device.shared_memory}"
    return None


def _warps(m: int, n: int) -> tuple[int, ...]:
    """Warps that suit a tile: whole warpgroups for those that fill the tensor cores of Hopper."""
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


CONFIGS: Final[dict[str, tuple[Config, ...]]] = {"matmul": tuple(_configs())}


def pointless(config: Config, problem: MatmulProblem, device: Device) -> bool:
    """Whether another config of the family does the same or strictly less work."""
    if order_fault(config, problem):
        return True
    if config["BLOCK_K"] == 32 and problem.itemsize < 4:
        return True  # a longer block takes fewer turns
    made = tiles(config, problem)
    if config["PERSISTENT"] and made <= device.processors:
        return True
    if config["SPLIT_K"] > 1 and made * config["SPLIT_K"] > 4 * device.processors:
        return True  # there are tiles enough
    stage = (config["BLOCK_M"] + config["BLOCK_N"] * problem.rights) * config["BLOCK_K"] * problem.itemsize
    if config.num_stages < 5 and shared_bytes(config, problem) + 2 * stage <= device.shared_memory:
        return True  # room for two more stages
    least = least_blocks(problem) | {"BLOCK_K": 128}
    return oversized(config, problem, least)
