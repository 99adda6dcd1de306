"""Build the C++ dispatch library, `crossing.cpp`, for one version of torch and of Python, and keep it.

It lies in tritile's cache, in a folder that only this user may write to. The first process that needs it
builds it; others wait, so that all use the same one. A process runs without it, and warns once, where there
is no compiler or where others could have written the file.
"""

import functools
import hashlib
import importlib.resources
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sysconfig
import tempfile
import warnings
from pathlib import Path
from typing import Final

import torch
from filelock import FileLock, Timeout

from tritile.core.settings import cache_dir, wants_crossing
from tritile.errors import StoreWarning, UnsupportedError, brief
from tritile.in_torch.crossing import Crossing

_FOLDER: Final = importlib.resources.files("tritile.in_torch")
_SOURCES: Final = tuple(_FOLDER / name for name in ("crossing.cpp", "known.h", "launch.h", "tally.h"))
_TORCH: Final = Path(torch.__file__).parent
_OPTIONS: Final = ("-O2", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden")
_SECONDS: Final = 300  # for the compiler, which takes about 10


def _compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")


def _command(compiler: str, out: Path) -> list[str]:
    headers = _TORCH / "include"
    folders = (headers, headers / "torch/csrc/api/include", sysconfig.get_paths()["include"])
    defined = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    libraries = (f"-L{_TORCH / 'lib'}", "-lc10", "-ltorch_cpu")
    included = [f"-I{folder}" for folder in folders]
    named = shlex.split(compiler)  # "ccache g++" too
    return [*named, *_OPTIONS, defined, *included, str(_SOURCES[0]), *libraries, "-o", str(out)]


@functools.cache
def _name() -> str:
    of_torch = (torch.__version__, torch.version.git_version, torch.compiled_with_cxx11_abi())
    made_for = (*of_torch, sysconfig.get_config_var("SOABI"), platform.machine())
    text = "\n".join((*(source.read_text() for source in _SOURCES), *_OPTIONS, *map(str, made_for)))
    return f"crossing-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"


def path() -> Path:
    """Return the path of the library, which depends on its source, torch, Python and the machine."""
    return cache_dir() / "library" / _name()


def _failed() -> Path:
    """Return the path of the note that this compiler could not build the library, so that nobody retries."""
    compiler = hashlib.sha256((_compiler() or "").encode()).hexdigest()[:8]
    return path().with_suffix(f".{compiler}.failed")


def _distrusted(there: Path) -> str:
    """Return why this library must not be loaded, "" where only this user or root could write it."""
    for file in (there.parent, there):
        try:
            found = file.lstat() if file is there else file.stat()
        except OSError:  # nothing is there, or this user may not look
            continue
        if found.st_uid not in (os.geteuid(), 0):
            return f"{file} belongs to user {found.st_uid}"
        if file is there and not stat.S_ISREG(found.st_mode):
            return f"{file} is not a regular file"
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"others may write to {file}"
    return ""


def build(wait_s: float = _SECONDS) -> Path:
    """Build the library unless it exists; return its path.

    Args:
        wait_s: seconds to wait for another process that is building it.

    Raises:
        UnsupportedError: there is no compiler, the compiler fails, or others may write to the folder.
        OSError: the cache cannot be written.
        filelock.Timeout: another process is still building after `wait_s` seconds.
    """
    there = path()
    there.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # code is loaded from it
    reason = _distrusted(there)
    if reason:
        raise UnsupportedError(f"the C++ library is not built: {reason}")
    with FileLock(there.with_suffix(".lock"), timeout=wait_s):
        if not there.exists():
            with tempfile.TemporaryDirectory(dir=there.parent, prefix="crossing-") as scratch:
                made = Path(scratch, there.name)
                _compile(made)
                made.chmod(0o755)
                made.replace(there)
    return there


def _compile(made: Path) -> None:
    compiler = _compiler()
    if compiler is None:
        raise UnsupportedError("no C++ compiler is found: install g++ or clang++, or name one in CXX")
    command = _command(compiler, made)
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:  # a timeout too: without a note, others retry
        raise UnsupportedError(f"{compiler} could not be run: {brief(error)}") from error
    why = f"exit status {run.returncode} {run.stderr[-2000:]}"
    if run.returncode == 0:
        try:
            Crossing(made)
            return
        except (OSError, AttributeError) as error:
            why = brief(error)
    if run.returncode >= 0:  # negative: it was killed
        _failed().write_text(f"{shlex.join(command)}\n{why}\n")
    raise UnsupportedError(f"{_SOURCES[0].name} could not be compiled: {why}")


# A wrong CXX is a ValueError; NotImplementedError is filelock's where a file system has no locks.
_REFUSALS: Final = (UnsupportedError, OSError, AttributeError, ValueError, NotImplementedError, Timeout)


@functools.cache
def _obtained(there: Path) -> Crossing | None:
    """Load the library, built first where it does not exist; None, with a StoreWarning, where that fails."""
    try:
        if not os.access(there, os.F_OK):
            if os.access(_failed(), os.F_OK):
                raise UnsupportedError(f"{_failed()} says why; remove it to try again")
            build()
        reason = _distrusted(there)
        if not reason:
            return Crossing(there)
    except _REFUSALS as error:
        reason = brief(error)
    cost = "Python decides about every call, which takes some 40 us"
    text = f"use_in_torch runs without its C++ library ({there}), so that {cost}: {reason}"
    warnings.warn(text, StoreWarning, stacklevel=3)
    return None


def state() -> tuple[str, str]:
    """Return the state of the library and what to do about it, "" where there is nothing to do."""
    if not wants_crossing():
        return "not wanted", "TRITILE_CROSSING is 0"
    reason = _distrusted(path())
    if reason:
        return "not loaded", f"{reason}: remove it; only you may write to the one that replaces it"
    if os.access(path(), os.F_OK):
        return "built", ""
    if os.access(_failed(), os.F_OK):
        return "could not be built", f"{_failed()} says why; remove it to try again"
    if _compiler() is None:
        return "no C++ compiler", "with g++ or clang++, calls that use_in_torch passes through cost less"
    return "not built", "the first use_in_torch builds it, or `tritile build`"


def library() -> Crossing | None:
    """Return the library. The first call on a machine builds it, in about 10 seconds.

    None where `TRITILE_CROSSING` is 0; and, with a StoreWarning, where it cannot be built or loaded.
    """
    return _obtained(path()) if wants_crossing() else None
