"""Give TMA's names in Gluon as triton 3.6 and 3.7 have them, in every later version too."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

store_wait = tma.store_wait
if hasattr(tma, "async_load"):  # from 3.8 on; 3.9 keeps the old names for errors
    async_copy_global_to_shared = tma.async_load
    async_copy_shared_to_global = tma.async_store
else:
    async_copy_global_to_shared = tma.async_copy_global_to_shared
    async_copy_shared_to_global = tma.async_copy_shared_to_global
_memory = gl.shared_memory_descriptor
# A method: its first argument is the shared memory. It is public from 3.9 on.
reinterpret = _memory.reinterpret if hasattr(_memory, "reinterpret") else _memory._reinterpret
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # the first from 3.7 on
