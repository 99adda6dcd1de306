"""Make a table of what a store remembers, and complete it by an older table."""

from collections.abc import Mapping
from dataclasses import replace

from tritile.core.device import Device
from tritile.core.problem import Problem
from tritile.families.registry import FAMILIES
from tritile.planning.store import Store
from tritile.planning.table import Entry, Table, in_order
from tritile.planning.trial import TORCH, Trial, rank


def from_store(store: Store, device: Device, kernels: Mapping[str, str]) -> Table:
    """Return a table of the best trial of each problem, measured with kernels of these digests, by label.

    A trial whose answer was checked goes before one that was only timed.
    """
    bests: dict[Problem, Trial] = {}
    for label, digest in kernels.items():
        for trial in store.bests(digest, label.partition("/")[0]):
            rival = bests.setdefault(trial.problem, trial)
            if rank(trial) < rank(rival):
                bests[trial.problem] = trial
    entries = []
    for trial in bests.values():
        torchs = store.best(TORCH, trial.problem)
        entries.append(Entry(trial.problem, trial.config, trial.us, None if torchs is None else torchs.us))
    return Table(device.to_dict(), dict(kernels), in_order(entries))


def completed(table: Table, old: Table) -> Table:
    """Return the table with the entries, portfolios and leads of an older one that it lacks.

    Only what was measured on the same GPU model and with the same kernels is taken over.
    """
    if old.device["name"] != table.device["name"]:
        return table
    has = {entry.problem for entry in table.entries}
    same = {label for label, digest in table.kernels.items() if old.kernels.get(label) == digest}
    kept = [entry for entry in old.entries if entry.problem not in has and _label(entry) in same]
    return replace(
        table,
        entries=in_order((*table.entries, *kept)),
        portfolios={**old.current_portfolios(), **table.portfolios},
        leads={**old.current_leads(), **table.leads},
    )


def _label(entry: Entry) -> str:
    family = FAMILIES[entry.problem.op].get(entry.config.family)
    return family.label if family is not None else ""
