"""Compiling ahead of time, for a GPU that need not be there, and reading what the result takes.

Compiling goes through Triton's own launch path with a stand-in for the driver, so that what is
compiled here is, to the byte, what a call on that GPU would ask for.
"""

import contextlib
import io
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.driver import driver

from tritile.config import Config
from tritile.device import Device
from tritile.errors import TuningError, brief
from tritile.launch import compile_only
from tritile.problem import Problem
from tritile.views import posed


class _StandInDriver:
    """As much of a Triton driver as compiling asks for: which target, and no device to load on.

    Triton keeps compiled kernels by device, so the target itself stands for the device here.
    """

    def __init__(self, device: Device) -> None:
        self._target = device.target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> Any:
        return self._target

    def get_current_stream(self, device: Any = None) -> int:
        return 0


@contextlib.contextmanager
def _compiling_for(device: Device) -> Iterator[None]:
    before = driver._active
    driver.set_active(_StandInDriver(device))
    try:
        yield
    finally:
        driver._active = before


class _Pointer:
    """Stands for a tensor where only its dtype and the alignment of its address matter."""

    def __init__(self, dtype: str, align: int) -> None:
        self.dtype = getattr(torch, dtype)
        self._address = 4096 + align % 16

    def data_ptr(self) -> int:
        return self._address


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes: registers a thread, bytes spilled a thread, bytes of shared memory."""

    registers: int
    spills: int
    shared: int

    def excess(self, device: Device) -> str | None:
        """What of this the device does not have, or is too slow to live with; None where it fits."""
        if self.shared > device.shared_memory:
            return f"compiled to {self.shared} bytes of shared memory, of {device.shared_memory}"
        if self.spills > 0:
            return f"compiled to {self.spills} bytes of spilled registers a thread"
        return None


def compiled_for(problem: Any, config: Config, device: Device) -> Any:
    """Triton's compiled kernel of `config` for `problem` on `device`, which need not be present.

    Not for use while another thread launches kernels: Triton's driver is a global.
    Raises TuningError where the compiler refuses, with the first line of its reason.
    """
    if triton.knobs.runtime.interpret:
        raise TuningError("TRITON_INTERPRET is set, and nothing compiles: unset it")
    call = posed(problem, lambda dtype, elements: _Pointer(dtype, 0))
    # A refusal of the assembler comes with the whole assembly printed: the error says enough.
    with _compiling_for(device), contextlib.redirect_stdout(io.StringIO()):
        try:
            return compile_only(call, config, device)
        except Exception as error:  # a compiler may raise anything, and all of it means "refused"
            raise TuningError(f"{config} does not compile for {device.name}: {brief(error)}") from error


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


def _assembled(kernel: Any) -> str:
    """What the assembler says of the kernel when asked to be verbose."""
    arch = kernel.metadata.target.arch
    tool = triton.knobs.nvidia.ptxas_blackwell if arch >= 100 else triton.knobs.nvidia.ptxas
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(kernel.asm["ptx"])
        name = f"sm_{arch}{'a' if arch >= 90 else ''}"
        command = [tool.path, "-v", f"--gpu-name={name}", str(source), "-o", str(output)]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stderr


def resources(kernel: Any) -> Resources:
    """What `kernel` takes, read from its binary; no GPU is needed.

    Sources: `cuobjdump` for registers, `ptxas -v` for spills where a stack is in use (both come
    with Triton), and the metadata that LLVM writes into AMD code.
    """
    shared = int(kernel.metadata.shared)
    if kernel.metadata.target.backend == "hip":
        text = kernel.asm["amdgcn"]
        spilled = _number(r"\.vgpr_spill_count:\s+(\d+)", text) * 4
        return Resources(_number(r"\.vgpr_count:\s+(\d+)", text), spilled, shared)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    spills = 0
    if _number(r"STACK:(\d+)", text) > 0:
        verbose = _assembled(kernel)
        spills = _number(r"(\d+) bytes spill stores", verbose) + _number(r"(\d+) bytes spill loads", verbose)
    return Resources(_number(r"REG:(\d+)", text), spills, shared)


def compile_resources(problem: Problem, config: Config, device: Device) -> Resources:
    """Compile and say what the result takes. Raises TuningError where the compiler refuses."""
    kernel = compiled_for(problem, config, device)
    try:
        return resources(kernel)
    except (OSError, subprocess.SubprocessError) as error:
        raise TuningError(f"what {config} takes cannot be read: {brief(error)}") from error
