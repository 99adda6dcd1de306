"""Calls of a decorated kernel that were met before: told apart in a microsecond, and launched at once.

Two look-ups, each by a tuple made of a call's arguments:

- A *form* (`form_of`) finds the config that was chosen. Calls of one form pose one problem.
- A *key* (`key_of`) finds the compiled kernel (`Launch`). Calls of one key are the same in all that Triton
  specializes on. Triton's own launch binds arguments, finds each one's specialization and looks up the
  compiled kernel at every call; a `Launch` runs what Triton launched when such a call was met first.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
import triton
import triton.language as tl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from tritile.core.of_torch import current_gpu, current_raw_stream
from tritile.core.of_triton import CompiledKernel, JITFunction

DESCRIPTORS: Final = (TensorDescriptor, GluonDescriptor)  # whose dtype is that of their tensor

# Types whose values never change. An equal value of another type may not mean what it meant.
_FROZEN: Final = (int, float, bool, str, type(None), torch.dtype)
_FROZEN_KEYS: Final = (*_FROZEN, tl.dtype)
_TENSORS: Final = (torch.Tensor, torch.nn.Parameter)
_RUNTIME: Final = triton.knobs.runtime
_COMPILATION: Final = triton.knobs.compilation
_MISSING: Final = object()

Form = tuple[Any, ...]
Key = tuple[Any, ...]


def form_of(mode: str, keys: Mapping[str, int], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Form:
    """Return the form of a call: calls of one form pose one problem, on one GPU, in one mode.

    `keys` are the key's names with their places. A form holds the mode, the GPU's number (-1: host memory),
    which arguments are given, their dtypes, and the values of the key.
    """
    values, given = (*args, *kwargs.values()), len(args)
    return (
        mode,
        next((v.get_device() for v in values if isinstance(v, torch.Tensor) and v.is_cuda), -1),
        given,
        *kwargs,
        *[v.base.dtype if type(v) in DESCRIPTORS else getattr(v, "dtype", None) for v in values],
        *[args[place] if place < given else kwargs.get(name) for name, place in keys.items()],
    )


def lasts(form: Form) -> bool:
    """Tell whether a form may be kept: no value of its key may change, and each equals itself, as NaN not."""
    return all(type(part) in _FROZEN_KEYS and part == part for part in form)


def _plain() -> bool:
    """Tell whether Triton compiles as it does by default: neither debugging nor watched by a tool."""
    return not (
        _RUNTIME.debug or _COMPILATION.instrumentation_mode or _RUNTIME.add_stages_inspection_hook is not None
    )


def key_of(mode: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Key | None:
    """Return the key of a call: its mode, the current GPU, and of each argument all that Triton looks at.

    Of a tensor that is its dtype and its address modulo 16, of everything else its type and value. None
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
    """Hold a compiled kernel with the constants that follow the arguments of its calls."""

    def __init__(self, function: JITFunction[Any], kernel: Any, constants: tuple[Any, ...]) -> None:
        self._function, self._kernel, self._constants = function, kernel, constants
        self._names = [parameter.name for parameter in function.params]
        self._run, self._handle, self._packed = kernel.run, kernel.function, kernel.packed_metadata

    def __call__(self, args: Sequence[Any], grid: Any) -> Any:
        """Launch on the current stream; return the compiled kernel, None where Triton must look at the call.

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
    """Return a `Launch` for calls of the same key as one that was made; None where a key does not tell all.

    `function` is what was called, `kernel` what it returned. Heuristics look at more than a key holds; on
    GPUs other than NVIDIA's the size of a tensor's memory counts too.
    """
    if not isinstance(function, JITFunction) or not isinstance(kernel, CompiledKernel) or not _plain():
        return None
    if kernel.metadata.target.backend != "cuda" or function.pre_run_hooks:
        return None
    for value in args:
        if value.__class__ not in _TENSORS and (type(value) not in _FROZEN or value != value):
            return None  # a value that may change, or that, as NaN, would be kept anew at each call
    constants = []
    for parameter in function.params[len(args) :]:
        value = options.get(parameter.name, parameter.default if parameter.has_default else _MISSING)
        if value is _MISSING:
            return None
        constants.append(value)
    return Launch(function, kernel, tuple(constants))
