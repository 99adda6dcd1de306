"""`tritile.check`: run every config of a kernel against a reference."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import triton

from tritile.core.device import HOST, Device
from tritile.core.markup import Tabular
from tritile.errors import (
    InvalidValueError,
    IsolationWarning,
    TuningError,
    UnsupportedError,
    callers_level,
)
from tritile.tune.arguments import check_arguments, check_grid, identified
from tritile.tune.autotuner import Autotuner
from tritile.tune.decorated import KernelCall, checked_here, elsewhere
from tritile.tune.measure.outputs import OUTSIDE, WRONG

Outcome = Literal["right", "wrong", "failed"]
Results = Iterator[tuple[triton.Config, float | TuningError | None]]


class CheckedConfig(NamedTuple):
    """How a config did: "right", "wrong", or "failed", where it does not compile or run.

    `error`: the largest relative error of the calls that were right. `reason`: why it is wrong or failed,
    with the first wrong element; "" where it is right.
    """

    config: triton.Config
    outcome: Outcome
    error: float | None
    reason: str = ""


@dataclass(frozen=True, repr=False)
class CheckResult(Tabular):
    """Which configs of a kernel were right on every call. It is true where all were, and one at least.

    `calls` names the calls, by the kernel and the values of its key. `on` is where they ran.
    """

    kernel: str
    on: Device
    calls: tuple[str, ...]
    configs: tuple[CheckedConfig, ...]

    def __bool__(self) -> bool:
        return bool(self.configs) and len(self.right) == len(self.configs)

    def _of(self, outcome: Outcome) -> tuple[CheckedConfig, ...]:
        return tuple(each for each in self.configs if each.outcome == outcome)

    @property
    def right(self) -> tuple[CheckedConfig, ...]:
        """The configs that were right on every call."""
        return self._of("right")

    @property
    def wrong(self) -> tuple[CheckedConfig, ...]:
        """The configs that gave a wrong answer, or wrote outside their memory."""
        return self._of("wrong")

    @property
    def failed(self) -> tuple[CheckedConfig, ...]:
        """The configs that did not compile or run."""
        return self._of("failed")

    @property
    def _title(self) -> str:
        counts = f"{len(self.right)} right, {len(self.wrong)} wrong, {len(self.failed)} failed"
        return f"{self.kernel} on {self.on.name}: {counts}; checked at {'; '.join(self.calls)}"

    @property
    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (each.outcome, str(each.config), each.reason or f"relative error {each.error or 0.0:.2g}")
            for each in (*self.wrong, *self.failed, *self.right)
        ]


def _here(call: KernelCall, configs: list[triton.Config]) -> Results:
    """Check in this process. The interpreter needs one run for configs that differ in options alone."""
    results: dict[Any, float | TuningError | None] = {}
    for config in configs:
        options = "" if call.device == HOST else str(config)
        key = str(sorted(config.kwargs.items())), config.pre_hook, options
        if key not in results:
            try:
                results[key] = checked_here(call, config)
            except TuningError as wrong:
                results[key] = wrong
        yield config, results[key]


def _elsewhere(call: KernelCall, configs: list[triton.Config]) -> Results:
    """Check in another process, which a config may crash; here where the call cannot be sent there."""
    named = identified(configs)
    with ExitStack() as stack:
        try:
            shop, subject = stack.enter_context(elsewhere(replace(call, configs=named)))
            shop.begin(subject)
        except (UnsupportedError, TuningError) as error:
            text = f"{call.problem.label} is checked in this process, which a config may crash: {error}"
            warnings.warn(text, IsolationWarning, stacklevel=callers_level())
            yield from _here(call, configs)
            return
        stack.callback(shop.end, subject)
        compiles = [(config, own, shop.compile(subject, own)) for own, config in named.items()]
        for config, own, compiled in compiles:
            try:
                compiled.result()
                yield config, shop.check(subject, own)
            except TuningError as error:
                yield config, error


def check(
    kernel: Autotuner,
    *args: Any,
    grid: Any = None,
    make: Callable[..., Sequence[Any] | Mapping[str, Any]] | None = None,
    **kwargs: Any,
) -> CheckResult:
    """Run every config of a kernel against its reference, and say which are right, wrong, or failed.

        tritile.check(softmax, x, out, 5, 300, grid=grid)
        tritile.check(softmax, 64, 512, make=make, grid=grid)  # make(m, n) -> (x, out, m, n)

    A config is checked on copies of the arguments, with outputs poisoned (NaN, or wrong integers) and guards
    around every tensor, which lie at its first and behind its last element. It is wrong where an output
    differs or is not written whole, and where a guard is written. Tensors on a GPU are checked in a process
    of their own, which a config may hang or crash. With TRITON_INTERPRET=1 tensors in host memory are checked
    in Triton's interpreter.

    A missing mask goes unnoticed where sizes are multiples of the tile. Other sizes come from `make`.

    Args:
        kernel: a kernel that `tritile.autotune` decorates, with a `reference`. Of a list of configs those are
            checked that its pruning leaves for the call; of a `tritile.Space`, which may have thousands, all.
        grid: the grid of the launch, as `kernel[grid]` takes it. A function is given all arguments by name.
        make: called with sizes; returns the arguments of a call, in their order or by name, "grid" included
            if it depends on sizes. It is called with the sizes given and with each one less, of which one at
            least is no multiple of a tile.

    Returns:
        A `CheckResult`, true where every config was right, which prints as a table.

    Raises:
        InvalidValueError: an argument is missing or does not fit, there is no reference or no grid, or
            tensors are in host memory without TRITON_INTERPRET=1.
        Exception: what the reference or `make` raises.
    """
    if not isinstance(kernel, Autotuner):
        raise InvalidValueError(f"check: {kernel!r} is no kernel that tritile.autotune decorates")
    if kernel.reference is None:
        raise InvalidValueError("check: there is no reference: tritile.autotune takes reference=")
    if make is not None and not callable(make):
        raise InvalidValueError(f"check: make is {make!r}: wanted a function of sizes")
    calls: list[Sequence[Any] | Mapping[str, Any]] = [args]
    if make is not None:
        if not all(type(size) is int and size > 0 for size in args):
            raise InvalidValueError(f"check: with make= the arguments are sizes, not {args!r}")
        smaller = tuple(max(1, size - 1) for size in args)  # of two neighbours one is no multiple of a tile
        calls = [make(*sizes) for sizes in dict.fromkeys((args, smaller))]
    found: dict[str, CheckedConfig] = {}
    labels: list[str] = []
    for arguments in calls:
        by_name = dict(arguments) if isinstance(arguments, Mapping) else {}
        in_order = () if by_name else tuple(arguments)
        named = {"warmup": False, "grid": grid} | kwargs | by_name
        check_grid("check", named["grid"])
        check_arguments(kernel.fn, kernel.space or kernel.configs, in_order, named)
        device = kernel.device_of(in_order, named)
        if device == HOST and not kernel.interpreted:
            wanted = "wanted them on a GPU, or TRITON_INTERPRET=1 in the environment"
            raise InvalidValueError(f"check: tensors are in host memory, where no kernel runs: {wanted}")
        call = kernel.call(in_order, named, device)
        labels.append(call.problem.label.strip())
        configs = list(call.configs.values())
        if kernel.space is not None:
            configs = [config.to_triton() for config in kernel.space.configs()]
        left = [c for c in configs if str(c) not in found or found[str(c)].outcome == "right"]
        for config, result in _here(call, left) if device == HOST else _elsewhere(call, left):
            if isinstance(result, TuningError):
                is_wrong = any(word in str(result) for word in (WRONG, OUTSIDE))
                reason = f"at {labels[-1]}: {result}"
                one = CheckedConfig(config, "wrong" if is_wrong else "failed", None, reason)
            else:
                before = found.get(str(config))
                errors = [each for each in (result, before and before.error) if each is not None]
                one = CheckedConfig(config, "right", max(errors, default=None))
            found[str(config)] = one
    return CheckResult(kernel.base_fn.__qualname__, device, tuple(labels), tuple(found.values()))
