"""Gather the rows of one report from files that were read."""

from collections.abc import Iterable, Sequence

from tritile.core.device import Device
from tritile.lab.report.page.rows import Rows, facets_of, rows_of
from tritile.lab.report.page.searches import Recorded, searched
from tritile.lab.report.page.sources import Sources
from tritile.lab.report.page.tuner import autotune_rows, study_rows
from tritile.lab.report.results import Result


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
