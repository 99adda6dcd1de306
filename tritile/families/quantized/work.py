"""The work of products with quantized weights, of both families that unpack in registers: one launch."""

from dataclasses import replace
from typing import Final

from tritile.core.config import Config
from tritile.core.views import QuantizedCall
from tritile.errors import TuningError
from tritile.families.common.fused import extra
from tritile.families.common.work import Buffer, Descriptor, Section, Step, Work
from tritile.families.matmul_tile.work import options, unit
from tritile.families.matmul_tma import family as descriptor
from tritile.families.quantized import family as space
from tritile.families.quantized.kernel import linear_quantized

_POLLS: Final = 64  # some 40 us: longer than parts of one tile lie apart where all programs run at once
MAGIC: Final = {"float16": 0x6400_6400, "bfloat16": 0x4300_4300}  # 1024 and 128, twice


def work(call: QuantizedCall, config: Config, processors: int, early: bool) -> Work:
    """What launches `call` with `config` on a GPU of so many processors.

    `early`: the kernel may start before the one ahead of it is done, and waits in itself.
    Raises TuningError where the config leaves programs with nothing to do.
    """
    (m, n), k = call.out.shape, call.x.shape[1]
    block_m, block_n, block_k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    tiles, split = -(-m // block_m) * -(-n // block_n), config["SPLIT_K"]
    if -(-k // block_k) < split:
        raise TuningError(f"SPLIT_K = {split} leaves programs without a block of K = {k}")
    last = len(call.tensors)
    scratch = (Section("float32", tiles * split * block_m * block_n),) if split > 1 else ()
    turned = replace(call, fused=call.fused.transposed)  # of out^T, which is what the kernel makes
    described = Descriptor(0, call.x.shape, (call.x.strides[0], 1), (block_m, block_k))
    values = {
        "x_ptr": Buffer(0), "x_desc": described if config.family == descriptor.NAME else None,
        "words_ptr": Buffer(1), "scales_ptr": Buffer(2),
        "zeros_ptr": Buffer(3) if call.zeros is not None else None, "out_ptr": Buffer(last - 1),
        "parts_ptr": Buffer(last) if split > 1 else None,
        "counters_ptr": Buffer(last + 1) if split > 1 else None,
        "M": m, "N": n, "K": k, "stride_xm": call.x.strides[0], "stride_xk": call.x.strides[1],
        "magic": MAGIC[call.dtype], "extra": extra(turned, 2, 3 + (call.zeros is not None)),
        "ALIGN_X": unit(call.x.strides[0], call.x.itemsize),
        "ALIGN_N": unit(n, call.out.itemsize), "ALIGN_K": unit(k, call.x.itemsize),
        "BITS": call.bits, "GROUP_SIZE": call.group_size, "ZEROS": call.zeros is not None,
        "MASK_M": m % block_m != 0, "MASK_N": n % block_n != 0, "MASK_K": k % block_k != 0,
        "WAIT": early, "POLLS": _POLLS if tiles * split <= processors else 0,
        "SCALES": space.scales_at_once(config, call.problem),
        "SCALE_SUMS": space.scales_sums(config, call.group_size), "EPILOGUE": turned.fused.epilogue.constants,
    }  # fmt: skip
    values |= dict(config.kwargs)
    args = tuple(values[name] for name in linear_quantized.arg_names)
    step = Step(linear_quantized, (tiles, split, 1), args, options(config) | {"launch_pdl": early})
    return Work((step,), scratch, tiles if split > 1 else 0)
