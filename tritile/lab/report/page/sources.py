"""Find the files of a report (results, stores, studies of the tuner), and gather their rows."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tritile.core.device import Device
from tritile.errors import InvalidValueError
from tritile.lab.report.page.rows import Rows, facets_of, rows_of
from tritile.lab.report.page.searches import Recorded, searched
from tritile.lab.report.page.tuner import autotune_rows, study_rows
from tritile.lab.report.results import Result

_STORES: Final = (".sqlite3", ".sqlite3.gz")
_WANTED: Final = (
    "a folder, or a file of results (.jsonl), of trials (.sqlite3, .sqlite3.gz) or of study (.json)"
)


@dataclass
class Sources:
    """Hold files by kind; `studies` and `autotunes` are parsed, as only their text tells the kind."""

    results: list[Path] = field(default_factory=list)
    stores: list[Path] = field(default_factory=list)
    studies: list[dict[str, Any]] = field(default_factory=list)
    autotunes: list[list[dict[str, Any]]] = field(default_factory=list)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidValueError(f"{path}: {error}") from error


def _add_json(found: Sources, path: Path) -> None:
    data = _read_json(path)
    rows = data if isinstance(data, list) and all(isinstance(row, dict) for row in data) else None
    if isinstance(data, dict) and isinstance(data.get("problems"), list):
        found.studies.append(data)
    elif rows is not None and all("measures" in row for row in rows):
        found.autotunes.append(rows)
    else:
        raise InvalidValueError(
            f"{path}: wanted what `tritile tune --study` or tuning/compare_autotune.py writes"
        )


def _add(found: Sources, path: Path) -> None:
    if path.suffix == ".jsonl":
        found.results.append(path)
    elif path.name.endswith(_STORES):
        found.stores.append(path)
    elif path.suffix == ".json":
        _add_json(found, path)
    else:
        raise InvalidValueError(f"{path}: wanted {_WANTED}")


def sources(places: Iterable[Path], tell: Callable[[str], None]) -> Sources:
    """Sort files, and those in folders and in the folders in them, by kind.

    `tell` is told of .json files in a folder that are not ours. Raises InvalidValueError for a file or folder
    that does not exist, or a file of unknown kind.
    """
    found = Sources()
    for place in dict.fromkeys(places):
        if place.is_dir():
            for path in sorted({*place.glob("*.json*"), *place.glob("*/*.json*")}):
                if path.suffix == ".jsonl":
                    found.results.append(path)
                elif path.suffix == ".json":
                    try:
                        _add_json(found, path)
                    except InvalidValueError as error:
                        tell(str(error))
        elif place.exists():
            _add(found, place)
        else:
            raise InvalidValueError(f"{place}: no such file or folder; wanted {_WANTED}")
    return found


def gathered(
    found: Sources, results: Iterable[Result], stores: Sequence[Recorded], gpu: str, device: Device | None
) -> Rows:
    """Return the rows of a report of one GPU: its results, the stores' trials, and studies that were found.

    `device` has the GPU's peaks, None where they are unknown. Raises InvalidValueError for a study that
    `tritile tune --study` cannot have written.
    """
    results = list(results)
    rows, facets = rows_of(results, gpu, device), facets_of(results, gpu)
    rows.searches, rows.cells, rows.progress = searched(stores, facets)
    rows.trials = sum(len(store.trials) for store in stores)
    rows.study = study_rows(found.studies, gpu, facets)
    rows.autotune = autotune_rows(found.autotunes, gpu)
    return rows
