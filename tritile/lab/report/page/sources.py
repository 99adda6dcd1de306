"""Find the files of a report, results and stores of trials, and gather their rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tritile.core.device import Device
from tritile.errors import InvalidValueError
from tritile.lab.report.page.rows import Rows, facets_of, rows_of
from tritile.lab.report.page.searches import Recorded, searched
from tritile.lab.report.results import Result

_WANTED: Final = "a folder, or a file of results (.jsonl) or of trials (.sqlite3, .sqlite3.gz)"


@dataclass
class Sources:
    """Hold files by kind."""

    results: list[Path] = field(default_factory=list)
    stores: list[Path] = field(default_factory=list)


def sources(places: Iterable[Path]) -> Sources:
    """Sort files, and results in folders and in the folders in them, by kind.

    Raises InvalidValueError for a file or folder that does not exist, or a file of unknown kind.
    """
    found = Sources()
    for place in dict.fromkeys(places):
        if place.is_dir():
            found.results += sorted({*place.glob("*.jsonl"), *place.glob("*/*.jsonl")})
        elif not place.exists():
            raise InvalidValueError(f"{place}: no such file or folder; wanted {_WANTED}")
        elif place.suffix == ".jsonl":
            found.results.append(place)
        elif place.name.endswith((".sqlite3", ".sqlite3.gz")):
            found.stores.append(place)
        else:
            raise InvalidValueError(f"{place}: wanted {_WANTED}")
    return found


def gathered(results: Iterable[Result], stores: Sequence[Recorded], gpu: str, device: Device | None) -> Rows:
    """Return the rows of a report of one GPU: its results, and the stores' trials.

    `device` has the GPU's peaks, None where they are unknown.
    """
    results = list(results)
    rows, facets = rows_of(results, gpu, device), facets_of(results, gpu)
    rows.searches, rows.cells, rows.progress = searched(stores, facets)
    rows.trials = sum(len(store.trials) for store in stores)
    return rows
