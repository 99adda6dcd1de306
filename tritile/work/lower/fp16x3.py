"""float32 products made of products of float16 parts, on tensor cores."""

from dataclasses import replace
from math import prod
from typing import Any, Final, NamedTuple

from tritile.config import Config
from tritile.errors import TuningError
from tritile.kernels.split import split
from tritile.kernels.verdict import END, EXTREME, UNFIT, reset
from tritile.problem.parts import PART_UNIT, part_length
from tritile.views import MatmulCall, Placed, Verdict, View
from tritile.work import tile
from tritile.work.values import Buffer, Section, Step

_WARPS: Final = 8  # of a program that splits
_ALONG: Final = (1, 4096)  # rows and columns that it splits at once where K is contiguous
_WHOLE: Final = 8192  # K up to which it then reads a row once
_ACROSS: Final = (16, 256)  # and where it is not
# What makes the product of data that parts do not suit: three products in TF32, or plain fp32.
_TF32X3: Final = Config.of(8, 3, "tile", BLOCK_M=128, BLOCK_N=64, BLOCK_K=32, GROUP_M=8)
_PLAIN: Final = Config.of(8, 3, "tile", BLOCK_M=128, BLOCK_N=64, BLOCK_K=32, GROUP_M=8)


class _Parts(NamedTuple):
    """How one operand is split: arguments of the kernel, its programs, and what comes of it."""

    args: tuple[Any, ...]
    blocks: tuple[bool, int, int]
    programs: int
    view: View
    scales: View
    sections: tuple[Section, Section]


def _blocks(part: int, contiguous: bool) -> tuple[bool, int, int]:
    """Whether a row is read once, and the rows and columns of a block."""
    rows, columns = _ALONG if contiguous else _ACROSS
    whole = 1 << (part - 1).bit_length()
    if whole <= (_WHOLE if contiguous else columns):
        return True, max(1, rows * columns // whole), whole
    return False, rows, columns


def _parts(
    view: View, batch_shape: tuple[int, ...], out_shape: tuple[int, int], source: int, buffer: int
) -> _Parts:
    """How to split rows of `view`, buffer `source`, into buffers `buffer` and the next. Rows run along K.

    The parts lie as the operand does, so that nothing is turned over. A stretched batch is split once.
    """
    rows, k = view.shape
    part = part_length(k)
    turned = view.layout == "column"
    across = -(-rows // PART_UNIT) * PART_UNIT
    strides = (1, across) if turned else (3 * part, 1)
    matrix = 3 * part * (across if turned else rows)
    dims = [(n, step) for n, step in zip(batch_shape, view.batch_strides, strict=True) if n > 1 and step]
    count = prod(n for n, _ in dims)
    steps, before = [], count
    for n, step in zip(batch_shape, view.batch_strides, strict=True):
        before //= n if n > 1 and step else 1
        steps.append(before if n > 1 and step else 0)
    shape, stepped = zip(*dims, strict=True) if dims else ((1,), (0,))
    blocks = _blocks(part, not turned)
    args = (
        Buffer(source), Buffer(buffer), Buffer(buffer + 1), count, tuple(shape), tuple(stepped), rows,
        *view.strides, matrix, *strides,
    )  # fmt: skip
    places = Placed(buffer, "float16"), Placed(buffer + 1, "float32")
    return _Parts(
        args,
        blocks,
        count * -(-rows // blocks[1]),
        View(places[0], (rows, 3 * part), strides, tuple(step * matrix for step in steps), 2),
        View(places[1], out_shape, (1, 0), tuple(step * rows for step in steps), 4),
        (Section("float16", count * matrix), Section("float32", count * rows)),
    )


def _otherwise(call: MatmulCall, precision: str, config: Config, verdict: Verdict) -> Step:
    """The product by the tile kernel, where the verdict says so: the first of the workspaces."""
    (step,) = tile.work(replace(call, precision=precision, verdict=verdict), config).steps
    return step


def steps_of(
    call: MatmulCall, early: bool
) -> tuple[tuple[Step, ...], MatmulCall, tuple[Step, ...], tuple[Section, ...]]:
    """The launches before the core, the core, those after it, and their workspaces.

    Raises TuningError where the caller has scales of its own: the parts' take their place.
    """
    if call.fused.scale_a is not None or call.fused.scale_b is not None:
        raise TuningError("fp16x3 has scales of its own, and the product is to be scaled")
    first = len(call.tensors)
    out_shape = (call.a.shape[0], call.b.shape[1])
    a = _parts(call.a, call.batch_shape, out_shape, 0, first + 1)
    b = _parts(call.b.transposed, call.batch_shape, out_shape[::-1], 1, first + 3)
    verdict, word = Buffer(first), Placed(first, "int32")
    k = call.a.shape[1]
    begin = Step(reset, (1, 1, 1), (verdict, early), {"num_warps": 1, "launch_pdl": early})
    args = (*a.args, *b.args, verdict, k, part_length(k), *a.blocks, *b.blocks, early)
    options = {"num_warps": _WARPS, "launch_pdl": early}
    divide = Step(split, (a.programs + b.programs, 1, 1), args, options)
    core = replace(
        call,
        a=a.view,
        b=b.view.transposed,
        dtype="float16",
        fused=replace(call.fused, scale_a=a.scales, scale_b=b.scales.transposed),
        verdict=Verdict(word, 0, UNFIT.value),
    )
    after = (
        _otherwise(call, "tf32x3", _TF32X3, Verdict(word, UNFIT.value, EXTREME.value)),
        _otherwise(call, "ieee", _PLAIN, Verdict(word, EXTREME.value, END.value)),
    )
    return (begin, divide), core, after, (Section("int32", 1), *a.sections, *b.sections)
