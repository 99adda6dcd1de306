"""The board: torch.distributed's key-value store, as ranks that tune together read and write it.

Nothing here waits for another rank, so that one that is lost holds up nobody.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from torch import distributed

from tritile.errors import DistributedError, InvalidValueError, brief

_dist: Any = distributed  # which does not tell type checkers all that it exports
_NAMES: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Place:
    """Which of how many processes this one is, and which of its host's, as torchrun tells it."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    port: int

    @classmethod
    def from_environment(cls) -> "Place | None":
        """The place that RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT name.

        None where WORLD_SIZE is absent or 1. Raises InvalidValueError for values that name no place.
        """
        if os.environ.get("WORLD_SIZE", "1") == "1":
            return None
        given = {name: os.environ.get(name, "") for name in _NAMES}
        whole = all(given[name].isdecimal() for name in _NAMES if name != "MASTER_ADDR")
        if not (whole and given["MASTER_ADDR"] and int(given["RANK"]) < int(given["WORLD_SIZE"])):
            raise InvalidValueError(f"{given}: wanted what torchrun sets, or no WORLD_SIZE for one process")
        rank, size, local = (int(given[name]) for name in _NAMES[:3])
        host_size = os.environ.get("LOCAL_WORLD_SIZE", "1")
        local_size = max(1, int(host_size)) if host_size.isdecimal() else 1
        return cls(rank, size, local, local_size, given["MASTER_ADDR"], int(given["MASTER_PORT"]))


@contextlib.contextmanager
def _ours() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # whatever torch raises of a connection
        raise DistributedError(
            f"the ranks' key-value store is gone, or out of reach: {brief(error)}"
        ) from error


class Board:
    """Texts by key that every rank sees. Raises DistributedError where they are out of reach."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def under(self, prefix: str) -> "Board":
        """The keys that begin so, as a board of their own."""
        return Board(_dist.PrefixStore(prefix, self._store))

    def put(self, key: str, text: str) -> None:
        """Set a key."""
        with _ours():
            self._store.set(key, text)

    def read(self, key: str) -> str | None:
        """The text of a key, None where it is not set. Only the one reader of a key may drop it."""
        with _ours():
            raw = self._store.get(key) if self._store.check([key]) else None
        return raw if raw is None else raw.decode("utf-8", "replace")

    def has(self, key: str) -> bool:
        """Whether a key is set; also for a key that its reader may drop at any moment."""
        with _ours():
            return bool(self._store.check([key]))

    def drop(self, key: str) -> None:
        """Unset a key."""
        with _ours():
            self._store.delete_key(key)

    def swap(self, key: str, old: str, new: str) -> str:
        """Set a key to `new` if it is `old` ("" stands for not set too); what it then is. Atomic."""
        with _ours():
            return self._store.compare_set(key, old, new).decode("utf-8", "replace")

    def count(self, key: str, by: int = 1) -> int:
        """Add to a number, 0 at first; what it then is. Atomic."""
        with _ours():
            return self._store.add(key, by)


def connect(place: Place, timeout_s: float) -> Board:
    """The board of this run: kept by torchrun's agent where there is one, else by rank 0.

    Raises DistributedError where it cannot be reached within `timeout_s`.
    """
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    with _ours():
        store = _dist.TCPStore(
            place.host,
            place.port,
            is_master=place.rank == 0 and not agent,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,  # the script may have a process group at this port
        )
    return Board(store).under("tritile")


class Pulse:
    """Heartbeats, by a thread that does nothing else: a process that waits for its disk is not lost."""

    def __init__(self, board: Board, names: Sequence[str], every_s: float) -> None:
        self._keys, self._every_s = [f"beat/{name}" for name in names], every_s
        self._board, self._ended = board, threading.Event()
        threading.Thread(target=self._run, name="tritile pulse", daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(DistributedError):  # told to who next needs the board
            while not self._ended.wait(self._every_s):
                for key in self._keys:
                    self._board.count(key)

    def stop(self) -> None:
        """Beat no more."""
        self._ended.set()


class Watch:
    """Tells which members are lost: those whose heartbeat stood still for `lost_s` seconds.

    Beats are counters, timed by who looks: no two clocks are compared. While nobody looked, a member is
    not held to have been silent.
    """

    def __init__(self, board: Board, lost_s: float) -> None:
        self._board, self._lost_s = board, lost_s
        self._seen: dict[str, tuple[str | None, float, float]] = {}

    def lost(self, member: str) -> bool:
        """Whether a member is lost, as far as looking at it so far can tell."""
        beat, now = self._board.read(f"beat/{member}"), time.monotonic()
        before, since, looked = self._seen.get(member, (beat, now, now))
        if beat != before or now - looked > self._lost_s / 2:
            since = now
        self._seen[member] = beat, since, now
        return now - since > self._lost_s
