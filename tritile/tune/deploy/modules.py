"""Modules in C that Triton builds at its first use, on the machine that runs: built here ahead of that.

Triton builds one module, `cuda_utils`. Triton 3.6 builds another for each signature of a kernel,
`__triton_launcher`. Both are linked to the CUDA driver's library. Where there is no driver, a library with
functions of the same names stands in for it. From Triton 3.8 on the key of `cuda_utils` holds the path of
that library, and the path where Triton is installed.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

from triton import knobs

from tritile.core.of_triton import MODULE_LOADER, build, folder_of, nvidia_driver
from tritile.errors import UnsupportedError, brief
from tritile.tune.deploy.folder import writing

driver: Final = nvidia_driver()
_LIBRARY: Final = "libcuda.so.1"
_UTILS: Final = "cuda_utils"


class Module(NamedTuple):
    """Hold a module's name, its source in C, and its path inside Triton's folder."""

    name: str
    source: str
    path: Path


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _library_dirs() -> list[str]:
    """Return the folders in which Triton finds libraries on the machine that runs, as far as is known here.

    The CUDA driver's library is where TRITON_LIBCUDA_PATH says, else where it is on this machine, else where
    Debian and Ubuntu have it.
    """
    try:
        return list(driver.library_dirs())
    except (AssertionError, OSError, subprocess.SubprocessError):  # no driver here
        usual = f"/lib/{sysconfig.get_config_var('MULTIARCH') or 'x86_64-linux-gnu'}"
        return [driver.libdevice_dir, knobs.nvidia.libcuda_path or usual]


def _request(name: str, source: str) -> None:
    """Have Triton look for a module, and build and keep it where it is missing, without loading it."""

    def unloaded(name: str, path: str) -> Any:
        raise ImportError(f"{path} is not to be loaded")

    dirs = _library_dirs()
    with (
        _replaced(driver, "library_dirs", lambda: dirs),
        _replaced(*MODULE_LOADER, unloaded),
        contextlib.suppress(ImportError),
    ):
        if name == _UTILS:
            driver.CudaUtils.__init__(SimpleNamespace())
        else:
            build.compile_module_from_src(source, name, dirs, driver.include_dirs, driver.libraries)


class _Sought(Exception):
    """Carry the key by which Triton looks for a module."""


def _module(name: str, source: str) -> Module:
    """Return a module with its path, by Triton's own look-up: each version makes the key in its own way."""

    def sought(key: str) -> Any:
        raise _Sought(key)

    with _replaced(build, "get_cache_manager", sought):
        try:
            _request(name, source)
        except _Sought as asked:
            file = f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
            return Module(name, source, Path(folder_of(asked.args[0]), file))
    raise UnsupportedError(f"this version of Triton does not look for {name} in its cache")


def modules_of(kernel: Any | None) -> list[Module]:
    """Return the modules that launch a compiled kernel; for None those with which Triton's driver starts."""
    if kernel is None:
        return [_module(_UTILS, Path(driver.dirname, "driver.c").read_text())]
    if not hasattr(driver, "make_launcher"):
        return []
    names = kernel.src.fn.arg_names
    constants = {
        (names.index(at),) if isinstance(at, str) else at: value for at, value in kernel.src.constants.items()
    }
    meta = getattr(kernel.metadata, "tensordesc_meta", None)
    source = driver.make_launcher(constants, dict(kernel.src.signature), meta)
    return [_module("__triton_launcher", source)]


def _compiler() -> str:
    found = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        raise UnsupportedError("there is no C compiler here: install gcc or clang, or name one in CC")
    return found


def _stand_in(sources: Iterable[str], folder: Path) -> None:
    """Build a library in the driver's name, with functions for the linker to find that do nothing."""
    names = sorted({name for text in sources for name in re.findall(r"\bcu[A-Z]\w+", text)})
    source = folder / "driver.c"
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in names))
    options = ["-shared", "-fPIC", f"-Wl,-soname,{_LIBRARY}", "-o", str(folder / _LIBRARY)]
    subprocess.run([_compiler(), str(source), *options], check=True, capture_output=True)


@contextlib.contextmanager
def _linked_in(folder: str) -> Iterator[None]:
    """Let compilers find libraries in a folder, too, without a change of Triton's keys."""
    before = os.environ.get("LIBRARY_PATH")
    os.environ["LIBRARY_PATH"] = os.pathsep.join(filter(None, (folder, before)))
    try:
        yield
    finally:
        if before is None:
            del os.environ["LIBRARY_PATH"]
        else:
            os.environ["LIBRARY_PATH"] = before


def build_into(folder: Path, modules: Sequence[Module]) -> dict[str, str]:
    """Build modules into a folder; return the reasons of what could not be built, by name."""
    refused: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch, writing(folder), _linked_in(scratch):
        try:
            _stand_in((module.source for module in modules), Path(scratch))
        except (UnsupportedError, OSError, subprocess.SubprocessError) as error:
            return {module.name: brief(error) for module in modules}
        for module in modules:
            try:
                _request(module.name, module.source)
            except (RuntimeError, OSError, subprocess.SubprocessError) as error:
                refused[module.name] = brief(error)
    return refused
