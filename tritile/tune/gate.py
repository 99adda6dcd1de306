"""How ranks that tune together meet: each says hello with its facts, rank 0 answers.

Every process has a name that no other ever had, so that one which was started again is told from the
one it replaces, and what an earlier attempt left on the board misleads nobody.
"""

import json
import time
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Final

from tritile.errors import DistributedError, InvalidValueError
from tritile.planning.agreement import difference
from tritile.planning.trial import parsed
from tritile.tune.board import Board

_POLL_S: Final = 0.05
_READ_S: Final = 10.0


def _hello(text: str) -> tuple[str, dict[str, Any]]:
    """Name and facts of who says hello. Raises InvalidValueError for anything else."""
    data = parsed(text)
    match data:
        case {"name": str(name), "facts": dict(facts)}:
            return name, facts
    raise InvalidValueError(f"{text[:80]!r} is no hello: wanted a name and facts")


def enter(board: Board, rank: int, name: str, facts: Mapping[str, str], wait_s: float) -> str:
    """Say hello, and wait for rank 0's answer: the name of its session.

    Raises DistributedError where rank 0 refuses, or does not answer within `wait_s`.
    """
    hello = json.dumps({"name": name, "facts": dict(facts)})
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        board.put(f"hello/{rank}", hello)  # again and again: rank 0 clears the board when it comes
        answer = board.read(f"answer/{name}")
        if answer is not None:
            board.drop(f"answer/{name}")
            data = parsed(answer)
            if "refused" in data:
                raise DistributedError(data["refused"])
            return str(data["session"])
        time.sleep(_POLL_S)
    raise DistributedError(f"rank {rank} waited {wait_s:.0f} s for rank 0, which does not answer")


class Gate:
    """Rank 0's side: who is here, and whether they may take part. `members` are those let in."""

    def __init__(self, board: Board, size: int, facts: Mapping[str, str], session: str) -> None:
        self.members: dict[str, int] = {}
        self._board, self._size, self._facts, self._session = board, size, facts, session
        self._refused: dict[str, str] = {}
        for rank in range(1, size):
            board.drop(f"hello/{rank}")

    def _come(self) -> dict[str, tuple[int, str | None]]:
        """The newcomers by name: rank, and why not, if not."""
        found: dict[str, tuple[int, str | None]] = {}
        for rank in range(1, self._size):
            text = self._board.read(f"hello/{rank}")
            if text is None:
                continue
            try:
                name, facts = _hello(text)
            except InvalidValueError:
                continue  # whoever wrote it, no rank did
            if name not in self.members and name not in self._refused:
                differs = difference(self._facts, facts)
                found[name] = rank, differs and f"rank {rank} cannot tune with rank 0: {differs}"
        return found

    def _answer(self, name: str, rank: int, why_not: str | None) -> None:
        if why_not is None:
            self.members[name] = rank
        else:
            self._refused[name] = why_not
        reply = {"session": self._session} if why_not is None else {"refused": why_not}
        self._board.put(f"answer/{name}", json.dumps(reply))

    def open(self, wait_s: float) -> None:
        """Wait for every rank, `wait_s` seconds at most, and let them in.

        Raises DistributedError, on all of them, where one differs from rank 0.
        """
        deadline, come = time.monotonic() + wait_s, self._come()
        while len(come) < self._size - 1 and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            come = self._come()
        reasons = [why_not for _, why_not in come.values() if why_not]
        for name, (rank, _) in come.items():
            self._answer(name, rank, reasons[0] if reasons else None)
        if reasons:
            self._await_readers(come)
            raise DistributedError(reasons[0])
        missing = sorted(set(range(1, self._size)) - set(self.members.values()))
        if missing:
            text = f"ranks {missing} did not come within {wait_s:.0f} s: the others do their share"
            warnings.warn(text, stacklevel=5)

    def _await_readers(self, names: Iterable[str]) -> None:
        """Wait until answers were read: the board may go where rank 0 goes."""
        deadline = time.monotonic() + _READ_S
        while time.monotonic() < deadline and any(self._board.has(f"answer/{n}") for n in names):
            time.sleep(_POLL_S)

    def admit(self) -> None:
        """Let in, or refuse, who came since."""
        for name, (rank, why_not) in self._come().items():
            self._answer(name, rank, why_not)
