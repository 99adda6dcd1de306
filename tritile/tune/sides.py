"""The two sides of tuning together: rank 0, which writes, and every other rank, which sends."""

import functools
import json
import time
import uuid
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tritile.core.problem import Problem, problem_from_dict, problem_to_dict
from tritile.errors import DistributedError, InvalidValueError, StoreWarning
from tritile.planning.store import Store
from tritile.planning.trial import Trial, row_of
from tritile.tune.board import Board, Place, Watch
from tritile.tune.gate import Gate, enter
from tritile.tune.writer import Writer

LEADER: Final = "leader"
TURN_S: Final = 0.1  # between two looks at the board


@functools.cache
def process_name(pid: int) -> str:
    """A name that no other process has, and none had before; `pid` keeps a fork from its parent's."""
    return uuid.uuid4().hex


class Leader:
    """Rank 0: puts up the problems, lets the others in, and writes what all of them record.

    Raises DistributedError where a rank differs, or the board is out of reach.
    """

    def __init__(
        self,
        entrance: Board,
        place: Place,
        problems: Sequence[Problem],
        store: Store,
        facts: Mapping[str, str],
        lost_s: float,
        join_s: float,
        name: str,
    ) -> None:
        session = uuid.uuid4().hex
        self.board, self.problems, self.stopping = entrance.under(session), list(problems), False
        self.board.put("problems", json.dumps([problem_to_dict(problem) for problem in problems]))
        self.beats, self._watch = (name, LEADER), Watch(self.board, lost_s)
        self._writer = Writer(self.board, store, len(problems))
        self.keep, self.finished = self._writer.keep, self._writer.finished
        self._gate = Gate(entrance, place.size, facts, session)
        self._gate.open(join_s)

    def turn(self) -> bool:
        """What is to be done every now and then; whether there was anything to write."""
        self._gate.admit()
        return self._writer.drain(self._gate.members)

    def leave(self, patience_s: float) -> None:
        """Ask the others to leave, and write what they send until they have, or are lost."""
        self._writer.flush()
        deadline = time.monotonic() + patience_s
        self.board.put("stop", "1")
        while time.monotonic() < deadline:
            gone = all(self.board.read(f"left/{n}") or self._watch.lost(n) for n in self._gate.members)
            if not self.turn() and gone:
                return
            time.sleep(TURN_S)


class Follower:
    """Another rank: takes rank 0's problems, and sends it what it records, in order.

    Raises DistributedError where rank 0 refuses it or is lost, or the board is out of reach.
    """

    def __init__(
        self, entrance: Board, place: Place, facts: Mapping[str, str], lost_s: float, join_s: float, name: str
    ) -> None:
        session = enter(entrance, place.rank, name, facts, join_s)
        self.board, self.stopping = entrance.under(session), False
        listed = json.loads(self.board.read("problems") or "[]")
        self.problems: list[Problem] = [problem_from_dict(problem) for problem in listed]
        self.beats, self._watch = (name,), Watch(self.board, lost_s)
        self._name, self._said = name, 0

    def keep(self, kernel: str, trial: Trial) -> None:
        """Send a trial of the kernel with this digest; one that cannot be kept is warned of."""
        try:
            self._say(["trial", kernel, row_of(trial)])
        except InvalidValueError as error:
            warnings.warn(f"a trial cannot be remembered: {error}", StoreWarning, stacklevel=3)

    def finished(self, index: int) -> None:
        """Say that a problem is finished, all its trials having been said before."""
        self._say(["finished", index])

    def _say(self, message: list[Any]) -> None:
        self.board.put(f"said/{self._name}/{self._said}", json.dumps(message))
        self._said += 1

    def turn(self) -> bool:
        """What is to be done every now and then."""
        self.stopping = self.stopping or self.board.read("stop") is not None
        if self._watch.lost(LEADER):
            raise DistributedError("rank 0, which writes what all measure, is lost; what it wrote is kept")
        return False

    def leave(self, patience_s: float) -> None:
        """Tell rank 0 that nothing more will come."""
        self.board.put(f"left/{self._name}", "1")
