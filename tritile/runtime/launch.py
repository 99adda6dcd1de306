"""Compile the kernels of a `Work` and launch them.

`bound` compiles what a work launches and returns a `Launch`, which runs the compiled kernels with nothing
left to decide: calling it costs a stream look-up and the driver's launch.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from tritile.core import device as devices
from tritile.core.call import Memory
from tritile.core.threads import import_late, interpreter_lock
from tritile.core.torch_private import current_gpu, current_raw_stream
from tritile.errors import NotCompiledError, TuningError, brief, is_bug
from tritile.runtime.compiles import OPTIONS
from tritile.runtime.counters import counters_of
from tritile.runtime.native import TFLOAT32, NativeLaunch, listened, loaded
from tritile.runtime.work import ALIGNMENT, COUNTERS, Buffer, Descriptor, Step, Work, Workspace, laid_out

_RUNTIME: Final = triton.knobs.runtime


@dataclass(frozen=True)
class Pointer:
    """An address and a dtype, which Triton accepts in place of a tensor."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def pointers_to(buffers: Mapping[str, Memory]) -> dict[str, Pointer]:
    return {name: Pointer(memory.address, getattr(torch, memory.dtype)) for name, memory in buffers.items()}


@functools.cache
def _gluon_descriptor() -> Callable[..., Any]:
    gluon = import_late("triton.experimental.gluon.nvidia.hopper")  # takes 50 ms
    return gluon.TensorDescriptor


def _bound(value: Any, buffers: Mapping[str, Any]) -> Any:
    if isinstance(value, Buffer):
        return buffers[value.buffer]
    if isinstance(value, Descriptor):
        base, block = buffers[value.buffer], list(value.block)
        if value.layout is not None:
            return _gluon_descriptor()(base, list(value.shape), list(value.strides), block, value.layout)
        return TensorDescriptor(base, list(value.shape), list(value.strides), block)
    return tuple(_bound(item, buffers) for item in value) if type(value) is tuple else value


def _addressed(arg: Any) -> Any:
    if type(arg) is tuple:
        return tuple(map(_addressed, arg))
    return arg.address if isinstance(arg, Pointer) else arg


def _workspaces(work: Work, make: Callable[[Workspace], Any]) -> dict[str, Any]:
    counters = {COUNTERS: Workspace("int64", work.counters)} if work.counters else {}
    return {name: make(section) for name, section in {**work.scratch, **counters}.items()}


def _compiled(step: Step, buffers: Mapping[str, Any]) -> Any:
    args = {name: _bound(value, buffers) for name, value in step.args.items()}
    options = {name: value for name, value in step.options.items() if value or name != "launch_pdl"}
    return step.kernel.warmup(**args, grid=step.grid, **OPTIONS, **options)


def compiles_of(work: Work, memory: Mapping[str, Memory]) -> Iterator[Callable[[], Any]]:
    """Yield, for each kernel of a work on these buffers, a function that compiles it.

    It compiles for the current target and returns Triton's kernel; nothing runs. The main kernel comes last.
    """
    buffers = pointers_to(memory) | _workspaces(work, lambda s: Pointer(0, getattr(torch, s.dtype)))
    main = work.steps[work.main]
    others = [step for step in work.steps if step is not main]
    yield from (functools.partial(_compiled, step, buffers) for step in (*others, main))


class _TritonLaunch:
    """Launch a compiled kernel by Triton's own launcher: on any GPU, and if a profiler listens."""

    def __init__(self, kernel: Any, step: Step, dtypes: Mapping[str, torch.dtype]) -> None:
        self._kernel, self._step, self._dtypes = kernel, step, dtypes
        descriptors = [value for value in step.values if isinstance(value, Descriptor)]
        metadata = getattr(kernel.metadata, "tensordesc_meta", None) or ()
        for meta, descriptor in zip(metadata, descriptors, strict=False):
            if descriptor.rounded:
                meta["elem_type"] = TFLOAT32  # Triton's launcher reads it at each launch

    def __call__(self, pointers: Sequence[int], stream: int) -> None:
        pairs = zip(self._dtypes.items(), pointers, strict=True)
        buffers = {name: Pointer(pointer, dtype) for (name, dtype), pointer in pairs}
        args = [_addressed(_bound(value, buffers)) for value in self._step.values]
        self._kernel[self._step.grid](*args, stream=stream)


def _listened() -> bool:
    """True if a profiler listens to launches, which only Triton's own launcher reports."""
    enter, leave = _RUNTIME.launch_enter_hook, _RUNTIME.launch_exit_hook
    try:
        return bool(enter.calls or leave.calls)
    except AttributeError:  # no chains
        return listened(enter) or listened(leave)


class Launch:
    """The compiled kernels of a call, with all arguments but the addresses of its buffers."""

    def __init__(self, work: Work, kernels: Sequence[Any], tensors: Mapping[str, Any], device: int) -> None:
        self.kernel, self.device, self._counted = kernels[work.main], device, work.counters
        dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        dtypes |= _workspaces(work, lambda section: getattr(torch, section.dtype))
        self._offsets, self._bytes = laid_out(work.scratch.values())
        self._triton = [
            _TritonLaunch(kernel, step, dtypes) for kernel, step in zip(kernels, work.steps, strict=True)
        ]
        addresses = [tensor.data_ptr() for tensor in tensors.values()]
        placeholder = addresses[0] // ALIGNMENT * ALIGNMENT  # any valid address
        pointers = dict(zip(dtypes, addresses + [placeholder] * (len(dtypes) - len(addresses)), strict=True))
        try:
            self._steps: list[Any] = [
                NativeLaunch(kernel, step.grid, step.named, pointers, device)
                for kernel, step in zip(kernels, work.steps, strict=True)
            ]
        except ValueError:
            self._steps = list(self._triton)

    def __call__(self, *tensors: torch.Tensor) -> None:
        self.at([tensor.data_ptr() for tensor in tensors])

    def at(self, pointers: Sequence[int]) -> None:
        """Run as a call does, on tensors at these addresses."""
        device = self.device
        if current_gpu() != device:
            with torch.cuda.device(device):
                return self.at(pointers)
        stream = current_raw_stream(device)
        if self._offsets:
            # Once this returns the memory may be reused, but only by later work on this stream.
            memory = torch.empty(self._bytes, dtype=torch.uint8, device=torch.device("cuda", device))
            start = memory.data_ptr()
            pointers = [*pointers, *(start + offset for offset in self._offsets)]
        if self._counted:
            return self._run_counted(pointers, stream)
        for step in self._triton if _listened() else self._steps:
            step(pointers, stream)
        return None

    def _run_counted(self, pointers: Sequence[int], stream: int) -> None:
        counters = counters_of(self.device)
        address, launched = counters.take(self._counted, stream)
        pointers = [*pointers, address]
        try:
            for step in self._triton if _listened() else self._steps:
                step(pointers, stream)
        except BaseException:  # an earlier kernel's failure, too, is reported at the next launch
            counters.forget()
            raise
        if launched is not None:
            launched.record()


@dataclass(frozen=True, slots=True)
class SplitLaunch:
    """Launches that share the batch of one call, each with the offsets of its operands in bytes."""

    pieces: tuple[tuple[Launch, tuple[int, ...]], ...]

    @property
    def kernel(self) -> Any:
        return self.pieces[0][0].kernel

    def __call__(self, *tensors: torch.Tensor) -> None:
        self.at([tensor.data_ptr() for tensor in tensors])

    def at(self, pointers: Sequence[int]) -> None:
        """Run as a call does, on tensors at these addresses."""
        for launch, offsets in self.pieces:
            launch.at([pointer + by for pointer, by in zip(pointers, offsets, strict=True)])


def bound(work: Work, tensors: Mapping[str, Any], index: int, fault: str) -> Launch:
    """Compile and load a work for tensors, named by buffer, and return its launch.

    Raises TuningError, which begins with `fault`, if a kernel does not compile or needs more than the GPU
    has, and NotCompiledError if compiles are refused. A programming error is raised as it is.
    """
    device = devices.gpu(index)
    with torch.cuda.device(index):
        try:
            if work.counters:
                counters_of(index).make_ready()
            buffers = {**tensors, **_workspaces(work, lambda s: Pointer(0, getattr(torch, s.dtype)))}
            kernels = [_compiled(step, buffers) for step in work.steps]
            for kernel in kernels:  # so that a kernel that does not fit the GPU fails here
                loaded(kernel, device.shared_memory)
            return Launch(work, kernels, tensors, index)
        except NotCompiledError:
            raise
        except Exception as error:  # compilers and drivers raise many kinds, for this config only
            if is_bug(error):
                raise
            raise TuningError(f"{fault}: {brief(error)}") from error


def interpret(work: Work, memory: Sequence[Memory]) -> None:
    """Run a work in Triton's interpreter, one at a time: in a process with TRITON_INTERPRET=1."""
    scratch = _workspaces(
        work, lambda s: torch.zeros(s.elements, dtype=getattr(torch, s.dtype), device="cpu")
    )
    buffers = {operand.buffer: operand.tensor for operand in memory} | scratch
    for step in work.steps:
        args = {name: _bound(value, buffers) for name, value in step.args.items()}
        with interpreter_lock:
            step.kernel[step.grid](**args)
