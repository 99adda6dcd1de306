"""Say how kernels add up a product's terms."""

from tritile.core.config import Config
from tritile.core.problem import FP8_DTYPES, SCALE_K
from tritile.core.problem.parts import PROMOTED_EVERY
from tritile.core.views import MatmulCall


def in_parts(call: MatmulCall) -> bool:
    """Tell whether operands are parts of float32 ones, and sums of the large terms move to totals in fp32."""
    return call.dtype == "float16" and call.precision == "fp16x3"


def input_precision(call: MatmulCall) -> str:
    return "ieee" if in_parts(call) else call.precision


def promoted_turns(call: MatmulCall, config: Config) -> int:
    """Return after how many blocks of K sums move from tensor cores to a total in fp32; 0 for never."""
    if in_parts(call):
        return PROMOTED_EVERY // int(config["BLOCK_K"])
    if call.dtype in FP8_DTYPES and call.precision != "fast":
        return max(1, SCALE_K // int(config["BLOCK_K"]))
    return 0
