"""Define the fallback flag, an int32 word set by a call's data: it says which kernel runs."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tritile.families.common.constants import constant

# Bits of the flag. a and b have one each for sparse rows, as one dense operand makes up for the other.
A_SPARSE = constant(1)
B_SPARSE = constant(2)
LOSSY = constant(4)  # the split of some elements loses more than their last bit
UNFIT = constant(7)  # all of these bits: from this value on the product of parts is not good enough
EXTREME = constant(8)  # for plain fp32: infinities, NaN, numbers near the ends of fp32
END = constant(16)


@triton.jit
def reset(verdict_ptr, WAIT: tl.constexpr):
    """Let the verdict be good to begin with: one program."""
    if WAIT:
        gdc_wait()
        gdc_launch_dependents()
    tl.store(verdict_ptr, 0)


@triton.jit
def wanted(verdict_ptr, VERDICTS: tl.constexpr):
    """Tell whether the verdict is from the first of VERDICTS on and below the second."""
    verdict = tl.load(verdict_ptr, cache_modifier=".cg")
    return (verdict >= VERDICTS[0]) & (verdict < VERDICTS[1])
