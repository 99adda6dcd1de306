"""Report which calls an override handled, which it passed through to torch, and why."""

import threading
from collections import Counter
from typing import Final, NamedTuple

from tritile.core.markup import table_html
from tritile.in_torch import tally
from tritile.in_torch.tally import Verdict

_HOW: Final = {True: "handled", False: "passed through"}


class Row(NamedTuple):
    """Count calls of one kind that were handled, or passed through, for one reason.

    `call` is "mm", "addmm", "clone" and so on. `taken` is True where tritile handled them.
    """

    call: str
    taken: bool
    why: str
    calls: int


def _ordered(found: Counter[tuple[str, bool, str]]) -> list[Row]:
    """Sort rows by number of calls, the most frequent first, then by name, handled calls first."""
    kinds = sorted(found, key=lambda kind: (-found[kind], kind[0], not kind[1], kind[2]))
    return [Row(*kind, found[kind]) for kind in kinds]


class Report:
    """Count the calls that an override handled and passed through. It grows as calls are made, in any thread.

    It counts the calls that its own override decided, not those inside a nested one. A CUDA graph's calls are
    counted once, at capture: its replays are not seen.
    """

    def __init__(self) -> None:
        self._calls: dict[Verdict, int] = {}
        self._tallies: list[bytearray] = []
        self._lock = threading.RLock()

    def add(self, verdict: Verdict, calls: int = 1) -> None:
        """Count a call, or several."""
        with self._lock:
            self._calls[verdict] = self._calls.get(verdict, 0) + calls

    def follow(self, counts: bytearray) -> None:
        """Also count the calls of a tally, as it grows."""
        with self._lock:
            self._tallies.append(counts)

    def settle(self, counts: bytearray) -> None:
        """Keep the final counts of a tally."""
        with self._lock:
            self._tallies = [other for other in self._tallies if other is not counts]
            for verdict, calls in tally.counted(counts):
                self.add(verdict, calls)

    def _counted(self) -> list[tuple[Verdict, int]]:
        with self._lock:
            unasked = [pair for counts in self._tallies for pair in tally.counted(counts)]
            return [*self._calls.items(), *unasked]

    @property
    def taken(self) -> int:
        """Return the number of calls that tritile handled."""
        return sum(calls for verdict, calls in self._counted() if verdict.taken)

    @property
    def left(self) -> int:
        """Return the number of calls that were passed through to torch."""
        return sum(calls for verdict, calls in self._counted() if not verdict.taken)

    @property
    def rows(self) -> list[Row]:
        """Return the calls by kind and reason, the most frequent first."""
        found: Counter[tuple[str, bool, str]] = Counter()
        for verdict, calls in self._counted():
            found[verdict.call, verdict.taken, verdict.why] += calls
        return _ordered(found)

    @property
    def problems(self) -> dict[str, list[Row]]:
        """Return the rows of each problem, by its label ("4096x4096x4096 NN bfloat16")."""
        found: dict[str, Counter[tuple[str, bool, str]]] = {}
        for verdict, calls in self._counted():
            kind = (verdict.call, verdict.taken, verdict.why)
            found.setdefault(verdict.problem, Counter())[kind] += calls
        return {problem: _ordered(rows) for problem, rows in found.items()}

    @property
    def _title(self) -> str:
        return f"tritile in torch: {self.taken} calls handled, {self.left} passed through"

    def __repr__(self) -> str:
        rows = [(row.call, _HOW[row.taken], str(row.calls), row.why) for row in self.rows]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        lines = (
            f"  {call:<{widths[0]}}  {how:<{widths[1]}}  {calls:>{widths[2]}}  {why}"
            for call, how, calls, why in rows
        )
        return "\n".join([self._title, *lines])

    def _repr_html_(self) -> str:
        rows = ((row.call, _HOW[row.taken], row.calls, row.why) for row in self.rows)
        return table_html(self._title, ("call", "", "calls", "why"), rows)
