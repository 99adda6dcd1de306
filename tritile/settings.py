"""How a call chooses its config, how long it may measure, and where results are remembered."""

import contextlib
import math
import os
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Final

import platformdirs

from tritile.errors import InvalidValueError

MODES: Final = ("cached", "tune", "strict", "off")

# What os.environ keeps, by names in bytes: asked at every call, and twenty times faster than os.environ.
_ENVIRON: Final = getattr(os.environ, "_data", None) if os.name == "posix" else None
_mode: ContextVar[str | None] = ContextVar("tritile_mode", default=None)


def _checked_mode(value: str, origin: str) -> str:
    if value not in MODES:
        raise InvalidValueError(f"{origin} is {value!r}: wanted one of {', '.join(MODES)}")
    return value


def current_mode() -> str:
    """The mode in force: that of the innermost `mode(...)`, else `TRITILE_MODE`, else "cached"."""
    chosen = _mode.get()
    if chosen is not None:
        return chosen
    if _ENVIRON is not None and b"TRITILE_MODE" not in _ENVIRON:
        return "cached"
    value = os.environ.get("TRITILE_MODE")
    return _checked_mode(value, "TRITILE_MODE") if value else "cached"


@contextlib.contextmanager
def mode(name: str) -> Iterator[None]:
    """Choose, for the calls inside the `with`, how configs are picked.

    cached: what was measured, else a prediction; nothing is ever measured (the default).
    tune: as cached, but a problem met for the first time is measured once and remembered.
    strict: a problem for which nothing measured is remembered raises `NotTunedError`; a first call whose
        kernels Triton had to compile warns with `CompiledWarning`.
    off: the prediction only; remembered results are not even read.

    Raises InvalidValueError for any other name. Applies to the current thread or task.
    """
    token = _mode.set(_checked_mode(name, "mode"))
    try:
        yield
    finally:
        _mode.reset(token)


def tune_budget_s() -> float:
    """Seconds that mode "tune" may spend measuring one problem: `TRITILE_TUNE_BUDGET`, else 30."""
    value = os.environ.get("TRITILE_TUNE_BUDGET", "30")
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise InvalidValueError(f"TRITILE_TUNE_BUDGET is {value!r}: wanted seconds, above 0")
    return seconds


def tune_log() -> Path | None:
    """The file that every trial is appended to as a line of JSON: `TRITILE_TUNE_LOG`, else none."""
    given = os.environ.get("TRITILE_TUNE_LOG")
    return Path(given).expanduser() if given else None


def cache_dir() -> Path:
    """Where stores are kept: `TRITILE_CACHE_DIR`, else the user's cache directory of the platform."""
    given = os.environ.get("TRITILE_CACHE_DIR")
    return Path(given).expanduser() if given else Path(platformdirs.user_cache_dir("tritile"))
