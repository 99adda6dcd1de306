"""Compile a problem's configs ahead of time, for a GPU that need not be present."""

import functools
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

from tritile.core.call import call_for
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import Tiled
from tritile.errors import TuningError, brief
from tritile.runtime.compiles import asking
from tritile.runtime.launch import compiles_of
from tritile.runtime.offline import Resources, compiling_for, resources


def compiles_for(problem: Tiled, config: Config, device: Device) -> Iterator[Callable[[], Any]]:
    """Yield a function that compiles it for each kernel that a call of `problem` launches with `config`.

    To be called inside `compiling_for(device)`. Each function returns Triton's kernel. Any error, here or in
    a compile, means that the config cannot be used.
    """
    for compiled in compiles_of(call_for(problem), config, device):
        yield functools.partial(_asked, problem.label, str(config), compiled)


def _asked(label: str, config: str, compiled: Callable[[], Any]) -> Any:
    with asking(label, config):
        return compiled()


def compiled_for(problem: Tiled, config: Config, device: Device) -> Any:
    """Return Triton's compiled kernel of `config` for `problem` on `device`, which need not be present.

    If a call launches several kernels, return the one that computes. Not for use while another thread
    launches kernels: Triton's driver is a global. Raises TuningError, with the first line of the reason,
    where the compiler refuses.
    """
    with compiling_for(device):
        try:
            return [compiled() for compiled in compiles_for(problem, config, device)][-1]
        except Exception as error:  # a compiler may raise anything, and all of it means "refused"
            raise TuningError(f"{config} does not compile for {device.name}: {brief(error)}") from error


def compile_resources(problem: Tiled, config: Config, device: Device) -> Resources:
    kernel = compiled_for(problem, config, device)
    try:
        return resources(kernel)
    except (OSError, subprocess.SubprocessError) as error:
        raise TuningError(f"the resources of {config} cannot be read: {brief(error)}") from error
