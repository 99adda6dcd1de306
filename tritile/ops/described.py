"""Describe products: reduce tensors and what follows the product to what kernels take."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from tritile.core.problem import SIDES, merged
from tritile.core.settings import is_batch_invariant
from tritile.core.views import BlockScales, Fused, MatmulCall, View
from tritile.ops.checks import broadcast, name_of


class Extras(NamedTuple):
    """Hold the tensors and numbers of an epilogue (`tritile.core.problem.Epilogue`).

    Each tensor has a shape that broadcasts to that of the result. `alpha` and `beta` are complex only for
    complex operands. `up` is the second matrix of a gated product. `blocks` are scales of a and b, one for
    each 128 of K; `shared` says how many rows and columns share one (`tritile.core.problem.BLOCK_SCALES`).
    """

    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    activation: str = ""
    alpha: complex = 1.0
    beta: complex = 1.0
    bias_up: torch.Tensor | None = None
    up: torch.Tensor | None = None
    blocks: tuple[torch.Tensor, torch.Tensor] | None = None
    shared: str = ""

    @property
    def scaled(self) -> bool:
        """True if sums are multiplied by scales."""
        return self.scale_a is not None or self.blocks is not None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Return the tensors that are read, in the order of `SIDES`. A bias with beta = 0 is not read."""
        unread = ("bias",) if self.beta == 0 else ()
        return tuple(None if name in unread else getattr(self, name) for name in SIDES)

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Extras":
        """Return a copy in which `change` is applied to every tensor that is read."""
        read = zip(SIDES, self.tensors, strict=True)
        changed: dict[str, Any] = {name: None if tensor is None else change(tensor) for name, tensor in read}
        blocks = self.blocks and (change(self.blocks[0]), change(self.blocks[1]))
        up = None if self.up is None else change(self.up)
        return self._replace(**changed, blocks=blocks, up=up)


NOTHING = Extras()


def _strides(tensor: torch.Tensor, batch: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor's batch dimensions, broadcast to `batch`: 0 where one is expanded."""
    missing = len(batch) - (tensor.ndim - 2)
    own = [0 if size == 1 else step for size, step in zip(tensor.shape[:-2], tensor.stride(), strict=False)]
    return (*[0] * missing, *own)


def _view(tensor: torch.Tensor, batch_strides: tuple[int, ...]) -> View:
    rows, columns = tensor.shape[-2:]
    row_stride, column_stride = tensor.stride()[-2:]
    return View(tensor, (rows, columns), (row_stride, column_stride), batch_strides, tensor.element_size())


def _folded(call: MatmulCall) -> MatmulCall:
    """Fold batch dimensions into M where b is one matrix for all of them.

    A dimension can be folded where one step along it is M steps along M, in every tensor that has rows.
    """
    while call.batch_shape:
        size, m = call.batch_shape[-1], call.a.shape[0]
        with_rows = [call.a, call.out, *(view for view in call.fused.views if view is not None)]
        fits = m == 1 or all(view.batch_strides[-1] == m * view.strides[0] for view in with_rows)
        if any(view is not None and view.batch_strides[-1] for view in (call.b, call.up)) or not fits:
            break

        def fold(view: View, size: int = size, m: int = m) -> View:
            step = view.strides[0] if m > 1 else view.batch_strides[-1]
            shape, strides = (m * size, view.shape[1]), (step, view.strides[1])
            return replace(view, shape=shape, strides=strides, batch_strides=view.batch_strides[:-1])

        b, up = (v and replace(v, batch_strides=v.batch_strides[:-1]) for v in (call.b, call.up))
        assert b is not None
        whole = replace(call, b=b, up=up, fused=call.fused.mapped(fold), batch_shape=call.batch_shape[:-1])
        call = replace(whole, a=fold(call.a), out=fold(call.out))
    return call


def _fused(extras: Extras, like: torch.Tensor, batch: tuple[tuple[int, ...], ...]) -> Fused:
    """Return an epilogue as views whose strides expand each tensor to the shape of `like`.

    `batch` holds each tensor's strides over the batch.
    """
    views: dict[str, View] = {}
    steps = iter(batch)
    for name, tensor in zip(SIDES, extras.tensors, strict=True):
        if tensor is None:
            continue
        pairs = zip(like.shape[-2:], tensor.stride()[-2:], strict=True)
        rows, columns = (0 if size == 1 else step for size, step in pairs)
        shape = (like.shape[-2], like.shape[-1])
        views[name] = View(tensor, shape, (rows, columns), next(steps), tensor.element_size())
    how = {"activation": extras.activation, "alpha": extras.alpha, "beta": extras.beta}
    return Fused(**views, **how, gated=extras.up is not None)  # type: ignore[arg-type]


def described(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, precision: str, extras: Extras = NOTHING
) -> MatmulCall:
    """Return the call of a product whose arguments were checked. out has the shape of the result.

    A column-major result is computed as the row-major result of the transposed operands. Batch-invariant
    calls are not transposed: a result of many rows and one column is column-major, one of a single row is
    not.
    """
    batch = broadcast(a.shape[:-2], b.shape[:-2])

    def as_rows(tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor.unsqueeze(-1) if b.ndim == 1 else tensor
        return rows.unsqueeze(-2) if a.ndim == 1 else rows

    rows = as_rows(out)
    wide = extras._replace(blocks=None, up=None).mapped(lambda tensor: as_rows(tensor.expand(out.shape)))
    a_rows = a.unsqueeze(0) if a.ndim == 1 else a
    b_rows = b.unsqueeze(1) if b.ndim == 1 else b
    sides = [_strides(tensor, batch) for tensor in wide.tensors if tensor is not None]
    ups = [] if extras.up is None else [_strides(extras.up, batch)]
    strides = (_strides(a_rows, batch), _strides(b_rows, batch), tuple(rows.stride()[:-2]))
    sizes, (a_batch, b_batch, out_batch, *side_batches) = merged(batch, *strides, *sides, *ups)
    fused = _fused(wide._replace(up=extras.up), rows, tuple(side_batches))
    up = None if extras.up is None else _view(extras.up, side_batches[-1])
    dtypes = (name_of(a.dtype), name_of(out.dtype))
    views = (_view(a_rows, a_batch), _view(b_rows, b_batch), _view(rows, out_batch))
    b_dtype = name_of(b.dtype) if b.dtype != a.dtype else ""
    scales = None if extras.blocks is None else BlockScales(extras.shared, *extras.blocks)
    whole = MatmulCall(*views, sizes, *dtypes, precision, fused, b_dtype=b_dtype, scales=scales, up=up)
    call = _folded(replace(whole, invariant=is_batch_invariant()))
    transposes = call.out.layout == "column" and up is None and not call.invariant
    return call.transposed if transposes else call
