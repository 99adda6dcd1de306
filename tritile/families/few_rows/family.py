"""Make products of one to eight rows, or columns, without tensor cores, on NVIDIA GPUs from Hopper on.

The few rows are x, the other operand is w: it is read once, as it lies, and bounds the time. A product of few
columns is made as out.T = b.T @ a.T.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from math import gcd, prod
from typing import Any, Final, NamedTuple

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import MatmulProblem
from tritile.core.views import MatmulCall, Placed, View
from tritile.errors import TuningError
from tritile.families.common.blocks import blocks_fault, launch_fault, shared_fault
from tritile.families.common.fused import extra
from tritile.families.common.grids import WIDE_FROM, grid, options
from tritile.families.common.numerics import Numerics, canonical_product
from tritile.families.common.work import COUNTERS, Buffer, Section, Work, buffer_of, step_of
from tritile.families.family import Family
from tritile.families.few_rows.kernel import rows_along_k, rows_along_n
from tritile.families.matmul_tma.family import MAX_SHARED

NAME: Final = "few_rows"
PARAMETERS: Final = ("BLOCK_K", "BLOCK_M", "BLOCK_N", "SPLIT_K")
MOST_ROWS: Final = 8
_DTYPES: Final = ("float16", "bfloat16", "float32")
_WORD: Final = 16  # bytes
_MAX_BLOCK: Final = 4096
_MAX_SPLIT: Final = 32  # programs that share a tile
_MAX_SUMS: Final = 128  # registers of a thread that hold sums
# The formula's constants, in clocks unless said otherwise: estimates, not fitted yet.
_LATENCY: Final = 1200.0  # from requesting a tile to having it, from device memory
_TURN: Final = 60.0  # barriers and bookkeeping in an iteration
_START: Final = 3000.0  # to start a program, and to sum over its threads
_BANDWIDTH: Final = 0.85  # share of the peak bandwidth of device memory that is reached
_LAUNCH_US: Final = 1.0
_SHARED_US: Final = 1.5  # for programs that share a tile to sum their parts


class _Sides(NamedTuple):
    """Hold a product as its kernels see it: few rows of x times w.

    `along_k`: w is contiguous along K, else along its columns. `whole`: rows of w begin and end on words.
    """

    rows: int
    columns: int
    along_k: bool
    contiguous: bool
    whole: bool


def _sides(problem: MatmulProblem) -> _Sides:
    """Return what the kernels see of a product: of its transpose, where it has few columns and many rows."""
    rows, columns, layout, align = problem.m, problem.n, problem.b_layout, problem.b_align
    if _turns(problem):
        rows, columns, align = problem.n, problem.m, problem.a_align
        layout = {"row": "column", "column": "row"}.get(problem.a_layout, problem.a_layout)
    along_k = layout == "column"
    ends = problem.k if along_k else columns
    whole = align == _WORD and ends * problem.itemsize % _WORD == 0
    return _Sides(rows, columns, along_k, layout != "strided", whole)


def _turns(problem: MatmulProblem) -> bool:
    return problem.m > MOST_ROWS >= problem.n


def _fault(problem: MatmulProblem, device: Device) -> str | None:
    """Say why no config may run a problem, None where one may."""
    if device.nvidia < 80:
        return f"{device.name} has no asynchronous copies to shared memory"
    if problem.dtype not in _DTYPES or problem.precision != "ieee" or problem.block_scales:
        return f"{problem.dtype} {problem.precision} is not summed by multiply-adds in fp32"
    if problem.rights > 1:
        return "gated products have kernels of their own"
    if min(problem.m, problem.n) > MOST_ROWS:
        return f"{problem.m} rows and {problem.n} columns, of {MOST_ROWS} at most on one side"
    if not _sides(problem).contiguous:
        return "the larger operand is contiguous along neither dimension"
    if max(problem.m, problem.n, problem.k) > WIDE_FROM:
        return f"sizes above {WIDE_FROM}"
    return None


def _sums(config: Config, problem: MatmulProblem, word: int) -> int:
    """Return the registers of a thread that hold sums: twice as many where they are compensated."""
    words = config["BLOCK_N"] * config["BLOCK_K"] // (word * 32 * config.num_warps)
    held = config["BLOCK_M"] * (words if _sides(problem).along_k else word)
    return int(held) * (2 if problem.dtype == "float32" else 1)


def _tile_fault(config: Config, problem: MatmulProblem) -> str | None:
    """Say why a tile of w does not suit the threads of a program, None where it does."""
    word, seen = _WORD // problem.itemsize, _sides(problem)
    threads, m, n, k = 32 * config.num_warps, config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    if not seen.rows <= m <= MOST_ROWS:
        return f"BLOCK_M = {m} for {seen.rows} rows of x"
    if n * k < word * threads:
        return f"a tile of {n}x{k} leaves some of {threads} threads without a word"
    if seen.along_k and k < 2 * word * word:
        return f"BLOCK_K = {k} is below the {2 * word * word} of rows along K"
    if not seen.along_k and (n < 8 * word or word * threads // n < word):
        return f"BLOCK_N = {n} of {threads} threads, for rows along N"
    if _sums(config, problem, word) > _MAX_SUMS:
        return f"{_sums(config, problem, word)} registers a thread for sums, of {_MAX_SUMS}"
    return None


def shared_bytes(config: Config, problem: MatmulProblem) -> int:
    """Return shared memory that the compiled kernel will ask for, at the least, in bytes."""
    tile = config["BLOCK_N"] * config["BLOCK_K"] * problem.itemsize
    x = config["BLOCK_M"] * config["BLOCK_K"] * problem.itemsize if _sides(problem).along_k else 0
    return int((tile + x) * (config.num_stages - 1))


def _tiles(config: Config, problem: MatmulProblem) -> int:
    """Return how many tiles the result has, over all of the batch."""
    seen, word = _sides(problem), _WORD // problem.itemsize
    columns = config["BLOCK_N"]
    if seen.along_k:
        columns *= word  # as many rows of w begin at places that differ: the last of each may be short
        return problem.batch * -(-seen.columns // columns) * word
    return problem.batch * -(-seen.columns // max(1, columns if seen.whole else columns - word))


def illegal(config: Config, problem: MatmulProblem, device: Device) -> str | None:
    """Say why `config` may not run `problem` on `device`, None where it may."""
    reason = (
        blocks_fault(config, PARAMETERS, _MAX_BLOCK)
        or launch_fault(config)
        or _fault(problem, device)
        or _tile_fault(config, problem)
        or shared_fault(shared_bytes(config, problem), device)
    )
    if reason is not None:
        return reason
    if config.num_stages < 2:
        return "num_stages must be 2 at the least"
    split, tiles = config["SPLIT_K"], _tiles(config, problem)
    if split > 1 and split * config["BLOCK_K"] > problem.k:
        return f"SPLIT_K = {split} leaves programs without a block of K = {problem.k}"
    if split > 1 and (tiles > MAX_SHARED or split > _MAX_SPLIT):
        return f"{tiles} tiles share their K {split} times, of {MAX_SHARED} tiles and {_MAX_SPLIT} times"
    return "more programs than a launch counts" if tiles * split >= 2**31 else None


def _configs() -> Iterator[Config]:
    along_k = itertools.product((1, 2, 4, 8, 16, 32, 64), (128, 256, 512, 1024, 2048, 4096))
    along_n = itertools.product((32, 64, 128, 256, 512), (8, 16, 32, 64))
    for (n, k), m, warps, split in itertools.product(
        (*along_k, *along_n), (1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32)
    ):
        if not 4096 <= n * k <= 16384:
            continue
        for stages in (3, 4, 5):
            kwargs = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "SPLIT_K": split}
            yield Config.of(warps, stages, NAME, **kwargs)


def pointless(config: Config, problem: MatmulProblem, device: Device) -> bool:
    """Tell whether the config is dominated: another of the family does the same or strictly less work."""
    seen = _sides(problem)
    if config["BLOCK_M"] >= 2 * seen.rows or config["BLOCK_N"] >= 2 * max(seen.columns, 32):
        return True
    if config["BLOCK_K"] >= 2 * max(problem.k, 256):
        return True
    return config["SPLIT_K"] > 1 and _tiles(config, problem) * config["SPLIT_K"] > 16 * device.processors


def contends(problem: MatmulProblem) -> bool:
    """Tell whether one of the configs can be the fastest."""
    return min(problem.m, problem.n) <= MOST_ROWS


def resident(config: Config, problem: MatmulProblem, device: Device) -> int:
    """Return how many programs of a config an SM holds at once."""
    word = _WORD // problem.itemsize
    threads = 32 * config.num_warps
    registers = min(255, 48 + _sums(config, problem, word) + 2 * word)
    by_shared = (device.shared_memory + 1024) // (shared_bytes(config, problem) + 1024)
    return max(1, min(by_shared, 65536 // (threads * registers), 2048 // threads, 32))


def predicted_us(config: Config, problem: MatmulProblem, device: Device) -> float:
    """Return predicted microseconds of a config: of moving w, of instructions, and of waiting for memory."""
    seen, word = _sides(problem), _WORD // problem.itemsize
    programs = _tiles(config, problem) * config["SPLIT_K"]
    held = min(resident(config, problem, device), -(-programs // device.processors))
    tile = config["BLOCK_N"] * config["BLOCK_K"]
    iterations = max(1.0, problem.k / (config["BLOCK_K"] * config["SPLIT_K"]))
    # Instructions of an element: conversions of w and x, multiply-adds; x is shared by words of a thread.
    words = tile / (word * 32 * config.num_warps)
    x = config["BLOCK_M"] * (2.5 / words if seen.along_k else 2.5 / word)
    sums = config["BLOCK_M"] * (2.5 if problem.dtype == "float32" else 1.0)
    issue = tile * (1.5 + x + sums) / 128
    turn = max(issue, (issue + _LATENCY) / (config.num_stages - 1) / held) + _TURN
    clocks = -(-programs // device.processors) * (iterations * turn) + _START
    work_us = clocks / (device.clock_ghz * 0.85 * 1e3)
    busy = max(0.05, min(1.0, 2.0 * programs / device.processors))
    moved_us = problem.bytes / (device.memory_gbps * _BANDWIDTH * 1e3) / busy
    split = config["SPLIT_K"]
    parts = 8 * _tiles(config, problem) * split * config["BLOCK_M"] * config["BLOCK_N"] if split > 1 else 0
    shared_us = _SHARED_US + parts / 3e6 if split > 1 else 0.0
    return max(work_us, moved_us) + 0.1 * min(work_us, moved_us) + shared_us + _LAUNCH_US


def numerics(config: Config, problem: MatmulProblem, device: Device) -> Numerics:
    """Return what decides the bits of an element: never what other families have.

    Threads sum words of their own, and which these are depends on where w begins.
    """
    return Numerics("fma by words", config["SPLIT_K"], config["BLOCK_K"])


def _named(view: View, role: str, dtype: str) -> View:
    """Return a view that names its buffer, so that a transposed call names those of the caller's."""
    return replace(view, tensor=Placed(buffer_of(view.tensor, role).buffer, dtype, view.tensor.data_ptr()))


def _upright(call: MatmulCall) -> MatmulCall:
    """Return the call, or its transpose, with few rows; buffers keep the names that the caller's have."""
    fused: dict[str, Any] = {
        name: view and _named(view, name, call.out_dtype) for name, view in call.fused.named
    }
    named = replace(
        call,
        a=_named(call.a, "a", call.dtype),
        b=_named(call.b, "b", call.dtype),
        out=_named(call.out, "out", call.out_dtype),
        fused=replace(call.fused, **fused),
    )
    return named.transposed if _turns(call.problem) else named


def _period(view: View, leading: int, word: int) -> int:
    """Return after how many rows of w rows begin at the same place in a word again."""
    return word // gcd(leading, word) if min(view.shape) > 1 else 1


def work(call: MatmulCall, config: Config, processors: int, early: bool) -> Work:
    """Return the launch of a product: one kernel, on the tensors as they lie and any number of SMs.

    `early`: the kernel uses programmatic dependent launch. Raises TuningError where rows of w overlap.
    """
    seen = _sides(call.problem)
    call = _upright(call)
    x, w, out, word = call.a, call.b, call.out, _WORD // call.a.itemsize
    (m, k), n, split = x.shape, w.shape[1], config["SPLIT_K"]
    leading = w.strides[1] if seen.along_k else w.strides[0]
    if not seen.along_k and k > 1 and leading < word:
        raise TuningError(f"rows of {n} columns, {leading} apart, are shorter than words")
    period = _period(w, leading, word)
    if seen.along_k:
        columns = config["BLOCK_N"] * period
        tiles, kernel = -(-n // columns) * period, rows_along_k
    else:
        columns = config["BLOCK_N"] if seen.whole else config["BLOCK_N"] - word
        tiles, kernel = -(-n // columns), rows_along_n
    shape = call.batch_shape or (1,)
    batch = [view.batch_strides if call.batch_shape else (0,) for view in (x, w, out)]
    at_once = word * 32 * config.num_warps // config["BLOCK_N"]
    shares = tiles * prod(shape) * config["BLOCK_M"] * config["BLOCK_N"] * split
    values: dict[str, Any] = {
        "x_ptr": buffer_of(x.tensor, "a"), "w_ptr": buffer_of(w.tensor, "b"),
        "out_ptr": buffer_of(out.tensor, "out"),
        "parts_ptr": Buffer("parts") if split > 1 else None,
        "counters_ptr": Buffer(COUNTERS) if split > 1 else None,
        "M": m, "N": n, "K": k, "stride_xm": x.strides[0] if m > 1 else 0, "stride_xk": x.strides[1],
        "stride_w": leading, "stride_om": out.strides[0], "stride_on": out.strides[1],
        "batch": prod(shape), "batch_shape": shape, "x_batch_strides": batch[0],
        "w_batch_strides": batch[1], "out_batch_strides": batch[2],
        "extra": extra(call.fused, len(shape)), "EPILOGUE": call.fused.epilogue.constants,
        "PERIOD": period, "EDGES": not seen.whole, "WORD": word,
        "X_WORDS": seen.whole and x.align == _WORD and (k == 1 or x.strides[1] == 1) and period == 1,
        "UNROLL": max(1, config["BLOCK_K"] // at_once), "COMPENSATED": call.dtype == "float32",
        "WAIT": early, "STAGES": config.num_stages, **dict(config.kwargs),
    }  # fmt: skip
    step = step_of(kernel, grid(tiles * split, prod(shape)), values, options(config) | {"launch_pdl": early})
    if split == 1:
        return Work((step,))
    return Work((step,), {"parts": Section("float32", shares)}, tiles * prod(shape))


FAMILY: Final = Family(
    op=MatmulProblem.op,
    name=NAME,
    kernel=rows_along_k,
    also=(rows_along_n,),
    space=_configs,
    illegal=illegal,
    pointless=pointless,
    predicted_us=predicted_us,
    resident=resident,
    work=work,
    numerics=numerics,
    canonical=canonical_product,
    contends=contends,
)
