"""The best configs of one GPU model as a JSON file: the value `Table`, reading it and writing it.

`gpu_tables.py` says which tables serve a GPU.
"""

import functools
import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.files import write_whole
from tritile.core.problem import Problem, problem_key, problem_to_dict
from tritile.errors import FileError, InvalidValueError, StoreWarning
from tritile.families.registry import FAMILIES
from tritile.planning.aten import AtenTimes, aten_times_of
from tritile.planning.classes import MEASURED
from tritile.planning.portfolio import Portfolio, portfolio_of
from tritile.planning.store import Store
from tritile.planning.trial import MAX_US, TORCH, Trial, number_from, pair_from, rank, read_json

FORMAT: Final = 3
MAX_BYTES: Final = 8 << 20  # some 20,000 entries
_TOP: Final = ("format", "device", "kernels", "entries")


@dataclass(frozen=True)
class Entry:
    """Hold the best config of one problem and its median time in microseconds, None where it is not known.

    `torch_us` is torch's time, measured beside it; None where it was not.
    """

    problem: Problem
    config: Config
    us: float | None
    torch_us: float | None = None


@dataclass(frozen=True)
class Table:
    """Hold the best configs of one GPU model.

    - `device`: the facts of the GPU, as `Device.to_dict` gives them.
    - `kernels`: the digest of each kernel at export, by op and family ("matmul/tile").
    - `entries`: a config for each tuned problem.
    - `portfolios`: by class of problems, for sizes without an entry.
    - `aten`: torch's times, as predicted for some classes each.
    - `by_aten`: kinds of products, as `planning.aten.kind_of` names them, that torch's kernel makes wherever
      nothing else is measured.
    - `shortlists`: by class without a portfolio, configs and constants fitted to the model's times, not to
      measured ones: the model picks among the likeliest few, as a whole space takes it 0.1 s and more.
    """

    device: dict[str, Any]
    kernels: dict[str, str]
    entries: tuple[Entry, ...]
    portfolios: Mapping[str, Portfolio] = field(default_factory=dict)
    shortlists: Mapping[str, Portfolio] = field(default_factory=dict)
    aten: tuple[AtenTimes, ...] = ()
    by_aten: tuple[str, ...] = ()

    def find(self, problem: Problem) -> Entry | None:
        return self._by_problem.get(problem)

    def is_current(self, op: str, family: str) -> bool:
        """True if the times of a family are measurements of its kernel as it is now."""
        kernel = FAMILIES[op].get(family)
        return kernel is not None and self.kernels.get(kernel.label) == kernel.digest

    def current_portfolios(self) -> dict[str, Portfolio]:
        return {
            name: each
            for name, each in self.portfolios.items()
            if all(self.is_current(MEASURED[name].op, config.family) for config in each.configs)
        }

    @property
    def triton(self) -> str:
        """Return the version of Triton that it was measured with, "" where the table does not say."""
        return str(self.device.get("triton", ""))

    @functools.cached_property
    def _by_problem(self) -> dict[Problem, Entry]:
        return {entry.problem: entry for entry in self.entries}


# --- Reading ---


def read(file: Path | Traversable) -> Table:
    """Return the table of a file; warn with StoreWarning of single bad entries, and skip them.

    Raises FileError where the file cannot be read or holds no table.
    """
    return _table(read_json(file, MAX_BYTES), str(file))


def _table(data: Any, name: str) -> Table:
    if not isinstance(data, dict) or not set(_TOP) <= set(data) or not isinstance(data["entries"], list):
        raise FileError(f"{name} is not a table: wanted {', '.join(_TOP)}")
    if data["format"] != FORMAT or isinstance(data["format"], bool):
        raise FileError(f"{name} has format {str(data['format'])[:80]}: wanted {FORMAT}")
    device, kernels = data["device"], data["kernels"]
    if not (_is_facts(device) and _is_digests(kernels)):
        raise FileError(f"{name}: device or kernels is not valid")
    entries = _entries(data["entries"], name)
    portfolios, shortlists = (
        {each: portfolio_of(each, value) for each, value in _by_name(data, key, name).items()}
        for key in ("portfolios", "shortlists")
    )
    by_aten = data.get("by_aten", [])
    if not isinstance(by_aten, list) or not set(map(type, by_aten)) <= {str}:
        raise FileError(f"{name}: by_aten is {str(by_aten)[:80]!r}: wanted names")
    times = _aten_times(data, name)
    return Table(device, kernels, entries, portfolios, shortlists, times, tuple(by_aten))


def _is_facts(device: Any) -> bool:
    if not isinstance(device, dict) or not isinstance(device.get("name"), str):
        return False
    return all(
        isinstance(v, str | int) or (isinstance(v, float) and math.isfinite(v)) for v in device.values()
    )


def _is_digests(kernels: Any) -> bool:
    return isinstance(kernels, dict) and all(isinstance(digest, str) for digest in kernels.values())


def _entry(data: Any) -> Entry:
    if not isinstance(data, dict) or set(data) | {"torch_us"} != {"problem", "config", "us", "torch_us"}:
        raise InvalidValueError(
            f"{str(data)[:80]!r} is not an entry: wanted problem, config, us and torch_us"
        )
    problem, config = pair_from(data["problem"], data["config"])
    times = (number_from(data.get(name), math.ulp(0.0), MAX_US) for name in ("us", "torch_us"))
    return Entry(problem, config, *times)


def _entries(lines: Iterable[Any], name: str) -> tuple[Entry, ...]:
    """Return the valid entries, the first of each problem; warn of the others with one StoreWarning."""
    good: dict[Problem, Entry] = {}
    reasons: list[str] = []
    for line in lines:
        try:
            entry = _entry(line)
            if entry.problem in good:
                raise InvalidValueError(f"a second entry for {entry.problem.label}")
            good[entry.problem] = entry
        except InvalidValueError as error:
            reasons.append(str(error))
    if reasons:
        skipped = f"{len(reasons)} of {len(reasons) + len(good)} entries"
        text = f"{name}: skipped {skipped} that are not valid: {reasons[0][:200]}"
        warnings.warn(text, StoreWarning, stacklevel=4)
    return tuple(good.values())


def _by_name(data: Mapping[str, Any], key: str, name: str) -> dict[str, Any]:
    """Return the dictionary of a key, empty if absent. Raises InvalidValueError for anything else."""
    found = data.get(key, {})
    if not isinstance(found, dict):
        raise InvalidValueError(f"{name}: {key} is {str(found)[:80]!r}: wanted a dictionary by name")
    return found


def _aten_times(data: Mapping[str, Any], name: str) -> tuple[AtenTimes, ...]:
    """Return what validly predicts torch's times; warn of the rest with one StoreWarning."""
    found = data.get("aten", [])
    good, reasons = [], [] if isinstance(found, list) else ["wanted a list"]
    for each in found if isinstance(found, list) else ():
        try:
            good.append(aten_times_of(each))
        except InvalidValueError as error:
            reasons.append(str(error))
    if reasons:
        text = f"{name}: {len(reasons)} predictions of torch's times are not used: {reasons[0][:200]}"
        warnings.warn(text, StoreWarning, stacklevel=4)
    return tuple(good)


# --- Writing ---


def write(table: Table, path: Path) -> None:
    """Write the table to a file, whole or not at all.

    Raises InvalidValueError for a table that `read` would not take back whole, and OSError where the
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
    for key in ("portfolios", "shortlists"):
        by_class = sorted(getattr(table, key).items())
        head |= {key: {name: each.to_dict() for name, each in by_class}} if by_class else {}
    if table.aten:
        head["aten"] = [each.to_dict() for each in table.aten]
    if table.by_aten:
        head["by_aten"] = list(table.by_aten)
    lines_of_head = [f'"{name}": {dump(value)}' for name, value in head.items()]
    entries = '"entries": [\n' + ",\n".join(lines) + "\n]"
    return "{\n" + ",\n".join([*lines_of_head, entries]) + "\n}\n"


# --- Making ---


def from_store(store: Store, device: Device, kernels: Mapping[str, str]) -> Table:
    """Return a table of the best trial of each problem, measured with kernels of these digests, by label.

    A trial whose answer was checked goes before one that was only timed.
    """
    bests: dict[Problem, Trial] = {}
    for label, digest in kernels.items():
        for trial in store.bests(digest, label.partition("/")[0]):
            rival = bests.setdefault(trial.problem, trial)
            if rank(trial) < rank(rival):
                bests[trial.problem] = trial
    entries = []
    for trial in bests.values():
        torchs = store.best(TORCH, trial.problem)
        entries.append(Entry(trial.problem, trial.config, trial.us, None if torchs is None else torchs.us))
    return Table(device.to_dict(), dict(kernels), in_order(entries))


def completed(table: Table, old: Table) -> Table:
    """Return the table with the entries and portfolios of an older one that it lacks.

    Only what was measured on the same GPU model and with the same kernels is taken over.
    """
    if old.device["name"] != table.device["name"]:
        return table
    has = {entry.problem for entry in table.entries}
    same = {label for label, digest in table.kernels.items() if old.kernels.get(label) == digest}
    kept = [entry for entry in old.entries if entry.problem not in has and _label(entry) in same]
    return replace(
        table,
        entries=in_order((*table.entries, *kept)),
        portfolios={**old.current_portfolios(), **table.portfolios},
        shortlists={**old.shortlists, **table.shortlists},
        aten=table.aten or old.aten,
        by_aten=table.by_aten or old.by_aten,
    )


def _label(entry: Entry) -> str:
    family = FAMILIES[entry.problem.op].get(entry.config.family)
    return family.label if family is not None else ""
