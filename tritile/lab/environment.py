"""Where and when results were measured: GPU, driver, versions, commit and time."""

import contextlib
import functools
import os
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Final

import torch
import triton

from tritile.core.device import Device, current_gpu
from tritile.core.forgetting import forget

ENV_FIELDS: Final = ("gpu", "torch", "triton", "driver", "tritile", "time")


def output_of(*command: str) -> str:
    """Return what a command prints, "" where it fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, timeout=30, check=True, text=True)
        return done.stdout.strip()
    return ""


@functools.cache
def _driver() -> str:
    """Return the GPU driver's version, "" where it is unknown."""
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


@contextlib.contextmanager
def environ(**values: str | None) -> Iterator[None]:
    """Set variables of the environment, or unset those of None, in a `with`; forget plans at both ends."""
    before = dict(os.environ)
    try:
        for name, value in values.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})
        forget()
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
            os.environ.update({name: before[name]} if name in before else {})
        forget()
