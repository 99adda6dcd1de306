"""`tritile.sync`: the same plans on every rank of a torch.distributed process group."""

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import distributed

from tritile.core import device as devices
from tritile.core.device import Device
from tritile.core.forgetting import drop
from tritile.core.settings import current_mode
from tritile.errors import DistributedError, brief
from tritile.planning import table
from tritile.planning.agreement import difference, facts_of
from tritile.planning.snapshot import Snapshot, text_of
from tritile.planning.store import own_store, stand_in

_dist: Any = distributed  # which does not tell type checkers all that it exports
T = TypeVar("T")


def sync(group: Any = None) -> None:
    """Have every rank of a process group plan by what rank 0 remembers now, and by nothing else.

    Afterwards each call that is planned on this GPU model, of `matmul`, of `permute` and of kernels that
    `tritile.autotune` decorates, gets on every rank the config that it gets on rank 0, whether or not its
    problem was ever measured. Nothing is measured any more: mode "tune" does as "cached". What a rank
    measures by itself is still remembered in its own store, and plays no part until `tritile.forget()`,
    which ends this in the process that calls it; another `sync` takes what rank 0 remembers then. Where
    a mode, a shipped table or the code were changed on some ranks afterwards, plans may differ.

    Args:
        group: the ranks that take part, all of which must call this; None: the default group. Rank 0 is
            the group's own. With NCCL, each rank's current GPU must be its own.

    Raises DistributedError, on every rank, where one differs from rank 0 in GPU, versions, code, mode or
    table, or fails; and where `torch.distributed` has no process group yet.
    """
    share(lambda: devices.current_gpu() or devices.INTERPRETER, group)


def share(device_of: Callable[[], Device], group: Any = None) -> None:
    """`sync` for the device that `device_of` gives.

    What may fail on one rank is done between two exchanges, each of which all ranks come to.
    """
    if not (_dist.is_available() and _dist.is_initialized()):
        raise DistributedError("sync: no process group: call torch.distributed.init_process_group first")
    rank = _dist.get_rank(group)
    if rank < 0:
        raise DistributedError("sync: this process is not in the group given")

    def described() -> tuple[Device, dict[str, str]]:
        device = device_of()
        facts = facts_of(device)
        tables = {
            "shipped tables": table.shipped(device),
            "pinned table": (table.pinned(device),),
            "portfolios measured here": (table.calibrated(device),),
        }
        digests = {name: " ".join(map(table.digest, found)) for name, found in tables.items()}
        return device, facts | {"mode": current_mode()} | digests

    found, why = _attempted(described)
    everyone = _gathered({"facts": found and found[1], "failure": why}, group)
    reasons = [_objection(other, theirs, everyone[0]) for other, theirs in enumerate(everyone)]
    _refuse(reasons)
    assert found is not None  # else this rank, too, had been told of
    device = found[0]

    text, why = _attempted(lambda: text_of(own_store(device)) if rank == 0 else "")
    told = _broadcast({"text": text, "failure": why}, group)
    snapshot, why = _attempted(lambda: Snapshot(device, told["text"]))
    outcomes = enumerate(_gathered(told["failure"] or why, group))
    _refuse([outcome and f"rank {other}: {outcome}" for other, outcome in outcomes])
    assert snapshot is not None
    stand_in(snapshot)
    drop()


def _attempted(work: Callable[[], T]) -> tuple[T | None, str | None]:
    """The result, and None; or None, and why there is none: others wait for this rank, whatever happens."""
    try:
        return work(), None
    except Exception as error:
        return None, brief(error)


def _objection(rank: int, theirs: Any, first: Any) -> str | None:
    """Say why this rank and rank 0 cannot do as one."""
    if theirs["failure"] or first["failure"]:
        return theirs["failure"] and f"rank {rank}: {theirs['failure']}"
    differs = difference(first["facts"], theirs["facts"])
    return differs and f"rank {rank} is not as rank 0: {differs}"


def _refuse(reasons: Sequence[str | None]) -> None:
    """Raise DistributedError, on every rank alike, where one has a reason."""
    told = [reason for reason in reasons if reason]
    if told:
        raise DistributedError(f"sync: {'; '.join(told[:3])}")


# Only text is sent: nothing of ours is pickled.
def _gathered(data: Any, group: Any) -> list[Any]:
    """Tell what each rank has, by rank of the group."""
    texts: list[Any] = [None] * _dist.get_world_size(group)
    _dist.all_gather_object(texts, json.dumps(data), group)
    return [json.loads(text) for text in texts]


def _broadcast(data: Any, group: Any) -> Any:
    """Tell what rank 0 has."""
    texts = [json.dumps(data)]
    _dist.broadcast_object_list(texts, group=group, group_src=0)
    return json.loads(texts[0])
