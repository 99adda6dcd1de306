"""`tritile.check`: run every config of a kernel against a reference, or compile it for a GPU elsewhere."""

import copy
import inspect
import itertools
import re
import subprocess
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple

import torch
import triton
from triton import knobs

from tritile.core.config import Config
from tritile.core.device import HOST, Device
from tritile.core.markup import Tabular
from tritile.core.triton_private import InterpretedFunction, JITFunction
from tritile.errors import (
    InvalidValueError,
    IsolationWarning,
    TuningError,
    UnsupportedError,
    brief,
    callers_level,
)
from tritile.ops.plan import gpu_of
from tritile.runtime.ahead import Resources, resources
from tritile.tuner.adoption import tuner_for
from tritile.tuner.arguments import (
    check_arguments,
    check_grid,
    check_keywords,
    check_reference,
    identified,
)
from tritile.tuner.autotuner import Autotuner, autotune
from tritile.tuner.decorated import KernelCall, check_in_process, expected_outputs, shipped
from tritile.tuner.measure.outputs import OUTSIDE, WRONG
from tritile.tuner.measure.shipping import Shipment, StandIn, described, stood_in, unpack
from tritile.tuner.measure.workers import WorkerPool

Outcome = Literal["right", "wrong", "failed", "compiled"]
Result = float | Resources | TuningError | None
Results = Iterator[tuple[triton.Config, Result]]
Arguments = Sequence[Any] | Mapping[str, Any]
_OPTIONS: Final = ("grid", "make", "reference", "device")
_LAUNCH: Final = ("num_warps", "num_stages", "num_ctas", "maxnreg")
_MISCOMPUTED: Final = {"bfloat16", "float8_e4m3fn", "float8_e5m2"}
_ADVICE: Final = (
    "Triton's interpreter may lack arithmetic of bf16 and fp8: check in fp32 or fp16, or on a GPU"
)


class CheckedConfig(NamedTuple):
    """The outcome of a config: "right", "wrong", or "failed" if it does not compile, fit the GPU, or run.

    With `device=` configs that compile and fit are "compiled", and were not run. `error`: the largest
    relative error of the calls that were right. `reason`: why it is wrong or failed, with the first wrong
    element; "" otherwise. `registers` and `spills` (in bytes) are per thread, `shared` is bytes of shared
    memory per block: the most that any of the calls takes. They are None without `device=`, or if nothing was
    compiled.
    """

    config: triton.Config
    outcome: Outcome
    error: float | None
    reason: str = ""
    registers: int | None = None
    spills: int | None = None
    shared: int | None = None


@dataclass(frozen=True, repr=False)
class CheckResult(Tabular):
    """Which configs of a kernel were right on every call. It is true if all were, and there is at least one.

    With `device=` it is true if all configs compile and fit that GPU, whether or not they spill. `calls`
    names the calls, by the kernel, the values of its key, and the sizes passed to `make`. `on` is where they
    ran, or would run. `compared` are the names of the tensors that the reference returned. `pruned` is how
    many configs of the kernel's list were not checked, as its pruning leaves them out at every call.
    """

    kernel: str
    on: Device
    calls: tuple[str, ...]
    configs: tuple[CheckedConfig, ...]
    is_ahead: bool = False  # with `device=`: configs were compiled, and not run
    compared: tuple[str, ...] = ()
    pruned: int = 0

    def __bool__(self) -> bool:
        return bool(self.configs) and not self.wrong and not self.failed

    def _of(self, outcome: Outcome) -> tuple[CheckedConfig, ...]:
        return tuple(each for each in self.configs if each.outcome == outcome)

    @property
    def right(self) -> tuple[CheckedConfig, ...]:
        """The configs that were right on every call."""
        return self._of("right")

    @property
    def wrong(self) -> tuple[CheckedConfig, ...]:
        """The configs that gave a wrong answer, or used memory outside their tensors."""
        return self._of("wrong")

    @property
    def failed(self) -> tuple[CheckedConfig, ...]:
        """The configs that did not compile, fit the GPU, or run."""
        return self._of("failed")

    @property
    def compiled(self) -> tuple[CheckedConfig, ...]:
        """With `device=`, the configs that compile and fit that GPU. Their answers were not checked."""
        return self._of("compiled")

    @property
    def spilling(self) -> tuple[CheckedConfig, ...]:
        """With `device=`, the configs that spill registers, whether or not they fit."""
        return tuple(each for each in self.configs if each.spills)

    @property
    def _title(self) -> str:
        at, pruned = "; ".join(self.calls), f", {self.pruned} pruned" if self.pruned else ""
        if self.is_ahead:
            counts = f"{len(self.compiled)} compiled, {len(self.failed)} failed, {len(self.spilling)} spill"
            counts += pruned
            return f"{self.kernel} on {self.on.name}: {counts}; compiled for {at}, answers were not checked"
        counts = f"{len(self.right)} right, {len(self.wrong)} wrong, {len(self.failed)} failed"
        counts += pruned
        return f"{self.kernel} on {self.on.name}: {counts}; {' and '.join(self.compared)} compared at {at}"

    @property
    def _rows(self) -> list[tuple[str, ...]]:
        if self.is_ahead:
            ordered = sorted(self.configs, key=lambda each: (each.outcome != "failed", not each.spills))
            return [(each.outcome, _words(each.config), *_usage(each), each.reason) for each in ordered]
        return [
            (each.outcome, _words(each.config), each.reason or f"relative error {each.error or 0.0:.2g}")
            for each in (*self.wrong, *self.failed, *self.right)
        ]


def _usage(each: CheckedConfig) -> Iterator[str]:
    units = {"registers": each.registers, "bytes spilled": each.spills, "bytes shared": each.shared}
    yield from ("" if value is None else f"{value} {unit}" for unit, value in units.items())


def _words(config: triton.Config) -> str:
    """Return a config without the options that are at their defaults, if its values are plain data."""
    try:
        return str(Config.from_triton(config))
    except InvalidValueError:
        return str(config)


def _here(call: KernelCall, configs: list[triton.Config]) -> Results:
    """Check in this process. The interpreter needs one run for configs that differ only in options."""
    results: dict[Any, float | TuningError | None] = {}
    for config in configs:
        options = "" if call.device == HOST else str(config)
        key = str(sorted(config.kwargs.items())), config.pre_hook, options
        if key not in results:
            try:
                results[key] = check_in_process(call, config)
            except TuningError as wrong:
                results[key] = wrong
                dtypes = {dtype for _, dtype in call.problem.dtypes}
                if call.device == HOST and OUTSIDE not in str(wrong) and _MISCOMPUTED & dtypes:
                    results[key] = TuningError(f"{wrong}; {_ADVICE}")
        yield config, results[key]


def _warn_in_process(label: str, done: str, why: Exception) -> None:
    text = f"{label} is {done} in this process, which a config may crash: {why}"
    warnings.warn(text, IsolationWarning, stacklevel=callers_level())


def _elsewhere(call: KernelCall, configs: list[triton.Config]) -> Results:
    """Check in another process, which a config may crash; here if the call cannot be sent there."""
    named = identified(configs)
    with ExitStack() as stack:
        try:
            runner, tunable = stack.enter_context(shipped(replace(call, configs=named)))
            runner.begin(tunable)
        except (UnsupportedError, TuningError) as error:
            _warn_in_process(call.problem.label, "checked", error)
            yield from _here(call, configs)
            return
        stack.callback(runner.end, tunable)
        compiles = [(config, own, runner.compile(tunable, own)) for own, config in named.items()]
        for config, own, compiled in compiles:
            try:
                compiled.result()
                yield config, runner.check(tunable, own)
            except TuningError as error:
                yield config, error


def _resources_of(call: KernelCall, config: Config | triton.Config) -> Resources:
    """Compile a config of a call on `StandIn`s, and return its kernel's resources. Raises TuningError."""
    try:
        kernel = call.compiled(config)
    except Exception as error:  # a compiler may raise anything, and all of it means "refused"
        reported = re.search(r"^ptxas (?:fatal|error)\s*:\s*(.+)", str(error), re.MULTILINE)
        raise TuningError(f"ptxas: {reported[1]}"[:200] if reported else brief(error)) from error
    try:
        return resources(kernel)
    except (OSError, subprocess.SubprocessError) as error:
        raise TuningError(f"the kernel's resources cannot be read: {brief(error)}") from error


def _resources_in_worker(shipment: Shipment, config: Config, cache: str) -> Resources:
    """Do the same in a worker process, with the caller's cache."""
    with knobs.cache.scope():
        knobs.cache.dir = cache
        return _resources_of(unpack(shipment, StandIn), config)


def _ahead(call: KernelCall, configs: list[triton.Config]) -> Results:
    """Compile for the call's GPU, in parallel processes; here if the call cannot be sent there."""
    named = identified(configs)
    # None of these is compiled, and each may hold what cannot be sent.
    call = replace(call, reference=None, pre_hook=None).having({"grid": None})
    try:
        shipment = described(replace(call, configs=named))
    except UnsupportedError as why:
        _warn_in_process(call.problem.label, "compiled", why)
        call = call.having(stood_in(call.tensors))
        for config in configs:
            try:
                yield config, _resources_of(call, config)
            except TuningError as error:
                yield config, error
        return
    with WorkerPool() as pool:
        cache = str(knobs.cache.dir)
        compiles = [(c, pool.submit(_resources_in_worker, shipment, own, cache)) for own, c in named.items()]
        for config, future in compiles:
            try:
                yield config, future.result()
            except TuningError as error:
                yield config, error


def _outcome(
    config: triton.Config, result: Result, before: CheckedConfig | None, label: str, device: Device
) -> CheckedConfig:
    """Return the outcome of a config at a call, after those `before`, which it passed."""
    if isinstance(result, Resources):
        new = result.registers, result.spills, result.shared
        old = (before.registers or 0, before.spills or 0, before.shared or 0) if before else new
        excess = Resources(0, 0, result.shared).excess(device)  # spills are slow, and run
        reason = f"at {label}: {excess}" if excess else ""
        return CheckedConfig(config, "failed" if excess else "compiled", None, reason, *map(max, new, old))
    if isinstance(result, TuningError):
        is_wrong = any(word in str(result) for word in (WRONG, OUTSIDE))
        return CheckedConfig(config, "wrong" if is_wrong else "failed", None, f"at {label}: {result}")
    errors = [each for each in (result, before and before.error) if each is not None]
    return CheckedConfig(config, "right", max(errors, default=None))


def _made(make: Callable[..., Any], sizes: tuple[int, ...]) -> Arguments:
    try:
        inspect.signature(make).bind(*sizes)
    except TypeError as error:
        raise InvalidValueError(f"check: make is called with the sizes {sizes}: {error}") from error
    except ValueError:  # a function in C may have no signature
        pass
    made = make(*sizes)
    if not isinstance(made, tuple | list | Mapping):
        expected = "expected the arguments of a call, in a list or by name"
        raise InvalidValueError(f"check: make returned {type(made).__name__}: {expected}")
    return made


def _neighbours(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return each size less one: of two neighbours one is no multiple of a tile.

    Equal sizes become different ones, as a kernel that mixes them up is right if they are equal.
    """
    found: list[int] = []
    for i, size in enumerate(sizes):
        before = sizes[:i].count(size)
        less = size - 1 - before
        found.append(less if less > 1 else size + before if before else max(1, less))
    return tuple(found)


def check(
    kernel: Any,
    *args: Any,
    grid: Any = None,
    make: Callable[..., Arguments] | None = None,
    reference: Callable[..., Mapping[str, torch.Tensor]] | None = None,
    device: Device | torch.device | str | None = None,
    **kwargs: Any,
) -> CheckResult:
    """Run every config of a kernel against its reference, and say which are right, wrong, or failed.

        tritile.check(softmax, x, out, 300, grid=grid)
        tritile.check(softmax, 64, 512, make=make, grid=grid)  # make(m, n) -> (x, out, n)
        tritile.check(softmax, x, out, 300, device="h200")  # which configs spill or do not fit there?

    A config is checked on copies of the arguments, with outputs poisoned (NaN, or wrong integers) and guards
    before and after every tensor. It is wrong if an output differs or is not written whole, if a tensor that
    the reference reads and does not return is changed, or if a guard is overwritten. Tensors on a GPU are
    checked in a separate process, since a config may hang or crash it. With TRITON_INTERPRET=1 tensors in
    host memory are checked in Triton's interpreter, where reading outside a tensor also makes a config wrong.

    A missing mask goes unnoticed if sizes are multiples of the tile: use `make` to check other sizes.

    With `device=` nothing runs: every config is compiled for that GPU, which need not be installed, in
    parallel processes and into Triton's cache (TRITON_CACHE_DIR). The result lists the registers, spills and
    shared memory of each config, and why one does not compile or fit. Answers are not checked, so neither
    `grid` nor a reference is needed, and tensors may be in host memory or on the meta device.

    Args:
        kernel: a kernel under `tritile.autotune` or `triton.autotune`, or a bare `triton.jit` one. If it has
            a list of configs, those are checked that its pruning leaves for the call; if a `tritile.Space`,
            all; if none, it is checked with the launch options, such as num_warps, among its arguments.
        grid: the grid of the launch, as `kernel[grid]` takes it. A function gets all arguments by name.
        make: called with sizes; returns the arguments of a call, in their order or by name, "grid" included
            if it depends on sizes. It is called with the sizes passed to `check` and with each one less, so
            that at least one is no multiple of a tile; equal sizes are made different.
        reference: returns the right tensors, as `tritile.autotune` takes one. Default: the kernel's own.
        device: only compile, for this GPU, as `tritile.plan` takes it.

    Returns:
        A `CheckResult`, true if every config was right, or with `device=` compiles and fits. It prints as a
        table.

    Raises:
        InvalidValueError: an argument is missing or does not fit, there is no reference or no grid, or
            tensors are in host memory without `device` or TRITON_INTERPRET=1.
        TuningError: `device` is passed, and TRITON_INTERPRET is set.
        Exception: what the reference, `make` or the kernel's pruning raises.
    """
    is_bare = isinstance(kernel, (JITFunction, InterpretedFunction))
    kernel = autotune([triton.Config({})], key=[])(kernel) if is_bare else copy.copy(tuner_for(kernel))
    if not isinstance(kernel, Autotuner):
        raise InvalidValueError(f"check: {kernel!r} is no kernel: expected one of tritile or Triton")
    check_keywords(kernel.fn, kernel.space or kernel.configs, kwargs, _OPTIONS)
    if reference is not None:
        check_reference(reference, kernel.fn, kernel.space or kernel.configs)
        kernel.reference = reference
    target = None if device is None else gpu_of("check", device)
    if target is not None and (kernel.interpreted or knobs.runtime.interpret):
        raise TuningError("check: TRITON_INTERPRET is set, so nothing can be compiled: unset it")
    if target is None and kernel.reference is None:
        raise InvalidValueError("check: there is no reference: pass reference=, or decorate with it")
    if make is not None and not callable(make):
        raise InvalidValueError(f"check: make is {make!r}: expected a function of sizes")
    calls: list[tuple[Arguments, tuple[Any, ...]]] = [(args, ())]
    if make is not None:
        if not all(type(size) is int and size > 0 for size in args):
            passed = ", ".join(str(arg) if isinstance(arg, int) else type(arg).__name__ for arg in args)
            raise InvalidValueError(f"check: with make= the arguments are sizes of 1 or more, not {passed}")
        calls = [(_made(make, sizes), sizes) for sizes in dict.fromkeys((args, _neighbours(args)))]
    found: dict[str, CheckedConfig] = {}
    labels: list[str] = []
    compared: dict[str, None] = {}
    for arguments, sizes in calls:
        by_name, in_order = {}, tuple(arguments)
        if isinstance(arguments, Mapping):  # in order as far as they go: what prunes reads those by name
            by_name = dict(arguments)
            leading = [*itertools.takewhile(by_name.__contains__, kernel.arg_names)]
            in_order = tuple(by_name.pop(name) for name in leading)
        named = {"warmup": False, "grid": grid} | kwargs | by_name
        if is_bare:
            options = {name: named.pop(name) for name in _LAUNCH if name in named}
            kernel.configs = [triton.Config({}, **options)]
        if target is None:
            if make is not None and named["grid"] is None:
                hint = 'by name, with "grid" among them, or pass grid='
                raise InvalidValueError(f"check: there is no grid: make has to return the arguments {hint}")
            check_grid("check", named["grid"])
        try:
            check_arguments(kernel.fn, kernel.space or kernel.configs, in_order, named)
        except InvalidValueError as error:
            if make is None:
                raise
            raise InvalidValueError(f"check: what make returned does not fit: {error}") from error
        on = target or kernel.device_of(in_order, named)
        if on == HOST and not kernel.interpreted:
            raise InvalidValueError(
                "check: tensors are in host memory, where no kernel runs: expected them on a GPU, "
                "TRITON_INTERPRET=1 in the environment, or device= to only compile for a GPU"
            )
        call = replace(kernel.call(in_order, named, on), keeps_inputs=True)
        of_sizes = f" of make({', '.join(map(str, sizes))})" if sizes else ""
        labels.append(call.problem.label.strip() + of_sizes)
        if target is None:
            compared |= dict.fromkeys(expected_outputs(call.copied()))
        configs = list(call.configs.values())
        if kernel.space is not None:
            configs = [config.to_triton() for config in kernel.space.configs()]
        run = _ahead if target is not None else _here if on == HOST else _elsewhere
        left = [c for c in configs if str(c) not in found or found[str(c)].outcome in ("right", "compiled")]
        for config, result in run(call, left):
            found[str(config)] = _outcome(config, result, found.get(str(config)), labels[-1], on)
    name, pruned = kernel.base_fn.__qualname__, max(0, len({*map(str, kernel.configs)}) - len(found))
    return CheckResult(
        name, on, tuple(labels), tuple(found.values()), target is not None, tuple(compared), pruned
    )
