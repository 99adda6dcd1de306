"""Multiply by a quantized weight: `tritile.linear` of a `QuantizedWeight`."""

from typing import Any, Final

import torch

from tritile.core.quantized import QuantizedWeight
from tritile.core.settings import is_batch_invariant, rules
from tritile.core.views import UNFUSED, Fused, QuantizedCall, View
from tritile.errors import DtypeError, ShapeError
from tritile.ops.checks import check_same_device, check_tensor, describe, name_of, names_of
from tritile.ops.dispatch import call_operator, needs_dispatch
from tritile.ops.memo import Key, Ready, addresses_of, keep, launch_ready, look_up
from tritile.ops.run import interpret_product, on_host, prepared

_BIASES: Final = (torch.float32, torch.float16, torch.bfloat16)


def check(x: Any, weight: QuantizedWeight, bias: Any) -> tuple[int, ...]:
    """Return the shape of the result. Raise a TritileError for arguments that do not fit."""
    check_tensor("linear", "input", x)
    n, k = weight.shape
    if x.dtype != weight.dtype:
        raise DtypeError(
            f"linear: input is {name_of(x.dtype)}, but weight is quantized for {name_of(weight.dtype)}: "
            f"wanted {name_of(weight.dtype)}, or a weight from quantize(..., dtype=...)"
        )
    check_same_device("linear", x, "weight", weight.packed)
    if x.ndim == 0 or x.shape[-1] != k:
        shapes = f"input has shape {tuple(x.shape)} and weight {weight.shape}"
        raise ShapeError(f"linear: {shapes}: wanted input (..., {k})")
    if bias is not None:
        check_tensor("linear", "bias", bias)
        check_same_device("linear", x, "bias", bias)
        if bias.dtype not in _BIASES:
            raise DtypeError(f"linear: bias is {describe(bias)}: wanted {names_of(_BIASES)}")
        if tuple(bias.shape) != (n,):
            raise ShapeError(f"linear: bias has shape {tuple(bias.shape)}: wanted ({n},)")
    return (*x.shape[:-1], n)


def described(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None, out: torch.Tensor
) -> QuantizedCall:
    """Return the call of arguments that were checked: x (M, K) of any strides, out (M, N), contiguous."""
    (m, k), n = x.shape, weight.shape[0]
    size = x.element_size()
    rows = x.stride(0) if m > 1 else -(-k // 16) * 16  # the stride of a single row does not matter
    fused = UNFUSED
    if bias is not None:
        fused = Fused(bias=View(bias, (m, n), (0, bias.stride(0)), (), bias.element_size()))
    return QuantizedCall(
        View(x, (m, k), (rows, x.stride(1) if k > 1 else 1), (), size),
        weight.packed,
        weight.scales,
        weight.zeros,
        View(out, (m, n), (n, 1), (), out.element_size()),
        name_of(weight.dtype),
        weight.bits,
        weight.group_size,
        fused,
        is_batch_invariant(),
    )


def quantized_linear(x: Any, weight: QuantizedWeight, bias: Any = None) -> torch.Tensor:
    """Return x (..., K) @ weight^T + bias, for a `QuantizedWeight`.

    The weight is unpacked while it is multiplied or, where x has many rows, before that, into a workspace of
    2 N K bytes that lasts for the call. The config decides whether its values are rounded to x's dtype, as
    those of `weight.dequantize()` are, or stay exact while sums over a group are scaled instead. Sums and
    bias are added in float32 and rounded once, when stored.
    """
    if needs_dispatch(x, bias):
        parts = (weight.packed, weight.scales, weight.zeros)
        n, k = weight.shape
        options: dict[str, Any] = {"bits": weight.bits, "group_size": weight.group_size, "n": n, "k": k}
        return call_operator("linear_quantized", x, *parts, bias, **options)
    return eager(x, weight, bias)


def eager(x: Any, weight: QuantizedWeight, bias: Any) -> torch.Tensor:
    """Run `quantized_linear` on plain tensors: the kernel of its operator on CUDA and CPU."""
    key, ready, _ = look_up("linear_quantized", None, (x, bias), None, weight.place)
    if ready is None:
        return _run_unprepared(x, weight, bias, key)
    return launch_ready(ready, addresses_of(x, weight.packed, weight.scales, weight.zeros, bias, None), None)


def _run_unprepared(x: Any, weight: QuantizedWeight, bias: Any, key: Key | None) -> torch.Tensor:
    """Run a call that is not in the memo of prepared calls, and remember its launch under `key`."""
    rules()  # report a wrong setting of the environment on any device
    shape = check(x, weight, bias)
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0 or x.is_meta:
        return out
    plain_bias = None if bias is None else bias.resolve_neg()
    rows = x.resolve_neg().reshape(-1, weight.shape[1])  # a copy where rows have no single stride
    if on_host(x):
        added = None if plain_bias is None else plain_bias.float()
        interpret_product(
            lambda read, wide, _: described(read(rows), weight, added, wide),
            (rows,),
            out.view(-1, weight.shape[0]),
        )
        return out
    call = described(rows, weight, plain_bias, out)
    launch = prepared(call)
    launch(*call.tensors)
    if rows.data_ptr() == x.data_ptr() and plain_bias is bias:
        tensors = (x, weight.packed, weight.scales, weight.zeros, bias)
        order = tuple(i for i, tensor in enumerate((*tensors, out)) if tensor is not None)
        keep(key, Ready.of(launch, order, tensors, out))
    return out
