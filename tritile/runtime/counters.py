"""Keep zeroed counters on a GPU, for programs that make a tile together; streams and captures own them."""

import threading
from typing import Any, Final, NamedTuple

import torch

from tritile.core.device import capturing
from tritile.core.forgetting import Memo
from tritile.core.torch_private import is_external

_STREAM_OF_THREAD: Final = 2  # cudaStreamPerThread
# Streams whose counters are kept. Dropped ones were allocated on their stream, whose launches come first.
_STREAMS: Final = 256
_RESERVE: Final = 1 << 20  # counters for captures
MAX_COUNTERS: Final = 16384  # of a launch: one for each tile that several programs make together


class Allocation(NamedTuple):
    """Counters of a launch: where they begin, and an event to record once it is enqueued, or None."""

    address: int
    launched: Any


class _OfStream(NamedTuple):
    """Counters of a stream, which are kept alive. `allocation` is what each of its launches takes."""

    counters: torch.Tensor
    allocation: Allocation


class Counters:
    """Hold zeroed counters on one GPU, for programs that make a tile together.

    Each launch leaves them ready for the next, so launches that share them must not overlap. Those of one
    stream follow one another. torch never destroys its own streams. An external one may be destroyed while
    its work is under way, and its handle go to another stream: launches on external streams wait for an event
    that the launch before has recorded.

    A captured launch may be replayed on any stream, and gets counters of its own. Nothing says when a graph
    is gone, so these are never used again. When none are left, or none were made before the capture, it
    zeroes fresh ones at each replay.
    """

    def __init__(self, device: int) -> None:
        self._device, self._lock = torch.device("cuda", device), threading.Lock()
        self._reserves: list[torch.Tensor] = []  # for captures; graphs hold addresses in all of them
        self._left: torch.Tensor | None = None  # the part of the last one that is still free
        self._eager: Memo[tuple[int, int], _OfStream] = Memo(_STREAMS)

    def _zeros(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64, device=self._device)

    def make_ready(self) -> None:
        """Make counters for later captures: within a capture nothing can be made that outlives it."""
        with self._lock:
            if (self._left is None or self._left.numel() < _RESERVE // 2) and not capturing():
                zeros = self._zeros(_RESERVE)
                torch.cuda.synchronize(self._device)
                self._reserves.append(zeros)
                self._left = zeros

    def take(self, count: int, stream: int) -> Allocation:
        """Return counters for a launch on the current stream, which is `stream`."""
        if capturing():
            with self._lock:
                left = self._left
                if left is not None and left.numel() >= count:
                    self._left = left[count + count % 2 :]  # kernels are compiled for multiples of 16 bytes
                    return Allocation(left.data_ptr(), None)
            # In the graph's own memory: freed here, it serves what the graph does later.
            return Allocation(self._zeros(count).data_ptr(), None)
        # This handle means another stream in each thread: the thread's own default stream.
        key = stream, threading.get_ident() if stream == _STREAM_OF_THREAD else 0
        kept = self._eager.get(key)
        if kept is None:
            launched = torch.cuda.Event() if is_external(torch.cuda.current_stream(self._device)) else None
            counters = self._zeros(MAX_COUNTERS)
            kept = self._eager[key] = _OfStream(counters, Allocation(counters.data_ptr(), launched))
        elif kept.allocation.launched is not None:
            torch.cuda.current_stream(self._device).wait_event(kept.allocation.launched)
        return kept.allocation

    def forget(self) -> None:
        """Give out no counters of before: a launch failed, and may have left any of them other than zero."""
        with self._lock:
            self._eager.clear()
            self._left = None


_LOCK: Final = threading.Lock()
_OF_GPU: Final[dict[int, Counters]] = {}


def counters_of(device: int) -> Counters:
    found = _OF_GPU.get(device)
    if found is None:
        with _LOCK:
            found = _OF_GPU.setdefault(device, Counters(device))
    return found
