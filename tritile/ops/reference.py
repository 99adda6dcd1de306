"""Compute operations on tensors in host memory by plain torch, where no kernel runs.

Results have the dtypes and strides that they have on a GPU. Operands are cast to float64 (complex128 where
they are complex), in which products of narrower numbers are exact, and results rounded as they are stored:
errors are no larger than in any precision that a caller may name. Batch-invariant calls go row by row.

Every function writes to `out`, which has the shape and dtype of the result, any strides, and no memory in
common with operands but for tensors that are added, and a permutation in place.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from tritile.core.epilogue import finished
from tritile.core.of_torch import neg_view
from tritile.core.problem import SCALE_K
from tritile.core.quantized import QuantizedWeight
from tritile.core.settings import is_batch_invariant
from tritile.ops.described import NOTHING, Extras

_WORDS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def product(a: torch.Tensor, b: torch.Tensor, extras: Extras, out: torch.Tensor) -> None:
    """Multiply as `torch.matmul` does, and apply an epilogue: every product with operands a and b."""
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    if extras.blocks is not None:
        (m, k), n = a.shape, b.shape[1]
        rows, columns = map(int, extras.shared.split("x"))
        a = a * _spread(extras.blocks[0], rows, m, k)
        b = b * _spread(extras.blocks[1].t(), columns, n, k).t()
    if is_batch_invariant():
        for row in _rows(a, b, extras, out):
            _multiply(*row)
    else:
        _multiply(a, b, extras, out)


def _spread(scales: torch.Tensor, shared: int, rows: int, k: int) -> torch.Tensor:
    """Return a scale for each element of (rows, k), of scales for `shared` rows and `SCALE_K` of k each."""
    return scales.double().repeat_interleave(shared, 0)[:rows].repeat_interleave(SCALE_K, 1)[:, :k]


def _multiply(a: torch.Tensor, b: torch.Tensor, extras: Extras, out: torch.Tensor) -> None:
    # Not torch.matmul: a program may put tritile's functions in the place of torch's.
    sums = a @ b
    if extras is NOTHING:
        out.copy_(sums if out.is_floating_point() or out.is_complex() else sums.to(torch.int64))
        return
    up = None if extras.up is None else a @ extras.up.to(a.dtype)
    out.copy_(finished(sums, extras.tensors, extras.activation, extras.alpha, extras.beta, up))


def _rows(
    a: torch.Tensor, b: torch.Tensor, extras: Extras, out: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, Extras, torch.Tensor]]:
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
    sides = extras._replace(blocks=None, up=None).mapped(lambda tensor: as_rows(tensor.expand(out.shape)))
    for at in itertools.product(*map(range, batch)):
        matrix, up = own(right, at), None if extras.up is None else own(extras.up.to(a.dtype))
        for i in range(m):
            row: Any = (*at, slice(i, i + 1))
            one = sides.mapped(functools.partial(own, at=row))._replace(up=up)
            yield own(left, row), matrix, NOTHING if extras is NOTHING else one, whole[row]


def linear_quantized(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Multiply by what the numbers of a weight stand for, exactly, and add bias."""
    product(x, weight.dequantize(torch.float64).t(), Extras(bias=bias), out)


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
        extras = NOTHING if scales[0] is None else Extras(scales[0][:, None], scales[1])
        product(left, right, extras, into)


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
