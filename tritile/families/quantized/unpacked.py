"""Make products whose quantized weight is unpacked in memory first, by the configs of warpgroups.

One launch writes the weight as 16-bit floats, which the dense kernel reads: 2 N K bytes there and back,
whatever M is. The fused kernels move none of these, but unpack the weight again for each row of tiles while
their tensor cores wait.
"""

from dataclasses import replace
from typing import Final

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import QuantizedProblem, unpacked_row, words_shape
from tritile.core.views import MatmulCall, Placed, QuantizedCall, View
from tritile.families.common.lowered import Lowered
from tritile.families.common.numerics import Numerics
from tritile.families.common.tma_time import TmaFit
from tritile.families.common.work import Buffer, Kernel, Section, Work, step_of
from tritile.families.family import Family
from tritile.families.matmul_wgmma import family as warpgroups
from tritile.families.quantized.family import BLOCKS_M, MAGIC, WEIGHTS, canonical

unpack: Final = Kernel("tritile.families.quantized.unpack", "unpack")

NAME: Final = "unpacked"
# Rows and columns of an unpacked tile, and its warps. A thread reads 16 bytes of 4-bit numbers, and the 16
# rows that a weight is padded to are never overhung.
_TILE: Final = (16, 256, 4)


def dense(config: Config) -> Config:
    return config.derived(family=warpgroups.NAME)


def illegal(config: Config, problem: QuantizedProblem, device: Device) -> str | None:
    return warpgroups.KIND.illegal(dense(config), problem.product, device)


def pointless(config: Config, problem: QuantizedProblem, device: Device) -> bool:
    return warpgroups.KIND.pointless(dense(config), problem.product, device)


def contends(problem: QuantizedProblem) -> bool:
    """Tell whether the family can be the fastest: not where one fused tile has all rows.

    Such a tile unpacks each number only once as well. At 256 rows the copy still takes about as long as the
    product: 2.5 bytes at 3.8 TB/s beside 512 operations at 700 TFLOP/s, for each number of 4 bits on an H200.
    """
    return problem.m > max(BLOCKS_M)


def predicted_us(config: Config, problem: QuantizedProblem, device: Device) -> float:
    bytes_moved = problem.weight_bytes + problem.unpacked_bytes
    copy_us = bytes_moved / (device.memory_gbps * TmaFit.repack_share * 1e3) + TmaFit.repack_us
    return warpgroups.KIND.predicted_us(dense(config), problem.product, device) + copy_us


def lowered(call: QuantizedCall, early: bool) -> Lowered:
    """Return the dense product, behind the launch that writes the weight (N, K) to a workspace, row-major."""
    n, k = call.out.shape[1], call.x.shape[1]
    block_n, block_k, warps = _TILE
    rows, row = words_shape(n, k, call.bits)[0] * 8, unpacked_row(k)
    place, zeros = Placed("weight", call.dtype), call.zeros is not None
    values = {
        "words_ptr": Buffer("words"), "scales_ptr": Buffer("scales"),
        "zeros_ptr": Buffer("zeros") if zeros else None,
        "out_ptr": Buffer(place.buffer), "rows": rows, "row": row, "magic": MAGIC[call.dtype],
        "BITS": call.bits, "GROUP_SIZE": call.group_size, "ZEROS": zeros,
        "MASK_K": row % block_k != 0, "WAIT": early, "BLOCK_N": block_n, "BLOCK_K": block_k,
    }  # fmt: skip
    programs = rows // block_n * -(-row // block_k)
    step = step_of(unpack, (programs, 1, 1), values, {"num_warps": warps, "launch_pdl": early})
    weight = View(place, (n, k), (row, 1), (), call.out.itemsize)
    dtypes = (call.dtype, call.dtype)
    x = replace(call.x, tensor=Placed("x", call.dtype, call.x.tensor.data_ptr()))
    core = MatmulCall(x, weight.transposed, call.out, (), *dtypes, "ieee", call.fused)
    return Lowered((step,), core, scratch={place.buffer: Section(call.dtype, rows * row)})


def work(call: QuantizedCall, config: Config, processors: int, early: bool) -> Work:
    parts = lowered(call, early)
    return parts.around(warpgroups.KIND.work(parts.core, dense(config), processors, early))


def numerics(config: Config, problem: QuantizedProblem, device: Device) -> Numerics:
    """Return what decides the bits of an element: x comes first, and weights are scaled."""
    return Numerics("warpgroup", turned=True, scaled=WEIGHTS)


FAMILY: Final = Family(
    QuantizedProblem.op, NAME, warpgroups.FAMILY.kernel,
    lambda: (replace(config, family=NAME) for config in warpgroups.FAMILY.configs),
    illegal, pointless, predicted_us, work,
    also=(unpack, *warpgroups.FAMILY.also), numerics=numerics, canonical=canonical, contends=contends,
)  # fmt: skip
