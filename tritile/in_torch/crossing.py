"""`crossing.cpp`: kernels at aten's operators that leave, or launch, calls met before without Python.

From C++ to Python and back takes 3 to 4 us of a product, which is much of what torch takes for a small one;
to look it up and launch it there takes as much again.
"""

import ctypes
from pathlib import Path

import triton

from tritile.core.settings import CONTEXTS
from tritile.in_torch.tally import Verdict, slot_of
from tritile.ops.recall import Ready
from tritile.runtime.launch import Launch
from tritile.runtime.native import entry_points


def _hooks() -> tuple[list[object], list[object]]:
    """Who is told of launches by Triton's own launcher: lists, which are empty where nobody is."""
    runtime, nobody_knows = triton.knobs.runtime, [None]
    chains = (runtime.launch_enter_hook, runtime.launch_exit_hook)
    before, after = (getattr(chain, "calls", nobody_knows) for chain in chains)
    return before, after


class Crossing:
    """The library, loaded."""

    def __init__(self, path: Path) -> None:
        """Raises OSError or AttributeError for a file that is no such library."""
        self._library = library = ctypes.PyDLL(str(path.absolute()))
        library.tritile_failure.restype = ctypes.c_char_p
        library.tritile_limits.argtypes = (ctypes.c_int64,) * 3
        library.tritile_everywhere.argtypes = (ctypes.py_object,)
        library.tritile_before.argtypes = (ctypes.c_char_p,)
        library.tritile_cross.argtypes = library.tritile_uncross.argtypes = (ctypes.c_void_p,)
        library.tritile_before.restype = library.tritile_cross.restype = ctypes.c_void_p
        library.tritile_driver.argtypes = (ctypes.c_void_p,) * 2
        library.tritile_contexts.argtypes = (ctypes.c_void_p,)
        library.tritile_hooks.argtypes = (ctypes.py_object,) * 2
        library.tritile_launch.argtypes = (ctypes.POINTER(ctypes.c_int64), ctypes.c_int64)
        library.tritile_launch.restype = ctypes.c_void_p
        library.tritile_learn.argtypes = (ctypes.c_int, ctypes.c_void_p)
        library.tritile_waits.restype = ctypes.c_bool
        library.tritile_known.restype = ctypes.c_int64
        for name in ("limits", "everywhere", "uncross", "driver", "contexts", "hooks", "learn", "forget"):
            getattr(library, f"tritile_{name}").restype = None
        self._hooks = _hooks()
        library.tritile_hooks(*self._hooks)
        library.tritile_contexts(ctypes.addressof(CONTEXTS))
        library.tritile_driver(*(entry_points() or (None, None)))
        # What kernels are launched by, for good: another thread may be launching what was forgotten.
        self._launches: dict[int, tuple[Ready, int]] = {}

    def _checked(self, pointer: int | None) -> int:
        if pointer is None:
            raise RuntimeError(self._library.tritile_failure().decode())
        return pointer

    def limit(self, rows: int, elements: int, bytes: int) -> None:
        """What is brief: a product of so many rows by so many elements, a copy of so many bytes."""
        self._library.tritile_limits(rows, elements, bytes)

    @property
    def waits(self) -> bool:
        """Whether the call that is being decided in this thread is of a kind that may be learnt."""
        return bool(self._library.tritile_waits())

    def learn(self, verdict: Verdict, ready: Ready | None) -> None:
        """Have calls like the one that is being decided in this thread come to this without Python.

        `ready` is how they are launched, None for those that are left. Nothing happens where the call is of
        a kind that C++ does not know, all slots are taken, or Triton's own launcher is wanted.
        """
        if not self.waits:
            return
        launch = None if ready is None else self._launch(ready)
        slot = slot_of(verdict)
        if slot is not None and (ready is None or launch is not None):
            self._library.tritile_learn(slot, launch)

    def _launch(self, ready: Ready) -> int | None:
        kept = self._launches.get(id(ready))
        if kept is None:
            words = ready.launch.words() if type(ready.launch) is Launch else None
            same = all(now is then for now, then in zip(_hooks(), self._hooks, strict=True))
            if words is None or not same:
                return None
            sizes = [len(ready.shape), *ready.shape, len(ready.strides), *ready.strides]
            words = [len(ready.order), *ready.order, *sizes, *words]
            launch = self._library.tritile_launch((ctypes.c_int64 * len(words))(*words), len(words))
            if launch is None:
                return None
            kept = self._launches[id(ready)] = ready, launch
        return kept[1]

    def forget(self) -> None:
        """Ask Python again of every call."""
        self._library.tritile_forget()

    @property
    def known(self) -> int:
        """How many kinds of calls are known."""
        return int(self._library.tritile_known())

    def everywhere(self, tally: bytearray | None) -> None:
        """The tally of the switch of all threads, which lives for good: another thread may be reading it."""
        self._library.tritile_everywhere(tally)

    def before(self, key: str) -> int:
        """Note torch's kernels at a dispatch key: to be called before others are put there."""
        return self._checked(self._library.tritile_before(key.encode()))

    def cross(self, before: int) -> None:
        """Put kernels there, above those that came since `before`."""
        self._checked(self._library.tritile_cross(before))

    def uncross(self, before: int) -> None:
        """Take them away."""
        self._library.tritile_uncross(before)
