"""Launching a call that was met before, to the last bit that Triton specializes on, at once.

Triton's own launch binds arguments, tells each one's specialization and looks for the compiled kernel, at
every call. Here the values of a call are the key under which the compiled kernel is kept, so that what is
launched is what Triton launched when the same call was met first.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
import triton

from tritile.core.of_torch import current_gpu, current_raw_stream
from tritile.core.of_triton import CompiledKernel, JITFunction

# Types whose values never change.
_FROZEN: Final = (int, float, bool, str, type(None), torch.dtype)
_TENSORS: Final = (torch.Tensor, torch.nn.Parameter)
_RUNTIME: Final = triton.knobs.runtime
_COMPILATION: Final = triton.knobs.compilation
_MISSING: Final = object()

Key = tuple[Any, ...]


def _plain() -> bool:
    """Whether Triton compiles as it does by default: neither debugging nor watched by a tool."""
    return not (
        _RUNTIME.debug or _COMPILATION.instrumentation_mode or _RUNTIME.add_stages_inspection_hook is not None
    )


def key_of(mode: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Key | None:
    """What tells a call from others: its mode, the current GPU, and of each argument all that counts.

    Of tensors that is the dtype and the address modulo 16, of everything else its type and value. None
    for a call with arguments by name, in host memory, or that is not to be launched.
    """
    if len(kwargs) != 2 or kwargs.get("warmup") is not False or "grid" not in kwargs:
        return None
    key: list[Any] = ["direct", mode]
    on_gpu = False
    for value in args:
        kind = value.__class__
        if kind not in _TENSORS:
            key.append(kind)
            key.append(value)
        elif value.is_cuda:
            on_gpu = True
            key.append(value.dtype)
            key.append(value.data_ptr() % 16)
        else:
            return None
    if not on_gpu:
        return None
    key.append(current_gpu())
    return tuple(key)


class Launch:
    """A compiled kernel with the constants that follow the arguments of its calls."""

    def __init__(self, function: JITFunction[Any], kernel: Any, constants: tuple[Any, ...]) -> None:
        self._function, self._kernel, self._constants = function, kernel, constants
        self._names = [parameter.name for parameter in function.params]
        self._run, self._handle, self._packed = kernel.run, kernel.function, kernel.packed_metadata

    def __call__(self, args: Sequence[Any], grid: Any) -> Any:
        """Launch on the current stream; the compiled kernel. None where Triton itself must look at the call.

        Raises RuntimeError, as Triton does, where a global variable that the kernel read has changed.
        """
        function = self._function
        if function.pre_run_hooks or not _plain():
            return None
        for (name, _), (value, namespace) in function.used_global_vals.items():
            if namespace.get(name, _MISSING) != value:
                return None  # Triton says what is wrong
        bound = (*args, *self._constants)
        if callable(grid):
            grid = grid(dict(zip(self._names, bound, strict=True)))
        x, y, z = (*grid, 1, 1)[:3]
        stream = current_raw_stream(current_gpu())
        kernel = self._kernel
        metadata = kernel.launch_metadata(grid, stream, *bound)
        self._run(
            x, y, z, stream, self._handle, self._packed, metadata,
            _RUNTIME.launch_enter_hook, _RUNTIME.launch_exit_hook, *bound,
        )  # fmt: skip
        return kernel


def launch_of(function: Any, kernel: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Launch | None:
    """What launches further calls that have the same key as this one; None where that cannot be told.

    `function` is what was called, `kernel` what that returned. Heuristics look at more than the key holds;
    on GPUs other than NVIDIA's the size of a tensor's memory counts too.
    """
    if not isinstance(function, JITFunction) or not isinstance(kernel, CompiledKernel) or not _plain():
        return None
    if kernel.metadata.target.backend != "cuda" or function.pre_run_hooks:
        return None
    for value in args:
        if value.__class__ not in _TENSORS and (type(value) not in _FROZEN or value != value):
            return None  # it may change, or, as NaN, would be kept anew at each call
    constants = []
    for parameter in function.params[len(args) :]:
        value = options.get(parameter.name, parameter.default if parameter.has_default else _MISSING)
        if value is _MISSING:
            return None
        constants.append(value)
    return Launch(function, kernel, tuple(constants))
