"""Settings: how a call chooses its config and sums, what it may measure, and where results are kept."""

import contextlib
import functools
import hashlib
import inspect
import itertools
import logging
import math
import os
import re
import stat
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar, get_args

import platformdirs

from tritile.errors import InvalidValueError, StoreWarning, callers_level, did_you_mean

Mode = Literal["cached", "tune", "spread", "strict", "off"]
MODES: Final[tuple[Mode, ...]] = get_args(Mode)
Effort = Literal["quick", "full"]
EFFORTS: Final[tuple[Effort, ...]] = get_args(Effort)
T = TypeVar("T")
# What tritile and its scripts read of the environment, without what all names begin with.
_VARIABLES: Final = """
ADOPT ADOPT_BUCKETS ADOPT_EFFORT ADOPT_FILE ADOPT_MODE ADOPT_REPORT ADOPT_TABLE BACKENDS BATCH_INVARIANT
BROWSER CACHE_DIR COMMIT FP32 LOG MODE SEED SHARED SPREAD_MEMORY TABLE TUNE_BUDGET
"""
VARIABLES: Final = frozenset(f"TRITILE_{end}" for end in _VARIABLES.split())
# The dictionary behind os.environ, by encoded names: read at every call, and twenty times faster.
_ENVIRON: Final[Mapping[Any, Any]] = os.environ._data  # type: ignore[attr-defined]


class _Setting(Generic[T]):
    """A choice among `values`, by the innermost `with`, else by an environment variable."""

    def __init__(self, variable: str, values: dict[str, T], default: T, expected: str) -> None:
        self.variable, self.values, self.default, self.expected = variable, values, default, expected
        self.chosen: ContextVar[T | None] = ContextVar(variable.lower(), default=None)
        self.name: Any = os.environ.encodekey(variable)
        self.of_raw: dict[Any, T] = {os.environ.encodevalue(text): value for text, value in values.items()}

    def get(self) -> T:
        """Raises InvalidValueError if the variable has another value; an empty one counts as not set."""
        chosen = _chosen(self.chosen)
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
            hint = did_you_mean(value, self.values)
            raise InvalidValueError(f"{origin} is {value!r}{hint}: expected {self.expected}")
        return self.values[text]


_MODE: Final[_Setting[Mode]] = _Setting(
    "TRITILE_MODE", {name: name for name in MODES}, "cached", f"one of {', '.join(MODES)}"
)
_INVARIANT: Final = _Setting(
    "TRITILE_BATCH_INVARIANT", {"torch": True, "1": True, "0": False}, False, "1, 0 or torch"
)
# True if torch's own products are made batch-invariant, too, where calls are.
_TORCHS: Final = _Setting(
    "TRITILE_BATCH_INVARIANT", {"torch": True, "1": False, "0": False}, False, "1, 0 or torch"
)
_ATEN: Final = _Setting(
    "TRITILE_BACKENDS",
    {"triton": False, "triton,aten": True, "aten,triton": True},
    True,
    "'triton' or 'triton,aten'",
)
_FP32: Final = _Setting(
    "TRITILE_FP32", {"torch": "torch", "fp16x3": "fp16x3"}, "torch", "'torch' or 'fp16x3'"
)


class Rules(NamedTuple):
    """The settings in force for a call: mode, batch invariance, whether torch may run, precision of fp32."""

    mode: Mode
    invariant: bool
    aten: bool
    fp32: str


# Made once, as each key of the memo of calls has one.
_RULES: Final = {
    each: Rules(*each) for each in itertools.product(MODES, (False, True), (False, True), _FP32.values)
}
_SETTINGS: Final[tuple[_Setting[Any], ...]] = _MODE, _INVARIANT, _ATEN, _FP32, _TORCHS
_NAMES: Final = (_MODE.name, _INVARIANT.name, _ATEN.name, _FP32.name)
DEFAULT: Final = _RULES["cached", False, True, "torch"]
# The settings in force inside a `with` that chooses any, and whether torch's own products are made here:
# one variable to read at every call, not one for each. None outside.
_CHOSEN: Final[ContextVar[tuple[Rules, bool] | None]] = ContextVar("tritile_chosen", default=None)


class Kept(NamedTuple):
    """What a thread chose when it entered a `with`, for the backward passes that it begins inside.

    torch hands it to the threads that run them. `choices` are all in force, by variable. `inherited` is what
    the thread itself found, if it runs a backward pass that another thread began.
    """

    thread: int
    choices: Mapping[ContextVar[Any], Any]
    inherited: "Kept | None" = None
    is_of_invariance: bool = False


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.entered: list[Kept] = []  # innermost last; tasks may leave in another order than they entered


_of_thread: Final = _OfThread()
_KEPT: Final = "tritile_settings"
_backward_number: Callable[[], int] | None = None  # torch's own, once there is a choice to find


def _chosen(variable: ContextVar[Any]) -> Any:
    """Return a choice of this thread or task, else of the thread that began the backward pass in this one."""
    found = variable.get()
    if found is None and _backward_number is not None and _backward_number() >= 0:
        kept = _inherited()
        return None if kept is None else kept.choices.get(variable)
    return found


def _inherited() -> Kept | None:
    """Return what another thread chose, if torch handed that to this one."""
    from tritile.core.torch_private import kept_for_backward  # imports torch

    kept: Kept | None = kept_for_backward(_KEPT)
    return kept.inherited if kept is not None and kept.thread == threading.get_ident() else kept


def has_entered_invariance() -> bool:
    """True if this thread itself, and not one whose context it copied, is inside `batch_invariant`."""
    return any(kept.is_of_invariance for kept in _of_thread.entered)


_LATER: Final = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


class Choosing(contextlib.ContextDecorator):
    """Choose settings inside a `with` or in calls of a decorated function; warn if used as neither."""

    _is_used = True  # of one that torch's compiler makes without `__init__`

    def __init__(self, *choices: tuple[_Setting[Any], Any]) -> None:
        self._choices, self._is_used = choices, False
        self._entered: dict[int, list[contextlib.ExitStack]] = {}  # by thread: what `__exit__` takes back

    def __call__(self, function: Callable[..., Any]) -> Any:
        """Decorate a function. Raises InvalidValueError for one that would run after it has returned."""
        self._is_used = True
        if any(is_later(function) for is_later in _LATER):
            name = getattr(function, "__qualname__", repr(function))
            raise InvalidValueError(
                f"{self._name} decorates {name}, which runs after it has returned, as it is a generator or a "
                f"coroutine: write `with {self._name}(...):` inside of it"
            )
        return super().__call__(function)

    def _recreate_cm(self) -> "Choosing":
        self._is_used = True
        return type(self)(*self._choices)

    def __enter__(self) -> None:
        self._is_used = True
        with contextlib.ExitStack() as stack:
            self._enter(stack)
            self._entered.setdefault(threading.get_ident(), []).append(stack.pop_all())

    def _enter(self, stack: contextlib.ExitStack) -> None:
        """Choose, and have the stack take it back."""
        stack.callback(_choose)  # last: others may have entered meanwhile, and may not have left
        for setting, value in self._choices:
            stack.callback(setting.chosen.reset, setting.chosen.set(value))
        _choose()
        stack.callback(self._known_to_backward())

    def _known_to_backward(self) -> Callable[[], None]:
        """Have backward passes that begin in this thread find the choice; return what takes that back."""
        from tritile.core import torch_private

        global _backward_number
        _backward_number = torch_private.backward_number
        thread, entered, inherited = threading.get_ident(), _of_thread.entered, _inherited()
        choices = {each: _chosen(each) for each in (_CHOSEN, *(each.chosen for each in _SETTINGS))}
        own = Kept(thread, choices, inherited, self.is_of_invariance)
        entered.append(own)
        torch_private.keep_for_backward(_KEPT, own)

        def leave() -> None:
            entered[:] = [each for each in entered if each is not own]
            last = entered[-1] if entered else inherited or Kept(thread, {})
            torch_private.keep_for_backward(_KEPT, last)

        return leave

    def __exit__(self, *_: object) -> None:
        self._entered[threading.get_ident()].pop().close()

    @property
    def is_of_invariance(self) -> bool:
        return self._choices[0][0] is _INVARIANT

    @property
    def _name(self) -> str:
        return f"tritile.{'batch_invariant' if self.is_of_invariance else 'mode'}"

    def __del__(self) -> None:
        if not self._is_used:
            text = f"{self._name}(...) changed nothing: write `with {self._name}(...):` around the calls"
            warnings.warn(text, stacklevel=2)


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable whose name begins as tritile's do, and is none of them."""
    unknown = sorted(name for name in environ if name.startswith("TRITILE_") and name not in VARIABLES)
    return [f"{name} is no variable of tritile{did_you_mean(name, VARIABLES)}" for name in unknown]


def requested_mode() -> Mode | None:
    """Return the mode of the innermost `mode(...)`, else `TRITILE_MODE`; None if neither is set."""
    is_set = _chosen(_MODE.chosen) is not None or _ENVIRON.get(_MODE.name)
    return _MODE.get() if is_set else None


def current_mode() -> Mode:
    """Return the mode in force for tritile's operations: what was requested, else "cached"."""
    return _MODE.get()


def uses_aten() -> bool:
    """True if torch's own kernel is a candidate, by the innermost `mode(backends=...)` or the environment."""
    return _ATEN.get()


def is_batch_invariant() -> bool:
    """True if calls are batch-invariant, by the innermost `batch_invariant(...)` or the environment."""
    return rules().invariant


def is_batch_invariant_torch() -> bool:
    """True if torch's own products are to be batch-invariant, in this thread or task, or backward pass."""
    if _INVARIANT.name in _ENVIRON:
        return _TORCHS.get() and _INVARIANT.get()
    chosen = _chosen(_CHOSEN)
    return chosen is not None and chosen[1]


def chooses_torch() -> bool:
    """True inside a `with` of this thread or task that says whether torch's products are batch-invariant."""
    return _TORCHS.chosen.get() is not None


class invariantly:
    """Make calls inside the `with` batch-invariant, and leave torch's own products to torch.

    For what stands in for a product of torch's, and may call torch's itself. A class, as a generator would
    take twice as long.
    """

    def __enter__(self) -> None:
        variables: Any = (_INVARIANT.chosen, True), (_TORCHS.chosen, False)
        self._tokens: Any = [(each, each.set(value)) for each, value in variables if each.get() is not value]
        if self._tokens:
            _choose()

    def __exit__(self, *_: object) -> None:
        for variable, token in self._tokens:
            variable.reset(token)
        if self._tokens:
            _choose()


def fp32_by_parts() -> bool:
    """True if float32 products that name no precision run in "fp16x3"; not in batch-invariant calls."""
    return _FP32.get() == "fp16x3" and not _INVARIANT.get()


def rules() -> Rules:
    """Return the settings in force for a call made now, which are part of the key of a remembered call."""
    one, two, three, four = _NAMES  # every call comes here: no loops
    if one in _ENVIRON or two in _ENVIRON or three in _ENVIRON or four in _ENVIRON:
        return _RULES[_MODE.get(), _INVARIANT.get(), _ATEN.get(), _FP32.get()]
    chosen = _chosen(_CHOSEN)
    return DEFAULT if chosen is None else chosen[0]


def may_lower() -> bool:
    """True unless a graph with torch's own product would miss a setting in force."""
    found = rules()
    by_plan = found.mode not in ("strict", "off")
    return by_plan and found.aten and not found.invariant and found.fp32 == "torch"


def _choose() -> None:
    """Set `_CHOSEN` by what each setting is now."""
    if all(each.chosen.get() is None for each in _SETTINGS):
        _CHOSEN.set(None)
        return
    chosen = [_chosen(each.chosen) for each in _SETTINGS]
    *values, torchs = (
        each.default if value is None else value for each, value in zip(_SETTINGS, chosen, strict=True)
    )
    found = _RULES[tuple(values)]
    _CHOSEN.set((found, torchs and found.invariant))


@contextlib.contextmanager
def under(found: Rules) -> Iterator[None]:
    """Apply settings that were in force elsewhere, such as in another thread, inside the `with`."""
    if rules() == found:
        yield
    else:
        choices = (_MODE, found.mode), (_INVARIANT, found.invariant), (_ATEN, found.aten), (_FP32, found.fp32)
        with Choosing(*choices):
            yield


def mode(name: Mode | None = None, *, backends: str | None = None, fp32: str | None = None) -> Choosing:
    """Choose, for calls inside a `with`, how configs are chosen, whether torch's kernels may run, and fp32.

    It also works as a decorator. Called as a plain statement it changes nothing, and warns so.

    Args:
        name: one of the modes below. None keeps the current mode.
        backends: "triton,aten" (the default) runs torch's own kernel if it was measured, or is predicted,
            to be faster than any of tritile's; "triton" never does. None keeps the current setting. The
            variable `TRITILE_BACKENDS` sets it for a process.
        fp32: how to multiply float32 if the call names no precision: "torch" (the default) as torch is set,
            "fp16x3" in that precision, of `tritile.matmul`, whatever torch is set to. Products that do not
            have it are made as torch is set: those that are gated, grouped or batch-invariant. None keeps the
            current setting. The variable `TRITILE_FP32` sets it for a process.

    Modes, which `TRITILE_MODE` sets for a process:

    - "cached" uses what was measured, else a prediction, and never measures anything. It is the default of
      tritile's own operations.
    - "tune" does the same, but measures each new problem once, and remembers the result. It is the default of
      kernels decorated with `tritile.autotune`.
    - "spread" measures new problems while their calls go on: they run with the best guess, their configs are
      measured in other processes, and the fastest then take turns in the program's own calls, at 2% of their
      time at most. This holds for tritile's own operations that are predicted to take 30 us or more (shorter
      ones run as in "cached"), and for kernels decorated with `tritile.autotune`, or adopted.
    - "strict" raises `NotTunedError` for a problem that no measurement covers, and `NotCompiledError` before
      Triton would compile a kernel.
    - "off" uses only the prediction, and does not read what was measured.

    The choice applies to the current thread or task, and to the backward passes of calls made inside. What a
    backward pass computes anew, as `torch.utils.checkpoint` does, follows the call of `backward`.

    Raises:
        InvalidValueError: an argument is not one of these values.

    Examples:
        >>> with tritile.mode("off", backends="triton"):
        ...     c = tritile.matmul(torch.ones(9, 9, device="cuda"), torch.ones(9, 9, device="cuda"))
    """
    choices: list[tuple[_Setting[Any], Any]] = []
    if name is not None or (backends is None and fp32 is None):
        choices.append((_MODE, _MODE.checked(name, "mode")))
    if backends is not None:
        choices.append((_ATEN, _ATEN.checked(backends, "backends")))
    if fp32 is not None:
        choices.append((_FP32, _FP32.checked(fp32, "fp32")))
    return Choosing(*choices)


def choices_of_invariance(on: bool, of_torch: bool | None) -> tuple[tuple[_Setting[bool], bool], ...]:
    """Return what `Choosing` takes, for calls that are batch-invariant or not, and torch's own with them."""
    return ((_INVARIANT, on), *([] if of_torch is None else [(_TORCHS, of_torch)]))


def tune_budget_s(default: float) -> float:
    """Return the seconds that mode "tune" may search for one problem: `TRITILE_TUNE_BUDGET`, else `default`.

    Raises InvalidValueError if the variable holds anything but a positive number.
    """
    return _positive("TRITILE_TUNE_BUDGET", default, "seconds")


def spread_bytes() -> int:
    """Return the bytes of GPU memory that mode "spread" may take: `TRITILE_SPREAD_MEMORY`, in GiB, else 2.

    Raises InvalidValueError if the variable holds anything but a positive number.
    """
    return int(2**30 * min(2.0**30, _positive("TRITILE_SPREAD_MEMORY", 2.0, "GiB")))


def _positive(variable: str, default: float, unit: str) -> float:
    value = os.environ.get(variable, str(default))
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not number > 0:
        raise InvalidValueError(f"{variable} is {value!r}: expected a number of {unit} above 0")
    return number


def table_path() -> Path | None:
    """Return the path of the pinned table, `TRITILE_TABLE`; None if it is not set.

    Raises InvalidValueError if the path is in the home folder of an unknown user.
    """
    path = os.environ.get("TRITILE_TABLE")
    try:
        return Path(path).expanduser() if path else None
    except RuntimeError as error:
        raise InvalidValueError(f"TRITILE_TABLE is {path!r}: {error}") from None


def cache_dir() -> Path:
    """Return where results are kept: `TRITILE_CACHE_DIR`, else the platform's cache directory for the user.

    Return a temporary folder that only this user can open, with a StoreWarning, if that is in the home folder
    of an unknown user or the user has none.
    """
    return _folder(*map(os.environ.get, ("TRITILE_CACHE_DIR", "XDG_CACHE_HOME", "HOME")))


@functools.cache
def _folder(requested: str | None, *environment: str | None) -> Path:
    """Return the requested folder, else the platform's in such an environment; warns once."""
    with contextlib.suppress(RuntimeError):  # of an unknown user, or one without a home
        folder = Path(requested or platformdirs.user_cache_dir("tritile")).expanduser()
        if requested or folder.is_absolute():
            return folder
    temporary = _temporary()
    warnings.warn(
        f"no home folder for {requested or 'the cache'}: results are kept in {temporary}. Set "
        "TRITILE_CACHE_DIR, and TRITON_CACHE_DIR for the kernels that Triton keeps",
        StoreWarning,
        stacklevel=callers_level(),
    )
    return temporary


# As /proc/self/mountinfo names them. SQLite relies on locks that these keep for one host at best.
_NETWORK: Final = re.compile(
    r"nfs\d?|cifs|smb\w*|lustre|gpfs|beegfs\w*|ceph|glusterfs|pvfs2|orangefs|panfs|wekafs|afs|"
    r"fuse\.(sshfs|glusterfs|ceph.*|s3fs|gcsfuse|goofys|mountpoint-s3|blobfuse2?|rclone|juicefs.*|seaweedfs|"
    r"weed|mfs.*|moosefs|davfs2?|hdfs.*|dbfs.*|alluxio.*|beegfs.*|wekafs)",
    re.IGNORECASE,
)
_MOUNTS: Final = Path("/proc/self/mountinfo")


def store_dir() -> Path:
    """Return where the stores of trials are kept: `cache_dir()`, unless that is on a network file system.

    Then it is a folder of this node, below the system's temporary directory, that only this user can open.
    """
    return _of_node(cache_dir())


def shared_url() -> str | None:
    """Return the folder in which hosts share trials: `TRITILE_SHARED`, a path or a URL for fsspec.

    By default it is `cache_dir()` if that is on a network file system, else None. Raises InvalidValueError if
    the path is in the home folder of an unknown user.
    """
    url = os.environ.get("TRITILE_SHARED")
    if url and ("://" in url or "::" in url):
        return url
    try:
        if url:
            return str(Path(url).expanduser().absolute())
    except RuntimeError as error:
        raise InvalidValueError(f"TRITILE_SHARED is {url!r}: {error}") from None
    cache = cache_dir()
    return None if _of_node(cache) == cache else str(cache.absolute())


@functools.cache
def _of_node(folder: Path) -> Path:
    """Return the folder, or one of this node in its place if it is on a network file system; logs once."""
    kind = _file_system(folder)
    if not _NETWORK.fullmatch(kind):
        return folder
    name = hashlib.sha256(os.fsencode(folder.absolute())).hexdigest()[:12]
    own = _temporary() / name
    text = (
        "%s is on a network file system (%s): trials are kept in %s, and shared through TRITILE_SHARED or it"
    )
    logging.getLogger("tritile.tune").info(text, folder, kind, own)
    return own


def _file_system(folder: Path) -> str:
    """Return the type of the file system that a folder is, or would be, on; "" if that is unknown."""
    try:
        path = os.path.realpath(folder)
        lines = _MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    found, longest = "", -1
    for line in lines:
        left, _, right = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), left.split(" ")[4]).rstrip("/")
        if (
            f"{path}/".startswith(f"{point}/") and len(point) >= longest
        ):  # of two on one point the later hides
            found, longest = right.split(" ")[0], len(point)
    return found


def _temporary() -> Path:
    """Return a temporary folder of this user, the same for all processes unless its name is taken.

    Everybody may make a folder in the system's temporary directory. One of this name is used only if it is
    this user's and nobody else can write to it.
    """
    user = os.geteuid()  # who owns what is made
    try:
        folder = Path(tempfile.gettempdir(), f"tritile-{user}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        facts = folder.lstat()  # of a link itself
        is_own = stat.S_ISDIR(facts.st_mode) and facts.st_uid == user and not facts.st_mode & 0o022
        return folder if is_own else Path(tempfile.mkdtemp(prefix="tritile-"))
    except OSError:  # nothing can be written here: the store says so, and calls go on without it
        return Path(os.devnull, "tritile")
