"""Make int8 products with zero points: sum rows and columns first, and correct in the epilogue.

(a - za) (b - zb) sums over K to a b - za (column sums of b - K zb) - zb (row sums of a), exactly in int32.
"""

from dataclasses import replace
from typing import Final

from tritile.core.views import MatmulCall, Placed, View
from tritile.families.common.lowered import Lowered
from tritile.families.common.work import Buffer, Kernel, Section, Step, buffer_of

add_up: Final = Kernel("tritile.families.zeros.kernel", "add_up")

_WARPS: Final = 4
_ALONG: Final = (4, 1024)  # vectors and elements of K of a program, where K is contiguous
_ACROSS: Final = (64, 64)  # and where it is not


def wanted(call: MatmulCall) -> bool:
    """Tell whether sums for a product's zero points are still to be made."""
    fused = call.fused
    made = fused.sums_a is not None or fused.sums_b is not None
    return not made and (fused.zero_a is not None or fused.zero_b is not None)


def _block(stride: int) -> tuple[int, int]:
    return _ALONG if stride == 1 else _ACROSS


def lowered(call: MatmulCall, early: bool) -> Lowered:
    """Return the launch that sums, and the product with these sums."""
    (m, k), n, fused = call.a.shape, call.b.shape[1], call.fused
    shape = (m, n)
    rows = m if fused.zero_b is not None else 0
    columns = n if fused.zero_a is not None else 0
    of_a, of_b = "sums_of_a", "sums_of_b"
    scratch = {name: Section("int32", count) for name, count in ((of_a, rows), (of_b, columns)) if count}
    zero: tuple[Buffer | None, int] = (None, 0)
    if fused.zero_b is not None and columns:
        zero = buffer_of(fused.zero_b.tensor, "zero_b"), fused.zero_b.strides[1]
    blocks = _block(call.a.strides[1]), _block(call.b.strides[0])
    args = {
        "a_ptr": buffer_of(call.a.tensor, "a"), "a_sums_ptr": Buffer(of_a if rows else of_b), "a_count": rows,
        "stride_am": call.a.strides[0], "stride_ak": call.a.strides[1],
        "b_ptr": buffer_of(call.b.tensor, "b"), "b_sums_ptr": Buffer(of_b if columns else of_a),
        "b_count": columns, "stride_bn": call.b.strides[1], "stride_bk": call.b.strides[0],
        "zero_ptr": zero[0], "stride_zero": zero[1],
        "K": k, "A_BLOCK": blocks[0], "B_BLOCK": blocks[1], "WAIT": early,
    }  # fmt: skip
    programs = -(-rows // blocks[0][0]) + -(-columns // blocks[1][0])
    step = Step(add_up.jitted, (programs, 1, 1), args, {"num_warps": _WARPS, "launch_pdl": early})
    sums = replace(
        fused,
        sums_a=View(Placed(of_a, "int32"), shape, (1, 0), (), 4) if rows else None,
        sums_b=View(Placed(of_b, "int32"), shape, (0, 1), (), 4) if columns else None,
    )
    return Lowered((step,), replace(call, fused=sums), (), scratch)
