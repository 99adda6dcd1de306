"""Make float32 products by products of float16 parts, on tensor cores.

The scheme: each row of a, and column of b, is scaled by a power of two so that its largest element is in
[2^14, 2^15). Each scaled element x is split into hi = fp16(x) and lo = fp16(x - hi), where x - hi is exact,
and the product is hi hi + hi lo + lo hi: one product over three parts along K,

    a' = [lo 2^6, hi 2^-6, hi]    b' = [hi 2^-6, lo 2^6, hi],

with the scales undone in the epilogue. (By the 2^6 neither lo nor hi 2^-6 is below what fp16 holds exactly
while |x| >= 2^-8.) The small terms come first, as one sum. Of the large ones tensor cores add up
PROMOTED_EVERY = 64, since they truncate. These sums are added in ordinary fp32 by Kahan's method: tensor
cores add the next 64 to what rounding lost (`common.tiles.carried_sum`).

The error, with u = 2^-24, of each element of the product, is at most

    error_bound(K) |a| |b|  =  u (28 + 10.5 * 64 / 16 + min(256, 3 part / 16) + part / 750) |a| |b|

before it is rounded to the result's type. 8 u: an element with |x| >= 2^-8 loses at most its last bit,
2^-23, and lo lo, left out, is at most 2^-22. 15 u: smaller elements, see below. 10.5 u for each
instruction, of 16 of K, that a sum goes through: Hopper's cut terms 2 bits below the largest one's last in
fp32, and then their sum to fp32, 1 + 17 / 4 units of 2^-23 in all (as Khattak and Mikaitis model them,
arXiv 2512.07004). 3 u for the sums that are added: an addition loses nothing if the total is the larger
term, at most 2 u of the sum if it is not, and what the last one lost is left out, u of the whole. u for
each program but one that shares a tile's K: at most 256, and one for each block of 16. The small terms,
2^-10 of the whole, add part / 780; terms in u^2 are below what is left of part / 750. From K = 128 on all
that is less than the bound of a sum in fp32, K u.

With what is carried the error does not grow with K: simulated, it is 1.4e-7 of the norm for normal numbers,
2.0e-7 for uniform and 2.3e-7 for log-normal ones. Without it, log-normal numbers of 8404 terms are off by
2.9e-7. Torch's fp32 errs by 4.8e-7 to 1.3e-6, and less if cuBLAS shares K among programs (`suits_fp16x3`).

Data that do not suit, found as they are split, without the host (`common.fallback`): elements with 0 < |x|
< 2^-8, some 2^-22 of their row's largest, lose up to 1.5 2^-30 times the other operand's largest, 2^15.
They do no harm if at most K / 64 in each row are such, and rows are dense: 13/16 of each row of one
operand, and 5/16 of the other's, have |x| >= 4. Then K / 8 terms or so are at least 16, which makes the
loss 15 u of |a| |b|. Normal, uniform and log-normal data pass, and those through a ReLU. If they may do
harm, or a row's largest element is not within 2^-60 to 2^60, or there are infinities or NaN, the core does
nothing, and a kernel of plain fp32 does its work.

If K is contiguous a program holds whole rows, which are read once. If rows are strided along K, or are too
long, tiles are split, each by a program, after a launch that reads all for the rows' largest elements. Both
count elements that are not dense, and lossy ones; counts of tiles are added up by atomic operations, and as
they only grow, the tile whose addition takes one past its limit sets the flag: it is the same.
"""

from dataclasses import replace
from math import gcd
from typing import Any, Final, NamedTuple

from tritile.core.call import Fallback, MatmulCall, Memory, View
from tritile.core.config import Config
from tritile.core.problem import PART_UNIT, PROMOTED_EVERY, part_length
from tritile.errors import TuningError
from tritile.families.common.fallback import END, UNFIT
from tritile.families.common.work import Lowered, copied_batch
from tritile.families.matmul_tile import family as tile
from tritile.runtime.work import Buffer, Kernel, Step, Workspace, step_of

reset: Final = Kernel("tritile.families.common.fallback", "reset")
find_peaks: Final = Kernel("tritile.families.fp16x3.kernel", "find_peaks")
split: Final = Kernel("tritile.families.fp16x3.kernel", "split")

_BLOCK: Final = 2048  # elements that a program splits at once; more if whole rows are longer
_WHOLE: Final = {False: 8192, True: 128}  # the largest K of whole rows, by whether K is strided
_TILE: Final = {False: (2, 1024), True: (64, 64)}  # rows and columns of a block if rows are not whole
_LONG: Final = 4096  # K above which whole rows take twice the warps, and tiles twice the columns
_WARPS: Final = 8
_REGISTERS: Final = 64  # of a thread: 1024 threads run on an SM, with at most 16 loaded elements each
_MORE_REGISTERS: Final = 128  # if K is strided, or rows do not start on 16 bytes: more addresses
_ALIGNED: Final = 4  # elements of 16 bytes
_PROGRAMS: Final = 528  # that find peaks, at most: 4 on each SM of an H200
_CHUNKS: Final = 16  # of a row, at most; but
_LEAST: Final = 128  # at least so many programs, by more chunks if rows are few
# The config for data that parts do not suit.
_PLAIN: Final = Config.of(8, 3, "tile", BLOCK_M=64, BLOCK_N=64, BLOCK_K=16, GROUP_M=8)


def suits_fp16x3(m: int, n: int, k: int) -> bool:
    """True if an m x k by k x n product of parts was measured to be twice as fast as torch's fp32 on Hopper.

    At these sizes it errs less than torch's fp32, too (`tuning/NOTES.md`).
    With a smaller K torch has few terms to add; a larger one nobody has measured. If results are smaller
    cuBLAS shares K among programs, so that its sums are more exact. From K = 8448 on it does so for larger
    results too, unless these have tiles enough.
    """
    return 384 <= k <= 32768 and min(m, n) >= 512 and m * n >= (1 << 22 if k <= 8448 else 1 << 24)


def error_bound(k: int) -> float:
    """Return how far an element of the product may be from exact, before rounding, as a share of |a| |b|.

    Holds for finite data and Hopper's tensor cores; the head of this module derives it.
    """
    part = part_length(k)
    shares = min(256, 3 * part / 16)  # programs that share a tile's K are at most 256
    return 2.0**-24 * (28 + 10.5 * PROMOTED_EVERY / 16 + shares + part / 750)


class _Parts(NamedTuple):
    """Hold how one operand is split: arguments of the kernels, their programs, and the result.

    `simple`: few addresses are kept in registers. `words`: of peaks and counts.
    """

    args: dict[str, Any]
    made: dict[str, Any]
    simple: bool
    peaks: int
    programs: int
    words: int
    view: View
    scales: View
    scratch: dict[str, Workspace]


def _warps(k: int) -> int:
    return 2 * _WARPS if _LONG < k <= _WHOLE[False] else _WARPS


def _parts(
    view: View, batch_shape: tuple[int, ...], out_shape: tuple[int, int], side: str, word: int
) -> _Parts:
    """Describe how to split rows of `view`, operand `side`, into parts and their scales. Rows run along K.

    The parts have the operand's layout. A stretched batch is split once. `word`: the first of this operand's
    words.
    """
    rows, k = view.shape
    part, column_major = part_length(k), view.layout == "column"  # rows then lie next to each other
    # Divides the strides, in elements, and the size of the contiguous dimension.
    unit = gcd(max(1, view.align // view.itemsize), rows if column_major else k)
    whole = 1 << (part - 1).bit_length()
    once = whole <= _WHOLE[column_major]  # a row is in one block
    high, wide = _TILE[column_major]
    high, wide = (max(1, _BLOCK // whole), whole) if once else (high, wide * _warps(k) // _WARPS)
    count, shape, stepped, steps = copied_batch(view, batch_shape)
    padded_rows = -(-rows // PART_UNIT) * PART_UNIT
    strides = (1, padded_rows) if column_major else (3 * part, 1)
    matrix = 3 * part * (padded_rows if column_major else rows)
    bands = count * -(-rows // high)
    most = min(_PROGRAMS // bands, max(_CHUNKS, _LEAST // bands), -(-k // wide))
    chunks = 0 if once else max(1, most)
    places = Memory(f"parts_of_{side}", "float16"), Memory(f"scales_of_{side}", "float32")
    upper = side.upper()
    return _Parts(
        {
            f"{side}_ptr": Buffer(view.buffer), f"{side}_matrices": count,
            f"{side}_batch_shape": shape, f"{side}_batch_strides": stepped, f"{side}_rows": rows,
            f"stride_{side}r": view.strides[0], f"stride_{side}c": view.strides[1],
            f"{side}_words": word, f"{side}_chunks": chunks, f"{upper}_TRANSPOSED": column_major,
            f"{upper}_UNIT": unit, f"{upper}_BLOCK_R": high, f"{upper}_BLOCK_C": wide, f"{upper}_ONCE": once,
        },
        {
            f"{side}_parts": Buffer(places[0].buffer), f"{side}_scales": Buffer(places[1].buffer),
            f"stride_{side}pm": matrix, f"stride_{side}pr": strides[0], f"stride_{side}pc": strides[1],
        },
        unit >= _ALIGNED and (once or not column_major),
        bands * chunks,
        bands * -(-part // wide),
        0 if once else bands * high * (chunks + 2),
        places[0].view((rows, 3 * part), strides, tuple(step * matrix for step in steps)),
        places[1].view(out_shape, (1, 0), tuple(step * rows for step in steps)),
        {
            places[0].buffer: Workspace("float16", count * matrix),
            places[1].buffer: Workspace("float32", count * rows),
        },
    )  # fmt: skip


def lowered(call: MatmulCall, early: bool) -> Lowered:
    """Return the launches that split the operands, the product of the parts, and the fallback.

    Raises TuningError if the caller has scales: the parts' scales need their place.
    """
    if call.sides.keys() & {"scale_a", "scale_b"}:
        raise TuningError("fp16x3 has scales of its own, and the product is to be scaled")
    (m, k), n = call.a.shape, call.b.shape[1]
    a = _parts(call.a, call.batch_shape, (m, n), "a", 0)
    b = _parts(call.b.transposed, call.batch_shape, (n, m), "b", a.words)
    flag = Memory("flag", "int32")
    # The words of peaks and counts, if any, are the last workspace.
    counts = {"words": Workspace("int32", a.words + b.words)} if a.words + b.words else {}
    most = _REGISTERS if a.simple and b.simple else _MORE_REGISTERS
    options = {"num_warps": _warps(k), "launch_pdl": early, "maxnreg": most}
    args = {
        "flag_ptr": Buffer(flag.buffer), "words_ptr": Buffer(*counts or [flag.buffer]), "columns": k,
        "WAIT": early, **a.args, **b.args,
    }  # fmt: skip
    if a.peaks + b.peaks:
        begin = Step(find_peaks.jitted, (a.peaks + b.peaks, 1, 1), args, options)
    else:
        begin = step_of(reset, (1, 1, 1), args, {"num_warps": 1, "launch_pdl": early})
    made = {**args, **a.made, **b.made, "part": part_length(k)}
    parts = Step(split.jitted, (a.programs + b.programs, 1, 1), made, options)
    core = replace(
        call,
        a=a.view,
        b=b.view.transposed,
        sides={"scale_a": a.scales, "scale_b": b.scales.transposed, **call.sides},
        fallback=Fallback(flag, 0, int(UNFIT)),
    )
    plain = replace(call, precision="ieee", fallback=Fallback(flag, int(UNFIT), int(END)))
    scratch = {flag.buffer: Workspace("int32", 1), **a.scratch, **b.scratch, **counts}
    return Lowered((begin, parts), core, tile.work(plain, _PLAIN).steps, scratch)
