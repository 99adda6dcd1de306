"""Read settings: how a call chooses its config and sums, what it may measure, where results are kept."""

import contextlib
import functools
import itertools
import math
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar, get_args

import platformdirs

from tritile.errors import InvalidValueError, StoreWarning

Mode = Literal["cached", "tune", "strict", "off"]
MODES: Final[tuple[Mode, ...]] = get_args(Mode)
T = TypeVar("T")
# The dictionary behind os.environ, by encoded names: read at every call, and twenty times faster.
_ENVIRON: Final[Mapping[Any, Any]] = os.environ._data  # type: ignore[attr-defined]


class _Setting(Generic[T]):
    """A choice among `values`: of the innermost `with`, else of a variable of the environment."""

    def __init__(self, variable: str, values: dict[str, T], default: T, wanted: str) -> None:
        self.variable, self.values, self.default, self.wanted = variable, values, default, wanted
        self.chosen: ContextVar[T | None] = ContextVar(variable.lower(), default=None)
        self.name: Any = os.environ.encodekey(variable)
        self.of_raw: dict[Any, T] = {os.environ.encodevalue(text): value for text, value in values.items()}

    def get(self) -> T:
        """Raises InvalidValueError where the variable has another value; an empty one is none."""
        chosen = self.chosen.get()
        if chosen is not None:
            return chosen
        raw = _ENVIRON.get(self.name)
        if not raw:
            return self.default
        if raw in self.of_raw:
            return self.of_raw[raw]
        return self.checked(os.environ[self.variable], self.variable)

    def checked(self, value: Any, origin: str) -> T:
        text = value.replace(", ", ",") if isinstance(value, str) else ""
        if text not in self.values:
            raise InvalidValueError(f"{origin} is {value!r}: wanted {self.wanted}")
        return self.values[text]


_MODE: Final[_Setting[Mode]] = _Setting(
    "TRITILE_MODE", {name: name for name in MODES}, "cached", f"one of {', '.join(MODES)}"
)
_INVARIANT: Final = _Setting("TRITILE_BATCH_INVARIANT", {"1": True, "0": False}, False, "1 or 0")
_ATEN: Final = _Setting(
    "TRITILE_BACKENDS",
    {"triton": False, "triton,aten": True, "aten,triton": True},
    True,
    "one of 'triton' or 'triton,aten'",
)


class Rules(NamedTuple):
    """What is in force for a call: mode, batch invariance, and if torch's own kernel may make it."""

    mode: Mode
    invariant: bool
    aten: bool


# Made once, as each key of the memo of calls has one.
_RULES: Final = {each: Rules(*each) for each in itertools.product(MODES, (False, True), (False, True))}
_NAMES: Final = (_MODE.name, _INVARIANT.name, _ATEN.name)
_CHOSEN: Final = (_MODE.chosen, _INVARIANT.chosen, _ATEN.chosen)
_DEFAULT: Final = _RULES["cached", False, True]

# False from when a `with` chooses what a graph of torch's compiler cannot follow. Torch guards it.
may_lower = True


class _Choosing(contextlib.ContextDecorator):
    """Choose settings inside a `with`, or in the calls of a decorated function; warn where it is neither."""

    _is_used = True  # of one that torch's compiler makes without `__init__`

    def __init__(self, *choices: tuple[_Setting[Any], Any]) -> None:
        self._choices, self._is_used = choices, False
        self._tokens: list[list[Any]] = []

    def _recreate_cm(self) -> "_Choosing":
        self._is_used = True
        return _Choosing(*self._choices)

    def __enter__(self) -> None:
        self._is_used = True
        self._tokens.append([(each.chosen, each.chosen.set(value)) for each, value in self._choices])

    def __exit__(self, *_: object) -> None:
        for variable, token in self._tokens.pop():
            variable.reset(token)

    def __del__(self) -> None:
        if not self._is_used:
            names = " and ".join(setting.variable for setting, _ in self._choices)
            warnings.warn(f"{names} stays as it is: write `with` before the call that sets it", stacklevel=2)


def requested_mode() -> Mode | None:
    """Return the mode of the innermost `mode(...)`, else `TRITILE_MODE`; None where neither is set."""
    is_set = _MODE.chosen.get() is not None or _ENVIRON.get(_MODE.name)
    return _MODE.get() if is_set else None


def current_mode() -> Mode:
    """Return the mode in force for tritile's operations: what was requested, else "cached"."""
    return _MODE.get()


def uses_aten() -> bool:
    """True if torch's own kernel is a candidate, by the innermost `mode(backends=...)` or the environment."""
    return _ATEN.get()


def is_batch_invariant() -> bool:
    """True if calls are batch-invariant, by the innermost `batch_invariant(...)` or the environment."""
    return _INVARIANT.get()


def rules() -> Rules:
    """Return what is in force for a call made now: a key of what is remembered of calls has it."""
    one, two, three = _NAMES  # every call comes here: no loops
    if not (one in _ENVIRON or two in _ENVIRON or three in _ENVIRON):
        mode, invariant, aten = _CHOSEN
        if mode.get() is None and invariant.get() is None and aten.get() is None:
            return _DEFAULT
    return _RULES[_MODE.get(), _INVARIANT.get(), _ATEN.get()]


@contextlib.contextmanager
def under(found: Rules) -> Iterator[None]:
    """Have what was in force elsewhere, as in another thread, count inside the `with`."""
    if rules() == found:
        yield
    else:
        with _Choosing((_MODE, found.mode), (_INVARIANT, found.invariant), (_ATEN, found.aten)):
            yield


def mode(name: Mode | None = None, *, backends: str | None = None) -> _Choosing:
    """Choose, for the calls inside a `with`, how configs are picked, and from which backends.

    It decorates functions, too. Written as a statement it changes nothing, and a warning says so.

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
    choices: list[tuple[_Setting[Any], Any]] = []
    if name is not None or backends is None:
        choices.append((_MODE, _MODE.checked(name, "mode")))
    if backends is not None:
        choices.append((_ATEN, _ATEN.checked(backends, "backends")))
    if name in ("off", "strict") or backends is not None:
        may_lower = False
    return _Choosing(*choices)


def batch_invariant(on: bool = True) -> _Choosing:
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
    return _Choosing((_INVARIANT, on))


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

    Raises InvalidValueError where it is in the home folder of an unknown user.
    """
    path = os.environ.get("TRITILE_TABLE")
    try:
        return Path(path).expanduser() if path else None
    except RuntimeError as error:
        raise InvalidValueError(f"TRITILE_TABLE is {path!r}: {error}") from None


def cache_dir() -> Path:
    """Return where stores are kept: `TRITILE_CACHE_DIR`, else the user's cache directory of the platform.

    Where that is in the home folder of an unknown user, a folder for temporary files, with a StoreWarning.
    """
    return _folder(*map(os.environ.get, ("TRITILE_CACHE_DIR", "XDG_CACHE_HOME", "HOME")))


@functools.cache
def _folder(requested: str | None, *environment: str | None) -> Path:
    """Return the requested folder, else the platform's in such an environment; warns once."""
    folder = requested or platformdirs.user_cache_dir("tritile")
    try:
        return Path(folder).expanduser()
    except RuntimeError:  # an unknown user, or one without a home
        temporary = Path(tempfile.gettempdir(), f"tritile-{os.getuid()}")
    text = f"{folder} has no home folder: results are kept in {temporary}; set TRITILE_CACHE_DIR"
    warnings.warn(text, StoreWarning, stacklevel=4)
    return temporary
