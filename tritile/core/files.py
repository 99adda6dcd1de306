"""Write files whole or not at all."""

import contextlib
import glob
import os
import platform
import time
from pathlib import Path
from typing import Final

_DAY_S: Final = 86400.0


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that readers see the old text or the new one. Raises OSError.

    Files that a killed writer left beside it are removed.
    """
    host = "".join(c if c.isalnum() else "-" for c in platform.node())
    _remove_stale(path, host)
    partial = path.with_name(f".{path.name}.{host}.{os.getpid()}.tmp")
    try:
        with partial.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def _remove_stale(path: Path, host: str) -> None:
    """Remove partial files of writers that ended on this host, and of others after a day."""
    for partial in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        where, _, pid = partial.name[len(path.name) + 2 : -len(".tmp")].rpartition(".")
        with contextlib.suppress(OSError):
            old = time.time() - partial.stat().st_mtime > _DAY_S
            if old or (where == host and pid.isdecimal() and not _runs(int(pid))):
                partial.unlink()


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # the file belongs to another user
        return True
    return True
