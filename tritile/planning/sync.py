"""Have every rank of a torch.distributed process group plan the same: `tritile.sync`.

Rank 0 sends a snapshot of its store as text, and every rank plans by the snapshot in place of its own store.
"""

import heapq
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import torch
from torch import distributed

from tritile.core import device as devices
from tritile.core.device import Device
from tritile.core.forgetting import drop
from tritile.core.problem import Problem
from tritile.core.settings import current_mode
from tritile.core.source import package_hash
from tritile.core.version import __version__
from tritile.errors import DistributedError, InvalidValueError, brief
from tritile.families import registry as families
from tritile.planning import gpu_tables, table
from tritile.planning.store import Store, own_store, stand_in
from tritile.planning.trial import ENVIRONMENT_COLUMNS, TRIAL_COLUMNS, Trial, rank, row_of, trial_from

_dist: Any = distributed  # which does not tell type checkers all that it exports
T = TypeVar("T")
PER_PROBLEM: Final = 8
_MAX_TOLD: Final = 3


def sync(group: Any = None) -> None:
    """Have every rank of a process group plan by what rank 0 remembers now, and by nothing else.

    Afterwards every rank gets the config that rank 0 gets, whether or not the problem was ever measured. This
    holds for `matmul`, `permute` and kernels that `tritile.autotune` decorates, on this GPU model. Nothing is
    measured any more: mode "tune" works as "cached". A rank still remembers what it measures by other means,
    in its own store, which plays no part. `tritile.forget()` ends this in the process that calls it; another
    `sync` takes what rank 0 remembers then. Plans may differ if a mode, a shipped table or the code changes
    on some ranks afterwards.

    Args:
        group: the ranks that take part, all of which must call this; None: the default group. Rank 0 is
            the group's own. With NCCL, each rank's current GPU must be its own.

    Raises DistributedError, on every rank, where one differs from rank 0 in GPU, versions, code, mode or
    table, or fails; and where `torch.distributed` has no process group yet.
    """
    share(lambda: devices.current_gpu() or devices.INTERPRETER, group)


def share(device_of: Callable[[], Device], group: Any = None) -> None:
    """Do as `sync` for the device that `device_of` gives.

    What may fail on one rank is done between two exchanges, and all ranks reach both.
    """
    if not (_dist.is_available() and _dist.is_initialized()):
        raise DistributedError("sync: no process group: call torch.distributed.init_process_group first")
    own_rank = _dist.get_rank(group)
    if own_rank < 0:
        raise DistributedError("sync: this process is not in the group given")

    def described() -> tuple[Device, dict[str, str]]:
        device = device_of()
        facts = facts_of(device)
        tables = {
            "shipped tables": gpu_tables.shipped(device),
            "pinned table": (gpu_tables.pinned(device),),
            "portfolios measured here": (gpu_tables.calibrated(device),),
        }
        digests = {name: " ".join(map(table.digest, found)) for name, found in tables.items()}
        return device, facts | {"mode": current_mode()} | digests

    found, why = _attempted(described)
    everyone = _gathered({"facts": found and found[1], "failure": why}, group)
    reasons = [_objection(other, theirs, everyone[0]) for other, theirs in enumerate(everyone)]
    _refuse(reasons)
    assert found is not None  # else `_refuse` raised
    device = found[0]

    text, why = _attempted(lambda: text_of(own_store(device)) if own_rank == 0 else "")
    told = _broadcast({"text": text, "failure": why}, group)
    snapshot, why = _attempted(lambda: Snapshot(device, told["text"]))
    outcomes = enumerate(_gathered(told["failure"] or why, group))
    _refuse([outcome and f"rank {other}: {outcome}" for other, outcome in outcomes])
    assert snapshot is not None
    stand_in(snapshot)
    drop()


def _attempted(work: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return the result and None, or None and why it failed: other ranks wait for this one."""
    try:
        return work(), None
    except Exception as error:
        return None, brief(error)


def _objection(rank: int, theirs: Any, first: Any) -> str | None:
    """Say why this rank cannot plan as rank 0, None where it can."""
    if theirs["failure"] or first["failure"]:
        return theirs["failure"] and f"rank {rank}: {theirs['failure']}"
    differs = difference(first["facts"], theirs["facts"])
    return differs and f"rank {rank} is not as rank 0: {differs}"


def _refuse(reasons: Sequence[str | None]) -> None:
    """Raise DistributedError, on every rank alike, where there is a reason."""
    told = [reason for reason in reasons if reason]
    if told:
        raise DistributedError(f"sync: {'; '.join(told[:3])}")


# Only text is sent: nothing of ours is pickled.
def _gathered(data: Any, group: Any) -> list[Any]:
    """Return the data of each rank, by rank of the group."""
    texts: list[Any] = [None] * _dist.get_world_size(group)
    _dist.all_gather_object(texts, json.dumps(data), group)
    return [json.loads(text) for text in texts]


def _broadcast(data: Any, group: Any) -> Any:
    """Return the data of rank 0."""
    texts = [json.dumps(data)]
    _dist.broadcast_object_list(texts, group=group, group_src=0)
    return json.loads(texts[0])


# --- What has to be the same in every process ---


def facts_of(device: Device) -> dict[str, str]:
    """Return versions of tritile and torch, the device's facts, and digests of kernels and code, by name."""
    kernels = {f"kernel {name}": digest for name, digest in families.digests().items()}
    facts = {name: str(value) for name, value in device.to_dict().items()}
    return {
        "tritile": __version__,
        "torch": torch.__version__,
        **facts,
        **kernels,
        "tritile's code": package_hash(),
    }


def difference(ours: Mapping[str, str], theirs: Mapping[Any, Any]) -> str | None:
    """Say how the facts of another process differ from rank 0's (`ours`), None where they are equal."""
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    told = [
        f"{name} is {str(theirs.get(name))[:80]!r}, on rank 0 {ours.get(name)!r}"
        for name in names[:_MAX_TOLD]
    ]
    more = [f"{len(names) - _MAX_TOLD} more differences"] if len(names) > _MAX_TOLD else []
    return "; ".join(told + more) or None


# --- The snapshot of a store ---


def text_of(store: Store) -> str:
    """Return what a store knows that counts today, as lines of JSON: a kernel's digest and a trial each.

    Of each problem and kernel these are the `PER_PROBLEM` best trials that work, on this device with these
    versions.
    """
    here = {name: getattr(store.device, name) for name in ENVIRONMENT_COLUMNS[:-1]}
    found: dict[tuple[str, Problem], list[Trial]] = defaultdict(list)
    for facts, trial in store.everything():
        if trial.works and all(facts[name] == value for name, value in here.items()):
            found[facts["kernel"], trial.problem].append(trial)
    lines = [
        json.dumps([kernel, row_of(trial)])
        for (kernel, _), trials in found.items()
        for trial in heapq.nsmallest(PER_PROBLEM, trials, key=rank)
    ]
    return "\n".join(lines)


def _pairs(text: str) -> Iterator[tuple[str, Trial]]:
    for line in text.splitlines():
        match json.loads(line):
            case [str(kernel), list(row)] if len(row) == len(TRIAL_COLUMNS):
                yield kernel, trial_from(row)
            case other:
                raise InvalidValueError(f"{str(other)[:80]!r} is no kernel and trial")


class Snapshot(Store):
    """Read what `text_of` gave, whatever the store's file comes to hold; add to the file.

    Raises InvalidValueError for a text that `text_of` cannot have given.
    """

    def __init__(self, device: Device, text: str) -> None:
        super().__init__(device)
        try:
            self._pairs = tuple(_pairs(text))
        except (ValueError, RecursionError) as error:
            raise InvalidValueError(f"no snapshot of a store: {str(error)[:200]}") from error
        self._known: dict[tuple[str, Problem], list[Trial]] = defaultdict(list)
        for kernel, trial in self._pairs:
            self._known[kernel, trial.problem].append(trial)

    def _read(self, kernels: tuple[str, ...], problem: Problem | None = None) -> list[Trial]:
        if problem is None:
            return [trial for kernel, trial in self._pairs if kernel in kernels]
        return [trial for kernel in kernels for trial in self._known.get((kernel, problem), ())]

    def everything(self) -> Iterator[tuple[dict[str, Any], Trial]]:
        """Yield what is in the snapshot, as `Store.everything` does."""
        here = {name: getattr(self.device, name) for name in ENVIRONMENT_COLUMNS[:-1]}
        return ((here | {"kernel": kernel}, trial) for kernel, trial in self._pairs)
