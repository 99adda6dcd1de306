"""Tune one call of a decorated kernel: the search shared with tritile's own operations runs its configs.

In worker processes configs run on copies of the call's memory, and one that hangs or crashes stops no other.
Otherwise they run one after the other in this process, on the call's own arguments.
"""

import contextlib
import copy
import functools
import inspect
import logging
import math
import re
import sys
import tempfile
import threading
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
from tritile.core.device import HOST, Device, current_index
from tritile.core.interpreter_private import watched
from tritile.core.log import log
from tritile.core.problem import KernelProblem
from tritile.core.settings import tune_budget_s
from tritile.core.threads import interpreter_lock
from tritile.core.triton_private import autotuning_listener, handles_of, read_own_files, time_config
from tritile.errors import (
    GpuTakenError,
    InvalidValueError,
    IsolationWarning,
    TuningError,
    UnsupportedError,
    brief,
    callers_level,
)
from tritile.runtime.ahead import Resources, check_fits, compiling_for
from tritile.tuner.arguments import layers_of, tensors_of
from tritile.tuner.measure import shipping
from tritile.tuner.measure.benchmark import Harness, ScreenResult, Tunable
from tritile.tuner.measure.engine import OnTrial, Rules, TuningTask, exhaustive_rules, has_more, tune
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
from tritile.tuner.measure.shipping import HUGE, NUMBERS, GuardedMemory, Shipment, StandIn, are_mapped, unpack
from tritile.tuner.measure.timing import Eager, Least, Run, Timing, copies_for, graph_of
from tritile.tuner.measure.workers import PoolRunner, WorkerError, shared_runner
from tritile.tuner.search import Listed, Space
from tritile.tuner.store.claims import Claim
from tritile.tuner.store.files import MAX_US
from tritile.tuner.store.trial import Trial, best_of, is_final_failure
from tritile.tuner.store.trials import store_of

if TYPE_CHECKING:
    from tritile.tuner.autotuner import Autotuner

Named = dict[str, Any]
REFERENCE: Final = Config((), 1, 1, family="reference")  # placeholder: times the kernel's reference
_MAX_CONFIGS: Final = 96  # that a search tries of a space
_QUICK_CONFIGS: Final = 8  # that a search of effort "quick" tries, within
_QUICK_S: Final = 2.0  # seconds
_LEAST_US: Final = 1e-6
_NO_ROOM: Final = re.compile(r"out of memory|\bbusy\b")  # busy: in the mode EXCLUSIVE_PROCESS
_MAX_REASON: Final = 500  # characters of a message about a wrong answer


@dataclass(frozen=True)
class KernelCall:
    """A launch and the options of `tritile.autotune`; `fn` is the kernel with its heuristics.

    `configs`: those left by the kernel's pruning; of a space, the first few. `source`: the digest of the
    kernel's source. `reference` returns the expected tensors by argument name.
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
    keeps_inputs: bool = False  # arguments that the reference takes but does not return must not change
    shares_gpu: bool = False  # the program uses the GPU while the call is measured

    @property
    def named(self) -> Named:
        arguments = dict(zip(self.arg_names, self.args, strict=False)) | self.kwargs
        return {name: value for name, value in arguments.items() if name != "grid"}

    @property
    def tensors(self) -> Named:
        """The arguments that hold tensors, by name, detached from autograd."""
        return {n: _detached(v) for n, v in self.named.items() if next(tensors_of(v), None) is not None}

    def having(self, named: Named) -> "KernelCall":
        """Return the call with some arguments, or "grid", replaced by name."""
        args = tuple(named.get(name, value) for name, value in zip(self.arg_names, self.args, strict=False))
        positional = self.arg_names[: len(self.args)]
        kwargs = self.kwargs | {name: value for name, value in named.items() if name not in positional}
        return replace(self, args=args, kwargs=kwargs)

    def copied(self) -> "KernelCall":
        """Return the call on copies of its tensors; tensors that share memory still do."""
        return self.having(copy.deepcopy(self.tensors))

    def config(self, config: Config | triton.Config) -> triton.Config:
        return (self.configs.get(config) or config.to_triton()) if isinstance(config, Config) else config

    def launch(self, config: Config | triton.Config, **options: Any) -> Any:
        triton_config = self.config(config)
        settings = triton_config.all_kwargs()
        if triton_config.pre_hook is not None:
            triton_config.pre_hook(self.named | settings)
        fn = _Serialized(self.fn) if self.device == HOST else self.fn
        return fn.run(*self.args, **(self.kwargs | settings | options))

    def reset(self, config: Config | triton.Config) -> None:
        """Prepare the tensors for a launch: by `pre_hook`, which gets the config's values, or by zeroing."""
        if self.pre_hook is not None:
            self.pre_hook(self.named | self.config(config).all_kwargs(), reset_only=True)
        else:
            _zero(self.named, self.reset_to_zero)

    def compiled(self, config: Config | triton.Config) -> Any:
        """Compile into Triton's cache, without a GPU; return the kernel. Raises what the compiler raises."""
        with compiling_for(self.device):
            return self.launch(config, grid=(1,), warmup=True)

    def compile(self, config: Config | triton.Config) -> None:
        """Compile like `compiled`. Raises TuningError as well if the GPU has too little shared memory."""
        check_fits(self.compiled(config), self.device)


class _Serialized:
    """Launch a kernel in Triton's interpreter, one at a time."""

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


def _accepted(function: Callable[..., Any], named: Named) -> Named:
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return named
    return {name: value for name, value in named.items() if name in parameters}


def expected_outputs(call: KernelCall) -> dict[str, torch.Tensor]:
    """Run the reference on copies of the arguments; return its tensors by name, {} without a reference.

    Raises InvalidValueError if it returns anything but tensors of the call, and whatever it raises.
    """
    if call.reference is None:
        return {}
    named = call.named
    result = call.reference(**_accepted(call.reference, call.copied().named))  # it may write to them
    tensors = result.values() if isinstance(result, Mapping) else ()
    if not tensors or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        got = type(result).__name__ if tensors or not isinstance(result, Mapping) else "no tensors"
        raise InvalidValueError(
            f"reference returned {got}: expected a dict of right tensors by name of argument"
        )
    for name, tensor in result.items():
        if not isinstance(named.get(name), torch.Tensor):
            raise InvalidValueError(f"the reference names {name!r}, which is not a tensor of the call")
        if named[name].shape != tensor.shape:
            shapes = f"{tuple(tensor.shape)}, not {tuple(named[name].shape)}"
            raise InvalidValueError(f"the reference of {name} has shape {shapes}")
    return dict(result)


def _check_launch(
    call: KernelCall, config: Config | triton.Config, memory: GuardedMemory | None = None
) -> float | None:
    """Launch a config once and return the largest relative error; None without a reference.

    Raises TuningError for an answer that is wrong or not fully written, for an input that changed, and, in
    the interpreter, for an access outside `memory`.
    """
    expected = expected_outputs(call)
    poisoned = _poison_outputs(call, expected)
    call.reset(config)
    inputs = [(name, tensor, tensor.clone()) for name, tensor in _inputs(call, call.config(config), expected)]
    if memory is not None and _shows_accesses(call):
        _launch_watched(memory, call, config)
    else:
        call.launch(config)
    errors = [_output_error(call, name, right, name in poisoned) for name, right in expected.items()]
    for name, tensor, before in inputs:
        if unlike(tensor, before):
            what = f"{name} is changed, which the reference takes and does not return"
            raise TuningError(f"{WRONG}: {what}: if the kernel may change it, name it in restore_value=")
    return max(errors, default=None)


def _poison_outputs(call: KernelCall, expected: Mapping[str, torch.Tensor]) -> set[str]:
    """Fill outputs with wrong values, unless the kernel reads them or they share memory with an argument."""
    named, poisoned = call.named, set[str]()
    for name, right in expected.items():
        others = [tensor for n, v in named.items() if n != name for tensor in tensors_of(v)]
        is_read = name in (*call.reset_to_zero, *call.restore_value)
        if not is_read and not any(overlap(named[name], other) for other in others):
            poison(named[name], right)
            poisoned.add(name)
    return poisoned


def _output_error(call: KernelCall, name: str, right: torch.Tensor, is_poisoned: bool) -> float:
    """Return the largest relative error of an output. Raises TuningError if it is above the tolerance."""
    out = call.named[name]
    is_real = out.is_floating_point()
    advice = f"if the kernel reads {name}, name it in restore_value="
    if is_real and is_poisoned and (place := unwritten(out)) is not None:
        what = f"{name}{place or ''} is never written, or keeps what {name} held before"
        raise TuningError(f"{WRONG}: {what}: {advice}")
    try:
        return error_of(name, out, right, call.tolerance)
    except TuningError as wrong:
        if is_poisoned and (not is_real or bool(out.double().isnan().any())):
            filled = f"{name} was filled with {'NaN' if is_real else 'wrong integers'}"
            raise TuningError(f"{wrong}; {filled}: {advice}") from None
        raise


def _inputs(
    call: KernelCall, config: triton.Config, expected: Mapping[str, torch.Tensor]
) -> list[tuple[str, torch.Tensor]]:
    """Return, by name, the tensors that the reference takes and the kernel must not change.

    Leaves out tensors in memory that the kernel may write, and all of them if a hook may change some.
    """
    if not call.keeps_inputs or call.reference is None or call.pre_hook or config.pre_hook:
        return []
    written = (*expected, *call.reset_to_zero, *call.restore_value)
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


def _launch_watched(memory: GuardedMemory, call: KernelCall, config: Config | triton.Config) -> None:
    """Launch in the interpreter. Raises TuningError before the first access outside the call's tensors."""
    strays: list[str] = []
    covered = memory.covered(tensor for value in call.named.values() for tensor in tensors_of(value))
    is_free = _has_address(call.named.values())

    def on_access(addresses: np.ndarray, mask: np.ndarray | None, size: int, is_written: bool) -> None:
        used = addresses.ravel()
        if mask is not None:
            used = used[np.broadcast_to(mask, addresses.shape).ravel().astype(bool)]
        stray = memory.stray(used, size, is_written, covered, is_free)
        if stray is not None:
            verb = "wrote" if is_written else "read"
            strays.append(f"{verb} {OUTSIDE}: {_place_of(stray, call.named)}")
            raise TuningError(strays[0])

    try:
        with interpreter_lock, watched(on_access):
            call.launch(config)
    except Exception:
        if strays:  # the interpreter has wrapped it
            raise TuningError(strays[0]) from None
        raise


def _has_address(values: Iterable[Any]) -> bool:
    """True if an argument is or holds an address: an integer, a tensor of integers, or a pointer object."""
    for value in values:
        if not isinstance(value, torch.Tensor) and hasattr(value, "data_ptr"):
            return True
        numbers = [t.numpy().ravel() for t in tensors_of(value) if t.dtype in (torch.int64, torch.uint64)]
        if type(value) is int and 0 < value < 1 << 64:
            numbers = [np.array([value], dtype=np.uint64)]
        if any(bool(are_mapped(array.astype(np.uint64)).any()) for array in numbers):
            return True
    return False


def _place_of(address: int, named: Named) -> str:
    distances: list[tuple[int, str]] = []
    for name, tensor in ((name, tensor) for name, value in named.items() for tensor in tensors_of(value)):
        first, past = span(tensor)
        if first <= address < past:
            return f"between elements of {name}"
        distances += [(address - past, f"past the end of {name}"), (first - address, f"before {name}")]
    distance, where = min(pair for pair in distances if pair[0] >= 0)
    return f"{distance} bytes {where}" if distance else f"just {where}"


def _check_guarded(
    make_call: Callable[..., tuple[KernelCall, GuardedMemory | None]], config: Config | triton.Config
) -> float | None:
    """Check the answer of a config, and that it stays within its memory; return the largest error.

    `make_call(pattern)` returns the call and its memory, with guards of a byte pattern around each block, or
    None if memory is not watched. The interpreter reports every access. On a GPU guards expose writes, and
    reads that make the answer wrong. So the call is repeated with other guards: NaN; large numbers of either
    sign, because a maximum drops NaN; and, if outputs are read, small numbers, because atomic adds to NaN or
    to large numbers change nothing.
    """
    call, memory = make_call()
    errors, patterns = [_check_launch(call, config, memory)], [HUGE, HUGE | 0x80]
    if call.reset_to_zero or call.restore_value or call.pre_hook:
        patterns.append(NUMBERS)
    while memory is not None:
        if not memory.is_intact():
            raise TuningError(f"wrote {OUTSIDE}")
        if _shows_accesses(call) or not patterns:
            break
        del call, memory  # before the next copies are made
        call, memory = make_call(patterns.pop())
        errors.append(_check_launch(call, config, memory))
    return max((error for error in errors if error is not None), default=None)


def check_in_process(call: KernelCall, config: triton.Config) -> float | None:
    """Check a config in this process, on copies of the call's tensors; return the largest relative error.

    Tensors in host memory have guards around them. Raises TuningError if the config does not run or its
    answer is wrong, and whatever the reference raises.
    """
    expected_outputs(call.copied())  # a failure here is not the config's

    def make_call(*pattern: int) -> tuple[KernelCall, GuardedMemory | None]:
        if all(tensor.device.type == "cpu" for v in call.tensors.values() for tensor in tensors_of(v)):
            with contextlib.suppress(UnsupportedError):
                named, memory = shipping.guarded(call.tensors, *pattern)
                return call.having(named), memory
        return call.copied(), None

    try:
        return _check_guarded(make_call, config)
    except TuningError:
        raise
    except Exception as failure:  # anything: the other configs are still to be tried
        raise TuningError(brief(failure)) from failure


# In worker processes.


@dataclass(frozen=True)
class TunableKernel:
    """A call of a decorated kernel, packed so that any process can run it: see `Tunable`."""

    problem: KernelProblem
    device: Device
    source: str
    shipment: Shipment = field(default_factory=Shipment)  # empty if measured in this process
    shares_gpu: bool = False  # another program uses the GPU meanwhile

    def digest(self, config: Config) -> str:
        return self.source

    def compile(self, config: Config, for_check: bool = False) -> None:
        if not for_check:  # a check runs the kernel that was timed
            unpack(self.shipment, StandIn).compile(config)

    @property
    def copies(self) -> int:
        return copies_for(self.shipment.bytes, self.device.l2_bytes, self.shares_gpu)

    def harness(self, copies: int) -> Harness:
        return _Harness(self, copies)


class _Harness:
    def __init__(self, tunable: TunableKernel, copies: int) -> None:
        self._shipment, self._shares_gpu = tunable.shipment, tunable.shares_gpu
        self._where = "cpu" if tunable.device == HOST else "cuda"
        contents = torch.load(self._shipment.file, weights_only=True)
        self._pristine = GuardedMemory(self._shipment.blocks, contents, self._where)
        self.calls: list[KernelCall] = [self._make_call()[0] for _ in range(copies)]
        expected_outputs(self._make_call()[0])  # once, before all configs: a failure here is not theirs
        triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device="cuda"))

    def _make_call(self, *pattern: int) -> tuple[KernelCall, GuardedMemory]:
        memory = GuardedMemory(self._shipment.blocks, self._pristine.contents(), self._where, *pattern)
        return unpack(self._shipment, memory.tensor), memory

    @functools.cached_property
    def _original(self) -> KernelCall:
        call: KernelCall = unpack(self._shipment, self._pristine.tensor)
        return call

    def prepared(self, config: Config) -> tuple[Run, Resources | None]:
        if config == REFERENCE:
            reference = self.calls[0].reference
            assert reference is not None
            names = _accepted(reference, self.calls[0].named).keys()
            return (lambda call: reference(**{name: call.named[name] for name in names})), None
        kernel = self.calls[0].launch(config, warmup=True)
        _, registers, spills = handles_of(kernel)
        return (lambda call: call.launch(config)), Resources(registers, 4 * spills, kernel.metadata.shared)

    def timed(self, config: Config, run: Run) -> Eager:
        if config == REFERENCE:
            return graph_of(run, self.calls)
        timer = graph_of(run, self.calls, functools.partial(self._before, config))
        return Least(timer) if self._shares_gpu else timer

    def _before(self, config: Config) -> None:
        for call in self.calls:
            call.reset(config)
            for name in call.restore_value:
                values = call.named.get(name), self._original.named.get(name)
                for tensor, original in zip(*map(tensors_of, values), strict=True):
                    tensor.copy_(original)

    def check(self, config: Config, run: Run) -> float | None:
        return _check_guarded(self._make_call, config)


@contextlib.contextmanager
def shipped(call: KernelCall) -> Iterator[tuple[PoolRunner, TunableKernel]]:
    """Yield the shared runner of a call's GPU, and the call packed for its processes.

    Raises UnsupportedError if the call cannot be sent, or if GPU memory has no room for two copies.
    """
    tensors = (tensor for value in call.named.values() for tensor in tensors_of(value) if tensor.is_cuda)
    gpu = next((tensor.get_device() for tensor in tensors), torch.cuda.current_device())
    # The launch after the search needs it: Triton hashes hundreds of megabytes, once.
    threading.Thread(target=read_own_files, daemon=True).start()
    with (  # the runner starts, in seconds, while the memory is packed
        shared_runner(gpu) as runner,
        tempfile.TemporaryDirectory(prefix="tritile-") as folder,
    ):
        shipment = shipping.pack(call, Path(folder), torch.cuda.mem_get_info(gpu)[0] // 3)
        yield runner, TunableKernel(call.problem, call.device, call.source, shipment, call.shares_gpu)


def tune_in_workers(
    call: KernelCall, task: TuningTask, rules: Rules, on_trial: OnTrial
) -> TuningError | None:
    """Measure the configs of a call in worker processes, on copies of its memory.

    Returns the last config's error if no config works. Raises UnsupportedError if the call cannot be sent or
    does not run there, GpuTakenError if the GPU has no room for it.
    """
    try:
        with shipped(call) as (runner, tunable):
            (tuned,) = tune([replace(task, tunable=tunable)], runner, rules, on_trial)
    except OSError as error:  # no folder for temporary files, or no process
        raise UnsupportedError(f"it cannot run in another process: {brief(error)}") from error
    if tuned.best is None and not tuned.trials:  # no config was tried, so none of them is at fault
        kind = GpuTakenError if _NO_ROOM.search(tuned.failure or "") else UnsupportedError
        raise kind(f"it cannot run in another process: {tuned.failure}") from tuned.cause
    return tuned.cause


# In this process.


class _InProcessRunner:
    """The `Runner` of this process: times configs as Triton does, and checks them on copies of the call."""

    max_resident = 1

    def __init__(self, tuner: "Autotuner", call: KernelCall) -> None:
        self.call, self.tuner = call, tuner.with_arguments(call.args)
        if tuner.interpreted:
            self.tuner.fn = _Serialized(tuner.fn)
        self.timings: dict[triton.Config, list[float]] = {}  # milliseconds, as the benchmark gave them
        # Triton's default hooks accept neither None nor a tuple for a tensor.
        names = () if call.pre_hook is not None else call.restore_value
        restored = [tensor for name in names for tensor in tensors_of(call.named.get(name))]
        originals = [tensor.clone() for tensor in restored]

        def before(named: Mapping[str, Any], reset_only: bool = False) -> None:
            _zero(named, call.reset_to_zero)

        def after(named: Mapping[str, Any], exception: BaseException | None) -> None:
            for tensor, content in zip(restored, originals, strict=True):
                tensor.copy_(content)

        self.tuner.pre_hook = call.pre_hook or before
        self.tuner.post_hook = tuner.post_hook if tuner.user_defined_post_hook else after

    def compile(self, tunable: Tunable, config: Config, for_check: bool = False) -> Future[None]:
        """Do nothing: the first launch, which is not timed, compiles."""
        compiled = Future[None]()
        compiled.set_result(None)
        return compiled

    def begin(self, tunable: Tunable) -> None:
        pass

    def screen(self, tunable: Tunable, config: Config, fastest_us: float) -> ScreenResult:
        timed = self.call.config(config)
        try:
            result = time_config(self.tuner, *self.call.args, config=timed, **self.call.kwargs)
            times = [float(ms) for ms in (result if isinstance(result, list | tuple) else [result])]
            self.timings[timed] = times
            if not 0 <= times[0] < math.inf:
                raise TuningError(
                    f"it does not run here, or the benchmark gave {times}: expected milliseconds"
                )
        except Exception as error:  # anything: the other configs are still to be tried
            raise WorkerError(brief(error)) from error
        us = min(max(times[0] * 1e3, _LEAST_US), MAX_US)  # of a clock that is too coarse
        return ScreenResult(Timing(us, max(0.0, times[-1] - times[len(times) // 2]) * 1e3 / us), None)

    def race(self, tunable: Tunable, configs: Sequence[Config]) -> list[list[float]]:
        raise WorkerError("each config is timed once")

    def check(self, tunable: Tunable, config: Config) -> float | None:
        try:
            if self.call.reference is None:
                return None
            return check_in_process(self.call, self.call.config(config))
        except TuningError as wrong:
            raise WorkerError(str(wrong)[:_MAX_REASON]) from wrong

    def end(self, tunable: Tunable) -> None:
        pass


# Both ways.


class _Tuning:
    """Measures the configs of one call, stores the trials and reports progress.

    Progress is one line on a terminal; elsewhere it goes to the log "tritile.tune".
    """

    def __init__(
        self, tuner: "Autotuner", call: KernelCall, space: Space | Listed, trials: dict[Config, Trial],
        rules: Rules,
    ) -> None:  # fmt: skip
        self.tuner, self.call, self.trials, self.rules = tuner, call, trials, rules
        self.task = TuningTask(TunableKernel(call.problem, call.device, call.source), space, dict(trials))
        self.listed = set(space.configs()) if isinstance(space, Listed) else set[Config]()
        self.cause: TuningError | None = None  # the last config's error if no config works
        self.new, self.since = 0, time.monotonic()
        self.terminal = sys.stderr is not None and sys.stderr.isatty()

    def record(self, digest: str, trial: Trial) -> None:
        self.new += trial.config not in self.trials
        self.trials[trial.config] = trial
        store_of(self.call.device).add(digest, trial)
        if self.terminal:
            total = f" of {len(self.listed)}" if self.listed else ""
            sys.stderr.write(f"\r\x1b[Ktritile: tuning {self.call.problem.label}: {self.new}{total} configs")
            sys.stderr.flush()

    def in_workers(self) -> bool:
        """Measure in worker processes; return False, with a warning, if the call has to be measured here.

        That is if it cannot be sent, or if every config that compiles fails there: the kernel may find memory
        through an integer that holds an address, which is not mapped in workers. If one hangs, it would hang
        here too, so nothing is measured here. Raises GpuTakenError if the GPU has no room for workers and the
        tuner does not measure here.
        """
        try:
            self.cause = tune_in_workers(self.call, self.task, self.rules, self.record)
            failures = [trial.failure for trial in self.trials.values() if trial.failure]
            at_runtime = [text for text in failures if _failed_at_runtime(text)]
            hung = any(text.startswith("hung:") for text in failures)
            if best_of(self.trials.values()) is not None or not at_runtime or hung:
                return True
            why = f"every config fails in another process: {at_runtime[0]}"
            if all(map(_NO_ROOM.search, at_runtime)):
                raise GpuTakenError(why)
        except UnsupportedError as error:
            if isinstance(error, GpuTakenError) and not self.tuner.measures_on_taken_gpu:
                raise
            why = str(error)
        if not self.tuner.measures_here:
            raise UnsupportedError(why)
        text = f"{self.call.problem.label} is measured in this process, which a config may crash: {why}"
        warnings.warn(text, IsolationWarning, stacklevel=callers_level())
        return False

    def in_process(self) -> dict[triton.Config, list[float]]:
        """Measure each config once, in this process; return the benchmark's own times in milliseconds."""
        runner = _InProcessRunner(self.tuner, self.call)
        trials = {c: t for c, t in self.trials.items() if not (t.failure and _failed_at_runtime(t.failure))}
        (tuned,) = tune([replace(self.task, trials=trials)], runner, self.rules, self.record)
        self.cause = tuned.cause
        if tuned.best is not None:
            settings = self.call.config(tuned.best.config).all_kwargs()
            runner.tuner.pre_hook(self.call.named | settings, reset_only=True)
        return runner.timings

    def report(self) -> None:
        best, seconds = best_of(self.trials.values()), time.monotonic() - self.since
        self.tuner.bench_time = seconds
        if best is None:
            return
        self.tuner.warn_of_retuning(self.call.device)
        won, label = self.call.config(best.config), self.call.problem.label
        text = f"tuned {label} in {seconds:.1f} s, {self.new} configs: {won}, {best.us:.1f} us"
        self._say(text, logging.INFO, config=str(best.config), us=best.us, seconds=seconds)
        if (left := len(self.listed - self.trials.keys())) and self.tuner.effort != "quick":
            text = f"{label}: {left} configs were not measured within {self.rules.problem_s:g} s"
            self._say(f"{text} (TRITILE_TUNE_BUDGET): the next process goes on", logging.WARNING)
        if triton.knobs.autotuning.print:  # as Triton words it, for programs that parse it
            print(
                f"Triton autotuning for function {self.tuner.base_fn.__name__},\n"
                f"with key as {self.tuner.cache_key_of(self.call.args, self.call.kwargs)[0]},\n"
                f"finished after {seconds:.2f}s,\nbest config selected: {won};"
            )

    def _say(self, text: str, level: int, **facts: str | float | None) -> None:
        if self.terminal:
            sys.stderr.write(f"\r\x1b[Ktritile: {text}\n")
        else:
            log("tune", level, text, problem=self.call.problem.label, **facts)


def _failed_at_runtime(failure: str) -> bool:
    """True if running on copies of memory may be the cause; False for what the compiler refuses."""
    return not is_final_failure(failure) or OUTSIDE in failure or WRONG in failure


def rules_of(tuner: "Autotuner") -> Rules:
    """Return the rules of a search, by the tuner's effort; every config of a list is measured."""
    if tuner.effort == "full":
        return exhaustive_rules(Rules(problem_s=math.inf))
    if tuner.effort == "quick":
        return Rules(problem_s=_QUICK_S, most=_QUICK_CONFIGS)
    rules = Rules(problem_s=tune_budget_s(Rules.problem_s), most=_MAX_CONFIGS)
    return exhaustive_rules(rules) if tuner.space is None else rules


def _likeliest(tuner: "Autotuner", call: KernelCall) -> Listed:
    """Return the few configs of a list that "quick" measures.

    These are the fastest of the nearest measured problems, then what the kernel's performance model ranks
    first, and without one a sample of the whole list: neighbours in a list are often alike.
    """
    near = [config for _, config in tuner.nearest(call.problem, call.device, call.configs)]
    fastest = [name for config in near for name, each in call.configs.items() if each is config]
    names = list(call.configs)
    step = 1 if tuner.perf_model is not None else math.ceil(len(names) / _QUICK_CONFIGS)
    return Listed(list(dict.fromkeys([*fastest, *names[::step], *names]))[:_QUICK_CONFIGS])


def notify(
    tuner: "Autotuner", call: KernelCall, best: triton.Config,
    timings: Mapping[triton.Config, Sequence[float]], seconds: float | None = None,
) -> None:  # fmt: skip
    """Call Triton's autotuning listener as Triton does: if there was a choice, once for each new key.

    `timings` are in milliseconds. `seconds`: how long measuring took, None if nothing was measured.
    """
    listener = autotuning_listener()
    if listener is None or (tuner.space is None and len(call.configs) < 2):
        return
    listener(
        fn=layers_of(tuner.fn)[-2], key=tuner.cache_key_of(call.args, call.kwargs)[0], best_config=best,
        configs_timings=dict(timings), duration=seconds, cache_hit=seconds is None,
    )  # fmt: skip


def lacks_trials(tuner: "Autotuner", call: KernelCall) -> bool:
    """True if `measured_config` would measure more configs of a call."""
    space = tuner.space or Listed(call.configs)
    stored = store_of(call.device).trials(call.source, call.problem)
    trials = {trial.config: trial for trial in stored if trial.is_final and trial.config in space}
    if call.reference is not None and not any(trial.right for trial in trials.values()):
        return True
    return has_more(space, trials, rules_of(tuner)) and not (tuner.effort == "quick" and trials)


def measured_config(
    tuner: "Autotuner", call: KernelCall, rules: Rules | None = None, force: bool = False,
    shared: bool = False,
) -> triton.Config | None:  # fmt: skip
    """Return the fastest config of one call among those left by its pruning, measuring what is missing.

    Configs with a trial in the store are not measured again unless `force`, or unless they ran out of memory,
    hung or lost the GPU, or no config works. `rules` default to `rules_of`. `shared`: of the processes that
    want the same, one measures and the others wait for it, up to `TRITILE_TUNE_BUDGET`. Returns None only
    then: if it still measures, or if the GPU is busy. Raises TuningError, with the reasons, if no config
    works; its cause is the last config's error.
    """
    rules = replace(rules or rules_of(tuner), by_trials=call.reference is None)
    whole = space = tuner.space or Listed(call.configs)
    is_quick = tuner.effort == "quick" and not rules.exhaustive
    trials: dict[Config, Trial] = {}
    exact: dict[triton.Config, list[float]] = {}
    cause: TuningError | None = None
    seconds: float | None = None

    def read() -> None:
        stored = [] if force else store_of(call.device).trials(call.source, call.problem)
        trials.update({t.config: t for t in stored if t.is_final and t.config in whole})

    def is_known(ended: bool) -> bool:
        nonlocal space
        read()
        if best_of(trials.values()) is None:
            trials.clear()
        if is_quick and isinstance(whole, Listed):
            space = _likeliest(tuner, call)
        if call.reference is not None and not any(trial.right for trial in trials.values()):
            return False
        return bool(trials and (ended or is_quick)) or not has_more(space, trials, rules)

    def search(resumes: bool = False) -> bool:
        nonlocal cause, seconds
        tuning = _Tuning(tuner, call, space, trials, rules)
        if not (tuner.isolate and call.device != HOST and tuning.in_workers()):
            exact.update(tuning.in_process())
        tuning.report()
        cause, seconds = tuning.cause, time.monotonic() - tuning.since
        return best_of(trials.values()) is not None and has_more(space, trials, rules)

    if shared:
        claim = Claim(store_of(call.device), call.source, call.problem)
        tensors = (tensor for value in call.named.values() for tensor in tensors_of(value) if tensor.is_cuda)
        default = None if call.device == HOST else current_index()
        gpu = next((tensor.get_device() for tensor in tensors), default)
        if not claim.settle(is_known, search, tune_budget_s(Rules.problem_s), gpu):
            return None
    elif not is_known(False):
        search()
    read()  # what is stored decides, here and in other processes
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
