"""Find what serves a GPU: tables of measurements, and the predictor of a class of problems.

Tables are searched in this order:

1. pinned: the file that `TRITILE_TABLE` names, if it is of this GPU model.
2. shipped: `tritile/tables/<gpu>.json`, measured on this GPU model, then the tables of GPUs like it.

A predictor is what `tritile tune --calibrate` trained on this machine, then what ships for GPUs like it.

A GPU is like another if it has the same architecture, so that both run the same machine code, and a memory
bandwidth within a factor of 1.5. What was trained by measurements of one then predicts for the other: inputs
count tiles by each GPU's own number of SMs. A measurement of one problem counts only if both have as many.

To ship a GPU: `tritile tune`, then `tritile export --output tritile/tables/<gpu>.json`; sweeps of it, and
tuning/train.py. Tables are found by the names of their files.
"""

import functools
from collections.abc import Collection, Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Final

from tritile.choose.classes import MEASURED
from tritile.choose.predictor import Predictor
from tritile.choose.predictor import read as read_predictor
from tritile.choose.table import Table, read
from tritile.core.device import Device
from tritile.core.permutation import PermuteProblem
from tritile.core.settings import cache_dir, table_path
from tritile.errors import InvalidValueError
from tritile.tuner.store.files import opened, state_of
from tritile.tuner.store.tables import is_kernel_table

WHAT: Final = ("products", "permutations")  # that predictors are trained for
_UNUSED: Final = "a predictor is not used: "
_LIKE_GBPS: Final = 1.5  # the ratio of memory bandwidths up to which one GPU is like another


def _of_just(device: Device, path: Path, unusable: str | None = None) -> Table | None:
    """Return the table of a file if it is of just this GPU model: several models may share a file name."""
    table = opened(read, path, unusable)
    return table if table is not None and table.device["name"] == device.name else None


def pinned(device: Device) -> Table | None:
    """Return the table of `TRITILE_TABLE`; None if there is none of tritile's operations for this GPU.

    Raises InvalidValueError if the file holds no table.
    """
    path = table_path()
    try:
        return None if path is None or is_kernel_table(path) else _of_just(device, path)
    except InvalidValueError as error:
        raise type(error)(f"TRITILE_TABLE: {error}") from error


def calibrated_path(device: Device, what: str) -> Path:
    """Return the file of what `tritile tune --calibrate` trained here: "products" or "permutations"."""
    return cache_dir() / f"{device.slug}.{what}.predictor.json"


def sweeps_path(device: Device) -> Path:
    """Return the folder of what `tritile tune --calibrate` timed here, a file a class."""
    return cache_dir() / f"{device.slug}.sweeps"


def shipped(device: Device) -> tuple[Table, ...]:
    """Return the tables whose measurements of a problem count on this GPU, in the order to look them up.

    They are its own, then those of GPUs like it with as many SMs. The nearest bandwidth comes first.
    """
    own, count = device.name, device.processors
    return tuple(
        each for each in like(device) if own == each.device["name"] or each.device.get("processors") == count
    )


def like(device: Device) -> tuple[Table, ...]:
    """Return the shipped tables that predict for this GPU: its own, then those of GPUs like it."""
    return _like(device.name, device.slug, device.arch, device.processors, device.memory_gbps)


@functools.lru_cache(64)
def _like(name: str, slug: str, arch: int | str, processors: int, gbps: float) -> tuple[Table, ...]:
    found = []
    for file in _folder().iterdir():
        if not file.name.endswith(".json") or file.name.endswith(".predictor.json"):
            continue
        table = opened(read, file, "a shipped table is not used: ")
        if table is None:
            continue
        least, most = sorted((table.device.get("memory_gbps", 0.0), gbps))
        is_own = file.name == f"{slug}.json" and table.device["name"] == name
        if is_own or (table.device.get("arch") == arch and most <= _LIKE_GBPS * least):
            same = table.device.get("processors") == processors
            order = (not is_own, not same, most / least if least else 1.0, table.device["name"])
            found.append((order, table))
    return tuple(table for _, table in sorted(found, key=lambda each: each[0]))


def _folder() -> Traversable:
    return resources.files("tritile") / "tables"


def serving(device: Device) -> Iterator[tuple[Table, str]]:
    """Yield the tables that serve a GPU in their order, each with words for where it comes from."""
    if fixed := pinned(device):
        yield fixed, "measured, in the pinned table"
    for table in like(device):
        of = table.device["name"]
        yield table, f"measured on {of if of == device.name else f'a similar GPU, {of}'}"


def predictor(name: str | None, device: Device) -> tuple[Predictor, str] | None:
    """Return what predicts a class on a GPU, with words for where it comes from; None if nothing does."""
    if name is None:
        return None
    what = what_of(name)
    path, file = calibrated_path(device, what), _folder() / f"{what}.predictor.json"
    own = opened(read_predictor, path, _UNUSED) if state_of(path) else None
    if own is not None and name in own.classes and device.name in own.classes[name].gpus:
        return own, "measured here"
    made = opened(read_predictor, file, _UNUSED) if file.is_file() else None
    if made is None or name not in made.classes:
        return None
    of = _nearest(made, made.classes[name].gpus, device)
    if of is None:
        return None
    return made, f"measured on {of if of == device.name else f'a similar GPU, {of}'}"


def what_of(name: str) -> str:
    """Return the name of the predictor that has a class."""
    return WHAT[MEASURED[name].op == PermuteProblem.op]


def _nearest(made: Predictor, swept: Collection[str], device: Device) -> str | None:
    """Return the name of the GPU, of those that a class was swept on, that is most like this one."""
    ratios = {
        each["name"]: max(each["memory_gbps"] / device.memory_gbps, device.memory_gbps / each["memory_gbps"])
        for each in made.devices
        if each["name"] in swept and each["arch"] == device.arch and device.memory_gbps
    }
    if device.name in ratios:
        return device.name
    of = min(ratios, key=lambda name: ratios[name], default=None)
    return None if of is None or ratios[of] > _LIKE_GBPS else of


def has_table(device: Device) -> bool:
    """True if a table is of this GPU model, or of one like it."""
    return pinned(device) is not None or bool(like(device))


def is_calibrated(device: Device) -> bool:
    """True if something predicts for this GPU."""
    return any(predictor(name, device) for name in MEASURED)


def is_by_aten(kind: str, device: Device) -> bool:
    """True if torch's kernel makes products of this kind, by the first table that knows of torch's times."""
    return next((kind in table.by_aten for table, _ in serving(device) if table.by_aten), False)
