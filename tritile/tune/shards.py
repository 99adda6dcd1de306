"""Share a list of problems among the ranks of torchrun, on any number of GPUs and hosts.

The ranks share torch's key-value store and call no collective, so a lost rank holds up no other. The store
has the state of each problem: free, taken by a rank, or done. A rank takes free problems, and those of a rank
that left or is lost. A rank that was only slow has a problem tuned twice, which does no harm. Rank 0 alone
writes trials to disk, its own and those that others send through the store. Without rank 0 the others stop
with an error; the trials that it wrote are kept.

If a process dies, torchrun's agent stops the others by SIGTERM, and `--max-restarts` starts all ranks again;
remembered problems need no tuning then. Under other launchers, which set the same variables, the remaining
ranks go on.
"""

import contextlib
import itertools
import json
import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Final

from torch import distributed

from tritile.core.problem import Problem, problem_from_dict, problem_to_dict
from tritile.errors import DistributedError, InvalidValueError, StoreWarning, brief
from tritile.planning.store import Store
from tritile.planning.sync import difference, facts_of
from tritile.planning.trial import Trial, row_of, trial_from

LOST_S: Final = 30.0
JOIN_S: Final = 120.0
_TURN_S: Final = 0.1  # between two heartbeats, or looks at ranks that are waited for
_PATIENCE_S: Final = 10.0  # for the others' last trials, where rank 0 ends by an error
_FREE, _DONE, _LEFT, _STOPPING = "free", "done", "left", "stopping"
_lists: Final = itertools.count()  # of problems that this process took part in
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
        """Read RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

        Returns None where WORLD_SIZE is absent or 1. Raises InvalidValueError for values that name no rank.
        """
        if os.environ.get("WORLD_SIZE", "1") == "1":
            return None
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        given = {"LOCAL_WORLD_SIZE": "1"} | {n: os.environ[n] for n in names if n in os.environ}
        numbers = [given.get(name, "") for name in names if name != "MASTER_ADDR"]
        if not (all(map(str.isdecimal, numbers)) and given.get("MASTER_ADDR")) or (
            int(given["RANK"]) >= int(given["WORLD_SIZE"])
        ):
            raise InvalidValueError(
                f"{given}: wanted the variables that torchrun sets, or no WORLD_SIZE for one process"
            )
        rank, size, local_rank, local_size, port = map(int, numbers)
        return cls(rank, size, local_rank, max(1, local_size), given["MASTER_ADDR"], port)


def part(count: int, rank: int, size: int) -> range:
    """Return the numbers below `count` that a rank begins with."""
    return range(rank * count // size, (rank + 1) * count // size)


def _connected(place: Place, timeout_s: float) -> Any:
    """Return the store that torchrun's agent keeps, else that of rank 0; each list has keys of its own."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    store = _dist.TCPStore(
        place.host,
        place.port,
        is_master=place.rank == 0 and not agent,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=True,  # the script may have a process group at this port
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the agent's store outlives an attempt
    return _dist.PrefixStore(f"tritile/{attempt}/{next(_lists)}", store)


class Shards:
    """Tune a share of a list of problems on this rank; see `tritile.cli.tune` for its use.

    Args:
        place: which rank this is, of how many.
        problems: what is to be tuned, on rank 0; the others take rank 0's.
        store: where rank 0 writes; of other ranks only its device counts.
        lost_s: seconds without a heartbeat after which a rank is held to be lost.
        join_s: seconds after which a rank that has not come is held to be lost.

    Entering waits for rank 0; leaving, on rank 0, until the others have left or are lost. Within, in the
    main thread, SIGTERM raises SystemExit(143). DistributedError is raised where this rank differs from rank
    0, where rank 0 is not found, and by every method once rank 0 is lost.
    """

    def __init__(
        self,
        place: Place,
        problems: Sequence[Problem],
        store: Store,
        lost_s: float = LOST_S,
        join_s: float = JOIN_S,
    ) -> None:
        self.place, self.problems, self._store = place, tuple(dict.fromkeys(problems)), store
        self._lost_s, self._join_s = lost_s, join_s
        self._beats = [f"beat/{rank}" for rank in range(place.size)]
        self._seen: dict[int, tuple[str, float]] = {}  # by rank: its heartbeat, and since when
        self._gone: set[int] = set()  # ranks that left or are lost
        self._mine: set[int] = set()  # problems taken, and not finished yet

    def __enter__(self) -> "Shards":
        rank, size = self.place.rank, self.place.size
        try:
            self._board = _connected(self.place, self._join_s)
        except RuntimeError as error:
            raise DistributedError(f"rank {rank} finds no rank 0: {brief(error)}") from error
        facts = facts_of(self._store.device)
        if rank == 0:
            free = dict.fromkeys((f"state/{number}" for number in range(len(self.problems))), _FREE)
            begun = free | dict.fromkeys(self._beats, "0") | {"stopping": ""}
            self._ask("multi_set", list(begun), list(begun.values()))
            listed = [problem_to_dict(problem) for problem in self.problems]
            self._ask("set", "problems", json.dumps([facts, listed]))
        else:
            wanted, listed = json.loads(self._ask("get", "problems"))  # waits for them
            if differs := difference(wanted, facts):
                self._ask("set", self._beats[rank], _LEFT)
                raise DistributedError(f"rank {rank} cannot tune with rank 0: {differs}")
            self.problems = tuple(problem_from_dict(problem) for problem in listed)
        self._states = [f"state/{number}" for number in range(len(self.problems))]
        own, *others = (part(len(self.problems), (rank + step) % size, size) for step in range(size))
        # Problems that share compiled kernels lie side by side: others' parts come last, and reversed.
        self._order = [*own, *itertools.chain(*(each[::-1] for each in others))]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="tritile shards", daemon=True)
        self._thread.start()
        self._undo = contextlib.ExitStack()
        if threading.current_thread() is threading.main_thread():
            self._undo.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, _stop))
        return self

    @property
    def stopping(self) -> bool:
        """Tell whether rank 0 leaves: the others are to end after what they have in hand.

        This also looks whose heartbeat stands still: no two clocks are compared.
        """
        *beats, stopping = self._read([*self._beats, "stopping"])
        now = time.monotonic()
        for rank, beat in enumerate(beats):
            if beat != self._seen.get(rank, ("", now))[0]:
                self._seen[rank] = beat, now
            silent_s = now - self._seen[rank][1]
            lost = silent_s > (self._join_s if beat == "0" else self._lost_s)
            (self._gone.add if lost or beat == _LEFT else self._gone.discard)(rank)
        if 0 in self._gone and stopping != _STOPPING:
            raise DistributedError("rank 0, which writes all trials, is lost; those written are kept")
        return stopping == _STOPPING

    @property
    def left(self) -> int:
        """Return how many problems nobody has finished yet."""
        return sum(state != _DONE for state in self._read(self._states))

    def claims(self) -> Iterator[Problem | None]:
        """Yield the next problem for this rank, until every problem is finished by somebody.

        None stands for none at the moment, as this rank has its share in hand, or others may yet be lost: go
        on with what is in hand, and ask again. Ends early where rank 0 leaves.
        """
        while not self.stopping:
            self._write_others()
            left = self.left
            if not left:
                return
            share = left // (2 * self.place.size)  # so few that at the end none waits long for another
            number = self._taken() if len(self._mine) < max(1, share) else None
            yield None if number is None else self.problems[number]

    def _taken(self) -> int | None:
        """Take a problem that is free, or that a lost rank has; return its number, None where none is."""
        states, me = self._read(self._states), str(self.place.rank)
        for number in self._order:
            state = states[number]
            if state != _FREE and (state == _DONE or int(state) not in self._gone):
                continue
            if self._ask("compare_set", self._states[number], state, me).decode() == me:
                self._mine.add(number)
                return number
        return None

    def keep(self, kernel: str, trial: Trial) -> None:
        """Have rank 0 remember a trial of the kernel with this digest; warn where it cannot be remembered."""
        if self.place.rank == 0:
            return self._store.add(kernel, trial)
        try:
            self._ask("queue_push", "trials", json.dumps([kernel, row_of(trial)]))
        except InvalidValueError as error:
            warnings.warn(f"a trial cannot be remembered: {error}", StoreWarning, stacklevel=2)

    def finished(self, problem: Problem) -> None:
        """Say that a problem is done with, whether or not a config works, all its trials having been kept."""
        number = self.problems.index(problem)
        self._ask("set", self._states[number], _DONE)
        self._mine.discard(number)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._undo:
            try:
                if self.place.rank == 0:
                    self._wait_for_others(math.inf if kind is None else _PATIENCE_S)
            finally:
                self._ended.set()
                self._thread.join()
                with contextlib.suppress(DistributedError):  # who is gone needs no farewell
                    self._write_others()
                    self._ask("set", self._beats[self.place.rank], _LEFT)
                self._store.flush()  # also what a signal interrupted

    def _beat(self) -> None:
        """Show that this rank is there, also amid a long step of a search, until it ends."""
        with contextlib.suppress(DistributedError):  # which whatever else asks the store meets, too
            while not self._ended.wait(min(_TURN_S, self._lost_s / 10)):
                self._ask("add", self._beats[self.place.rank], 1)

    def _wait_for_others(self, patience_s: float) -> None:
        """Have the other ranks leave, and wait until they have left or are lost."""
        self._ask("set", "stopping", _STOPPING)
        deadline = time.monotonic() + patience_s
        while self.stopping and len(self._gone) < self.place.size - 1 and time.monotonic() < deadline:
            self._write_others()
            time.sleep(_TURN_S)

    def _write_others(self) -> None:
        """Write the trials that others have sent, on rank 0."""
        if self.place.rank == 0:
            for _ in range(self._ask("queue_len", "trials")):
                kernel, row = json.loads(self._ask("queue_pop", "trials", False))
                self._store.add(kernel, trial_from(row))

    def _read(self, keys: list[str]) -> list[str]:
        return [value.decode() for value in self._ask("multi_get", keys)] if keys else []

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Call a method of the key-value store. Raises DistributedError where the store is out of reach."""
        try:
            return getattr(self._board, name)(*arguments)
        except RuntimeError as error:  # torch raises subclasses of it where a connection fails
            raise DistributedError(f"the ranks' key-value store is out of reach: {brief(error)}") from error


def _stop(number: int, frame: Any) -> None:
    """End this rank by an exception, as torchrun's agent asks for; a second signal changes nothing."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)
