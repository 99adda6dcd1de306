"""`tritile.nn.convert` and `restore`: convert a model's linear layers, in place, and undo it."""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, get_args

import torch

from tritile.core import device as devices
from tritile.core.device import Device
from tritile.core.markup import Tabular
from tritile.core.problem import GROUP_SIZES, GroupSize, WeightBits
from tritile.core.quantized import WeightKind
from tritile.core.torch_private import is_any_autocast_on
from tritile.errors import InvalidValueError, TritileError, brief, did_you_mean
from tritile.nn.exchanged import (
    FP32,
    Comparison,
    LayerCall,
    assign,
    compare,
    is_conv1d,
    is_exchanged,
    is_linear,
    weight_of,
)
from tritile.nn.linear import Linear
from tritile.nn.quantized import QuantizedLinear
from tritile.ops.checks import name_of, names_of
from tritile.ops.plan import gpu_of

Filter = Callable[[str, torch.nn.Module], bool]

_HALF: Final = (torch.bfloat16, torch.float16)
_FLOATS: Final = (*_HALF, torch.float32, torch.float64)
# Dtypes of the weights that each kind converts.
_DTYPES: Final[dict[WeightKind, tuple[torch.dtype, ...]]] = {"linear": _FLOATS, "int8": _HALF, "int4": _HALF}
_BITS: Final[dict[WeightKind, WeightBits]] = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class ConversionRow:
    """The outcome for a group of similar layers, at one number of rows.

    Attributes:
        layers: the layer's name in the model. Several layers share one name with * in place of numbers, or
            are listed if their names are only numbers.
        features: K and N.
        count: the number of layers in the group.
        rows: rows of the input; None if no call was seen or nothing was compared.
        dtype: dtype of the input; "" if `rows` is None, or under autocast.
        training: True if gradients are computed.
        exchanged: True if the layers were converted.
        by: which backend multiplies at this number of rows, "tritile" or "torch".
        ratio: torch's time divided by tritile's, in training including the products of the gradients; None if
            unknown.
        source: where `ratio` comes from: "measured", "predicted", or "" if it is None.
        why: why torch multiplies; "" if tritile does.
    """

    layers: str
    features: tuple[int, int]
    count: int = 0
    rows: int | None = None
    dtype: str = ""
    training: bool = False
    exchanged: bool = False
    by: str = "torch"
    ratio: float | None = None
    source: str = ""
    why: str = ""


@dataclass(frozen=True, repr=False)
class Conversion(Tabular):
    """What `convert` did. It prints as a table.

    Attributes:
        kind: the argument of `convert`.
        device: name of the GPU that backends were compared for; "" if nothing was compared.
        exchanged: names of the layers that were converted.
        layers: the number of linear layers in the model.
        rows: a `ConversionRow` for each group of similar layers and number of rows.
        note: whether the comparison was for training or for inference, why, and how to get the other one; ""
            if nothing was compared.
    """

    kind: str
    device: str
    exchanged: tuple[str, ...]
    layers: int
    rows: tuple[ConversionRow, ...]
    note: str = ""

    _head = ("layers", "count", "features", "rows", "dtype", "pass", "by", "torch / tritile", "why")

    @property
    def _last(self) -> str:  # type: ignore[override]
        return self.note

    @property
    def _title(self) -> str:
        where = f" for {self.device}" if self.device else ""
        return f"tritile.nn.convert: {len(self.exchanged)} of {self.layers} linear layers exchanged{where}"

    @property
    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                row.layers,
                str(row.count),
                "{} -> {}".format(*row.features),
                "" if row.rows is None else str(row.rows),
                row.dtype,
                "" if row.rows is None else "training" if row.training else "forward",
                row.by,
                "" if row.ratio is None else f"{row.ratio:.2f} {row.source}",
                row.why,
            )
            for row in self.rows
        ]


@contextlib.contextmanager
def recorded(model: torch.nn.Module) -> Iterator[dict[torch.nn.Module, Counter[LayerCall]]]:
    """Record the calls of a model's linear layers inside the `with`."""
    calls: dict[torch.nn.Module, Counter[LayerCall]] = {}

    def record(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        x = next(iter((*args, *kwargs.values())), None)
        if isinstance(x, torch.Tensor) and x.ndim:
            grad = torch.is_grad_enabled()
            dtype = None if is_any_autocast_on() else x.dtype
            grads = grad and x.requires_grad, grad and bool(layer.weight.requires_grad)
            call = LayerCall(x.numel() // max(1, x.shape[-1]), dtype, *grads)
            calls.setdefault(layer, Counter())[call] += 1

    with contextlib.ExitStack() as hooks:
        for layer in filter(is_linear, model.modules()):
            hooks.callback(layer.register_forward_hook(record, with_kwargs=True).remove)
        yield calls


def _also_read_by(model: torch.nn.Module, kind: WeightKind) -> dict[int, str]:
    """Return why layers must stay as they are, by their ids: something else reads their weights."""
    reasons: dict[int, str] = {}
    owners: dict[int, dict[str, torch.nn.Module]] = {}
    for name, module in model.named_modules():
        # PEFT's adapters merge their weights into the layer's.
        if any(child == "base_layer" or child.startswith("lora_") for child, _ in module.named_children()):
            inner = (layer for layer in module.modules() if layer is not module)
            reasons |= dict.fromkeys(map(id, inner), "it is inside an adapter")
        if isinstance(module, torch.nn.TransformerEncoderLayer) and kind != "linear":  # its fused path
            reason = "torch.nn.TransformerEncoderLayer reads its weight"
            reasons |= dict.fromkeys((id(module.linear1), id(module.linear2)), reason)
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), {})[name or "the model itself"] = module
    for shared in owners.values() if kind != "linear" else ():
        for name, module in shared.items():
            if others := ", ".join(other for other in shared if other != name):
                reasons.setdefault(id(module), f"it shares a parameter with {others}")
    return reasons


def _why_not(layer: Any, kind: WeightKind, always: bool) -> str:
    """Return why a layer cannot be converted to this kind, "" if it can."""
    cls = type(layer)
    if kind == "linear" and cls is Linear:
        return "it is a tritile.nn.Linear"
    if kind != "linear" and is_conv1d(layer):
        return "it is a Conv1D"
    if cls is not Linear and not is_linear(layer):
        return f"it is a subclass, {cls.__name__}"
    if "forward" in vars(layer):
        return "its forward was replaced"
    parameter = dict(layer.named_parameters(recurse=False)).get("weight")
    if parameter is None or (type(parameter) is not torch.nn.Parameter and not always):
        return f"its weight is computed or a {type(layer.weight).__name__}, not a plain parameter"
    if parameter.dtype not in _DTYPES[kind]:
        return f"its weight is {name_of(parameter.dtype)}, not one of {names_of(_DTYPES[kind])}"
    if kind in _BITS and getattr(layer, "activation", None) is not None:
        return f"its activation {layer.activation!r} is not fused with packed weights"
    return ""


def _decided(row: ConversionRow, layer: Any, calls: Iterable[LayerCall], gpu: Any) -> Iterator[ConversionRow]:
    """Compare tritile with torch at each call of a layer; yield the resulting rows."""
    for call in calls:
        comparison = Comparison(why="under autocast torch caches the weights that it casts")
        if call.dtype is not None:
            try:
                comparison = compare(call, weight_of(layer), layer.bias, *gpu)
            except TritileError as error:
                comparison = Comparison(why=brief(error))
        yield replace(
            row,
            rows=call.rows,
            training=call.grad_input or call.grad_weight,
            dtype="" if call.dtype is None else name_of(call.dtype),
            by="tritile" if comparison.wins else "torch",
            ratio=comparison.ratio,
            source=comparison.source,
            why=comparison.why,
        )


def _target(model: torch.nn.Module, device: Any) -> tuple[Device, int | None]:
    """Return the GPU to decide for, and its number if it is here. Raises InvalidValueError without one."""
    if device is not None:
        return gpu_of("convert", device), None
    gpus = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    index = min(gpus) if gpus else devices.current_index()
    if index is None:
        raise InvalidValueError("convert: there is no GPU here: pass device=, such as device='h200'")
    return devices.gpu(index), index


def _note(model: torch.nn.Module, rows: Iterable[ConversionRow], by_forward: bool) -> str:
    """Return whether calls were compared for training or for inference, and why; "" if none was compared."""
    passes = {row.training for row in rows if row.rows is not None}
    if not passes:
        return ""
    for_training = True in passes
    if by_forward:
        why = f"forward recorded {'' if for_training else 'no '}gradients"
        other = f"call the model {'under' if for_training else 'without'} torch.no_grad()"
    elif for_training:
        why = "model.training is True" if model.training else "layers are in training mode"
        other = "call model.eval() first"
    elif not any(parameter.requires_grad for parameter in model.parameters()):
        why, other = "no parameter requires a gradient", "call model.requires_grad_() and model.train() first"
    else:
        why = "layers are in eval mode" if model.training else "model.training is False"
        other = "call model.train() first"
    decided, opposite = ("training", "inference") if for_training else ("inference", "training")
    return f"decided for {decided}, because {why}: {other} to decide for {opposite}"


def _quantize(layer: Any, kind: WeightKind, group_size: GroupSize, zero_points: bool) -> str:
    """Make a layer a `QuantizedLinear`, in place, with its hooks; return why not, "" on success."""
    try:
        new = QuantizedLinear.from_linear(
            layer, bits=_BITS[kind], group_size=group_size, zero_points=zero_points
        )
    except TritileError as error:
        return brief(error)
    layer.__class__ = QuantizedLinear
    kept = {name for name in vars(layer) if "hook" in name} | {"training"}
    vars(layer).update({name: value for name, value in vars(new).items() if name not in kept})
    return ""


def _named(label: str, names: Sequence[str]) -> str:
    """Return the name of similar layers in a table; `label` has * for the numbers in their names."""
    if len(names) == 1:
        return names[0] or label
    if label.strip("*."):
        return label
    return ", ".join([*names[:3], *(["..."] if len(names) > 3 else [])])


def _checked_rows(model: Any, kind: Any, rows: Any, forward: Any, always: Any, group_size: Any) -> list[int]:
    """Check the arguments of `convert`, and return its rows. Raises InvalidValueError."""
    if not isinstance(model, torch.nn.Module):
        raise InvalidValueError(f"convert: model is a {type(model).__name__}: expected a torch.nn.Module")
    if kind not in (kinds := get_args(WeightKind)):
        hint = did_you_mean(kind, kinds)
        raise InvalidValueError(f"convert: kind is {kind!r}{hint}: expected one of {', '.join(kinds)}")
    if group_size not in GROUP_SIZES:
        raise InvalidValueError(f"convert: group_size is {group_size!r}: expected one of {GROUP_SIZES}")
    if forward is not None and not callable(forward):
        expected = "a function without arguments that calls the model"
        raise InvalidValueError(f"convert: forward is a {type(forward).__name__}: expected {expected}")
    sources = [rows is not None, forward is not None, bool(always)]
    if kind != "linear" and any(sources):
        raise InvalidValueError(f"convert: kind is {kind!r}: rows, forward and always are for 'linear' only")
    if kind == "linear" and sum(sources) != 1:
        raise InvalidValueError(
            "convert: expected exactly one of rows=, the numbers of rows that matter; forward=, a function "
            "that calls the model once; and always=True"
        )
    if rows is None:
        return []
    numbers = list(rows) if isinstance(rows, Iterable) else [rows]
    if not numbers or not all(type(number) is int and number > 0 for number in numbers):
        raise InvalidValueError(f"convert: rows is {rows!r}: expected one or more whole numbers above 0")
    return list(dict.fromkeys(numbers))


def convert(
    model: torch.nn.Module,
    kind: WeightKind = "linear",
    *,
    rows: int | Iterable[int] | None = None,
    forward: Callable[[], Any] | None = None,
    always: bool = False,
    device: Device | torch.device | str | None = None,
    filter: Filter | None = None,
    group_size: GroupSize = 128,
    zero_points: bool = False,
    precision: FP32 | None = None,
) -> Conversion:
    """Replace a model's linear layers, in place, with layers that multiply with tritile where it is faster.

        print(tritile.nn.convert(model, rows=(1, 2048)))
        print(tritile.nn.convert(model, forward=lambda: model(tokens)))

    Layers are `torch.nn.Linear`, and `Conv1D` of transformers. With kind "linear", a layer is converted if,
    for at least one of the numbers of rows, tritile's own kernel is planned and is faster than torch's by
    more than the typical error of predictions. In mode "tune" both are measured instead. The layer stays the
    same object but becomes an instance of a subclass, so that its parameters (also shared ones), hooks,
    names, state dict, dtype and training flag stay. At each call it runs the backend that is predicted to be
    faster for that call's rows, so a converted layer may still run torch at other numbers of rows. Under
    autocast, and for tensors that are not on a GPU, it is torch's own; under torch.compile it is
    `tritile.linear` for any rows.
    `restore` undoes the conversion.

    With "int8" and "int4", a `torch.nn.Linear` becomes a `QuantizedLinear`, whose weight is a buffer that is
    not trained. Recreate optimizers that hold such weights.

    Args:
        model: any module, also a single linear layer.
        kind: "linear"; or "int8" or "int4", for weights of float16 or bfloat16.
        rows: for "linear", numbers of rows: the product of all dimensions of a layer's input except the last.
            The products of the gradients count too, for layers in training mode if the model has parameters
            that are trained. Modules start in training mode: call `model.eval()` first to decide for
            inference. The table's last line says which it was.
        forward: for "linear", instead of rows: a function without arguments that calls the model once. From
            that run come each layer's rows and dtypes, and whether gradients are recorded.
        always: for "linear", instead of both: convert every layer that can be, and multiply with tritile at
            every call. For batch-invariant models and sharded layers.
        device: GPU to decide for, as in `tritile.plan`; then nothing is measured. Default: the GPU of the
            model's parameters, or the current one.
        filter: function of a layer's name and the layer. Layers for which it returns False are left alone.
        group_size: for "int8" and "int4", how many columns share a scale: 32, 64 or 128.
        zero_points: for "int8" and "int4", True gives each group a zero point.
        precision: for "linear", how tritile multiplies float32 in converted layers: "fp16x3", of
            `tritile.matmul`; None is as `tritile.mode(fp32=...)` says, by default as torch is set. Calls that
            torch multiplies are as torch is set.

    Left as they are: other subclasses of `torch.nn.Linear`, layers inside LoRA adapters, layers whose weight
    is computed from other parameters (parametrizations, weight norm), and layers whose forward was replaced.
    Layers to be quantized also stay if another module holds their weight, such as a head that shares it with
    an embedding. Layers that were converted before are compared again.

    Returns:
        A `Conversion`, which prints as a table of what was converted and why.

    Raises:
        InvalidValueError: an argument does not fit, or there is no GPU to decide for. Nothing is changed.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
        >>> len(tritile.nn.convert(model, always=True).exchanged)
        2
        >>> tritile.nn.restore(model)
        2
    """
    numbers = _checked_rows(model, kind, rows, forward, always, group_size)
    if precision is not None and (precision not in get_args(FP32) or kind != "linear"):
        expected = f"None or {', '.join(map(repr, get_args(FP32)))}, for kind 'linear' only"
        raise InvalidValueError(f"convert: precision is {precision!r}: expected {expected}")
    gpu = _target(model, device) if kind == "linear" and not always else None
    calls: dict[torch.nn.Module, Counter[LayerCall]] = {}
    if forward is not None:
        with recorded(model) as calls:
            forward()
    trains = any(parameter.requires_grad for parameter in model.parameters())
    also_read_by = _also_read_by(model, kind)
    exchanged: list[str] = []
    groups: dict[ConversionRow, list[str]] = {}  # names of layers by row
    total = 0
    for name, layer in list(model.named_modules()):
        if not (isinstance(layer, torch.nn.Linear) or is_conv1d(layer)):
            continue
        if filter is not None and not filter(name, layer):
            continue
        total += 1
        label = re.sub(r"(?<![^.])\d+(?![^.])", "*", name) or "the model itself"
        features = layer.weight.shape if is_conv1d(layer) else (layer.in_features, layer.out_features)
        why = also_read_by.get(id(layer), "") or _why_not(layer, kind, always)
        if not why and kind != "linear":
            why = _quantize(layer, kind, group_size, zero_points)
        row = ConversionRow(label, (features[0], features[1]), by="torch" if why else "tritile", why=why)
        layer_rows = [row]
        if not why and gpu is not None:
            layer_calls: Iterable[LayerCall] = calls.get(layer, ())
            if forward is None:
                grad = trains and layer.training
                grads = grad, grad and layer.weight.requires_grad
                layer_calls = [LayerCall(number, layer.weight.dtype, *grads) for number in numbers]
            if precision is not None:
                layer_calls = [
                    call._replace(precision=precision if call.dtype == torch.float32 else None)
                    for call in layer_calls
                ]
            unused = replace(row, by="torch", why="forward did not call it")
            layer_rows = list(_decided(row, layer, layer_calls, gpu)) or [unused]
        wins = any(row.by == "tritile" for row in layer_rows)
        if kind == "linear":
            assign(layer, wins, always, precision)
        if wins:
            exchanged.append(name)
        for row in layer_rows:
            groups.setdefault(replace(row, exchanged=wins), []).append(name)
    table = tuple(
        replace(row, layers=_named(row.layers, names), count=len(names)) for row, names in groups.items()
    )
    note = _note(model, table, forward is not None)
    return Conversion(kind, "" if gpu is None else gpu[0].name, tuple(exchanged), total, table, note)


def restore(model: torch.nn.Module) -> int:
    """Undo `convert` of kind "linear", in place, and return the number of layers that were restored.

    Quantized layers stay, because their original weights are gone.

    Raises:
        InvalidValueError: `model` is not a module.
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidValueError(f"restore: model is a {type(model).__name__}: expected a torch.nn.Module")
    exchanged = [layer for layer in model.modules() if is_exchanged(layer)]
    for layer in exchanged:
        assign(layer, False)
    return len(exchanged)
