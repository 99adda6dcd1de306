"""GPUs that are not here: Triton compiles for them, and of a launch all but the last call into C is its own.

Tensors are torch's own, on the device "meta": they have dtypes, shapes and gradients but no memory, and say
that they are on GPU 0.
"""

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from triton.compiler import compiler

from tritile.core import device as devices
from tritile.core.device import Device, target_device
from tritile.core.triton_private import driven_by

_MOST_THREADS = 1024  # of a block


class OnGpu(torch.Tensor):
    """A tensor without memory that says it is on GPU 0."""

    is_cuda = True
    device = torch.device("cuda", 0)
    __torch_function__ = torch._C._disabled_torch_function_impl

    def get_device(self) -> int:
        return 0


def on_gpu(*shape: int, dtype: torch.dtype = torch.float32) -> OnGpu:
    return torch.Tensor._make_subclass(OnGpu, torch.empty(*shape, dtype=dtype, device="meta"))


@contextlib.contextmanager
def recording(device: Device, *, records: bool = True) -> Iterator[SimpleNamespace]:
    """Have Triton compile for a device; its driver's `launches` are of (grid, metadata, args by name)."""
    launches: list[SimpleNamespace] = []

    def launcher(source: Any, metadata: Any) -> Any:
        def launch(x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
            args = dict(zip(source.fn.arg_names, rest[4:], strict=True))
            launches.append(SimpleNamespace(grid=(x, y, z), metadata=metadata, args=args))

        return launch if records else lambda *args: None

    driver = SimpleNamespace(
        launches=launches,
        launcher_cls=launcher,
        get_current_target=lambda: device.target,
        get_current_device=lambda: 0,
        get_current_stream=lambda index=None: 0,
        utils=SimpleNamespace(
            get_device_properties=lambda index: {"max_shared_mem": device.shared_memory},
            # Function, registers, spills, threads; no module, which Triton unloads as the kernel goes.
            load_binary=lambda *args: (None, 1, 32, 0, _MOST_THREADS),
        ),
    )
    compiler.max_shared_mem.cache_clear()  # Triton keeps it by the device's number
    with driven_by(driver):
        yield driver
    compiler.max_shared_mem.cache_clear()


@contextlib.contextmanager
def mock_gpu(target: str = "sm_90") -> Iterator[Device]:
    """Have torch, Triton and tritile act, inside the `with`, as if their only GPU were this one."""
    device = target_device(target)
    answers: list[tuple[Any, str, Any]] = [
        (torch.cuda, "is_available", True),
        (torch.cuda, "current_device", 0),
        (torch.cuda, "is_current_stream_capturing", False),
        (torch.cuda, "synchronize", None),
        (torch.Tensor, "get_device", 0),
        (devices, "gpu", device),
    ]
    # Aliases of functions that a build of torch for CPUs does not have.
    answers += [
        (module, alias, 0)
        for name, module in list(sys.modules.items())
        for alias in ("current_gpu", "current_raw_stream")
        if name.startswith("tritile.") and vars(module).get(alias, ...) is None
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(recording(device, records=False))
        stack.enter_context(mock.patch.object(torch.Tensor, "is_cuda", property(lambda _: True)))
        for owner, name, answer in answers:  # plain functions: a Mock takes longer than what is measured
            stack.enter_context(mock.patch.object(owner, name, lambda *_, answer=answer: answer))
        yield device


def event_class(here: Any) -> type[Any]:
    """Return a simulated GPU's CUDA event: `here` has its `clock`, how many it `launched`, and its `lag`."""

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            pass

        def record(self, stream: object = None) -> None:
            self.at, self.number = here.clock, here.launched

        def query(self) -> bool:
            return bool(here.launched >= self.number + here.lag)

        def elapsed_time(self, other: Any) -> float:
            assert other.query()  # else it raises
            return float((other.at - self.at) / 1e3)

        def synchronize(self) -> None:
            pass

    return Event
