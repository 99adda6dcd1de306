"""The names of Triton that it does not document, all that tritile stands on: nobody else names any.

Those are what lies in `triton.runtime`, `triton.compiler` and `triton.backends`, and what begins with an
underscore.
"""

import contextlib
from collections.abc import Iterator
from operator import attrgetter
from types import ModuleType
from typing import Any, Final

from triton.backends import backends as _backends
from triton.backends import compiler as _targets
from triton.compiler import compiler as _compiler
from triton.runtime import autotuner as _autotuner
from triton.runtime import build as _build
from triton.runtime import cache as _cache
from triton.runtime import errors as _errors
from triton.runtime import interpreter as _interpreter
from triton.runtime import jit as _jit
from triton.runtime.driver import driver as _driver

CHECKED_ON: Final = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
"""The versions of Triton that were seen to have these names."""

# Kernels, as decorators make them and as they are compiled.

JITCallable = _jit.JITCallable
"""What triton.jit makes of any function: of `triton.runtime.jit`."""

JITFunction = _jit.JITFunction
"""What it makes of a kernel that is compiled: of `triton.runtime.jit`."""

naming_of: Final = attrgetter("_repr")
"""Return what names the compiled forms of a JITFunction, None by default: its `_repr`."""

Heuristics = _autotuner.Heuristics
"""What triton.heuristics makes of a kernel: of `triton.runtime.autotuner`."""

Autotuner = _autotuner.Autotuner
"""What triton.autotune makes of one: of `triton.runtime.autotuner`."""

time_config: Final = _autotuner.Autotuner._bench
"""Time a config of an Autotuner's kernel: `Autotuner._bench`."""

CompiledKernel = _compiler.CompiledKernel
"""A compiled kernel: of `triton.compiler`."""

OutOfResources = _errors.OutOfResources
"""Raised for a kernel that asks for more than a GPU has: of `triton.runtime.errors`."""


def handles_of(kernel: Any) -> tuple[int, int, int]:
    """Load a CompiledKernel; its function, registers, spilled words: `_init_handles` and what that sets."""
    kernel._init_handles()
    return kernel.function, kernel.n_regs, kernel.n_spills


def forget_compiled(function: Any, device: Any) -> None:
    """Drop what a JITFunction compiled for a device in this process: from its `device_caches`."""
    function.device_caches.pop(device, None)


# The driver, and what is compiled for.

GPUTarget = _targets.GPUTarget
"""What a kernel is compiled for: of `triton.backends.compiler`."""

backends: Final = _backends
"""The backends that are installed, by name: of `triton.backends`."""

driver: Any = _driver
"""What makes the driver of this process at its first use: of `triton.runtime.driver`."""


@contextlib.contextmanager
def driven_by(stand_in: Any) -> Iterator[None]:
    """Have Triton take `stand_in` for the active driver inside the `with`: on `driver._active`."""
    before = driver._active
    driver.set_active(stand_in)
    try:
        yield
    finally:
        driver._active = before


def assembler(arch: int) -> Any:
    """Return what assembles for compute capability `arch`: `get_ptxas` of Triton's NVIDIA backend."""
    from triton.backends.nvidia.compiler import get_ptxas  # a build for AMD alone may lack it

    return get_ptxas(arch)


def nvidia_driver() -> ModuleType:
    """Return the module of NVIDIA's driver, which builds in C: `triton.backends.nvidia.driver`."""
    from triton.backends.nvidia import driver as module  # a build for AMD alone may lack it

    return module


# The cache of what is compiled and built.

build: Final[ModuleType] = _build
"""The module that builds modules in C, or finds them in the cache: `triton.runtime.build`."""

MODULE_LOADER: Final = (_build, "_load_module_from_path")
"""Where the function is that loads a module which was built: an owner and a name."""

CacheManager = _cache.CacheManager
"""What finds and keeps the files of a key: `FileCacheManager`'s base, of `triton.runtime.cache`."""

folder_of: Final = _cache._base32
"""Return the name of the folder of a key: `triton.runtime.cache._base32`."""

read_own_files: Final = _cache.triton_key
"""Read Triton's own files for a digest of them, kept in this process: `triton.runtime.cache.triton_key`."""

# The interpreter.

InterpretedFunction = _interpreter.InterpretedFunction
"""What triton.jit makes of a function with TRITON_INTERPRET set: of `triton.runtime.interpreter`."""

InterpreterBuilder = _interpreter.InterpreterBuilder
"""What carries out each operation of a kernel: of `triton.runtime.interpreter`."""

InterpreterError = _errors.InterpreterError
"""Raised for whatever goes wrong amid a kernel: of `triton.runtime.errors`."""

TensorHandle = _interpreter.TensorHandle
"""A block of values: of `triton.runtime.interpreter`."""

LANGUAGE_PATCHER: Final = (_interpreter, "_patch_lang")
"""Where the function is that patches triton.language for a kernel: an owner and a name."""

REDUCTIONS: Final = ("_sum_combine", "_elementwise_max", "_elementwise_min")
"""The functions of `tl.standard` by which the interpreter tells which reductions numpy has."""
