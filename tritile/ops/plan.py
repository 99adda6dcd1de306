"""Offer `tritile.plan`: tell what a call would run, and why, without running it."""

import inspect
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, Final

import torch

from tritile.core import device as devices
from tritile.core import gpus
from tritile.core.device import Device
from tritile.core.problem import Tiled
from tritile.core.quantized import QuantizedWeight
from tritile.core.views import Call
from tritile.errors import InvalidValueError, ShapeError
from tritile.ops.asked import ASKED, Asked, unchanged
from tritile.ops.checks import check_memory
from tritile.ops.fused import BESIDE_BIAS, check_bias_alone, linear
from tritile.ops.grouped import grouped_matmul
from tritile.ops.linear_quantized import QuantizedLinear
from tritile.ops.matmul import bmm, check_matrices, matmul, mm
from tritile.ops.permute import permute, transpose
from tritile.ops.run import fixed
from tritile.ops.signatures import NAMES
from tritile.planning import plans
from tritile.planning.plans import Plan

IN_PLACE: Final = "in place: the same config for every problem, never measured"


_PLANNED: Final = {f: f.__name__ for f in (matmul, mm, bmm, linear, grouped_matmul, permute, transpose)}


def _asked(name: str, given: dict[str, Any]) -> Asked:
    """Return what a function computes, by its arguments but out."""
    if name in ("mm", "bmm"):
        a, b = given["input"], given["mat2"]
        check_matrices(name, a, b, 2 if name == "mm" else 3)
        return ASKED["matmul"](a, b, given["out_dtype"], given["precision"])
    if isinstance(given.get("weight"), QuantizedWeight):
        check_bias_alone(*(given[name] for name in BESIDE_BIAS))
        return QuantizedLinear(given["input"], given["weight"], given["bias"])
    return ASKED[name](*(given[each] for each in NAMES[name]))


def _call(what: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Return the described call of a function, whose result is allocated."""
    given = inspect.signature(what).bind(*args, **kwargs)
    given.apply_defaults()
    out = given.arguments["out"]
    of = _asked(_PLANNED[what], given.arguments)
    shape, dtype, how = of.checked(out)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=of.first.device)
    else:
        of.check_memory(out)
    if out.numel() == 0 or of.is_empty:
        shapes = " and ".join(str(tuple(tensor.shape)) for tensor in of.tensors[:2] if tensor is not None)
        raise ShapeError(f"plan: {of.op} of {shapes} launches no kernel")
    return of.call(unchanged, out, how)


def _gpu(given: Any) -> Device:
    """Return the GPU that a caller names. Raise InvalidValueError or DeviceError where there is none."""
    if isinstance(given, Device):
        return given
    if isinstance(given, str) and gpus.known(given):
        return gpus.target_device(given)
    try:
        located = torch.device(given)
    except (RuntimeError, TypeError):
        located = None
    if located is None or located.type != "cuda":
        wanted = f"a tritile.Device, one of {', '.join(gpus.SHORT)}, or a GPU as torch names it"
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
    elif isinstance(what, Hashable) and what in _PLANNED:
        check_memory("plan", *args, *kwargs.values())
        call = _call(what, args, kwargs)
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
