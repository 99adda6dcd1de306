"""Find the tables that serve a GPU, and in them the portfolio of a class of problems.

Asked in this order:

1. pinned: the file that `TRITILE_TABLE` names, if it is of this GPU model.
2. calibrated: what `tritile tune --calibrate` measured on this machine.
3. shipped: `tritile/tables/<gpu>.json`, measured on this GPU model, then the tables of GPUs like it.

A GPU is like another if it has the same architecture, so that both run the same machine code, and a memory
bandwidth within a factor of 1.5. What was fitted to measurements of one then predicts for the other: formulas
count tiles by each GPU's own number of SMs. A measurement of one problem counts only if both have as many.

To ship a GPU: `tritile tune`, `tritile tune --calibrate all`, then `tritile export --output
tritile/tables/<gpu>.json`. Tables are found by the names of their files.
"""

import functools
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Final

from tritile.core.device import Device
from tritile.core.settings import cache_dir, table_path
from tritile.errors import InvalidValueError
from tritile.planning.aten import OTHER, AtenTimes, versions
from tritile.planning.portfolio import Portfolio
from tritile.planning.table import Table, read
from tritile.tuner.store.files import opened, state_of
from tritile.tuner.store.tables import is_kernel_table

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


def calibrated(device: Device) -> Table | None:
    """Return what `tritile tune --calibrate` measured for a GPU model on this machine; None if nothing."""
    path = calibrated_path(device)
    return _of_just(device, path, "portfolios are not used: ") if state_of(path) else None


def calibrated_path(device: Device) -> Path:
    return cache_dir() / f"{device.slug}.portfolios.json"


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
        table = opened(read, file, "a shipped table is not used: ") if file.name.endswith(".json") else None
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
    if own := calibrated(device):
        yield own, "measured here"
    for table in like(device):
        of = table.device["name"]
        yield table, f"measured on {of if of == device.name else f'a similar GPU, {of}'}"


def portfolio(name: str | None, device: Device) -> tuple[Portfolio, Table, str] | None:
    """Return a class's portfolio for a GPU, its table and where that is from; None if no table has one."""
    for each, where in serving(device):
        if name and name in each.portfolios:
            return each.portfolios[name], each, where
    return None


def shortlist(name: str | None, device: Device) -> Portfolio | None:
    """Return the configs among which the model picks for a class; None if no table has such."""
    return next(
        (each.shortlists[name] for each, _ in serving(device) if name and name in each.shortlists), None
    )


def has_table(device: Device) -> bool:
    """True if a table is of this GPU model, or of one like it."""
    return pinned(device) is not None or bool(like(device))


def is_calibrated(device: Device) -> bool:
    return any(each.portfolios for each, _ in serving(device))


def aten_times(name: str | None, device: Device) -> tuple[AtenTimes, float] | None:
    """Return what predicts torch's times for a class on a GPU; None if no table does.

    With it comes a factor that widens margins: above 1 if torch or cuBLAS is of another version than was
    timed, and on another GPU.
    """
    for table, _ in serving(device):
        for each in table.aten:
            if name in each.classes:
                same = each.versions == versions() and table.device["name"] == device.name
                return each, 1.0 if same else OTHER
    return None


def is_by_aten(kind: str, device: Device) -> bool:
    """True if torch's kernel makes products of this kind, by the first table that knows of torch's times."""
    return next((kind in table.by_aten for table, _ in serving(device) if table.by_aten), False)
