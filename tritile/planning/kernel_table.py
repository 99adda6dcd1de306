"""Winners of decorated kernels as a JSON file that a library ships beside its kernels: `KernelTable`.

`tritile export --kernel` writes it; `tritile.autotune(table=...)` and `TRITILE_TABLE` name it. One file holds
any number of kernels and GPU models. An entry counts for the GPU model and the digest of the kernel's source
that it was measured with.
"""

import functools
import json
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.files import write_whole
from tritile.core.problem import KernelProblem, problem_from_dict, problem_key, problem_to_dict
from tritile.core.settings import table_path
from tritile.errors import FileError, InvalidValueError, StoreWarning
from tritile.planning.trial import MAX_US, Trial, number_from, pair_from, parsed

FORMAT: Final = "tritile kernels 1"
_MAX_BYTES: Final = 64 << 20


class Winner(NamedTuple):
    """Hold the fastest config of one problem, and its microseconds."""

    config: Config
    us: float


def _model(device: Device) -> str:
    return f"{device.name} {device.arch}"


class KernelTable:
    """Hold winners by GPU model, digest of the kernel, and problem. Raises FileError for any other file."""

    def __init__(self, path: Path, text: str | None = None) -> None:
        self.path = path
        # By GPU model, digest, and the problem's text; parsed and checked as they are asked for.
        self.entries: dict[str, dict[str, dict[str, Any]]] = {}
        try:
            if text is None:
                if path.stat().st_size > _MAX_BYTES:
                    raise ValueError("it is too large")
                text = path.read_text(encoding="utf-8")
            data = json.loads(text)
            if not isinstance(data, dict) or data.get("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT!r}")
            for model, kernels in data["gpus"].items():
                for digest, winners in kernels.items():
                    self.entries.setdefault(model, {})[digest] = dict(winners)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise FileError(f"{path} is no table of kernels: {error}") from error

    def problems(self, device: Device, digest: str) -> list[str]:
        """Return the problems of a kernel that the table holds for a GPU, as text."""
        return list(self.entries.get(_model(device), {}).get(digest, ()))

    def find(self, device: Device, digest: str, problem: KernelProblem) -> Winner | None:
        """Return the winner of just this problem; warns of an entry that is not valid, and leaves it out."""
        text = problem_key(problem)
        entry = self.entries.get(_model(device), {}).get(digest, {}).get(text)
        if entry is None:
            return None
        try:
            _, config = pair_from(problem_to_dict(problem), entry["config"])
            return Winner(config, float(number_from(entry["us"], 0.0, MAX_US)))
        except (InvalidValueError, KeyError, TypeError) as error:
            warnings.warn(
                f"{self.path}: skipped an entry that is not valid: {error}", StoreWarning, stacklevel=2
            )
            return None

    def add(self, device: Device, digest: str, trials: Iterable[Trial]) -> int:
        """Put the winners of a kernel in, in place of those of the same problems; return how many."""
        held = self.entries.setdefault(_model(device), {}).setdefault(digest, {})
        count = 0
        for trial in trials:
            held[problem_key(trial.problem)] = {"config": trial.config.to_dict(), "us": trial.us}
            count += 1
        return count

    def write(self) -> None:
        """Write the file, whole or not at all: equal tables give equal bytes. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": FORMAT, "gpus": self.entries}, indent=0, sort_keys=True)
        write_whole(self.path, text + "\n")


def kernel_problem(text: str) -> KernelProblem:
    """Return the problem of a key. Raises InvalidValueError for anything else."""
    found = problem_from_dict(parsed(text))
    if not isinstance(found, KernelProblem):
        raise InvalidValueError(f"{text[:80]!r} is no problem of a decorated kernel")
    return found


def empty(path: Path) -> KernelTable:
    """Return a table without entries, to be written to `path`."""
    return KernelTable(path, json.dumps({"format": FORMAT, "gpus": {}}))


@functools.lru_cache(maxsize=64)
def _read(path: Path, changed: tuple[int, int]) -> KernelTable | None:
    try:
        return KernelTable(path)
    except FileError as error:
        warnings.warn(str(error), StoreWarning, stacklevel=4)
        return None


def _kept(path: Path) -> KernelTable | None:
    """Return the table of a file, read again after it changed; None, with a StoreWarning, where it is bad."""
    try:
        facts = path.stat()
    except OSError as error:
        warnings.warn(f"the table {path} cannot be read: {error}", StoreWarning, stacklevel=3)
        return None
    return _read(path, (facts.st_mtime_ns, facts.st_size))


def kernel_tables(path: Path | None) -> list[KernelTable]:
    """Return the tables that serve a kernel: that of `TRITILE_TABLE`, if it holds kernels, and `path`."""
    pinned = table_path()
    found = []
    if pinned is not None and is_kernel_table(pinned):
        found.append(_kept(pinned))
    if path is not None:
        found.append(_kept(path))
    return [table for table in found if table is not None]


def is_kernel_table(path: Path) -> bool:
    """True for a file of decorated kernels, False for a table of tritile's own operations, or no file."""
    try:
        with path.open("rb") as file:
            return FORMAT.encode() in file.read(64)
    except OSError:
        return False
