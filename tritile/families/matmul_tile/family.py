"""Make products by tiles through pointers, on any GPU: one program makes one tile."""

import itertools
from collections.abc import Iterator
from math import prod
from typing import Any, Final

from tritile.core.call import MatmulCall, View
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import FP8_DTYPES, ITEMSIZE, MatmulProblem, Product
from tritile.core.versions import parsed
from tritile.families.common import products
from tritile.families.common.cost import Program
from tritile.families.common.grids import WIDE_FROM, grid, options, unit, units
from tritile.families.common.rates import multiply_clocks, slowdown
from tritile.families.common.work import epilogue_arguments, fallback_arguments
from tritile.families.family import Family
from tritile.runtime.work import Buffer, Kernel, Work, step_of

gated_tile: Final = Kernel("tritile.families.matmul_tile.gated", "gated_tile")
matmul_tile: Final = Kernel("tritile.families.matmul_tile.kernel", "matmul_tile")

NAME: Final = "tile"
PARAMETERS: Final = ("BLOCK_K", "BLOCK_M", "BLOCK_N", "GROUP_M")
_REGISTER_SHARE: Final = 0.88  # share of a thread's registers that accumulator and loads may take together
_SPARED_WORDS: Final = 16.6  # registers that neither accumulator nor loads can have
_WORDS_PER_LOAD: Final = 2.5  # registers that a load keeps busy: address, mask, value
_PLAIN_K: Final = 32  # without tensor cores a block of K is fully unrolled, and summed in plain fp32
_PLAIN_WORDS: Final = 64  # of accumulator if operands and partial sums are in registers too


def _configs() -> Iterator[Config]:
    blocks = itertools.product((16, 32, 64, 128, 256), repeat=3)
    for (m, n, k), warps, stages, group in itertools.product(blocks, (2, 4, 8, 16), (2, 3, 4, 5, 6), (1, 8)):
        yield Config.of(warps, stages, NAME, BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP_M=group)


def shared_bytes(config: Config, problem: Product, device: Device) -> int:
    """Return the least shared memory that the compiled kernel will need, in bytes.

    A pipelined load of a tile keeps a buffer for each stage in flight: num_stages on tensor cores
    that read operands from shared memory (wgmma, tcgen05), and on gfx950 from Triton 3.8 on; one less
    elsewhere.
    """
    copies_to_shared = device.arch == "gfx950" and parsed(device.triton) >= (3, 8)
    is_last_kept = copies_to_shared or products.warpgroup_mma(config, problem, device)
    in_flight = config.num_stages - (not is_last_kept)
    k_bytes = config["BLOCK_K"] * problem.itemsize
    sides = ((config["BLOCK_M"], problem.a_align), (config["BLOCK_N"] * problem.rights, problem.b_align))
    # Copies of less than 4 bytes are not asynchronous, and so not pipelined.
    return sum(size * k_bytes * (max(1, in_flight) if align >= 4 else 1) for size, align in sides)


def _fragment_words(config: Config, problem: Product, device: Device) -> float:
    """Return registers of a thread for operands that tensor cores do not read from shared memory."""
    by_warps = device.nvidia and products.uses_tensor_cores(problem)
    if not by_warps or products.warpgroup_mma(config, problem, device):
        return 0.0
    return float((config["BLOCK_M"] * config["BLOCK_N"] * problem.rights / config.num_warps) ** 0.5)


def illegal(config: Config, problem: Product, device: Device) -> str | None:
    tensor_cores = products.uses_tensor_cores(problem)
    if (reason := products.config_fault(config, PARAMETERS)) is not None:
        return reason
    if problem.dtype in FP8_DTYPES and 0 < device.nvidia < 89:
        return f"{problem.dtype} needs compute capability 8.9, not {device.nvidia / 10}"
    if not tensor_cores and config["BLOCK_K"] > _PLAIN_K:
        return f"BLOCK_K = {config['BLOCK_K']} unrolls too far without tensor cores, above {_PLAIN_K}"
    words = products.accumulator_words(config, problem, device)
    reason = (
        products.dot_fault(config, problem)
        or products.late_fault(config, problem, device)
        or products.resource_fault(
            device,
            shared_bytes(config, problem, device),
            words,
            products.MAX_WORDS if tensor_cores else _PLAIN_WORDS,
        )
    )
    if reason is not None:
        return reason
    busy = words + _WORDS_PER_LOAD * products.loads_per_thread(config, problem, device)
    busy += _fragment_words(config, problem, device)
    room = _REGISTER_SHARE * min(255, 65536 // (config.num_warps * device.warp_size))
    return f"{busy:.0f} registers a thread for accumulator and loads, of {room:.0f}" if busy > room else None


def is_dominated(config: Config, problem: Product, device: Device) -> bool:
    # Copies of less than 4 bytes are not asynchronous: more stages do not help.
    deep = min(problem.a_align, problem.b_align) < 4 and config.num_stages > 3
    return deep or products.is_disordered(config, problem) or products.is_oversized(config, problem)


def resident(config: Config, problem: MatmulProblem, device: Device) -> int:
    registers = min(255, products.accumulator_words(config, problem, device) + 56)
    threads, shared = config.num_warps * device.warp_size, shared_bytes(config, problem, device)
    return products.programs_per_sm(device, threads, registers, shared, 16)


def cost(config: Config, problem: MatmulProblem, device: Device) -> Program:
    m, n, threads = config["BLOCK_M"], config["BLOCK_N"], config.num_warps * device.warp_size
    tensor_cores = products.uses_tensor_cores(problem)
    loads = products.loads_per_thread(config, problem, device)
    slow = slowdown(problem, device, None)
    if problem.dtype == "float64":
        # Hopper has warp instructions only here; a block is requested when the last of two is done.
        slow *= 1.0 if config.num_stages > 2 else 1.35
    elif not tensor_cores:
        # Multiply-adds overlap nothing, and a thread with few elements reads much for each.
        slow *= 2 * max(1.0, 8 / (m * n * problem.rights / threads) ** 0.5)
    # Registers that loads keep busy spill sums: most if loads are not asynchronous.
    align = min(problem.a_align, problem.b_align)
    kept = loads * (1.3 if align >= 16 else 4.0 if align >= 4 else 8.0)
    kept += products.accumulator_words(config, problem, device)
    kept += 2 * _fragment_words(config, problem, device)  # the next ones are loaded ahead
    spilling = 1.0 + max(0.0, kept + _SPARED_WORDS - min(255, 65536 // threads)) / 64
    return Program(
        resident(config, problem, device),
        multiply_clocks(config, problem, device) * slow * spilling,
        not tensor_cores or not device.has_tma or products.warpgroup_mma(config, problem, device),
        m * n * ITEMSIZE[problem.out_dtype],
        config.num_warps,
        loads * config.num_warps * spilling,
        rights=problem.rights,
    )


def work(call: MatmulCall, config: Config, processors: int = 0, early: bool = False) -> Work:
    a, b, out, up = call.a, call.b, call.out, call.up
    (m, k), n, shape = a.shape, b.shape[1], call.batch_shape or (1,)  # kernels cannot index an empty batch

    def steps(view: View) -> tuple[int, ...]:
        return view.batch_strides if call.batch_shape else (0,)

    spans = [view.span for view in (a, b, out, up) if view is not None]
    # Which edges tiles overhang.
    masks = {
        f"MASK_{side}": size % config[f"BLOCK_{side}"] != 0
        for side, size in zip("MNK", (m, n, k), strict=True)
    }
    # Alignment of M may gain nothing: one kernel for all such M.
    any_m = masks["MASK_M"] and 1 not in (a.strides[0], out.strides[0])
    values: dict[str, Any] = {
        "a_ptr": Buffer(a.buffer), "b_ptr": Buffer(b.buffer), "out_ptr": Buffer(out.buffer),
        "M": m, "N": n, "K": k,
        "stride_am": a.strides[0], "stride_ak": a.strides[1],
        "stride_bk": b.strides[0], "stride_bn": b.strides[1],
        "stride_om": out.strides[0], "stride_on": out.strides[1],
        "batch": prod(shape), "batch_shape": shape,
        "a_batch_strides": steps(a), "b_batch_strides": steps(b), "out_batch_strides": steps(out),
        **epilogue_arguments(call, len(shape)), **fallback_arguments(call),
        "ALIGN_M": 1 if any_m else unit(m, a.itemsize), "ALIGN_N": unit(n, a.itemsize),
        "ALIGN_K": unit(k, a.itemsize),
        "ALIGN_A": units(a), "ALIGN_B": units(b), "ALIGN_OUT": units(out),
        "WIDE": max(*spans, m, n, k, prod(shape)) >= WIDE_FROM,
        "PRECISION": "ieee" if call.problem.promoted else call.precision, "PROMOTE": call.problem.promoted,
        "COMPENSATED": call.dtype == "float32" and call.precision == "ieee",
        **masks, **dict(config.kwargs),
    }  # fmt: skip
    if up is not None:
        values |= {
            "up_ptr": Buffer(up.buffer), "stride_uk": up.strides[0], "stride_un": up.strides[1],
            "up_batch_strides": steps(up), "ALIGN_UP": units(up),
        }  # fmt: skip
    tiles = -(-m // config["BLOCK_M"]) * -(-n // config["BLOCK_N"])
    kernel = matmul_tile if up is None else gated_tile
    return Work((step_of(kernel, grid(tiles, prod(shape)), values, options(config)),))


FAMILY: Final = Family(
    MatmulProblem.op, NAME, matmul_tile, _configs, illegal, is_dominated, cost, work,
    also=(gated_tile,), resident=resident,
)  # fmt: skip
