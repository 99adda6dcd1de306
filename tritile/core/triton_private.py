"""Name all that tritile uses of Triton and Triton does not document; no other module names any of it.

Undocumented are `triton.runtime`, `triton.compiler`, `triton.backends`, and names that begin with "_".
"""

import contextlib
import os
import re
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, Final

from triton import knobs as _knobs
from triton import language as _language

from tritile.core.bound import bound, lacking

# Kernels under a decorator, and compiled kernels.

JITCallable: Any = bound("triton.runtime.jit.JITCallable")  # represent any function under triton.jit
JITFunction: Any = bound("triton.runtime.jit.JITFunction")  # represent a kernel under triton.jit
# Represent a kernel, or one under a decorator.
KernelInterface: Any = bound("triton.runtime.jit.KernelInterface")
# Return the function that names what a kernel compiles to, None by default.
naming_of: Final = attrgetter("_repr")
Heuristics: Any = bound("triton.runtime.autotuner.Heuristics")  # represent a kernel under triton.heuristics
Autotuner: Any = bound("triton.runtime.autotuner.Autotuner")  # represent a kernel under triton.autotune
time_config: Any = bound("triton.runtime.autotuner.Autotuner._bench")  # time one config of an Autotuner
# Refuse a call for which pruning leaves no config, and a kernel that needs more than the GPU has.
AutotunerError: Any = bound("triton.runtime.errors.AutotunerError", type("AutotunerError", (Exception,), {}))
OutOfResources: Any = bound("triton.runtime.errors.OutOfResources", type("OutOfResources", (Exception,), {}))


def autotuning_listener() -> Any:
    """Return what a program set to hear of each autotuning, or None: `triton.knobs.autotuning.listener`."""
    return getattr(_knobs.autotuning, "listener", None)  # Triton 3.8 is the first to have it


def handles_of(kernel: Any) -> tuple[int, int, int]:
    """Load a kernel; return its function, registers and spilled words: `CompiledKernel._init_handles`."""
    kernel._init_handles()
    return kernel.function, kernel.n_regs, kernel.n_spills


def options_of(kernel: Any) -> dict[str, Any]:
    """Return the arguments of triton.jit for a kernel, those at their defaults left out."""
    # The interpreter keeps them in `kwargs`; a function under triton.constexpr_function has none.
    options = {**vars(kernel), **vars(kernel).get("kwargs", {})}
    names = ("noinline", "debug", "do_not_specialize", "do_not_specialize_on_alignment")
    return {name: options[name] for name in names if options.get(name)}


def functions_of(value: Any) -> list[Any]:
    """Return the functions of a class under triton.language.core._aggregate, [] for others."""
    return value.hash_attrs if getattr(value, "__triton_aggregate__", False) else []


# Settings that change what is compiled and set no environment variable that `_variables` lists.
_SETTINGS: Final = (
    "language.fp32_default", "runtime.debug", "compilation.override", "compilation.instrumentation_mode",
    "compilation.fpsan_homomorphic_casts", "nvidia.ptxas_options", "nvidia.mock_ptx_version",
    "nvidia.libdevice_path",
)  # fmt: skip
_ON_BY_DEFAULT: Final = ("TRITON_DEFAULT_FP_FUSION", "AMDGCN_USE_BUFFER_OPS", "AMDGCN_USE_BUFFER_ATOMICS")
# Variables that make Triton compile again, to the same instructions.
_OF_DEBUGGING: Final = re.compile(
    "DUMP|TIMING|DEBUG|DIAGNOSTICS|MULTITHREADING|EXTRACT_DI|LINE_INFO|IR_LOC|VERSION_CHECK"
)


def _of_environment() -> dict[str, str]:
    """Return the environment variables that Triton, or its compilers, may read."""
    return {name: value for name, value in os.environ.items() if _READ.match(name)}


_READ: Final = re.compile("TRITON|AMDGCN|LLVM|MLIR|NVPTX|DISABLE_|ALLOW_|USE_|SWAP_")
_variables: Any = bound("triton._C.libtriton.get_cache_invalidating_env_vars", _of_environment)


def changed_settings() -> dict[str, Any]:
    """Return knobs and environment variables that change what is compiled, unless at their defaults."""
    changed = {}
    for name in _SETTINGS:
        with contextlib.suppress(AttributeError):  # not every version has them all
            changed[name] = attrgetter(name)(_knobs)
    for name, value in _variables().items():
        # Backends for AMD choose the defaults of TRITON_HIP variables by architecture.
        default = "true" if name in _ON_BY_DEFAULT else None if name.startswith("TRITON_HIP") else "false"
        if value != default and not _OF_DEBUGGING.search(name):
            changed[name] = value
    if (hook := getattr(_knobs.runtime, "add_stages_inspection_hook", None)) is not None:
        with contextlib.suppress(TypeError):  # in Triton 3.6 a hook has no key
            changed["stages"] = hook()[1]
    return {name: value for name, value in changed.items() if value}


# Targets and drivers.

GPUTarget: Any = bound("triton.backends.compiler.GPUTarget")  # name what a kernel is compiled for
backends: Any = bound("triton.backends.backends")  # hold the installed backends by name
driver: Any = bound("triton.runtime.driver.driver")  # hold the active driver of this process


@contextlib.contextmanager
def driven_by(stand_in: Any) -> Iterator[None]:
    """Make `stand_in` the active driver for a `with`: `driver._active`."""
    if not hasattr(driver, "_active"):
        raise lacking("triton.runtime.driver.driver._active")
    before = driver._active
    driver.set_active(stand_in)
    try:
        yield
    finally:
        driver._active = before


def assembler(arch: int) -> Any:
    """Return the assembler for compute capability `arch`: `triton.backends.nvidia.compiler.get_ptxas`."""
    return bound("triton.backends.nvidia.compiler.get_ptxas")(arch)  # a build for AMD only may lack it


# The cache on disk.

# Keep the files of a key in a folder, as Triton does by default.
FileCacheManager: Any = bound("triton.runtime.cache.FileCacheManager")
# Read Triton's own files into a digest that the process keeps.
read_own_files: Any = bound("triton.runtime.cache.triton_key", lambda: None)

# The interpreter.

# Represent a function that is interpreted.
InterpretedFunction: Any = bound("triton.runtime.interpreter.InterpretedFunction", None)
# Say whether TRITON_INTERPRET was set as Triton was imported: then triton.jit makes interpreted functions.
INTERPRETING: Final = (
    bool(_knobs.runtime.interpret)
    if InterpretedFunction is None
    else any(isinstance(each, InterpretedFunction) for each in vars(_language).values())
)
InterpretedFunction = InterpretedFunction or bound("triton.runtime.interpreter.InterpretedFunction")
