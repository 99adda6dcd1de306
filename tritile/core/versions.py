"""Name the versions of Triton and torch with which tritile is tested, and warn of newer ones."""

import functools
import warnings
from typing import Final

import torch
import triton
from packaging.version import InvalidVersion, Version

from tritile.errors import UntestedWarning

OLDEST_TRITON: Final = (3, 6)
# The newest Triton of `make test-stacks`, and the newest torch that was tried.
NEWEST: Final = {"triton": (3, 9), "torch": (2, 15)}


@functools.cache
def parsed(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version, (0, 0) for a text that is none."""
    try:
        found = Version(version)
    except InvalidVersion:
        return 0, 0
    return found.major, found.minor


def tested(name: str) -> str:
    """Return the newest version of "triton" or "torch" that was tested, as text."""
    return ".".join(map(str, NEWEST[name]))


def untested(name: str, version: str) -> str:
    """Return a sentence if a version of "triton" or "torch" is newer than the newest tested, else ""."""
    if parsed(version) <= NEWEST[name]:
        return ""
    return f"{name} {version} is newer than {tested(name)}, the newest with which tritile is tested"


@functools.cache
def warn_untested() -> None:
    """Warn with UntestedWarning, once in a process, if Triton or torch is newer than the newest tested."""
    for text in (untested("triton", triton.__version__), untested("torch", torch.__version__)):
        if text:
            warnings.warn(f"{text}: run `tritile doctor` if anything fails", UntestedWarning, stacklevel=3)
