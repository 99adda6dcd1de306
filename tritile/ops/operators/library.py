"""Define operators of `torch.ops.tritile`, with kernels for torch's dispatch keys.

An operator consists of its schema and

- a kernel for CUDA and CPU, the plain call;
- a fake kernel, which checks the arguments of fake tensors and returns a result of the right shape;
- rules for autograd, vmap and autocast, if it has them.

If a result may be written to a tensor of the caller, an overload `.out` takes it and returns nothing.

A product has a second operator, `tritile::invariant_NAME`, that is batch-invariant wherever it runs: what
torch records inside of `tritile.batch_invariant()` (a graph, a derivative) may run outside of it, or in a
thread that does not know of it.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from tritile.core.settings import invariantly, is_batch_invariant, rules, under
from tritile.core.torch_private import (
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
    guard_graph,
    is_view,
    know_compiled_autograd,
    schema_of,
    single_level,
    unsafe_view,
    unwrap_batched,
    without_keys,
)
from tritile.ops.checks import check_constant
from tritile.ops.dispatch import (
    INVARIANT,
    NAMES,
    SCHEMAS,
    TENSORS,
    call_overload,
    needs_dispatch,
    parted,
    register_shardings,
)
from tritile.ops.memo import launch_cached
from tritile.ops.permute import options_of
from tritile.ops.request import eager, request_of

LIBRARY: Final = torch.library.Library("tritile", "DEF")
# Kernels take any strides: a compiler need not copy what it passes on.
_TAGS: Final = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_AUTOCAST: Final = (("cuda", "AutocastCUDA"), ("cpu", "AutocastCPU"))
_CAST: Final = (torch.float16, torch.bfloat16, torch.float32)  # those that torch casts; fp8 stays as it is
_WITHOUT_OUT: Final = ("linear_quantized",)

Kernel = Callable[..., Any]
Rule = Callable[..., tuple[torch.Tensor, int]]


def define(
    name: str,
    record: Kernel,
    rule: Rule | None = None,
    operands: Sequence[str] = (),
    constants: Sequence[str] = (),
    like: str | None = None,
    prefix: str = "",
) -> None:
    """Define `tritile::name`, and its overload that writes to out.

    Args:
        name: the operator's name, of `tritile.ops.dispatch.SCHEMAS`.
        prefix: `INVARIANT` for the operator that is always batch-invariant.
        record: makes the result, of all arguments in the order of the schema, if a gradient is needed or an
            argument carries a tangent.
        rule: handles a batch of torch.vmap's. It takes in_dims, then all arguments in the order of the
            schema, and returns the result and its batch dimension.
        operands: what torch.autocast casts, and what has no gradient in fp8.
        constants: what never has a gradient.
        like: the argument to whose dtype torch.autocast casts, if not to its own.
    """
    if not prefix and name != "permute":
        define(name, record, rule, operands, constants, like, INVARIANT)
    arguments, names, own = SCHEMAS[name], NAMES[name], prefix + name
    LIBRARY.define(f"{own}({arguments}) -> Tensor", tags=_TAGS)
    packet = getattr(torch.ops.tritile, own)
    op: OpOverload = packet.default
    filled = _filler_of(op)
    how = _invariant if prefix else _as_it_is

    def run(values: tuple[Any, ...], out: torch.Tensor | None, on_miss: Kernel) -> Any:
        tensors, options = parted(name, values)
        if name == "permute":
            options = options_of(*options)
        return launch_cached(name, tensors, out, options, on_miss)

    def plain(*args: Any, out: torch.Tensor | None = None, **named: Any) -> torch.Tensor:
        result: torch.Tensor = run(filled(args, named), out, eager)
        return result

    def at_once(values: tuple[Any, ...]) -> torch.Tensor | None:
        """Return the result of a call that torch need not see, else None."""
        return run(values, None, _eager_if_plain)

    def fake(*args: Any, out: torch.Tensor | None = None, **named: Any) -> torch.Tensor:
        of = request_of(name, *filled(args, named))
        shape, dtype, _ = of.checked(out)
        return of.first.new_empty(shape, dtype=dtype) if out is None else out

    def recorded(*values: Any) -> Any:
        found = dict(zip(names, values, strict=True))
        # rounding to fp8 has no gradient
        fixed = (*constants, *(each for each in operands if found[each].dtype.itemsize == 1))
        check_constant(name, **{each: found[each] for each in fixed})
        return record(*values)

    _implement(own, how(plain), how(fake))
    _differentiate(op, how(recorded), how(at_once))
    if name not in _WITHOUT_OUT:
        keywords = ", " if "*" in arguments else ", *, "
        LIBRARY.define(f"{own}.out({arguments}{keywords}Tensor(a!) out) -> ()", tags=_TAGS)
        _implement(f"{own}.out", _nothing(how(plain)), _nothing(how(fake)))
        into = (*names, "out")  # into out there is no gradient, as in torch
        _differentiate(packet.out, lambda *v: check_constant(name, **dict(zip(into, v, strict=True))))
    if name != "permute":
        register_flop_formula(packet)(_flops_of(name))
    if rule is not None:
        _batch(op, how(rule))
    if operands:
        _autocast(op, name, how, operands, like)


def _as_it_is(kernel: Kernel) -> Kernel:
    return kernel


def _invariant(kernel: Kernel) -> Kernel:
    """Wrap what an operator does, or another operator for it, to be batch-invariant."""

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        if is_batch_invariant():
            return kernel(*args, **kwargs)
        with invariantly():
            return kernel(*args, **kwargs)

    return run


def _implement(name: str, kernel: Kernel, fake: Kernel) -> None:
    for key in ("CUDA", "CPU"):
        LIBRARY.impl(name, kernel, key)
    for key in ("Conjugate", "Negative"):  # lazy views are read as they are, not copied first
        LIBRARY.impl(name, torch.library.fallthrough_kernel, key)
    torch.library.register_fake(f"tritile::{name}", fake, lib=LIBRARY)


def _flops_of(name: str) -> Callable[..., int]:
    """Return what torch's FlopCounterMode counts of a product, by shapes in place of tensors."""
    roles = [role for role, _ in TENSORS[name]]
    first = roles.index("a") if "a" in roles else 0  # all operands before it are tensors

    def count(*values: Any, out_shape: Sequence[int], **options: Any) -> int:
        a, b = values[first], values[first + 1]
        if name == "grouped_matmul" and len(a) == len(b) == 2:
            return 2 * a[0] * a[1] * b[1]  # groups divide K among them
        return (4 if name == "gated_linear" else 2) * math.prod(out_shape) * a[-1]

    return count


def _nothing(kernel: Kernel) -> Kernel:
    """Wrap a kernel to return nothing: torch does not count out as a result."""

    def into(*args: Any, **kwargs: Any) -> None:
        kernel(*args, **kwargs)

    return into


def _filler_of(op: OpOverload) -> Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...]]:
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


def _is_tracked(values: Sequence[Any]) -> bool:
    """True if a gradient of any of these values is needed, or one of them carries a tangent."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return True
    return forward_level() >= 0 and any(
        forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors
    )


def _eager_if_plain(
    op: str, tensors: Sequence[Any], out: Any, options: tuple[Any, ...], key: tuple[Any, ...] | None
) -> torch.Tensor | None:
    return None if needs_dispatch(*tensors) else eager(op, tensors, out, options, key)


def _differentiate(op: OpOverload, record: Kernel, at_once: Kernel | None = None) -> None:
    """Register how a result is made if a gradient is needed. Other calls go on below autograd.

    `at_once` makes results that nothing below autograd is to see, which saves coming through torch again.
    """
    filled, name = _filler_of(op), schema_of(op).name.removeprefix("tritile::")
    has_invariant = name != "permute" and not name.startswith(INVARIANT) and not schema_of(op).overload_name

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        register_shardings()  # a traced call, or one of the operator itself, comes here first
        values = filled(args, kwargs)
        if has_invariant:
            on = is_batch_invariant()
            guard_graph(is_batch_invariant, on)
            if on:
                return call_overload(name, *values)
        made = at_once(values) if at_once is not None else None
        if made is not None:
            return made
        if _is_tracked(values):
            return record(*values)
        with below_autograd():
            return op.redispatch(keyset & KEYS_BELOW_AUTOGRAD, *args, **kwargs)

    LIBRARY.impl(op, kernel, "Autograd", with_keyset=True)


def _batch(op: OpOverload, rule: Rule) -> None:
    """Register a rule of torch.vmap's: torch.library.register_vmap takes no tensors among keywords."""
    filled = _filler_of(op)

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> torch.Tensor:
        level = current_transform().level()
        values, in_dims = unwrap_batched(filled(args, kwargs), level)
        with without_keys(DispatchKeySet(DispatchKey.FuncTorchBatched)):
            out, dim = rule(in_dims, *values)
        return add_batch_dim(out, dim, level)

    LIBRARY.impl(op, kernel, "FuncTorchBatched", with_keyset=True)


def _autocast(
    op: OpOverload, name: str, how: Callable[[Kernel], Kernel], operands: Sequence[str], like: str | None
) -> None:
    """Register that torch.autocast casts these operands, as it does for torch's own products.

    A precision, which is meant for fp32, does not apply to operands that were cast.
    """
    filled = _filler_of(op)

    def register(device: str, key: str) -> None:
        def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
            values = dict(zip(NAMES[name], filled(args, kwargs), strict=True))
            dtype = values[like].dtype if like else torch.get_autocast_dtype(device)
            for each in operands:
                value = values[each]
                if value.device.type == device and value.dtype in _CAST and value.dtype != dtype:
                    values[each] = value.to(dtype)
                    values |= {"precision": None} if "precision" in values else {}
            with without_keys(DispatchKeySet(getattr(DispatchKey, key))):
                return call_overload(name, *values.values())

        LIBRARY.impl(op, how(kernel), key, with_keyset=True)

    for device, key in _AUTOCAST:
        register(device, key)


class Formula(SingleLevelFunction):
    """Define a derivative: a torch.autograd.Function whose forward is an operator, below autograd.

    It is single-level, as torch's own derivatives are: under transforms of torch.func the dispatcher comes
    here once for each level. `Formula.of(name, *values)` takes all arguments in the order of the schema. The
    backward pass runs in the mode of the call, and batch-invariant if that was, in whatever thread.
    """

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        know_compiled_autograd(cls)
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
