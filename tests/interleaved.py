"""The programs of a launch in Triton's interpreter, taking turns at each atomic operation.

By itself the interpreter runs one program after the other. Here each has a thread of its own, of which one
runs at a time. Before each atomic operation another may go on: `choose` picks among those not yet done.
"""

import contextlib
import functools
import inspect
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder


class Turns:
    """Runs functions to their ends, one at a time, switching where one of them asks to."""

    def __init__(self, choose: Callable[[Sequence[int]], int]) -> None:
        self._choose = choose
        self._turns: dict[int, threading.Semaphore] = {}
        self._done = threading.Semaphore(0)
        self._failure: BaseException | None = None
        self._mine = threading.local()

    def run(self, programs: Sequence[Callable[[], None]]) -> None:
        self._turns = {i: threading.Semaphore(0) for i in range(len(programs))}
        threads = [threading.Thread(target=self._one, args=pair) for pair in enumerate(programs)]
        for thread in threads:
            thread.start()
        self._next()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def _next(self) -> None:
        if self._turns:
            self._turns[self._choose(sorted(self._turns))].release()

    def _one(self, which: int, program: Callable[[], None]) -> None:
        mine = self._mine.turn = self._turns[which]
        mine.acquire()
        try:
            if self._failure is None:
                program()
        except BaseException as error:  # told by the thread that asked for all of them
            self._failure = error
        finally:
            del self._turns[which]
            self._next()

    def switch(self) -> None:
        mine = getattr(self._mine, "turn", None)
        if mine is not None:
            self._next()
            mine.acquire()


@contextlib.contextmanager
def interleaved(choose: Callable[[Sequence[int]], int]) -> Iterator[None]:
    """Launches in the interpreter whose programs take turns; `choose` gets the numbers of those not done."""
    turns = Turns(choose)
    make = GridExecutor.__init__
    atomics = {name: getattr(InterpreterBuilder, name) for name in ("create_atomic_rmw", "create_atomic_cas")}
    builder = interpreter.interpreter_builder

    def made(self: Any, fn: Any, names: Any, grid: Any, *rest: Any, **named: Any) -> None:
        waiting: list[Callable[[], None]] = []

        @functools.wraps(fn)
        def later(**given: Any) -> None:
            where = builder.grid_idx

            def program() -> None:
                builder.set_grid_idx(*where)
                fn(**given)

            waiting.append(program)
            if len(waiting) == math.prod(grid):
                turns.run(waiting)
                waiting.clear()

        later.__signature__ = inspect.signature(fn)
        make(self, later, names, grid, *rest, **named)

    def switching(atomic: Callable[..., Any]) -> Callable[..., Any]:
        def switched(self: Any, *given: Any) -> Any:
            where = builder.grid_idx
            turns.switch()
            builder.set_grid_idx(*where)
            return atomic(self, *given)

        return switched

    GridExecutor.__init__ = made
    for name, atomic in atomics.items():
        setattr(InterpreterBuilder, name, switching(atomic))
    try:
        yield
    finally:
        GridExecutor.__init__ = make
        for name, atomic in atomics.items():
            setattr(InterpreterBuilder, name, atomic)
