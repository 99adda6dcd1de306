"""A GPU that is not here: kernels compile for it, and launches are recorded instead of executed."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from triton.compiler import compiler

from tritile.core.device import Device
from tritile.core.of_triton import driven_by

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


class StandInGpu:
    """Triton's driver for a device. `launches` holds each launch: kernel metadata, grid and all arguments."""

    def __init__(self, device: Device) -> None:
        self.launches: list[SimpleNamespace] = []
        self._target = device.target
        properties = {"max_shared_mem": device.shared_memory}
        self.utils = SimpleNamespace(
            get_device_properties=lambda index: properties,
            # No module: Triton unloads one as the kernel goes, perhaps long after this driver.
            load_binary=lambda name, binary, shared, index: (None, 1, 64, 0, _MOST_THREADS),
        )

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """Return what launches a compiled kernel."""

        def launch(x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
            _packed, _metadata, _enter, _exit, *args = rest
            named = dict(zip(source.fn.arg_names, args, strict=True))
            self.launches.append(SimpleNamespace(grid=(x, y, z), metadata=metadata, args=named))

        return launch

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, index: int | None = None) -> int:
        return 0


@contextlib.contextmanager
def stand_in_gpu(device: Device) -> Iterator[StandInGpu]:
    """Have Triton compile for a device and record launches for a `with`."""
    compiler.max_shared_mem.cache_clear()  # cached by device number
    gpu = StandInGpu(device)
    with driven_by(gpu):
        yield gpu
    compiler.max_shared_mem.cache_clear()
