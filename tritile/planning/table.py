"""Tables: the best configs of one GPU model as JSON, exported from a store and shipped in the package."""

import functools
import hashlib
import json
import math
import stat
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.files import write_whole
from tritile.core.problem import Problem, problem_key, problem_to_dict
from tritile.core.settings import cache_dir, table_path
from tritile.errors import InvalidValueError, StoreWarning
from tritile.families.registry import FAMILIES
from tritile.planning.classes import MEASURED
from tritile.planning.lead import Lead, lead_of
from tritile.planning.portfolio import Portfolio, portfolio_of
from tritile.planning.store import Store
from tritile.planning.trial import MAX_US, TORCH, Trial, number_from, pair_from, rank

FORMAT: Final = 2
MAX_BYTES: Final = 8 << 20  # some 20,000 entries
_MOST_SKIPPED: Final = 1000
_TOP: Final = ("format", "device", "measured", "kernels", "entries")


@dataclass(frozen=True)
class Entry:
    """The best config of one problem; `us` is its median time, None where it was predicted.

    `torch_us` is torch's, measured beside it; None where it was not.
    """

    problem: Problem
    config: Config
    us: float | None
    torch_us: float | None = None


@dataclass(frozen=True)
class Loss:
    """What was given up so that few configs serve all entries of a table, as shares: 0.01 is 1%.

    Each entry's config takes at most `within` longer than the best known of its problem; `worst` and
    `mean` are what they lose, and `configs` how many different ones there are.
    """

    within: float
    worst: float
    mean: float
    configs: int


@dataclass(frozen=True)
class Table:
    """The best configs of one GPU model.

    `device` holds the facts of the GPU as `Device.to_dict` gives them, `kernels` the digest of each
    kernel at export, by op and family ("matmul/tile"). `measured` is False where configs were predicted
    and compiled, not timed. `loss` is None where each config is the best known of its problem. `portfolios`
    are those of classes of problems, by name, for sizes that are no entry; `leads` tell how many times as
    long torch takes there.
    """

    device: dict[str, Any]
    measured: bool
    kernels: dict[str, str]
    entries: tuple[Entry, ...]
    loss: Loss | None = None
    portfolios: Mapping[str, Portfolio] = field(default_factory=dict)
    leads: Mapping[str, Lead] = field(default_factory=dict)

    def find(self, problem: Problem) -> Entry | None:
        """Return the entry of just this problem, None where there is none."""
        return self._by_problem.get(problem)

    def counts(self, op: str, family: str, digest: str) -> bool:
        """Tell whether the times of a family are measurements of the kernel that has this digest."""
        return self.measured and self.kernels.get(FAMILIES[op][family].label) == digest

    @property
    def triton(self) -> str:
        """Return the version of Triton that measured or compiled it, "" where the table does not say."""
        return str(self.device.get("triton", ""))

    @functools.cached_property
    def _by_problem(self) -> dict[Problem, Entry]:
        return {entry.problem: entry for entry in self.entries}


def _entry(data: Any) -> Entry:
    """Return the entry of a parsed line. Raises InvalidValueError for anything else."""
    if not isinstance(data, dict) or set(data) | {"torch_us"} != {"problem", "config", "us", "torch_us"}:
        raise InvalidValueError(f"{str(data)[:80]!r} is no entry: wanted problem, config, us and torch_us")
    problem, config = pair_from(data["problem"], data["config"])
    times = (number_from(data.get(name), math.ulp(0.0), MAX_US) for name in ("us", "torch_us"))
    return Entry(problem, config, *times)


def _entries(lines: Iterable[Any], name: str) -> tuple[Entry, ...]:
    """Return the valid entries; of two for one problem, the first. One StoreWarning counts the others.

    Raises InvalidValueError where more than `_MOST_SKIPPED` are not valid.
    """
    good: dict[Problem, Entry] = {}
    skipped, reason = 0, ""
    for line in lines:
        try:
            entry = _entry(line)
            if entry.problem in good:
                raise InvalidValueError(f"a second entry for {entry.problem.label}")
            good[entry.problem] = entry
        except InvalidValueError as error:
            skipped, reason = skipped + 1, reason or str(error)
            if skipped > _MOST_SKIPPED:
                raise InvalidValueError(
                    f"{name}: more than {_MOST_SKIPPED} entries are not valid: {reason[:200]}"
                ) from error
    if skipped:
        text = (
            f"{name}: skipped {skipped} of {skipped + len(good)} entries that are not valid: {reason[:200]}"
        )
        warnings.warn(text, StoreWarning, stacklevel=4)
    return tuple(good.values())


def _is_facts(device: Any) -> bool:
    """Tell whether it could be what `Device.to_dict` gives."""
    if not isinstance(device, dict) or not isinstance(device.get("name"), str):
        return False
    return all(
        isinstance(v, str | int) or (isinstance(v, float) and math.isfinite(v)) for v in device.values()
    )


def _is_digests(kernels: Any) -> bool:
    return isinstance(kernels, dict) and all(isinstance(digest, str) for digest in kernels.values())


def _loss(data: Any, name: str) -> Loss | None:
    """Return the loss of a parsed table. Raises InvalidValueError where there is one that is not valid."""
    if data is None:
        return None
    names = [field.name for field in fields(Loss)]
    try:
        if isinstance(data, dict) and set(data) == set(names) and None not in data.values():
            return Loss(**{key: number_from(data[key], 0, MAX_US, whole=key == "configs") for key in names})
    except InvalidValueError as error:
        raise InvalidValueError(f"{name}: loss: {error}") from error
    raise InvalidValueError(f"{name}: loss is {str(data)[:80]!r}: wanted {', '.join(names)}")


def _parsed(raw: bytes, name: str) -> Table:
    """Return the table in these bytes of JSON. Raises InvalidValueError if there is none."""
    if len(raw) > MAX_BYTES:
        raise InvalidValueError(f"{name} holds more than {MAX_BYTES >> 20} MiB: that is no table")
    try:
        data = json.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidValueError(f"{name} is no JSON: {error}") from error
    if not isinstance(data, dict) or not set(_TOP) <= set(data) or not isinstance(data["entries"], list):
        raise InvalidValueError(f"{name} is no table: wanted {', '.join(_TOP)}")
    if data["format"] != FORMAT or isinstance(data["format"], bool):
        raise InvalidValueError(f"{name} is of format {str(data['format'])[:80]}: wanted {FORMAT}")
    if not (
        _is_facts(data["device"]) and isinstance(data["measured"], bool) and _is_digests(data["kernels"])
    ):
        raise InvalidValueError(f"{name}: device, measured or kernels is not what it must be")
    loss, entries = _loss(data.get("loss"), name), _entries(data["entries"], name)
    portfolios = {each: portfolio_of(each, v) for each, v in _named_in(data, "portfolios", name).items()}
    leads = _leads(data, name)
    return Table(data["device"], data["measured"], data["kernels"], entries, loss, portfolios, leads)


def _named_in(data: Mapping[str, Any], key: str, name: str) -> dict[str, Any]:
    found = data.get(key, {})
    if not isinstance(found, dict):
        raise InvalidValueError(f"{name}: {key} is {str(found)[:80]!r}: wanted them by name")
    return found


def _leads(data: Mapping[str, Any], name: str) -> dict[str, Lead]:
    """Return the valid leads; those of another version are not. One StoreWarning tells of the others."""
    good, reasons = {}, []
    for each, value in _named_in(data, "leads", name).items():
        try:
            good[each] = lead_of(each, value)
        except InvalidValueError as error:
            reasons.append(str(error))
    if reasons:
        text = f"{name}: {len(reasons)} leads are not used: {reasons[0][:200]}: calibrate those classes again"
        warnings.warn(text, StoreWarning, stacklevel=5)
    return good


def read(path: Path) -> Table:
    """Return the table of a file; single bad entries, and leads, are skipped with a StoreWarning.

    Raises InvalidValueError where the file cannot be read or holds no table.
    """
    return _read(path, str(path))


def _read(file: Path | Traversable, name: str) -> Table:
    try:
        if isinstance(file, Path):  # else of the package
            facts = file.stat()
            if not stat.S_ISREG(facts.st_mode):  # of a pipe or a device there may be no end
                raise InvalidValueError(f"{name} is no file")
            if facts.st_size > MAX_BYTES:
                raise InvalidValueError(f"{name} is of {facts.st_size} bytes: wanted {MAX_BYTES} at most")
        with file.open("rb") as opened:
            raw = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise InvalidValueError(f"{name} cannot be read: {error}") from error
    return _parsed(raw, name)


def _order(entry: Entry) -> tuple[str, tuple[int, ...], str]:
    return entry.problem.op, entry.problem.sizes, problem_key(entry.problem)


def _text(table: Table) -> str:
    """Return the table as JSON, an entry a line, in order of problem: alike tables give alike bytes."""
    dump: Callable[[Any], str] = functools.partial(json.dumps, sort_keys=True, allow_nan=False)
    lines = []
    for entry in sorted(table.entries, key=_order):
        line = {"problem": problem_to_dict(entry.problem), "config": entry.config.to_dict(), "us": entry.us}
        lines.append(dump(line | ({} if entry.torch_us is None else {"torch_us": entry.torch_us})))
    head = {"format": FORMAT, "device": table.device, "measured": table.measured, "kernels": table.kernels}
    head |= {"loss": asdict(table.loss)} if table.loss is not None else {}
    portfolios = {name: each.to_dict() for name, each in sorted(table.portfolios.items())}
    leads = {name: each.to_dict() for name, each in sorted(table.leads.items())}
    head |= {key: found for key, found in (("portfolios", portfolios), ("leads", leads)) if found}
    lines_of_head = [f'"{name}": {dump(value)}' for name, value in head.items()]
    entries = '"entries": [\n' + ",\n".join(lines) + "\n]"
    return "{\n" + ",\n".join([*lines_of_head, entries]) + "\n}\n"


def write(table: Table, path: Path) -> None:
    """Write the table to a file, whole or not at all.

    Raises InvalidValueError for a table that `read` would not take back whole, and OSError where the
    file cannot be written.
    """
    try:
        text = _text(table)
        with warnings.catch_warnings():
            warnings.simplefilter("error", StoreWarning)
            _parsed(text.encode(), "the table")
    except (ValueError, TypeError, RecursionError, StoreWarning) as error:
        raise InvalidValueError(f"{path} is not written: {error}") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)


def from_store(store: Store, device: Device, kernels: Mapping[str, str]) -> Table:
    """Return the best trial of each problem that the store holds for these kernels: a name and a digest each.

    One whose answer was checked goes before one that was only timed.
    """
    bests: dict[Problem, Trial] = {}
    for name, digest in kernels.items():
        for trial in store.bests(digest, name.partition("/")[0]):
            rival = bests.setdefault(trial.problem, trial)
            if rank(trial) < rank(rival):
                bests[trial.problem] = trial
    entries = []
    for trial in bests.values():
        torchs = store.best(TORCH, trial.problem)
        entries.append(Entry(trial.problem, trial.config, trial.us, None if torchs is None else torchs.us))
    return Table(device.to_dict(), True, dict(kernels), tuple(sorted(entries, key=_order)))


def current_portfolios(table: Table) -> dict[str, Portfolio]:
    """Return the portfolios of a table that were measured, or predicted, of the kernels as they are."""

    def counts(portfolio: Portfolio) -> bool:
        families = FAMILIES[MEASURED[portfolio.name].op]
        used = {config.family for config in portfolio.configs}
        return all(table.kernels.get(families[each].label) == families[each].digest for each in used)

    return {name: each for name, each in table.portfolios.items() if counts(each)}


def current_leads(table: Table) -> dict[str, Lead]:
    """Return the leads of a table over torch that were measured with the kernels as they are."""
    return {name: each for name, each in table.leads.items() if _is_of(table, MEASURED[name].op)}


def _is_of(table: Table, op: str) -> bool:
    return all(table.kernels.get(each.label) == each.digest for each in FAMILIES[op].values())


def completed(table: Table, old: Table) -> Table:
    """Return the table, with the entries of an older one for problems it lacks.

    Only entries that were measured on the same GPU model, of the same version of the kernel, are taken,
    and with them what the older table says of its loss; and its portfolios of classes that this one lacks.
    """
    if not old.measured or old.device["name"] != table.device["name"]:
        return table
    has = {entry.problem for entry in table.entries}
    same = {name for name, digest in table.kernels.items() if old.kernels.get(name) == digest}
    kept = [entry for entry in old.entries if entry.problem not in has and _label(entry) in same]
    loss = old.loss if kept else table.loss
    entries = tuple(sorted((*table.entries, *kept), key=_order))
    portfolios = {**current_portfolios(old), **table.portfolios}
    return replace(
        table, entries=entries, loss=loss, portfolios=portfolios, leads={**current_leads(old), **table.leads}
    )


def _label(entry: Entry) -> str:
    family = FAMILIES[entry.problem.op].get(entry.config.family)
    return family.label if family is not None else ""


def _folder() -> Traversable:
    return resources.files("tritile") / "tables"


_PREDICTED: Final = "predicted"  # a folder in that of tables, for what was not measured of a GPU model


@functools.cache
def _shipped(name: str) -> Table | None:
    file = _folder() / f"{name}.json"
    if not file.is_file():
        return None
    try:
        return _read(file, str(file))
    except InvalidValueError as error:
        warnings.warn(f"a shipped table is not used: {error}", StoreWarning, stacklevel=3)
        return None


_ALIKE: Final = 1.5  # times the memory bandwidth, up to which one GPU is like another
_LIKE_LEADS: Final = 1.25  # times as much is asked of a lead of such a GPU


@functools.cache
def _of_like(arch: int | str, processors: int, gbps: float) -> tuple[Table, ...]:
    """Return the shipped, measured tables of GPUs with this architecture and as many processors.

    The one whose memory is most alike comes first.
    """
    found = []
    for path in _folder().iterdir():
        table = _shipped(path.name.removesuffix(".json")) if path.name.endswith(".json") else None
        if table is None:
            continue
        own = table.device.get("memory_gbps", 0.0)
        least, most = sorted((own, gbps))
        same = (table.device.get("arch"), table.device.get("processors")) == (arch, processors)
        if same and most <= _ALIKE * least:
            found.append((most / least, table.device["name"], table))
    return tuple(table for *_, table in sorted(found, key=lambda each: each[:2]))


@functools.cache
def _pinned(path: Path, changed: int) -> Table:
    return read(path)


def pinned(device: Device) -> Table | None:
    """Return the table of `TRITILE_TABLE`, where that is of this GPU model; None where it is not, or not set.

    It goes before what was measured on this machine. Raises InvalidValueError where the file is no table.
    """
    path = table_path()
    if path is None:
        return None
    changed = path.stat().st_mtime_ns if path.exists() else 0
    found = _pinned(path, changed)
    return found if found.device["name"] == device.name else None


def calibrated_path(device: Device) -> Path:
    """Return the file of portfolios that were measured on this machine for a GPU model."""
    return cache_dir() / f"{device.slug}.portfolios.json"


def predicted_path(device: Device) -> Path:
    """Return the file for what is predicted of a GPU model that is not here, where none is named."""
    return Path(f"{device.slug}-predicted.json")


@functools.cache
def _calibrated(path: Path, changed: int) -> Table | None:
    try:
        return read(path)
    except InvalidValueError as error:
        warnings.warn(f"portfolios are not used: {error}", StoreWarning, stacklevel=3)
        return None


def calibrated(device: Device) -> Table | None:
    """Return what `tritile tune --calibrate` measured for a GPU model on this machine; None if nothing."""
    path = calibrated_path(device)
    try:
        own = _calibrated(path, path.stat().st_mtime_ns)
    except OSError:
        own = None
    return own if own is not None and own.measured and own.device["name"] == device.name else None


def _tables(device: Device) -> Iterator[tuple[Table, str]]:
    """Yield what is known of classes for a GPU, and where it comes from.

    First the table that is pinned, then what `tritile tune --calibrate` measured here, then what ships, for
    this GPU or for one that is like it. The pinned one, and what ships for this GPU, may hold predictions.
    """
    fixed, own = pinned(device), calibrated(device)
    if fixed is not None:
        yield fixed, "of the table that is pinned" + ", not measured" * (not fixed.measured)
    if own is not None:
        yield own, "measured here"
    for found in shipped(device):
        of, how = found.device["name"], "measured" if found.measured else "predicted"
        yield found, f"{how} for this GPU" if of == device.name else f"{how} for {of}, which is like it"


def portfolio(name: str, device: Device) -> tuple[Portfolio, Table, str] | None:
    """Return the portfolio of a class for a GPU, its table, and where that is from; None if there is none."""
    found = ((t.portfolios[name], t, where) for t, where in _tables(device) if name in t.portfolios)
    return next(found, None)


def is_calibrated(device: Device) -> bool:
    """Tell whether a portfolio of any class was measured on a GPU, or on one that is like it."""
    return any(each.measured and each.portfolios for each, _ in _tables(device))


def lead(name: str, device: Device) -> Lead | None:
    """Return what tells how many times as long torch takes for a class on a GPU; None if nothing does.

    It is of the table whose portfolio serves the class, if a measured one does, and measured with the kernels
    as they are. Of one that was measured on a GPU like this one more is asked.
    """
    served = portfolio(name, device)
    known = [each for each, _ in _tables(device) if each.measured]
    if served is not None and served[1].measured:
        known = [each for each in known if each is served[1]]
    found = next((each for each in known if name in current_leads(each)), None)
    if found is None:
        return None
    made = found.leads[name]
    return made if found.device["name"] == device.name else replace(made, least=_LIKE_LEADS * made.least)


def digest(table: Table | None) -> str:
    """Sixteen hexadecimal digits that change with what a table holds, "" where there is none."""
    return "" if table is None else hashlib.sha256(_text(table).encode()).hexdigest()[:16]


def shipped(device: Device) -> tuple[Table, ...]:
    """Return the tables that ship for this GPU model and for those like it, those to be asked first before.

    Like it is one of the same architecture with as many processors and a memory bandwidth within 1.5 times.
    What was measured goes before what was predicted for just this GPU.
    """
    alike = _of_like(device.arch, device.processors, device.memory_gbps)
    own, predicted = (_named(name, device) for name in (device.slug, f"{_PREDICTED}/{device.slug}"))
    ordered = (own, *(each for each in alike if each is not own), predicted)
    return tuple(each for each in ordered if each is not None)


def _named(name: str, device: Device) -> Table | None:
    """Return a table that ships if it is of just this GPU model: names of files may be alike."""
    found = _shipped(name)
    return found if found is not None and found.device["name"] == device.name else None
