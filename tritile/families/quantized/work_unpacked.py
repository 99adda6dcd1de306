"""The work of products with quantized weights that are unpacked in memory first: a launch, then a product."""

from typing import Final

from tritile.core.config import Config
from tritile.core.problem import unpacked_row, words_shape
from tritile.core.views import MatmulCall, Placed, QuantizedCall, View
from tritile.families.common.work import Buffer, Section, Step, Work
from tritile.families.lowering import Lowered, joined
from tritile.families.matmul_tma.work import warpgroups_work
from tritile.families.quantized.unpack import unpack
from tritile.families.quantized.unpacked import dense
from tritile.families.quantized.work import MAGIC

# Rows and columns of an unpacked tile, and its warps. A thread reads 16 bytes of 4-bit numbers, and the 16
# rows that a weight is padded to are never overhung.
_TILE: Final = (16, 256, 4)


def lowered(call: QuantizedCall, early: bool) -> Lowered:
    """The dense product, behind the launch that writes the weight (N, K) into a workspace, row by row."""
    n, k = call.out.shape[1], call.x.shape[1]
    block_n, block_k, warps = _TILE
    rows, row = words_shape(n, k, call.bits)[0] * 8, unpacked_row(k)
    place, zeros = Placed(len(call.tensors), call.dtype), call.zeros is not None
    values = {
        "words_ptr": Buffer(1), "scales_ptr": Buffer(2), "zeros_ptr": Buffer(3) if zeros else None,
        "out_ptr": Buffer(place.buffer), "rows": rows, "row": row, "magic": MAGIC[call.dtype],
        "BITS": call.bits, "GROUP_SIZE": call.group_size, "ZEROS": zeros,
        "MASK_K": row % block_k != 0, "WAIT": early, "BLOCK_N": block_n, "BLOCK_K": block_k,
    }  # fmt: skip
    args = tuple(values[name] for name in unpack.arg_names)
    programs = rows // block_n * -(-row // block_k)
    step = Step(unpack, (programs, 1, 1), args, {"num_warps": warps, "launch_pdl": early})
    weight = View(place, (n, k), (row, 1), (), call.out.itemsize)
    dtypes = (call.dtype, call.dtype)
    core = MatmulCall(call.x, weight.transposed, call.out, (), *dtypes, "ieee", call.fused)
    return Lowered((step,), core, scratch=(Section(call.dtype, rows * row),))


def work(call: QuantizedCall, config: Config, processors: int, early: bool) -> Work:
    """What launches `call` with `config` on a GPU of so many processors.

    `early`: kernels may start before the one ahead of them is done, and wait in themselves.
    Raises TuningError where no descriptor can see the operands.
    """
    parts = lowered(call, early)
    return joined(call, parts, warpgroups_work(parts.core, dense(config), processors, early))
