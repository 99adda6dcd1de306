"""Read files that anybody may have made, and write files whole or not at all."""

import contextlib
import json
import os
import platform
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from tritile.errors import FileError


def read_json(file: Path | Traversable, most: int) -> Any:
    """Return what a JSON file of at most `most` bytes holds. Raises FileError for any other file."""
    try:
        if not file.is_file():  # a pipe or a device may have no end
            raise FileError(f"{file} is not there, or no regular file")
        with file.open("rb") as opened:
            raw = opened.read(most + 1)
    except OSError as error:
        raise FileError(f"{file} cannot be read: {error}") from error
    if len(raw) > most:
        raise FileError(f"{file} holds more than {most >> 20} MiB")
    try:
        return json.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise FileError(f"{file} is not JSON: {error}") from error


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
