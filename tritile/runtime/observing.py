"""Let a program see what tritile plans, compiles and measures: by a callback, or by Python's logging.

`TRITILE_LOG` is read as the package is imported.
"""

import logging
from collections.abc import Callable, Iterable

from tritile.core.events import Callback, Event, subscribe
from tritile.core.settings import logged_kinds
from tritile.errors import InvalidValueError
from tritile.runtime.compiles import tell_compiles

_LOGGERS = {"plan": "tritile.plan", "compile": "tritile.compile", "measure": "tritile.tune"}


def on_event(callback: Callback) -> Callable[[], None]:
    """Have a function called whenever tritile plans a problem, compiles a kernel or measures a config.

    None of this happens in a call that was met before, so that such calls take no longer. Kernels of
    `tritile.autotune` count too. Other kernels of Triton do not. Nothing is told of compiles that other
    processes do for this one, as in `tritile.warm` and in a search; measurements there are told here.

    Args:
        callback: called with an `Event`, in the thread in which it happens, which waits. What it raises is
            logged by the logger "tritile", and does not disturb the call.

    Returns:
        A function without arguments after which `callback` is called no more.

    Raises:
        InvalidValueError: `callback` cannot be called.
    """
    if not callable(callback):
        raise InvalidValueError(f"on_event: callback is {callback!r}: wanted a function of one event")
    tell_compiles()
    return subscribe(callback)


def log_events(kinds: Iterable[str]) -> Callable[[], None]:
    """Log events of these kinds at level INFO; return a function that ends this.

    The loggers are "tritile.plan", "tritile.compile" and "tritile.tune". Where the root logger has no
    handler, they write to stderr.
    """
    chosen = frozenset(kinds)
    for kind in chosen:
        logging.getLogger(_LOGGERS[kind]).setLevel(logging.INFO)

    def log(event: Event) -> None:
        if event.kind in chosen:
            logging.getLogger(_LOGGERS[event.kind]).info("%s", line_of(event), extra={"event": event})

    end, handler = on_event(log), _handler()
    logging.getLogger("tritile").addHandler(handler)

    def remove() -> None:
        end()
        logging.getLogger("tritile").removeHandler(handler)

    return remove


def line_of(event: Event) -> str:
    """Return an event as a line of name=value pairs, without what is not known."""
    numbers = {"us": event.us and f"{event.us:.1f}", "seconds": event.seconds and f"{event.seconds:.3f}"}
    names = ("problem", "config", "source", "device", "kernel", "us", "seconds", "failure")
    pairs = ((name, numbers.get(name, getattr(event, name))) for name in names)
    return " ".join(f"{name}={_quoted(value)}" for name, value in pairs if value)


def _quoted(value: str) -> str:
    plain = value.isprintable() and not set(value) & set(' "=')
    return value if plain else '"' + " ".join(value.split()).replace('"', "'") + '"'


def _handler() -> logging.Handler:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
    # Asked at each record: a program may set up its logging later.
    handler.addFilter(lambda record: not logging.getLogger().handlers)
    return handler


if wanted := logged_kinds():
    log_events(wanted)
