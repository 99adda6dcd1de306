"""The layers that `tritile.nn.convert` makes: torch's own, where each call runs the faster backend.

A converted layer is the same object with another class, so its parameters, hooks, names and state dict stay.
"""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling
from torch.fx import Proxy
from torch.nn.functional import linear as torch_linear
from torch.overrides import handle_torch_function

from tritile.choose import aten, gpu_tables, pick
from tritile.choose.classes import class_of
from tritile.core import device as devices
from tritile.core.device import Device
from tritile.core.forgetting import new_memo
from tritile.core.problem import MatmulProblem
from tritile.core.settings import current_mode, mode, rules
from tritile.errors import TritileError
from tritile.families.fp16x3.lowering import suits_fp16x3
from tritile.nn.linear import refuse_scripting
from tritile.ops.dispatch import PLAIN, sees_every_call
from tritile.ops.fused import linear
from tritile.ops.memo import default_precision, may_be_kept, stopgaps
from tritile.ops.plan import call_of
from tritile.ops.request import planned
from tritile.tuner.store.trial import TORCH
from tritile.tuner.store.trials import store_of

# Microseconds that tritile's products must save in a training step: autograd calls its operators through
# Python, which costs the host about as much (24 layers of ViT on an H200).
TRAINING_US: Final = 500.0
_NOISE: Final = 1.02  # ratios vary by this factor from run to run
_MODELS: Final = 1.25  # the waves' picks may be slower than predicted: require a larger ratio
# The least ratio of torch's plain fp32 to fp16x3 that was measured on Hopper, at sizes that fp16x3 suits.
PARTS_AHEAD: Final = 2.0

FP32 = Literal["fp16x3"]  # what a layer may name instead of torch's setting


class LayerCall(NamedTuple):
    """What differs between calls of a layer, and decides which backend multiplies.

    `dtype` is the input's; None under autocast, which casts it. `grad_input` and `grad_weight` say which
    gradients a backward pass will compute. `precision` is named in the call; None if it is not.
    """

    rows: int
    dtype: torch.dtype | None
    grad_input: bool = False
    grad_weight: bool = False
    precision: FP32 | None = None


def _problems(call: LayerCall, weight: torch.Tensor, bias: torch.Tensor | None) -> Iterator[MatmulProblem]:
    """Yield the product of a call, then those of its gradients.

    Raises TritileError if tritile does not compute one of them.
    """
    (n, k), named = weight.shape, {"precision": call.precision}
    x, grad = (torch.empty(call.rows, size, dtype=call.dtype, device="meta") for size in (k, n))
    weight = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device="meta")
    bias = None if bias is None else torch.empty(n, dtype=bias.dtype, device="meta")
    calls: list[tuple[str, tuple[Any, ...]]] = [("linear", (x, weight, bias))]
    if call.grad_input:
        calls.append(("matmul", (grad, weight)))
    if call.grad_weight:
        calls.append(("matmul", (grad.mT, x)))
    for name, tensors in calls:
        problem = call_of("convert", name, tensors, named)[0].problem
        assert isinstance(problem, MatmulProblem)
        yield problem


class Comparison(NamedTuple):
    """How tritile compares with torch on one GPU, at a product or at a call of a layer.

    - `ratio`: torch's time over that of tritile's kernel; None if either is unknown.
    - `wins`: True if tritile is faster by more than the noise, or the error of a prediction.
    - `source`: where `ratio` comes from: "measured", "predicted", or "" if it is None.
    - `torch_us`: microseconds that torch takes; None if unknown.
    - `why`: why torch multiplies, "" if tritile wins.
    - `by_torch`: True if the plan of tritile's operation is torch's kernel.
    """

    ratio: float | None = None
    wins: bool = False
    source: str = ""
    torch_us: float | None = None
    why: str = ""
    by_torch: bool = False


def _planned(problem: MatmulProblem, device: Device, index: int | None) -> pick.Plan:
    """Return the plan with torch's kernel as a candidate; mode "tune" measures on GPU `index`."""
    tunes = current_mode() == "tune"
    if index is not None and not (tunes and class_of(problem) is None):
        return planned(problem, index, True)
    plan = pick.plan_for(problem, device, "cached" if tunes else None, True)
    assert plan is not None  # only mode "tune" returns None
    return plan


def _lost(ratio: float) -> str:
    """Return why torch multiplies at a ratio that is not a sure win."""
    if round(ratio, 2) < 1:
        return "torch is faster"
    return "tritile is ahead, but not by enough to be sure" if ratio > _NOISE else "both are about as fast"


def _compared(problem: MatmulProblem, device: Device, index: int | None) -> Comparison:
    unknown = Comparison(why=f"torch's time at this size is unknown on {device.name}")
    timed = gpu_tables.is_calibrated(device) or store_of(device).best(TORCH, problem) is not None
    if not timed and current_mode() != "tune":
        return unknown  # without a predictor a plan would rank every legal config
    plan = _planned(problem, device, index)
    us, other = plan.us, plan.other_us
    measured = plan.source in ("exact", "table", "pinned")
    if plan.config == aten.CONFIG:
        ratio = us / other if us and other else None
        source = "" if ratio is None else "measured" if measured else "predicted"
        why = ("torch is as fast or faster" if us else plan.why) if ratio is None else _lost(ratio)
        return Comparison(ratio, False, source, us, why, by_torch=True)
    suited = device.nvidia == 90 and suits_fp16x3(problem.m, problem.n, problem.k)
    if other is None and problem.in_parts and suited and us:
        return Comparison(PARTS_AHEAD, True, "predicted", PARTS_AHEAD * us)
    if other is None or not us:
        return unknown
    needed = max(_NOISE, 1 + plan.other_error) * (_MODELS if plan.source == "model" else 1.0)
    source = "measured" if measured and not plan.other_error else "predicted"
    wins = other / us >= needed
    return Comparison(other / us, wins, source, other, "" if wins else _lost(other / us))


def compare(
    call: LayerCall,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    device: Device,
    index: int | None = None,
) -> Comparison:
    """Compare tritile with torch at a call of a layer, with the products of its gradients.

    `weight` is (N, K). The ratio is the mean over the products, all of which take the same number of
    operations. One without a ratio counts as 1, and so does one for which torch's kernel is planned. In mode
    "tune" they are measured on GPU `index` first, unless a graph is being captured.

    Raises TritileError if tritile does not compute such a call.
    """
    # In mode "strict" a plan without a measurement raises.
    with mode("cached") if current_mode() == "strict" else contextlib.nullcontext():
        products = [_compared(problem, device, index) for problem in _problems(call, weight, bias)]
    timed = [product for product in products if product.ratio is not None]
    if len(products) == 1 or not timed:
        return products[0]
    ratios = [1.0 if one.ratio is None or one.by_torch else one.ratio for one in products]
    # A predicted win within the error of predictions counts as a tie.
    sure = [ratio if one.wins else min(ratio, 1.0) for ratio, one in zip(ratios, products, strict=True)]
    source = "predicted" if any(one.source == "predicted" for one in timed) else "measured"
    us, why, ratio = None, "", sum(ratios) / len(ratios)
    if sum(sure) / len(sure) < _NOISE:
        why = _lost(ratio)
    if all(one.torch_us is not None for one in timed):
        us = sum(one.torch_us or 0.0 for one in timed)
        pairs = zip(products, sure, strict=True)
        gained = sum((one.torch_us or 0.0) * (1 - 1 / ratio) for one, ratio in pairs)
        if not why and gained < TRAINING_US:
            why = f"tritile is ahead, but a training step would gain less than {TRAINING_US / 1e3:g} ms here"
    return Comparison(ratio, not why, source, us, why)


_WINS: Final[dict[tuple[Any, ...], bool]] = new_memo()


def by_tritile(
    x: Any, weight: torch.Tensor, bias: torch.Tensor | None, precision: FP32 | None = None
) -> bool:
    """True if tritile multiplies in this call of a layer. The answer is cached.

    Always True in batch-invariant calls on a GPU, and for plain tensors under torch.compile, where plans
    decide. Otherwise False for anything but plain tensors on a GPU, and under autocast, because torch caches
    the weights that it casts.
    """
    if is_dynamo_compiling():
        return type(x) in PLAIN and type(weight) in PLAIN
    try:
        if x.is_cuda is not True:  # for a proxy of torch.fx it is another proxy
            return False
    except AttributeError:  # an object with `__torch_function__`
        return False
    now = rules()
    if now.invariant:
        return True
    if type(x) not in PLAIN or type(weight) not in PLAIN or sees_every_call():
        return False
    dtype, index, grad = x.dtype, x.get_device(), is_grad_enabled()
    grads = (grad and x.requires_grad, grad and weight.requires_grad)
    of_weight = (weight.shape, weight.stride(), weight.dtype)
    of_bias = None if bias is None else bias.dtype
    setting = default_precision() if dtype == torch.float32 else None
    key = (x.shape, x.is_contiguous(), dtype, of_weight, of_bias, grads, index, now, setting, precision)
    wins = _WINS.get(key)
    if wins is None:
        before = stopgaps.count
        k = x.shape[-1] if x.ndim else 0
        rows = x.numel() // max(k, 1)
        wins = weight.shape[1] == k and rows > 0 and x.is_contiguous()
        try:
            call = LayerCall(rows, dtype, *grads, precision)
            wins = wins and compare(call, weight, bias, devices.gpu(index), index).wins
        except TritileError:  # a dtype that tritile does not multiply, for example
            wins = False
        if may_be_kept() and stopgaps.count == before:
            _WINS[key] = wins
    return wins


def faster_linear(
    input: Any, weight: torch.Tensor, bias: torch.Tensor | None = None, fp32: FP32 | None = None
) -> torch.Tensor:
    """Multiply with tritile or torch, whichever is faster. torch.fx records it as the call of a layer."""
    if isinstance(input, Proxy):
        result: torch.Tensor = handle_torch_function(faster_linear, (input,), input, weight, bias, fp32)
        return result
    precision = fp32 if weight.dtype is torch.float32 else None
    if by_tritile(input, weight, bias, precision):
        return linear(input, weight, bias, precision=precision)
    return torch_linear(input, weight, bias)


class ConvertedLinear(torch.nn.Linear):
    """`torch.nn.Linear`, multiplied by tritile or torch, whichever is faster."""

    fp32: FP32 | None = None

    def forward(self, input: Any) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        precision = self.fp32 if weight.dtype is torch.float32 else None
        if by_tritile(input, weight, bias, precision):
            return linear(input, weight, bias, precision=precision)
        if isinstance(input, Proxy):
            return faster_linear(input, weight, bias, self.fp32)
        return torch_linear(input, weight, bias)

    def _get_name(self) -> str:
        return "tritile.nn.Linear"

    __prepare_scriptable__ = refuse_scripting


class AlwaysLinear(ConvertedLinear):
    """`torch.nn.Linear`, multiplied by tritile at every call."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        precision = self.fp32 if self.weight.dtype is torch.float32 else None
        return linear(input, self.weight, self.bias, precision=precision)


class _Conv1D:
    """`transformers.pytorch_utils.Conv1D`, a linear layer with a weight (K, N)."""

    always = False
    __prepare_scriptable__ = refuse_scripting
    fp32: FP32 | None = None

    def forward(self, x: Any) -> torch.Tensor:
        weight, bias = weight_of(self), self.bias  # type: ignore[attr-defined]
        precision = self.fp32 if weight.dtype is torch.float32 else None
        # torch.fx records how torch multiplies: it cannot follow a transposed weight to its layer.
        if not isinstance(x, Proxy) and (self.always or by_tritile(x, weight, bias, precision)):
            return linear(x, weight, bias, precision=precision)
        out: torch.Tensor = super().forward(x)  # type: ignore[misc]
        return out


_CONV1D: Final = ("transformers.pytorch_utils", "Conv1D")


def __getattr__(name: str) -> type:
    """Make the classes of converted Conv1D layers, which need transformers, at the first access.

    Unpickling such a layer is one.
    """
    if name not in ("ConvertedConv1D", "AlwaysConv1D"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    original = getattr(importlib.import_module(_CONV1D[0]), _CONV1D[1])
    attributes = {"always": name.startswith("Always"), "__module__": __name__}
    cls = globals()[name] = type(name, (_Conv1D, original), attributes)
    return cls


def is_conv1d(layer: Any) -> bool:
    cls = type(layer)
    return issubclass(cls, _Conv1D) or (cls.__module__, cls.__qualname__) == _CONV1D


def weight_of(layer: Any) -> torch.Tensor:
    """Return the weight of a linear layer as an (N, K) matrix."""
    weight: torch.Tensor = layer.weight
    return weight.t() if is_conv1d(layer) else weight


def is_exchanged(layer: torch.nn.Module) -> bool:
    """True if a layer was converted, and its class was not changed since."""
    cls = type(layer)
    return cls in (ConvertedLinear, AlwaysLinear) or (cls.__module__ == __name__ and is_conv1d(layer))


def is_linear(layer: torch.nn.Module) -> bool:
    """True for a layer that can be converted, or that was."""
    return type(layer) is torch.nn.Linear or is_exchanged(layer) or is_conv1d(layer)


def assign(
    layer: torch.nn.Module, exchanged: bool, always: bool = False, precision: FP32 | None = None
) -> None:
    """Give a layer the class of a converted one, or its original class. Nothing else about it changes.

    A converted layer with a precision of float32 has that as its attribute `fp32`.
    """
    if is_exchanged(layer):
        vars(layer).pop("fp32", None)
    kind = "Conv1D" if is_conv1d(layer) else "Linear"
    if exchanged:
        layer.__class__ = getattr(sys.modules[__name__], ("Always" if always else "Converted") + kind)
        if precision is not None:
            vars(layer)["fp32"] = precision
    elif is_exchanged(layer):
        layer.__class__ = type(layer).__mro__[2] if kind == "Conv1D" else torch.nn.Linear
