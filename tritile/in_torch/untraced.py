"""Functions that torch.compile is not to look into."""

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """The function itself, marked for torch.compile to run as it is, with all that it calls.

    As torch.compiler.disable, which costs a microsecond at every call and imports the compiler. A call of it
    in what is compiled is a graph break, and an error under fullgraph=True.
    """
    marked: Any = function
    marked._torchdynamo_disable = True
    with contextlib.suppress(AttributeError):  # private names, without which frames may be compiled in vain
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(marked.__code__, frames._FrameExecStrategy(skip, skip))
    return function
