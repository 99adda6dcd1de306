"""Offer `tritile.nn.convert`: convert a model's linear layers to tritile's, in place."""

import warnings
from collections.abc import Callable
from typing import Any, Final, TypeVar, get_args

import torch

from tritile.core.problem import GROUP_SIZES, GroupSize, WeightBits
from tritile.core.quantized import WeightKind
from tritile.errors import ConversionWarning, InvalidValueError, TritileError, brief
from tritile.nn.float8 import Float8Linear
from tritile.nn.linear import Linear
from tritile.nn.quantized import QuantizedLinear
from tritile.ops.checks import name_of, names_of

Filter = Callable[[str, torch.nn.Linear], bool]
Model = TypeVar("Model", bound=torch.nn.Module)

_HALF: Final = (torch.bfloat16, torch.float16)
# Dtypes of the weights that each kind converts.
_DTYPES: Final[dict[WeightKind, tuple[torch.dtype, ...]]] = {
    "linear": (*_HALF, torch.float32, torch.float64, torch.complex64, torch.complex128),
    "fp8": (*_HALF, torch.float32),
    "int8": _HALF,
    "int4": _HALF,
}
_BITS: Final[dict[WeightKind, WeightBits]] = {"int8": 8, "int4": 4}
_DEVICES: Final = ("cuda", "cpu", "meta")


def _become(layer: torch.nn.Module, new: torch.nn.Module) -> None:
    """Turn a module into another one, except for its hooks and whether it is in training.

    Whatever refers to the module, one parent or several, sees the new one.
    """
    layer.__class__ = type(new)
    own = {name for name in vars(layer) if "hook" in name} | {"training"}
    vars(layer).update({name: value for name, value in vars(new).items() if name not in own})


def _changed(
    layer: torch.nn.Linear, kind: WeightKind, group_size: GroupSize, zero_points: bool
) -> str | None:
    """Convert a layer; return why that failed, None where it did not."""
    if kind == "linear":
        layer.__class__, layer.activation = Linear, None  # type: ignore[assignment]
        return None
    new: torch.nn.Module
    try:
        if kind == "fp8":
            new = Float8Linear.from_linear(layer, activation=getattr(layer, "activation", None))
        else:
            how: dict[str, Any] = {"group_size": group_size, "zero_points": zero_points}
            new = QuantizedLinear.from_linear(layer, bits=_BITS[kind], **how)
    except TritileError as error:
        return brief(error)
    _become(layer, new)
    return None


def _bound(model: torch.nn.Module, untie: bool) -> dict[int, str]:
    """Return, by the id of a layer, why it must keep its weight: something else reads it too."""
    owners: dict[int, dict[str, torch.nn.Module]] = {}
    found: dict[int, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.TransformerEncoderLayer):  # its fused path
            reason = "torch.nn.TransformerEncoderLayer reads its weight"
            found |= dict.fromkeys((id(module.linear1), id(module.linear2)), reason)
        for _, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), {})[name or "the model itself"] = module
    for shared in (each for each in owners.values() if len(each) > 1 and not untie):
        for name, module in shared.items():
            others = ", ".join(other for other in shared if other != name)
            found[id(module)] = f"it shares a parameter with {others}"
    return found


def _unfit(layer: torch.nn.Linear, kind: WeightKind) -> str | None:
    """Return why a layer cannot be converted to this kind, None where it can."""
    if type(layer) not in (torch.nn.Linear, Linear):
        return f"it is a subclass, {type(layer).__name__}"
    if "forward" in vars(layer):
        return "its forward was replaced"
    weight = layer.weight
    if weight.dtype not in _DTYPES[kind]:
        return f"its weight is {name_of(weight.dtype)}: wanted {names_of(_DTYPES[kind])}"
    if weight.device.type not in _DEVICES:
        return f"its weight is on {weight.device}: wanted cuda or cpu"
    if kind == "linear":
        return None
    if type(dict(layer.named_parameters(recurse=False)).get("weight")) is not torch.nn.Parameter:
        return f"its weight is computed, or a {type(weight).__name__}: wanted a plain parameter"
    if kind in _BITS and getattr(layer, "activation", None) is not None:
        return f"its activation {layer.activation!r} is not fused with packed weights"
    return None


def _check(model: Any, kind: Any, group_size: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise InvalidValueError(f"convert: model is a {type(model).__name__}: wanted a torch.nn.Module")
    if kind not in get_args(WeightKind):
        raise InvalidValueError(f"convert: kind is {kind!r}: wanted one of {', '.join(get_args(WeightKind))}")
    if group_size not in GROUP_SIZES:
        raise InvalidValueError(f"convert: group_size is {group_size!r}: wanted one of {GROUP_SIZES}")


def _tell(unconverted: dict[str, str], converted: int) -> None:
    if unconverted:
        each = "; ".join(f"{name or 'the model itself'} ({why})" for name, why in unconverted.items())
        total = converted + len(unconverted)
        message = f"convert: {len(unconverted)} of {total} linear layers stay as they are: {each}"
        warnings.warn(message, ConversionWarning, stacklevel=3)


def convert(
    model: Model,
    kind: WeightKind,
    *,
    filter: Filter | None = None,
    group_size: GroupSize = 128,
    zero_points: bool = False,
    untie: bool = False,
) -> Model:
    """Convert a model's `torch.nn.Linear` layers to layers that multiply by tritile, in place.

    A layer stays the same object, with its hooks, bias, device and training flag; its class changes. It
    becomes a `Linear` with the same parameters, or a `Float8Linear` or `QuantizedLinear`, whose weight is a
    buffer and is not trained. torch reads the weights of `torch.nn.MultiheadAttention`, and of
    `TransformerEncoderLayer` on its fused path, without calling the layers.

    Args:
        model: any module, also a linear layer itself.
        kind: "linear" (keeps weights of float16, bfloat16, float32, float64 or complex dtype), "fp8" (a scale
            for each row, for weights of float16, bfloat16 or float32), "int8" or "int4" (for float16 or
            bfloat16).
        filter: function of a layer's name and the layer; the layer is converted where it returns True.
        group_size: for "int8" and "int4", number of columns that share a scale: 32, 64 or 128.
        zero_points: for "int8" and "int4", give each group a zero point.
        untie: also quantize layers whose weight another module holds, such as a head that shares it with an
            embedding, which keeps its own. By default such layers are left as they are. "linear" keeps
            weights shared.

    Layers that are of the kind already are skipped, so that a second call changes nothing. Other subclasses
    of `torch.nn.Linear`, and layers that do not fit, stay as they are. One ConversionWarning lists them with
    reasons, without those that `filter` excluded. Layers on the meta device get their buffers there, for a
    state dict to fill after `to_empty`.

    Make optimizers that hold quantized weights, and results of torch.compile, anew.

    Returns:
        The model itself.

    Raises:
        InvalidValueError: an argument does not fit. Nothing is changed.
    """
    _check(model, kind, group_size)
    bound = {} if kind == "linear" else _bound(model, untie)
    unconverted, converted = dict[str, str](), 0
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, torch.nn.Linear) or (kind == "linear" and type(layer) is Linear):
            continue
        if filter is not None and not filter(name, layer):
            continue
        why = _unfit(layer, kind) or bound.get(id(layer))
        why = why or _changed(layer, kind, group_size, zero_points)
        if why is None:
            converted += 1
        else:
            unconverted[name] = why
    _tell(unconverted, converted)
    return model
