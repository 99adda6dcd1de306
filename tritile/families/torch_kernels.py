"""Calls of torch's kernels that take more than one function: fp8 with scales, and groups.

Scales and offsets, which are small, are copied if they are not laid out as torch needs them.
"""

from typing import Any, Final

import torch

from tritile.core.device import capturing
from tritile.core.torch_private import ScalingType, block_scaled_mm, grouped_mm, scaled_grouped_mm
from tritile.families.grouped.groups import zero_rows

_RECIPES: Final = {1: "BlockWise1x128", 128: "BlockWise128x128"}
_PROGRAMS: Final = 512  # enough to fill a GPU, and few to start if no row is left
_BLOCK: Final = 1024

_ones: Final[dict[torch.device, torch.Tensor]] = {}


def one(device: torch.device) -> torch.Tensor | None:
    """Return the scale 1 on a GPU, made once; None if it would have to be made while a graph is captured."""
    if device not in _ones:
        if capturing():
            return None
        with torch.inference_mode(False):
            _ones[device] = torch.ones((), dtype=torch.float32, device=device)
    return _ones[device]


def _laid_out(scale: torch.Tensor, shared: int) -> torch.Tensor:
    """Return scales (rows, blocks of K) in the layout that cuBLAS reads, copied only if necessary.

    Of each row: contiguous along rows. Of 128 rows: (blocks of K, rows), contiguous along the former, with
    zeros up to a multiple of 4.
    """
    rows, blocks = scale.shape
    on_words = scale.data_ptr() % 16 == 0
    if shared == 1:
        if scale.stride() == (1, rows) and on_words:
            return scale
        made = torch.empty_strided((rows, blocks), (1, rows), dtype=scale.dtype, device=scale.device)
        return made.copy_(scale)
    padded = -(-blocks // 4) * 4
    if padded == blocks and scale.stride() == (blocks, 1) and on_words:
        return scale.t()
    made = scale.new_zeros((rows, padded))
    made[:, :blocks] = scale
    return made.t()


def by_blocks(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
    shared: tuple[int, int], dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Multiply fp8 matrices with scales for each 128 of K, on Hopper, into a new matrix of this dtype.

    `shared`: how many rows of a, and columns of b, share a scale. scale_a is (blocks of rows, blocks of K),
    scale_b (blocks of K, blocks of columns).
    """
    if shared == (128, 128):  # which cuBLAS does not take
        scale_a, shared = scale_a.repeat_interleave(128, 0)[: len(a)], (1, 128)
    (m, k), more = a.shape, -len(a) % 4 if shared[0] == 1 else 0
    if more:  # a column of scales has to be whole words of 16 bytes
        wide = torch.zeros((m + more, k), dtype=torch.uint8, device=a.device).view(a.dtype)
        wide[:m].copy_(a)
        a, scale_a = wide, torch.nn.functional.pad(scale_a, (0, 0, 0, more))
    of_a, of_b = _laid_out(scale_a, shared[0]), _laid_out(scale_b.t(), shared[1])
    recipes = [getattr(ScalingType, _RECIPES[each]) for each in shared]
    made: torch.Tensor = block_scaled_mm(a, b, of_a, recipes[0], of_b, recipes[1], output_dtype=dtype)
    return made[:m].clone() if more else made


def cut(offs: torch.Tensor, total: int) -> torch.Tensor:
    """Return offsets raised to the ones before them, and clamped to 0 to total."""
    return offs.cummax(0).values.clamp_(0, total)


def zero_past(out: torch.Tensor, ends: torch.Tensor) -> None:
    """Zero the rows of a matrix on a GPU that belong to no group."""
    with torch.cuda.device(out.device):
        args = out, ends, len(ends), *out.shape, out.stride(0)
        # Unless this is said, Triton 3.9 warns of another default in 3.10.
        zero_rows[(_PROGRAMS,)](*args, BLOCK=_BLOCK, enable_fp_fusion=True)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Return a bfloat16 matrix in contiguous rows of whole 16-byte words, padded with zeros if necessary."""
    rows, columns = x.shape
    fits = x.stride(1) == 1 and x.stride(0) >= columns and columns % 8 == x.stride(0) % 8 == 0
    if fits and x.data_ptr() % 16 == 0:
        return x
    made = x.new_zeros((rows, -(-columns // 8) * 8))
    made[:, :columns] = x
    return made


def sharing_k(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Return the product of each group of columns of a, (M, total), and rows of b, (total, N), as bfloat16.

    The result is (groups, M, N), zero for an empty group. In Hopper's kernel groups may begin at any row of
    matrices whose rows are contiguous; in Blackwell's, empty ones are not zero.
    """
    made = grouped_mm(_aligned(a.t()).t(), _aligned(b), offs=cut(offs, a.shape[1]))
    whole: torch.Tensor = made[:, : a.shape[0], : b.shape[1]].contiguous()
    return whole


def of_groups(a: Any, b: Any, offs: Any, scale_a: Any, scale_b: Any, fast: bool = False) -> torch.Tensor:
    """Return each row of a, (total, K), by its group's matrix of b, (groups, K, N), as bfloat16.

    a and b are bfloat16, or float8_e4m3fn with or without scales for the rows of a and the columns of b.
    Rows of no group are zero.
    """
    ends = cut(offs, a.shape[0])
    if a.dtype == torch.bfloat16:
        out: torch.Tensor = grouped_mm(a, b, offs=ends)
    else:
        if scale_a is None:
            scale_a = torch.ones(a.shape[0], dtype=torch.float32, device=a.device)
            scale_b = torch.ones((b.shape[0], b.shape[2]), dtype=torch.float32, device=a.device)
        how = {"out_dtype": torch.bfloat16, "use_fast_accum": fast}
        out = scaled_grouped_mm(a, b, scale_a, scale_b, offs=ends, **how)
    zero_past(out, ends)
    return out
