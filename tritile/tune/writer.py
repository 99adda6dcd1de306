"""Trials on their way into rank 0's store, which rank 0 alone writes."""

import threading
import warnings
from collections.abc import Iterable
from typing import Final

from tritile.errors import InvalidValueError, StoreWarning
from tritile.planning.store import Store
from tritile.planning.trial import TRIAL_COLUMNS, Trial, parsed, trial_from
from tritile.tune.board import Board

_BATCH: Final = 512


class Writer:
    """Rank 0's side: writes what it records itself, and what the others send."""

    def __init__(self, board: Board, store: Store, count: int) -> None:
        self._board, self._store, self._count = board, store, count
        self._heard: dict[str, int] = {}
        self._done: set[int] = set()
        self._lock = threading.Lock()

    def keep(self, kernel: str, trial: Trial) -> None:
        """Write a trial of the kernel with this digest."""
        self._store.add(kernel, trial)

    def flush(self) -> None:
        """Write what could not be written before, or what a signal interrupted."""
        self._store.flush()

    def finished(self, index: int) -> None:
        """Tell all that the trials of a problem are written."""
        with self._lock:
            if index not in self._done:
                self._done.add(index)
                self._board.put(f"done/{index}", "1")
                self._board.count("finished")

    def drain(self, names: Iterable[str]) -> bool:
        """Write what these members have sent; whether there was anything."""
        before = sum(self._heard.values())
        for name in names:
            for _ in range(_BATCH):  # one that says much does not keep the others waiting
                number = self._heard.get(name, 0)
                text = self._board.read(f"said/{name}/{number}")
                if text is None:
                    break
                self._hear(text)
                self._board.drop(f"said/{name}/{number}")
                self._heard[name] = number + 1
        return sum(self._heard.values()) > before

    def _hear(self, text: str) -> None:
        """Do as a message says. What no rank can have sent is skipped with a StoreWarning."""
        try:
            match parsed(text):
                case ["trial", str(kernel), list(row)] if len(row) == len(TRIAL_COLUMNS):
                    self._store.add(kernel, trial_from(row))
                case ["finished", int(index)] if 0 <= index < self._count:
                    self.finished(index)
                case _:
                    raise InvalidValueError(
                        f"{text[:80]!r} is no trial, and says of none that it is finished"
                    )
        except InvalidValueError as error:
            warnings.warn(f"what another rank sent is skipped: {error}", StoreWarning, stacklevel=2)
