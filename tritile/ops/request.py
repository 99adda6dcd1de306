"""From the arguments of a call to its launch: checked, folded to views, planned and prepared.

A public function first tries `tritile.ops.memo.launch_cached`, which launches a call that was prepared
before; others come to `computed`. Every operation registers a function of its tensors and options that
returns a `Request`, which is what runs, is traced, and is planned.
"""

import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any, Final, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from tritile.choose import aten, gpu_tables, pick, waves
from tritile.core import device as devices
from tritile.core import settings
from tritile.core.call import Call, PermuteCall
from tritile.core.config import Config
from tritile.core.device import capturing
from tritile.core.forgetting import forget
from tritile.core.log import log
from tritile.core.problem import MatmulProblem, Tiled
from tritile.core.settings import current_mode, invariantly, is_batch_invariant, rules
from tritile.core.threads import once
from tritile.core.torch_private import constant_in_graphs, guard_graph
from tritile.core.triton_private import INTERPRETING
from tritile.errors import (
    HostWarning,
    TritileError,
    TuningError,
    UnsupportedError,
    UntunedWarning,
    brief,
    callers_level,
)
from tritile.families import launching
from tritile.families.permute.family import in_place
from tritile.ops import spread
from tritile.ops.aten import BYTES, LOWERED, lowered, torch_call_of
from tritile.ops.dispatch import (
    NAMES,
    PLAIN,
    call_operator,
    call_override,
    is_overridden,
    joined,
    needs_dispatch,
    parted,
    sees_every_call,
)
from tritile.ops.memo import Key, Tensors, launch_cached, mark_written, stopgaps
from tritile.runtime import launch
from tritile.runtime.compiles import log_compiles_as, refuse_if_strict

Result = tuple[tuple[int, ...], torch.dtype, str]
_WIDENED: Final = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)  # the interpreter gets these wrong
_FALLBACKS: Final = 8  # predicted configs to try if the planned one does not run
_Makes = TypeVar("_Makes", bound=Callable[..., "Request"])


class Request:
    """The arguments of an operation: the caller's tensors, and the options. Subclasses are dataclasses.

    An operation defines `checked`, `call` and `compute`. The rest are defaults. `tensors` are in the order of
    `tritile.ops.dispatch.TENSORS`.
    """

    op: str
    tensors: Tensors

    is_empty = False  # True if K is 0, say: there are elements to fill, but nothing to sum

    @property
    def first(self) -> Any:
        """The first operand, which decides the device of the result."""
        return self.tensors[0]

    def checked(self, out: Any) -> Result:
        """Return shape and dtype of the result, and the precision. Raise a TritileError for bad arguments.

        out may be None; its memory is not checked.
        """
        raise NotImplementedError

    def check_memory(self, out: torch.Tensor) -> None:
        """Raise OverlapError if out overlaps an operand or itself."""

    def call(self, out: torch.Tensor, precision: str) -> Call:
        """Return the call, folded to views, in this precision."""
        raise NotImplementedError

    def run_delegated(self, out: torch.Tensor | None, precision: str) -> torch.Tensor | None:
        """Return the result if another operation, or torch, computes it, else None."""
        return None

    def fill(self, out: torch.Tensor) -> None:
        """Store the result if `is_empty`."""
        out.zero_()

    def compute(self, out: torch.Tensor) -> None:
        """Compute tensors in host memory by torch: see `tritile.ops.reference`."""
        raise NotImplementedError

    def interpret(self, out: torch.Tensor, precision: str) -> None:
        """Run the kernels in Triton's interpreter, in float32 for dtypes that it gets wrong."""
        if any(t.dtype in _WIDENED for t in (*self.tensors, out) if t is not None):
            wide = torch.empty(out.shape, dtype=torch.float32, device=out.device)
            names = [field.name for field in fields(self)]  # type: ignore[arg-type]
            widened = replace(self, **{name: _widened(getattr(self, name)) for name in names})  # type: ignore[type-var]
            interpret(widened.call(wide, precision if self.first.dtype == torch.float32 else "ieee"))
            out.copy_(wide)  # torch rounds
        else:
            interpret(self.call(out, precision))


def _widened(value: Any) -> Any:
    """Convert floating tensors to float32, also in tuples and mappings; return anything else unchanged."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(map(_widened, value))
    return {name: _widened(item) for name, item in value.items()} if isinstance(value, dict) else value


Makes = Callable[[str, Tensors, Key], Request]
# By operation, the function that makes its request; it may raise a TritileError.
REQUESTS: Final[dict[str, Makes]] = {}


def requests(*ops: str) -> Callable[[_Makes], _Makes]:
    def register(function: _Makes) -> _Makes:
        REQUESTS.update(dict.fromkeys(ops, function))
        return function

    return register


def request_of(op: str, *values: Any) -> Request:
    """Return the request of these arguments, in the order of the schema; missing ones are None."""
    missing = len(NAMES[op]) - len(values)
    return REQUESTS[op](op, *parted(op, (*values, *[None] * missing)))


# --- Calls ---


def computed(op: str, tensors: Tensors, out: Any, options: Key, key: Key | None) -> torch.Tensor:
    """Compute a call that is not cached, directly or through torch's dispatcher."""
    if is_dynamo_compiling() and out is None and _is_static(tensors, options):
        facts = tuple(None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors)
        if _is_lowered(op, facts, options) and _may_lower():
            return lowered(op, tensors, options)
    if needs_dispatch(*tensors, out):
        values = joined(op, tensors, options)
        return call_operator(op, values, out, lambda: request_of(op, *values).checked(out))
    if is_overridden(*tensors, out):
        result: torch.Tensor = call_override(op, tensors, out, options)
        return result
    return eager(op, tensors, out, options, key)


def eager(op: str, tensors: Tensors, out: Any, options: Key, key: Key | None) -> torch.Tensor:
    """Compute a call on plain tensors, and cache its launch under the key of `launch_cached`.

    Products that it has torch make are torch's own, also where others are made here.
    """
    with invariantly() if is_batch_invariant() else nullcontext():
        return _eager(op, tensors, out, options, key)


def _eager(op: str, tensors: Tensors, out: Any, options: Key, key: Key | None) -> torch.Tensor:
    before = stopgaps.count
    request = REQUESTS[op](op, tensors, options)
    rules()  # report a wrong environment variable on any device
    shape, dtype, precision = request.checked(out)
    if out is not None:
        request.check_memory(out)
    delegated = request.run_delegated(out, precision)
    if delegated is not None:
        return delegated
    result = torch.empty(shape, dtype=dtype, device=request.first.device) if out is None else out
    if result.numel() == 0:
        return result
    if not request.first.is_meta:
        if request.is_empty:
            request.fill(result)
        elif on_host(request.first):
            if INTERPRETING and not request.call(result, precision).problem.needs_torch:
                request.interpret(result, precision)
            else:
                request.compute(result)
        else:
            call = request.call(result, precision)
            torch_call = torch_call_of(request, call.problem, precision, out) if rules().aten else None
            search, phase = None, ""
            if rules().mode == "spread" and fixed(call) is None:
                place = call.problem, request.first.device.index, torch_call is not None
                planned(*place)  # which begins a search
                search = spread.search_of(*place)
                phase = search.phase if search is not None else ""
            if search is not None and phase == "turns":
                try:
                    made, again = spread.by_turns(search, op, call, torch_call, tensors, out, result)
                except (TritileError, RuntimeError, ValueError) as error:  # then as without turns
                    search.give_up(error)
                else:
                    how = {"by_torch": True, "any_alignment": False}
                    spread.cache(search, phase, op, key, again, call, tensors, out, result, **how)
                    return made if out is None else mark_written(op, made)
            if torch_call is not None and is_by_aten(call.problem, request.first.device.index):
                kept = key if stopgaps.count == before else None
                spread.cache(search, phase, op, kept, torch_call, call, tensors, out, result, by_torch=True)
                problem = call.problem
                if out is None:
                    del call, result  # torch allocates its own
                try:
                    return (
                        torch_call(*tensors) if out is None else mark_written(op, torch_call(*tensors, out))
                    )
                except torch.OutOfMemoryError:
                    raise
                except (RuntimeError, ValueError) as error:  # torch does not support the call
                    why = brief(error)
                    if problem.needs_torch:
                        raise UnsupportedError(
                            f"{op}: only torch computes this, and it fails: {why}"
                        ) from error
                    log("compile", logging.WARNING, problem=problem.label, config="aten", failure=why)
                result = torch.empty(shape, dtype=dtype, device=request.first.device) if out is None else out
                call = request.call(result, precision)
            launch = prepared(call, torch_call is not None)
            launch(*call.tensors)
            kept = key if stopgaps.count == before else None
            spread.cache(search, phase, op, kept, launch, call, tensors, out, result)
    return result if out is None else mark_written(op, result)


def run_plain(op: str, tensors: Tensors, out: Any, options: Key) -> torch.Tensor:
    """Compute an operation on plain tensors: the operator's kernel for CUDA and CPU."""
    return launch_cached(op, tensors, out, options, eager)


# --- Planned and prepared ---

_warned: set[str] = set()  # GPUs


def planned(problem: Tiled, index: int, allows_torch: bool = False) -> pick.Plan:
    """Return the plan of a problem on a GPU. In mode "tune", measure a problem that has no measurement first.

    If several threads or processes meet a problem at the same time, one measures it and the others wait. The
    plan is a stopgap, as in mode "cached", during a capture, while another process still measures, and while
    the GPU is busy. `allows_torch`: torch's kernel is a candidate.

    In mode "spread", have the problem measured meanwhile; the plan stays the same until that is over.
    """
    device = devices.gpu(index)
    if current_mode() == "spread":
        chosen: pick.Plan | None = spread.planned(problem, device, index, allows_torch)
    else:
        chosen = pick.plan_for(problem, device, None, allows_torch)
    if chosen is None and not capturing():
        chosen = once(
            ("planned", problem, device, allows_torch), lambda: _measure(problem, device, index, allows_torch)
        )
    if chosen is None:
        stopgaps.count += 1
        chosen = pick.plan_for(problem, device, "cached", allows_torch)
    assert chosen is not None
    pick.note_choice(chosen, allows_torch)
    if chosen.source == "model" and chosen.config != aten.CONFIG and current_mode() == "cached":
        _warn_uncalibrated(device)
    return chosen


def is_by_aten(problem: Tiled, index: int) -> bool:
    """True if the plan of a problem that torch may compute is torch's kernel."""
    return planned(problem, index, True).config == aten.CONFIG


def _warn_uncalibrated(device: devices.Device) -> None:
    """Warn, once for each GPU without calibrated classes, that the model chooses configs."""
    if device.name in _warned or gpu_tables.is_calibrated(device):
        return
    _warned.add(device.name)
    warnings.warn(
        f"configs are only predicted, because no class of problems was measured on {device.name}: "
        "run `tritile tune --calibrate all`, which takes minutes for each class",
        UntunedWarning,
        stacklevel=callers_level(),
    )


def _measure(problem: Tiled, device: devices.Device, index: int, allows_torch: bool) -> pick.Plan | None:
    """Return the plan by what is measured now, here or in another process; None if neither is possible."""
    from tritile.tune.now import time_torch, tuned_now  # load the tuner only to measure
    from tritile.tuner.measure.engine import Rules

    def is_known(ended: bool) -> bool:
        return pick.plan_for(problem, device, None, allows_torch) is not None

    def search(resumes: bool) -> bool:
        if resumes or pick.plan_for(problem, device) is None:
            tuned_now(problem, device, index)
            forget()
        if pick.plan_for(problem, device, None, allows_torch) is None:
            time_torch(problem, device, index)
            forget()
        return False

    wait_s = settings.tune_budget_s(Rules.problem_s)
    if not pick.claim_on(problem, device).settle(is_known, search, wait_s, index):
        return None
    return pick.plan_for(problem, device, None, allows_torch) or pick.plan_for(problem, device)


def fixed(call: Call) -> Config | None:
    """Return the only config of a call in place; None for other calls.

    Such a call must not be measured, because it changes its own input.
    """
    return in_place(call.problem) if isinstance(call, PermuteCall) and call.in_place else None


def _candidates(call: Call, device: devices.Device, allows_torch: bool) -> Iterator[Config]:
    """Yield the configs to try for a call, in order: the planned one, then those that the model ranks first.

    Ranking the whole space is the slowest step of a first call, so it is done only if the planned config does
    not run.
    """
    only = fixed(call)
    if only is not None:
        yield only
        return
    problem, index = call.problem, call.tensors[0].device.index
    first = planned(problem, index, allows_torch).config
    if first == aten.CONFIG:  # torch refused the call
        first = planned(problem, index).config
    yield first
    yield from (config for config in waves.screened(problem, device, _FALLBACKS) if config != first)


def prepared(call: Call, allows_torch: bool = False) -> launch.Launch | launch.SplitLaunch:
    """Return the launch of a call on a GPU by its plan. `allows_torch`: as for `planned`.

    If the planned config does not compile or load here, the model's next configs are tried.

    Raises:
        UnsupportedError: no config runs; its cause is the last config's error.
        NotCompiledError: something would have to be compiled, in mode "strict".
    """
    device, failures = devices.gpu(call.tensors[0].device.index), list[str]()
    label = f"{call.problem.label} on {device.name}"
    last: TuningError | None = None
    advice = "call it once in another mode"
    if fixed(call) is None:  # calls in place are not compiled ahead
        advice = f"run `tritile compile` or `tritile.warm` for it, or {advice}"
    try:
        for config in _candidates(call, device, allows_torch):
            try:
                with (
                    log_compiles_as(call.problem.label, str(config)),
                    refuse_if_strict(f"{label} with {config}", advice),
                ):
                    return launching.prepare(call, config)
            except TuningError as error:
                failures.append(str(error))
                last = error
                facts = {"problem": call.problem.label, "config": str(config), "device": device.name}
                log("compile", logging.WARNING, **facts, failure=str(error))
        raise UnsupportedError(f"no config runs {label}: {'; '.join(failures[:3])}") from last
    finally:
        # An error refers to this frame. If the frame still referred to the error, that cycle would keep the
        # call's tensors alive until the garbage collector runs.
        del last


# --- Host memory, and the interpreter ---


def on_host(tensor: torch.Tensor) -> bool:
    """True if calls on this tensor launch nothing on a GPU: it is in host memory, or TRITON_INTERPRET is set.

    Warn once if no kernel is interpreted either.
    """
    if tensor.device.type == "cpu" and not INTERPRETING:
        warn_of_host()
    return tensor.device.type == "cpu" or INTERPRETING


@functools.cache
def warn_of_host() -> None:
    """Warn, once in a process and at the line that called tritile, that no kernel runs."""
    warnings.warn(
        "tensors are in host memory: torch computes the result on the CPU, and no GPU kernel runs. Set "
        "TRITON_INTERPRET=1 to run tritile's kernels in Triton's interpreter",
        HostWarning,
        stacklevel=callers_level(),
    )


def interpret(call: Call) -> None:
    launching.run_interpreted(call, fixed(call) or pick.interpreted(call.problem).config)


# --- Traced by torch's compiler ---


def _is_static(tensors: Tensors, options: Key) -> bool:
    """True if tensors are plain, and sizes and options constant for torch's compiler."""
    from torch.fx.experimental.symbolic_shapes import has_static_value  # slow to load, and loaded by then

    present = [tensor for tensor in tensors if tensor is not None]
    if not all(type(tensor) in PLAIN for tensor in present):
        return False
    numbers = [option for option in options if isinstance(option, int | float)]
    sizes = [size for tensor in present for size in (*tensor.shape, *tensor.stride())]
    return all(map(has_static_value, (*numbers, *sizes)))


@constant_in_graphs
def _may_lower() -> bool:
    """True if torch's own product may go into the graph that is traced, which then runs only where it may."""
    found = settings.may_lower()
    guard_graph(settings.may_lower, found)
    return found


@constant_in_graphs
def _is_lowered(op: str, facts: Key, options: Key) -> bool:
    """True if the plan of a traced call is torch's kernel, whose operator then goes into the graph.

    `facts` has shape, strides, dtype and device of each tensor. What is planned later, after measuring, does
    not change a graph that is compiled.
    """
    *_, dtype, device = facts[0]
    is_real = not any(isinstance(option, complex) for option in options)
    if op not in LOWERED or dtype in BYTES or not is_real or sees_every_call():
        return False
    on_one_gpu = device.type == "cuda" and all(fact is None or fact[3] == device for fact in facts)
    if not on_one_gpu or torch.compiler.is_exporting():
        return False
    tensors = [
        None if fact is None else torch.empty_strided(*fact[:2], dtype=fact[2], device="meta")
        for fact in facts
    ]
    try:
        with nullcontext() if settings.may_lower() else settings.under(settings.DEFAULT):
            return _is_by_torch(op, tensors, options, device)
    except TritileError:  # the operator raises it
        return False


def _is_by_torch(op: str, tensors: Tensors, options: Key, device: torch.device) -> bool:
    request = REQUESTS[op](op, tensors, options)
    shape, dtype, precision = request.checked(None)
    problem = request.call(torch.empty(shape, dtype=dtype, device="meta"), precision).problem
    if not isinstance(problem, MatmulProblem) or 0 in shape or request.is_empty:
        return False
    if problem.dtype != problem.out_dtype:  # which graphs of torch's functions do not have
        return False
    is_torchs = torch_call_of(request, problem, precision, None) is not None
    return is_torchs and is_by_aten(problem, device.index)
