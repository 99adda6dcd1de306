"""Baselines of tritile: the calls a torch user would make.

A way to make a call's answer writes it into the call's output, or returns it. torch's grouped product has a
fast path for bfloat16. For other dtypes torch reads the offsets on the host, which raises under graph
capture.
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
Way = Callable[[Any], torch.Tensor | None]
WIDE_WEIGHT: Final = "matmul by the weight in 16 bits"
PACKED_WEIGHT: Final = "_weight_int4pack_mm"
COMPILED: Final = "torch.compile"
_INNER_K_TILES: Final = 8  # of 16 columns each
_EVEN: Final = 32  # bytes: two words of a copy
_prepared: Final[WeakTensorKeyDictionary] = WeakTensorKeyDictionary()  # by tensor, then by function


@dataclass(frozen=True)
class Product:
    """A way to make an answer: the tensors of a call, by name, and a function of them."""

    inputs: Callable[[Any], Inputs]
    make: Callable[..., torch.Tensor]

    def __call__(self, call: Any) -> torch.Tensor:
        return self.make(**self.inputs(call))


def _once(tensor: torch.Tensor, prepare: Callable[[Any], Inputs], call: Any) -> Inputs:
    """Return what is prepared of a call's tensor: at its first run, so that later ones only multiply."""
    found: dict[Any, Inputs] = _prepared.setdefault(tensor, {})
    if prepare not in found:
        found[prepare] = prepare(call)
    return found[prepare]


def torch_ways(call: Call) -> dict[str, Way]:
    """Return torch's ways to make a call's answer by name, the plainest first.

    The fastest of them is what tritile is compared with.
    """
    if isinstance(call, PermuteCall):
        return {"copy_": torch_calls.copy}
    if isinstance(call, GroupedCall):
        return {"_grouped_mm": grouped(call)}
    if isinstance(call, QuantizedCall):
        (_, n), k = call.out.shape, call.x.shape[1]
        ways: dict[str, Way] = {WIDE_WEIGHT: Product(lambda c: _by_weight(c, _unpacked_weight), F.linear)}
        if call.bits == 4 and call.dtype == "bfloat16" and n % 8 == 0 and k % (16 * _INNER_K_TILES) == 0:
            ways[PACKED_WEIGHT] = by_packed_weight(call)
        return ways
    if call.up is not None:
        one = merged(call)
        return {"two products": fused(call), "one product": one, f"{COMPILED}, one product": compiled(one)}
    plainest: Way = fused(call) if call.epilogue else torch_calls.multiply
    if call.dtype in FP8_DTYPES:  # sums are kept where tritile keeps them
        return {f"_scaled_mm, use_fast_accum={call.precision == 'fast'}": plainest}
    ways = {"_int_mm" if call.dtype == "int8" else "matmul": plainest}
    gelu, only_bias = call.activation == "gelu_tanh", Epilogue(bias="row", activation=call.activation)
    if call.problem.batch == 1 and call.epilogue == only_bias and (gelu or call.activation == "relu"):
        ways["_addmm_activation"] = Product(
            tensors_of, lambda a, b, bias: torch_private.addmm_activation(bias, a, b, use_gelu=gelu)
        )
    return ways | ({COMPILED: compiled(fused(call))} if call.epilogue else {})


def grouped(call: GroupedCall) -> Product:
    """Return torch's own product of groups."""

    def inputs(call: GroupedCall) -> Inputs:
        a, b = operands.matrix(call.a, 1)[0], operands.matrix(call.b, call.groups)
        return {"a": a, "b": b, "offs": call.offs.tensor}

    return Product(inputs, lambda a, b, offs: torch_private.grouped_mm(a, b, offs=offs))


# --- Products with an epilogue ---


def fused(call: MatmulCall) -> Product:
    """Return the product with its epilogue, an operation after the other."""
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

    return Product(tensors_of, run)


def _both_weights(call: MatmulCall) -> Inputs:
    """Return both weights of a gated product in one, and both biases, zeros for a missing one."""
    found = tensors_of(call)
    gate, up, biases = found["b"], found["up"], (found.get("bias"), found.get("bias_up"))
    weight = torch.cat((gate.t(), up.t()))
    if biases == (None, None):
        return {"weight": weight}
    zeros = gate.new_zeros(gate.shape[1])
    return {"weight": weight, "bias": torch.cat([zeros if bias is None else bias for bias in biases])}


def merged(call: MatmulCall) -> Product:
    """Return a gated product as one product by both weights, then activation(left) * right."""
    activation = call.activation

    def inputs(call: Any) -> Inputs:
        return {"x": torch_calls.in_one_batch(call)[0][0], **_once(call.up.tensor, _both_weights, call)}

    def linear(x: torch.Tensor, **weights: torch.Tensor) -> torch.Tensor:
        left, right = F.linear(x, **weights).chunk(2, -1)
        return activated(left, activation) * right

    return Product(inputs, linear)


# --- Products by packed weights ---


def _unpacked_weight(call: QuantizedCall) -> Inputs:
    return {"weight": weight_rows(call, 0, call.out.shape[1]).to(getattr(torch, call.dtype))}


def _torchs_packing(call: QuantizedCall) -> Inputs:
    """Return the weight in torch's own packing: (number - 8) * scale + offset."""
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


def by_packed_weight(call: QuantizedCall) -> Product:
    """Multiply by the weight in torch's own packing."""

    def multiply(
        input: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        made = torch_private.int4_mm(input, weight, call.group_size, scales)
        return made if bias is None else made.add_(bias)

    return Product(lambda c: _by_weight(c, _torchs_packing), multiply)


# --- How ways are run ---


def compiled(way: Product, **options: Any) -> Product:
    """Return what torch.compile makes of a way. The first call compiles."""

    @functools.cache
    def made() -> Callable[..., torch.Tensor]:
        torch.compiler.reset()  # kernels compiled for other cases count towards a limit
        return torch.compile(lambda **inputs: way.make(**inputs), dynamic=False, fullgraph=True, **options)

    return Product(way.inputs, lambda **inputs: made()(**inputs))


def into_out(way: Way) -> Callable[[Call], None]:
    """Return a function that leaves the way's answer in the call's output."""

    def run(call: Call) -> None:
        answer = way(call)
        if answer is None:
            return
        if isinstance(call, MatmulCall):
            torch_calls.in_one_batch(call)[1].copy_(answer)
        elif isinstance(call, PermuteCall):
            answers.permuted(call)[1].copy_(answer)
        else:
            operands.matrix(call.out, 1)[0].copy_(answer)

    return run


def graph_of(way: Way, calls: list[Any]) -> timing.Graph:
    """Capture a way over all calls. It runs on each of them first, which prepares their operands.

    What it returns is kept, so that each launch of the graph writes to cold memory.
    """
    for call in calls:
        way(call)
    made: list[torch.Tensor | None] = []
    return timing.Graph(lambda call: made.append(way(call)), calls)


def device_copy(call: PermuteCall) -> None:
    """Copy as many bytes in their order: the speed limit of a permutation.

    Copies of an odd number of 16-byte words are slower: up to 31 bytes are left out.
    """
    x, out = call.x.tensor.view(torch.uint8), call.out.tensor.view(torch.uint8)
    count = min(x.numel(), out.numel())
    count = count // _EVEN * _EVEN or count
    out[:count].copy_(x[:count])
