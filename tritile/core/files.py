"""Write files whole or not at all."""

import contextlib
import os
import platform
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that readers see the old text or the new one. Raises OSError."""
    partial = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}.tmp")
    try:
        with partial.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
