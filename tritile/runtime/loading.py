"""Load compiled kernels onto the GPU, without the launchers that Triton builds for them.

Triton 3.6 has a C compiler make a launcher for every new signature as it loads a kernel, a quarter of a
second each. Launches of tritile need none.
"""

import weakref
from typing import Any, NamedTuple

import triton

from tritile.core.of_triton import OutOfResources, driver, handles_of


class Loaded(NamedTuple):
    """Hold a kernel on the GPU: the driver's function, registers and spilled 32-bit words of a thread."""

    function: int
    registers: int
    spills: int


def listened(hook: Any) -> bool:
    """Tell whether anybody listens: a chain of Triton's with calls in it, or a function of the user's own."""
    return bool(getattr(hook, "calls", hook))


_loaded: "weakref.WeakKeyDictionary[Any, Loaded]" = weakref.WeakKeyDictionary()


def loaded(kernel: Any, shared_memory: int) -> Loaded:
    """Load a compiled kernel of Triton's onto the current GPU, once. `shared_memory`: bytes a block may have.

    Raises OutOfResources where the kernel asks for more than the GPU has, and what the driver raises.
    """
    found = _loaded.get(kernel)
    if found is None:
        found = _loaded[kernel] = _load(kernel, shared_memory)
    return found


def _load(kernel: Any, shared_memory: int) -> Loaded:
    metadata, hooks = kernel.metadata, triton.knobs.runtime
    heard = listened(hooks.kernel_load_start_hook) or listened(hooks.kernel_load_end_hook)
    if metadata.target.backend != "cuda" or heard:
        return Loaded(*handles_of(kernel))
    if metadata.shared > shared_memory:
        raise OutOfResources(metadata.shared, shared_memory, "shared memory")
    device = driver.active.get_current_device()
    _, function, registers, spills, most_threads = driver.active.utils.load_binary(
        kernel.name, kernel.kernel, metadata.shared, device
    )
    threads = metadata.num_warps * metadata.target.warp_size
    if threads > most_threads:
        raise OutOfResources(threads, most_threads, "threads")
    return Loaded(function, registers, spills)
