"""A folder of compiled kernels as Triton lays it out: read it without writing, and move it elsewhere.

Triton keeps a folder for each key. In it lie a kernel's files, and a group file with their absolute paths.
For Triton a folder that was copied elsewhere holds nothing until its group files have the new paths.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from triton import knobs

from tritile.core.files import write_whole
from tritile.core.of_triton import CacheManager, folder_of

_GROUP: Final = "__grp__"
_READ: Final = (".json", ".cubin", ".ptx")  # what loading a kernel, and launching it, asks for


class Missing(Exception):
    """Name a kernel that the folder does not hold, by Triton's name of its key.

    `told` is the place of the folder that the group file names instead, None where there is none.
    """

    def __init__(self, key: str, told: Path | None = None) -> None:
        super().__init__(f"{key} is missing")
        self.key, self.told = key, told


def _is_name(text: str) -> bool:
    """Tell whether a text is a plain file name, and no path to another folder."""
    return text not in ("", "..") and Path(text).name == text


def _group_of(file: Path) -> dict[str, str]:
    """Return the names and paths in a group file; none where it is absent or damaged.

    A file that names files of another folder counts as damaged: files of these names are written and removed.
    """
    try:
        paths = json.loads(file.read_text())["child_paths"]
        told = {str(name): str(path) for name, path in paths.items()}
        return told if all(map(_is_name, told)) else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _write(group: Path, paths: dict[str, str]) -> None:
    write_whole(group, json.dumps({"child_paths": paths}))


class _Reader(CacheManager):  # type: ignore[misc]
    """Find what Triton would find in `folder`, were it at `place`. Raises Missing for a missing kernel.

    This takes the part of Triton's own manager, which creates folders as it looks and compiles kernels that
    it does not find.
    """

    folder: Path
    place: Path

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self.key = key

    def get_group(self, filename: str) -> dict[str, str]:
        """Return a kernel's files by name. Raises Missing unless all of the group are there."""
        told = _group_of(self.folder / self.key / f"{_GROUP}{filename}")
        found = {name: self.folder / self.key / name for name in told}
        if filename not in told or not all(file.is_file() for file in found.values()):
            raise Missing(self.key)
        for name, path in told.items():
            if Path(path) != self.place / self.key / name:
                raise Missing(self.key, Path(path).parents[1])
        return {name: str(file) for name, file in found.items()}

    def get_file(self, filename: str) -> str | None:
        """Return the path of a file, None where there is none."""
        file = self.folder / self.key / filename
        return str(file) if file.is_file() else None

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        """Refuse to write."""
        raise Missing(self.key)

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        """Refuse to write."""
        raise Missing(self.key)


@contextlib.contextmanager
def reading(folder: Path, place: Path) -> Iterator[None]:
    """Have Triton look into `folder`, as if it were at `place`, and nowhere else; it raises Missing."""
    with knobs.cache.scope():
        knobs.cache.manager_class = type("Reader", (_Reader,), {"folder": folder, "place": place})
        yield


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Have Triton keep what it compiles in `folder`."""
    with knobs.cache.scope():
        knobs.cache.manager_class = None
        knobs.cache.dir = str(folder)
        yield


def settle(folder: Path, place: Path) -> None:
    """Write into every group file of `folder` the paths that its files have with the folder at `place`."""
    for file in folder.glob(f"*/{_GROUP}*.json"):
        told = _group_of(file)
        wanted = {name: str(place / file.parent.name / name) for name in told}
        if told != wanted:
            _write(file, wanted)


def key_of(kernel: Any) -> str:
    """Return the name of the folder in which a compiled kernel lies."""
    return str(folder_of(kernel.hash))


def slim(folder: Path, keys: Iterable[str]) -> None:
    """Remove files that no launch reads, the stages between source and PTX, of kernels with these keys."""
    for key in keys:
        for group in (folder / key).glob(f"{_GROUP}*.json"):
            paths = _group_of(group)
            kept = {name: path for name, path in paths.items() if name.endswith(_READ)}
            _write(group, kept)
            for name in paths.keys() - kept.keys():
                (folder / key / name).unlink(missing_ok=True)


def drop(folder: Path, keys: Iterable[str]) -> None:
    """Remove the group files of kernels with these keys, so that Triton compiles the kernels anew.

    Their other files stay: another process may be writing them.
    """
    for key in keys:
        for group in (folder / key).glob(f"{_GROUP}*.json"):
            group.unlink(missing_ok=True)


def bytes_of(folder: Path) -> int:
    """Return the size of all files in a folder, in bytes."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
