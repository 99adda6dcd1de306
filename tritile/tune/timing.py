"""The default of `do_bench` in `tritile.autotune`, public under this name."""

from collections.abc import Callable, Sequence

import triton.testing

WARMUP_MS = 5
REPEAT_MS = 25


def do_bench(call: Callable[[], object], quantiles: Sequence[float] = (0.5, 0.2, 0.8)) -> list[float]:
    """Return milliseconds of one `call` on the GPU at these quantiles, the L2 cache flushed before each."""
    times = triton.testing.do_bench(call, warmup=WARMUP_MS, rep=REPEAT_MS, quantiles=list(quantiles))
    return list(times) if isinstance(times, list | tuple) else [times]
