"""Make IEEE fp32 products of a column-major b by a row-major copy of b.

Without tensor cores a thread multiplies an element of a by several of a row of b. It reads these at once
where they are contiguous, else one by one: on an H200 8192^3 takes 29 ms or 55. The copy moves 8 bytes an
element of b, 0.14 ms of that.
"""

from dataclasses import replace
from typing import Final

from tritile.core.call import MatmulCall, Memory
from tritile.families.common.work import Lowered, copied_batch
from tritile.runtime.work import Buffer, Kernel, Step, Workspace

lay_rows: Final = Kernel("tritile.families.rows.kernel", "lay_rows")

_ROW: Final = 32  # elements, 128 bytes: rows of the copy are padded to a multiple
_TILE: Final = (64, 64, 4)  # rows and columns, and warps


def lowered(call: MatmulCall, early: bool) -> Lowered:
    b, place = call.b, Memory("rows_of_b", call.b.dtype)
    (rows, columns), (block_r, block_c, warps) = b.shape, _TILE
    padded = -(-columns // _ROW) * _ROW
    count, shape, strides, steps = copied_batch(b, call.batch_shape)
    args = {
        "source": Buffer(b.buffer), "copy": Buffer(place.buffer),
        "batch_shape": shape, "batch_strides": strides, "rows": rows, "columns": columns,
        "stride_sr": b.strides[0], "stride_sc": b.strides[1], "stride_cr": padded,
        "ALIGN_C": _ROW, "BLOCK_R": block_r, "BLOCK_C": block_c, "WAIT": early,
    }  # fmt: skip
    tiles = count * -(-rows // block_r) * -(-columns // block_c)
    step = Step(lay_rows.jitted, (tiles, 1, 1), args, {"num_warps": warps, "launch_pdl": early})
    matrix = rows * padded
    copy = place.view(b.shape, (padded, 1), tuple(n * matrix for n in steps))
    return Lowered((step,), replace(call, b=copy), (), {place.buffer: Workspace(b.dtype, count * matrix)})
