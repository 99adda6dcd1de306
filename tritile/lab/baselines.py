"""Baselines of tritile: the calls a torch user would make.

A baseline writes the result of a call into its output, or returns it. torch's grouped product has a fast path
for bfloat16. For other dtypes torch reads the offsets on the host, which raises under graph capture.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from tritile.core import torch_private
from tritile.core.call import Call, GroupedCall, MatmulCall, PermuteCall, QuantizedCall
from tritile.core.epilogue import Epilogue, activated, apply_epilogue_in_dtype
from tritile.core.problem import FP8_DTYPES
from tritile.core.quantized import by_row, unpacked
from tritile.tune.subject import answers, operands, torch_calls
from tritile.tune.subject.operands import weight_rows
from tritile.tune.subject.torch_calls import tensors_of
from tritile.tuner.measure import timing

Inputs = dict[str, Any]
Baseline = Callable[[Any], torch.Tensor | None]
WIDE_WEIGHT: Final = "matmul by the weight in 16 bits"
PACKED_WEIGHT: Final = "_weight_int4pack_mm"
COMPILED: Final = "torch.compile"
_INNER_K_TILES: Final = 8  # of 16 columns each
_COPY_UNIT: Final = 32  # bytes: two 16-byte words
_prepared: Final[WeakTensorKeyDictionary] = WeakTensorKeyDictionary()  # by tensor, then by function


@dataclass(frozen=True)
class Functional:
    """A baseline as a function of the call's tensors by name, which torch.compile can take."""

    inputs: Callable[[Any], Inputs]
    make: Callable[..., torch.Tensor]

    def __call__(self, call: Any) -> torch.Tensor:
        return self.make(**self.inputs(call))


def _once(tensor: torch.Tensor, prepare: Callable[[Any], Inputs], call: Any) -> Inputs:
    """Return what `prepare` makes of a call's tensor, cached, so that timed runs only multiply."""
    found: dict[Any, Inputs] = _prepared.setdefault(tensor, {})
    if prepare not in found:
        found[prepare] = prepare(call)
    return found[prepare]


def torch_baselines(call: Call) -> dict[str, Baseline]:
    """Return torch's baselines of a call by name, the plainest first.

    tritile is compared with the fastest of them.
    """
    if isinstance(call, PermuteCall):
        return {"copy_": torch_calls.copy}
    if isinstance(call, GroupedCall):
        return {"_grouped_mm": grouped(call)}
    if isinstance(call, QuantizedCall):
        (_, n), k = call.out.shape, call.x.shape[1]
        found: dict[str, Baseline] = {
            WIDE_WEIGHT: Functional(lambda c: _by_weight(c, _unpacked_weight), F.linear)
        }
        if call.bits == 4 and call.dtype == "bfloat16" and n % 8 == 0 and k % (16 * _INNER_K_TILES) == 0:
            found[PACKED_WEIGHT] = by_packed_weight(call)
        return found
    if call.up is not None:
        one = merged(call)
        return {"two products": eager(call), "one product": one, f"{COMPILED}, one product": compiled(one)}
    plainest: Baseline = eager(call) if call.epilogue else torch_calls.multiply
    if call.dtype in FP8_DTYPES:  # sums are kept where tritile keeps them
        return {f"_scaled_mm, use_fast_accum={call.precision == 'fast'}": plainest}
    found = {"_int_mm" if call.dtype == "int8" else "matmul": plainest}
    gelu, only_bias = call.activation == "gelu_tanh", Epilogue(bias="row", activation=call.activation)
    if call.problem.batch == 1 and call.epilogue == only_bias and (gelu or call.activation == "relu"):
        found["_addmm_activation"] = Functional(
            tensors_of, lambda a, b, bias: torch_private.addmm_activation(bias, a, b, use_gelu=gelu)
        )
    return found | ({COMPILED: compiled(eager(call))} if call.epilogue else {})


def grouped(call: GroupedCall) -> Functional:
    """Return torch's grouped product."""

    def inputs(call: GroupedCall) -> Inputs:
        a, b = operands.matrix(call.a, 1)[0], operands.matrix(call.b, call.groups)
        return {"a": a, "b": b, "offs": call.offs.tensor}

    return Functional(inputs, lambda a, b, offs: torch_private.grouped_mm(a, b, offs=offs))


# --- Products with an epilogue ---


def eager(call: MatmulCall) -> Functional:
    """Return the product and its epilogue by torch's eager operations."""
    multiply, kind = torch_calls.product(call), getattr(torch, call.out_dtype)
    is_fp8, is_int8, is_bare = call.dtype in FP8_DTYPES, call.dtype == "int8", not call.epilogue

    def run(a: torch.Tensor, b: torch.Tensor, **sides: torch.Tensor) -> torch.Tensor:
        bias, residual = sides.pop("bias", None), sides.pop("residual", None)
        if "up" in sides:
            left, right = F.linear(a, b.t(), bias), F.linear(a, sides["up"].t(), sides.get("bias_up"))
            return activated(left, call.activation) * right
        if bias is not None and not (sides or is_fp8 or is_int8):
            add = torch.addmm if a.ndim == 2 else torch.baddbmm
            sums = add(bias, a, b, beta=call.beta, alpha=call.alpha)
            return apply_epilogue_in_dtype(sums, None, residual, call.activation)
        scales = list(sides.values())
        if is_bare or is_fp8:
            sums = multiply(a, b, *scales)
        elif is_int8:
            sums = functools.reduce(torch.Tensor.mul_, scales, multiply(a, b).float()).to(kind)
        else:
            sums = functools.reduce(torch.mul, scales, multiply(a, b))
        return apply_epilogue_in_dtype(sums, bias, residual, call.activation, call.alpha, call.beta)

    return Functional(tensors_of, run)


def _both_weights(call: MatmulCall) -> Inputs:
    """Concatenate both weights of a gated product, and both biases, with zeros for a missing one."""
    found = tensors_of(call)
    gate, up, biases = found["b"], found["up"], (found.get("bias"), found.get("bias_up"))
    weight = torch.cat((gate.t(), up.t()))
    if biases == (None, None):
        return {"weight": weight}
    zeros = gate.new_zeros(gate.shape[1])
    return {"weight": weight, "bias": torch.cat([zeros if bias is None else bias for bias in biases])}


def merged(call: MatmulCall) -> Functional:
    """Return a gated product as one product with both weights, then activation(left) * right."""
    activation = call.activation

    def inputs(call: Any) -> Inputs:
        return {"x": torch_calls.in_one_batch(call)[0][0], **_once(call.up.tensor, _both_weights, call)}

    def linear(x: torch.Tensor, **weights: torch.Tensor) -> torch.Tensor:
        left, right = F.linear(x, **weights).chunk(2, -1)
        return activated(left, activation) * right

    return Functional(inputs, linear)


# --- Products with packed weights ---


def _unpacked_weight(call: QuantizedCall) -> Inputs:
    return {"weight": weight_rows(call, 0, call.out.shape[1]).to(getattr(torch, call.dtype))}


def _packed_for_torch(call: QuantizedCall) -> Inputs:
    """Return the weight as `_weight_int4pack_mm` takes it: (number - 8) * scale + offset."""
    (_, n), k, problem = call.out.shape, call.x.shape[1], call.problem
    numbers = unpacked(call.words.tensor.view(problem.words), n, k, call.bits)
    scales = by_row(call.scales.tensor.view(problem.scales), n, k // call.group_size).float()
    offsets = torch.zeros_like(scales)
    if call.zeros is not None:
        zeros = call.zeros.tensor.view(problem.scales) & (2**call.bits - 1)
        offsets = (8 - by_row(zeros, n, k // call.group_size)) * scales
    pairs = numbers[:, ::2] << 4 | numbers[:, 1::2]  # (N, K / 2) of uint8
    both = torch.stack((scales.t(), offsets.t()), -1).to(call.scales.tensor.dtype)  # (groups, N, 2)
    return {
        "weight": torch_private.int4_packed(pairs.contiguous(), _INNER_K_TILES),
        "scales": both.contiguous(),
    }


def _by_weight(call: QuantizedCall, prepare: Callable[[Any], Inputs]) -> Inputs:
    bias = None if call.bias is None else operands.matrix(call.bias, 1)[0, 0]
    return {"input": operands.matrix(call.x, 1)[0], "bias": bias} | _once(call.words.tensor, prepare, call)


def by_packed_weight(call: QuantizedCall) -> Functional:
    """Return the product with the weight in torch's int4 packing."""

    def multiply(
        input: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        made = torch_private.int4_mm(input, weight, call.group_size, scales)
        return made if bias is None else made.add_(bias)

    return Functional(lambda c: _by_weight(c, _packed_for_torch), multiply)


# --- Running baselines ---


def compiled(plain: Functional, **options: Any) -> Functional:
    """Return a baseline under torch.compile. The first call compiles."""

    @functools.cache
    def made() -> Callable[..., torch.Tensor]:
        torch.compiler.reset()  # kernels compiled for other cases count towards a limit
        return torch.compile(lambda **inputs: plain.make(**inputs), dynamic=False, fullgraph=True, **options)

    return Functional(plain.inputs, lambda **inputs: made()(**inputs))


def into_out(baseline: Baseline) -> Callable[[Call], None]:
    """Return a function that leaves the result of a baseline in the call's output."""

    def run(call: Call) -> None:
        result = baseline(call)
        if result is None:
            return
        if isinstance(call, MatmulCall):
            torch_calls.in_one_batch(call)[1].copy_(result)
        elif isinstance(call, PermuteCall):
            answers.permuted(call)[1].copy_(result)
        else:
            operands.matrix(call.out, 1)[0].copy_(result)

    return run


def graph_of(baseline: Baseline, calls: list[Any]) -> timing.Graph:
    """Capture a baseline on all calls. It runs on each of them first, which prepares their operands.

    Its results are kept, so that each launch of the graph writes to cold memory.
    """
    for call in calls:
        baseline(call)
    made: list[torch.Tensor | None] = []
    return timing.Graph(lambda call: made.append(baseline(call)), calls)


def device_copy(call: PermuteCall) -> None:
    """Copy as many bytes without permuting them: the speed limit of a permutation.

    Copies of an odd number of 16-byte words are slower: up to 31 bytes are left out.
    """
    x, out = call.x.tensor.view(torch.uint8), call.out.tensor.view(torch.uint8)
    count = min(x.numel(), out.numel())
    count = count // _COPY_UNIT * _COPY_UNIT or count
    out[:count].copy_(x[:count])
