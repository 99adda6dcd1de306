"""Append every trial to a log as it is measured: JSON lines."""

import json
import warnings
from pathlib import Path

from tritile.core.problem import problem_to_dict
from tritile.core.settings import tune_log
from tritile.errors import StoreWarning
from tritile.planning.store import Store
from tritile.planning.trial import Trial
from tritile.tune.measure.tasks import Keep


def line_of(digest: str, trial: Trial) -> str:
    """Return one trial as a line of JSON."""
    facts = {
        name: getattr(trial, name)
        for name in ("us", "spread", "registers", "spills", "shared", "error", "failure", "measured_utc")
    }
    named = {"problem": problem_to_dict(trial.problem), "config": trial.config.to_dict(), "kernel": digest}
    return json.dumps(named | facts)


def logged(keep: Keep, log: Path | None = None) -> Keep:
    """Return a `keep` that also appends each trial to a log (default: `TRITILE_TUNE_LOG`, if set).

    A log that cannot be written is warned of with StoreWarning.
    """
    path = log or tune_log()
    if path is None:
        return keep

    def both(digest: str, trial: Trial) -> None:
        keep(digest, trial)
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(line_of(digest, trial) + "\n")
        except OSError as error:
            warnings.warn(f"a trial cannot be logged: {error}", StoreWarning, stacklevel=2)

    return both


def keeper(store: Store, log: Path | None = None) -> Keep:
    """Return a function that remembers a trial in a store, and appends it to a log."""
    return logged(store.add, log)
