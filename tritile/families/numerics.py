"""State what decides the bits of a result, and the one way in which batch-invariant products are summed.

An element is a sum over K of products, made by tensor cores or by multiply-adds, and then by what is fused
into its store. Given its row of a and its column of b, a config decides its bits by the following, and
nothing else:

- The instruction. Tensor cores multiply exactly, line up the products of one instruction with the sum so far
  by the largest exponent, truncate, and add (for Hopper: Khattak and Mikaitis, arXiv 2512.07004). So it
  matters how much of K an instruction takes, and where it truncates: `wgmma` (16 of K of 16-bit types, 32
  bytes of others) and the instructions of a warp differ. It does not matter how many rows or columns one
  takes, where a row lies in it, and whether operands come from registers or shared memory. `tl.dot` compiles
  to `wgmma`, or Blackwell's `tcgen05.mma`, if a tile has 64 rows or more and whole warpgroups make it.
  AMD's matrix cores have instructions of 32 x 32 and 16 x 16, of different depths, by the smaller side of a
  tile.
- The parts of K that programs share (SPLIT_K), summed apart and added up in their order.
- The steps of K that are summed apart, if sums leave tensor cores or are compensated: those of IEEE fp32,
  and of fp8 unless "fast". Elsewhere an instruction follows another in the order of
  K, wherever blocks of K begin: blocks are whole instructions, and zeros that fill up the last add nothing.
- Who rounds fp32 to TF32: the hardware that brings tiles (TMA), or the kernel. They may treat ties
  differently.
- Where rows of the larger operand begin in a word of 16 bytes, for `skinny_k`: threads multiply its words as
  they lie, and the words' sums are added up. So its numerics are never canonical ("fma by words"). Nor are
  those of `skinny_n`: how many programs share K depends on all sizes, and on the GPU. Tensor cores
  begin with the first whole word of `odd_rows` ("mma by words").
- What the scales of packed weights multiply: weights, or sums over a block of K (`families.quantized`).

An epilogue is a function of one element and its operands. Every kernel compiles it with the same fused
multiply-adds (tests read this from compiled kernels). Copies of operands, alignment, layouts, order of tiles,
stages, how tiles are stored, and at which address, only move bits. Sums of int8 products are exact in any
order.

The canonical numerics of a problem depend on its types, its precision, the device and, for TF32, whether
there is more than one column. They do not depend on m, nor on what differs with m: a matrix of one row has
other layouts and alignments than one of many rows, and a result of many rows and one column is column-major.
Every config that has the canonical numerics may be chosen.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import AS_TORCH, FP8_DTYPES, SCALE_K, GroupedProblem, MatmulProblem, Product, Tiled
from tritile.core.settings import fp32_by_parts
from tritile.families.common.products import uses_tensor_cores, warpgroup_mma

BY_DATA: Final = "fp16x3"  # the precision whose data decide how it is multiplied
_STEP: Final = 32  # elements of K that fp32 sums apart
_BLACKWELL_WARPS: Final = 8  # of a program; with more of them blocks are not summed apart on Blackwell
_ROWS: Final = 64  # rows of a tile from which on warpgroups multiply
_AMD_SIDE: Final = 32  # the side of a tile from which on the larger instruction is used


class Numerics(NamedTuple):
    """Hold what of a config decides the bits of an element; the head of this module says why.

    - `instruction`: "warpgroup", "warp", "matrix 32" and "matrix 16" (AMD's), "fma", "fma by words", "mma by
      words", "fp64", or "exact".
    - `parts`: parts of K that are summed by programs of their own.
    - `step`: elements of K that are summed apart, 0 if blocks make no difference.
    - `rounding`: who rounds to TF32, "tma" or "kernel"; "" if nobody does.
    - `scaled`: what scales of a packed weight multiply: "weights", which are then rounded, or "sums" over a
      block of K.
    """

    instruction: str
    parts: int = 1
    step: int = 0
    rounding: str = ""
    scaled: str = ""


def _only_instruction(problem: Product) -> str:
    """Return the instruction of a product that has no choice of it, "" if tensor cores have several."""
    if problem.dtype == "int8":
        return "exact"
    if uses_tensor_cores(problem):
        return ""
    return "fp64" if problem.dtype == "float64" else "fma"


def _sums_apart(problem: Product) -> bool:
    """True if a block of K is summed by itself, and then added to the sums before."""
    if problem.dtype == "float32":
        # Products of groups in IEEE fp32 are not compensated: one multiply-add follows another.
        return problem.precision == "ieee" and isinstance(problem, MatmulProblem)
    return problem.dtype in FP8_DTYPES and problem.precision != "fast"


def matrix(config: Config) -> str:
    return "matrix 32" if min(config["BLOCK_M"], config["BLOCK_N"]) >= _AMD_SIDE else "matrix 16"


def fastest(device: Device) -> str:
    return "warpgroup" if device.has_tma else "warp" if device.nvidia else "matrix 32"


def of_product(
    config: Config, problem: Product, device: Device, rounding: str = "kernel", specialised: bool = False
) -> Numerics:
    """Return what decides the bits of an element of a product.

    `rounding`: who rounds to TF32, if anybody does. `specialised`: warps of a group multiply, and promote
    sums of fp8 after as many blocks as have 128 of K.
    """
    if not (instruction := _only_instruction(problem)):
        many = device.nvidia >= 100 and config.num_warps > _BLACKWELL_WARPS
        instruction = matrix(config) if not device.nvidia else "warp"
        if specialised or (device.nvidia and warpgroup_mma(config, problem, device) and not many):
            instruction = "warpgroup"
    if instruction == "exact":
        return Numerics(instruction)
    step = SCALE_K if specialised else config["BLOCK_K"]
    return Numerics(
        instruction,
        int(dict(config.kwargs).get("SPLIT_K", 1)),
        step if _sums_apart(problem) else 0,
        rounding if problem.precision == "tf32" else "",
    )


def canonical_product(problem: Product, device: Device) -> Numerics:
    """Return the numerics that a product has in batch-invariant mode, whatever its m.

    There is one part, on the instruction that is fastest with many rows. TMA rounds TF32: it reaches every
    layout except a column-major result, as that of one column may be. If groups begin inside a contiguous
    dimension TMA sees nothing, so for groups the kernel rounds.
    """
    instruction = _only_instruction(problem) or fastest(device)
    if instruction == "exact":
        return Numerics(instruction)
    step = (_STEP if problem.dtype == "float32" else SCALE_K) if _sums_apart(problem) else 0
    seen = device.has_tma and not isinstance(problem, GroupedProblem) and problem.n > 1
    rounding = ("tma" if seen else "kernel") if problem.precision == "tf32" else ""
    return Numerics(instruction, 1, step, rounding)


def pad_to_canonical_tile(problem: Tiled, numerics: Numerics) -> Tiled:
    """Return a problem large enough to fill the blocks of these numerics, however small the real one.

    It serves to find configs that are dominated.
    """
    if not isinstance(problem, Product):
        return problem
    if numerics.instruction == "warpgroup":
        problem = replace(problem, m=max(problem.m, _ROWS))
    elif numerics.instruction == "matrix 32":
        problem = replace(problem, m=max(problem.m, _AMD_SIDE), n=max(problem.n, _AMD_SIDE))
    return replace(problem, k=max(problem.k, numerics.step)) if numerics.step else problem


# --- The precision and the mode of problems that are described and not called ---


def by_data(problem: Tiled) -> bool:
    """True if a product's data decide how it is made, so that rows depend on each other."""
    return isinstance(problem, MatmulProblem) and problem.precision == BY_DATA


def with_default_precision(problem: Tiled) -> Tiled:
    """Return the problem of the same call, if that names no precision, by `mode(fp32=...)`."""
    if not isinstance(problem, MatmulProblem) or problem.rights > 1 or problem.invariant:
        return problem
    if (problem.dtype, problem.precision) != ("float32", "ieee") or not fp32_by_parts():
        return problem
    return replace(problem, precision=BY_DATA)


def as_invariant(problem: Tiled) -> Tiled:
    found: Tiled = problem if isinstance(problem, PermuteProblem) else replace(problem, invariant=True)
    return found


# --- What precisions mean, and how far each may be from exact ---

_MEANINGS: Final = {
    "fp16x3": "three products of fp16 parts on tensor cores",
    "tf32": "one product in TF32 on tensor cores",
    "fast": "sums stay in the tensor cores",
    AS_TORCH: "as torch's setting says, which tritile does not know",
}
ERRORS: Final = {
    "fp16x3": "error near fp32's",
    "tf32": "11 bits of each input",
    "fast": "14 bits on Hopper",
    AS_TORCH: "error of torch's kernel",
}


def meaning(precision: str, dtype: str) -> str:
    """Return how products in a precision of a dtype are made, in a few words."""
    if precision != "ieee":
        return _MEANINGS[precision]
    return "sums move to fp32 every 128 of K" if dtype in FP8_DTYPES else f"plain fp{dtype[-2:]}"


def explained(precisions: Sequence[str], dtype: str) -> str:
    """Return each precision of a dtype with its meaning and error, for the end of a message."""
    words = (", ".join(filter(None, (meaning(name, dtype), ERRORS.get(name)))) for name in precisions)
    return "; ".join(f"{name}: {text}" for name, text in zip(precisions, words, strict=True))
