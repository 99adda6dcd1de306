"""Make rows for a GPU that is not here: configs that compile, with the times that the model predicts."""

from collections.abc import Iterator, Sequence
from typing import Final

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import Tiled
from tritile.tune.calibrate import sweep
from tritile.tune.calibrate.run import Measured
from tritile.tune.calibrate.sweep import Chooser, Row, Tell

CONFIGS: Final = 24  # configs of a portfolio
CANDIDATES: Final = 40  # for each config of a portfolio


def predicted(problems: Sequence[Tiled], configs: Sequence[Config], device: Device) -> Iterator[Row]:
    """Yield each size with the predicted microseconds of the configs near the fastest there."""
    chooser = Chooser(configs, device)
    for problem in problems:
        yield Row(problem, chooser.near(problem))


def compiled(name: str, rows: Sequence[Row], device: Device, count: int, tell: Tell) -> list[Row]:
    """Return the rows without the chosen configs that the compiler refuses, or that spill or do not fit.

    Each of `count` chosen configs is compiled at the size where it does best; others are chosen in place of
    those that fail. Raises TuningError where too few are left.
    """
    rows, fine = list(rows), set[Config]()
    while True:
        chosen = Measured(name, rows, device, corrected=False).chosen(count)
        wanted = {config: [_best_at(config, rows)] for config in chosen if config not in fine}
        refused = sweep.compile_all(wanted, device, tell, sweep.fit_at)
        if not refused:
            return rows
        fine |= wanted.keys() - refused
        rows = [Row(row.problem, {c: us for c, us in row.times.items() if c not in refused}) for row in rows]


def _best_at(config: Config, rows: Sequence[Row]) -> Tiled:
    """Return the problem at which a config comes nearest to the fastest."""
    own = [row for row in rows if config in row.times]
    return min(own, key=lambda row: row.times[config] / min(row.times.values())).problem
