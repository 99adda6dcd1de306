"""The best configs of one GPU model as a JSON file: the value `Table`, reading it and writing it.

`gpu_tables.py` says which tables serve a GPU.
"""

import functools
import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final

from tritile.core.device import Device
from tritile.core.problem import Problem, problem_key, problem_to_dict
from tritile.errors import FileError, InvalidValueError, StoreWarning, callers_level
from tritile.families.registry import FAMILIES
from tritile.tuner.store.files import read_json, sifted, write_whole
from tritile.tuner.store.tables import Entry, entry_from
from tritile.tuner.store.trial import TORCH, Trial, rank
from tritile.tuner.store.trials import Store

FORMAT: Final = 3
MAX_BYTES: Final = 8 << 20  # some 20,000 entries
_TOP: Final = ("format", "device", "kernels", "entries")


@dataclass(frozen=True)
class Table:
    """Hold the best configs of one GPU model.

    - `device`: the facts of the GPU, as `Device.to_dict` gives them.
    - `kernels`: the digest of each kernel at export, by op and family ("matmul/tile").
    - `entries`: a config for each tuned problem.
    - `by_aten`: kinds of products, as `choose.aten.kind_of` names them, that torch's kernel makes wherever
      nothing else is measured.
    """

    device: dict[str, Any]
    kernels: dict[str, str]
    entries: tuple[Entry, ...]
    by_aten: tuple[str, ...] = ()

    def find(self, problem: Problem) -> Entry | None:
        return self._by_problem.get(problem)

    def is_current(self, op: str, family: str) -> bool:
        """True if the times of a family are measurements of its kernel as it is now."""
        kernel = FAMILIES[op].get(family)
        return kernel is not None and self.kernels.get(kernel.label) == kernel.digest

    @property
    def triton(self) -> str:
        """Return the version of Triton that it was measured with, "" if the table does not say."""
        return str(self.device.get("triton", ""))

    @functools.cached_property
    def _by_problem(self) -> dict[Problem, Entry]:
        return {entry.problem: entry for entry in self.entries}


# --- Reading ---


def read(file: Path | Traversable) -> Table:
    """Return the table of a file; warn with StoreWarning of single bad entries, and skip them.

    Raises FileError if the file cannot be read or holds no table.
    """
    return _table(read_json(file, MAX_BYTES), str(file))


def _table(data: Any, name: str) -> Table:
    if not isinstance(data, dict) or not set(_TOP) <= set(data) or not isinstance(data["entries"], list):
        raise FileError(f"{name} is not a table: expected {', '.join(_TOP)}")
    if data["format"] != FORMAT or isinstance(data["format"], bool):
        raise FileError(f"{name} has format {str(data['format'])[:80]}: expected {FORMAT}")
    device, kernels, by_aten = data["device"], data["kernels"], data.get("by_aten", [])
    is_named = isinstance(device, dict) and isinstance(device.get("name"), str)
    if not is_named or not all(map(_is_fact, device.values())):
        raise FileError(f"{name}: device is not valid")
    if not isinstance(kernels, dict) or not set(map(type, kernels.values())) <= {str}:
        raise FileError(f"{name}: kernels is not valid")
    if not isinstance(by_aten, list) or not set(map(type, by_aten)) <= {str}:
        raise FileError(f"{name}: by_aten is {str(by_aten)[:80]!r}: expected names")
    if data.get("measured") is False:
        raise FileError(f"{name} holds predictions, which would hide measurements: export a table on the GPU")
    entries, reasons = sifted(data["entries"], entry_from)
    first: dict[Problem, Entry] = {}
    for entry in entries:
        if first.setdefault(entry.problem, entry) is not entry:
            reasons.append(f"a second entry for {entry.problem.label}")
    if reasons:
        skipped = f"{len(reasons)} of {len(reasons) + len(first)} entries"
        _warn(f"{name}: skipped {skipped} that are not valid: {reasons[0]}")
    return Table(device, kernels, tuple(first.values()), tuple(by_aten))


def _warn(text: str) -> None:
    warnings.warn(text, StoreWarning, stacklevel=callers_level())


def _is_fact(value: Any) -> bool:
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


# --- Writing ---


def write(table: Table, path: Path) -> None:
    """Write the table to a file, whole or not at all.

    Raises InvalidValueError for a table that `read` would not take back whole, and OSError if the
    file cannot be written.
    """
    try:
        text = _text(table)
        with warnings.catch_warnings():
            warnings.simplefilter("error", StoreWarning)
            if len(text) > MAX_BYTES:
                raise InvalidValueError(f"it would exceed {MAX_BYTES >> 20} MiB")
            _table(json.loads(text), "the table")
    except (ValueError, TypeError, RecursionError, StoreWarning) as error:
        raise InvalidValueError(f"{path} is not written: {error}") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)


def in_order(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Return entries sorted by operation, sizes and key of their problems, as a file holds them."""
    return tuple(
        sorted(entries, key=lambda each: (each.problem.op, each.problem.sizes, problem_key(each.problem)))
    )


def _text(table: Table) -> str:
    """Return the table as JSON, an entry a line: equal tables give equal bytes."""
    dump: Callable[[Any], str] = functools.partial(json.dumps, sort_keys=True, allow_nan=False)
    lines = []
    for entry in in_order(table.entries):
        line = {"problem": problem_to_dict(entry.problem), "config": entry.config.to_dict(), "us": entry.us}
        lines.append(dump(line | ({} if entry.torch_us is None else {"torch_us": entry.torch_us})))
    head = {"format": FORMAT, "device": table.device, "kernels": table.kernels}
    if table.by_aten:
        head["by_aten"] = list(table.by_aten)
    texts = [f'"{name}": {dump(value)}' for name, value in head.items()]
    entries = '"entries": [\n' + ",\n".join(lines) + "\n]"
    return "{\n" + ",\n".join([*texts, entries]) + "\n}\n"


# --- Making ---


def from_store(store: Store, device: Device, kernels: Mapping[str, str]) -> Table:
    """Return a table of the best trial of each problem, measured with kernels of these digests, by label.

    A trial whose answer was checked goes before one that was only timed.
    """
    bests: dict[Problem, Trial] = {}
    for label, digest in kernels.items():
        for trial in store.bests(digest, label.partition("/")[0]):
            bests[trial.problem] = min(bests.get(trial.problem, trial), trial, key=rank)
    entries = []
    for trial in bests.values():
        by_torch = store.best(TORCH, trial.problem)
        entries.append(
            Entry(trial.problem, trial.config, trial.us, None if by_torch is None else by_torch.us)
        )
    return Table(device.to_dict(), dict(kernels), in_order(entries))


def completed(table: Table, old: Table) -> Table:
    """Return the table with the entries of an older one that it lacks.

    Only what was measured on the same GPU model and with the same kernels is taken over.
    """
    if old.device["name"] != table.device["name"]:
        return table

    def is_kept(entry: Entry) -> bool:
        family = FAMILIES[entry.problem.op].get(entry.config.family)
        label = family.label if family is not None else ""
        digest = table.kernels.get(label)
        return digest is not None and digest == old.kernels.get(label) and table.find(entry.problem) is None

    return replace(
        table,
        entries=in_order((*table.entries, *filter(is_kept, old.entries))),
        by_aten=table.by_aten or old.by_aten,
    )
