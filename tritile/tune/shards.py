"""Share a list of problems among the ranks of torchrun, on any number of GPUs and hosts.

The ranks share torch's key-value store and call no collective, so a lost rank holds up no other. Each takes
problems from a queue. Rank 0 alone writes trials to disk, its own and those that others send, and tells all
which problems are finished: all their trials are written. Others take the unfinished problems of a rank that
left or is lost. A rank that was only slow has a problem tuned twice, which does no harm. Without rank 0 the
others stop with an error; what rank 0 wrote is kept.

If a process dies, torchrun's agent stops the others: SIGTERM, on which each hands over its trials and ends,
and SIGKILL 30 s later. `--max-restarts` starts all ranks again; remembered problems need no tuning then.
Under other launchers, which set the same variables, the remaining ranks go on.
"""

import contextlib
import json
import math
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple

from tritile.core.problem import Problem, problem_from_dict, problem_to_dict
from tritile.errors import DistributedError, InvalidValueError, StoreWarning, brief
from tritile.planning.store import Store
from tritile.planning.sync import difference, facts_of
from tritile.planning.trial import TRIAL_COLUMNS, Trial, parsed, row_of, trial_from
from tritile.tune.board import Board, Place, Queue, Watch, part

__all__ = ["JOIN_S", "LOST_S", "Place", "Shards", "part"]

LOST_S: Final = 30.0
JOIN_S: Final = 120.0
_TURN_S: Final = 0.1  # between two looks at the board
_PATIENCE_S: Final = 10.0  # for the others' last messages, where rank 0 ends by an error
_LEADER: Final = "0"  # rank 0's name as a member; the others count from 1 as they come
_joined: Final[set[tuple[str, int, int, int]]] = set()  # sessions of this process: none is joined twice


class State(NamedTuple):
    """Hold what rank 0 tells all: finished problems, members that left or are lost, whether to end."""

    done: frozenset[int] = frozenset()
    gone: frozenset[str] = frozenset()
    stopping: bool = False


class Leader:
    """Act on the members' messages, on rank 0, and tell all of them the state."""

    def __init__(self, board: Board, store: Store, count: int, lost_s: float) -> None:
        self.ranks: dict[str, int] = {}  # by member
        self.refusal = ""  # why some member cannot take part
        self.state = State()
        self._board, self._store, self._count, self._watch = board, store, count, Watch(board, lost_s)
        self._done: set[int] = set()
        self._left: set[str] = set()

    def turn(self, stopping: bool = False) -> None:
        """Read the messages that are there, and look who is lost. Messages that no rank sent are skipped."""
        for text in self._board.pop():
            try:
                self._hear(text)
            except InvalidValueError as error:
                warnings.warn(f"what another rank sent is skipped: {error}", StoreWarning, stacklevel=2)
        lost = {member for member in self.ranks if self._watch.lost(member)}
        state = State(frozenset(self._done), frozenset(self._left | lost), stopping)
        if state != self.state:
            self._board.put("state", json.dumps([sorted(state.done), sorted(state.gone), stopping]))
            self.state = state

    def _hear(self, text: str) -> None:
        match parsed(text):
            case ["came", str(member), int(rank), str(refusal)]:
                self.refusal = self.refusal or refusal  # before it is told that all have come
                self.ranks[member] = rank
            case ["trial", str(kernel), list(row)] if len(row) == len(TRIAL_COLUMNS):
                self._store.add(kernel, trial_from(row))
            case ["finished", int(number)] if 0 <= number < self._count:
                self._done.add(number)
            case ["left", str(member)]:
                self._left.add(member)
            case _:
                raise InvalidValueError(f"{text[:80]!r} is no message of a rank's")


class Shards:
    """Tune a share of a list of problems on this rank.

    ```
    place = Place.from_environment()
    with Shards(place, problems, store_of(device)) as shards:
        for done in tune(shards.claims(), ..., keep=shards.keep):
            shards.finished(done.problem)
    ```

    Args:
        place: which rank this is, of how many.
        problems: what is to be tuned, on rank 0; the others take rank 0's.
        store: where rank 0 writes; of other ranks only its device counts.
        facts: what must be the same on every rank, by name. Default: `facts_of(store.device)`.
        lost_s: seconds without a heartbeat after which a rank is held to be lost.
        join_s: seconds to wait, at the start, for the others.

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
        self._facts = dict(facts_of(store.device) if facts is None else facts)
        self._lost_s, self._join_s = lost_s, join_s
        self._mine: set[int] = set()  # taken, and not finished yet
        self._told: set[int] = set()  # finished here
        self._state = State()
        self._leader: Leader | None = None
        self._threads: list[threading.Thread] = []
        self._leaving, self._ended = False, threading.Event()
        self._failure, self._broken = "", False  # broken: by other than a store out of reach

    def __enter__(self) -> "Shards":
        entrance = Board.connect(self.place, self._join_s)
        with contextlib.ExitStack() as undo:
            undo.callback(self._end)
            refusal = self._open(entrance) if self.place.rank == 0 else self._join(entrance)
            if refusal:
                self._leave(_PATIENCE_S)  # the board may go where rank 0 goes
                raise DistributedError(refusal)
            self._numbers = {problem: number for number, problem in enumerate(self.problems)}
            self._queue = Queue(self._board, self.place, self._member, len(self.problems))
            undo.enter_context(_stopped_by_sigterm())
            self._undo = undo.pop_all()
        return self

    @property
    def stopping(self) -> bool:
        """Return whether rank 0 leaves, and the others are to end after what they have in hand."""
        return self._state.stopping

    @property
    def left(self) -> int:
        """Return how many problems nobody has finished yet."""
        self._check()
        return len(self.problems) - len(self._state.done | self._told)

    def claims(self) -> Iterator[Problem | None]:
        """Yield the next problem for this rank, until every problem is finished by somebody.

        None stands for none at the moment, as this rank has its share in hand, or others may yet be lost: go
        on with what is in hand, and ask again. Ends early where rank 0 leaves.
        """
        while self.left and not self.stopping:
            share = self.left // (2 * self.place.size)  # so few that at the end none waits long for another
            number = self._queue.next() if len(self._mine) < max(1, share) else None
            if number is None and not self._mine:
                number = self._queue.orphan(self._state.done, self._state.gone)
            if number is not None:
                self._mine.add(number)
            yield None if number is None else self.problems[number]

    def keep(self, kernel: str, trial: Trial) -> None:
        """Have rank 0 remember a trial of the kernel with this digest; warn where it cannot be remembered."""
        self._check()
        if self._leader:
            return self._store.add(kernel, trial)
        try:
            self._say("trial", kernel, row_of(trial))
        except InvalidValueError as error:
            warnings.warn(f"a trial cannot be remembered: {error}", StoreWarning, stacklevel=2)

    def finished(self, problem: Problem) -> None:
        """Say that a problem is done with, whether or not a config works, all its trials having been kept.

        Raises InvalidValueError for one that is not among `problems`.
        """
        self._check()
        if problem not in self._numbers:
            raise InvalidValueError(f"{problem.label} is not among the problems that are tuned here")
        self._say("finished", self._numbers[problem])
        self._mine.discard(self._numbers[problem])
        self._told.add(self._numbers[problem])

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._undo:
            if kind is None:
                self._check()
            try:
                self._leave(math.inf if kind is None else _PATIENCE_S)
                if kind is None and self._broken:  # trials that others sent are not written
                    self._check()
            except (SystemExit, KeyboardInterrupt):
                self._leave(_PATIENCE_S)
                raise

    def _open(self, entrance: Board) -> str:
        """Put up the problems, on rank 0, and wait for the others; return why they cannot begin, or ""."""
        self._member, self._board = _LEADER, entrance.under(str(entrance.add("sessions", 1)))
        self._board.put("facts", json.dumps(self._facts))
        self._board.put("problems", json.dumps([problem_to_dict(problem) for problem in self.problems]))
        self._leader = leader = Leader(self._board, self._store, len(self.problems), self._lost_s)
        self._start(self._lead)
        deadline, everyone = time.monotonic() + self._join_s, set(range(1, self.place.size))
        while (missing := everyone - {*leader.ranks.values()}) and time.monotonic() < deadline:
            self._check()
            time.sleep(_TURN_S)
        refusal = leader.refusal
        self._board.put("begin", refusal)
        if missing and not refusal:
            late = f"ranks {sorted(missing)} did not join within {self._join_s:.0f} s"
            warnings.warn(f"{late}: the others do their share", stacklevel=3)
        return refusal

    def _join(self, entrance: Board) -> str:
        """Take rank 0's problems once all have come; return why this rank cannot begin, or ""."""
        self._board = self._session(entrance)
        self._member = str(self._board.add("members", 1))
        differs = difference(json.loads(self._board.get("facts") or "{}"), self._facts)
        refusal = f"rank {self.place.rank} cannot tune with rank 0: {differs}" if differs else ""
        self._say("came", self._member, self.place.rank, refusal)
        self._start(self._follow)
        while (begin := self._board.get("begin")) is None:
            self._check()
            time.sleep(_TURN_S)
        refusal = begin or refusal
        if not refusal:
            listed = json.loads(self._board.get("problems") or "[]")
            self.problems = tuple(problem_from_dict(problem) for problem in listed)
        return refusal

    def _session(self, entrance: Board) -> Board:
        """Return the board of rank 0's session, whose heartbeat moves; an earlier attempt's stands still.

        Raises DistributedError where there is none in time.
        """
        wait_s, seen = 2 * self._join_s, (0, 0)
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            session = entrance.add("sessions")
            key = self.place.host, self.place.port, self.place.rank, session
            board = entrance.under(str(session))
            beat = board.add(f"beat/{_LEADER}")
            if session == seen[0] and beat > seen[1] and key not in _joined:
                _joined.add(key)
                return board
            seen = session, beat
            time.sleep(_TURN_S)
        rank = f"rank {self.place.rank}"
        raise DistributedError(f"{rank} waited {wait_s:.0f} s for rank 0, which does not answer")

    def _leave(self, patience_s: float) -> None:
        """Say that nothing more will come; rank 0 has the others leave, and writes what they still send."""
        if self._leader is None:
            with contextlib.suppress(DistributedError):  # who is gone needs no farewell
                self._say("left", self._member)
            return
        deadline, self._leaving = time.monotonic() + patience_s, True
        while time.monotonic() < deadline and not self._failure:
            if self.stopping and self._state.gone.issuperset(self._leader.ranks):
                break
            time.sleep(_TURN_S)
        self._store.flush()  # also what a signal interrupted

    def _say(self, *message: Any) -> None:
        self._board.push(json.dumps(message))

    def _check(self) -> None:
        if self._failure:
            raise DistributedError(self._failure)

    def _start(self, work: Callable[[], None]) -> None:
        """Run `work` again and again in a thread, and heartbeats in another: a slow disk is no lost rank."""
        self._watch = Watch(self._board, self._lost_s)
        for target, every_s in ((work, _TURN_S), (self._beat, min(_TURN_S, self._lost_s / 10))):
            thread = threading.Thread(
                target=self._repeat, args=(target, every_s), name="tritile shards", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _repeat(self, work: Callable[[], None], every_s: float) -> None:
        try:
            while not self._ended.wait(every_s):
                work()
        except DistributedError as error:
            self._failure = str(error)
        except Exception as error:
            self._failure = f"rank {self.place.rank} cannot go on with the others: {brief(error)}"
            self._broken = True

    def _end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _beat(self) -> None:
        self._board.add(f"beat/{self._member}", 1)

    def _lead(self) -> None:
        assert self._leader is not None
        self._leader.turn(self._leaving)
        self._state = self._leader.state

    def _follow(self) -> None:
        """Read rank 0's state. Raises DistributedError where rank 0 is lost."""
        text = self._board.get("state")
        if text is not None:
            done, gone, stopping = json.loads(text)
            self._state = State(frozenset(done), frozenset(gone), stopping)
        if self._watch.lost(_LEADER):
            raise DistributedError("rank 0, which writes all trials, is lost; those that it wrote are kept")


@contextlib.contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """Have SIGTERM, by which torchrun's agent stops a rank, raise SystemExit; a second changes nothing."""

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
