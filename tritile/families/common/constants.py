"""Globals of kernels."""

from typing import Any

import triton
import triton.language as tl


def constant(value: Any) -> Any:
    """Return a constexpr, or the value itself for Triton's interpreter, which adds none to a tensor."""
    return value if triton.knobs.runtime.interpret else tl.constexpr(value)
