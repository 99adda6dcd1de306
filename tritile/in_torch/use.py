"""Offer `tritile.use_in_torch`: torch's products and copies by tritile where that is faster."""

import inspect
from collections.abc import Callable
from typing import Any, Final, TypeVar

from tritile.core.of_torch import context_decorator, untraced
from tritile.errors import InvalidValueError
from tritile.in_torch import overrides, state
from tritile.in_torch.report import Report
from tritile.in_torch.state import Entry

_KEYS: Final = ("CUDA",)
_Function = TypeVar("_Function", bound=Callable[..., Any])


class use_in_torch:
    """Compute torch's products and copies by tritile where that is expected to be faster.

        with tritile.use_in_torch() as report:
            loss = model(x).sum()
            loss.backward()
        print(report)  # which calls tritile handled, which torch did, and why

        @tritile.use_in_torch()
        def step(x): ...

        tritile.use_in_torch.everywhere()  # in all threads, until tritile.use_in_torch.nowhere()

    It handles calls on CUDA tensors of `mm`, `bmm`, `addmm` and `baddbmm`, with or without `out`, and of
    `clone` into another order of dimensions. `torch.matmul`, `@`, `torch.nn.Linear`, attention made of
    products, `contiguous()`, `reshape` and so on, and their backward passes, all call these. Results have
    torch's dtype, shape and strides. Products follow torch's setting of precision for fp32
    (`torch.backends.cuda.matmul.fp32_precision`). They always sum 16-bit products in fp32, even where torch
    is allowed to use less. All other calls, calls that tritile does not support, and in-place ones (`addmm_`,
    `baddbmm_`) are passed through to the kernel that torch would have run.

    An override applies to its thread, and to the threads in which autograd runs a backward pass that this
    thread calls inside it. Those threads use the `mode` and `batch_invariant` in which the override was
    turned on: open these before it. Overrides nest, and the innermost decides.

    The first override of a process registers kernels at torch's operators. Those of the C++ dispatch library
    (`in_torch.crossing`, which the first process of a machine builds in 10 s) let the calls of threads
    without an override through. On the default stream they also handle, or pass through, calls like one that
    was decided before: that takes under 1 us more than without an override, or half of the host time of
    torch's call. They stay registered. Python decides about any other call, and about every call where the
    library is missing, which takes a few microseconds. To hide this, products of up to 16 rows by at most
    2^24 elements, and copies of up to 256 KiB, are then passed through undecided; batched products and copies
    of this size always are. Kernels in Python are removed with the last override. A program whose threads
    come and go should keep one on everywhere, with policy "never" if it is to change nothing: torch lets
    kernels be exchanged while others run, but does not promise that this is safe.

    A size is planned the first time that it is met, and compiled where tritile handles it: warm up with the
    sizes that matter. Under `torch.compile`, products that the compiled code calls through aten run inside an
    override that is on when the code runs. The compiler pads odd sizes unless
    `torch._inductor.config.shape_padding` is False, and keeps what it makes kernels of itself. Turning an
    override on inside a compiled function is a graph break, and an error under `fullgraph=True`. A CUDA graph
    keeps what was on when it was captured. Set `TRITILE_MODE` and `TRITILE_BATCH_INVARIANT` before turning an
    override on: calls that were met before do not read them again.

    Args:
        policy: which calls tritile handles. "expected": those expected to be faster, by measurements of this
            GPU, or a similar one, that ship with tritile or were made here. "always": all that tritile
            supports, for tests and measurements. "never": none, inside another override.

    Raises:
        InvalidValueError: the policy is unknown, or the override decorates a coroutine function.
    """

    @untraced
    def __init__(self, policy: str = "expected", *, _keys: tuple[str, ...] = _KEYS) -> None:
        self.policy = state.checked_policy(policy)
        self.report = Report()
        """The calls that it handled and passed through, over all the times that it was entered."""
        self._keys = _keys
        self._entered: list[Entry] = []

    def __call__(self, function: _Function) -> _Function:
        """Return the function, or generator, to run inside this override at every call."""
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise InvalidValueError(
                f"use_in_torch: {function.__qualname__} is a coroutine function, and others run "
                "in its thread while it waits: wanted a function or generator"
            )
        wrapped: _Function = context_decorator(self._again, function)
        return wrapped

    @untraced
    def _again(self) -> "use_in_torch":
        """Return the same override with the same report, for one call of a decorated function."""
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
        here = [entry for entry in self._entered if entry in state.kept()]  # on in several threads
        entry = (here or self._entered)[-1]
        self._entered.remove(entry)
        state.leave(entry)
        overrides.uninstall(self._keys)

    @staticmethod
    @untraced
    def everywhere(policy: str = "expected", *, _keys: tuple[str, ...] = _KEYS) -> Report:
        """Turn an override on in all threads of the process in which no `with` says otherwise.

        Called again, it starts a new report with this policy.

        Args:
            policy: as for the class.

        Returns:
            The report, which grows.

        Raises:
            InvalidValueError: the policy is unknown.
        """
        entry = Entry(state.checked_policy(policy), _keys)
        overrides.install(_keys)
        _replaced(entry)
        return entry.report

    @staticmethod
    @untraced
    def nowhere() -> None:
        """Turn off what `everywhere` turned on. Nothing happens where that is off."""
        _replaced(None)


def _replaced(entry: Entry | None) -> None:
    before = state.everywhere(entry)
    overrides.tell_everywhere()
    if before is not None:
        overrides.uninstall(before.keys)
