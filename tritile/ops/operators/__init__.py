"""Register tritile's operations with torch's dispatcher, compiler and transforms as `torch.ops.tritile`."""

import functools
from typing import Any

import torch

from tritile.core.epilogue import activated
from tritile.ops.checks import check_activation, check_constant
from tritile.ops.dispatch import NAMES, call_overload, name_of_role
from tritile.ops.operators import batches
from tritile.ops.operators.gradients import Grouped, Permute, Product, Quantized
from tritile.ops.operators.library import define
from tritile.ops.request import request_of


def _record_product(op: str, *values: Any) -> torch.Tensor:
    """Record a product, whose formula has no activation: torch applies it, and then adds the residual."""
    arguments, names = dict(zip(NAMES[op], values, strict=True)), [name_of_role(op, role) for role in "ab"]
    activation, residual = arguments.get("activation"), arguments.get("residual")
    check_activation(op, activation, arguments[names[0]])
    if arguments.get("alpha") == 0:  # through a product with K = 0 the factors have zeros for gradients
        request_of(op, *values).checked(None)
        a, b = (arguments[name] for name in names)
        arguments |= dict(zip(names, (a[..., :0], b[..., :0, :]), strict=True))
    if not activation:
        return Product.of(op, *arguments.values())
    arguments |= {name: None for name in ("activation", "residual") if name in arguments}
    y = activated(Product.of(op, *arguments.values()), activation)
    return y if residual is None else (y + residual).to(y.dtype)


def _record_gated(
    input: Any, gate: Any, up: Any, activation: Any, bias_gate: Any, bias_up: Any, *options: Any
) -> torch.Tensor:
    """Compute both products, whose values the derivative needs."""
    request_of("gated_linear", input, gate, up, activation, bias_gate, bias_up, *options).checked(None)
    of_gate = call_overload("linear", input, gate, bias_gate, None, None, *options)
    of_up = call_overload("linear", input, up, bias_up, None, None, *options)
    return activated(of_gate, activation or "") * of_up


def _record_quantized(x: Any, packed: Any, scales: Any, *rest: Any) -> torch.Tensor:
    check_constant("linear", **{"weight.scales": scales})
    return Quantized.of("linear_quantized", x, packed, scales, *rest)


def _product(op: str, rule: Any, *operands: str, **more: Any) -> None:
    define(op, functools.partial(_record_product, op), rule, operands, **more)


_product("matmul", batches.batched_matmul, "input", "other")
_product("linear", batches.batched_linear, "input", "weight")
_product("addmm", batches.batched_addmm, "mat1", "mat2")
_product("baddbmm", batches.batched_baddbmm, "batch1", "batch2")
_product("scaled_matmul", None, constants=("a", "b", "scale_a", "scale_b"))
define("gated_linear", _record_gated, batches.batched_gated, ("input", "weight_gate", "weight_up"))
grouped = functools.partial(Grouped.of, "grouped_matmul")
define("grouped_matmul", grouped, operands=("a", "b"), constants=("scale_a", "scale_b"))
define("permute", functools.partial(Permute.of, "permute"), batches.batched_permute)
define("linear_quantized", _record_quantized, batches.batched_quantized, ("input",), like="scales")
