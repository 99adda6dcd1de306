"""Functions that torch.compile is not to look into."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """The function itself, marked for torch.compile to run as it is, with all that it calls.

    As torch.compiler.disable, which costs a microsecond at every call and imports the compiler. A call of it
    in what is compiled is a graph break, and an error under fullgraph=True.
    """
    skip = eval_frame._FrameAction.SKIP
    marked: Any = function
    eval_frame.set_code_exec_strategy(marked.__code__, eval_frame._FrameExecStrategy(skip, skip))
    marked._torchdynamo_disable = True
    return function
