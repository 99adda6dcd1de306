"""`tritile.tune`: measure the configs of one call now, and remember the best."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import triton

from tritile.choose import pick
from tritile.core import device as devices
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.forgetting import forget
from tritile.core.markup import Tabular
from tritile.core.problem import Problem, Tiled
from tritile.core.settings import tune_budget_s
from tritile.errors import InvalidValueError, TuningError, UnsupportedError
from tritile.ops.plan import call_of
from tritile.ops.request import fixed
from tritile.tune import now
from tritile.tune.subject.problem import is_tuned
from tritile.tuner.adoption import tuner_for
from tritile.tuner.arguments import check_keywords
from tritile.tuner.autotuner import Autotuner
from tritile.tuner.decorated import measured_config, rules_of
from tritile.tuner.measure.engine import Rules, exhaustive_rules
from tritile.tuner.store.trial import TORCH, Trial, best_of
from tritile.tuner.store.trials import store_of

_REMEMBERED: Final = "remembered"
_OPTIONS: Final = ("exhaustive", "budget", "force")  # keyword arguments of `tune` itself


@dataclass(frozen=True, repr=False)
class TuneResult(Tabular):
    """What tuning a call found. It prints as a table.

    Attributes:
        problem: what is computed.
        device: the GPU.
        config: the best config; for a decorated kernel a `triton.Config`.
        us: its microseconds; None if they were not kept.
        how: "searched", or "remembered" if there was nothing left to measure.
        tried: how many configs were measured now.
        failed: how many of those failed.
        seconds: how long that took.
        torch_us: microseconds of torch's call; None if torch has no single call for the problem.
    """

    problem: Problem
    device: Device
    config: Config | triton.Config
    us: float | None
    how: str
    tried: int
    failed: int
    seconds: float
    torch_us: float | None = None

    @property
    def ratio(self) -> float | None:
        """torch's time divided by tritile's: above 1, tritile is faster; None if either is unknown."""
        return self.torch_us / self.us if self.torch_us and self.us else None

    @property
    def _rows(self) -> tuple[tuple[str, str], ...]:
        tried = f"{self.tried} configs, {self.failed} of them failed, in {self.seconds:.1f} s"
        rows = [
            ("config", str(self.config)),
            ("time", "not kept" if self.us is None else f"{self.us:.1f} us"),
            (self.how, "there was nothing left to measure" if self.how == _REMEMBERED else tried),
        ]
        if self.torch_us is not None and self.ratio is not None:
            rows.append(("torch", f"{self.torch_us:.1f} us, {self.ratio:.2f} times as long"))
        return tuple(rows)

    @property
    def _title(self) -> str:
        return f"Tuned {self.problem.label.strip()} on {self.device.name}"


def gpu_for(caller: str, values: Iterable[Any]) -> tuple[Device, int]:
    """Return the GPU of the first tensor on one, else the current GPU, with its number.

    Raises UnsupportedError if there is none, or if nothing may be measured at the moment.
    """
    tensors = (value for value in values if isinstance(value, torch.Tensor) and value.is_cuda)
    index = next((tensor.get_device() for tensor in tensors), devices.current_index())
    if index is None:
        raise UnsupportedError(f"{caller}: there is no GPU here to measure")
    if devices.capturing():
        raise UnsupportedError(f"{caller}: nothing is measured while a CUDA graph is captured")
    return devices.gpu(index), index


def problem_of(
    caller: str, what: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Iterable[str] = ()
) -> Tiled:
    """Return a problem as it is, or that of an operation's call.

    `options`: names of the caller's own keyword arguments. Raises what `call_of` raises, and UnsupportedError
    for a problem that only torch computes.
    """
    if isinstance(what, Tiled):
        if args or kwargs:
            raise InvalidValueError(f"{caller}: what is a problem, {what.label}, which takes no arguments")
        problem = what
    else:
        call, _ = call_of(caller, what, args, kwargs, options)
        if fixed(call) is not None:
            raise InvalidValueError(f"{caller}: a call in place has only one config: drop out=")
        problem = call.problem
    if problem.needs_torch:
        raise UnsupportedError(
            f"{caller}: only torch computes {problem.label}: there is nothing of tritile's to measure"
        )
    return problem


def _since(started: float, before: set[Trial], now: Iterable[Trial]) -> tuple[int, int, float]:
    """Return how many trials are new, how many of them failed, and the seconds since."""
    new = [trial for trial in now if trial not in before]
    return len(new), sum(not trial.works for trial in new), time.perf_counter() - started


def _of_kernel(
    kernel: Autotuner, args: tuple[Any, ...], kwargs: dict[str, Any], rules: Rules, force: bool
) -> TuneResult:
    check_keywords(kernel.fn, kernel.space or kernel.configs, kwargs, (*_OPTIONS, "grid"))
    device, kwargs = kernel.device_of(args, kwargs), {"warmup": False} | kwargs
    if not kernel.measurable(device):
        raise UnsupportedError("tune: there is no GPU here to measure")
    if kwargs.get("grid") is None:
        raise InvalidValueError("tune: grid is missing: expected grid=, as in kernel[grid]")
    call = kernel.call(args, kwargs, device)
    started, before = time.perf_counter(), set(store_of(device).trials(call.source, call.problem))
    config = measured_config(kernel, call, rules, force)
    kernel.forget()
    best = kernel.remembered(call.problem, device, call.configs)
    counts = _since(started, before, store_of(device).trials(call.source, call.problem))
    us = best.us if best is not None and best.config == config else None
    return TuneResult(call.problem, device, config, us, "searched" if counts[0] else _REMEMBERED, *counts)


def tune(
    what: Callable[..., Any] | str | Tiled | Autotuner,
    *args: Any,
    exhaustive: bool = False,
    budget: float | None = None,
    force: bool = False,
    **kwargs: Any,
) -> TuneResult:
    """Measure the configs of one call on the GPU, remember the best, and return what was found.

    From now on, calls of this problem run with it in every process on this machine that plans them anew.
    Operands are made up: only the sizes, strides and dtypes of the arguments matter, and an operation's
    tensors are not written.

    Args:
        what: an operation of tritile, or its name, followed by the arguments of the call, as in
            `tritile.plan`. Or a problem, without arguments. Or a kernel under `tritile.autotune` or Triton's,
            followed by its arguments and `grid=`.
        args: positional arguments of the call.
        exhaustive: try every config. Default: search, and stop when no further gain is expected.
        budget: seconds after which no more configs are tried, once one works. Default: `TRITILE_TUNE_BUDGET`,
            or 15; no limit if `exhaustive`.
        force: measure again what is remembered.
        kwargs: keyword arguments of the call.

    Returns:
        A `TuneResult`, which prints as a table.

    Raises:
        TritileError: the same errors as the call itself, for its arguments.
        InvalidValueError: an argument does not fit.
        UnsupportedError: there is no GPU here, or a CUDA graph is being captured.
        TuningError: no config works.
    """
    what = tuner_for(what)
    if budget is not None and (
        isinstance(budget, bool) or not isinstance(budget, int | float) or budget <= 0
    ):
        raise InvalidValueError(f"tune: budget is {budget!r}: expected a number of seconds above 0, or None")
    rules = Rules(problem_s=tune_budget_s(Rules.problem_s))
    if isinstance(what, Autotuner):
        rules = rules_of(what)
    if exhaustive:
        rules = exhaustive_rules(replace(rules, problem_s=math.inf))
    if budget is not None:
        rules = replace(rules, problem_s=budget)
    if isinstance(what, Autotuner):
        return _of_kernel(what, args, kwargs, rules, force)
    problem = problem_of("tune", what, args, kwargs, _OPTIONS)
    device, gpu = gpu_for("tune", (*args, *kwargs.values()))
    store, started, before = store_of(device), time.perf_counter(), set(pick.trials(problem, device))
    how = _REMEMBERED if is_tuned(problem, device) and not force else "searched"
    if how == "searched":
        now.searched_now(problem, device, gpu, rules, force)
    counts = _since(started, before, pick.trials(problem, device))
    if store.best(TORCH, problem) is None:
        now.time_torch(problem, device, gpu)
    torch_trial, best = store.best(TORCH, problem), best_of(pick.trials(problem, device))
    if best is None:
        raise TuningError(f"tune: no config of {problem.label} is remembered")
    forget()  # calls that were prepared with another config are planned anew
    return TuneResult(
        problem, device, best.config, best.us, how, *counts, torch_trial.us if torch_trial else None
    )
