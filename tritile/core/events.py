"""Tell what happens off the warm path: plans made, kernels compiled, configs timed.

One seam: whoever does such a thing calls `tell`, and whoever wants to know of it was passed to `subscribe`.
Logging is a subscriber too: see `tritile/runtime/observing.py`.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, get_args

from torch.compiler import is_dynamo_compiling

from tritile.core.threads import at_fork

Kind = Literal["plan", "compile", "measure"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Event:
    """Hold one thing that happened.

    - `kind`: "plan" (a problem got its config), "compile" (Triton made a kernel, or read it from its cache)
      or "measure" (a config was timed).
    - `problem`: the problem's label; "" for a compile that was not asked for by one problem.
    - `config`: the config as text.
    - `source`: of a plan, as `Plan.source`, and for kernels of `tritile.autotune` as `KernelPlan.source`. Of
      a compile, "compiled", or "cache" where Triton had it on disk. "" for a measurement.
    - `device`: the GPU's name; "" for a compile.
    - `kernel`: the name of a compiled kernel's function; "" otherwise.
    - `us`: microseconds that a call takes, predicted or measured; None where nobody knows.
    - `seconds`: how long the host took to plan or compile; None for a measurement.
    - `failure`: why a config does not compile or run, in a line; None where it does.
    """

    kind: Kind
    problem: str
    config: str
    source: str = ""
    device: str = ""
    kernel: str = ""
    us: float | None = None
    seconds: float | None = None
    failure: str | None = None


Callback = Callable[[Event], object]


@dataclass(frozen=True, eq=False)
class _Subscription:
    callback: Callback


_subscriptions: tuple[_Subscription, ...] = ()  # replaced, never changed: `tell` reads it without the lock
_lock: Final = threading.RLock()
at_fork(_lock)


def subscribe(callback: Callback) -> Callable[[], None]:
    """Have `tell` call a function with each event; return a function that ends this."""
    global _subscriptions
    mine = _Subscription(callback)

    def remove() -> None:
        global _subscriptions
        with _lock:
            _subscriptions = tuple(each for each in _subscriptions if each is not mine)

    with _lock:
        _subscriptions = (*_subscriptions, mine)
    return remove


def tell(make: Callable[[], Event]) -> None:
    """Call every subscriber, in this thread, with the event that `make` returns.

    Without a subscriber, and in code that torch.compile traces, `make` is not called. What it or a subscriber
    raises is logged, and disturbs nobody.
    """
    if is_dynamo_compiling() or not _subscriptions:
        return
    try:
        event = make()
    except Exception:  # as where another version of Triton describes a kernel otherwise
        return logging.getLogger("tritile").exception("an event cannot be told")
    for each in _subscriptions:
        try:
            each.callback(event)
        except Exception:
            logging.getLogger("tritile").exception("a callback of tritile.on_event raised")
