"""Keep zeroed counters on a GPU, for programs that make a tile together; streams and captures own them."""

import threading
from typing import Final

import torch

from tritile.core.device import capturing
from tritile.core.forgetting import Memo
from tritile.families.matmul_tma.family import MAX_SHARED

_STREAM_OF_THREAD: Final = 2  # cudaStreamPerThread
# Streams whose counters are kept. Dropped ones were allocated on their stream, whose launches come first.
_STREAMS: Final = 256


class Counters:
    """Hold zeroed counters on one GPU, for programs that make a tile together.

    Launches of one stream follow one another and share their counters. A captured launch may be replayed on
    any stream, and gets counters of its own that are never given out again. When none are left, or none were
    made before the capture, it zeroes fresh ones itself.
    """

    def __init__(self, device: int) -> None:
        self._device, self._lock, self._taken = torch.device("cuda", device), threading.Lock(), 0
        self._for_captures: torch.Tensor | None = None
        self._eager: Memo[tuple[int, int], torch.Tensor] = Memo(_STREAMS)

    def _zeros(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64, device=self._device)

    def make_ready(self) -> None:
        """Make counters for later captures: within a capture nothing can be made that outlives it."""
        with self._lock:
            if self._for_captures is None and not capturing():
                zeros = self._zeros(1 << 20)
                torch.cuda.synchronize(self._device)
                self._for_captures = zeros

    def take(self, count: int, stream: int) -> torch.Tensor:
        """Return counters for a launch on the current stream, which is `stream`."""
        if capturing():
            with self._lock:
                ready, start = self._for_captures, self._taken
                if ready is not None and start + count <= ready.numel():
                    self._taken += count
                    return ready[start : start + count]
            return self._zeros(count)
        # This handle means another stream in each thread: the thread's own default stream.
        key = stream, threading.get_ident() if stream == _STREAM_OF_THREAD else 0
        counters = self._eager.get(key)
        if counters is None:
            counters = self._eager[key] = self._zeros(MAX_SHARED)
        return counters


_LOCK: Final = threading.Lock()
_OF_GPU: Final[dict[int, Counters]] = {}


def counters_of(device: int) -> Counters:
    found = _OF_GPU.get(device)
    if found is None:
        with _LOCK:
            found = _OF_GPU.setdefault(device, Counters(device))
    return found
