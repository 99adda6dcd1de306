"""A GPU that is not there: Triton compiles for it and launches nothing, torch says that it is present.

Tensors are torch's own, on the device "meta": they have dtypes, shapes and gradients but no memory, and say
that they are on GPU 0. Of a launch all but the last call into C is Triton's own.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from triton.compiler import compiler

from tritile.core import device as devices
from tritile.core.device import Device, target_device
from tritile.core.of_triton import driven_by


def _driver(device: Device) -> Any:
    return SimpleNamespace(
        get_current_target=lambda: device.target,
        get_current_device=lambda: 0,
        get_current_stream=lambda index=None: 0,
        launcher_cls=lambda source, metadata: lambda *args: None,
        utils=SimpleNamespace(
            get_device_properties=lambda index: {"max_shared_mem": device.shared_memory},
            load_binary=lambda *args: (None, 1, 32, 0, 1024),  # module, function, registers, spills, threads
        ),
    )


def _answering(answer: Any) -> Callable[..., Any]:
    return lambda *_: answer


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
    patches = [
        driven_by(_driver(device)),
        mock.patch.object(torch.Tensor, "is_cuda", property(lambda _: True)),
    ]
    # Plain functions: a Mock takes longer than what is measured.
    patches += [mock.patch.object(owner, name, _answering(it)) for owner, name, it in answers]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        compiler.max_shared_mem.cache_clear()  # Triton keeps it by the device's number
        stack.callback(compiler.max_shared_mem.cache_clear)
        yield device
