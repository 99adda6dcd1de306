"""Offer `tritile.plan`: tell what a call would run, and why, without running it."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch

from tritile.core import device as devices
from tritile.core.device import Device
from tritile.core.problem import Tiled
from tritile.core.quantized import QuantizedWeight
from tritile.core.views import Call
from tritile.errors import InvalidValueError, ShapeError
from tritile.ops import fused, groups
from tritile.ops import grouped as grouped_op
from tritile.ops import linear as linear_op
from tritile.ops import matmul as matmul_op
from tritile.ops import permute as permute_op
from tritile.ops.checks import check_memory, check_out_memory
from tritile.ops.described import NOTHING, described
from tritile.ops.products import Product, checked_with_memory
from tritile.ops.run import fixed
from tritile.planning import plans
from tritile.planning.plans import Plan


def _product_call(of: Product, out: torch.Tensor | None, out_dtype: Any, precision: Any) -> Call:
    shape, dtype, precision = checked_with_memory(of, out, out_dtype, precision)
    out = torch.empty(shape, dtype=dtype, device=of.a.device) if out is None else out
    if out.numel() == 0 or of.a.shape[-1] == 0:
        shapes = f"{tuple(of.a.shape)} and {tuple(of.b.shape)}"
        raise ShapeError(f"plan: {of.op} of {shapes} launches no kernel")
    extras = NOTHING if of.a.is_complex() else of.extras.mapped(torch.Tensor.resolve_neg)
    return described(of.a.resolve_neg(), of.b.resolve_neg(), out, precision, extras)


def _matmul_call(
    input: torch.Tensor,
    other: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
) -> Call:
    return _product_call(Product.plain(input, other), out, out_dtype, precision)


def _mm_call(input: torch.Tensor, mat2: torch.Tensor, **options: Any) -> Call:
    return _matmul_call(input, mat2, **options)


def _linear_call(
    input: torch.Tensor, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None = None, *,
    activation: str | None = None, residual: torch.Tensor | None = None, out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None, precision: str | None = None,
) -> Call:  # fmt: skip
    if not isinstance(weight, QuantizedWeight):
        of = fused.linear_of(input, weight, bias, residual, activation)
        return _product_call(of, out, out_dtype, precision)
    fused.check_bias_alone(activation, residual, out, out_dtype, precision)
    shape = linear_op.check(input, weight, bias)
    if 0 in shape:
        raise ShapeError(f"plan: linear with a result of {shape} launches no kernel")
    rows = input.resolve_neg().reshape(-1, weight.shape[1])
    result = torch.empty(rows.shape[0], shape[-1], dtype=input.dtype, device=input.device)
    return linear_op.described(rows, weight, bias, result)


def _grouped_call(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    *,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    precision: str | None = None,
) -> Call:
    of = groups.Operands(a, b, offs, scale_a, scale_b)
    shape, dtype, how = groups.result_of(of, out, out_dtype, precision)
    if out is not None:
        check_out_memory(groups.OP, out, **of.given)
    if a.ndim == b.ndim == 3 and scale_a is None:
        return _matmul_call(a, b, out=out, out_dtype=dtype, precision=precision)
    out = torch.empty(shape, dtype=dtype, device=a.device) if out is None else out
    if groups.empty(of, out):
        raise ShapeError(f"plan: products of {tuple(a.shape)} and {tuple(b.shape)} launch no kernel")
    return groups.described(of, out, how)


def _permute_call(op: str, x: torch.Tensor, which: Any, out: torch.Tensor | None) -> Call:
    x, dims, out = permute_op.checked(op, x, which, out)
    if out.numel() == 0:
        raise ShapeError(f"plan: permuting {tuple(x.shape)} launches no kernel")
    return permute_op.described(x, out, dims)


def _transposed(
    input: torch.Tensor, dim0: int = -2, dim1: int = -1, *, out: torch.Tensor | None = None
) -> Call:
    return _permute_call("transpose", input, (dim0, dim1), out)


def _permuted(input: torch.Tensor, dims: Sequence[int], *, out: torch.Tensor | None = None) -> Call:
    return _permute_call("permute", input, dims, out)


IN_PLACE: Final = "in place: the same config for every problem, never measured"
_CALLS: Final[dict[Any, Callable[..., Call]]] = {
    matmul_op.matmul: _matmul_call,
    matmul_op.mm: _mm_call,
    matmul_op.bmm: _mm_call,
    fused.linear: _linear_call,
    grouped_op.grouped_matmul: _grouped_call,
    permute_op.permute: _permuted,
    permute_op.transpose: _transposed,
}


def _gpu(given: Any) -> Device:
    """Return the GPU that a caller names. Raise InvalidValueError or DeviceError where there is none."""
    if isinstance(given, Device):
        return given
    if isinstance(given, str) and given in devices.TARGETS:
        return devices.target_device(given)
    try:
        located = torch.device(given)
    except (RuntimeError, TypeError):
        located = None
    if located is None or located.type != "cuda":
        wanted = f"a tritile.Device, one of {', '.join(devices.TARGETS)}, or a GPU as torch names it"
        raise InvalidValueError(f"plan: device is {given!r}: wanted {wanted}")
    return devices.gpu((devices.current_index() or 0) if located.index is None else located.index)


def plan(
    what: Callable[..., Any] | Tiled,
    *args: Any,
    device: Device | torch.device | str | None = None,
    **kwargs: Any,
) -> Plan:
    """Return what a call would run: the problem, its config, and where the config comes from. Launch nothing.

    Args:
        what: `tritile.matmul`, `mm`, `bmm`, `linear`, `grouped_matmul`, `permute` or `transpose`, followed by
            the arguments of the call, which may be on the meta device; or a problem, alone.
        args: positional arguments of the call.
        device: GPU to plan for: a `tritile.Device`, which need not be in this machine; a name that
            `tritile.target_device` takes; or a GPU of this machine, as torch names it. Default: the GPU of
            the tensors; for a problem, and for tensors on the meta device, the current GPU.
        kwargs: keyword arguments of the call.

    Returns:
        A `tritile.Plan`.

    Raises:
        TritileError: as the call itself raises it for its arguments.
        InvalidValueError: `what` is something else, or no GPU is known.
        NotTunedError: nothing is measured, in mode "strict".
    """
    if isinstance(what, Tiled):
        problem, here, only = what, devices.current_gpu(), None
    elif isinstance(what, Hashable) and what in _CALLS:
        check_memory("plan", *args, *kwargs.values())
        call = _CALLS[what](*args, **kwargs)
        problem, located, only = call.problem, call.tensors[0].device, fixed(call)
        if located.type == "cpu" and device is None:
            found = plans.interpreted(problem)
            return replace(found, config=only) if only else found
        here = devices.gpu(located.index) if located.type == "cuda" else devices.current_gpu()
    else:
        wanted = "tritile.matmul, mm, bmm, linear, grouped_matmul, permute, transpose or a problem"
        raise InvalidValueError(f"plan: what is {what!r}: wanted {wanted}")
    gpu = here if device is None else _gpu(device)
    if gpu is None:
        raise InvalidValueError("plan: there is no GPU here: name one with device=tritile.target_device(...)")
    if only is not None:
        return Plan(problem, only, "model", gpu, None, IN_PLACE)
    chosen = plans.plan_for(problem, gpu) or plans.plan_for(problem, gpu, "cached")
    assert chosen is not None  # only mode "tune" returns None
    return chosen
