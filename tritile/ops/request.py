"""Take a request from its arguments to its launch: checked, folded to views, planned and prepared.

A public function asks `tritile.ops.memo.recall` first, which launches what was prepared before. What it does
not know comes to `computed`. Every operation registers a function of its tensors and options that returns a
`Request`, which is what runs, is traced, and is planned.
"""

import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, Final, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from tritile.core import device as devices
from tritile.core import settings
from tritile.core.call import Call, PermuteCall
from tritile.core.config import Config
from tritile.core.device import capturing
from tritile.core.forgetting import forget
from tritile.core.log import log
from tritile.core.problem import MatmulProblem, Tiled
from tritile.core.settings import current_mode, rules
from tritile.core.threads import once
from tritile.core.torch_private import constant_in_graphs
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
from tritile.ops.aten import BYTES, LOWERED, torch_call_of
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
from tritile.ops.memo import Key, Tensors, cache_launch, launch_cached, mark_written
from tritile.planning import aten, gpu_tables, model, plans
from tritile.planning.aten import is_torch_only
from tritile.runtime import launch
from tritile.runtime.compiles import as_mode_asks, asking

Result = tuple[tuple[int, ...], torch.dtype, str]
_WIDENED: Final = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)  # the interpreter gets these wrong
_FALLBACKS: Final = 8  # predicted configs to try where the planned one does not run
_Makes = TypeVar("_Makes", bound=Callable[..., "Request"])


class Request:
    """Hold the arguments of an operation: the tensors, as given, and the options. A dataclass.

    An operation defines `checked`, `call` and `compute`. The rest is what most operations do. `tensors` are
    in the order of `tritile.ops.dispatch.TENSORS`.
    """

    op: str
    tensors: Tensors

    is_empty = False  # nothing to compute, although the result has elements

    @property
    def first(self) -> Any:
        """Return the first operand, on whose device the result is."""
        return self.tensors[0]

    def checked(self, out: Any) -> Result:
        """Return shape and dtype of the result, and the precision. Raise a TritileError for bad arguments.

        out may be None; its memory is not checked.
        """
        raise NotImplementedError

    def check_memory(self, out: torch.Tensor) -> None:
        """Raise OverlapError where the memory of out overlaps."""

    def call(self, out: torch.Tensor, how: str) -> Call:
        """Return the call, folded to views, in the precision `how`."""
        raise NotImplementedError

    def run_otherwise(self, out: torch.Tensor | None, how: str) -> torch.Tensor | None:
        """Return the result where another operation computes it, else None."""
        return None

    def fill(self, out: torch.Tensor) -> None:
        """Store the result where `is_empty`."""
        out.zero_()

    def compute(self, out: torch.Tensor) -> None:
        """Compute tensors in host memory by torch: see `tritile.ops.reference`."""
        raise NotImplementedError

    def interpret(self, out: torch.Tensor, how: str) -> None:
        """Run the kernels in Triton's interpreter, by wider dtypes where it gets those of the call wrong."""
        if any(t.dtype in _WIDENED for t in (*self.tensors, out) if t is not None):
            wide = torch.empty(out.shape, dtype=torch.float32, device=out.device)
            names = [each.name for each in fields(self)]  # type: ignore[arg-type]
            same = replace(self, **{name: _widened(getattr(self, name)) for name in names})  # type: ignore[type-var]
            interpret(same.call(wide, how if self.first.dtype == torch.float32 else "ieee"))
            out.copy_(wide)  # torch rounds
        else:
            interpret(self.call(out, how))


def _widened(value: Any) -> Any:
    """Return floating tensors as float32, also those in tuples and mappings, and anything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(map(_widened, value))
    return {name: _widened(each) for name, each in value.items()} if isinstance(value, dict) else value


Makes = Callable[[str, Tensors, Key], Request]
# What makes the request of each operation, of its name, tensors and options. It may raise a TritileError.
REQUESTS: Final[dict[str, Makes]] = {}


def requests(*ops: str) -> Callable[[_Makes], _Makes]:
    def register(function: _Makes) -> _Makes:
        REQUESTS.update(dict.fromkeys(ops, function))
        return function

    return register


def request_of(op: str, *values: Any) -> Request:
    """Return the request of all arguments, in the order of the schema; of those left out, as None."""
    missing = len(NAMES[op]) - len(values)
    return REQUESTS[op](op, *parted(op, (*values, *[None] * missing)))


# --- The way of a call ---


def computed(op: str, tensors: Tensors, out: Any, options: Key, key: Key | None) -> torch.Tensor:
    """Compute a call that was not prepared before, at once or through torch's dispatcher."""
    if is_dynamo_compiling() and out is None and settings.may_lower and _is_static(tensors, options):
        facts = tuple(None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors)
        if _is_lowered(op, facts, options):
            return LOWERED[op](tensors, options)
    if needs_dispatch(*tensors, out):
        values = joined(op, tensors, options)
        return call_operator(op, values, out, lambda: request_of(op, *values).checked(out))
    if is_overridden(*tensors, out):
        made: torch.Tensor = call_override(op, tensors, out, options)
        return made
    return eager(op, tensors, out, options, key)


def eager(op: str, tensors: Tensors, out: Any, options: Key, key: Key | None) -> torch.Tensor:
    """Compute a call on plain tensors, and remember how under the key of `launch_cached`."""
    of = REQUESTS[op](op, tensors, options)
    rules()  # report a wrong setting of the environment on any device
    shape, dtype, how = of.checked(out)
    if out is not None:
        of.check_memory(out)
    done = of.run_otherwise(out, how)
    if done is not None:
        return done
    result = torch.empty(shape, dtype=dtype, device=of.first.device) if out is None else out
    if result.numel() == 0:
        return result
    if not of.first.is_meta:
        if of.is_empty:
            of.fill(result)
        elif on_host(of.first):
            if INTERPRETING and not is_torch_only(of.call(result, how).problem):
                of.interpret(result, how)
            else:
                of.compute(result)
        else:
            call = of.call(result, how)
            torchs = torch_call_of(of, call.problem, how, out) if rules().aten else None
            if torchs is not None and is_by_aten(call.problem, of.first.device.index):
                cache_launch(op, key, torchs, call, tensors, out, result, by_torch=True)
                problem = call.problem
                if out is None:
                    del call, result  # torch allocates its own
                try:
                    return torchs(*tensors) if out is None else mark_written(op, torchs(*tensors, out))
                except torch.OutOfMemoryError:
                    raise
                except (RuntimeError, ValueError) as error:  # torch says what it does not support
                    why = brief(error)
                    if is_torch_only(problem):
                        raise UnsupportedError(
                            f"{op}: only torch computes this, and it fails: {why}"
                        ) from error
                    log("compile", logging.WARNING, problem=problem.label, config="aten", failure=why)
                result = torch.empty(shape, dtype=dtype, device=of.first.device) if out is None else out
                call = of.call(result, how)
            launch = prepared(call, torchs is not None)
            launch(*call.tensors)
            cache_launch(op, key, launch, call, tensors, out, result)
    return result if out is None else mark_written(op, result)


def run_plain(op: str, tensors: Tensors, out: Any, options: Key) -> torch.Tensor:
    """Compute an operation on plain tensors: the kernel of its operator on CUDA and CPU."""
    return launch_cached(op, tensors, out, options, eager)


# --- Planned and prepared ---

_warned: set[str] = set()  # GPUs


def planned(problem: Tiled, index: int, allows_torch: bool = False) -> plans.Plan:
    """Return the plan of a problem on a GPU. In mode "tune", measure a problem that has no measurement first.

    Where several threads meet a problem at the same time, one measures it and the others wait.
    `allows_torch`: torch's kernel may make it.
    """
    device = devices.gpu(index)
    chosen = plans.plan_for(problem, device, None, allows_torch)
    if chosen is None and capturing():
        chosen = plans.plan_for(problem, device, "cached", allows_torch)
    elif chosen is None:
        chosen = once(
            ("planned", problem, device, allows_torch), lambda: _measure(problem, device, index, allows_torch)
        )
    assert chosen is not None
    if chosen.source == "model" and chosen.config != aten.CONFIG and current_mode() == "cached":
        _warn_uncalibrated(device)
    return chosen


def is_by_aten(problem: Tiled, index: int) -> bool:
    """True if torch's kernel is planned for a problem on a GPU that it may make."""
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


def _measure(problem: Tiled, device: devices.Device, index: int, allows_torch: bool) -> plans.Plan:
    chosen = plans.plan_for(problem, device, None, allows_torch)
    if chosen is not None:  # another thread has just measured it
        return chosen
    from tritile.tune.now import time_torch, tuned_now  # load the tuner only to measure

    if plans.plan_for(problem, device) is None:
        tuned_now(problem, device, index)
        forget()
        chosen = plans.plan_for(problem, device, None, allows_torch)
    if chosen is None:
        time_torch(problem, device, index)
        forget()
        chosen = plans.plan_for(problem, device, None, allows_torch) or plans.plan_for(problem, device)
    assert chosen is not None
    return chosen


def fixed(call: Call) -> Config | None:
    """Return the config of a call in place, which has no choice; None for other calls.

    Such a call must not be measured, as it changes its own input.
    """
    return in_place(call.problem) if isinstance(call, PermuteCall) and call.in_place else None


def _candidates(call: Call, device: devices.Device, allows_torch: bool) -> Iterator[Config]:
    """Yield the configs of a call in the order in which to try them: the planned one, then the model's.

    Ranking the whole space is the slowest step of a first call. It is done only where the planned config does
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
    yield from (config for config in model.screened(problem, device, _FALLBACKS) if config != first)


def prepared(call: Call, allows_torch: bool = False) -> launch.Launch | launch.SplitLaunch:
    """Return the launch of a call on a GPU, by its plan, which was made with or without torch's kernel.

    Where the planned config does not compile or load here, the next configs of the model are tried.

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
                with asking(call.problem.label, str(config)), as_mode_asks(f"{label} with {config}", advice):
                    return launching.prepare(call, config)
            except TuningError as error:
                failures.append(str(error))
                last = error
                facts = {"problem": call.problem.label, "config": str(config), "device": device.name}
                log("compile", logging.WARNING, **facts, failure=str(error))
        raise UnsupportedError(f"no config runs {label}: {'; '.join(failures[:3])}") from last
    finally:
        # An error refers to this frame, and its callers'. If the frame referred to the error, the call's
        # tensors would live until the garbage collector runs.
        del last


# --- Host memory, and the interpreter ---


def on_host(tensor: torch.Tensor) -> bool:
    """True if calls on this tensor launch nothing on a GPU: in host memory, or by TRITON_INTERPRET.

    Warn once where no kernel is interpreted either.
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
    launching.run_interpreted(call, fixed(call) or plans.interpreted(call.problem).config)


# --- Traced by torch's compiler ---


def _is_static(tensors: Tensors, options: Key) -> bool:
    """True of plain tensors, or None, and options whose numbers torch's compiler takes for constants."""
    from torch.fx.experimental.symbolic_shapes import has_static_value  # slow to load, and loaded by then

    present = [tensor for tensor in tensors if tensor is not None]
    if not all(type(tensor) in PLAIN for tensor in present):
        return False
    numbers = [option for option in options if isinstance(option, int | float)]
    sizes = [size for tensor in present for size in (*tensor.shape, *tensor.stride())]
    return all(map(has_static_value, (*numbers, *sizes)))


@constant_in_graphs
def _is_lowered(op: str, facts: Key, options: Key) -> bool:
    """True if a call that torch's compiler traces is planned by torch's kernel: its graph then has torch's.

    `facts` has shape, strides, dtype and device of each tensor. What is planned later, after measuring, does
    not change a graph that is compiled.
    """
    *_, dtype, device = facts[0]
    is_real = not any(isinstance(option, complex) for option in options)
    if op not in LOWERED or dtype in BYTES or not is_real or sees_every_call():
        return False
    on_one_gpu = device.type == "cuda" and all(each is None or each[3] == device for each in facts)
    if not on_one_gpu or torch.compiler.is_exporting():
        return False
    tensors = [
        None if each is None else torch.empty_strided(*each[:2], dtype=each[2], device="meta")
        for each in facts
    ]
    try:
        if not rules().aten:
            return False
        of = REQUESTS[op](op, tensors, options)
        shape, dtype, how = of.checked(None)
        problem = of.call(torch.empty(shape, dtype=dtype, device="meta"), how).problem
        if not isinstance(problem, MatmulProblem) or 0 in shape or of.is_empty:
            return False
        if problem.dtype != problem.out_dtype:  # which graphs of torch's functions do not have
            return False
        return torch_call_of(of, problem, how, None) is not None and is_by_aten(problem, device.index)
    except TritileError:  # the operator raises it
        return False
