"""Compile in parallel processes, into Triton's cache on disk, from which a launch loads."""

import itertools
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tritile.tune.measure.child import Child, ChildError, ForkServer

COMPILE_LIMIT_S = 120.0
_MOST = 16  # processes, each of which holds a copy of torch
_NICENESS = 10  # so that the process that measures, and the caller, go first
_WORN = 256  # requests to one process: Triton keeps what it compiled in memory, a megabyte each


def processes_for(sharers: int = 1) -> int:
    """Return how many processes compile for each of `sharers` tuners on this machine."""
    return max(1, min(_MOST, (os.cpu_count() or 1) // sharers))


class CompilePool:
    """Compile in several processes, none of which touches a GPU.

    A process that dies or hangs costs its own request alone. Requests of lower `urgency` are served first,
    those of one urgency in their order.
    """

    def __init__(self, processes: int | None = None, fork_server: ForkServer | None = None) -> None:
        self._fork_server = fork_server or ForkServer()
        self.processes = processes or processes_for()
        self._queue: queue.PriorityQueue[tuple[float, int, Any]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._children = [Child(self._fork_server) for _ in range(self.processes)]
        self._threads: list[threading.Thread] = []
        self._closing = False

    def submit(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        urgency: float = 0.0,
        limit_s: float = COMPILE_LIMIT_S,
    ) -> Future[Any]:
        """Call a function in one of the processes.

        The future raises ChildError where the call fails, TuningError where no process can be started.
        """
        future: Future[Any] = Future()
        self._queue.put((urgency, next(self._order), (future, function, arguments, limit_s)))
        if len(self._threads) < self.processes:
            child = self._children[len(self._threads)]
            thread = threading.Thread(target=self._serve, args=(child,), daemon=True, name="tritile-compile")
            self._threads.append(thread)
            thread.start()
        return future

    def _serve(self, child: Child) -> None:
        for served in itertools.count(1):
            job = self._queue.get()[-1]
            if job is None:
                return
            future, function, arguments, limit_s = job
            if self._closing or not future.set_running_or_notify_cancel():
                future.cancel()
                continue
            try:
                future.set_result(self._answer(child, function, arguments, limit_s))
            except Exception as error:
                future.set_exception(error)
            if served % _WORN == 0:
                child.close()  # the next request starts another

    def _answer(self, child: Child, function: Callable[..., Any], arguments: Any, limit_s: float) -> Any:
        try:
            return child.ask(_behind_others, function, arguments, limit_s=limit_s)
        except ChildError as error:  # once more where something else than the request ended the process
            if not error.blameless or self._closing:
                raise
        return child.ask(_behind_others, function, arguments, limit_s=limit_s)

    def close(self) -> None:
        """End the processes, and cancel the requests that wait."""
        self._closing = True
        for _ in self._threads:
            self._queue.put((-1.0, next(self._order), None))
        for thread, child in zip(self._threads, self._children, strict=False):
            while thread.is_alive():
                child.kill()  # again, as the process may have been about to start
                thread.join(0.1)
        for child in self._children:
            child.close()
        while not self._queue.empty():
            job = self._queue.get_nowait()[-1]
            if job is not None:
                job[0].cancel()
        self._fork_server.close()

    def __enter__(self) -> "CompilePool":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _behind_others(function: Callable[..., Any], arguments: Any) -> Any:
    if hasattr(os, "setpriority"):
        os.setpriority(os.PRIO_PROCESS, 0, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
    return function(*arguments)
