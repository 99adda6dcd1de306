"""A jitted helper that a kernel reaches as an attribute of this module."""

import triton


@triton.jit
def twice(x):
    return x + x
