"""Share problems, messages and heartbeats among ranks, by torch's key-value store.

Nothing here waits for another rank, so a lost rank holds up no other.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from torch import distributed

from tritile.errors import DistributedError, InvalidValueError, brief

_NAMES: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_dist: Any = distributed  # which does not tell type checkers all that it exports


@dataclass(frozen=True)
class Place:
    """Hold the rank of this process, among all ranks and on its host, as torchrun tells it."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    port: int

    @classmethod
    def from_environment(cls) -> "Place | None":
        """Read RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.

        Returns None where WORLD_SIZE is absent or 1. Raises InvalidValueError for values that name no rank.
        """
        if os.environ.get("WORLD_SIZE", "1") == "1":
            return None
        given = {name: os.environ.get(name, "") for name in _NAMES}
        whole = all(given[name].isdecimal() for name in _NAMES if name != "MASTER_ADDR")
        if not (whole and given["MASTER_ADDR"] and int(given["RANK"]) < int(given["WORLD_SIZE"])):
            raise InvalidValueError(
                f"{given}: wanted the variables that torchrun sets, or no WORLD_SIZE for one process"
            )
        rank, size, local = (int(given[name]) for name in _NAMES[:3])
        host_size = os.environ.get("LOCAL_WORLD_SIZE", "1")
        local_size = max(1, int(host_size)) if host_size.isdecimal() else 1
        return cls(rank, size, local, local_size, given["MASTER_ADDR"], int(given["MASTER_PORT"]))


@contextlib.contextmanager
def _reached() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch raises subclasses of it where a connection fails
        raise DistributedError(
            f"the ranks' key-value store is gone, or out of reach: {brief(error)}"
        ) from error


class Board:
    """Share counters, texts and one queue of messages.

    Every method raises DistributedError where the store is out of reach.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    @classmethod
    @_reached()
    def connect(cls, place: Place, timeout_s: float) -> "Board":
        """Connect to the store that torchrun's agent keeps, else to that of rank 0.

        Messages need torch's default store, which uses libuv.
        """
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        store = _dist.TCPStore(
            place.host,
            place.port,
            is_master=place.rank == 0 and not agent,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,  # the script may have a process group at this port
        )
        return cls(store).under("tritile")

    def under(self, prefix: str) -> "Board":
        """Return a board of its own, whose keys begin with a prefix."""
        return Board(_dist.PrefixStore(prefix, self._store))

    @_reached()
    def add(self, key: str, by: int = 0) -> int:
        """Add to a counter, 0 at first, and return its value. Atomic."""
        return self._store.add(key, by)

    @_reached()
    def put(self, key: str, text: str) -> None:
        """Set the text of a key."""
        self._store.set(key, text)

    @_reached()
    def get(self, key: str) -> str | None:
        """Return the text of a key, None where it is not set."""
        return self._store.get(key).decode("utf-8", "replace") if self._store.check([key]) else None

    @_reached()
    def swap(self, key: str, old: str, new: str) -> bool:
        """Set a key to `new` if it is `old` ("": not set); return whether it is `new` now. Atomic."""
        return self._store.compare_set(key, old, new) == new.encode()

    @_reached()
    def push(self, message: str) -> None:
        """Append a message. Atomic."""
        self._store.queue_push("messages", message)

    @_reached()
    def pop(self) -> list[str]:
        """Take the messages that are there, oldest first; only one rank may."""
        count = self._store.queue_len("messages")
        return [self._store.queue_pop("messages", False).decode("utf-8", "replace") for _ in range(count)]


class Watch:
    """Tell which ranks are lost: their heartbeat stood still for `lost_s` seconds.

    Heartbeats are counters, timed by the rank that looks: no two clocks are compared. While nobody looked, no
    rank is held to have been silent.
    """

    def __init__(self, board: Board, lost_s: float) -> None:
        self._board, self._lost_s = board, lost_s
        self._seen: dict[str, tuple[int, float, float]] = {}

    def lost(self, member: str) -> bool:
        """Look at a heartbeat, and return whether its sender is lost."""
        beat, now = self._board.add(f"beat/{member}"), time.monotonic()
        before, since, looked = self._seen.get(member, (beat, now, now))
        if beat != before or now - looked > self._lost_s / 2:
            since = now
        self._seen[member] = beat, since, now
        return now - since > self._lost_s


def part(count: int, rank: int, size: int) -> range:
    """Return the numbers below `count` that a rank begins with."""
    return range(rank * count // size, (rank + 1) * count // size)


class Queue:
    """Hand out the numbers below `count`, each once, and again where who took one is gone.

    A rank gets its own part first, from the front, and then those of the ranks after it, from the back:
    problems that are alike, and share compiled kernels, lie side by side.
    """

    def __init__(self, board: Board, place: Place, member: str, count: int) -> None:
        self._board, self._member, self._count, self._rank = board, member, count, place.rank
        ranks = ((place.rank + step) % place.size for step in range(place.size))
        self._parts = {rank: part(count, rank, place.size) for rank in ranks}  # those not exhausted

    def next(self) -> int | None:
        """Take a number that nobody has taken; None where there is none."""
        while self._parts:
            rank, numbers = next(iter(self._parts.items()))
            own = rank == self._rank
            taken = self._board.add(f"{'front' if own else 'back'}/{rank}", 1)
            if taken <= len(numbers):
                number = numbers[taken - 1 if own else -taken]
                if self._board.swap(f"owner/{number}", "", self._member):
                    return number
            del self._parts[rank]  # front and back have met
        return None

    def orphan(self, done: frozenset[int], gone: frozenset[str]) -> int | None:
        """Take over a number that is not done, of a member that is gone; None where there is none."""
        for number in range(self._count):
            if number not in done:
                owner = self._board.get(f"owner/{number}") or ""  # "": it was lost before it could tell
                lost = owner != self._member and owner in gone | {""}
                if lost and self._board.swap(f"owner/{number}", owner, self._member):
                    return number
        return None
