"""Find the files of a report (results, stores, studies of the tuner), and gather their rows."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tritile.core.device import Device
from tritile.core.problem import Problem
from tritile.errors import InvalidValueError
from tritile.lab.parsed import parsed
from tritile.lab.report.page.rows import FACETS, Row, Rows, facets_of, rows_of
from tritile.lab.report.page.searches import Recorded, searched
from tritile.lab.report.results import Result, Tell

_WANTED: Final = (
    "a folder, or a file of results (.jsonl), of trials (.sqlite3, .sqlite3.gz) or of study (.json)"
)


@dataclass(frozen=True)
class Studied:
    """Hold what `tritile tune --study` writes of a problem: regrets as fractions, seconds, microseconds."""

    problem: str
    regrets: list[float]
    first_pick_regret: float | None
    transfer_regret: float | None
    tune_seconds: float
    configs: int
    space: int
    best_us: float
    best: str


@dataclass(frozen=True)
class Study:
    """Hold what `tritile tune --study` writes, as far as a report shows it."""

    env: dict[str, str]
    problems: list[Studied]


@dataclass(frozen=True)
class Compared:
    """Hold a line of `tuning/compare_autotune.py`: first calls of both tuners, and their winners' times."""

    env: dict[str, str]
    measures: str
    kernel: str
    problem: str
    triton_s: float | None = None
    tritile_s: float | None = None
    space_s: float | None = None
    triton_us: float | None = None
    tritile_us: float | None = None
    space_us: float | None = None


@dataclass
class Sources:
    """Hold files by kind; `studies` and `autotunes` are parsed, as only their text tells the kind."""

    results: list[Path] = field(default_factory=list)
    stores: list[Path] = field(default_factory=list)
    studies: list[Study] = field(default_factory=list)
    autotunes: list[Compared] = field(default_factory=list)


def _add(found: Sources, path: Path) -> None:
    """Sort a file by its kind. Raises InvalidValueError for one of unknown kind."""
    if path.suffix == ".jsonl":
        found.results.append(path)
    elif path.name.endswith((".sqlite3", ".sqlite3.gz")):
        found.stores.append(path)
    elif path.suffix != ".json":
        raise InvalidValueError(f"{path}: wanted {_WANTED}")
    elif (data := path.read_bytes()).lstrip().startswith(b"["):
        found.autotunes += parsed(list[Compared], data, str(path))
    else:
        found.studies.append(parsed(Study, data, str(path)))


def sources(places: Iterable[Path], tell: Tell) -> Sources:
    """Sort files, and those in folders and in the folders in them, by kind.

    `tell` is told of .json files in a folder that are not ours. Raises InvalidValueError for a file or folder
    that does not exist, or a file of unknown kind.
    """
    found = Sources()
    for place in dict.fromkeys(places):
        if not place.exists():
            raise InvalidValueError(f"{place}: no such file or folder; wanted {_WANTED}")
        if not place.is_dir():
            _add(found, place)
            continue
        for path in sorted({*place.glob("*.json*"), *place.glob("*/*.json*")}):
            try:
                _add(found, path)
            except InvalidValueError as error:
                tell(str(error))
    return found


def _study_rows(studies: Iterable[Study], gpu: str, facets: Mapping[Problem, Row]) -> list[Row]:
    """Return a row for each problem of this GPU's studies."""
    by_label = {problem.label: row for problem, row in facets.items()}
    none: Row = {name: [] for name in FACETS}
    own = [each for study in studies if study.env.get("gpu") == gpu for each in study.problems]
    return [
        dataclasses.asdict(each) | by_label.get(each.problem, none) | {"t": number}
        for number, each in enumerate(own)
    ]


def gathered(
    found: Sources, results: Iterable[Result], stores: Sequence[Recorded], gpu: str, device: Device | None
) -> Rows:
    """Return the rows of a report of one GPU: its results, the stores' trials, and studies that were found.

    `device` has the GPU's peaks, None where they are unknown.
    """
    results = list(results)
    rows, facets = rows_of(results, gpu, device), facets_of(results, gpu)
    rows.searches, rows.cells, rows.progress = searched(stores, facets)
    rows.trials = sum(len(store.trials) for store in stores)
    rows.study = _study_rows(found.studies, gpu, facets)
    tuned = [each for each in found.autotunes if each.measures == "tuning" and each.env.get("gpu") == gpu]
    rows.autotune = [dataclasses.asdict(each) for each in tuned]
    return rows
