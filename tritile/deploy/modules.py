"""What of Triton itself is built by a C compiler on the machine that runs, at the first use.

Triton 3.7 builds one module, `cuda_utils`. Triton 3.6 builds another for each signature of a kernel,
`__triton_launcher`. Both are linked to the CUDA driver's library, which is where the GPU is: here a library
with functions of the same names stands for it.
"""

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from triton.backends.nvidia import driver
from triton.runtime import build
from triton.runtime.cache import _base32

from tritile.deploy.folder import writing
from tritile.errors import UnsupportedError, brief

_LIBRARY: Final = "libcuda.so.1"


class Module(NamedTuple):
    """A module by name, with its source in C."""

    name: str
    source: str

    @property
    def path(self) -> Path:
        """Where Triton keeps it, inside its folder."""
        key = hashlib.sha256((self.source + build.platform_key()).encode()).hexdigest()
        return Path(_base32(key), f"{self.name}{sysconfig.get_config_var('EXT_SUFFIX')}")


def modules_of(kernel: Any | None) -> list[Module]:
    """The modules with which Triton's driver starts, and those with which it launches a compiled kernel."""
    if kernel is None:
        return [Module("cuda_utils", Path(driver.dirname, "driver.c").read_text())]
    if not hasattr(driver, "make_launcher"):
        return []
    names = kernel.src.fn.arg_names
    constants = {
        (names.index(at),) if isinstance(at, str) else at: value for at, value in kernel.src.constants.items()
    }
    meta = getattr(kernel.metadata, "tensordesc_meta", None)
    return [Module("__triton_launcher", driver.make_launcher(constants, dict(kernel.src.signature), meta))]


def _compiler() -> str:
    found = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        raise UnsupportedError("there is no C compiler here: install gcc or clang, or name one in CC")
    return found


def _stand_in(sources: Iterable[str], folder: Path) -> None:
    """A library in the driver's name. Its functions do nothing: they are there for the linker to find."""
    names = sorted({name for text in sources for name in re.findall(r"\bcu[A-Z]\w+", text)})
    source = folder / "driver.c"
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in names))
    options = ["-shared", "-fPIC", f"-Wl,-soname,{_LIBRARY}", "-o", str(folder / _LIBRARY)]
    subprocess.run([_compiler(), str(source), *options], check=True, capture_output=True)


def build_into(folder: Path, modules: Sequence[Module]) -> dict[str, str]:
    """Build modules into a folder; what could not be built, by name, and why."""
    refused: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch, writing(folder):
        try:
            _stand_in((module.source for module in modules), Path(scratch))
        except (UnsupportedError, OSError, subprocess.SubprocessError) as error:
            return {module.name: brief(error) for module in modules}
        for name, source in modules:
            places = [driver.libdevice_dir, scratch]
            try:
                # Built and kept, it is loaded, which takes the true library and says so: it is not here.
                with contextlib.suppress(ImportError):
                    build.compile_module_from_src(source, name, places, driver.include_dirs, driver.libraries)
            except (RuntimeError, OSError, subprocess.SubprocessError) as error:
                refused[name] = brief(error)
    return refused
