"""Define operators of `torch.ops.tritile`, with kernels for torch's dispatch keys.

An operator consists of its schema and

- a kernel for CUDA and CPU, the plain call;
- a fake kernel, which checks the arguments of fake tensors and returns a result of the right shape;
- rules for autograd, vmap and autocast, where it has them.

Where a result may be written to a given tensor, an overload `.out` takes it and returns nothing.
"""

import inspect
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
    schema_of,
    single_level,
    unwrap_batched,
    without_keys,
)
from tritile.core.settings import rules, under
from tritile.errors import GradientError
from tritile.ops.asked import Asked
from tritile.ops.dispatch import register_shardings
from tritile.ops.operators.planning import fake_of
from tritile.ops.signatures import NAMES, SCHEMAS

LIBRARY: Final = torch.library.Library("tritile", "DEF")
# A call that is planned while it is traced is planned for the strides that it has there.
_TAGS: Final = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_AUTOCAST: Final = (("cuda", DispatchKey.AutocastCUDA), ("cpu", DispatchKey.AutocastCPU))
_CAST: Final = (torch.float16, torch.bfloat16, torch.float32)  # those that torch casts; fp8 stays as it is

Kernel = Callable[..., Any]


def define(
    name: str,
    kernel: Kernel,
    asked: Callable[..., Asked],
    record: Kernel,
    rule: Callable[..., tuple[torch.Tensor, int]] | None = None,
    operands: tuple[str, ...] = (),
) -> OpOverload:
    """Define `tritile::name`, and its overload that writes to out where `kernel` takes one.

    Args:
        name: the operator's name, of `tritile.ops.signatures.SCHEMAS`.
        kernel: the plain call, which takes the arguments as the schema names them.
        asked: takes all arguments in the order of the schema.
        record: makes the result where a gradient is wanted, as `differentiate` says.
        rule: for a batch of torch.vmap's, as `batch` says.
        operands: what torch.autocast casts, and what has no gradient in fp8.

    Returns the first overload.
    """
    arguments = SCHEMAS[name]
    LIBRARY.define(f"{name}({arguments}) -> Tensor", tags=_TAGS)
    packet = getattr(torch.ops.tritile, name)

    def fake(*args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        return fake_of(asked(*values_of(packet.default, args, kwargs)), out)

    _implement(name, kernel, fake)
    if "out" in inspect.signature(kernel).parameters:
        keywords = ", " if "*" in arguments else ", *, "
        LIBRARY.define(f"{name}.out({arguments}{keywords}Tensor(a!) out) -> ()", tags=_TAGS)
        _implement(f"{name}.out", _nothing(kernel), _nothing(fake))
        _refuse_gradients(packet.out)
    differentiate(packet.default, record, [NAMES[name].index(each) for each in operands])
    if rule is not None:
        batch(packet.default, rule)
    if operands:
        autocast(packet.default, *operands)
    overload: OpOverload = packet.default
    return overload


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


def values_of(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return all arguments of a call in the order of the schema, with defaults where torch left them out."""
    rest = schema_of(op).arguments[len(args) :]
    return (*args, *(kwargs.get(a.name, a.default_value) for a in rest))


def call(op: OpOverload, values: tuple[Any, ...]) -> Any:
    """Call an operator with all of its arguments in the order of the schema."""
    arguments = schema_of(op).arguments
    named = {a.name: value for a, value in zip(arguments, values, strict=True) if a.kwarg_only}
    return op(*values[: len(values) - len(named)], **named)


def _tensors(values: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    return (value for value in values if isinstance(value, torch.Tensor))


def tracked(*values: Any) -> bool:
    """Tell whether a gradient of any of these values is wanted, or one of them carries a tangent."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _tensors(values)):
        return True
    return forward_level() >= 0 and any(
        forward_ad.unpack_dual(tensor).tangent is not None for tensor in _tensors(values)
    )


def below(op: OpOverload, keyset: DispatchKeySet, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator below autograd, where no gradient is wanted."""
    with below_autograd():
        return op.redispatch(keyset & KEYS_BELOW_AUTOGRAD, *args, **kwargs)


def _keeping_rules(setup_context: Kernel) -> Kernel:
    def kept(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.rules = rules()
        setup_context(ctx, inputs, output)

    return kept


def _by_its_rules(backward: Kernel) -> Kernel:
    def run(ctx: Any, *grads: torch.Tensor) -> Any:
        with under(ctx.rules):
            return backward(ctx, *grads)

    return run


class Formula(SingleLevelFunction):
    """Define a derivative: a torch.autograd.Function whose forward is an operator, below autograd.

    It is single-level, as torch's own derivatives are: under transforms of torch.func the dispatcher comes
    here once for each level. `Formula.of(op, *values)` takes all arguments in the order of the schema. The
    backward pass runs in the mode of the call, and batch-invariant if that was, in whatever thread.
    """

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.setup_context = staticmethod(_keeping_rules(cls.setup_context))  # type: ignore[method-assign]
        cls.backward = staticmethod(_by_its_rules(cls.backward))  # type: ignore[method-assign]

    @classmethod
    def of(cls, op: OpOverload, *values: Any) -> Any:
        """Return the operator's result with its derivative recorded."""
        with single_level():
            return cls.apply(op, *values)  # type: ignore[attr-defined]

    @staticmethod
    def forward(op: OpOverload, *values: Any) -> Any:
        """Return the operator's result. Outer levels go on recording."""
        levels = (torch.enable_grad(), forward_recording(True))
        with levels[0], levels[1], below_autograd():
            return call(op, values)


def differentiate(op: OpOverload, record: Callable[..., Any], operands: Sequence[int] = ()) -> None:
    """Register how an operator's result is made where a gradient is wanted, or an argument carries a tangent.

    `record` takes all arguments in the order of the schema. Other calls go on below autograd. `operands` are
    places of those that are refused in fp8: rounding to it has no gradient.
    """
    name, arguments = schema_of(op).name.removeprefix("tritile::"), schema_of(op).arguments

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        register_shardings()  # a traced call, or one of the operator itself, comes here first
        values = values_of(op, args, kwargs)
        if not tracked(*values):
            return below(op, keyset, args, kwargs)
        for place in operands:
            if values[place].dtype.itemsize == 1:
                refuse(name, (arguments[place].name, values[place]))
        return record(*values)

    LIBRARY.impl(op, kernel, "Autograd", with_keyset=True)


def refuse(op: str, *given: tuple[str, Any]) -> None:
    """Raise GradientError where one of these named arguments requires a gradient or carries a tangent."""
    for name, value in given:
        if tracked(value):
            raise GradientError(
                f"{op}: {name} requires a gradient or carries a tangent, but {op} computes none for it: "
                f"call it under torch.no_grad(), or pass {name}.detach()"
            )


def _refuse_gradients(op: OpOverload) -> None:
    """Refuse gradients through a given output, as torch's own out= does."""
    short, arguments = schema_of(op).name.removeprefix("tritile::"), schema_of(op).arguments

    def record(*values: Any) -> None:
        refuse(short, *((a.name, value) for a, value in zip(arguments, values, strict=True)))

    differentiate(op, record)


def batch(op: OpOverload, rule: Callable[..., tuple[torch.Tensor, int]]) -> None:
    """Register how an operator handles a batch that torch.vmap makes.

    `rule` takes in_dims, then all arguments in the order of the schema. It returns the result and its batch
    dimension. torch.library.register_vmap does not take operators with tensors among their keywords.
    """

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> torch.Tensor:
        level = current_transform().level()
        values, in_dims = unwrap_batched(values_of(op, args, kwargs), level)
        with without_keys(DispatchKeySet(DispatchKey.FuncTorchBatched)):
            out, dim = rule(in_dims, *values)
        return add_batch_dim(out, dim, level)

    LIBRARY.impl(op, kernel, "FuncTorchBatched", with_keyset=True)


def autocast(op: OpOverload, *operands: str, dtype_of: str | None = None) -> None:
    """Register that torch.autocast casts these operands, as it does for torch's own products.

    They are cast to the dtype of the argument `dtype_of` where one is named. A precision, which is meant for
    fp32, does not apply to operands that were cast.
    """
    names = [a.name for a in schema_of(op).arguments]

    def register(device: str, key: DispatchKey) -> None:
        def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
            dtype = torch.get_autocast_dtype(device)
            values = dict(zip(names, values_of(op, args, kwargs), strict=True))
            dtype = values[dtype_of].dtype if dtype_of else dtype
            for name in operands:
                value = values[name]
                if value.device.type == device and value.dtype in _CAST and value.dtype != dtype:
                    values[name] = value.to(dtype)
                    values |= {"precision": None} if "precision" in values else {}
            with without_keys(DispatchKeySet(key)):
                return call(op, tuple(values.values()))

        LIBRARY.impl(op, kernel, key.name, with_keyset=True)

    for device, key in _AUTOCAST:
        register(device, key)
