"""Load compiled kernels onto the GPU, and launch them on an NVIDIA GPU straight through the driver.

Triton 3.6 has a C compiler make a launcher for every new signature as it loads a kernel, a quarter of a
second each. Launches of tritile need none.

Triton's launcher converts every argument at every call, and encodes every tensor descriptor anew. Here the
parameters are laid out in memory once; a call writes the addresses of its tensors into them, and launches.

Source: the CUDA Driver API reference, `cuLaunchKernelEx`, `cuTensorMapEncodeTiled` and
`cuTensorMapReplaceAddress`.
"""

import ctypes
import functools
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import triton

from tritile.core.triton_private import OutOfResources, driver, handles_of
from tritile.runtime.work import Buffer, Descriptor

# CUlaunchAttributeID
_CLUSTER_DIMENSION, _CLUSTER_SCHEDULING, _PROGRAMMATIC_STREAM_SERIALIZATION = 4, 5, 6
_SPREAD: Final = 1  # CUclusterSchedulingPolicy: as Triton's launcher asks for
# CUDA_ERROR_NOT_INITIALIZED, CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_HANDLE
_NO_CONTEXT: Final = (3, 201, 400)
_INVALID_VALUE: Final = 1  # CUDA_ERROR_INVALID_VALUE
# CUtensorMapL2promotion. Triton's launcher asks for 256 bytes, which cost a tenth of a product's time where
# rows start inside lines, and gain nothing elsewhere: `tuning/NOTES.md`.
_L2_PROMOTION_128B: Final = 2
_UNSIGNED: Final = {1: 0, 2: 1, 4: 2, 8: 4}  # CUtensorMapDataType of unsigned integers, by bytes
TFLOAT32: Final = 11  # CUtensorMapDataType of fp32 that is rounded to TF32 as it is copied
_NUMBERS: Final = {
    "i1": ctypes.c_bool, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32,
    "i64": ctypes.c_int64, "u1": ctypes.c_bool, "u8": ctypes.c_uint8, "u16": ctypes.c_uint16,
    "u32": ctypes.c_uint32, "u64": ctypes.c_uint64, "fp32": ctypes.c_float, "fp64": ctypes.c_double,
}  # fmt: skip


class Loaded(NamedTuple):
    """Hold a kernel on the GPU: the driver's function, registers and spilled 32-bit words of a thread."""

    function: int
    registers: int
    spills: int


def listened(hook: Any) -> bool:
    """True for a chain of Triton's with calls in it, or a function of the user's own."""
    return bool(getattr(hook, "calls", hook))


_loaded: "weakref.WeakKeyDictionary[Any, Loaded]" = weakref.WeakKeyDictionary()


def loaded(kernel: Any, shared_memory: int) -> Loaded:
    """Load a compiled kernel of Triton's onto the current GPU, once. `shared_memory`: bytes a block may have.

    Raises OutOfResources if the kernel asks for more than the GPU has, and what the driver raises.
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


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint64 * 8))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


@functools.cache
def _driver() -> ctypes.CDLL | None:
    """Return the CUDA driver's library; None if there is none, or it has no tensor maps."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        library.cuLaunchKernelEx.argtypes = (ctypes.c_void_p,) * 4
        library.cuTensorMapReplaceAddress.argtypes = (ctypes.c_void_p,) * 2
        library.cuCtxSetCurrent.argtypes = (ctypes.c_void_p,)
        library.cuFuncGetParamInfo.argtypes = (
            ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)
        )  # fmt: skip
        return library if hasattr(library, "cuTensorMapEncodeTiled") else None
    except (OSError, AttributeError):
        return None


def _checked(code: int, doing: str) -> None:
    if code:
        text = ctypes.c_char_p()
        library = _driver()
        assert library is not None
        library.cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"CUDA error {code} while {doing}: {(text.value or b'unknown').decode()}")


@functools.cache
def _context_of(device: int) -> ctypes.c_void_p:
    """Return the context that torch and Triton share on a GPU, retained as long as the process runs."""
    library, context = _driver(), ctypes.c_void_p()
    assert library is not None
    _checked(library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), f"entering GPU {device}")
    return context


class _TensorMap:
    """Hold an encoded tensor descriptor in memory, aligned to 64 bytes, as the driver requires."""

    def __init__(self, descriptor: Descriptor, meta: Mapping[str, Any], pointer: int) -> None:
        self._memory = ctypes.create_string_buffer(128 + 64)
        self.address = -(-ctypes.addressof(self._memory) // 64) * 64
        self.pointer = pointer
        rank, size = len(descriptor.shape), meta["elem_size"]
        shape = (ctypes.c_uint64 * rank)(*reversed(descriptor.shape))
        strides = (ctypes.c_uint64 * rank)(*(size * s for s in reversed(descriptor.strides[:-1])))
        box = (ctypes.c_uint32 * rank)(*reversed(meta["block_size"]))
        steps = (ctypes.c_uint32 * rank)(*([1] * rank))
        kind = TFLOAT32 if descriptor.rounded else _UNSIGNED[size]
        library = _driver()
        assert library is not None
        code = library.cuTensorMapEncodeTiled(
            ctypes.c_void_p(self.address), kind, rank, ctypes.c_void_p(pointer), shape, strides,
            box, steps, 0, meta["swizzle"], _L2_PROMOTION_128B, 0,
        )  # fmt: skip
        _checked(
            code, f"encoding a tensor descriptor of shape {descriptor.shape}, strides {descriptor.strides}"
        )


def _flat(types: Any, values: Any) -> Iterator[tuple[str, Any]]:
    """Yield the (type, value) of every argument that reaches the kernel, tuples flattened."""
    for kind, value in zip(types, values, strict=True):
        if isinstance(kind, tuple):
            yield from _flat(kind, value)
        elif kind != "constexpr":
            yield kind, value


_sizes: "weakref.WeakKeyDictionary[Any, list[int]]" = weakref.WeakKeyDictionary()


def _parameters(library: ctypes.CDLL, kernel: Any, function: int) -> list[int]:
    """Return the bytes of each parameter of a kernel, as the driver says.

    Raises ValueError if the driver does not say.
    """
    sizes = _sizes.get(kernel)
    if sizes is None:
        sizes, offset, size = [], ctypes.c_size_t(), ctypes.c_size_t()
        while not (code := library.cuFuncGetParamInfo(function, len(sizes), offset, size)):
            sizes.append(size.value)
        if code != _INVALID_VALUE:  # which says that there are no more
            raise ValueError(f"CUDA error {code} while asking for parameter {len(sizes)}")
        _sizes[kernel] = sizes
    return sizes


def _attributes(metadata: Any) -> "ctypes.Array[_Attribute]":
    found: list[tuple[int, tuple[int, ...]]] = []
    if metadata.num_ctas > 1:
        ones = 1 | 1 << 32  # the value is three numbers of 32 bits: CTAs along each axis
        found.append((_CLUSTER_DIMENSION, (metadata.num_ctas - 1 + ones, 1)))
        found.append((_CLUSTER_SCHEDULING, (_SPREAD,)))
    if metadata.launch_pdl:
        found.append((_PROGRAMMATIC_STREAM_SERIALIZATION, (1,)))
    made = [_Attribute(name, 0, (ctypes.c_uint64 * 8)(*value)) for name, value in found]
    return (_Attribute * len(made))(*made)


class NativeLaunch:
    """Launch a compiled kernel whose parameters are laid out in memory.

    `args` are by name, in the order in which the kernel takes them. Raises ValueError for a kernel that
    cannot be launched so: of another kind of GPU, that needs scratch memory, or whose parameters are not the
    expected ones: by name and order in Triton's own signature, and by size in the driver's. Numbers are
    encoded as the signature's types, and have to fit them.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        args: Mapping[str, Any],
        pointers: Mapping[str, int],
        device: int,
    ) -> None:
        library, metadata = _driver(), kernel.metadata
        if library is None or metadata.target.backend != "cuda":
            raise ValueError("not a kernel of one NVIDIA GPU")
        if metadata.global_scratch_size or metadata.profile_scratch_size or metadata.launch_cooperative_grid:
            raise ValueError("the kernel needs scratch memory or a cooperative grid")
        self._launch, self._replace = library.cuLaunchKernelEx, library.cuTensorMapReplaceAddress
        self._enter, self._context = library.cuCtxSetCurrent, _context_of(device)
        self._enter(self._context)  # a thread that has not used the GPU yet has no context
        self._kernel, self._lock = kernel, threading.Lock()
        function = loaded(kernel, metadata.shared).function
        self._buffers = (ctypes.c_uint64 * len(pointers))(*pointers.values())
        self._maps: list[tuple[_TensorMap, int]] = []
        self._values: list[Any] = []
        addresses, sizes = self._laid_out(kernel, args, pointers)
        taken = _parameters(library, kernel, function)
        if taken != sizes:  # this Triton passes others
            raise ValueError(f"the kernel takes parameters of {taken} bytes, not of {sizes}")
        self._parameters = (ctypes.c_void_p * len(addresses))(*addresses)
        self._attributes = _attributes(metadata)
        block, attributes = (32 * metadata.num_warps, 1, 1), ctypes.addressof(self._attributes)
        grid = grid[0] * metadata.num_ctas, *grid[1:]  # of CTAs, not of clusters
        self._config = _Config(grid, block, metadata.shared, 0, attributes, len(self._attributes))
        self._calls = (ctypes.addressof(self._config), function, ctypes.addressof(self._parameters), None)

    def _laid_out(
        self, kernel: Any, args: Mapping[str, Any], pointers: Mapping[str, int]
    ) -> tuple[list[int], list[int]]:
        signature = kernel.src.signature
        if [*signature] != [*args]:
            raise ValueError(f"the kernel's parameters are {', '.join(signature)}, not {', '.join(args)}")
        places = {name: index for index, name in enumerate(pointers)}
        metas = iter(kernel.metadata.tensordesc_meta or ())
        addresses: list[int] = []
        sizes: list[int] = []

        def put(value: Any) -> None:
            self._values.append(value)
            addresses.append(ctypes.addressof(value))
            sizes.append(ctypes.sizeof(value))

        for kind, value in _flat(signature.values(), args.values()):
            if isinstance(value, Descriptor):
                tensor_map = _TensorMap(value, next(metas), pointers[value.buffer])
                self._maps.append((tensor_map, places[value.buffer]))
                addresses.append(tensor_map.address)
                sizes.append(128)
                for size in value.shape:
                    put(ctypes.c_int32(size))
                for stride in value.strides:
                    put(ctypes.c_int64(stride))
            elif isinstance(value, Buffer):
                addresses.append(ctypes.addressof(self._buffers) + 8 * places[value.buffer])
                sizes.append(8)
            elif kind[0] == "*" and value is None:
                put(ctypes.c_uint64(0))
            elif kind in _NUMBERS:
                number: Any = _NUMBERS[kind](value)
                if isinstance(value, int) and number.value != value:  # ctypes cuts what does not fit
                    raise ValueError(f"an argument of type {kind} is {value}")
                put(number)
            else:
                raise ValueError(f"an argument of type {kind}")
        put(ctypes.c_uint64(0))  # scratch memory, which this kernel does not need
        put(ctypes.c_uint64(0))
        return addresses, sizes

    def __call__(self, pointers: Sequence[int], stream: int, entered: bool = False) -> None:
        """Launch with the buffers at these addresses. Raises RuntimeError if the driver refuses."""
        self._lock.acquire()  # a `with` takes twice as long
        try:
            self._buffers[:] = pointers  # type: ignore[call-overload]  # any sequence
            code = self._moved(pointers) if self._maps else 0
            if not code:
                self._config.stream = stream
                code = self._launch(*self._calls)
        finally:
            self._lock.release()
        if code and code in _NO_CONTEXT and not entered:  # a thread that has not used this GPU yet
            self._enter(self._context)
            self(pointers, stream, True)
        elif code:
            _checked(code, f"launching {self._kernel.name}")

    def _moved(self, pointers: Sequence[int]) -> int:
        for tensor_map, index in self._maps:
            if tensor_map.pointer != pointers[index]:
                code = int(self._replace(tensor_map.address, pointers[index]))
                if code:
                    return code
                tensor_map.pointer = pointers[index]
        return 0
