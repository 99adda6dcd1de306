"""`tritile.adopt`: kernels under somebody else's `triton.autotune` run by tritile's tuner, source unchanged.

`run` of Triton's class `Autotuner` is replaced, so that kernels decorated before and after are taken, and so
are subclasses whose `run` ends in `super().run`. At its first call with a choice to make, a kernel is given a
tuner of its own (`adopted.Adopted`); the kernel itself stays the object that torch and its library know. What
stands in the way of that, or of a choice, costs the kernel its adoption alone: Triton tunes it, with one
warning.

Only the standard library is imported here: tritile itself is imported once a kernel is adopted.
"""

import copy
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import os

    from tritile.core.settings import Mode
    from tritile.tuner.adopted import Adopted

_STATE: Final = "_tritile"  # the attribute of a kernel that holds what adoption knows of it


class Unchosen(Exception):
    """No config was chosen for a call: Triton is to tune it."""


@dataclass
class AdoptedKernel:
    """What became of one kernel: `why` it was left to Triton, "" if it was adopted.

    Of the problems that tritile chose a config for, `measured` were measured in this process, in `seconds`,
    `remembered` had been before, and `guessed` never.
    """

    name: str
    why: str = ""
    measured: int = 0
    remembered: int = 0
    guessed: int = 0
    seconds: float = 0.0

    def count(self, is_known: bool, seconds: float) -> None:
        """Count one problem, which took `seconds` to measure, 0 if it was not measured."""
        kind = "measured" if seconds else "remembered" if is_known else "guessed"
        setattr(self, kind, getattr(self, kind) + 1)
        self.seconds += seconds

    def __str__(self) -> str:
        if self.why:
            return f"{self.name}: left to Triton: {self.why}"
        of = {"measured": f" in {self.seconds:.1f} s", "remembered": "", "guessed": ""}
        counts = [f"{getattr(self, kind)} {kind}{more}" for kind, more in of.items() if getattr(self, kind)]
        return f"{self.name}: {', '.join(counts) or 'adopted'}"


@dataclass(frozen=True)
class Options:
    """How an adopted kernel is tuned."""

    mode: "Mode | None" = None
    table: "str | os.PathLike[str] | None" = None
    bucket: tuple[tuple[str, Callable[[Any], Any]], ...] = ()
    reference: Callable[..., Any] | None = None


@dataclass(eq=False)
class Adoption:
    """What `tritile.adopt` returns: release it by `release()`, or at the end of a `with`.

    `print(adoption)` lists the kernels that were called, and `report` holds them.
    """

    kernels: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    bucket: Mapping[str, Mapping[str, Callable[[Any], Any]]] = field(default_factory=dict)
    reference: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    mode: "Mode | None" = None
    table: "str | os.PathLike[str] | None" = None
    is_default: bool = False  # gives way to the program's own adoptions
    _report: dict[str, AdoptedKernel] = field(default_factory=dict)

    def __enter__(self) -> "Adoption":
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def __str__(self) -> str:
        return "\n".join([*map(str, self.report), *self._remarks()])

    @property
    def report(self) -> list[AdoptedKernel]:
        """Return the kernels that were called and have several configs, by name."""
        return [self._report[name] for name in sorted(self._report)]

    def names(self, kernel: str) -> bool:
        """True if a kernel's name, as `name_of` gives it, meets a pattern and none of `exclude`."""
        return _meets(kernel, self.kernels) and not _meets(kernel, self.exclude)

    def options(self, kernel: str) -> Options:
        buckets = {
            n: f for pattern, own in self.bucket.items() if _meets(kernel, (pattern,)) for n, f in own.items()
        }
        references = [f for pattern, f in self.reference.items() if _meets(kernel, (pattern,))]
        return Options(
            self.mode, self.table, tuple(sorted(buckets.items())), references[0] if references else None
        )

    def release(self) -> None:
        """Leave kernels to Triton again. Configs that were chosen stay in the kernels' `cache`."""
        with _lock:
            if self in _adoptions:
                _adoptions.remove(self)
                _changed()
                for pattern in self._unmatched():
                    warnings.warn(pattern, UserWarning, stacklevel=2)
            if not _adoptions and _pending is None:
                _uninstall()

    def _unmatched(self) -> Iterator[str]:
        """Yield what to say of patterns that no kernel's name met, with a near name."""
        from tritile.errors import did_you_mean

        called = {name: name.rpartition(".")[2] for name in _called}
        for pattern in dict.fromkeys((*self.kernels, *self.exclude, *self.bucket, *self.reference)):
            if pattern != "*" and not any(_meets(name, (pattern,)) for name in called):
                near = did_you_mean(pattern.strip("*").rpartition(".")[2], called.values())
                yield f"tritile.adopt: no kernel that was called is named {pattern!r}{near}"

    def _remarks(self) -> Iterator[str]:
        yield from self._unmatched()
        if (kind := _class) is None:
            return
        if kind.run is not _run:
            other = f"{kind.run.__module__}.{kind.run.__qualname__}"
            yield f"{other} stands in for Autotuner.run of Triton: what it does not hand on is not adopted"
        for each in _subclasses(kind):
            if "run" in vars(each) and not each.__module__.startswith("tritile."):
                name = f"{each.__module__}.{each.__qualname__}"
                yield f"{name} has a run of its own: adopted where it calls super().run"


# What a tuner is made of, and a program may replace.
_attributes: Final = attrgetter("configs", "keys", "fn", "cache", "pre_hook", "post_hook")
_own: Final = itemgetter("_do_bench", "early_config_prune")


class _State:
    """What a kernel's tuner was made of, which a program may replace; `tuner` is None without one."""

    __slots__ = ("attributes", "configs", "keys", "owner", "record", "tuner", "version")

    def __init__(self, kernel: Any) -> None:
        self.tuner: Adopted | None = None
        self.record = AdoptedKernel("")
        self.owner, self.version = id(kernel), _version
        self.attributes = _attributes(kernel), _own(kernel.__dict__)
        self.configs, self.keys = [*kernel.configs], [*kernel.keys]

    def is_stale(self, kernel: Any) -> bool:
        """True if a program replaced or edited what the tuner was made of, or the kernel is a copy.

        Lists count by what they hold: some programs give an equal list at each call, others edit theirs.
        """
        attributes = _attributes(kernel)
        return not (
            (attributes, _own(kernel.__dict__)) == self.attributes and attributes[0] == self.configs
            and attributes[1] == self.keys and self.owner == id(kernel) and self.version == _version
        )  # fmt: skip

    def __reduce__(self) -> tuple[Any, ...]:  # pickles and copies of a kernel go without
        return type(None), ()


_lock = threading.RLock()
_adoptions: list[Adoption] = []
_version = 0  # changes with `_adoptions`
_called: dict[str, None] = {}  # names of the kernels that were called since the first adoption
_pending: dict[str, str] | None = None  # the environment's adoption, until a kernel is called
_class: Any = None  # Triton's Autotuner
_run: Any = None  # what was put there as its `run`, and
_original: Any = None  # what was there


def adopt(
    kernels: str | Sequence[str] = "*", *, mode: "Mode | None" = None,
    bucket: Mapping[str, Mapping[str, Callable[[Any], Any]]] | None = None,
    table: "str | os.PathLike[str] | None" = None,
    reference: Mapping[str, Callable[..., Any]] | None = None, exclude: str | Sequence[str] = (),
) -> Adoption:  # fmt: skip
    """Have the kernels of this process that are under `triton.autotune` run by tritile's tuner.

    From now on each problem of such a kernel is measured once, as `tritile.autotune` does it, and remembered
    on disk, whether the kernel was decorated before or is after this call. The kernels' sources stay as they
    are, and so does what programs read and write of a tuner: `cache`, `best_config`, `configs`,
    `configs_timings`.

    Args:
        kernels: patterns of names, "module.function", as `fnmatch` has them; a pattern may leave out the
            module. Default: every kernel.
        mode: as `tritile.autotune` has it: "tune", "cached" (measures nothing), "strict" (an unknown problem
            raises NotTunedError) or "off". None: what `tritile.mode` or `TRITILE_MODE` asks for, else "tune".
        bucket: by pattern, functions by names in the kernel's key, as `tritile.autotune` takes them:
            `{"*causal_conv1d*": {"seqlen": triton.next_power_of_2}}`.
        table: a file that `tritile export --kernel` wrote.
        reference: by pattern, functions that return the right tensors, as `tritile.autotune` takes one.
        exclude: patterns of kernels to leave to Triton.

    Left to Triton are kernels with one config, tuners that torch makes for itself, subclasses with a `run`
    that calls no `super().run`, and every kernel where a program had replaced `Autotuner.run` before this
    call.

    Raises InvalidValueError for a pattern, mode, bucket or reference that is none. A kernel's first call
    raises it where `bucket` names what is not in the kernel's key, and where two adoptions of the kernel
    disagree.
    """
    return installed(checked(kernels, mode, bucket, table, reference, exclude))


def adopt_if_asked() -> None:
    """Adopt what the environment asks for; nothing without `TRITILE_ADOPT`. It may be called again."""
    import os

    if os.environ.get("TRITILE_ADOPT"):
        import tritile.tuner.site.sitecustomize  # noqa: F401


def checked(
    kernels: Any = "*", mode: Any = None, bucket: Any = None, table: Any = None, reference: Any = None,
    exclude: Any = (), is_default: bool = False,
) -> Adoption:  # fmt: skip
    """Return an adoption of the arguments of `adopt`. Raises InvalidValueError, as that does."""
    from tritile.core.settings import MODES
    from tritile.errors import InvalidValueError

    if mode is not None and mode not in MODES:
        raise InvalidValueError(f"mode is {mode!r}: expected one of {', '.join(MODES)}, or None")
    bucket, reference = bucket or {}, reference or {}
    is_bucket = isinstance(bucket, Mapping) and all(
        isinstance(own, Mapping) and all(map(callable, own.values())) for own in bucket.values()
    )
    if not is_bucket:
        raise InvalidValueError(f"bucket is {bucket!r}: expected functions by name, by pattern of kernels")
    if not isinstance(reference, Mapping) or not all(map(callable, reference.values())):
        raise InvalidValueError(f"reference is {reference!r}: expected functions by pattern of kernels")
    for name, patterns in (("bucket", bucket), ("reference", reference)):
        _patterns(name, [*patterns])
    named = _patterns("kernels", kernels)
    return Adoption(named, _patterns("exclude", exclude), bucket, reference, mode, table, is_default)


def of_environment(environ: Mapping[str, str]) -> Adoption:
    """Return the adoption that `TRITILE_ADOPT` and the variables that begin with it ask for.

    `TRITILE_ADOPT` is "1" for every kernel, or patterns with commas between them. `TRITILE_ADOPT_BUCKETS`
    holds "PATTERN:ARGUMENT=FUNCTION" with semicolons between them, where a function is "module:name", or a
    name of Triton's. `TRITILE_ADOPT_FILE` is a TOML file with the arguments of `adopt`, of which variables go
    first.

    Raises InvalidValueError, which names the variable, for anything else.
    """
    from tritile.errors import InvalidValueError

    named: dict[str, Any] = {}
    if path := environ.get("TRITILE_ADOPT_FILE"):
        try:
            named = _of_file(path)
        except (OSError, ValueError, TypeError) as error:
            raise InvalidValueError(f"TRITILE_ADOPT_FILE is {path!r}: {error}") from error
    kernels = environ.get("TRITILE_ADOPT", "1")
    if kernels != "1":
        named["kernels"] = [each.strip() for each in kernels.split(",") if each.strip()]
    for name, variable in (("mode", "TRITILE_ADOPT_MODE"), ("table", "TRITILE_ADOPT_TABLE")):
        if value := environ.get(variable):
            named[name] = value
    if buckets := environ.get("TRITILE_ADOPT_BUCKETS"):
        named["bucket"] = named.get("bucket", {}) | _buckets(buckets)
    return checked(**named, is_default=True)


def _of_file(path: str) -> dict[str, Any]:
    """Return the arguments of `adopt` that a TOML file holds; functions are named in it."""
    import tomllib

    with open(path, "rb") as file:  # noqa: PTH123
        named = tomllib.load(file)
    for pattern, own in named.get("bucket", {}).items():
        named["bucket"][pattern] = {argument: function_named(name) for argument, name in own.items()}
    for pattern, name in named.get("reference", {}).items():
        named["reference"][pattern] = function_named(name)
    return named


def _buckets(text: str) -> dict[str, dict[str, Callable[[Any], Any]]]:
    """Return the buckets of "PATTERN:ARGUMENT=FUNCTION;...". Raises InvalidValueError for other text."""
    from tritile.errors import InvalidValueError

    buckets: dict[str, dict[str, Callable[[Any], Any]]] = {}
    for each in filter(None, (part.strip() for part in text.split(";"))):
        where, is_given, function = each.partition("=")
        pattern, _, argument = where.rpartition(":")
        if not (pattern and argument and is_given and function):
            raise InvalidValueError(f"bucket {each!r}: expected PATTERN:ARGUMENT=FUNCTION")
        buckets.setdefault(pattern, {})[argument] = function_named(function)
    return buckets


def function_named(text: str) -> Callable[[Any], Any]:
    """Return the function "module:name", or of this name in Triton. Raises InvalidValueError."""
    from importlib import import_module

    from tritile.errors import InvalidValueError

    module, _, name = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    try:
        function = getattr(import_module(module or "triton"), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidValueError(
            f"function {text!r}: {error}: expected module:name, or a name of Triton's"
        ) from error
    if not callable(function):
        raise InvalidValueError(f"function {text!r} is {function!r}: expected a function")
    return function


def _patterns(name: str, patterns: Any) -> tuple[str, ...]:
    from tritile.errors import InvalidValueError

    listed = (patterns,) if isinstance(patterns, str) else patterns
    if not isinstance(listed, list | tuple) or not all(isinstance(each, str) and each for each in listed):
        raise InvalidValueError(f"{name} is {patterns!r}: expected names of kernels, or patterns of names")
    return tuple(listed)


def installed(adoption: Adoption) -> Adoption:
    """Put an adoption in force."""
    from tritile.core.triton_private import Autotuner

    with _lock:
        _take_pending()
        _adoptions.append(adoption)
        _changed()
        _install(Autotuner)
    return adoption


def install_later(environ: Mapping[str, str], module: Any) -> None:
    """Put in force what the environment asks for, once a kernel is called.

    `module` holds Triton's class `Autotuner`; the rest of Triton need not be imported yet.
    """
    global _pending
    with _lock:
        _pending = {name: value for name, value in environ.items() if name.startswith("TRITILE_ADOPT")}
        _install(module.Autotuner)


def _take_pending() -> None:
    global _pending
    pending, _pending = _pending, None
    if pending is None:
        return
    from tritile.errors import InvalidValueError, SettingWarning, callers_level

    try:
        _adoptions.insert(0, of_environment(pending))
    except InvalidValueError as error:
        warnings.warn(f"{error}: tritile adopts nothing", SettingWarning, callers_level())


def _changed() -> None:
    global _version
    _version += 1


def _install(kind: Any) -> None:
    global _class, _run, _original
    _class, original = kind, kind.run
    if original.__module__ != kind.__module__:
        return  # ours, or a program's that stands in for it already, and goes on doing so

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        state = kernel.__dict__.get(_STATE)
        if state is None or state.is_stale(kernel):
            state = _state_of(kernel)
        if state.tuner is None:
            return original(kernel, *args, **kwargs)
        try:
            return state.tuner.launch(args, kwargs)
        except Unchosen:
            return original(kernel, *args, **kwargs)

    _original, _run, kind.run = original, run, run
    # torch's tracer never calls `run`: it asks the class's instances for their pruning.
    kind.early_config_prune = property(_pruning_of, _set_pruning)


def _uninstall() -> None:
    global _run
    if (
        _run is not None and _class.run is _run
    ):  # else somebody's patch goes on calling it, and it calls Triton's
        _class.run, _run = _original, None
        del _class.early_config_prune
        _called.clear()


def _pruning_of(kernel: Any) -> Any:
    """Return a kernel's own `early_config_prune`, or one that shows torch's tracer what is remembered.

    torch's guards ask for it at every call of a compiled function: it stays the same.
    """
    own = kernel.__dict__.get("early_config_prune")
    if "torch._dynamo" not in sys.modules or "base_fn" not in kernel.__dict__:  # which is being made
        return own
    tuner = tuner_of(kernel)
    return own if tuner is None else tuner.shown_to_tracer()


def tuner_of(kernel: Any) -> "Adopted | None":
    """Return the tuner of a kernel under `triton.autotune`; None where tritile chooses nothing for it."""
    state = kernel.__dict__.get(_STATE)
    if state is None or state.is_stale(kernel):
        state = _state_of(kernel)
    return state.tuner


def tuner_for(what: Any) -> Any:
    """Return tritile's tuner of a kernel under `triton.autotune`, anything else as it is.

    A kernel that nobody adopted gets one for this use: it stays as it is, with the cache that it has.
    """
    from tritile.core.triton_private import Autotuner as TritonAutotuner
    from tritile.tuner.adopted import Adopted
    from tritile.tuner.autotuner import Autotuner

    if not isinstance(what, TritonAutotuner) or isinstance(what, Autotuner):
        return what
    adopted = tuner_of(what)
    if adopted is not None:
        return adopted
    kernel: Any = copy.copy(what)
    kernel.cache = {}
    return Adopted(kernel, Options(), AdoptedKernel(name_of(what)))


def _set_pruning(kernel: Any, early: Any) -> None:
    kernel.__dict__["early_config_prune"] = early


def _subclasses(kind: Any) -> Iterator[Any]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def name_of(kernel: Any) -> str:
    """Return "module.qualname" of a kernel's function; one that `exec` made may have no module."""
    module = kernel.base_fn.__module__
    return f"{module}.{kernel.base_fn.__qualname__}" if module else str(kernel.base_fn.__qualname__)


def _meets(name: str, patterns: Sequence[str]) -> bool:
    """True if a kernel's name, with its module or without, meets one of some patterns."""
    return any(fnmatchcase(name, each) or fnmatchcase(name.rpartition(".")[2], each) for each in patterns)


def _state_of(kernel: Any) -> _State:
    """Return what adoption knows of a kernel, made anew where a program changed the kernel."""
    with _lock:
        before = kernel.__dict__.get(_STATE)
        if before is not None and not before.is_stale(kernel):
            return before  # of another thread
        _take_pending()
        state, name = _State(kernel), name_of(kernel)
        adoptions = [each for each in _adoptions if each.names(name)]
        adoptions = [each for each in adoptions if not each.is_default] or adoptions
        if len(kernel.configs) > 1 and not _is_of_torch(kernel):
            _called[name] = None
            if adoptions:
                state.record = adoptions[-1]._report.setdefault(name, AdoptedKernel(name))
                _adopt(kernel, state, name, adoptions, before)
        kernel.__dict__[_STATE] = state
        return state


def _adopt(
    kernel: Any, state: _State, name: str, adoptions: Sequence[Adoption], before: _State | None
) -> None:
    """Give a kernel a tuner, or say why it has none."""
    from tritile.errors import InvalidValueError, brief, callers_level

    record, options = state.record, adoptions[-1].options(name)
    if any(each.options(name) != options for each in adoptions):
        raise InvalidValueError(
            f"two adoptions disagree about {name}: release the first, or exclude the kernel from it"
        )
    for argument, _ in options.bucket:
        if argument not in kernel.keys:
            key = ", ".join(map(repr, kernel.keys))
            raise InvalidValueError(f"bucket names {argument!r} of {name}: expected one of its key, [{key}]")
    try:
        from tritile.tuner.adopted import Adopted

        state.tuner = Adopted(kernel, options, record, before.tuner if before is not None else None)
        record.why = ""
    except Exception as error:  # whatever it is, Triton tunes the kernel, as it did
        if not record.why:
            warnings.warn(f"tritile does not adopt {name}: {brief(error)}", RuntimeWarning, callers_level())
        record.why = brief(error)


def _is_of_torch(kernel: Any) -> bool:
    """True for a tuner that torch's tracer made of another: it has no key, and restores nothing."""
    from tritile.core.torch_private import is_traced_kernel

    return not kernel.keys and is_traced_kernel(kernel)
