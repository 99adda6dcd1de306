"""Read settings: how a call chooses its config and sums, what it may measure, where results are kept."""

import contextlib
import functools
import itertools
import math
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args

import platformdirs

from tritile.errors import InvalidValueError, StoreWarning

Mode = Literal["cached", "tune", "strict", "off"]
MODES: Final[tuple[Mode, ...]] = get_args(Mode)
_MODE_OF: Final[dict[bytes, Mode]] = {name.encode(): name for name in MODES}
_SWITCH: Final = {"1": True, "0": False}


BACKENDS: Final = ("triton", "triton,aten")


class Rules(NamedTuple):
    """Hold what is in force for a call: mode, batch invariance, and if torch's own kernel may make it."""

    mode: Mode
    invariant: bool
    aten: bool


# Made once, as each key of the memo of calls has one.
_RULES: Final = {
    (mode, *switches): Rules(mode, *switches)
    for mode in MODES
    for switches in itertools.product((False, True), repeat=2)
}
_DEFAULT: Final = _RULES["cached", False, True]

# The dictionary behind os.environ, by names in bytes: read at every call, and twenty times faster.
_ENVIRON: Final = getattr(os.environ, "_data", None) if os.name == "posix" else None
_mode: ContextVar[Mode | None] = ContextVar("tritile_mode", default=None)
_invariant: ContextVar[bool | None] = ContextVar("tritile_batch_invariant", default=None)
_aten: ContextVar[bool | None] = ContextVar("tritile_aten", default=None)


# False from when a `with` chooses what a graph of torch's compiler cannot follow. Torch guards it.
may_lower = True


@contextlib.contextmanager
def _choosing(*choices: tuple[ContextVar[Any], Any]) -> Iterator[None]:
    tokens = [(variable, variable.set(choice)) for variable, choice in choices]
    try:
        yield
    finally:
        for variable, token in tokens:
            variable.reset(token)


def _checked_mode(value: Any, origin: str) -> Mode:
    for known in MODES:
        if value == known:
            return known
    raise InvalidValueError(f"{origin} is {value!r}: wanted one of {', '.join(MODES)}")


def requested_mode() -> Mode | None:
    """Return the mode of the innermost `mode(...)`, else `TRITILE_MODE`; None where neither is set."""
    chosen = _mode.get()
    if chosen is not None:
        return chosen
    if _ENVIRON is not None:
        raw = _ENVIRON.get(b"TRITILE_MODE")
        if not raw or raw in _MODE_OF:
            return _MODE_OF[raw] if raw else None
    value = os.environ.get("TRITILE_MODE")
    return _checked_mode(value, "TRITILE_MODE") if value else None


def current_mode() -> Mode:
    """Return the mode in force for tritile's operations: what was requested, else "cached"."""
    return requested_mode() or "cached"


def _checked_backends(value: Any, origin: str) -> bool:
    names = {name.strip() for name in value.split(",")} if isinstance(value, str) else set()
    if "triton" not in names or not names <= {"triton", "aten"}:
        raise InvalidValueError(f"{origin} is {value!r}: wanted one of {' or '.join(map(repr, BACKENDS))}")
    return "aten" in names


def uses_aten() -> bool:
    """True if torch's own kernel is a candidate, by the innermost `mode(backends=...)` or the environment.

    Raises InvalidValueError where `TRITILE_BACKENDS` is neither "triton" nor "triton,aten".
    """
    chosen = _aten.get()
    if chosen is not None:
        return chosen
    if _ENVIRON is not None and b"TRITILE_BACKENDS" not in _ENVIRON:
        return True
    value = os.environ.get("TRITILE_BACKENDS")
    return _checked_backends(value, "TRITILE_BACKENDS") if value else True


@contextlib.contextmanager
def mode(name: Mode | None = None, *, backends: str | None = None) -> Iterator[None]:
    """Choose, for the calls inside the `with`, how configs are picked, and from which backends.

    name: one of the modes below; None leaves the mode as it is.

    cached: what was measured, else a prediction; nothing is ever measured (the default of tritile's own
        operations).
    tune: as cached, but a problem met for the first time is measured once and remembered (the default of
        kernels under `tritile.autotune`).
    strict: a problem for which nothing measured is remembered raises `NotTunedError`; a first call whose
        kernels Triton would have to compile raises `NotCompiledError`, before anything is compiled.
    off: the prediction only; remembered results are not even read.

    backends: "triton,aten" (the default) takes torch's own kernel where it is predicted, or was measured, to
        be faster than any of tritile's; "triton" keeps it out. None leaves it as it is. `TRITILE_BACKENDS`
        sets it for a process.

    Raises InvalidValueError for any other name. It applies to the current thread or task, and to the
    backward passes of tritile's calls made inside.
    """
    global may_lower
    choices: list[tuple[ContextVar[Any], Any]] = []
    if name is not None or backends is None:
        choices.append((_mode, _checked_mode(name, "mode")))
    if backends is not None:
        choices.append((_aten, _checked_backends(backends, "backends")))
    if name in ("off", "strict") or backends is not None:
        may_lower = False
    with _choosing(*choices):
        yield


def is_batch_invariant() -> bool:
    """True if calls are batch-invariant, by the innermost `batch_invariant(...)` or the environment.

    Raises InvalidValueError where `TRITILE_BATCH_INVARIANT` is neither 0 nor 1.
    """
    chosen = _invariant.get()
    if chosen is not None:
        return chosen
    if _ENVIRON is not None and b"TRITILE_BATCH_INVARIANT" not in _ENVIRON:
        return False
    value = os.environ.get("TRITILE_BATCH_INVARIANT") or "0"
    if value not in _SWITCH:
        raise InvalidValueError(f"TRITILE_BATCH_INVARIANT is {value!r}: wanted 1 or 0")
    return _SWITCH[value]


def rules() -> Rules:
    """Return what is in force for a call made now: a key of what is remembered of calls has it."""
    silent = _ENVIRON is not None and not (
        b"TRITILE_MODE" in _ENVIRON
        or b"TRITILE_BATCH_INVARIANT" in _ENVIRON
        or b"TRITILE_BACKENDS" in _ENVIRON
    )
    if silent and _mode.get() is None and _invariant.get() is None and _aten.get() is None:
        return _DEFAULT
    return _RULES[current_mode(), is_batch_invariant(), uses_aten()]


@contextlib.contextmanager
def under(found: Rules) -> Iterator[None]:
    """Have what was in force elsewhere, as in another thread, count inside the `with`."""
    if rules() == found:
        yield
        return
    with _choosing((_mode, found.mode), (_invariant, found.invariant), (_aten, found.aten)):
        yield


@contextlib.contextmanager
def batch_invariant(on: bool = True) -> Iterator[None]:
    """Make the products inside the `with` batch-invariant: what a row gives is the same in any company.

    An element of a result then depends, bit for bit, on its row of the first operand, its column of the
    second, what is added to it and the GPU's model, and not on how many rows came along, on its place among
    them, on alignment, or on what else the GPU does. This holds for `matmul`, `linear` (with packed weights
    too), `addmm`, `baddbmm`, `gated_linear`, `scaled_matmul` and `grouped_matmul`, for calls of one dtype,
    precision, activation and kind of operands, with the same version of tritile and Triton. Sums are then
    made in one way for every number of rows: see `families.numerics`. Some calls take longer so, those
    of few rows most. Permutations only move bits, and change nothing.

    `on`: False leaves it again. `TRITILE_BATCH_INVARIANT=1` sets it for a process. It applies to the current
    thread or task, and to backward passes as `mode` does.

    Inside, precision "fp16x3" is refused (UnsupportedError), as its data decide how it is multiplied. So are
    complex products, which are torch's, and a product in "tf32" on Hopper and later into an `out` that does
    not lie row by row.
    Raises InvalidValueError where `on` is neither True nor False.
    """
    global may_lower
    if not isinstance(on, bool):
        raise InvalidValueError(f"batch_invariant({on!r}): wanted True or False")
    may_lower = may_lower and not on
    with _choosing((_invariant, on)):
        yield


def tune_budget_s(default: float) -> float:
    """Return the seconds that mode "tune" may search for one problem: `TRITILE_TUNE_BUDGET`, else `default`.

    Raises InvalidValueError where the variable holds anything but a positive number.
    """
    value = os.environ.get("TRITILE_TUNE_BUDGET", str(default))
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise InvalidValueError(f"TRITILE_TUNE_BUDGET is {value!r}: wanted seconds, above 0")
    return seconds


def table_path() -> Path | None:
    """Return the file of the table that is pinned: `TRITILE_TABLE`, else none.

    Raises InvalidValueError where it is in the home folder of nobody known.
    """
    given = os.environ.get("TRITILE_TABLE")
    try:
        return Path(given).expanduser() if given else None
    except RuntimeError as error:
        raise InvalidValueError(f"TRITILE_TABLE is {given!r}: {error}") from None


def cache_dir() -> Path:
    """Return where stores are kept: `TRITILE_CACHE_DIR`, else the user's cache directory of the platform.

    Where that is in the home folder of nobody known, a folder for temporary files, with a StoreWarning.
    """
    return _folder(*map(os.environ.get, ("TRITILE_CACHE_DIR", "XDG_CACHE_HOME", "HOME")))


@functools.cache
def _folder(given: str | None, *environment: str | None) -> Path:
    """Return the folder that was given, else the platform's in such an environment; warns once."""
    wanted = given or platformdirs.user_cache_dir("tritile")
    try:
        return Path(wanted).expanduser()
    except RuntimeError:  # an unknown user, or one without a home
        folder = Path(tempfile.gettempdir(), f"tritile-{os.getuid()}")
    text = f"{wanted} has no home folder: results are kept in {folder}; set TRITILE_CACHE_DIR"
    warnings.warn(text, StoreWarning, stacklevel=4)
    return folder
