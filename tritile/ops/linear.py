"""`tritile.linear` with a quantized weight."""

from typing import Any, Final

import torch

from tritile.core.quantized import QuantizedWeight
from tritile.core.settings import is_batch_invariant, rules
from tritile.core.views import UNFUSED, Fused, QuantizedCall, View
from tritile.errors import DtypeError, ShapeError
from tritile.ops.checks import check_same_device, check_tensor, describe, name_of
from tritile.ops.dispatch import dispatched, diverted
from tritile.ops.recall import CALLS, UNTELLABLE, Ready, keep
from tritile.ops.run import fresh, interpret_product, on_host, place, prepared

_BIASES: Final = (torch.float32, torch.float16, torch.bfloat16)


def check(x: Any, weight: QuantizedWeight, bias: Any) -> tuple[int, ...]:
    """The shape of the result. Raises a TritileError for arguments that do not fit."""
    check_tensor("linear", "input", x)
    n, k = weight.shape
    if x.dtype != weight.dtype:
        raise DtypeError(
            f"linear: input is {name_of(x.dtype)} and the weight quantized for {name_of(weight.dtype)}: "
            f"wanted {name_of(weight.dtype)}, or a weight of quantize(..., dtype=...)"
        )
    check_same_device("linear", x, "weight", weight.packed)
    if x.ndim == 0 or x.shape[-1] != k:
        shapes = f"input is {tuple(x.shape)} and weight {weight.shape}"
        raise ShapeError(f"linear: {shapes}: wanted input of (..., {k})")
    if bias is not None:
        check_tensor("linear", "bias", bias)
        check_same_device("linear", x, "bias", bias)
        if bias.dtype not in _BIASES:
            wanted = ", ".join(map(name_of, _BIASES))
            raise DtypeError(f"linear: bias is {describe(bias)}: wanted {wanted}")
        if tuple(bias.shape) != (n,):
            raise ShapeError(f"linear: bias is {tuple(bias.shape)}: wanted ({n},)")
    return (*x.shape[:-1], n)


def described(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None, out: torch.Tensor
) -> QuantizedCall:
    """The call of arguments that were checked: x (M, K) of any strides, out (M, N), contiguous."""
    (m, k), n = x.shape, weight.shape[0]
    size = x.element_size()
    rows = x.stride(0) if m > 1 else -(-k // 16) * 16  # of one row none is stepped over
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
    """x (..., K) @ weight^T + bias: `tritile.linear` where the weight is a `QuantizedWeight`.

    The weight is unpacked as it is multiplied with or, where x has many rows, first, into a workspace of
    2 N K bytes that lasts for the call. Its values are rounded to x's dtype, as those of
    `weight.dequantize()`, or exact, where sums over a group are scaled in their place: that is the config's
    choice. Sums and bias are kept in float32, and rounded once, as they are stored.
    """
    if dispatched(x, bias):
        parts = (weight.packed, weight.scales, weight.zeros)
        n, k = weight.shape
        words: dict[str, Any] = {"bits": weight.bits, "group_size": weight.group_size, "n": n, "k": k}
        return diverted("linear_quantized", x, *parts, bias, **words)
    return eager(x, weight, bias)


def eager(x: Any, weight: QuantizedWeight, bias: Any) -> torch.Tensor:
    """`quantized_linear` of plain tensors, which is what its operator runs on CUDA and CPU."""
    key = ready = None
    try:
        key = ("linear_quantized", weight.place, rules(), place(x), place(bias))
        ready = CALLS.get(key)
    except UNTELLABLE:
        key = None
    if ready is None:
        return _first(x, weight, bias, key)
    out = fresh(ready.shape, ready.strides, ready.dtype, ready.device)
    ready.launch(*ready.pick((x, weight.packed, weight.scales, weight.zeros, bias, out)))
    return out


def _first(x: Any, weight: QuantizedWeight, bias: Any, key: tuple[Any, ...] | None) -> torch.Tensor:
    """A call that was not met before: check, plan, compile, launch, and remember how under `key`."""
    rules()  # wrong settings of the environment are told of on any device
    shape = check(x, weight, bias)
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0 or x.is_meta:
        return out
    plain_bias = None if bias is None else bias.resolve_neg()
    rows = x.resolve_neg().reshape(-1, weight.shape[1])  # a copy where rows are not evenly apart
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
        tensors = (x, weight.packed, weight.scales, weight.zeros, bias, out)
        order = tuple(i for i, tensor in enumerate(tensors) if tensor is not None)
        keep(key, Ready.of(launch, order, (), out))
    return out
