"""Send a launch to another process: the kernel, its arguments, and the memory they point to.

Kernels are sent by value, with the globals that Triton reads when it compiles them. cloudpickle does the same
for functions that the other process cannot import by name, such as those of a script. Memory goes through a
file, so that the process that replaces a killed one can read it again.
"""

import ast
import functools
import io
import linecache
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Final

import cloudpickle
import numpy as np
import torch
import triton.language as tl

from tritile.core.source import is_of_library
from tritile.core.triton_private import JITCallable, JITFunction, naming_of
from tritile.errors import GpuTakenError, UnsupportedError, brief

GUARD: Final = 4096  # bytes before and after each block, which no kernel may write
# In host memory. Larger, as an interpreted kernel that goes beyond may crash the process.
HOST_GUARD: Final = 1 << 20
_ALIGNMENT: Final = 512  # bytes: that of torch's allocator
# Byte patterns of guards.
_PATTERN: Final = 0xFF  # NaN as a float, -1 as an integer
NUMBERS: Final = 0xBC  # small negative floats: adding to them changes them, as it does not change NaN
HUGE: Final = 0x7B  # large floats; negative ones with the highest bit set
_Storage = tuple[torch.Tensor, int, int]  # one of its tensors, the first byte in use, and the end
_OPTIONS: Final = (
    "version", "do_not_specialize", "do_not_specialize_on_alignment", "debug", "noinline", "launch_metadata"
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: the number of its storage, `offset` in bytes, strides in elements."""

    storage: int
    offset: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def end(self) -> int:
        if 0 in self.shape:
            return self.offset
        steps = sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))
        return self.offset + (1 + steps) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True)
class Block:
    """The part of a storage that tensors use: `size` bytes from byte `start` on."""

    start: int
    size: int


@dataclass(frozen=True)
class Shipment:
    """A packed value: the pickle, its blocks of memory, and the file with their contents."""

    data: bytes = b""
    blocks: tuple[Block, ...] = ()
    file: str = ""

    @property
    def bytes(self) -> int:
        return sum(block.size for block in self.blocks)


@functools.lru_cache(maxsize=64)
def _rebuilt(data: bytes) -> Any:
    """Jit a received function, once per process: copies of a call share its compiled kernels.

    Triton reads source through linecache. There it finds the source from when the function was first jitted,
    as the file may have changed since. Raises UnsupportedError if Triton reads different source.
    """
    kind, function, options, source, lines, named = pickle.loads(data)
    function.__globals__.update(named)
    file = function.__code__.co_filename
    before = linecache.cache.get(file)
    linecache.cache[file] = (sum(map(len, lines)), None, lines, file)  # None: never checked against the file
    try:
        kernel = kind(function, **options)
    finally:
        linecache.cache.pop(file)
        if before is not None:
            linecache.cache[file] = before
    if kernel.src != source:
        raise UnsupportedError(f"the source of {function.__qualname__} is not the one that was jitted")
    return kernel


_Path = tuple[str, ...]


def _paths(tree: ast.AST) -> Iterator[_Path]:
    """Yield each name that the source reads with its attributes: `a.b.c` as ("a", "b", "c")."""
    attributes: list[str] = []
    node = tree
    while isinstance(node, ast.Attribute):
        attributes.insert(0, node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        for child in ast.iter_child_nodes(node):
            yield from _paths(child)
    elif isinstance(node.ctx, ast.Load):
        yield (node.id, *attributes)


def _globals_of(value: JITFunction) -> dict[str, Any]:
    """Return the globals that Triton looks up when it compiles a kernel, by name.

    Triton works from the source, not the bytecode: it also evaluates defaults and annotations of locals, and
    reads a constexpr or dtype from the globals if the local of that name is not set yet. Any other local
    hides the global.
    """
    (function,) = ast.parse(value.src).body
    assert isinstance(function, ast.FunctionDef)
    signature = set(_paths(function.args))
    available = value.fn.__globals__
    hidden = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    hidden |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    hidden -= {name for name in hidden if isinstance(available.get(name), tl.constexpr | tl.dtype)}
    read = signature | {path for path in _paths(function) if path[0] not in hidden}
    names = sorted({path[0] for path in read} & available.keys())
    return {name: _reduced(available[name], _attributes_of(name, read)) for name in names}


def _attributes_of(name: str, paths: Iterable[_Path]) -> set[_Path]:
    return {path[1:] for path in paths if path[0] == name}


@dataclass(frozen=True)
class _ReducedModule:
    """A module reduced to what a kernel reads of it, as the other process may have another one or none."""

    name: str
    values: dict[str, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return _module, (self.name, self.values)


def _module(name: str, values: dict[str, Any]) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(values)
    return module


def _reduced(value: Any, paths: set[_Path]) -> Any:
    """Return what to send of a value: of a module the attributes in `paths`, anything else whole."""
    if not isinstance(value, ModuleType) or is_of_library(value) or () in paths:
        return value
    absent = object()
    values = {name: getattr(value, name, absent) for name in sorted({path[0] for path in paths})}
    sent = {n: _reduced(v, _attributes_of(n, paths)) for n, v in values.items() if v is not absent}
    return _ReducedModule(value.__name__, sent)


def _without_globals(function: Any) -> Any:
    """Return a copy without globals of a function that Triton compiles and nobody runs."""
    copy = FunctionType(function.__code__, {}, function.__name__, function.__defaults__, function.__closure__)
    for name in ("__kwdefaults__", "__annotations__", "__module__", "__qualname__", "__doc__"):
        setattr(copy, name, getattr(function, name))
    vars(copy).update(vars(function))
    return copy


class _KernelPacker(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles jitted functions by value: the other process may import another version of their module."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, JITCallable):
            return super().reducer_override(value)
        if value.__module__.partition(".")[0] == "triton":
            return value.__qualname__  # imported by name: all processes have the same Triton
        options = {name: getattr(value, name) for name in _OPTIONS if hasattr(value, name)}
        function, named = value.fn, dict[str, Any]()
        # Under triton.constexpr_function a function runs in Python, and cloudpickle finds what it reads.
        if isinstance(value, JITFunction):
            options["repr"] = naming_of(value)
            function, named = _without_globals(function), _globals_of(value)
        lines = ["\n"] * (value.starting_line_number - 1) + value.raw_src
        stream = io.BytesIO()
        whole = (type(value), function, options, value.src, lines, named)
        _KernelPacker(stream, protocol=5).dump(whole)
        return _rebuilt, (stream.getvalue(),)


class _Packer(_KernelPacker):
    def __init__(self, file: io.BytesIO, host_too: bool) -> None:
        super().__init__(file, protocol=5)
        self._host_too = host_too
        self.storages: dict[int, _Storage] = {}  # by address

    def persistent_id(self, value: Any) -> Place | None:
        if not isinstance(value, torch.Tensor):
            return None
        if value.device.type == "cpu" and not self._host_too:
            if value.is_pinned():
                raise UnsupportedError("a tensor in pinned memory belongs to this process alone")
            return None
        if value.layout != torch.strided or type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise UnsupportedError(f"a {type(value).__name__} has no plain memory to send")
        address, size = value.untyped_storage().data_ptr(), value.element_size()
        number = list(self.storages).index(address) if address in self.storages else len(self.storages)
        dtype = str(value.dtype).removeprefix("torch.")
        place = Place(
            number, int(value.storage_offset()) * size, dtype, tuple(value.shape), tuple(value.stride())
        )
        tensor, first, end = self.storages.get(address, (value, place.offset, place.end))
        self.storages[address] = (tensor, min(first, place.offset), max(end, place.end))
        return place


def pack(value: Any, folder: Path, most_bytes: int, host_too: bool = False) -> Shipment:
    """Pack a value of functions, numbers and GPU tensors; the tensors' memory goes into a file.

    `host_too`: pack tensors in host memory like those on a GPU.

    Raises UnsupportedError, with the reason, for a value that cannot be sent, GpuTakenError for one that
    points to more than `most_bytes`.
    """
    shipment, storages = _pickled(value, host_too)
    if shipment.bytes > most_bytes:
        raise GpuTakenError(f"its tensors take more than {most_bytes} bytes of memory", for_all=False)
    file = folder / "memory.pt"
    try:
        torch.save([_bytes_of(*storage).cpu() for storage in storages], file)
    except (OSError, RuntimeError) as error:
        raise UnsupportedError(f"its memory cannot be written to {folder}: {brief(error)}") from error
    return replace(shipment, file=str(file))


def _pickled(value: Any, host_too: bool) -> tuple[Shipment, list[_Storage]]:
    stream = io.BytesIO()
    packer = _Packer(stream, host_too)
    try:
        packer.dump(value)
    except UnsupportedError:
        raise
    except Exception as error:  # an argument of a class that raises anything as it is packed
        raise UnsupportedError(f"cannot be sent to another process: {brief(error)}") from error
    storages = list(packer.storages.values())
    blocks = tuple(Block(first, end - first) for _, first, end in storages)
    return Shipment(stream.getvalue(), blocks), storages


def _bytes_of(tensor: torch.Tensor, first: int, end: int) -> torch.Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage(), first, (end - first,), (1,))


def guarded(value: Any, pattern: int = _PATTERN, *, device: str = "cpu") -> "tuple[Any, GuardedMemory]":
    """Return a copy of a value with its tensors on a device, and their memory, with guards around each block.

    Raises UnsupportedError for a value that `pack` refuses.
    """
    shipment, storages = _pickled(value, host_too=True)
    memory = GuardedMemory(shipment.blocks, [_bytes_of(*storage) for storage in storages], device, pattern)
    return unpack(shipment, memory.tensor), memory


def duplicate(value: Any, most_bytes: int) -> Any:
    """Return a copy of a value with its GPU tensors copied, in the order of the current stream.

    Raises like `pack`.
    """
    shipment, storages = _pickled(value, host_too=False)
    if shipment.bytes > most_bytes:
        raise GpuTakenError(f"its tensors take more than {most_bytes} bytes of memory", for_all=False)
    wholes = []
    for block, storage in zip(shipment.blocks, storages, strict=True):
        ahead = block.start % _ALIGNMENT
        whole = torch.empty(ahead + block.size, dtype=torch.uint8, device=storage[0].device)
        whole[ahead:] = _bytes_of(*storage)
        wholes.append(whole)

    def tensor_of(place: Place) -> torch.Tensor:
        block, whole = shipment.blocks[place.storage], wholes[place.storage]
        dtype = getattr(torch, place.dtype)
        start = (block.start % _ALIGNMENT + place.offset - block.start) // dtype.itemsize
        tensor = torch.empty(0, dtype=dtype, device=whole.device)
        return tensor.set_(whole.untyped_storage(), start, place.shape, place.strides)

    return unpack(shipment, tensor_of)


class _Unpacker(pickle.Unpickler):
    def __init__(self, data: bytes, tensor_of: Callable[[Place], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensor_of = tensor_of

    def persistent_load(self, place: Any) -> Any:
        return self._tensor_of(place)


def unpack(shipment: Shipment, tensor_of: Callable[[Place], Any]) -> Any:
    return _Unpacker(shipment.data, tensor_of).load()


class StandIn:
    """A placeholder for a tensor that is never read: it has the sizes, dtype and alignment of the address."""

    def __init__(self, place: Place) -> None:
        self._like = torch.empty_strided(
            place.shape, place.strides, dtype=getattr(torch, place.dtype), device="meta"
        )
        self.dtype, self._address = self._like.dtype, (1 << 20) + place.offset % _ALIGNMENT

    def data_ptr(self) -> int:
        """Return an address with the tensor's alignment and no memory behind it."""
        return self._address

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_like"], name)


def described(value: Any) -> Shipment:
    """Pack a value without the memory of its tensors, which may be meta tensors, to compile it elsewhere.

    `unpack(shipment, StandIn)` reads it. Raises UnsupportedError like `pack`.
    """
    return _pickled(value, host_too=True)[0]


def stood_in(value: Any) -> Any:
    """Return a copy of a value with a `StandIn` for each tensor. Raises UnsupportedError like `pack`."""
    return unpack(described(value), StandIn)


def are_mapped(addresses: np.ndarray, is_written: bool = False) -> np.ndarray:
    """True for each address that this process may access; for all if the system has no /proc/self/maps."""
    try:
        lines = [line.split(maxsplit=2)[:2] for line in Path("/proc/self/maps").read_text().splitlines()]
    except OSError:
        return np.ones(addresses.shape, dtype=bool)
    spans = [span for span, mode in lines if ("w" if is_written else "r") in mode]
    ends = [int(end, 16) for span in spans for end in span.split("-")]
    return np.searchsorted(np.array(ends, dtype=np.uint64), addresses, side="right") % 2 == 1


class GuardedMemory:
    """The blocks of a call on a device, aligned as in the call, with a guard before and after each.

    Guards of different blocks differ, to expose a kernel that copies beyond the end of one block into
    another's guard.
    """

    def __init__(
        self, blocks: Sequence[Block], contents: Sequence[torch.Tensor], device: str = "cuda",
        pattern: int = _PATTERN,
    ) -> None:  # fmt: skip
        self._pattern, self._parts = pattern, list[tuple[Block, int, torch.Tensor]]()
        guard = HOST_GUARD if device == "cpu" else GUARD
        for block, content in zip(blocks, contents, strict=True):
            ahead = guard + block.start % _ALIGNMENT
            buffer = torch.empty(ahead + block.size + guard, dtype=torch.uint8, device=device)
            buffer[ahead : ahead + block.size] = content
            self._parts.append((block, ahead, buffer))
        for region, content in self._guards():
            region.copy_(content)

    def _guards(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each guard, and the contents that it has unless a kernel wrote to it."""
        for i, (block, ahead, buffer) in enumerate(self._parts):
            # Two alternating bytes; the lower one differs between blocks, in 16 values that leave every float
            # NaN. A block that ends at an odd byte has elements of one byte, where both bytes may differ.
            low = self._pattern - i * 7 % 16  # steps of 7, so that no guard is the sum of two others
            both = buffer.new_tensor([low, low if block.size % 2 else self._pattern])
            for start, guard in ((0, buffer[:ahead]), (ahead + block.size, buffer[ahead + block.size :])):
                yield guard, both.roll(start).repeat(len(guard) // 2 + 1)[: len(guard)]

    def contents(self) -> list[torch.Tensor]:
        return [buffer[ahead : ahead + block.size] for block, ahead, buffer in self._parts]

    def tensor(self, place: Place) -> torch.Tensor:
        block, ahead, buffer = self._parts[place.storage]
        dtype = getattr(torch, place.dtype)
        start = (ahead + place.offset - block.start) // dtype.itemsize
        whole = torch.empty(0, dtype=dtype, device=buffer.device)
        return whole.set_(buffer.untyped_storage(), start, place.shape, place.strides)

    def covered(self, tensors: Iterable[torch.Tensor]) -> list[np.ndarray]:
        """Return a mask of each block, true for bytes of elements and false for gaps between rows."""
        masks = [torch.zeros(block.size, dtype=torch.bool, device="cpu") for block, _, _ in self._parts]
        for tensor in tensors:
            size, at = tensor.itemsize, tensor.data_ptr()
            for (block, ahead, buffer), mask in zip(self._parts, masks, strict=True):
                first = at - buffer.data_ptr() - ahead
                if tensor.numel() and 0 <= first < block.size:
                    steps = [size * step for step in tensor.stride()]
                    mask.as_strided((*tensor.shape, size), (*steps, 1), first).fill_(True)
        return [mask.numpy() for mask in masks]

    def stray(
        self, addresses: np.ndarray, size: int, is_written: bool, covered: Sequence[np.ndarray], is_free: bool
    ) -> int | None:
        """Return the first address, of elements of `size` bytes, that is outside the blocks, if any.

        A write must be to `covered` bytes. If `is_free`, the kernel may use other memory of the process.
        """
        is_right = np.zeros(addresses.shape, dtype=bool)
        is_near = np.zeros(addresses.shape, dtype=bool)
        for (block, ahead, buffer), mask in zip(self._parts, covered, strict=True):
            first, past = np.uint64(buffer.data_ptr()), np.uint64(buffer.data_ptr() + len(buffer) - size)
            is_near |= (addresses >= first) & (addresses <= past)
            if block.size >= size:
                start = first + np.uint64(ahead)
                inside = (addresses >= start) & (addresses <= start + np.uint64(block.size - size))
                if is_written:
                    inside[inside] = mask[(addresses[inside] - start).astype(np.int64)]
                is_right |= inside
        outside, near = addresses[~is_right], is_near[~is_right]
        if outside.size and is_free:
            outside = outside[near | ~are_mapped(outside, is_written)]
        return int(outside[0]) if outside.size else None

    def is_intact(self) -> bool:
        return all(torch.equal(guard, content) for guard, content in self._guards())
