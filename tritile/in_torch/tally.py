"""What a switch asks of calls, and counts of what became of them, where code without Python reads and writes.

A tally is a bytearray, laid out as `tally.h` says: no object is made, and no lock taken, to read it or to
count in it.
"""

import threading
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from typing import Final

from tritile.core.threads import at_fork

CALLS: Final = ("mm", "bmm", "addmm", "baddbmm", "clone")

# What is asked of a call: nothing, as it is torch's; Python; or what became of calls like it, by the policy,
# and Python where there were none.
NOBODY, PYTHON, EXPECTED, ALWAYS = range(4)
ASKED: Final = {"never": NOBODY, "expected": EXPECTED, "always": ALWAYS}

_SLOTS: Final = 4096  # kinds of calls that are counted here; others go to Python
_UNNAMED: Final = 256  # the last of them: for calls of problems that no longer find a slot of their own
_BYTES: Final = 8


@dataclass(frozen=True, eq=False)
class Verdict:
    """What becomes of one kind of call: a call of torch, a problem, whether tritile takes it, and why."""

    call: str
    problem: str
    taken: bool
    why: str


BRIEF: Final = {call: Verdict(call, "", False, "so little that the host's time decides") for call in CALLS}

_verdicts: Final = list(BRIEF.values())  # by slot; it only grows
_slots: Final[dict[tuple[object, ...], int]] = {astuple(v): slot for slot, v in enumerate(_verdicts)}
_lock: Final = threading.RLock()  # what is collected in between may multiply
at_fork(_lock)


def slot_of(verdict: Verdict) -> int | None:
    """Where such calls are counted: without their problem where few slots are left; None where there is none.

    A program whose sizes never end would otherwise ask Python of each new one forever.
    """
    slot = _slot(verdict, _SLOTS - _UNNAMED)
    return _slot(replace(verdict, problem=""), _SLOTS) if slot is None else slot


def _slot(verdict: Verdict, most: int) -> int | None:
    told = astuple(verdict)
    with _lock:
        slot = _slots.get(told)
        if slot is None and len(_verdicts) < most:
            slot = _slots[told] = len(_verdicts)
            _verdicts.append(verdict)
        return slot


def new_tally(asked: int) -> bytearray:
    """Of a switch that asks so of calls, and has seen none yet."""
    tally = bytearray(_BYTES * (1 + _SLOTS))
    memoryview(tally).cast("q")[0] = asked
    return tally


def ask_python(tally: bytearray) -> None:
    """Have every call ask Python from now on, of a switch that is off."""
    memoryview(tally).cast("q")[0] = PYTHON


def counted(tally: bytearray) -> Iterator[tuple[Verdict, int]]:
    """What became of calls without Python, and of how many, where there were any."""
    counts = memoryview(tally).cast("q")[1 : 1 + len(_verdicts)].tolist()
    return ((_verdicts[slot], count) for slot, count in enumerate(counts) if count)
