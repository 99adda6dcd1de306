"""Make products by tiles through pointers, on any GPU: one program makes one tile."""

import itertools
from collections.abc import Iterator
from math import prod
from typing import Any, Final

from tritile.core.call import MatmulCall, View
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import FP8_DTYPES, ITEMSIZE, MatmulProblem, Product
from tritile.families.common.blocks import (
    blocks_fault,
    late_fault,
    launch_fault,
    least_blocks,
    order_fault,
    oversized,
    shared_fault,
)
from tritile.families.common.cost import Program
from tritile.families.common.grids import WIDE_FROM, grid, least_unit, options, unit
from tritile.families.common.products import (
    accumulator_words,
    held,
    in_parts,
    input_precision,
    loads_per_thread,
    uses_tensor_cores,
    warpgroup_mma,
)
from tritile.families.common.rates import multiply_clocks, turning
from tritile.families.common.work import (
    Buffer,
    Kernel,
    Work,
    epilogue_arguments,
    fallback_arguments,
    step_of,
)
from tritile.families.family import Family

gated_tile: Final = Kernel("tritile.families.matmul_tile.gated", "gated_tile")
matmul_tile: Final = Kernel("tritile.families.matmul_tile.kernel", "matmul_tile")

NAME: Final = "tile"
PARAMETERS: Final = ("BLOCK_K", "BLOCK_M", "BLOCK_N", "GROUP_M")
_MAX_BLOCK: Final = 256
MAX_REGISTER_WORDS: Final = 128  # 32-bit words of accumulator a thread can hold and still not spill
_REGISTER_SHARE: Final = 0.88  # share of a thread's registers that accumulator and loads may take together
_SPARED_WORDS: Final = 16.6  # registers that neither accumulator nor loads can have
_WORDS_PER_LOAD: Final = 2.5  # registers that a load keeps busy: address, mask, value
MAX_PLAIN_K: Final = 32  # without tensor cores a block of K is fully unrolled, and summed in plain fp32
PLAIN_FMA_WORDS: Final = 64  # the same where operands and partial sums are in registers too


def shared_bytes(config: Config, problem: Product, device: Device) -> int:
    """Return shared memory that the compiled kernel will ask for, at the least, in bytes.

    A pipelined load of a tile keeps a buffer for each stage in flight: num_stages on tensor cores
    that read shared memory while it is held (wgmma, tcgen05), one less elsewhere.
    """
    held = warpgroup_mma(config, problem, device)
    stages = max(1, config.num_stages if held else config.num_stages - 1)
    k_bytes = config["BLOCK_K"] * problem.itemsize
    columns = config["BLOCK_N"] * problem.rights
    operands = ((config["BLOCK_M"], problem.a_align), (columns, problem.b_align))
    # Copies of less than 4 bytes are not asynchronous, and so not pipelined.
    return sum(size * k_bytes * (stages if align >= 4 else 1) for size, align in operands)


def _fragment_words(config: Config, problem: Product, device: Device) -> float:
    """Return registers of a thread for operands that tensor cores do not read from shared memory."""
    if not device.nvidia or not uses_tensor_cores(problem) or warpgroup_mma(config, problem, device):
        return 0.0
    return float((config["BLOCK_M"] * config["BLOCK_N"] * problem.rights / config.num_warps) ** 0.5)


def _tile_fault(config: Config, problem: Product, device: Device) -> str | None:
    if problem.dtype in FP8_DTYPES and 0 < device.nvidia < 89:
        return f"{problem.dtype} needs compute capability 8.9, not {device.nvidia / 10}"
    for name, least in least_blocks(problem).items():
        if config[name] < least:
            return f"{name} = {config[name]} is below the {least} that tl.dot takes for {problem.dtype}"
    if not uses_tensor_cores(problem) and config["BLOCK_K"] > MAX_PLAIN_K:
        return f"BLOCK_K = {config['BLOCK_K']} unrolls too far without tensor cores, above {MAX_PLAIN_K}"
    late = late_fault(config, problem, device)
    if late is not None:
        return late
    words = accumulator_words(config, problem, device)
    most = MAX_REGISTER_WORDS if uses_tensor_cores(problem) else PLAIN_FMA_WORDS
    if words > most:
        return f"{words} accumulator registers a thread, of {most}"
    held = words + _WORDS_PER_LOAD * loads_per_thread(config, problem, device)
    held += _fragment_words(config, problem, device)
    room = _REGISTER_SHARE * min(255, 65536 // (config.num_warps * device.warp_size))
    if held > room:
        return f"{held:.0f} registers a thread for accumulator and loads, of {room:.0f}"
    return None


def illegal(config: Config, problem: Product, device: Device) -> str | None:
    return (
        blocks_fault(config, PARAMETERS, _MAX_BLOCK)
        or launch_fault(config)
        or shared_fault(shared_bytes(config, problem, device), device)
        or _tile_fault(config, problem, device)
    )


def _configs() -> Iterator[Config]:
    blocks = itertools.product((16, 32, 64, 128, 256), (16, 32, 64, 128, 256), (16, 32, 64, 128, 256))
    for (m, n, k), warps, stages, group in itertools.product(blocks, (2, 4, 8, 16), (2, 3, 4, 5, 6), (1, 8)):
        kwargs = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": group}
        yield Config.of(family=NAME, num_warps=warps, num_stages=stages, **kwargs)


def pointless(config: Config, problem: Product, device: Device) -> bool:
    if order_fault(config, problem):
        return True
    if min(problem.a_align, problem.b_align) < 4 and config.num_stages > 3:
        return True  # copies of less than 4 bytes are not asynchronous: more stages do not help
    return oversized(config, problem, least_blocks(problem))


def resident(config: Config, problem: MatmulProblem, device: Device) -> int:
    threads = config.num_warps * device.warp_size
    registers = min(255, accumulator_words(config, problem, device) + 56)
    return held(device, threads, registers, shared_bytes(config, problem, device), 16)


def cost(config: Config, problem: MatmulProblem, device: Device) -> Program:
    m, n, threads = config["BLOCK_M"], config["BLOCK_N"], config.num_warps * device.warp_size
    tensor_cores, loads = uses_tensor_cores(problem), loads_per_thread(config, problem, device)
    slow = turning(problem, device, None)
    if problem.dtype == "float64":
        # Hopper has warp instructions only here; a block is requested when the last of two is done.
        slow *= 1.0 if config.num_stages > 2 else 1.35
    elif not tensor_cores:
        # Multiply-adds overlap nothing, and a thread with few elements reads much for each.
        slow *= 2 * max(1.0, 8 / (m * n * problem.rights / threads) ** 0.5)
    # Registers that loads keep busy spill sums: most where loads are not asynchronous.
    align = min(problem.a_align, problem.b_align)
    kept = loads * (1.3 if align >= 16 else 4.0 if align >= 4 else 8.0)
    kept += accumulator_words(config, problem, device)
    kept += 2 * _fragment_words(config, problem, device)  # the next ones are loaded ahead
    spilling = 1.0 + max(0.0, kept + _SPARED_WORDS - min(255, 65536 // threads)) / 64
    return Program(
        resident(config, problem, device),
        multiply_clocks(config, problem, device) * slow * spilling,
        not tensor_cores or not device.has_tma or warpgroup_mma(config, problem, device),
        m * n * ITEMSIZE[problem.out_dtype],
        config.num_warps,
        loads * config.num_warps * spilling,
        rights=problem.rights,
    )


def _units(view: View) -> tuple[int, int, int]:
    """Return the largest powers of two that divide a view's row, column and batch strides."""
    rows, columns = (unit(step, view.itemsize) for step in view.strides)
    return rows, columns, least_unit(view.batch_strides, view.itemsize)


def _batch(batch_shape: tuple[int, ...], *views: View) -> tuple[tuple[int, ...], ...]:
    """Return the batch's shape and each operand's strides: never empty, which kernels could not index."""
    if not batch_shape:
        return ((1,), *(((0,),) * len(views)))
    return (batch_shape, *(view.batch_strides for view in views))


def _args(call: MatmulCall) -> dict[str, Any]:
    a, b, out = call.a, call.b, call.out
    (m, k), n = a.shape, b.shape[1]
    batch_shape, a_batch, b_batch, out_batch = _batch(call.batch_shape, a, b, out)
    spans = [view.span for view in (a, b, out, call.up) if view is not None]
    exact = call.dtype == "float32" and call.precision == "ieee"
    return {
        "a_ptr": Buffer(a.buffer), "b_ptr": Buffer(b.buffer), "out_ptr": Buffer(out.buffer),
        "M": m, "N": n, "K": k,
        "stride_am": a.strides[0], "stride_ak": a.strides[1],
        "stride_bk": b.strides[0], "stride_bn": b.strides[1],
        "stride_om": out.strides[0], "stride_on": out.strides[1],
        "batch": prod(batch_shape), "batch_shape": batch_shape,
        "a_batch_strides": a_batch, "b_batch_strides": b_batch, "out_batch_strides": out_batch,
        **epilogue_arguments(call, len(batch_shape)), **fallback_arguments(call),
        "ALIGN_M": unit(m, a.itemsize), "ALIGN_N": unit(n, a.itemsize), "ALIGN_K": unit(k, a.itemsize),
        "ALIGN_A": _units(a), "ALIGN_B": _units(b), "ALIGN_OUT": _units(out),
        "WIDE": max(*spans, m, n, k, prod(batch_shape)) >= WIDE_FROM,
        "PRECISION": input_precision(call), "COMPENSATED": exact, "PROMOTE": in_parts(call),
    }  # fmt: skip


def work(call: MatmulCall, config: Config, processors: int = 0, early: bool = False) -> Work:
    values = _args(call) | dict(config.kwargs)
    if (up := call.up) is not None:
        values |= {
            "up_ptr": Buffer(up.buffer), "stride_uk": up.strides[0], "stride_un": up.strides[1],
            "up_batch_strides": _batch(call.batch_shape, up)[1], "ALIGN_UP": _units(up),
        }  # fmt: skip
    # Which edges tiles overhang.
    values |= {f"MASK_{side}": values[side] % values[f"BLOCK_{side}"] != 0 for side in "MNK"}
    if values["MASK_M"] and 1 not in (values["stride_am"], values["stride_om"]):
        values["ALIGN_M"] = 1  # alignment of M gains nothing here: one kernel for all such M
    tiles = -(-values["M"] // values["BLOCK_M"]) * -(-values["N"] // values["BLOCK_N"])
    kernel = matmul_tile if up is None else gated_tile
    return Work((step_of(kernel, grid(tiles, values["batch"]), values, options(config)),))


FAMILY: Final = Family(
    MatmulProblem.op, NAME, matmul_tile, _configs, illegal, pointless, cost, work,
    also=(gated_tile,), resident=resident,
)  # fmt: skip
