"""`tritile.adopt`: kernels under somebody else's `triton.autotune` use tritile's tuner, source unchanged.

It replaces `run` of Triton's class `Autotuner`, and so reaches kernels decorated before and after, and
subclasses whose `run` calls `super().run`. At the first call with a choice to make, a kernel gets a tuner of
its own (`adopted.Adopted`); the kernel itself stays the object that torch and its library know. If anything
prevents that, or a choice, the kernel is left to Triton, with one warning.

Only the standard library is imported here; tritile itself is imported once a kernel is adopted.
"""

import contextlib
import copy
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tritile.core.settings import Effort, Mode
    from tritile.tuner.adopted import Adopted

_STATE: Final = "_tritile"  # the attribute of a kernel with its `_State`
_MAX_STATES: Final = 8  # per kernel, for programs that switch its attributes back and forth


class Unchosen(Exception):
    """No config was chosen for a call, which is left to Triton."""


@dataclass
class AdoptedKernel:
    """What became of one kernel. `why` it, or one of its problems, was left to Triton; "" if none was.

    Of the problems for which tritile chose a config, `measured` were measured in this process, in `seconds`,
    `remembered` were measured before, and `guessed` never were. `saved`: the seconds from the first trial to
    the last of those remembered on this machine.
    """

    name: str
    why: str = ""
    measured: int = 0
    remembered: int = 0
    guessed: int = 0
    seconds: float = 0.0
    saved: float = 0.0

    def count(self, is_measured: bool, seconds: float, saved: float) -> None:
        """Count one problem, which took `seconds` to measure just now, 0 if it did not need it."""
        kind = "measured" if seconds else "remembered" if is_measured else "guessed"
        setattr(self, kind, getattr(self, kind) + 1)
        self.seconds += seconds
        self.saved += saved

    def __str__(self) -> str:
        facts = []
        if self.measured:
            facts.append(f"{_problems(self.measured)} measured now, in {self.seconds:.1f} s")
        if self.remembered:
            saved = f", which saved {self.saved:.0f} s" if self.saved >= 0.5 else ""
            facts.append(f"{_problems(self.remembered)} remembered{saved}")
        if self.guessed:
            how = "not measured: a near problem's config, or the first"
            facts.append(f"{_problems(self.guessed)} guessed ({how})")
        if self.why:
            facts.append(f"left to Triton: {self.why}")
        return f"{self.name}: {'; '.join(facts)}"


def _problems(count: int) -> str:
    return f"{count} problem{'s' * (count != 1)}"


@dataclass(frozen=True)
class Options:
    """How an adopted kernel is tuned."""

    mode: "Mode | None" = None
    effort: "Effort | None" = None
    table: "str | os.PathLike[str] | None" = None
    bucket: tuple[tuple[str, Callable[[Any], Any]], ...] = ()
    reference: Callable[..., Any] | None = None


@dataclass(eq=False)
class Adoption:
    """What `tritile.adopt` returns. It ends with `release()`, or as a context manager with the `with`.

    `print(adoption)` lists the kernels that were called; `report` has them as records.
    """

    kernels: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    bucket: Mapping[str, Mapping[str, Callable[[Any], Any]]] = field(default_factory=dict)
    reference: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    mode: "Mode | None" = None
    effort: "Effort | None" = None
    table: "str | os.PathLike[str] | None" = None
    is_default: bool = False  # from the environment; except for the mode, the program's own goes first
    _report: dict[str, AdoptedKernel] = field(default_factory=dict)

    def __enter__(self) -> "Adoption":
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def __str__(self) -> str:
        lines = [str(row) for row in self.report]
        if not lines:
            which = "" if "*" in self.kernels else f" named {', '.join(self.kernels)}"
            but = f", except {', '.join(self.exclude)}" if self.exclude else ""
            what = f"kernels under triton.autotune{which}{but}"
            lines = [f"tritile.adopt: {what}: none was called so far, or only within another adoption"]
        return "\n".join([*lines, *(self._unmatched() if _called else ()), *self._remarks()])

    @property
    def report(self) -> list[AdoptedKernel]:
        """The kernels that needed a config, in order of their names."""
        rows = [self._report[name] for name in sorted(self._report)]
        return [row for row in rows if row.why or row.measured or row.remembered or row.guessed]

    def names(self, kernel: str) -> bool:
        """True if a kernel's name, as `name_of` returns it, matches a pattern and none of `exclude`."""
        return _matches(kernel, self.kernels) and not _matches(kernel, self.exclude)

    def options(self, kernel: str, keys: Sequence[str]) -> Options:
        """Return the options of a kernel with this key. Buckets of other arguments do not apply to it.

        Raises InvalidValueError for such a bucket if its pattern has no wildcards, and so names the kernel.
        """
        from tritile.errors import InvalidValueError, did_you_mean

        buckets: dict[str, Callable[[Any], Any]] = {}
        for pattern, own in self.bucket.items():
            if not _matches(kernel, (pattern,)):
                continue
            buckets |= {argument: function for argument, function in own.items() if argument in keys}
            wrong = next((argument for argument in own if argument not in keys), None)
            if wrong is not None and not _has_wildcards(pattern):
                what = f"bucket names {wrong!r} of {kernel}{did_you_mean(wrong, keys)}"
                raise InvalidValueError(f"{what}: expected one of its key, [{', '.join(map(repr, keys))}]")
        references = [f for pattern, f in self.reference.items() if _matches(kernel, (pattern,))]
        reference = next(iter(references), None)
        return Options(self.mode, self.effort, self.table, tuple(sorted(buckets.items())), reference)

    def release(self) -> None:
        """Leave the kernels to Triton again. Measured configs stay in the kernels' `cache`."""
        with _lock:
            was_active = self in _adoptions
            if was_active:
                _adoptions.remove(self)
                _changed()
                for tuner in [*TUNERS]:
                    tuner.drop_guesses()
            if not _adoptions and _pending is None:
                _uninstall()
        if was_active:
            for text in self._unmatched():
                warn(text, UserWarning)

    def _unmatched(self) -> Iterator[str]:
        """Yield a message for each pattern that matched no kernel, and each bucket that applied to none."""
        from tritile.errors import did_you_mean

        called = dict(_called)
        for pattern in dict.fromkeys((*self.kernels, *self.bucket, *self.reference)):
            if pattern != "*" and not any(_matches(name, (pattern,)) for name in called):
                hint = _similar(pattern, called)
                yield f"tritile.adopt: no kernel that was called is named {pattern!r}{hint}"
        for pattern, own in self.bucket.items():
            named = [keys for name, keys in called.items() if self.names(name) and _matches(name, (pattern,))]
            found = dict.fromkeys(key for keys in named for key in keys)
            for argument in own if named and _has_wildcards(pattern) else ():  # else the call raised
                if argument not in found:
                    what = f"no kernel that was called and matches {pattern!r} has {argument!r} in its key"
                    hint = f"their keys hold {', '.join(found) or 'nothing'}{did_you_mean(argument, found)}"
                    yield f"tritile.adopt: a bucket is unused: {what}; {hint}"

    def _remarks(self) -> Iterator[str]:
        if _class is None:
            return
        if _class.run is not _run and self in _adoptions:
            other = getattr(_class.run, "__qualname__", repr(_class.run))
            yield f"{other} stands in for Autotuner.run of Triton: what it does not pass on is not adopted"
        for each in _subclasses(_class):
            names = getattr(getattr(vars(each).get("run"), "__code__", None), "co_names", ("super",))
            if "super" not in names and not each.__module__.startswith("tritile."):
                name = f"{each.__module__}.{each.__qualname__}"
                yield f"{name} has a run of its own, without super().run: its kernels are left to Triton"


class _State:
    """A kernel's tuner, None if it has none, and the attributes of the kernel that it was made from."""

    __slots__ = (
        "bench", "cache", "configs", "early", "fn", "keys", "listed", "listed_keys", "others", "owner",
        "post_hook", "pre_hook", "record", "tuner", "version",
    )  # fmt: skip

    def __init__(self, kernel: Any, others: "list[_State]") -> None:
        own = kernel.__dict__.get
        self.tuner: Adopted | None = None
        self.record = AdoptedKernel("")
        self.owner, self.version, self.others = id(kernel), _version, others
        self.configs, self.listed = kernel.configs, [*kernel.configs]
        self.keys, self.listed_keys = kernel.keys, [*kernel.keys]
        self.fn, self.cache = kernel.fn, kernel.cache
        self.pre_hook, self.post_hook = own("pre_hook"), own("post_hook")
        self.bench, self.early = own("_do_bench"), own("early_config_prune")

    def is_stale(self, kernel: Any) -> bool:
        """True if a program replaced or edited what the tuner was made from, or the kernel is a copy.

        Lists are compared by content: some programs assign an equal list at each call, others edit theirs.
        """
        own, configs, keys = kernel.__dict__.get, kernel.configs, kernel.keys
        if not (
            self.version == _version and self.owner == id(kernel) and self.fn is kernel.fn
            and self.cache is kernel.cache and self.bench is own("_do_bench")
            and self.early is own("early_config_prune") and self.pre_hook is own("pre_hook")
            and self.post_hook is own("post_hook") and keys == self.listed_keys and configs == self.listed
        ):  # fmt: skip
            return True
        if configs is not self.configs:  # the next comparison is of the same objects
            self.configs, self.listed = configs, [*configs]
        return False

    def __reduce__(self) -> tuple[Any, ...]:  # pickles and copies of a kernel have none
        return type(None), ()


_lock = threading.RLock()
_adoptions: list[Adoption] = []
_version = 0  # changes with `_adoptions`
_called: dict[str, dict[str, None]] = {}  # kernels called since the first adoption, and what is in their keys
TUNERS: "weakref.WeakSet[Adopted]" = weakref.WeakSet()
_pending: dict[str, str] | None = None  # the environment's adoption, until a kernel is called
_class: Any = None  # Triton's Autotuner
_run: Any = None  # our replacement of its `run`
_original: Any = None  # the `run` that it replaced


def _after_fork() -> None:
    """Make a new lock in a forked process: a thread that exists only in the parent may own the old one."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def adopt(
    kernels: str | Sequence[str] = "*", *, mode: "Mode | None" = None, effort: "Effort | None" = None,
    bucket: Mapping[str, Mapping[str, Callable[[Any], Any]]] | None = None,
    table: "str | os.PathLike[str] | None" = None,
    reference: Mapping[str, Callable[..., Any]] | None = None, exclude: str | Sequence[str] = (),
) -> Adoption:  # fmt: skip
    """Tune every kernel of this process that is under `triton.autotune` with tritile's tuner.

    From now on each problem of such a kernel is measured once, as under `tritile.autotune`, and remembered on
    disk, whether the kernel was decorated before this call or is later. The kernels' sources do not change,
    nor does what programs read and write of a tuner: `cache`, `best_config`, `configs`, `configs_timings`.

    Args:
        kernels: patterns of names, "module.function", in the syntax of `fnmatch`; a pattern may omit the
            module. Default: every kernel.
        mode: as in `tritile.autotune`: "tune", "spread" (measures while calls go on), "cached" (measures
            nothing), "strict" (an unknown problem raises NotTunedError) or "off". None: that of
            `tritile.mode` or `TRITILE_MODE`, else "tune".
        effort: "quick" or "full", as in `tritile.autotune`.
        bucket: functions by names in the kernel's key, as `tritile.autotune` takes them, by pattern:
            `{"*causal_conv1d*": {"NB": triton.next_power_of_2}}`. It applies to those kernels of the pattern
            that have the argument in their key.
        table: a file that `tritile export --kernel` wrote.
        reference: functions that return the right tensors, as `tritile.autotune` takes one, by pattern.
        exclude: patterns of kernels to leave to Triton.

    Left to Triton are kernels with one config, tuners that torch makes for itself, subclasses whose `run`
    does not call `super().run`, and, if a program had replaced `Autotuner.run` before this call, all kernels.

    Raises InvalidValueError for an invalid pattern, mode, effort, bucket or reference. A kernel's first call
    raises it if `bucket` has the kernel's very name with an argument that is not in its key, or if two
    adoptions of the kernel disagree.
    """
    from tritile.tuner.adoption_options import adoption_of

    return installed(adoption_of(kernels, mode, effort, bucket, table, reference, exclude))


def adopt_if_requested() -> None:
    """Adopt what the environment requests by `TRITILE_ADOPT` or a file. It may be called repeatedly."""
    import tritile.tuner.startup.sitecustomize  # noqa: F401


def warn(text: str, category: type[Warning]) -> None:
    """Warn, at the line that called tritile, without raising if the program turns warnings into errors."""
    from tritile.errors import callers_level

    with contextlib.suppress(category):
        warnings.warn(text, category, stacklevel=callers_level())


def installed(adoption: Adoption) -> Adoption:
    """Apply an adoption, and return it."""
    from tritile.core.triton_private import Autotuner
    from tritile.tuner.measure.server import start_early

    _take_pending()
    with _lock:
        _adoptions.append(adoption)
        _changed()
        _install(Autotuner)
    start_early(adoption.mode)
    return adoption


def install_later(environ: Mapping[str, str], module: Any) -> None:
    """Apply the environment's adoption once a kernel is called.

    `module` defines Triton's class `Autotuner`; the rest of Triton need not be imported yet.
    """
    global _pending
    from tritile.tuner.measure.server import start_early

    with _lock:
        _pending = {name: value for name, value in environ.items() if name.startswith("TRITILE_ADOPT")}
        _install(module.Autotuner)
    start_early()


def _take_pending() -> None:
    """Apply the environment's adoption; without the lock, as the functions it names may import modules."""
    global _pending
    pending, _pending = _pending, None
    if pending is None:
        return
    from tritile.errors import InvalidValueError, SettingWarning
    from tritile.tuner.adoption_options import of_environment

    try:
        adoption = of_environment(pending)
    except InvalidValueError as error:
        warn(f"{error}: tritile adopts nothing", SettingWarning)
        return
    with _lock:
        _adoptions.insert(0, adoption)
        _changed()
    from multiprocessing.util import Finalize  # unlike atexit, forked workers run it too

    Finalize(None, _report, (adoption, pending.get("TRITILE_ADOPT_REPORT", "")), exitpriority=0)


def _report(adoption: Adoption, requested: str) -> None:
    """Write what a process adopted to standard error, if that is requested, else what was misspelt."""
    if requested.lower() in ("", "0", "false", "off", "no"):
        lines = [*adoption._unmatched()]
    else:
        lines = [f"tritile, process {os.getpid()}:", *(f"  {line}" for line in str(adoption).splitlines())]
    sys.stderr.write("".join(f"{line}\n" for line in lines))


def _changed() -> None:
    global _version
    _version += 1


def _install(kind: Any) -> None:
    global _class, _run, _original
    _class, original = kind, kind.run
    # By its globals, as a wrapper may have the names of what it wraps.
    if getattr(original, "__globals__", {}).get("__name__") != kind.__module__:
        return  # ours, or a program's replacement, which stays

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        state = kernel.__dict__.get(_STATE)
        if state is None or state.is_stale(kernel):
            state = _state_of(kernel)
        if state.tuner is not None:
            try:
                return state.tuner.launch(args, kwargs)
            except Unchosen:
                pass
        return original(kernel, *args, **kwargs)

    _original, _run, kind.run = original, run, run
    # torch's tracer never calls `run`, but reads the pruning of instances.
    kind.early_config_prune = property(_pruning_of, _set_pruning, _delete_pruning)


def _uninstall() -> None:
    global _run
    if _run is not None and _class.run is _run:  # else another patch calls ours, which calls Triton's
        _class.run, _run = _original, None
        del _class.early_config_prune


# What torch's tracer reads.


def _pruning_of(kernel: Any) -> Any:
    """Return a kernel's own `early_config_prune`; once torch may trace, one that shows it remembered configs.

    For any other caller the latter does what the kernel's own does. It stays the same object, as torch's
    guards read it at every call of a compiled function.
    """
    own = kernel.__dict__.get("early_config_prune")
    if "torch._dynamo" not in sys.modules or "base_fn" not in kernel.__dict__:  # under construction
        return own
    with contextlib.suppress(Exception):  # two adoptions disagree, which the kernel's first call reports
        tuner = tuner_of(kernel)
        if tuner is not None:
            shown = tuner.shown_to_tracer()
            shown.instead_of = id(kernel), own
            return shown
    return own


def _set_pruning(kernel: Any, early: Any) -> None:
    owner, own = getattr(early, "instead_of", (None, None))
    kernel.__dict__["early_config_prune"] = own if owner == id(kernel) else early


def _delete_pruning(kernel: Any) -> None:
    kernel.__dict__.pop("early_config_prune", None)


# States of kernels.


def tuner_of(kernel: Any) -> "Adopted | None":
    """Return the tuner of a kernel under `triton.autotune`; None if it is left to Triton."""
    state = kernel.__dict__.get(_STATE)
    if state is None or state.is_stale(kernel):
        state = _state_of(kernel)
    return state.tuner


def tuner_for(what: Any) -> Any:
    """Return tritile's tuner of a kernel under `triton.autotune`; anything else unchanged.

    For a kernel that nobody adopted it is a new tuner, which does not touch the kernel and its cache.
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


def _subclasses(kind: Any) -> Iterator[Any]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def name_of(kernel: Any) -> str:
    """Return "module.qualname" of a kernel's function; one made by `exec` may have no module."""
    module = kernel.base_fn.__module__
    return f"{module}.{kernel.base_fn.__qualname__}" if module else str(kernel.base_fn.__qualname__)


def _has_wildcards(pattern: str) -> bool:
    return not set("*?[").isdisjoint(pattern)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """True if a kernel's name, with or without its module, matches one of the patterns."""
    return any(fnmatchcase(name, each) or fnmatchcase(name.rpartition(".")[2], each) for each in patterns)


def _similar(pattern: str, called: Collection[str]) -> str:
    """Return a hint at a kernel, or at the pattern of a module, that a misspelt pattern may mean."""
    from tritile.errors import did_you_mean

    names = [*called]
    for name in called:
        modules, _, own = name.rpartition(".")
        names += [own, *(f"{module}.*" for module in accumulate(modules.split("."), "{}.{}".format))]
    text = pattern.strip("*")
    return did_you_mean(text, names) or did_you_mean(text.rpartition(".")[2], names)


def _state_of(kernel: Any) -> _State:
    """Return the state of a kernel, a new one if a program changed the kernel.

    Raises only InvalidValueError, if the kernel's adoptions contradict each other or name a wrong bucket, and
    NotTunedError, if it cannot be adopted in mode "strict".
    """
    _take_pending()
    with _lock:
        before = kernel.__dict__.get(_STATE)
        others = [] if before is None or before.owner != id(kernel) else before.others
        state = next((each for each in others if not each.is_stale(kernel)), None)
        if state is None:
            state = _State(kernel, others)
            if len(kernel.configs) > 1:
                _adopt(kernel, state, name_of(kernel), before)
            others[:] = [each for each in others[1 - _MAX_STATES :] if each.version == _version]
            others.append(state)
        kernel.__dict__[_STATE] = state
        return state


def _adopt(kernel: Any, state: _State, name: str, before: _State | None) -> None:
    """Give a kernel a tuner, or record why it has none."""
    adoptions = [each for each in _adoptions if each.names(name)]
    _called[name] = _called.get(name, {}) | dict.fromkeys(kernel.keys)
    if not adoptions:
        return
    from tritile.errors import InvalidValueError, NotTunedError, brief

    own = [each for each in adoptions if not each.is_default] or adoptions
    options = own[-1].options(name, kernel.keys)
    if any(each.options(name, kernel.keys) != options for each in own):
        advice = "release the first, or exclude it there"
        raise InvalidValueError(f"two adoptions disagree about {name}: {advice}")
    if options.mode is None and adoptions[0].is_default:  # set by whoever runs the program
        options = replace(options, mode=adoptions[0].mode)
    state.record = record = own[-1]._report.setdefault(name, AdoptedKernel(name))
    try:
        if _is_of_torch(kernel):
            return
        from tritile.tuner.adopted import Adopted

        state.tuner = Adopted(kernel, options, record, None if before is None else before.tuner)
        record.why = ""
    except Exception as error:  # whatever it is, Triton tunes the kernel as before
        why, record.why = record.why, brief(error)
        if options.mode == "strict":
            raise NotTunedError(f"mode is strict, and tritile cannot adopt {name}: {brief(error)}") from error
        if not why:
            warn(f"tritile does not adopt {name}: {brief(error)}", RuntimeWarning)


def _is_of_torch(kernel: Any) -> bool:
    """True for a tuner that torch's tracer derived from another: it has no key, and restores nothing."""
    from tritile.core.torch_private import is_traced_kernel

    return not kernel.keys and is_traced_kernel(kernel)
