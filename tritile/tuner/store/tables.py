"""Winners of decorated kernels, as a JSON file that a library ships with its kernels: `KernelTable`.

`tritile export --kernel` writes it; `tritile.autotune(table=...)` and `TRITILE_TABLE` name it. One file has
any number of kernels and GPU models. An entry counts for the digest of the kernel's source and the GPU model
with which it was measured, and for GPUs of the same architecture without an entry of their own.

A file must never break a call: a bad file or entry is skipped, with a StoreWarning.
"""

import functools
import itertools
import json
import math
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tritile.core.config import Config
from tritile.core.device import TARGETS, Device
from tritile.core.problem import KernelProblem, Problem, problem_key
from tritile.core.settings import table_path
from tritile.errors import FileError, InvalidValueError, StoreWarning, callers_level
from tritile.tuner.store.files import (
    MAX_US,
    config_from,
    number_from,
    opened,
    problem_from,
    read_json,
    sifted,
    write_whole,
)
from tritile.tuner.store.trial import Trial

_KIND: Final = "tritile kernels"
FORMAT: Final = f"{_KIND} 1"
_OPERATIONS: Final = rb'"format":\s*\d'  # the beginning of a table of tritile's own operations
MAX_BYTES: Final = 16 << 20  # some 40,000 problems
_MAX_SIZE: Final = 2**64  # more than a kernel can take; ratios of sizes stay finite


@dataclass(frozen=True)
class Entry:
    """The best config of one problem and its median time in microseconds, if measured.

    `torch_us` is torch's time in the same interleaved measurement; None if there was none. `gpu`: the model
    that it was measured on, of a table of several.
    """

    problem: Problem
    config: Config
    us: float | None
    torch_us: float | None = None
    gpu: str = ""


def entry_from(data: Any) -> Entry:
    """Return the entry of a dictionary. Raises InvalidValueError for anything else."""
    if not isinstance(data, dict) or set(data) | {"torch_us"} != {"problem", "config", "us", "torch_us"}:
        expected = "expected problem, config, us and torch_us"
        raise InvalidValueError(f"{str(data)[:80]!r} is not an entry: {expected}")
    times = (number_from(data.get(name), math.ulp(0.0), MAX_US) for name in ("us", "torch_us"))
    return Entry(problem_from(data["problem"]), config_from(data["config"]), *times)


def kernel_problem(text: str) -> KernelProblem | None:
    """Return a decorated kernel's problem from its key; None for any other text."""
    try:
        found = problem_from(text)
    except InvalidValueError:
        return None
    return found if isinstance(found, KernelProblem) else None


def _winner(gpu: str, item: tuple[str, Any]) -> tuple[str, Entry]:
    text, data = item
    if not isinstance(data, dict) or data.get("us") is None:
        raise InvalidValueError(f"{str(data)[:80]!r}: expected config and us")
    entry = entry_from({"problem": text, "config": data.get("config"), "us": data["us"]})
    if not isinstance(entry.problem, KernelProblem) or max(entry.problem.sizes, default=0) >= _MAX_SIZE:
        raise InvalidValueError(f"{text[:80]!r} is not the key of a decorated kernel's problem")
    return text, replace(entry, gpu=gpu)


def _likeness(gpu: str, device: Device) -> tuple[Any, ...]:
    """Return a sort key of GPU models of one architecture: the most similar first, unknown ones last."""
    target = next((each for each in TARGETS.values() if each.name == gpu), None)
    if target is None:
        return True, gpu
    pairs = (target.processors, device.processors), (target.memory_gbps, device.memory_gbps)
    return False, *(abs(math.log(there / here)) for there, here in pairs), gpu


class KernelTable:
    """Winners by GPU model ("NVIDIA H200 90"), the kernel's digest and the problem's key."""

    def __init__(self, path: Path, entries: dict[str, dict[str, dict[str, Any]]]) -> None:
        self.path = path
        self.entries = entries
        self._winners: dict[tuple[Device, str], dict[str, Entry]] = {}
        self._outdated: set[str] = set()  # kernels whose entries are of another source, which was said

    def winners(self, device: Device, digest: str) -> Mapping[str, Entry]:
        """Return the winners of a kernel on a GPU, by problem key: its model's, else of the most similar GPU.

        A kernel's entries are checked at its first look-up; one StoreWarning reports those skipped.
        """
        found = self._winners.get((device, digest))
        if found is None:
            found, reasons, count = {}, list[str](), 0
            for model in reversed(self._models(device)):
                items = self.entries[model].get(digest, {}).items()
                good, bad = sifted(items, functools.partial(_winner, model.rpartition(" ")[0]))
                found.update(good)
                reasons, count = reasons + bad, count + len(items)
            self._winners[device, digest] = found
            if reasons:
                skipped = f"{self.path}: skipped {len(reasons)} of {count} entries"
                message = f"{skipped} that are not valid: {reasons[0]}"
                warnings.warn(message, StoreWarning, stacklevel=callers_level())
        return found

    def find(self, device: Device, digest: str, problem: KernelProblem) -> Entry | None:
        """Return a problem's winner. One StoreWarning says if all are of another source of the kernel."""
        winners, name = self.winners(device, digest), problem.kernel
        if not winners and name not in self._outdated and self._has_other_source(device, name):
            self._outdated.add(name)
            text = f"{self.path}: what it has of {name} is of another source of the kernel, and is not used"
            warnings.warn(f"{text}: tune the kernel, and export it again", StoreWarning, callers_level())
        return winners.get(problem_key(problem))

    def _models(self, device: Device) -> list[str]:
        """Return the GPU models with the architecture of a GPU: its own first, then the most similar."""
        alike = [model.rpartition(" ")[0] for model in self.entries if model.endswith(f" {device.arch}")]
        alike.sort(key=lambda gpu: (gpu != device.name, *_likeness(gpu, device)))
        return [f"{gpu} {device.arch}" for gpu in alike]

    def _has_other_source(self, device: Device, name: str) -> bool:
        sources = (source for model in self._models(device) for source in self.entries[model].values())
        others = map(kernel_problem, itertools.chain.from_iterable(sources))
        return any(other is not None and other.kernel == name for other in others)

    def add(self, device: Device, digest: str, trials: Iterable[Trial]) -> int:
        new = {
            problem_key(trial.problem): {"config": trial.config.to_dict(), "us": trial.us} for trial in trials
        }
        self.entries.setdefault(f"{device.name} {device.arch}", {}).setdefault(digest, {}).update(new)
        self._winners.clear()
        return len(new)

    def write(self) -> None:
        """Write the file atomically; equal tables have equal bytes.

        Raises InvalidValueError for a file that `read` would refuse as too large, and OSError.
        """
        text = json.dumps({"format": FORMAT, "gpus": self.entries}, indent=0, sort_keys=True) + "\n"
        if len(text) > MAX_BYTES:
            raise InvalidValueError(f"{self.path} is not written: it would exceed {MAX_BYTES >> 20} MiB")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, text)


def read(path: Path) -> KernelTable:
    """Return the table in a file. Raises FileError if it cannot be read or is no such table."""
    try:
        data = read_json(path, MAX_BYTES)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise FileError(f"its format is not {FORMAT!r}")
        if not _is_nested(data.get("gpus"), 3):
            raise FileError("it does not hold entries by GPU model, digest and problem")
    except FileError as error:
        why = str(error).replace(f"{path} ", "it ", 1)
        raise FileError(f"{path} is no table of kernels: {why}") from error
    return KernelTable(path, data["gpus"])


def _is_nested(value: Any, depth: int) -> bool:
    """True for dictionaries in dictionaries, `depth` levels of them."""
    return depth == 0 or (
        isinstance(value, dict) and all(_is_nested(each, depth - 1) for each in value.values())
    )


def kernel_tables(path: Path | None) -> list[KernelTable]:
    """Return a kernel's tables: `TRITILE_TABLE`, unless that is of tritile's own operations, and `path`."""
    pinned = table_path()
    paths = [None if pinned is None or _begins(pinned, _OPERATIONS) else pinned, path]
    found = (opened(read, each, "") for each in paths if each is not None)
    return [table for table in found if table is not None]


def is_kernel_table(path: Path) -> bool:
    """True for a table of decorated kernels; False for one of tritile's own operations, or without a file."""
    return _begins(path, _KIND.encode())


def _begins(path: Path, pattern: bytes) -> bool:
    """True if the first bytes of a file match a pattern; False without a file."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return re.search(pattern, file.read(64)) is not None
    except (OSError, ValueError):
        return False
