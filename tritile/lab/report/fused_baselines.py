"""A product and its epilogue as a torch user writes them: the baseline of fused epilogues."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tritile.core import of_torch
from tritile.core.epilogue import activated
from tritile.core.problem import FP8_DTYPES, Epilogue
from tritile.core.views import MatmulCall, View
from tritile.lab.report import block_baselines
from tritile.lab.report.once import once
from tritile.tune.subject import operands

Side = torch.Tensor | None


def sides(call: MatmulCall) -> list[torch.Tensor]:
    """Return the epilogue's tensors with broadcast dimensions of extent 1 or dropped, then `up`."""
    found = []
    for view in call.fused.views:
        if view is not None:
            tensor = operands.matrix(view, call.problem.batch)
            wide = tensor if view.batch_strides and view.batch_strides[0] else tensor[0]
            rows, columns = (slice(None) if step else slice(1) for step in view.strides)
            wide = wide[..., rows, columns]
            found.append(wide[0] if view.strides[0] == 0 and call.dtype not in FP8_DTYPES else wide)
    if call.up is not None:
        up = operands.matrix(call.up, call.problem.batch)
        found.append(up[0] if call.problem.batch == 1 else up)
    return found


def _biases(call: MatmulCall) -> tuple[View | None, View | None]:
    """Return the biases of both products of a gated unit."""
    return call.fused.bias, call.fused.bias_up


def _gated(call: MatmulCall) -> Callable[..., torch.Tensor]:
    """Return activation(linear(x, gate)) * linear(x, up) as a torch user writes it, for one matrix."""
    views, activation = _biases(call), call.fused.activation

    def linear(x: torch.Tensor, gate: torch.Tensor, *given: torch.Tensor, out: Side = None) -> torch.Tensor:
        *biases, up = given
        tensors = iter(biases)
        bias, bias_up = (None if view is None else next(tensors) for view in views)
        left, right = F.linear(x, gate.t(), bias), F.linear(x, up.t(), bias_up)
        return torch.mul(activated(left, activation), right, out=out)

    return linear


def takes_one_call(call: MatmulCall) -> bool:
    """Tell whether `_addmm_activation` makes the product with its epilogue."""
    wanted = (Epilogue(bias="row", activation=name) for name in ("relu", "gelu_tanh"))
    return call.problem.batch == 1 and call.fused.epilogue in wanted


def in_one_call(call: MatmulCall) -> torch.Tensor:
    """Multiply, add a bias and apply an activation in one call."""
    assert call.fused.bias is not None
    a, b, bias = (operands.matrix(view, 1)[0] for view in (call.a, call.b, call.fused.bias))
    return of_torch.addmm_activation(bias[0], a, b, use_gelu=call.fused.activation == "gelu_tanh")


def merged_inputs(call: MatmulCall) -> list[torch.Tensor]:
    """Return x, both weights of a gated product side by side, and both biases, zeros for a missing one."""
    assert call.up is not None
    x, gate, up = (operands.matrix(view, 1)[0] for view in (call.a, call.b, call.up))
    biases = [None if view is None else operands.matrix(view, 1)[0, 0] for view in _biases(call)]

    def side_by_side() -> list[torch.Tensor]:
        weights = [torch.cat((gate.t(), up.t()))]
        zeros = x.new_zeros(gate.shape[1])
        rows = [zeros if bias is None else bias for bias in biases]
        return weights if biases == [None, None] else [*weights, torch.cat(rows)]

    return [x, *once(call.up.tensor, "side by side", side_by_side)]


def merged(call: MatmulCall) -> Callable[..., torch.Tensor]:
    """Return a gated product as one product by what `merged_inputs` returns, then silu(left) * right."""
    activation = call.fused.activation

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: Side = None) -> torch.Tensor:
        left, right = F.linear(x, weight, bias).chunk(2, -1)
        return activated(left, activation) * right

    return linear


def _in_place(out: torch.Tensor, activation: str) -> torch.Tensor:
    if activation in ("gelu", "gelu_tanh"):
        how = "tanh" if activation == "gelu_tanh" else "none"
        return torch.ops.aten.gelu.out(out, approximate=how, out=out)
    if activation:
        (torch.relu_ if activation == "relu" else torch.ops.aten.silu_)(out)
    return out


def without_zeros(
    sums: torch.Tensor, a: torch.Tensor, b: torch.Tensor, zero_a: Side, zero_b: Side
) -> torch.Tensor:
    """Return (a - zero_a) @ (b - zero_b) in int32, from `sums`, which is a @ b."""
    kind = torch.int32
    if zero_a is not None:
        of_b = b.sum(0, keepdim=True, dtype=kind)
        of_b = of_b if zero_b is None else of_b - a.shape[1] * zero_b.to(kind)
        sums = sums - zero_a.to(kind) * of_b
    return sums if zero_b is None else sums - zero_b.to(kind) * a.sum(1, keepdim=True, dtype=kind)


def _scaled_product(call: MatmulCall) -> Callable[..., torch.Tensor]:
    """Return a @ b with its scales and zero points as a function of a, b, scales, zero points and `out=`."""
    kind = getattr(torch, call.out_dtype)
    one = torch.ones((), device=call.a.tensor.device)

    def scaled(
        a: torch.Tensor, b: torch.Tensor, scales: list[torch.Tensor], zeros: tuple[Side, Side], **out: Any
    ) -> torch.Tensor:
        if call.dtype in FP8_DTYPES:
            scale_a, scale_b = scales if len(scales) == 2 else (one, one)
            how = {"out_dtype": kind, "use_fast_accum": call.precision == "fast"}
            return of_torch.scaled_mm(a, b, scale_a, scale_b, **how, **out)
        if call.dtype == "int8":
            sums = without_zeros(of_torch.int_mm(a, b), a, b, *zeros).float()
            for scale in scales:
                sums.mul_(scale)
            return out["out"].copy_(sums) if out else sums.to(kind)
        sums = torch.matmul(a, b, **out)
        for scale in scales:
            sums = torch.mul(sums, scale, **out)
        return sums

    return scaled


def product(call: MatmulCall) -> Callable[..., torch.Tensor]:
    """Return the product with its epilogue as a function; it works in place where `out` is given."""
    if call.up is not None:
        return _gated(call)
    fused, scaled = call.fused, _scaled_product(call)
    present = [view is not None for view in fused.views]
    if call.scales is not None:
        multiply, of_blocks = block_baselines.product(call), len(block_baselines.inputs(call)) - 2

    def run(a: torch.Tensor, b: torch.Tensor, *given: torch.Tensor, **out: Any) -> torch.Tensor:
        tensors = iter(given if call.scales is None else given[of_blocks:])
        read = (next(tensors) if there else None for there in present)
        scale_a, scale_b, bias, residual, _, zero_a, zero_b, *_ = read
        scales = [scale for scale in (scale_a, scale_b) if scale is not None]
        own = call.scales is None
        if own and bias is not None and not scales and call.dtype not in (*FP8_DTYPES, "int8"):
            add = torch.addmm if a.ndim == 2 else torch.baddbmm
            made = add(bias, a, b, beta=fused.beta, alpha=fused.alpha, **out)
        else:
            made = (
                scaled(a, b, scales, (zero_a, zero_b), **out)
                if own
                else multiply(a, b, *given[:of_blocks], **out)
            )
            made = made if fused.alpha == 1 else made * fused.alpha
            made = made if bias is None else torch.add(made, bias, alpha=fused.beta, **out)
        if out:
            made = _in_place(made, fused.activation)
            return made if residual is None else made.add_(residual)
        made = activated(made, fused.activation)
        return made if residual is None else made + residual

    return run
