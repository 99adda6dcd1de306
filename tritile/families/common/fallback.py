"""Define the fallback flag, an int32 word set by a call's data: it says which kernel runs."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tritile.families.common.tiles import constant

# Bits of the flag. a and b have one each for sparse rows, as one dense operand makes up for the other.
A_SPARSE = constant(1)
B_SPARSE = constant(2)
LOSSY = constant(4)  # the split of some elements loses more than their last bit
UNFIT = constant(7)  # all of these bits: from this value on the product of parts is not good enough
EXTREME = constant(8)  # for plain fp32: infinities, NaN, numbers near the ends of fp32
END = constant(16)


@triton.jit
def reset(flag_ptr, WAIT: tl.constexpr):
    """Clear the flag: one program."""
    if WAIT:
        gdc_wait()
        gdc_launch_dependents()
    tl.store(flag_ptr, 0)


@triton.jit
def is_enabled(flag_ptr, FLAGS: tl.constexpr):
    """True if the flag is from the first of FLAGS on and below the second."""
    flag = tl.load(flag_ptr, cache_modifier=".cg")
    return (flag >= FLAGS[0]) & (flag < FLAGS[1])
