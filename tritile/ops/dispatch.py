"""List the arguments of each operation, and send calls that torch must see to the operators that take them.

A plain call on plain tensors launches its kernel at once. Calls that torch keeps track of (gradients,
tangents, transforms, subclasses, modes, autocast, tracing) go through its dispatcher to the operator of the
same name in `tritile.ops.operators`. The operator's kernels for CUDA and CPU are the plain call again.

`tensors` and `options` are an operation's arguments that are tensors, and all others, each in the order of
its schema. `values` are all of them in that order.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, Final, TypeVar

import torch
from torch.compiler import is_dynamo_compiling
from torch.jit import is_tracing  # type: ignore[attr-defined]
from torch.overrides import handle_torch_function, has_torch_function

from tritile.core.settings import is_batch_invariant
from tritile.core.torch_private import (
    forward_level,
    innermost_transform,
    is_any_autocast_on,
    is_zero,
    modes_entered,
)
from tritile.errors import TritileError
from tritile.ops.checks import check_may_change

_HOW: Final = "ScalarType? out_dtype=None, str? precision=None"
_WEIGHTS: Final = "Scalar beta=1, Scalar alpha=1, str? activation=None"

# Tensors come before the `*`: torch redistributes no sharded tensors among keywords.
SCHEMAS: Final = {
    "matmul": f"Tensor input, Tensor other, *, {_HOW}",
    "linear": "Tensor input, Tensor weight, Tensor? bias=None, str? activation=None, Tensor? residual=None, "
    f"*, {_HOW}",
    "addmm": f"Tensor input, Tensor mat1, Tensor mat2, *, {_WEIGHTS}, {_HOW}",
    "baddbmm": f"Tensor input, Tensor batch1, Tensor batch2, *, {_WEIGHTS}, {_HOW}",
    "gated_linear": "Tensor input, Tensor weight_gate, Tensor weight_up, str? activation=\"silu\", "
    f"Tensor? bias_gate=None, Tensor? bias_up=None, *, {_HOW}",
    "scaled_matmul": "Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, ScalarType? out_dtype=None, "
    "Tensor? bias=None, str? activation=None, Tensor? residual=None, bool use_fast_accum=False",
    "grouped_matmul": "Tensor a, Tensor b, Tensor? offs=None, Tensor? scale_a=None, Tensor? scale_b=None, "
    f"*, {_HOW}",
    "permute": "Tensor input, int[] dims",
    "transpose": "Tensor input, int dim0, int dim1",  # no operator of its own: torch sees `permute`
    "linear_quantized": "Tensor input, Tensor packed, Tensor scales, Tensor? zeros=None, Tensor? bias=None, "
    "*, int bits, int group_size, int n, int k",
}  # fmt: skip
# The role in a product of each tensor whose role has another name.
_ROLES: Final[dict[str, dict[str, str]]] = {
    "matmul": {"input": "a", "other": "b"},
    "linear": {"input": "a", "weight": "b"},
    "addmm": {"input": "bias", "mat1": "a", "mat2": "b"},
    "baddbmm": {"input": "bias", "batch1": "a", "batch2": "b"},
    "gated_linear": {"input": "a", "weight_gate": "b", "weight_up": "up", "bias_gate": "bias"},
    "permute": {"input": "x"},
    "transpose": {"input": "x"},
    "linear_quantized": {"input": "x", "packed": "words"},
}
WEIGHTS: Final = frozenset({"linear", "gated_linear"})  # multiply by weights (N, K), which are transposed


def _arguments(schema: str) -> list[list[str]]:
    """Return the type and the name of each argument."""
    return [each.partition("=")[0].split() for each in schema.replace("*, ", "").split(", ")]


_ARE_TENSORS: Final = {
    op: [kind.startswith("Tensor") for kind, _ in _arguments(schema)] for op, schema in SCHEMAS.items()
}
_ARE_OPTIONS: Final = {op: [not is_tensor for is_tensor in each] for op, each in _ARE_TENSORS.items()}
# The names of the arguments of each operation, of its options, and of its operator's keyword-only arguments.
NAMES: Final = {op: tuple(name for _, name in _arguments(schema)) for op, schema in SCHEMAS.items()}
OPTIONS: Final = {op: tuple(compress(names, _ARE_OPTIONS[op])) for op, names in NAMES.items()}
NAMED: Final = {
    op: names[schema.partition("*, ")[0].count(", ") :] if "*, " in schema else ()
    for (op, schema), names in zip(SCHEMAS.items(), NAMES.values(), strict=True)
}
# The tensors of each operation: role in the product, and argument's name.
TENSORS: Final = {
    op: tuple((_ROLES.get(op, {}).get(name, name), name) for name in compress(names, _ARE_TENSORS[op]))
    for op, names in NAMES.items()
}


def parted(op: str, values: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the tensors and the options of all arguments."""
    return tuple(compress(values, _ARE_TENSORS[op])), tuple(compress(values, _ARE_OPTIONS[op]))


def joined(op: str, tensors: Sequence[Any], options: Sequence[Any]) -> tuple[Any, ...]:
    """Return all arguments of these tensors and options. Options may have more behind them."""
    tensor, option = iter(tensors), iter(options)
    return tuple(next(tensor if is_tensor else option) for is_tensor in _ARE_TENSORS[op])


def name_of_role(op: str, role: str) -> str:
    return next(name for own, name in TENSORS[op] if own == role)


# --- The dispatcher ---

PLAIN = (torch.Tensor, torch.nn.Parameter)  # types that do not override calls


def sees_every_call() -> bool:
    """True inside a mode, a level of tangents, autocast or a transform, whatever the tensors."""
    return bool(modes_entered() or is_any_autocast_on() or forward_level() >= 0 or innermost_transform())


def needs_dispatch(*tensors: Any) -> bool:
    """True if a call on these arguments, each a tensor or None, must go through torch's dispatcher.

    False if an argument is not a tensor: the checks of the plain call refuse it.
    """
    if is_dynamo_compiling() or is_tracing() or sees_every_call():
        return all(tensor is None or isinstance(tensor, torch.Tensor) for tensor in tensors)
    recording, found = torch.is_grad_enabled(), False
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) not in PLAIN:
            if not isinstance(tensor, torch.Tensor):
                return False
            found = True
        elif (recording and tensor.requires_grad) or is_zero(tensor):
            found = True
    return found


_Public = TypeVar("_Public", bound=Callable[..., Any])
_PUBLIC: Final[dict[str, Callable[..., Any]]] = {}


def public(function: _Public) -> _Public:
    """Register the function that `call_override` names to a class that overrides calls."""
    _PUBLIC[function.__name__] = function
    return function


def is_overridden(*values: Any) -> bool:
    """True if an argument is no tensor, but its class has `__torch_function__`, as a proxy of torch.fx has.

    Subclasses of tensors are for the operator.
    """
    others = [value for value in values if value is not None and not isinstance(value, torch.Tensor)]
    return any(hasattr(type(each), "__torch_function__") and has_torch_function((each,)) for each in others)


def call_override(op: str, tensors: Sequence[Any], out: Any, options: Sequence[Any]) -> Any:
    """Return what `__torch_function__` of an argument makes of a call of tritile's public function.

    A packed weight is no argument that torch.fx records: its parts are, of the operator.
    """
    values = joined(op, tensors, options)
    if op == "linear_quantized":
        return call_overload(op, *values)
    arguments: dict[str, Any] = {**dict(zip(NAMES[op], values, strict=True)), "out": out}
    if op == "matmul" and len(options) > 2:  # of mm or bmm
        op, arguments["mat2"] = options[-1], arguments["other"]
    function, args, named = _PUBLIC[op], list[Any](), dict[str, Any]()
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default is parameter.empty:
            args.append(arguments[name])
        elif arguments[name] is not parameter.default:
            named[name] = arguments[name]
    return handle_torch_function(function, (*tensors, out), *args, **named)


def call_operator(
    op: str, values: tuple[Any, ...], out: torch.Tensor | None, check: Callable[[], Any]
) -> torch.Tensor:
    """Call the operator `tritile::op`, or its overload `out` if out is not None.

    `values` are all other arguments in the order of the operator's schema. If torch refuses the
    call in its own words, `check` raises ours. Raises GradientError if out is an inference tensor, outside of
    `torch.inference_mode()`.
    """
    if is_dynamo_compiling():
        return call_overload(op, *values, out=out)
    if isinstance(out, torch.Tensor):
        check_may_change(op, out)  # torch would write first
    register_shardings()
    try:
        return call_overload(op, *values, out=out)
    except TritileError:
        raise
    except Exception:
        check()
        raise


INVARIANT: Final = "invariant_"


def operator_of(op: str, invariant: bool) -> Any:
    """Return `torch.ops.tritile.op`, or the operator that is batch-invariant wherever it runs."""
    return getattr(torch.ops.tritile, INVARIANT + op if invariant and op != "permute" else op)


def call_overload(op: str, *values: Any, out: torch.Tensor | None = None) -> torch.Tensor:
    """Call the operator `tritile::op` with all of its arguments in the order of its schema.

    In a batch-invariant call it is `tritile::invariant_op`, unless torch's compiler traces: the operator then
    finds the setting when the graph is made.
    """
    first = len(values) - len(NAMED[op])
    packet = operator_of(op, not is_dynamo_compiling() and is_batch_invariant())
    named = dict(zip(NAMED[op], values[first:], strict=True))
    if out is not None:
        packet.out(*values[:first], **named, out=out)
        return out
    result: torch.Tensor = packet.default(*values[:first], **named)
    return result


def register_shardings() -> None:
    """Register the sharding rules once torch.distributed.tensor, which is slow to import, is imported."""
    if "torch.distributed.tensor" in sys.modules:
        from tritile.ops import sharding

        sharding.register()
