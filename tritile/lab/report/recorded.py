"""Read recorded trials from stores kept in files, to replay searches and fit formulas."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import Tiled
from tritile.errors import FileError
from tritile.families.space import illegal
from tritile.planning.store import Store
from tritile.planning.trial import Trial

Times = dict[tuple[Tiled, int], dict[Config, float]]  # by problem and the store's number


def trials(path: Path, device: Device) -> list[Trial]:
    """Read the trials of our own problems from a store of a GPU model, an SQLite file or a .gz of one.

    Configs that are no longer legal are left out. Raises FileError where the file cannot be read
    or holds no trial of this GPU model.
    """
    found = [
        trial
        for _, trial in Store(device).of_file(path)
        if isinstance(trial.problem, Tiled) and illegal(trial.config, trial.problem, device) is None
    ]
    if not found:
        raise FileError(f"{path} holds no trials of {device.name}")
    return found


def times(paths: Iterable[Path], device: Device, failures: bool = False) -> Times:
    """Return the microseconds of the trials in stores; times of different stores are kept apart.

    With `failures`, failed configs have the time infinity; else they are left out. Raises as `trials` does.
    """
    found: Times = defaultdict(dict)
    for number, path in enumerate(paths):
        for trial in trials(path, device):
            if (trial.works or failures) and isinstance(trial.problem, Tiled):
                found[trial.problem, number][trial.config] = trial.time
    return dict(found)
