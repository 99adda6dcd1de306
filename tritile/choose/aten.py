"""Say what torch's own kernel may compute: the candidate `aten`."""

import functools
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from typing import Final

import torch

from tritile.choose.classes import OPERATIONS, SIDES
from tritile.core.config import ATEN, Config
from tritile.core.device import Device
from tritile.core.epilogue import BARE, Epilogue
from tritile.core.problem import (
    AS_TORCH,
    FP8_DTYPES,
    GroupedProblem,
    MatmulProblem,
    Product,
    QuantizedProblem,
    Tiled,
)

CONFIG: Final = Config((), 1, 1, family=ATEN)
_UNPACK_US: Final = 0.835  # of the launch that unpacks a weight
_UNPACKED_SHARE: Final = 0.811  # of the peak bandwidth, that it reaches
_DTYPES: Final = ("float16", "bfloat16", "float32", "float64")
_PRECISIONS: Final = ("ieee", "tf32")
_IN_ONE: Final = BARE, Epilogue(bias="row")  # of one launch; the first one of batches too
_LONG: Final = 512, 1e9  # K and operations from which a product takes several times as long as its epilogue
_LEAST_FP8: Final = 89  # compute capability of torch's products of fp8, times ten
_LEAST_INT8_ROWS: Final = 17  # of a, for torch
MOST_GROUPS: Final = 1023  # of torch's grouped products
# What scales of a and of b are for: whole operands, or each row and each column.
_SCALES: Final = (("", ""), ("one", "one"), ("column", "row"))


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of torch and cuBLAS that are in use; cuBLAS's is "" if no package names it."""
    names = ("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cublas-cu13")
    found = {
        each.metadata["Name"]: each.version for name in names for each in metadata.distributions(name=name)
    }
    return {"torch": torch.__version__, "cublas": next(iter(found.values()), "")}


def version_words(found: Mapping[str, str]) -> str:
    """Return versions in words."""
    return f"torch {found.get('torch') or 'unknown'}, cuBLAS {found.get('cublas') or 'unknown'}"


def illegal(problem: Tiled) -> str | None:
    """Say why torch may not compute a problem; None if one call of it gives the same result.

    A caller also has to ask torch's settings: see `tritile.ops.aten`.
    """
    if not isinstance(problem, Product | QuantizedProblem):
        return "torch's kernel is a candidate for products only"
    if problem.invariant:
        return "torch's sums depend on the number of rows"
    problem = product_of(problem)
    if isinstance(problem, GroupedProblem):
        return _illegal_groups(problem)
    if problem.precision == AS_TORCH and problem.rights == 1:
        return None
    if problem.dtype in FP8_DTYPES:
        return _illegal_fp8(problem)
    if problem.dtype == "int8":
        return _illegal_int8(problem)
    if problem.rights > 1 or problem.in_parts or problem.precision not in _PRECISIONS:
        return f"torch has no single call for {problem.label}"
    if "strided" in problem.layouts or problem.out_layout != "row":
        return "torch would copy an operand or the result"
    if not _is_in_one(problem) and not _is_long(problem):
        return "torch needs another launch for the epilogue"
    if problem.dtype not in _DTYPES:
        return f"torch's products of {problem.dtype} are not offered"
    return None if problem.out_dtype == problem.dtype else "torch returns another dtype"


def _is_in_one(problem: MatmulProblem) -> bool:
    """True if torch needs no launch besides the product's for the epilogue."""
    return problem.epilogue in _IN_ONE[: 1 if problem.batch > 1 else 2]


def _is_long(problem: MatmulProblem) -> bool:
    """True if launches that move the result once more, for an epilogue, hardly count, and round nothing.

    Of 16-bit types and float64 they cost what torch's products gain.
    """
    return problem.dtype == "float32" and problem.k >= _LONG[0] and problem.flops >= _LONG[1]


def is_compared(problem: Tiled) -> bool:
    """True if plans have torch's time: if torch may run, or fp16 parts take its place."""
    if isinstance(problem, MatmulProblem) and problem.in_parts:
        problem = replace(problem, precision="ieee")
    return illegal(problem) is None


def does_no_harm(problem: Tiled, device: Device) -> bool:
    """True if torch's kernel makes a product that nobody measured on a GPU like this one.

    It does if one launch makes it and torch is not known to be slow: of 16-bit types if all rows start
    on 16 bytes, and of fp32, fp64, int8 and fp8. torch multiplies fp8 from compute capability 8.9 on, and by
    blocks of scales on few GPUs. Its grouped products read sizes on the host, except on Hopper and Blackwell.
    """
    if not isinstance(problem, MatmulProblem) or illegal(problem) is not None:
        return False
    if problem.dtype in FP8_DTYPES:
        return device.nvidia >= _LEAST_FP8 and not problem.block_scales
    if problem.dtype == "int8":
        return device.nvidia > 0
    return _is_in_one(problem) and (problem.itemsize > 2 or min(problem.aligns) == 16)


def product_of(problem: Product | QuantizedProblem) -> Product:
    """Return the product that torch makes: by a quantized weight once that is unpacked in memory."""
    return problem.product if isinstance(problem, QuantizedProblem) else problem


def unpack_us(problem: Product | QuantizedProblem, device: Device) -> float:
    """Return predicted microseconds of unpacking a quantized weight for torch; 0 for another product."""
    if not isinstance(problem, QuantizedProblem):
        return 0.0
    moved = problem.weight_bytes + problem.unpacked_bytes
    return moved / (device.memory_gbps * _UNPACKED_SHARE * 1e3) + _UNPACK_US


def _illegal_bytes(problem: Product, multiple: int) -> str | None:
    """Say how operands of one byte an element have to lie, and which sizes torch requires."""
    if (problem.a_layout, problem.b_layout) != ("row", "column"):
        return "torch requires contiguous rows of a and columns of b"
    if min(problem.a_align, problem.b_align) < 16:
        return "torch requires rows of a and columns of b that start on 16 bytes"
    if problem.n % multiple or problem.k % multiple:
        return f"torch requires N and K in multiples of {multiple}, not {problem.n} and {problem.k}"
    return None


def _illegal_fp8(problem: MatmulProblem) -> str | None:
    if problem.batch > 1:
        return "torch multiplies fp8 one matrix at a time"
    if problem.dtype == "float8_e5m2" and problem.b_dtype != "float8_e4m3fn":
        return "torch does not multiply float8_e5m2 by float8_e5m2: expected float8_e4m3fn for a or b"
    fused = problem.epilogue
    if problem.block_scales:  # what is fused is applied to float32 by torch afterwards
        if (problem.dtype, problem.b_dtype) != ("float8_e4m3fn", ""):
            return "with a scale for each 128 of K torch requires float8_e4m3fn for a and b"
        return _illegal_bytes(problem, 16)
    scales = fused.scale_a, fused.scale_b
    if scales not in _SCALES and not (scales == ("one", "row") and problem.m == 1):
        return "torch requires one scale each for a and b, or one for each row and column"
    bare = Epilogue(*scales)
    with_bias = replace(bare, bias="row") if scales[0] and problem.out_dtype != "float32" else bare
    if fused not in (bare, with_bias):
        return "torch needs another launch for the epilogue"
    return "torch would copy the result" if problem.out_layout != "row" else _illegal_bytes(problem, 16)


def _illegal_int8(problem: MatmulProblem) -> str | None:
    if problem.epilogue or problem.out_dtype != "int32":
        return "torch needs another launch for scales"
    if problem.batch > 1 or problem.m < _LEAST_INT8_ROWS:
        return f"torch requires one matrix of {_LEAST_INT8_ROWS} rows or more"
    return "torch would copy the result" if problem.out_layout != "row" else _illegal_bytes(problem, 8)


def _illegal_groups(problem: GroupedProblem) -> str | None:
    if problem.groups > MOST_GROUPS:
        return f"torch requires at most {MOST_GROUPS} groups"
    if problem.dtype == "float8_e4m3fn" and problem.out_dtype == "bfloat16":
        return _illegal_bytes(problem, 16)
    if problem.needs_torch:
        return "torch requires float8_e4m3fn operands and a bfloat16 result"
    if (problem.dtype, problem.out_dtype) != ("bfloat16", "bfloat16"):
        return "torch reads offs on the host, except for bfloat16 and float8_e4m3fn"
    aligned = min(problem.a_align, problem.b_align) == 16 and problem.n % 8 == 0
    if problem.a_layout != "row" or problem.b_layout == "strided" or not aligned:
        return "torch requires rows of a, rows or columns of b, and rows of the result that start on 16 bytes"
    return None


def kind_of(problem: Product) -> str:
    """Return the kind of a product in a table's `by_aten`: "float32 ieee", "grouped bfloat16".

    "float8_e4m3fn fast rows" has scales for rows and columns.
    """
    if isinstance(problem, GroupedProblem):
        return f"grouped {problem.dtype}"
    rows = " rows" if problem.epilogue.scale_b == "row" else ""
    return f"{problem.dtype} {problem.precision}{rows}"


def matches_sweeps(problem: MatmulProblem) -> bool:
    """True for a product like those of the sweeps: torch is not predicted at others.

    Sweeps of fp8 hold sums that leave the tensor cores, and no scales or one for each operand.
    """
    if problem.dtype in FP8_DTYPES and (problem.precision != "ieee" or problem.epilogue.scale_b == "row"):
        return False
    plain = problem.batch == 1 and problem.a_layout == problem.out_layout == "row"
    return plain and min(problem.n, problem.k) >= SIDES[0] and problem.flops >= OPERATIONS[0]
