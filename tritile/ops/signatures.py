"""List the signatures of the operators of `torch.ops.tritile`, by which they are defined and called."""

from typing import Final

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
    "Tensor? bias=None, str? activation=None, Tensor? residual=None, bool use_fast_accum=False, "
    "Tensor? zero_a=None, Tensor? zero_b=None",
    "grouped_matmul": "Tensor a, Tensor b, Tensor? offs=None, Tensor? scale_a=None, Tensor? scale_b=None, "
    f"*, {_HOW}",
    "permute": "Tensor input, int[] dims",
    "linear_quantized": "Tensor input, Tensor packed, Tensor scales, Tensor? zeros=None, Tensor? bias=None, "
    "*, int bits, int group_size, int n, int k",
}  # fmt: skip


def _names(arguments: str) -> tuple[str, ...]:
    return tuple(each.partition("=")[0].split()[-1] for each in arguments.split(", ") if each)


# The names of the arguments of each operator, and of those that it takes by name alone.
NAMES: Final = {op: _names(schema.replace(" *,", "")) for op, schema in SCHEMAS.items()}
NAMED: Final = {op: _names(schema.partition("*, ")[2]) for op, schema in SCHEMAS.items()}
