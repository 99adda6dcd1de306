"""Compile for a GPU that need not be installed, and read the resources of a compiled kernel.

Compiling goes through Triton's own launch path with a stand-in for its driver, so that the result is, to the
byte, what a call on that GPU would ask for.
"""

import contextlib
import io
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton

from tritile.core.device import Device
from tritile.core.triton_private import assembler, driven_by
from tritile.errors import TuningError


@contextlib.contextmanager
def compiling_for(device: Device) -> Iterator[None]:
    """Have Triton compile for `device`, which need not be present, inside the `with`.

    What this process compiled before for the same target is not looked up on disk again. Not for use while
    another thread launches kernels: Triton's driver is a global. Raises TuningError if TRITON_INTERPRET is
    set.
    """
    if triton.knobs.runtime.interpret:
        raise TuningError("TRITON_INTERPRET is set, so nothing can be compiled: unset it")
    # A driver that has no device to load on. Triton keeps what it compiles by the device that it names.
    target = device.target
    stand_in = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: target,
        get_current_stream=lambda device=None: 0,
    )
    # If the assembler refuses, Triton prints the whole assembly: the error says enough.
    with driven_by(stand_in), contextlib.redirect_stdout(io.StringIO()):
        yield


# --- What a compiled kernel takes ---


@dataclass(frozen=True)
class Resources:
    """Hold registers and spilled bytes of each thread, and bytes of shared memory, of a compiled kernel."""

    registers: int
    spills: int
    shared: int

    def excess(self, device: Device) -> str | None:
        """Say what the device does not have enough of, or what would be far too slow; None if it fits."""
        if self.shared > device.shared_memory:
            return f"compiled to {self.shared} bytes of shared memory, of {device.shared_memory}"
        if self.spills > 0:
            return f"compiled to {self.spills} bytes of spilled registers a thread"
        return None


def check_fits(kernel: Any, device: Device) -> None:
    """Raise TuningError if a kernel takes more shared memory than a block may have."""
    excess = Resources(0, 0, int(kernel.metadata.shared)).excess(device)
    if excess is not None:
        raise TuningError(excess)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


def _assembled(kernel: Any) -> str:
    arch = kernel.metadata.target.arch
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(kernel.asm["ptx"])
        name = f"sm_{arch}{'a' if arch >= 90 else ''}"
        command = [assembler(arch).path, "-v", f"--gpu-name={name}", str(source), "-o", str(output)]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stderr


def resources(kernel: Any) -> Resources:
    """Return what `kernel` takes, read from its binary; no GPU is needed.

    Sources: `cuobjdump` for registers, `ptxas -v` for spills if a stack is in use (both come with Triton),
    and the metadata that LLVM writes into AMD code. Raises OSError or subprocess.SubprocessError if a tool
    cannot be run.
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
