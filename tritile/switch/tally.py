"""What a switch asks of calls, and counts of those left at a glance, where code without Python can read it.

A tally is a bytearray: no object is made, and no lock taken, to read it or to count in it.
"""

from collections.abc import Iterator
from typing import Final

CALLS: Final = ("mm", "bmm", "addmm", "baddbmm", "clone")

# Who is asked of a call: nobody, as it is torch's; Python; Python, but of a brief one.
NOBODY, PYTHON, PYTHON_UNLESS_BRIEF = range(3)
ASKED: Final = {"never": NOBODY, "always": PYTHON, "expected": PYTHON_UNLESS_BRIEF}

_WORDS: Final = 1 + len(CALLS)
_BYTES: Final = 8


def new_tally(policy: str) -> bytearray:
    """Of a switch of this policy: who is asked, and no calls yet."""
    tally = bytearray(_BYTES * _WORDS)
    memoryview(tally).cast("q")[0] = ASKED[policy]
    return tally


def ask_python(tally: bytearray) -> None:
    """Have every call ask Python from now on, of a switch that is off."""
    memoryview(tally).cast("q")[0] = PYTHON


def brief_calls(tally: bytearray) -> Iterator[tuple[str, int]]:
    """Which calls were left at a glance, and how many, where there were any."""
    counts = memoryview(tally).cast("q")[1:]
    return ((call, count) for call, count in zip(CALLS, counts, strict=True) if count)
