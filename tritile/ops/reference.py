"""Compute operations on tensors in host memory by plain torch, where no kernel runs.

Results have the dtypes and strides that they have on a GPU. Operands are cast to float64, in which products
of narrower numbers are exact, and results rounded as they are stored: errors are no larger than in any
precision that a caller may name. Batch-invariant calls go row by row. Complex products never come here: see
`ops.aten.complex_product`.

Every function writes to `out`, which has the shape and dtype of the result, any strides, and no memory in
common with operands but for tensors that are added, and a permutation in place.
"""

import itertools
from collections.abc import Sequence
from typing import Any, Final

import torch

from tritile.core.epilogue import SIDES, apply_epilogue
from tritile.core.problem import SCALE_K
from tritile.core.quantized import QuantizedWeight
from tritile.core.settings import is_batch_invariant
from tritile.core.torch_private import neg_view

_WORDS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    activation: str = "",
    alpha: float = 1.0,
    beta: float = 1.0,
    up: torch.Tensor | None = None,
    scales: tuple[torch.Tensor, ...] = (),
    block_scales: str = "",
    **sides: torch.Tensor | None,
) -> None:
    """Multiply as `torch.matmul` does, and apply an epilogue: see `ops.products.matmul_call`."""
    a, b, up = a.double(), b.double(), None if up is None else up.double()
    if scales:
        (m, k), n = a.shape, b.shape[1]
        rows, columns = map(int, block_scales.split("x"))
        a = a * _spread(scales[0], rows, m, k)
        b = b * _spread(scales[1].t(), columns, n, k).t()

    def multiply(a: Any, b: Any, out: Any, up: Any, added: Sequence[Any]) -> None:
        # Not torch.matmul: a program may put tritile's functions in the place of torch's.
        sums = apply_epilogue(a @ b, added, activation, alpha, beta, None if up is None else a @ up)
        out.copy_(sums if out.is_floating_point() else sums.to(torch.int64))

    added = [sides.get(name) for name in SIDES]
    if not is_batch_invariant():
        return multiply(a, b, out, up, added)

    # A BLAS adds up in an order that depends on the number of rows and on where operands begin, and torch's
    # functions compute the last few elements of a tensor by other code than the rest: each row is a product
    # of its own, of operands in memory of their own.
    def own(tensor: Any, at: Any = ...) -> Any:
        return None if tensor is None else tensor[at].clone(memory_format=torch.contiguous_format)

    def as_rows(tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor.unsqueeze(-1) if b.ndim == 1 else tensor
        return rows.unsqueeze(-2) if a.ndim == 1 else rows

    whole = as_rows(out)
    *batch, m, _ = whole.shape
    left = (a.unsqueeze(0) if a.ndim == 1 else a).expand(*batch, m, -1)
    right = (b.unsqueeze(-1) if b.ndim == 1 else b).expand(*batch, -1, -1)
    added = [None if side is None else as_rows(side.expand(out.shape)) for side in added]
    for at in itertools.product(*map(range, batch)):
        matrix, of_up = own(right, at), own(up)
        for i in range(m):
            row: Any = (*at, slice(i, i + 1))
            multiply(own(left, row), matrix, whole[row], of_up, [own(side, row) for side in added])
    return None


def _spread(scales: torch.Tensor, shared: int, rows: int, k: int) -> torch.Tensor:
    """Return a scale for each element of (rows, k), of scales for `shared` rows and `SCALE_K` of k each."""
    return scales.double().repeat_interleave(shared, 0)[:rows].repeat_interleave(SCALE_K, 1)[:, :k]


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
    for group, cut in enumerate(itertools.starmap(slice, itertools.pairwise(ends))):
        rows, columns, inner = (cut if each == ragged else slice(None) for each in ((2, 3), (3, 2), (2, 2)))
        left = (a[group] if a.ndim == 3 else a)[rows, inner]
        right = (b[group] if b.ndim == 3 else b)[inner, columns]
        into = (out[group] if out.ndim == 3 else out)[rows, columns]
        of_a = None if scale_a is None else scale_a.view(-1, m)[group if a.ndim == 3 else 0, rows, None]
        of_b = None if scale_b is None else scale_b.view(-1, n)[group if b.ndim == 3 else 0, columns]
        if a.ndim == 3 and b.ndim == 2:  # batch-invariant calls take columns of b one by one
            left, right, into = right.t(), left.t(), into.t()
            of_a, of_b = (None if each is None else each.t() for each in (of_b, of_a))
            of_a = None if of_a is None else of_a[:, None]
        product(left, right, into, scale_a=of_a, scale_b=of_b)


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
