"""Write files whole or not at all."""

import contextlib
import os
import platform
from pathlib import Path


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a file so that readers see the old content or the new one. Raises OSError."""
    partial = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}.tmp")
    try:
        with partial.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
