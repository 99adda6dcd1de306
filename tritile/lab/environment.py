"""Where and when results were measured: GPU, driver, versions, commit and time."""

import contextlib
import functools
import os
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch
import triton

from tritile.core.device import Device, current_gpu


def output_of(*command: str) -> str:
    """Return what a command prints, "" if it fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, timeout=30, check=True, text=True)
        return done.stdout.strip()
    return ""


@functools.cache
def _driver() -> str:
    """Return the GPU driver's version, "" if it is unknown."""
    if torch.version.hip is not None:
        amd = Path("/sys/module/amdgpu/version")
        return amd.read_text().strip() if amd.exists() else ""
    return output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]


@functools.cache
def _version() -> str:
    """Return `TRITILE_COMMIT`, else the checkout's commit as git describes it, else the package's version."""
    if os.environ.get("TRITILE_COMMIT"):
        return os.environ["TRITILE_COMMIT"]  # names the commit of a copy without git history
    root, commit = Path(__file__).parents[2], ""
    # Only in tritile's own checkout: installed in another project's folder, git would name that one.
    if (root / ".git").exists():
        commit = output_of("git", "-C", str(root), "describe", "--always", "--dirty", "--tags")
    try:
        return commit or metadata.version("tritile")
    except metadata.PackageNotFoundError:
        return "unknown"


def environment(gpu: Device | None = None) -> dict[str, str]:
    """Return a result's `env`: where and when it was measured. `gpu` is the current one by default.

    Unknown versions and the name of a missing GPU are "". The time is UTC.
    """
    gpu = gpu or current_gpu()
    return {
        "gpu": gpu.name if gpu else "",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "driver": _driver() if gpu else "",
        "tritile": _version(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
