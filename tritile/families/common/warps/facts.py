"""Name what specialised warps pass to each other's functions."""

from typing import Any, NamedTuple


class Operands(NamedTuple):
    """Hold descriptors of the operands; `b_rest` sees tiles of the columns beyond MAIN_N."""

    a: Any
    b: Any
    b_rest: Any


class Shared(NamedTuple):
    """Hold tiles in shared memory, and the barriers that tell which stages are full or empty."""

    a: Any
    b: Any
    b_rest: Any
    full: Any
    empty: Any


class Result(NamedTuple):
    """Describe where the result goes: by descriptor, or by pointer and strides, through shared memory.

    `scales` multiply the sum in the main loop; `extra` are operands of the epilogue.
    """

    desc: Any
    rest_desc: Any
    ptr: Any
    tile: Any
    rest_tile: Any
    M: Any
    N: Any
    stride_o: Any
    stride_i: Any
    stride_m: Any
    stride_n: Any
    scales: Any
    extra: Any


class How(NamedTuple):
    """Hold the compile-time parameters of a kernel: those of `matmul_warpgroups`, and more.

    BLOCK_M x BLOCK_N is a program's tile, MAIN_N its columns without the rest. One tile of a in shared memory
    has ROWS of its rows, one of b COLUMNS of its MAIN_N columns.
    """

    A_ROW: Any
    B_ROW: Any
    BY_DESCRIPTOR: Any
    WAIT: Any
    BLOCK_M: Any
    BLOCK_N: Any
    BLOCK_K: Any
    MAIN_N: Any
    ROWS: Any
    COLUMNS: Any
    GROUP_M: Any
    STAGES: Any
    CONSUMERS: Any
    SUBTILES: Any
    FLAT: Any
    BATCHED: Any
    EPILOGUE: Any
    VERDICTS: Any = None
    PROMOTE: Any = 0
    IN_PARTS: Any = False
    SCALE_BLOCKS: Any = None
