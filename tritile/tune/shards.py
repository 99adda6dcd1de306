"""Shards: problems tuned by the ranks of one torchrun, on many GPUs and hosts, and written by rank 0.

Ranks meet in torch.distributed's key-value store and never in a collective, so that one that is lost
holds up none of the others. Each claims its next problem when it has room for it. What a lost rank
claimed and did not finish is claimed again; one that was only slow does a problem twice, which does no
harm. Trials go to rank 0 as they are measured, and a problem counts as finished once all of them are
written. If rank 0 itself is lost, the others stop with an error, and what it wrote is kept.

Where a process dies, torchrun's agent stops all others: SIGTERM, on which each sends what it has and
ends, and SIGKILL 30 s later. With `--max-restarts` it then starts all of them again, and problems that
are remembered by then need not be tuned again. Where ranks are started by something else, which sets
the same variables, the other ranks go on.
"""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final

from tritile.core.problem import Problem
from tritile.errors import DistributedError, InvalidValueError, brief
from tritile.planning.agreement import facts_of
from tritile.planning.store import Store
from tritile.planning.trial import Trial
from tritile.tune.board import Place, Pulse, Watch, connect
from tritile.tune.sides import TURN_S, Follower, Leader, process_name

__all__ = ["JOIN_S", "LOST_S", "Place", "Shards", "in_turn", "part"]

LOST_S: Final = 30.0
JOIN_S: Final = 120.0
_PATIENCE_S: Final = 10.0  # of rank 0 with the others' last words, where it ends by an error


class Shards:
    """This rank's part in tuning a list of problems.

    ```
    place = Place.from_environment()
    with Shards(place, problems, store_of(device)) as shards:
        for done in tune(shards.claims(), ..., keep=shards.keep):
            shards.finished(done.problem)
    ```

    Args:
        place: which rank this is, of how many.
        problems: what is to be tuned, as rank 0 has it: what other ranks give is not read.
        store: where rank 0 writes; of other ranks only its device counts.
        facts: what must be the same on every rank, by name. Default: `facts_of(store.device)`.
        lost_s: seconds without a heartbeat after which a rank is held to be lost.
        join_s: seconds to wait, at the start, for the others.

    Each rank begins with a part of the list of its own, from its front, and then helps with the others',
    from their ends: problems that are alike, and share compiled kernels, belong side by side.
    Entering waits for the other ranks; leaving, on rank 0, until they have left or are lost. Within, in
    the main thread, SIGTERM raises SystemExit(143).
    Entering raises DistributedError, on all ranks, where one differs from rank 0, and where rank 0 is
    not found. Within, every method raises it once rank 0 is lost. `problems` are then rank 0's.
    """

    def __init__(
        self,
        place: Place,
        problems: Sequence[Problem],
        store: Store,
        facts: Mapping[str, str] | None = None,
        lost_s: float = LOST_S,
        join_s: float = JOIN_S,
    ) -> None:
        self.place, self.problems, self._store = place, tuple(dict.fromkeys(problems)), store
        self._facts = facts_of(store.device) if facts is None else facts
        self._lost_s, self._join_s = lost_s, join_s
        self._name = process_name(os.getpid())
        self._mine: dict[Problem, int] = {}  # claimed, and not finished yet
        self._told: set[int] = set()  # finished here, and maybe not written yet
        self._ahead: list[int] = []  # not looked at yet, the next one last
        self._leaving, self._failure = threading.Event(), ""
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> "Shards":
        entrance = connect(self.place, self._join_s)
        self._side: Leader | Follower
        if self.place.rank == 0:
            self._side = Leader(
                entrance, self.place, self.problems, self._store, self._facts,
                self._lost_s, self._join_s, self._name,
            )  # fmt: skip
        else:
            self._side = Follower(
                entrance, self.place, self._facts, self._lost_s, 2 * self._join_s, self._name
            )
        self._board, self._watch = self._side.board, Watch(self._side.board, self._lost_s)
        self.problems = tuple(self._side.problems)
        self._numbers = {problem: index for index, problem in enumerate(self._side.problems)}
        self._ahead = in_turn(len(self.problems), self.place)[::-1]
        self._pulse = Pulse(self._board, self._side.beats, min(TURN_S, self._lost_s / 10))
        self._thread = threading.Thread(target=self._turns, name="tritile shards", daemon=True)
        self._thread.start()
        self._undo.callback(self._pulse.stop)
        self._undo.enter_context(_stopped_by_sigterm())
        return self

    @property
    def stopping(self) -> bool:
        """Whether rank 0 leaves, and the others are to end after what they have in hand."""
        return self._side.stopping

    @property
    def left(self) -> int:
        """How many problems nobody has finished yet."""
        self._check()
        return len(self.problems) - self._board.count("finished", 0)

    def claims(self) -> Iterator[Problem | None]:
        """The next problem for this rank, again and again, until every problem is finished by somebody.

        None where there is nothing to claim at the moment, as this rank has its share in hand or others
        may yet be lost: go on with what is in hand, and ask again. Ends early where rank 0 leaves.
        """
        unfinished, looked = list(self._numbers.values()), 0.0
        while unfinished and not self.stopping:
            problem = self._claimed(unfinished)
            yield problem
            if problem is None and time.monotonic() - looked > TURN_S:
                self._check()
                looked = time.monotonic()
                unfinished = [i for i in unfinished if self._board.read(f"done/{i}") is None]

    def keep(self, kernel: str, trial: Trial) -> None:
        """Have rank 0 remember a trial of the kernel with this digest."""
        self._check()
        self._side.keep(kernel, trial)

    def finished(self, problem: Problem) -> None:
        """Say that a problem is done with, whether or not a config works, all its trials having been kept.

        Raises InvalidValueError for one that is not among `problems`.
        """
        self._check()
        if problem not in self._numbers:
            raise InvalidValueError(f"{problem.label} is not among the problems that are tuned here")
        index = self._numbers[problem]
        self._told.add(index)
        self._side.finished(index)
        self._mine.pop(problem, None)

    def _claimed(self, unfinished: Sequence[int]) -> Problem | None:
        while self._ahead and len(self._mine) < self._share():
            index = self._ahead.pop()
            if self._claim(index, ""):
                self._board.count("claimed")
                return self.problems[index]
        if self._ahead or self._mine:
            return None
        for index in unfinished:  # one at a time: there may be others with nothing to do
            owner = self._orphaned(index)
            if owner is not None and self._claim(index, owner):
                return self.problems[index]
        return None

    def _share(self) -> int:
        """How many this rank may have in hand, so that at the end none waits long for another."""
        self._check()
        unclaimed = len(self.problems) - self._board.count("claimed", 0)
        return max(1, unclaimed // self.place.size)

    def _claim(self, index: int, owner: str) -> bool:
        """Take a problem over from `owner`, "" for nobody; whether no other rank was faster."""
        if self._board.swap(f"owner/{index}", owner, self._name) != self._name:
            return False
        self._mine[self.problems[index]] = index
        return True

    def _orphaned(self, index: int) -> str | None:
        """Who had claimed a problem and will not finish it, "" if it was given back; else None."""
        if index in self._told or self._board.read(f"done/{index}") is not None:
            return None
        owner = self._board.swap(f"owner/{index}", "", "")
        return owner if owner == "" or self._watch.lost(owner) else None

    def _turns(self) -> None:
        try:
            while not self._leaving.wait(TURN_S):
                self._side.turn()
        except DistributedError as error:
            self._failure = str(error)
        except Exception as error:
            self._failure = f"rank {self.place.rank} cannot go on with the others: {brief(error)}"

    def _check(self) -> None:
        if self._failure:
            raise DistributedError(self._failure)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._undo:
            self._leaving.set()
            self._thread.join()
            if kind is None:
                self._check()
            try:
                self._leave(math.inf if kind is None else _PATIENCE_S)
            except (SystemExit, KeyboardInterrupt):
                self._leave(_PATIENCE_S)
                raise

    def _leave(self, patience_s: float) -> None:
        with contextlib.suppress(DistributedError):  # who is gone needs no farewell
            for index in self._mine.values():
                self._board.swap(f"owner/{index}", self._name, "")
            self._side.leave(patience_s)


def part(count: int, rank: int, size: int) -> range:
    """The numbers, of 0 to `count`, that a rank begins with."""
    return range(rank * count // size, (rank + 1) * count // size)


def in_turn(count: int, place: Place) -> list[int]:
    """In which order a rank claims: its own part, and then each following rank's from the end."""
    order = list(part(count, place.rank, place.size))
    for step in range(1, place.size):
        order += reversed(part(count, (place.rank + step) % place.size, place.size))
    return order


@contextlib.contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """SIGTERM, with which torchrun's agent stops a rank, ends it by SystemExit; a second changes nothing."""

    def stop(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
