"""Load the C++ dispatch library, `crossing.cpp`, whose kernels handle known calls without Python.

Going from C++ to Python and back takes 3 to 4 us of a product, much of what torch takes for a small one.
Looking the call up and launching it there takes as long again.
"""

import ctypes
from pathlib import Path

import triton

from tritile.core.forgetting import MOST
from tritile.core.settings import CONTEXTS
from tritile.in_torch.tally import Verdict, slot_of
from tritile.ops.memo import Ready
from tritile.runtime.launch import Launch
from tritile.runtime.native import entry_points


def _hooks() -> tuple[list[object], list[object]]:
    """Return Triton's lists of launch hooks, which are empty where nobody listens."""
    runtime, nobody_knows = triton.knobs.runtime, [None]
    chains = (runtime.launch_enter_hook, runtime.launch_exit_hook)
    before, after = (getattr(chain, "calls", nobody_knows) for chain in chains)
    return before, after


class Crossing:
    """Hold the loaded C++ dispatch library."""

    def __init__(self, path: Path) -> None:
        """Load the library. Raise OSError or AttributeError for any other file."""
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
        # Launches by the id of a Ready. They are never freed: another thread may be using a forgotten one.
        self._launches: dict[int, tuple[Ready, int]] = {}

    def _checked(self, pointer: int | None) -> int:
        if pointer is None:
            raise RuntimeError(self._library.tritile_failure().decode())
        return pointer

    def limit(self, rows: int, elements: int, bytes: int) -> None:
        """Set which calls are brief: a product of at most `rows` by `elements`, a copy of at most `bytes`."""
        self._library.tritile_limits(rows, elements, bytes)

    @property
    def waits(self) -> bool:
        """Tell whether the call that Python is deciding in this thread is of a kind that can be learnt."""
        return bool(self._library.tritile_waits())

    def learn(self, verdict: Verdict, ready: Ready | None) -> None:
        """Give all calls like the one being decided in this thread this verdict, without Python.

        `ready` is how to launch them, None for calls that are passed through. Nothing happens where C++ does
        not know calls of this kind, all slots are in use, or Triton's own launcher is needed.
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
            if words is None or not same or len(self._launches) >= MOST:
                return None
            sizes = [len(ready.shape), *ready.shape, len(ready.strides), *ready.strides]
            words = [len(ready.order), *ready.order, *sizes, *words]
            launch = self._library.tritile_launch((ctypes.c_int64 * len(words))(*words), len(words))
            if launch is None:
                return None
            kept = self._launches[id(ready)] = ready, launch
        return kept[1]

    def forget(self) -> None:
        """Ask Python again about every call."""
        self._library.tritile_forget()

    @property
    def known(self) -> int:
        """Return the number of kinds of calls that are known."""
        return int(self._library.tritile_known())

    def everywhere(self, tally: bytearray | None) -> None:
        """Set the tally of the override of all threads; never freed, as another thread may be reading it."""
        self._library.tritile_everywhere(tally)

    def before(self, key: str) -> int:
        """Note torch's kernels at a dispatch key, before others are registered there. Return a handle."""
        return self._checked(self._library.tritile_before(key.encode()))

    def cross(self, before: int) -> None:
        """Register the library's kernels above those that were registered since `before`."""
        self._checked(self._library.tritile_cross(before))

    def uncross(self, before: int) -> None:
        """Remove the library's kernels."""
        self._library.tritile_uncross(before)
