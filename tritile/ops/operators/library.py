"""Define operators of `torch.ops.tritile`, with kernels for torch's dispatch keys.

An operator consists of its schema and

- a kernel for CUDA and CPU, the plain call;
- a fake kernel, which checks the arguments of fake tensors and returns a result of the right shape;
- rules for autograd, vmap and autocast, where it has them.

Where a result may be written to a given tensor, an overload `.out` takes it and returns nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch.autograd import forward_ad

from tritile.core.of_torch import (
    KEYS_BELOW_AUTOGRAD,
    DispatchKey,
    DispatchKeySet,
    OpOverload,
    SingleLevelFunction,
    add_batch_dim,
    below_autograd,
    current_transform,
    forward_level,
    forward_recording,
    is_view,
    schema_of,
    single_level,
    unsafe_view,
    unwrap_batched,
    without_keys,
)
from tritile.core.settings import rules, under
from tritile.ops.call import REQUESTS, run_plain
from tritile.ops.checks import check_constant
from tritile.ops.dispatch import NAMES, SCHEMAS, call_overload, parted, register_shardings

LIBRARY: Final = torch.library.Library("tritile", "DEF")
# Kernels take any strides: a compiler need not copy what it passes on.
_TAGS: Final = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_AUTOCAST: Final = (("cuda", DispatchKey.AutocastCUDA), ("cpu", DispatchKey.AutocastCPU))
_CAST: Final = (torch.float16, torch.bfloat16, torch.float32)  # those that torch casts; fp8 stays as it is
_WITHOUT_OUT: Final = ("linear_quantized",)

Kernel = Callable[..., Any]


def define(
    name: str,
    record: Kernel,
    rule: Callable[..., tuple[torch.Tensor, int]] | None = None,
    operands: tuple[str, ...] = (),
    like: str | None = None,
    kernel: Kernel | None = None,
) -> None:
    """Define `tritile::name`, and its overload that writes to out.

    Args:
        name: the operator's name, of `tritile.ops.dispatch.SCHEMAS`.
        record: makes the result where a gradient is wanted, as `differentiate` says.
        rule: for a batch of torch.vmap's, as `batch` says.
        operands: what torch.autocast casts, and what has no gradient in fp8.
        like: the argument to whose dtype torch.autocast casts, where that is not its own.
        kernel: the plain call, where it is not `run_plain` of the arguments as the schema names them.
    """
    arguments = SCHEMAS[name]
    LIBRARY.define(f"{name}({arguments}) -> Tensor", tags=_TAGS)
    packet = getattr(torch.ops.tritile, name)
    overload: OpOverload = packet.default
    filled = filler_of(overload)

    def plain(*args: Any, out: torch.Tensor | None = None, **named: Any) -> torch.Tensor:
        tensors, options = parted(name, filled(args, named))
        return run_plain(name, tensors, out, options)

    def fake(*args: Any, out: torch.Tensor | None = None, **named: Any) -> torch.Tensor:
        of = REQUESTS[name](*filled(args, named))
        shape, dtype, _ = of.checked(out)
        return of.first.new_empty(shape, dtype=dtype) if out is None else out

    kernel = kernel or plain
    _implement(name, kernel, fake)
    if name not in _WITHOUT_OUT:
        keywords = ", " if "*" in arguments else ", *, "
        LIBRARY.define(f"{name}.out({arguments}{keywords}Tensor(a!) out) -> ()", tags=_TAGS)
        _implement(f"{name}.out", _nothing(kernel), _nothing(fake))
        names = (*NAMES[name], "out")  # into out there is no gradient, as in torch
        differentiate(packet.out, lambda *values: refuse(name, *zip(names, values, strict=True)))
    differentiate(overload, record, [NAMES[name].index(each) for each in operands])
    if rule is not None:
        batch(overload, rule)
    if operands:
        autocast(name, operands, like)


def _implement(name: str, kernel: Kernel, fake: Kernel) -> None:
    for key in ("CUDA", "CPU"):
        LIBRARY.impl(name, kernel, key)
    for key in ("Conjugate", "Negative"):  # lazy views are read as they are, not copied first
        LIBRARY.impl(name, torch.library.fallthrough_kernel, key)
    torch.library.register_fake(f"tritile::{name}", fake, lib=LIBRARY)


def _nothing(kernel: Kernel) -> Kernel:
    """Wrap a kernel to return nothing: torch does not count out as a result."""

    def into(*args: Any, **kwargs: Any) -> None:
        kernel(*args, **kwargs)

    return into


def filler_of(op: OpOverload) -> Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...]]:
    """Return what returns all arguments of a call in the order of the schema.

    Those that torch left out have their defaults.
    """
    arguments = [(a.name, a.default_value) for a in schema_of(op).arguments]
    defaults = tuple(default for _, default in arguments)

    def filled(args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        if not named:
            return args + defaults[len(args) :]
        return (*args, *[named.get(name, default) for name, default in arguments[len(args) :]])

    return filled


def _tensors(values: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    return (value for value in values if isinstance(value, torch.Tensor))


def tracked(*values: Any) -> bool:
    """True if a gradient of any of these values is wanted, or one of them carries a tangent."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _tensors(values)):
        return True
    return forward_level() >= 0 and any(
        forward_ad.unpack_dual(tensor).tangent is not None for tensor in _tensors(values)
    )


class Formula(SingleLevelFunction):
    """Define a derivative: a torch.autograd.Function whose forward is an operator, below autograd.

    It is single-level, as torch's own derivatives are: under transforms of torch.func the dispatcher comes
    here once for each level. `Formula.of(name, *values)` takes all arguments in the order of the schema. The
    backward pass runs in the mode of the call, and batch-invariant if that was, in whatever thread.
    """

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        own_context, own_backward = cls.setup_context, cls.backward

        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
            ctx.rules = rules()
            own_context(ctx, inputs, output)

        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            with under(ctx.rules):
                return own_backward(ctx, *grads)

        cls.setup_context = staticmethod(setup_context)  # type: ignore[method-assign]
        cls.backward = staticmethod(backward)  # type: ignore[method-assign]

    @classmethod
    def of(cls, name: str, *values: Any) -> Any:
        """Return the result of `tritile::name` with its derivative recorded."""
        with single_level():
            return cls.apply(name, *values)  # type: ignore[attr-defined]

    @staticmethod
    def forward(name: str, *values: Any) -> Any:
        with torch.enable_grad(), forward_recording(True), below_autograd():
            made = call_overload(name, *values)
            # autograd refuses to have a view changed that a function made
            return unsafe_view(made, made.shape) if is_view(made) else made


def differentiate(op: OpOverload, record: Callable[..., Any], operands: Sequence[int] = ()) -> None:
    """Register how an operator's result is made where a gradient is wanted, or an argument carries a tangent.

    `record` takes all arguments in the order of the schema. Other calls go on below autograd. `operands` are
    places of those that are refused in fp8: rounding to it has no gradient.
    """
    name, arguments = schema_of(op).name.removeprefix("tritile::"), schema_of(op).arguments
    filled = filler_of(op)

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        register_shardings()  # a traced call, or one of the operator itself, comes here first
        values = filled(args, kwargs)
        if not tracked(*values):
            with below_autograd():
                return op.redispatch(keyset & KEYS_BELOW_AUTOGRAD, *args, **kwargs)
        for place in operands:
            if values[place].dtype.itemsize == 1:
                refuse(name, (arguments[place].name, values[place]))
        return record(*values)

    LIBRARY.impl(op, kernel, "Autograd", with_keyset=True)


def refuse(op: str, *given: tuple[str, Any]) -> None:
    """Raise GradientError where one of these named arguments requires a gradient or carries a tangent."""
    for name, value in given:
        if isinstance(value, torch.Tensor):
            check_constant(op, name, value)


def batch(op: OpOverload, rule: Callable[..., tuple[torch.Tensor, int]]) -> None:
    """Register how an operator handles a batch that torch.vmap makes.

    `rule` takes in_dims, then all arguments in the order of the schema. It returns the result and its batch
    dimension. torch.library.register_vmap does not take operators with tensors among their keywords.
    """
    filled = filler_of(op)

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> torch.Tensor:
        level = current_transform().level()
        values, in_dims = unwrap_batched(filled(args, kwargs), level)
        with without_keys(DispatchKeySet(DispatchKey.FuncTorchBatched)):
            out, dim = rule(in_dims, *values)
        return add_batch_dim(out, dim, level)

    LIBRARY.impl(op, kernel, "FuncTorchBatched", with_keyset=True)


def autocast(op: str, operands: tuple[str, ...], like: str | None = None) -> None:
    """Register that torch.autocast casts these operands, as it does for torch's own products.

    They are cast to the dtype of the argument `like` where one is named. A precision, which is meant for
    fp32, does not apply to operands that were cast.
    """
    filled = filler_of(getattr(torch.ops.tritile, op).default)

    def register(device: str, key: DispatchKey) -> None:
        def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
            values = dict(zip(NAMES[op], filled(args, kwargs), strict=True))
            dtype = values[like].dtype if like else torch.get_autocast_dtype(device)
            for name in operands:
                value = values[name]
                if value.device.type == device and value.dtype in _CAST and value.dtype != dtype:
                    values[name] = value.to(dtype)
                    values |= {"precision": None} if "precision" in values else {}
            with without_keys(DispatchKeySet(key)):
                return call_overload(op, *values.values())

        LIBRARY.impl(op, kernel, key.name, with_keyset=True)

    for device, key in _AUTOCAST:
        register(device, key)
