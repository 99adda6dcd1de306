"""A call of a decorated kernel as a subject of tuning: packed, then compiled, timed and checked elsewhere."""

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import triton

from tritile.core.config import Config
from tritile.core.device import HOST, Device
from tritile.core.of_triton import handles_of
from tritile.core.problem import KernelProblem
from tritile.errors import InvalidValueError, TuningError, UnsupportedError, brief
from tritile.runtime.ahead import check_fits, compiling_for
from tritile.tune.identity import tensors_of, zero
from tritile.tune.measure.answers import OUTSIDE, error_of, overlap, poison
from tritile.tune.measure.bench import Stage, Taken
from tritile.tune.measure.shipping import NUMBERS, Memory, Shipment, StandIn, guarded, stood_in, unpack
from tritile.tune.measure.timing import Eager, Run, copies_wanted, graph_of

Named = dict[str, Any]
REFERENCE: Final = Config((), 1, 1, family="reference")  # in whose place a kernel's reference is timed
_NOTHING: Final = Shipment()


@dataclass(frozen=True)
class KernelCall:
    """Hold a launch and what `tritile.autotune` was given for it; `fn` is the kernel within its heuristics.

    `configs` are the configs by the text of their identities. `reference` returns the right tensors, by names
    of arguments.
    """

    fn: Any
    arg_names: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: Named
    configs: Mapping[str, triton.Config]
    reset_to_zero: tuple[str, ...] = ()
    restore_value: tuple[str, ...] = ()
    pre_hook: Callable[..., Any] | None = None
    reference: Callable[..., Mapping[str, torch.Tensor]] | None = None
    tolerance: float | None = None

    @property
    def named(self) -> Named:
        given = dict(zip(self.arg_names, self.args, strict=False)) | self.kwargs
        return {name: value for name, value in given.items() if name != "grid"}

    def having(self, named: Named) -> "KernelCall":
        """Return the call with other arguments by name, which may hold another "grid"."""
        args = tuple(named.get(name, value) for name, value in zip(self.arg_names, self.args, strict=False))
        placed = self.arg_names[: len(self.args)]
        kwargs = self.kwargs | {name: value for name, value in named.items() if name not in placed}
        return replace(self, args=args, kwargs=kwargs)

    def config(self, config: Config | triton.Config) -> triton.Config:
        if not isinstance(config, Config):
            return config
        return self.configs.get(config.key) or config.to_triton()

    def launch(self, config: Config | triton.Config, **options: Any) -> Any:
        own = self.config(config)
        settings = own.all_kwargs()
        if own.pre_hook is not None:
            own.pre_hook(self.named | settings)
        return self.fn.run(*self.args, **(self.kwargs | settings | options))

    def reset(self, config: Config | triton.Config) -> None:
        """Ready the tensors for a launch: by `pre_hook`, with what the config sets, or `reset_to_zero`."""
        if self.pre_hook is not None:
            self.pre_hook(self.named | self.config(config).all_kwargs(), reset_only=True)
            return
        zero(self.named, self.reset_to_zero)


@dataclass(frozen=True)
class KernelSubject:
    """Hold a call of a decorated kernel, packed so that any process can run it."""

    problem: KernelProblem
    device: Device
    source: str  # digest of the kernel's source
    shipment: Shipment = _NOTHING  # of a call that is measured in this process

    def digest(self, config: Config) -> str:
        return self.source

    def compile(self, config: Config) -> None:
        """Compile for the device, without a GPU. Raises what the compiler raises, or TuningError."""
        _compile(unpack(self.shipment, StandIn), config, self.device)

    def compile_check(self, config: Config) -> None:
        """Compile nothing: a check runs what was compiled."""

    @property
    def copies(self) -> int:
        return copies_wanted(self.shipment.bytes, self.device.l2_bytes)

    def stage(self, copies: int) -> Stage:
        return _Stage(self, copies)


def _compile(call: KernelCall, config: Config | triton.Config, device: Device) -> None:
    with compiling_for(device):
        kernel = call.launch(config, grid=(1,), warmup=True)
    check_fits(kernel, device)


def compile_ahead(call: KernelCall, config: triton.Config, device: Device) -> None:
    """Compile a call for a device into Triton's cache, without a GPU; its tensors may be on the meta device.

    Raises what the compiler raises, TuningError for too much shared memory, UnsupportedError for odd tensors.
    """
    _compile(call.having(stood_in(_plain(call))), config, device)


class _Stage:
    def __init__(self, subject: KernelSubject, copies: int) -> None:
        self._shipment = subject.shipment
        self._where = "cpu" if subject.device == HOST else "cuda"
        contents = torch.load(self._shipment.file, weights_only=True)
        self._pristine = Memory(self._shipment.blocks, contents, self._where)
        self._memories = [self._copied() for _ in range(copies)]
        self.calls: list[KernelCall] = [self._call(memory) for memory in self._memories]
        referred(self._call(self._copied()))  # once ahead of all configs: a failure here is not theirs
        triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device="cuda"))

    def _copied(self, *pattern: int) -> Memory:
        return Memory(self._shipment.blocks, self._pristine.contents(), self._where, *pattern)

    def _call(self, memory: Memory) -> KernelCall:
        return unpack(self._shipment, memory.tensor)

    @functools.cached_property
    def _right(self) -> KernelCall:
        return self._call(self._pristine)

    def prepared(self, config: Config) -> tuple[Run, Taken]:
        if config == REFERENCE:
            reference = self.calls[0].reference
            assert reference is not None
            taken = _accepted(reference, self.calls[0].named).keys()
            return (lambda call: reference(**{name: call.named[name] for name in taken})), Taken()
        kernel = self.calls[0].launch(config, warmup=True)
        _, registers, spills = handles_of(kernel)
        return (lambda call: call.launch(config)), Taken(registers, spills, kernel.metadata.shared)

    def timed(self, config: Config, run: Run) -> Eager:
        if config == REFERENCE:
            return graph_of(run, self.calls)
        return graph_of(run, self.calls, functools.partial(self._before, config))

    def _before(self, config: Config) -> None:
        right = self._right.named
        for call in self.calls:
            call.reset(config)
            for name in call.restore_value:
                for tensor, kept in zip(
                    tensors_of(call.named.get(name)), tensors_of(right.get(name)), strict=True
                ):
                    tensor.copy_(kept)

    def check(self, config: Config, run: Run) -> float | None:
        def made(*pattern: int) -> tuple[KernelCall, Memory]:
            memory = self._copied(*pattern)
            return self._call(memory), memory

        return _checked_within_guards(made, config)


def _accepted(function: Callable[..., Any], named: Named) -> Named:
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
    found = call.reference(**_accepted(call.reference, named))
    tensors = found.values() if isinstance(found, Mapping) else ()
    if not tensors or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        got = type(found).__name__ if tensors else "no tensors"
        raise InvalidValueError(f"reference returned {got}: wanted right tensors by name of argument")
    answers = {name: tensor.clone() for name, tensor in found.items()}
    for name, tensor in answers.items():
        if not isinstance(named.get(name), torch.Tensor):
            raise InvalidValueError(f"the reference names {name!r}, which is not a tensor of the call")
        if named[name].shape != tensor.shape:
            shapes = f"{tuple(tensor.shape)}, not {tuple(named[name].shape)}"
            raise InvalidValueError(f"the reference of {name} has shape {shapes}")
    return answers


def checked(call: KernelCall, config: Config | triton.Config) -> float | None:
    """Run a config and return the largest relative error; None without a reference.

    Outputs are poisoned ahead of resets and hooks, unless the kernel reads them, or another argument shares
    their memory. Raises TuningError for an answer that is wrong or not written whole.
    """
    named, answers, poisoned = call.named, referred(call), set()
    for name in answers:
        others = [tensor for n, v in named.items() if n != name for tensor in tensors_of(v)]
        read = name in (*call.reset_to_zero, *call.restore_value)
        if not read and not any(overlap(named[name], other) for other in others):
            poison(named[name], answers[name])
            poisoned.add(name)
    call.reset(config)
    call.launch(config)
    errors = []
    for name, right in answers.items():
        try:
            errors.append(error_of(name, named[name], right, call.tolerance))
        except TuningError as wrong:
            real = named[name].is_floating_point()
            if name not in poisoned or (real and not bool(named[name].double().isnan().any())):
                raise
            what = f"{name} was filled with {'NaN' if real else 'wrong integers'}"
            raise TuningError(f"{wrong}; {what}: if the kernel reads it, name it in restore_value=") from None
    return max(errors, default=None)


def _checked_within_guards(
    made: Callable[..., tuple[KernelCall, Memory | None]], config: Config | triton.Config
) -> float | None:
    """Check a config as `checked` does, and that it keeps to its memory; return the largest error.

    `made` returns the call and its memory, between guards of a pattern; None where it is not watched. Where
    outputs are read a second pattern is tried: what is added to a guard of NaN does not show.
    """
    errors = []
    for pattern in ((), (NUMBERS,)):
        own, memory = made(*pattern)
        errors.append(checked(own, config))
        if memory is not None and not memory.whole():
            raise TuningError(OUTSIDE)
        if not (own.reset_to_zero or own.restore_value or own.pre_hook):
            break
    return max((error for error in errors if error is not None), default=None)


def _detached(value: Any) -> Any:
    """Return an argument without what autograd keeps of its tensors."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, tuple | list):
        items = [_detached(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _plain(call: KernelCall) -> Named:
    """Return the call's arguments that hold tensors, by name: tensors, tuples of them, and descriptors."""
    return {n: _detached(v) for n, v in call.named.items() if next(tensors_of(v), None) is not None}


def _copied(call: KernelCall) -> KernelCall:
    """Return the call on copies of its tensors, which share memory as the tensors do."""
    return call.having(copy.deepcopy(_plain(call)))


def _guarded(call: KernelCall, *pattern: int) -> tuple[KernelCall, Memory | None]:
    """Return a call as `_copied` does, and its memory between guards; None where it is not watched.

    Memory of a GPU is watched in a process of its own alone.
    """
    plain = _plain(call)
    if all(tensor.device.type == "cpu" for value in plain.values() for tensor in tensors_of(value)):
        with contextlib.suppress(UnsupportedError):
            named, memory = guarded(plain, *pattern)
            return call.having(named), memory
    return _copied(call), None


def checked_here(call: KernelCall, config: triton.Config) -> float | None:
    """Check a config in this process, on copies of the call's tensors; return the largest relative error.

    Raises TuningError where the config does not run or its answer is wrong, and what the reference raises.
    """
    referred(_copied(call))  # a failure here is not the config's
    try:
        return _checked_within_guards(functools.partial(_guarded, call), config)
    except TuningError:
        raise
    except Exception as failure:  # whatever one config raises, the others still deserve their turn
        raise TuningError(brief(failure)) from failure
