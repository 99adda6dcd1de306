"""Compute operations on tensors in host memory by plain torch, where no kernel runs.

Results have the dtypes and strides that they have on a GPU. Operands are cast to float64 (complex128 where
they are complex), in which products of narrower numbers are exact, and results rounded as they are stored:
errors are no larger than in any precision that a caller may name. Batch-invariant calls go row by row.

Every function writes to `out`, which has the shape and dtype of the result, any strides, and no memory in
common with operands but for tensors that are added, and a permutation in place.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from tritile.core.epilogue import finished
from tritile.core.of_torch import neg_view
from tritile.core.problem import SCALE_K, SIDES
from tritile.core.quantized import QuantizedWeight
from tritile.core.settings import is_batch_invariant

_WORDS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, **fused: Any) -> None:
    """Multiply as `torch.matmul` does, and apply an epilogue: the keywords of `ops.products.matmul_call`."""
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    scales, shared = fused.pop("scales", ()), fused.pop("block_scales", "")
    if scales:
        (m, k), n = a.shape, b.shape[1]
        rows, columns = map(int, shared.split("x"))
        a = a * _spread(scales[0], rows, m, k)
        b = b * _spread(scales[1].t(), columns, n, k).t()
    fused = {name: value for name, value in fused.items() if value is not None}
    if is_batch_invariant():
        for row in _rows(a, b, out, fused):
            _multiply(*row)
    else:
        _multiply(a, b, out, fused)


def _spread(scales: torch.Tensor, shared: int, rows: int, k: int) -> torch.Tensor:
    """Return a scale for each element of (rows, k), of scales for `shared` rows and `SCALE_K` of k each."""
    return scales.double().repeat_interleave(shared, 0)[:rows].repeat_interleave(SCALE_K, 1)[:, :k]


def _multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, fused: dict[str, Any]) -> None:
    # Not torch.matmul: a program may put tritile's functions in the place of torch's.
    sums = a @ b
    if not fused:
        out.copy_(sums if out.is_floating_point() or out.is_complex() else sums.to(torch.int64))
        return
    up = a @ fused["up"].to(a.dtype) if "up" in fused else None
    how = fused.get("activation", ""), fused.get("alpha", 1.0), fused.get("beta", 1.0)
    out.copy_(finished(sums, list(map(fused.get, SIDES)), *how, up))


def _rows(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, fused: dict[str, Any]
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]]:
    """Yield the products of single rows, each of operands in memory of their own.

    A BLAS adds up in an order that depends on the number of rows and on where operands begin, and torch's
    functions compute the last few elements of a tensor by other code than the rest.
    """

    def own(tensor: torch.Tensor, at: Any = ...) -> torch.Tensor:
        return tensor[at].clone(memory_format=torch.contiguous_format)

    def as_rows(tensor: torch.Tensor) -> torch.Tensor:
        wide = tensor.unsqueeze(-1) if b.ndim == 1 else tensor
        return wide.unsqueeze(-2) if a.ndim == 1 else wide

    whole = as_rows(out)
    *batch, m, _ = whole.shape
    left = (a.unsqueeze(0) if a.ndim == 1 else a).expand(*batch, m, -1)
    right = (b.unsqueeze(-1) if b.ndim == 1 else b).expand(*batch, -1, -1)
    sides = {name: as_rows(fused[name].expand(out.shape)) for name in SIDES if name in fused}
    for at in itertools.product(*map(range, batch)):
        matrix, up = own(right, at), {"up": own(fused["up"].to(a.dtype))} if "up" in fused else {}
        for i in range(m):
            row: Any = (*at, slice(i, i + 1))
            one = fused | up | {name: own(side, row) for name, side in sides.items()}
            yield own(left, row), matrix, whole[row], one


def linear_quantized(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Multiply by what the numbers of a weight stand for, exactly, and add bias."""
    product(x, weight.dequantize(torch.float64).t(), out, bias=bias)


def grouped(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None, scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None, out: torch.Tensor,
) -> None:  # fmt: skip
    """Multiply group by group, as `tritile.grouped_matmul` documents; what belongs to no group is zero."""
    m, n = out.shape[-2:]
    out.zero_()
    ragged = a.ndim, b.ndim
    shared = {(2, 3): m, (3, 2): n, (2, 2): a.shape[1]}.get(ragged, 0)
    ends = [0]
    for end in [0] * a.shape[0] if offs is None else offs.tolist():
        ends.append(max(ends[-1], min(end, shared)))

    def scale_of(scale: torch.Tensor | None, size: int, cut: slice | None) -> torch.Tensor | None:
        return scale if scale is None else scale.view(-1, size)[group] if cut is None else scale[cut]

    for group, cut in enumerate(itertools.starmap(slice, itertools.pairwise(ends))):
        if ragged == (3, 2):  # columns of b: batch-invariant calls take these one by one
            left, right, into = b[:, cut].t(), a[group].t(), out[:, cut].t()
            scales = scale_of(scale_b, n, cut), scale_of(scale_a, m, None)
        elif ragged == (2, 3):
            left, right, into = a[cut], b[group], out[cut]
            scales = scale_of(scale_a, m, cut), scale_of(scale_b, n, None)
        else:
            left, right = (a[:, cut], b[cut]) if ragged == (2, 2) else (a[group], b[group])
            into, scales = out[group], (scale_of(scale_a, m, None), scale_of(scale_b, n, None))
        of_rows = None if scales[0] is None else scales[0][:, None]
        product(left, right, into, scale_a=of_rows, scale_b=scales[1])


def permute(x: torch.Tensor, dims: Sequence[int], out: torch.Tensor) -> None:
    """Copy x with its dimensions in the order `dims`; out may be x itself.

    Lazy conjugation and negation turn sign bits over and keep all others, of NaN too, as on a GPU.
    """
    negates, conjugates = x.is_neg() and (x.is_floating_point() or x.is_complex()), x.is_conj()
    x = neg_view(x) if negates else x
    x = x.conj() if conjugates else x
    out.copy_(x.permute(list(dims)).clone())
    parts = torch.view_as_real(out) if out.is_complex() else out.unsqueeze(-1)
    flips = (negates, negates != conjugates)[: parts.shape[-1]]
    if any(flips):
        words = parts.view(_WORDS[parts.element_size()])
        words ^= words.new_tensor([torch.iinfo(words.dtype).min * flip for flip in flips])
