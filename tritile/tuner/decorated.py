"""One call of a decorated kernel: its configs compiled, timed and checked, by the search of every problem.

In processes of their own configs run on copies of the call's memory, and one that hangs or crashes costs
itself alone. Otherwise they run in this process on the call's own arguments, one after the other.
"""

import contextlib
import copy
import functools
import inspect
import logging
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import triton

from tritile.core.config import Config
from tritile.core.device import HOST, Device
from tritile.core.interpreter_private import watched
from tritile.core.log import log
from tritile.core.problem import KernelProblem
from tritile.core.settings import tune_budget_s
from tritile.core.threads import interpreter_lock
from tritile.core.triton_private import autotuning_listener, handles_of, time_config
from tritile.errors import (
    InvalidValueError,
    IsolationWarning,
    TuningError,
    UnsupportedError,
    brief,
    callers_level,
)
from tritile.runtime.ahead import check_fits, compiling_for
from tritile.tuner.arguments import layers_of, tensors_of
from tritile.tuner.measure import shipping
from tritile.tuner.measure.bench import Screened, Stage, Subject, Taken
from tritile.tuner.measure.engine import Keep, Rules, Task, has_more, logged, tune, whole
from tritile.tuner.measure.outputs import (
    OUTSIDE,
    WRONG,
    error_of,
    overlap,
    poison,
    span,
    unlike,
    unwritten,
)
from tritile.tuner.measure.shipping import HUGE, NUMBERS, Memory, Shipment, StandIn, are_mapped, unpack
from tritile.tuner.measure.timing import Eager, Run, Timing, copies_wanted, graph_of
from tritile.tuner.measure.workers import WorkerError, Workshop, borrowed
from tritile.tuner.search import Listed, Space
from tritile.tuner.store.files import MAX_US
from tritile.tuner.store.trial import Trial, best_of, is_settled
from tritile.tuner.store.trials import store_of

if TYPE_CHECKING:
    from tritile.tuner.autotuner import Autotuner

Named = dict[str, Any]
REFERENCE: Final = Config((), 1, 1, family="reference")  # in whose place a kernel's reference is timed
_MOST: Final = 96  # the most configs of a space that a search tries
_LEAST_US: Final = 1e-6
_MOST_OF_A_REASON: Final = 500  # characters of what is wrong with an answer


@dataclass(frozen=True)
class KernelCall:
    """Describe a launch, and what `tritile.autotune` takes for it; `fn` is the kernel with its heuristics.

    `configs` are those that the kernel's pruning leaves for the call; of a space, the first few. `source` is
    the digest of the kernel's source. `reference` returns the right tensors, by names of arguments.
    """

    problem: KernelProblem
    device: Device
    source: str
    fn: Any
    arg_names: Sequence[str]
    args: tuple[Any, ...]
    kwargs: Named
    configs: Mapping[Config, triton.Config] = field(default_factory=dict)
    reset_to_zero: Sequence[str] = ()
    restore_value: Sequence[str] = ()
    pre_hook: Callable[..., Any] | None = None
    reference: Callable[..., Mapping[str, torch.Tensor]] | None = None
    tolerance: float | None = None
    keeps_inputs: bool = False  # tensors that the reference takes, and does not return, must not change

    @property
    def named(self) -> Named:
        found = dict(zip(self.arg_names, self.args, strict=False)) | self.kwargs
        return {name: value for name, value in found.items() if name != "grid"}

    @property
    def tensors(self) -> Named:
        """Return arguments that hold tensors, by name, without what autograd keeps of them."""
        return {n: _detached(v) for n, v in self.named.items() if next(tensors_of(v), None) is not None}

    def having(self, named: Named) -> "KernelCall":
        """Return the call with other arguments by name, which may hold another "grid"."""
        args = tuple(named.get(name, value) for name, value in zip(self.arg_names, self.args, strict=False))
        placed = self.arg_names[: len(self.args)]
        kwargs = self.kwargs | {name: value for name, value in named.items() if name not in placed}
        return replace(self, args=args, kwargs=kwargs)

    def copied(self) -> "KernelCall":
        """Return the call on copies of its tensors, which share memory as the tensors do."""
        return self.having(copy.deepcopy(self.tensors))

    def config(self, config: Config | triton.Config) -> triton.Config:
        return (self.configs.get(config) or config.to_triton()) if isinstance(config, Config) else config

    def launch(self, config: Config | triton.Config, **options: Any) -> Any:
        own = self.config(config)
        settings = own.all_kwargs()
        if own.pre_hook is not None:
            own.pre_hook(self.named | settings)
        fn = _InTurns(self.fn) if self.device == HOST else self.fn
        return fn.run(*self.args, **(self.kwargs | settings | options))

    def reset(self, config: Config | triton.Config) -> None:
        """Prepare the tensors for a launch: by `pre_hook`, with what the config sets, or `reset_to_zero`."""
        if self.pre_hook is not None:
            self.pre_hook(self.named | self.config(config).all_kwargs(), reset_only=True)
        else:
            _zero(self.named, self.reset_to_zero)

    def compiled(self, config: Config | triton.Config) -> Any:
        """Return Triton's kernel, compiled into its cache without a GPU. Raises what the compiler raises."""
        with compiling_for(self.device):
            return self.launch(config, grid=(1,), warmup=True)

    def compile(self, config: Config | triton.Config) -> None:
        """Compile as `compiled` does. Raises TuningError, too, where the GPU has too little shared memory."""
        check_fits(self.compiled(config), self.device)


class _InTurns:
    """Launch a kernel in Triton's interpreter, which runs one at a time."""

    def __init__(self, fn: Any) -> None:
        self._fn = fn

    def run(self, *args: Any, **kwargs: Any) -> Any:
        with interpreter_lock:
            return self._fn.run(*args, **kwargs)


def _zero(named: Mapping[str, Any], names: Sequence[str]) -> None:
    for tensor in (tensor for name in names for tensor in tensors_of(named.get(name))):
        tensor.zero_()


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, tuple | list):
        items = [_detached(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


# Checks.


def _taken(function: Callable[..., Any], named: Named) -> Named:
    """Return the arguments that a function takes."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return named
    return {name: value for name, value in named.items() if name in parameters}


def referred(call: KernelCall) -> dict[str, torch.Tensor]:
    """Return the right tensors by name, as the call's reference makes them; none without a reference.

    Raises InvalidValueError where there are none or they are not tensors of the call, and what the reference
    raises.
    """
    if call.reference is None:
        return {}
    named = call.named
    found = call.reference(**_taken(call.reference, named))
    tensors = found.values() if isinstance(found, Mapping) else ()
    if not tensors or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        got = type(found).__name__ if tensors or not isinstance(found, Mapping) else "no tensors"
        raise InvalidValueError(
            f"reference returned {got}: expected a dict of right tensors by name of argument"
        )
    answers = {name: tensor.clone() for name, tensor in found.items()}
    for name, tensor in answers.items():
        if not isinstance(named.get(name), torch.Tensor):
            raise InvalidValueError(f"the reference names {name!r}, which is not a tensor of the call")
        if named[name].shape != tensor.shape:
            shapes = f"{tuple(tensor.shape)}, not {tuple(named[name].shape)}"
            raise InvalidValueError(f"the reference of {name} has shape {shapes}")
    return answers


def checked(call: KernelCall, config: Config | triton.Config, memory: Memory | None = None) -> float | None:
    """Run a config and return the largest relative error; None without a reference.

    Outputs are poisoned ahead of resets and hooks, unless the kernel reads them, or another argument shares
    their memory. Raises TuningError for an answer that is wrong or not written whole, for an argument of the
    reference that is changed, and in the interpreter for an access outside of `memory`.
    """
    named, answers, poisoned = call.named, referred(call), set()
    for name in answers:
        others = [tensor for n, v in named.items() if n != name for tensor in tensors_of(v)]
        is_read = name in (*call.reset_to_zero, *call.restore_value)
        if not is_read and not any(overlap(named[name], other) for other in others):
            poison(named[name], answers[name])
            poisoned.add(name)
    call.reset(config)
    kept = [(*each, each[1].clone()) for each in _inputs(call, call.config(config), answers)]
    if memory is not None and _shows_accesses(call):
        _launch_within(memory, call, config)
    else:
        call.launch(config)
    errors = []
    for name, right in answers.items():
        is_real = named[name].is_floating_point()
        advice = f"if the kernel reads {name}, name it in restore_value="
        place = unwritten(named[name]) if is_real and name in poisoned else None
        if place is not None:
            what = f"{name}{place or ''} is not written, or what {name} was filled with"
            raise TuningError(f"{WRONG}: {what}: {advice}")
        try:
            errors.append(error_of(name, named[name], right, call.tolerance))
        except TuningError as wrong:
            if name in poisoned and (not is_real or bool(named[name].double().isnan().any())):
                filled = f"{name} was filled with {'NaN' if is_real else 'wrong integers'}"
                raise TuningError(f"{wrong}; {filled}: {advice}") from None
            raise
    for name, tensor, before in kept:
        if unlike(tensor, before):
            what = f"{name} is changed, which the reference takes and does not return"
            raise TuningError(f"{WRONG}: {what}: if the kernel may change it, name it in restore_value=")
    return max(errors, default=None)


def _inputs(
    call: KernelCall, config: triton.Config, answers: Mapping[str, torch.Tensor]
) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors that the reference's parameters name, and the kernel must not change, by name.

    Those in memory that the kernel may write are left out; so are all where a hook may change some.
    """
    if not call.keeps_inputs or call.reference is None or call.pre_hook or config.pre_hook:
        return []
    written = (*answers, *call.reset_to_zero, *call.restore_value)
    outs = [tensor for name in written for tensor in tensors_of(call.named.get(name))]
    return [
        (name, tensor)
        for name, value in call.named.items()
        if name in inspect.signature(call.reference).parameters
        for tensor in tensors_of(value)
        if not any(overlap(tensor, out) for out in outs)
    ]


def _shows_accesses(call: KernelCall) -> bool:
    return call.device == HOST  # in the interpreter


def _launch_within(memory: Memory, call: KernelCall, config: Config | triton.Config) -> None:
    """Launch in the interpreter. Raises TuningError ahead of the first access outside the call's tensors."""
    strays: list[str] = []
    covered = memory.covered(tensor for value in call.named.values() for tensor in tensors_of(value))
    is_free = _has_address(call.named.values())

    def see(addresses: np.ndarray, mask: np.ndarray | None, size: int, is_written: bool) -> None:
        used = addresses.ravel()
        if mask is not None:
            used = used[np.broadcast_to(mask, addresses.shape).ravel().astype(bool)]
        stray = memory.stray(used, size, is_written, covered, is_free)
        if stray is not None:
            how = "wrote" if is_written else "read"
            strays.append(f"{how} {OUTSIDE}: {_place_of(stray, call.named)}")
            raise TuningError(strays[0])

    try:
        with interpreter_lock, watched(see):
            call.launch(config)
    except Exception:
        if strays:  # the interpreter has wrapped it
            raise TuningError(strays[0]) from None
        raise


def _has_address(values: Iterable[Any]) -> bool:
    """True if an argument is the address of memory, or holds one: a number, a tensor, or another object."""
    for value in values:
        if not isinstance(value, torch.Tensor) and hasattr(value, "data_ptr"):
            return True
        found = [t.numpy().ravel() for t in tensors_of(value) if t.dtype in (torch.int64, torch.uint64)]
        if type(value) is int and 0 < value < 1 << 64:
            found = [np.array([value], dtype=np.uint64)]
        if any(bool(are_mapped(each.astype(np.uint64)).any()) for each in found):
            return True
    return False


def _place_of(address: int, named: Named) -> str:
    """Return where an address lies by the nearest tensor, in words."""
    found: list[tuple[int, str]] = []
    for name, tensor in ((name, tensor) for name, value in named.items() for tensor in tensors_of(value)):
        first, past = span(tensor)
        if first <= address < past:
            return f"between elements of {name}"
        found += [(address - past, f"behind the end of {name}"), (first - address, f"ahead of {name}")]
    far, where = min(each for each in found if each[0] >= 0)
    return f"{far} bytes {where}" if far else f"right {where}"


def _checked_within_guards(
    made: Callable[..., tuple[KernelCall, Memory | None]], config: Config | triton.Config
) -> float | None:
    """Check a config as `checked` does, and that it keeps to its memory; return the largest error.

    `made` returns the call and its memory, between guards of a pattern; None where it is not watched. The
    interpreter shows each access. On a GPU guards do: of NaN, of large numbers of either sign, as a maximum
    drops NaN, and where outputs are read of small numbers, as what is added to the others does not show.
    """
    own, memory = made()
    errors, patterns = [checked(own, config, memory)], [HUGE, HUGE | 0x80]
    if own.reset_to_zero or own.restore_value or own.pre_hook:
        patterns.append(NUMBERS)
    while memory is not None:
        if not memory.whole():
            raise TuningError(f"wrote {OUTSIDE}")
        if _shows_accesses(own) or not patterns:
            break
        del own, memory  # ahead of the next copies
        own, memory = made(patterns.pop())
        errors.append(checked(own, config, memory))
    return max((error for error in errors if error is not None), default=None)


def checked_here(call: KernelCall, config: triton.Config) -> float | None:
    """Check a config in this process, on copies of the call's tensors; return the largest relative error.

    Guards lie around tensors in host memory. Raises TuningError where the config does not run or its answer
    is wrong, and what the reference raises.
    """
    referred(call.copied())  # a failure here is not the config's

    def made(*pattern: int) -> tuple[KernelCall, Memory | None]:
        if all(tensor.device.type == "cpu" for v in call.tensors.values() for tensor in tensors_of(v)):
            with contextlib.suppress(UnsupportedError):
                named, memory = shipping.guarded(call.tensors, *pattern)
                return call.having(named), memory
        return call.copied(), None

    try:
        return _checked_within_guards(made, config)
    except TuningError:
        raise
    except Exception as failure:  # whatever one config raises, the others still deserve their turn
        raise TuningError(brief(failure)) from failure


# In processes of their own.


@dataclass(frozen=True)
class KernelSubject:
    """A call of a decorated kernel, packed so that any process can run it."""

    problem: KernelProblem
    device: Device
    source: str
    shipment: Shipment = field(default_factory=Shipment)  # empty where it is measured in this process

    def digest(self, config: Config) -> str:
        return self.source

    def compile(self, config: Config) -> None:
        unpack(self.shipment, StandIn).compile(config)

    def compile_check(self, config: Config) -> None:
        """Compile nothing: a check runs what was compiled."""

    @property
    def copies(self) -> int:
        return copies_wanted(self.shipment.bytes, self.device.l2_bytes)

    def stage(self, copies: int) -> Stage:
        return _Stage(self, copies)


class _Stage:
    def __init__(self, subject: KernelSubject, copies: int) -> None:
        self._shipment = subject.shipment
        self._where = "cpu" if subject.device == HOST else "cuda"
        contents = torch.load(self._shipment.file, weights_only=True)
        self._pristine = Memory(self._shipment.blocks, contents, self._where)
        self.calls: list[KernelCall] = [self._made()[0] for _ in range(copies)]
        referred(self._made()[0])  # once ahead of all configs: a failure here is not theirs
        triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device="cuda"))

    def _made(self, *pattern: int) -> tuple[KernelCall, Memory]:
        memory = Memory(self._shipment.blocks, self._pristine.contents(), self._where, *pattern)
        return unpack(self._shipment, memory.tensor), memory

    @functools.cached_property
    def _right(self) -> KernelCall:
        call: KernelCall = unpack(self._shipment, self._pristine.tensor)
        return call

    def prepared(self, config: Config) -> tuple[Run, Taken]:
        if config == REFERENCE:
            reference = self.calls[0].reference
            assert reference is not None
            names = _taken(reference, self.calls[0].named).keys()
            return (lambda call: reference(**{name: call.named[name] for name in names})), Taken()
        kernel = self.calls[0].launch(config, warmup=True)
        _, registers, spills = handles_of(kernel)
        return (lambda call: call.launch(config)), Taken(registers, spills, kernel.metadata.shared)

    def timed(self, config: Config, run: Run) -> Eager:
        if config == REFERENCE:
            return graph_of(run, self.calls)
        return graph_of(run, self.calls, functools.partial(self._before, config))

    def _before(self, config: Config) -> None:
        for call in self.calls:
            call.reset(config)
            for name in call.restore_value:
                values = call.named.get(name), self._right.named.get(name)
                for tensor, kept in zip(*map(tensors_of, values), strict=True):
                    tensor.copy_(kept)

    def check(self, config: Config, run: Run) -> float | None:
        return _checked_within_guards(self._made, config)


@contextlib.contextmanager
def elsewhere(call: KernelCall) -> Iterator[tuple[Workshop, KernelSubject]]:
    """Borrow processes for a call's GPU, and pack the call for them.

    Raises UnsupportedError where it cannot be sent, or leaves no room for two copies of its memory.
    """
    tensors = (tensor for value in call.named.values() for tensor in tensors_of(value) if tensor.is_cuda)
    gpu = next((tensor.get_device() for tensor in tensors), torch.cuda.current_device())
    with tempfile.TemporaryDirectory(prefix="tritile-") as folder:
        shipment = shipping.pack(call, Path(folder), torch.cuda.mem_get_info(gpu)[0] // 3)
        with borrowed(gpu) as shop:
            yield shop, KernelSubject(call.problem, call.device, call.source, shipment)


def tuned_elsewhere(call: KernelCall, task: Task, rules: Rules, keep: Keep) -> TuningError | None:
    """Measure the configs of a call in processes of its own, on copies of its memory.

    Returns the last config's error where none works. Raises UnsupportedError where the call cannot be sent,
    or does not run there.
    """
    try:
        with elsewhere(call) as (shop, subject):
            (tuned,) = tune([replace(task, subject=subject)], shop, rules, keep)
    except OSError as error:  # no folder for temporary files, or no process
        raise UnsupportedError(f"it cannot run in another process: {brief(error)}") from error
    if tuned.best is None and not tuned.trials:  # no config was tried, so none of them is at fault
        raise UnsupportedError(f"it cannot run in another process: {tuned.failure}") from tuned.cause
    return tuned.cause


# In this process.


class _InThisProcess:
    """Time configs as Triton does, one after the other, and check them on copies of the call."""

    benches = 1

    def __init__(self, tuner: "Autotuner", call: KernelCall) -> None:
        self.call, self.bench = call, tuner.holding(call.args)
        if tuner.interpreted:
            self.bench.fn = _InTurns(tuner.fn)
        self.timings: dict[triton.Config, list[float]] = {}  # milliseconds, as the benchmark gave them
        # Triton's own hooks take no None and no tuple for a tensor.
        names = () if call.pre_hook is not None else call.restore_value
        restored = [tensor for name in names for tensor in tensors_of(call.named.get(name))]
        kept = [tensor.clone() for tensor in restored]

        def before(named: Mapping[str, Any], reset_only: bool = False) -> None:
            _zero(named, call.reset_to_zero)

        def after(named: Mapping[str, Any], exception: BaseException | None) -> None:
            for tensor, content in zip(restored, kept, strict=True):
                tensor.copy_(content)

        self.bench.pre_hook = call.pre_hook or before
        self.bench.post_hook = tuner.post_hook if tuner.user_defined_post_hook else after

    def compile(self, subject: Subject, config: Config, for_check: bool = False) -> Future[None]:
        """Leave compiling to the first launch, which is not timed."""
        compiled = Future[None]()
        compiled.set_result(None)
        return compiled

    def begin(self, subject: Subject) -> None:
        pass

    def screen(self, subject: Subject, config: Config, fastest_us: float) -> Screened:
        own = self.call.config(config)
        try:
            found = time_config(self.bench, *self.call.args, config=own, **self.call.kwargs)
            times = [float(ms) for ms in (found if isinstance(found, list | tuple) else [found])]
            self.timings[own] = times
            if not 0 <= times[0] < math.inf:
                what = "it does not run here, or the benchmark gave"
                raise TuningError(f"{what} {times}: expected milliseconds")
        except Exception as error:  # whatever one config raises, the others still deserve their turn
            raise WorkerError(brief(error)) from error
        us = min(max(times[0] * 1e3, _LEAST_US), MAX_US)  # of a clock that is too coarse
        return Screened(Timing(us, max(0.0, times[-1] - times[len(times) // 2]) * 1e3 / us), Taken())

    def race(self, subject: Subject, configs: Sequence[Config]) -> list[list[float]]:
        raise WorkerError("each config is timed once")

    def check(self, subject: Subject, config: Config) -> float | None:
        try:
            return None if self.call.reference is None else checked_here(self.call, self.call.config(config))
        except TuningError as wrong:
            raise WorkerError(str(wrong)[:_MOST_OF_A_REASON]) from wrong

    def end(self, subject: Subject) -> None:
        pass


# Either way.


class _Tuning:
    """Measure the configs of one call: store trials as they come, and report progress.

    Reports go to a terminal, in one line that shows how far it is, else to the log "tritile.tune".
    """

    def __init__(
        self, tuner: "Autotuner", call: KernelCall, space: Space | Listed, trials: dict[Config, Trial],
        rules: Rules,
    ) -> None:  # fmt: skip
        self.tuner, self.call, self.trials, self.rules = tuner, call, trials, rules
        self.task = Task(KernelSubject(call.problem, call.device, call.source), space, dict(trials))
        self.listed = call.configs.keys() if isinstance(space, Listed) else set[Config]()
        self.cause: TuningError | None = None  # the last config's error, where none works
        self.new, self.since = 0, time.monotonic()
        self.terminal = sys.stderr is not None and sys.stderr.isatty()

    def keep(self, digest: str, trial: Trial) -> None:
        self.new += trial.config not in self.trials
        self.trials[trial.config] = trial
        store_of(self.call.device).add(digest, trial)
        if self.terminal:
            of = f" of {len(self.listed)}" if self.listed else ""
            sys.stderr.write(f"\r\x1b[Ktritile: tuning {self.call.problem.label}: {self.new}{of} configs")
            sys.stderr.flush()

    def in_other_processes(self) -> bool:
        """Measure there; return False, with a warning, where the call is to be measured here.

        That is where it cannot be sent, or every config that the compiler takes fails there: the kernel may
        use memory whose address it holds as a number, which those processes lack. A config that hangs would
        hang here.
        """
        try:
            self.cause = tuned_elsewhere(self.call, self.task, self.rules, logged(self.keep))
            failures = [trial.failure for trial in self.trials.values() if trial.failure]
            in_running = [text for text in failures if _failed_in_running(text)]
            hung = any(text.startswith("hung:") for text in failures)
            if best_of(self.trials.values()) is not None or not in_running or hung:
                return True
            why = f"every config fails in another process: {in_running[0]}"
        except UnsupportedError as error:
            why = str(error)
        text = f"{self.call.problem.label} is measured in this process, which a config may crash: {why}"
        warnings.warn(text, IsolationWarning, stacklevel=callers_level())
        return False

    def here(self) -> dict[triton.Config, list[float]]:
        """Measure in this process, each config once; return the benchmark's own times in milliseconds."""
        shop = _InThisProcess(self.tuner, self.call)
        trials = {c: t for c, t in self.trials.items() if not (t.failure and _failed_in_running(t.failure))}
        (tuned,) = tune([replace(self.task, trials=trials)], shop, self.rules, logged(self.keep))
        self.cause = tuned.cause
        if tuned.best is not None:
            settings = self.call.config(tuned.best.config).all_kwargs()
            shop.bench.pre_hook(self.call.named | settings, reset_only=True)
        return shop.timings

    def report(self) -> None:
        best, seconds = best_of(self.trials.values()), time.monotonic() - self.since
        self.tuner.bench_time = seconds
        if best is None:
            return
        won, label = self.call.config(best.config), self.call.problem.label
        text = f"tuned {label} in {seconds:.1f} s, {self.new} configs: {won}, {best.us:.1f} us"
        self._say(text, logging.INFO, config=str(best.config), us=best.us, seconds=seconds)
        if left := len(self.listed - self.trials.keys()):
            text = f"{label}: {left} configs were not measured within {self.rules.problem_s:g} s"
            self._say(f"{text} (TRITILE_TUNE_BUDGET): the next process goes on", logging.WARNING)
        if triton.knobs.autotuning.print:  # in the words that programs look for
            print(
                f"Triton autotuning for function {self.tuner.base_fn.__name__},\n"
                f"with key as {self.tuner.key_of(self.call.args, self.call.kwargs)[0]},\n"
                f"finished after {seconds:.2f}s,\nbest config selected: {won};"
            )

    def _say(self, text: str, level: int, **facts: str | float | None) -> None:
        if self.terminal:
            sys.stderr.write(f"\r\x1b[Ktritile: {text}\n")
        else:
            log("tune", level, text, problem=self.call.problem.label, **facts)


def _failed_in_running(failure: str) -> bool:
    """True for a failure that copies of the call's memory may be the cause of; False for the compiler's."""
    return not is_settled(failure) or OUTSIDE in failure or WRONG in failure


def rules_of(space: Space | None) -> Rules:
    """Return the rules of a search; every config of a list is measured."""
    rules = Rules(problem_s=tune_budget_s(Rules.problem_s), most=_MOST)
    return whole(rules) if space is None else rules


def notify(
    tuner: "Autotuner", call: KernelCall, best: triton.Config,
    timings: Mapping[triton.Config, Sequence[float]], seconds: float | None = None,
) -> None:  # fmt: skip
    """Call the listener to autotuning, as Triton does: where there was a choice, once for each new key.

    `timings` are in milliseconds; `seconds` is how long measuring took, None where nothing was measured.
    """
    listener = autotuning_listener()
    if listener is None or (tuner.space is None and len(call.configs) < 2):
        return
    listener(
        fn=layers_of(tuner.fn)[-2], key=tuner.key_of(call.args, call.kwargs)[0], best_config=best,
        configs_timings=dict(timings), duration=seconds, cache_hit=seconds is None,
    )  # fmt: skip


def measured(
    tuner: "Autotuner", call: KernelCall, rules: Rules | None = None, force: bool = False
) -> triton.Config:
    """Return the fastest config of one call, of those that its pruning offers.

    Only configs without a trial in the store are measured, unless `force`. What failed for want of memory,
    hung or was lost is tried again, and all of it where nothing works. A search goes by `rules`, by default
    those of `rules_of`. Raises TuningError, naming the reasons, where no config works; its cause
    is the last config's error.
    """
    rules = replace(rules or rules_of(tuner.space), by_trials=call.reference is None)
    space = tuner.space or Listed(call.configs)
    stored = [] if force else store_of(call.device).trials(call.source, call.problem)
    trials = {t.config: t for t in stored if t.settled and t.config in space}
    if best_of(trials.values()) is None:
        trials = {}
    exact: dict[triton.Config, list[float]] = {}
    cause: TuningError | None = None
    seconds: float | None = None
    is_unchecked = call.reference is not None and not any(trial.right for trial in trials.values())
    if is_unchecked or has_more(space, trials, rules):
        tuning = _Tuning(tuner, call, space, trials, rules)
        if not (tuner.isolate and call.device != HOST and tuning.in_other_processes()):
            exact = tuning.here()
        tuning.report()
        cause = tuning.cause
        seconds = time.monotonic() - tuning.since
    best = best_of(trials.values())
    if best is None:
        reasons = "; ".join(sorted({t.failure for t in trials.values() if t.failure})[:4])
        raise TuningError(
            f"no config works for {call.problem.label}: {reasons or 'none was tried'}"
        ) from cause
    times = {call.config(config): [trial.time / 1e3] * 3 for config, trial in trials.items()}
    tuner.configs_timings = times | exact
    notify(tuner, call, call.config(best.config), times | exact, seconds)
    return call.config(best.config)
