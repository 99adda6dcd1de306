"""Keep torch.compile from tracing a function."""

from collections.abc import Callable
from typing import Any, TypeVar

from tritile.core.of_torch import leave_untraced

_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """Mark a function for torch.compile to run as it is, with all that it calls; return the function itself.

    torch.compiler.disable would cost a microsecond at every call and import the compiler. A call inside a
    compiled function is a graph break, and an error under fullgraph=True.
    """
    leave_untraced(function)
    return function
