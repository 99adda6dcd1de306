"""What `torch.utils.flop_counter.FlopCounterMode` counts of tritile's products, as it does of torch's own."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from tritile.ops.dispatch import SCHEMAS, TENSORS


def register() -> None:
    """Register a formula for each product. It takes shapes in the place of tensors."""
    for op in SCHEMAS.keys() - {"permute", "transpose"}:
        register_flop_formula(getattr(torch.ops.tritile, op))(_formula(op))


def _formula(op: str) -> Any:
    roles = [role for role, _ in TENSORS[op]]
    first = roles.index("a") if "a" in roles else 0  # every operand before it is a tensor

    def count(*values: Any, out_shape: Sequence[int], **options: Any) -> int:
        a, b = values[first], values[first + 1]
        if op == "grouped_matmul" and len(a) == len(b) == 2:
            return 2 * a[0] * a[1] * b[1]  # groups share out K
        return (4 if op == "gated_linear" else 2) * prod(out_shape) * a[-1]

    return count
