"""Read recorded trials from stores kept in files, to replay searches and fit formulas."""

import gzip
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import Tiled
from tritile.errors import InvalidValueError
from tritile.families.space import illegal
from tritile.planning.store import Store
from tritile.planning.trial import Trial

Times = dict[tuple[Tiled, int], dict[Config, float]]  # by problem and the store's number


def trials(path: Path, device: Device) -> list[Trial]:
    """Read the trials of our own problems from a store of a GPU model, an SQLite file or a .gz of one.

    Configs that are no longer legal are left out. Raises InvalidValueError where the file cannot be read
    or holds no trial of this GPU model.
    """
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidValueError(f"{path} cannot be read: {error}") from error
    with tempfile.TemporaryDirectory() as folder:
        store = Store(device, Path(folder))
        store.path.write_bytes(data)
        found = [
            trial
            for facts, trial in store.everything()
            if facts["name"] == device.name
            and isinstance(trial.problem, Tiled)
            and illegal(trial.config, trial.problem, device) is None
        ]
    if not found:
        raise InvalidValueError(f"{path} holds no trials of {device.name}")
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
