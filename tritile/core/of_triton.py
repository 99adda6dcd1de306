"""Name all that tritile uses of Triton and Triton does not document; no other module names any of it.

Undocumented are `triton.runtime`, `triton.compiler`, `triton.backends`, and names that begin with "_".
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
"""List the versions of Triton on which these names were checked."""

# Kernels under a decorator, and compiled kernels.

JITCallable = _jit.JITCallable
"""Represent any function under triton.jit: `triton.runtime.jit.JITCallable`."""

JITFunction = _jit.JITFunction
"""Represent a kernel under triton.jit: `triton.runtime.jit.JITFunction`."""

naming_of: Final = attrgetter("_repr")
"""Return the function that names what a kernel compiles to, None by default: `JITFunction._repr`."""

Heuristics = _autotuner.Heuristics
"""Represent a kernel under triton.heuristics: `triton.runtime.autotuner.Heuristics`."""

Autotuner = _autotuner.Autotuner
"""Represent a kernel under triton.autotune: `triton.runtime.autotuner.Autotuner`."""

time_config: Final = _autotuner.Autotuner._bench
"""Time one config of an Autotuner: `Autotuner._bench`."""

CompiledKernel = _compiler.CompiledKernel
"""Hold a compiled kernel: `triton.compiler.CompiledKernel`."""

OutOfResources = _errors.OutOfResources
"""Refuse a kernel that asks for more than the GPU has: `triton.runtime.errors.OutOfResources`."""


def handles_of(kernel: Any) -> tuple[int, int, int]:
    """Load a kernel; return its function, registers and spilled words: `CompiledKernel._init_handles`."""
    kernel._init_handles()
    return kernel.function, kernel.n_regs, kernel.n_spills


def forget_compiled(function: Any, device: Any) -> None:
    """Drop the kernels that a function compiled for a device: `JITFunction.device_caches`."""
    function.device_caches.pop(device, None)


# Targets and drivers.

GPUTarget = _targets.GPUTarget
"""Name what a kernel is compiled for: `triton.backends.compiler.GPUTarget`."""

backends: Final = _backends
"""Hold the installed backends by name: `triton.backends.backends`."""

driver: Any = _driver
"""Hold the active driver of this process: `triton.runtime.driver.driver`."""


@contextlib.contextmanager
def driven_by(stand_in: Any) -> Iterator[None]:
    """Make `stand_in` the active driver for a `with`: `driver._active`."""
    before = driver._active
    driver.set_active(stand_in)
    try:
        yield
    finally:
        driver._active = before


def assembler(arch: int) -> Any:
    """Return the assembler for compute capability `arch`: `triton.backends.nvidia.compiler.get_ptxas`."""
    from triton.backends.nvidia.compiler import get_ptxas  # a build for AMD alone may lack it

    return get_ptxas(arch)


def nvidia_driver() -> ModuleType:
    """Return the module that builds the driver's C code for NVIDIA: `triton.backends.nvidia.driver`."""
    from triton.backends.nvidia import driver as module  # a build for AMD alone may lack it

    return module


# The cache on disk.

build: Final[ModuleType] = _build
"""Build C modules, or find them in the cache: the module `triton.runtime.build`."""

MODULE_LOADER: Final = (_build, "_load_module_from_path")
"""Tell where the loader of C modules is, an owner and a name: `triton.runtime.build`."""

CacheManager = _cache.CacheManager
"""Find and keep the files of a key: the base class `triton.runtime.cache.CacheManager`."""

FileCacheManager = _cache.FileCacheManager
"""Keep the files of a key in a folder, as Triton does by default: `triton.runtime.cache.FileCacheManager`."""

folder_of: Final = _cache._base32
"""Return the folder name of a key: `triton.runtime.cache._base32`."""

read_own_files: Final = _cache.triton_key
"""Read Triton's own files into a digest that the process keeps: `triton.runtime.cache.triton_key`."""

# The interpreter.

InterpretedFunction = _interpreter.InterpretedFunction
"""Represent a function that is interpreted: `triton.runtime.interpreter.InterpretedFunction`."""

InterpreterBuilder = _interpreter.InterpreterBuilder
"""Carry out each operation of a kernel: `triton.runtime.interpreter.InterpreterBuilder`."""

interpreter_builder: Any = _interpreter.interpreter_builder
"""Hold the builder that carries them out, with its options: `triton.runtime.interpreter`."""

InterpreterError = _errors.InterpreterError
"""Report an error inside a kernel: `triton.runtime.errors.InterpreterError`."""

TensorHandle = _interpreter.TensorHandle
"""Hold a block of values: `triton.runtime.interpreter.TensorHandle`."""

LANGUAGE_PATCHER: Final = (_interpreter, "_patch_lang")
"""Tell where the function is that patches triton.language: `triton.runtime.interpreter`."""

REDUCTIONS: Final = ("_sum_combine", "_elementwise_max", "_elementwise_min")
"""Name the functions of `tl.standard` that the interpreter replaces by reductions of numpy."""
