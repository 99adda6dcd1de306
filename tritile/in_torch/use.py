"""`tritile.use_in_torch`: torch's own products and copies made by tritile, where it is expected to win."""

import inspect
from collections.abc import Callable
from typing import Any, Final, TypeVar

from tritile.core.of_torch import context_decorator
from tritile.errors import InvalidValueError
from tritile.in_torch import overrides, state
from tritile.in_torch.report import Report
from tritile.in_torch.state import Entry
from tritile.in_torch.untraced import untraced

_KEYS: Final = ("CUDA",)
_Function = TypeVar("_Function", bound=Callable[..., Any])


class use_in_torch:
    """Have torch's products and copies made by tritile, where it is expected to be faster.

        with tritile.use_in_torch() as report:
            loss = model(x).sum()
            loss.backward()
        print(report)  # what was taken, what was left to torch, and why

        @tritile.use_in_torch()
        def step(x): ...

        tritile.use_in_torch.everywhere()  # in all threads, until tritile.use_in_torch.nowhere()

    Taken are calls on CUDA tensors of `mm`, `bmm`, `addmm` and `baddbmm`, with or without `out`, and of
    `clone` into another order of dimensions: all that `torch.matmul`, `@`, `torch.nn.Linear`, attention made
    of products, `contiguous()`, `reshape` and so on come to, as do their backward passes. Results have
    torch's dtype, shape and strides; products keep torch's setting of precision for fp32
    (`torch.backends.cuda.matmul.fp32_precision`) and sum 16-bit products in fp32, whatever less torch is
    allowed to. What is left goes to the kernel that torch would have run without the switch, and so do calls
    that tritile does not offer, and in-place ones (`addmm_`, `baddbmm_`).

    A switch counts for its thread, and for the threads that autograd runs a backward pass in that this thread
    calls inside it. Those threads go by the `mode` and `batch_invariant` that the switch was turned on in: in
    a `with` these come before it. It nests, and the innermost decides. The first switch that is turned on in
    a process puts kernels at torch's operators. Those in C++ (`in_torch.crossing`, which the first process of
    a machine builds in 10 s) let pass calls of threads that have no switch, and on the default stream leave
    or launch what is like a call met before: under 1 us more than without a switch, or half of what torch's
    call takes the host. Once there they stay. Any other call, and without those kernels every one, is decided
    in Python, a few microseconds more; so that this does not show, products of up to 16 rows by at most 2^24
    elements and copies of up to 256 KiB are then left at a glance, those of batches and copies anywhere.
    Kernels in Python alone go with the last switch. A program whose threads come and go should keep one on
    everywhere, with policy "never" if it is to change nothing: torch lets kernels be exchanged while others
    run, but does not vow that to be safe.

    A size that is met for the first time is planned, and compiled where it is taken, before it runs: warm up
    with the sizes that count. Under `torch.compile`, products that the compiled code leaves to aten run
    inside a switch that is on when the code runs; it pads odd sizes unless
    `torch._inductor.config.shape_padding` is False, and what it makes kernels of itself it keeps. Turned on
    inside a compiled function, a switch is a graph break, and an error under `fullgraph=True`. CUDA graphs
    hold what was on when they were captured. Set `TRITILE_MODE` and `TRITILE_BATCH_INVARIANT` before a switch
    is turned on: calls that were met before do not ask them again.

    Args:
        policy: what is taken. "expected": what is expected to win, by measurements of this GPU, or of one
            like it, that ship with tritile or were made here; "always": all that tritile offers, to test and
            to measure; "never": nothing, inside another switch.

    Raises InvalidValueError for another policy, and where it decorates a coroutine function.
    """

    @untraced
    def __init__(self, policy: str = "expected", *, _keys: tuple[str, ...] = _KEYS) -> None:
        self.policy = state.checked_policy(policy)
        self.report = Report()
        """What it took and left, over all the times that it was entered."""
        self._keys = _keys
        self._entered: list[Entry] = []

    def __call__(self, function: _Function) -> _Function:
        """The function, or generator, inside this switch at every call."""
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise InvalidValueError(
                f"use_in_torch: {function.__qualname__} is a coroutine function, and others run "
                "in its thread as it waits: wanted a function or generator"
            )
        wrapped: _Function = context_decorator(self._again, function)
        return wrapped

    @untraced
    def _again(self) -> "use_in_torch":
        """The same, to be entered by a call of a decorated function; it adds to the same report."""
        other = type(self)(self.policy, _keys=self._keys)
        other.report = self.report
        return other

    @untraced
    def __enter__(self) -> Report:
        overrides.install(self._keys)
        self._entered.append(Entry(self.policy, self._keys, self.report))
        state.enter(self._entered[-1])
        return self.report

    @untraced
    def __exit__(self, *error: Any) -> None:
        here = [entry for entry in self._entered if entry in state.kept()]  # one may be on in several threads
        entry = (here or self._entered)[-1]
        self._entered.remove(entry)
        state.leave(entry)
        overrides.uninstall(self._keys)

    @staticmethod
    @untraced
    def everywhere(policy: str = "expected", *, _keys: tuple[str, ...] = _KEYS) -> Report:
        """Turn it on in all threads of the process in which no `with` says otherwise; the report of that.

        Called again it begins anew, with this policy. Raises InvalidValueError for another policy.
        """
        entry = Entry(state.checked_policy(policy), _keys)
        overrides.install(_keys)
        _replaced(entry)
        return entry.report

    @staticmethod
    @untraced
    def nowhere() -> None:
        """Turn off what `everywhere` turned on; no error where that is off."""
        _replaced(None)


def _replaced(entry: Entry | None) -> None:
    before = state.everywhere(entry)
    overrides.tell_everywhere()
    if before is not None:
        overrides.uninstall(before.keys)
