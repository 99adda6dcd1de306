"""Keep tallies: what an override asks of calls, and how many got which verdict, shared with C++.

A tally is a bytearray, laid out as in `tally.h`. Reading it, or counting in it, makes no object and takes no
lock.
"""

import threading
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from typing import Final

from tritile.core.threads import at_fork

CALLS: Final = ("mm", "bmm", "addmm", "baddbmm", "clone")

# Who decides about a call: nobody, as it is torch's; Python; or the table of decided calls, by the policy,
# and Python where the call is not in it.
NOBODY, PYTHON, EXPECTED, ALWAYS = range(4)
ASKED: Final = {"never": NOBODY, "expected": EXPECTED, "always": ALWAYS}

_SLOTS: Final = 4096  # kinds of calls that are counted here; Python decides others
_UNNAMED: Final = 256  # the last slots: for calls counted without their problem
_BYTES: Final = 8


@dataclass(frozen=True, eq=False)
class Verdict:
    """Hold what happens to one kind of call, of torch and of a problem, and why.

    `taken` is True where tritile handles it.
    """

    call: str
    problem: str
    taken: bool
    why: str


BRIEF: Final = {call: Verdict(call, "", False, "so brief that host time dominates") for call in CALLS}

_verdicts: Final = list(BRIEF.values())  # by slot; it only grows
_slots: Final[dict[tuple[object, ...], int]] = {astuple(v): slot for slot, v in enumerate(_verdicts)}
_lock: Final = threading.RLock()  # reentrant: garbage collection may run a product
at_fork(_lock)


def slot_of(verdict: Verdict) -> int | None:
    """Return the slot where such calls are counted, None where none is left.

    Once slots are few, calls are counted without their problem. Otherwise a program whose sizes never end
    would ask Python about each new one forever.
    """
    slot = _slot(verdict, _SLOTS - _UNNAMED)
    return _slot(replace(verdict, problem=""), _SLOTS) if slot is None else slot


def _slot(verdict: Verdict, most: int) -> int | None:
    key = astuple(verdict)
    with _lock:
        slot = _slots.get(key)
        if slot is None and len(_verdicts) < most:
            slot = _slots[key] = len(_verdicts)
            _verdicts.append(verdict)
        return slot


def new_tally(asked: int) -> bytearray:
    """Return an empty tally of an override that asks this of calls."""
    tally = bytearray(_BYTES * (1 + _SLOTS))
    memoryview(tally).cast("q")[0] = asked
    return tally


def ask_python(tally: bytearray) -> None:
    """Make every call ask Python from now on: the override is off."""
    memoryview(tally).cast("q")[0] = PYTHON


def counted(tally: bytearray) -> Iterator[tuple[Verdict, int]]:
    """Yield each verdict that calls got without Python, and their number."""
    counts = memoryview(tally).cast("q")[1 : 1 + len(_verdicts)].tolist()
    return ((_verdicts[slot], count) for slot, count in enumerate(counts) if count)
