"""`tritile.plan`: what a call would run, and why, without running it."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final, overload

import torch

from tritile.choose import pick
from tritile.choose.pick import Plan
from tritile.core import device as devices
from tritile.core.call import Call
from tritile.core.device import Device
from tritile.core.problem import Tiled
from tritile.core.quantized import QuantizedWeight
from tritile.core.settings import uses_aten
from tritile.core.triton_private import INTERPRETING
from tritile.errors import InvalidValueError, ShapeError, did_you_mean
from tritile.ops.aten import torch_call_of
from tritile.ops.checks import check_memory
from tritile.ops.dispatch import NAMES
from tritile.ops.fused import NOT_WITH_PACKED, addmm, baddbmm, check_only_bias, gated_linear, linear
from tritile.ops.grouped import grouped_matmul
from tritile.ops.linear_quantized import QuantizedLinear
from tritile.ops.matmul import bmm, check_matrices, matmul, mm
from tritile.ops.permute import contiguous, copied, permute, transpose
from tritile.ops.request import Request, fixed, request_of
from tritile.ops.scaled import scaled_matmul
from tritile.tuner.adoption import tuner_for
from tritile.tuner.plan import KernelPlan, Plannable

IN_PLACE: Final = "in place: such calls always run the same config, which is never measured"
_FUNCTIONS: Final = (
    matmul, mm, bmm, linear, addmm, baddbmm, gated_linear, grouped_matmul, scaled_matmul,
    permute, transpose, contiguous,
)  # fmt: skip
OPERATIONS: Final[dict[str, Callable[..., Any]]] = {function.__name__: function for function in _FUNCTIONS}


def call_of(
    caller: str, what: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Iterable[str] = ()
) -> tuple[Call, bool]:
    """Return the call of an operation, named or passed itself, and whether torch's own kernel may make it.

    The result is allocated. `options`: names of the caller's own keyword arguments, one of which may be
    misspelt. Raises InvalidValueError for anything but an operation, and for wrong arguments the same errors
    as the call itself.
    """
    if isinstance(what, torch.Tensor):
        expected = f"pass the function, then its arguments: tritile.{caller}(tritile.matmul, a, b)"
        raise InvalidValueError(f"{caller}: what is a tensor: {expected}")
    name = what if isinstance(what, str) else getattr(what, "__name__", "")
    function = OPERATIONS.get(name)
    if function is None or what not in (name, function):
        names = ", ".join(OPERATIONS)
        expected = (
            f"one of tritile.{names}, or its name; a problem; or a kernel decorated with tritile.autotune"
        )
        raise InvalidValueError(
            f"{caller}: what is {what!r}{did_you_mean(name, OPERATIONS)}: expected {expected}"
        )
    signature = inspect.signature(function)
    if unknown := [key for key in kwargs if key not in signature.parameters]:
        hint = did_you_mean(unknown[0], [*signature.parameters, *options])
        raise InvalidValueError(f"{caller}: {name} has no argument {unknown[0]!r}{hint}")
    check_memory(caller, *args, *kwargs.values())
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InvalidValueError(f"{caller}: {name}: {error}") from error
    bound.apply_defaults()
    out = bound.arguments.get("out")
    request = _request(name, bound.arguments)
    shape, dtype, precision = request.checked(out)
    if out is not None:
        request.check_memory(out)
    result = torch.empty(shape, dtype=dtype, device=request.first.device) if out is None else out
    if result.numel() == 0 or request.is_empty:
        shapes = " and ".join(
            str(tuple(operand.shape)) for operand in request.tensors[:2] if operand is not None
        )
        raise ShapeError(f"{caller}: {request.op} of {shapes} is empty, and launches no kernel")
    call = request.call(result, precision)
    return call, uses_aten() and torch_call_of(request, call.problem, precision, out) is not None


def _request(name: str, arguments: dict[str, Any]) -> Request:
    if name in ("mm", "bmm"):
        a, b = arguments["input"], arguments["mat2"]
        check_matrices(name, a, b, 2 if name == "mm" else 3)
        return request_of("matmul", a, b, arguments["out_dtype"], arguments["precision"])
    if name == "contiguous":
        x = arguments["input"]
        if copied(x):
            return request_of("permute", x, tuple(range(x.ndim)))
        raise InvalidValueError(
            f"contiguous of {tuple(x.shape)} launches no kernel, because input is contiguous"
        )
    if isinstance(arguments.get("weight"), QuantizedWeight):
        check_only_bias(*(arguments[name] for name in NOT_WITH_PACKED))
        return QuantizedLinear(arguments["input"], arguments["weight"], arguments["bias"])
    return request_of(name, *(arguments[argument] for argument in NAMES[name]))


def gpu_of(caller: str, device: Any) -> Device:
    """Return the GPU that a caller names. Raises InvalidValueError or DeviceError if there is none."""
    if isinstance(device, Device):
        return device
    if isinstance(device, str) and devices.target_key(device):
        return devices.target_device(device)
    try:
        located = torch.device(device)
    except (RuntimeError, TypeError):
        located = None
    if located is None or located.type != "cuda":
        hint = did_you_mean(device, [*devices.SHORT, *devices.SHORT.values()])
        expected = f"a tritile.Device, one of {', '.join(devices.SHORT)}, or a GPU such as 'cuda:0'"
        raise InvalidValueError(f"{caller}: device is {device!r}{hint}: expected {expected}")
    return devices.gpu((devices.current_index() or 0) if located.index is None else located.index)


@overload
def plan(
    what: Plannable, *args: Any, device: Device | torch.device | str | None = None, **kwargs: Any
) -> KernelPlan: ...


@overload
def plan(
    what: Callable[..., Any] | str | Tiled,
    *args: Any,
    device: Device | torch.device | str | None = None,
    **kwargs: Any,
) -> Plan: ...


def plan(
    what: Callable[..., Any] | str | Tiled | Plannable,
    *args: Any,
    device: Device | torch.device | str | None = None,
    **kwargs: Any,
) -> Plan | KernelPlan:
    """Return what a call would run: the problem, its config, and where that comes from. Launches nothing.

    Args:
        what: an operation of tritile, such as `tritile.matmul`, or its name, such as "matmul", followed by
            the arguments of the call, which may be on the meta device. Or a problem, without arguments. Or a
            kernel under `tritile.autotune` or Triton's, followed by its arguments, with or without `grid=`.
        args: positional arguments of the call.
        device: GPU to plan for: a `tritile.Device`, which need not be in this machine; a name that
            `tritile.target_device` takes; or a GPU of this machine in torch's form. Default: the GPU of the
            tensors; for a problem and for meta tensors, the current GPU.
        kwargs: keyword arguments of the call.

    Returns:
        A `tritile.Plan`, whose config has the family "aten" if torch's own kernel would run. For a decorated
        kernel a `KernelPlan`.

    Raises:
        TritileError: the same errors as the call itself, for its arguments.
        InvalidValueError: `what` is none of these, an argument of the call is missing, or there is no GPU to
            plan for.
        NotTunedError: in mode "strict", if no measurement covers the problem.

    Examples:
        >>> a = torch.empty(4096, 4096, device="meta", dtype=torch.bfloat16)
        >>> plan = tritile.plan("matmul", a, a, device="h200")
        >>> plan.problem.label
        '4096x4096x4096 NN bfloat16'
    """
    planned: Plan | KernelPlan = plan_call("plan", what, args, kwargs, device, ("device",))
    return planned


def plan_call(
    caller: str, what: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: Any,
    options: Iterable[str],
) -> Any:  # fmt: skip
    """Do what `plan` does, for a caller with `options` as its own keyword arguments."""
    gpu = None if device is None else gpu_of(caller, device)
    what = tuner_for(what)
    if isinstance(what, Plannable):
        return what.planned(args, kwargs, gpu)
    if isinstance(what, Tiled):
        problem, here, only, allows_torch = what, devices.current_gpu(), None, uses_aten()
    else:
        call, allows_torch = call_of(caller, what, args, kwargs, options)
        problem, located, only = call.problem, call.tensors[0].device, fixed(call)
        if located.type == "cpu" and device is None:
            if not INTERPRETING or problem.needs_torch:
                return pick.on_host(problem)
            interpreted = pick.interpreted(problem)
            return replace(interpreted, config=only) if only else interpreted
        here = devices.gpu(located.index) if located.type == "cuda" else devices.current_gpu()
    gpu = gpu or here
    if gpu is None:
        raise InvalidValueError(f"{caller}: there is no GPU here: pass device=, such as device='h200'")
    if only is not None:
        return Plan(problem, only, "model", gpu, None, IN_PLACE)
    chosen = pick.plan_for(problem, gpu, None, allows_torch)
    if chosen is None:  # mode "tune" would measure it
        chosen = pick.plan_for(problem, gpu, "cached", allows_torch)
    assert chosen is not None
    return chosen
