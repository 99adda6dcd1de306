"""`tritile.check`: run every config of a kernel against a reference, and tell which are right."""

import contextlib
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import triton

from tritile.core.config import Config
from tritile.core.device import INTERPRETER, Device
from tritile.core.markup import table_html
from tritile.errors import (
    InvalidValueError,
    IsolationWarning,
    TuningError,
    UnsupportedError,
    callers_level,
)
from tritile.tune.autotuner import Autotuner, autotune
from tritile.tune.declared import check_arguments, check_grid, check_kernel, check_tolerance
from tritile.tune.decorated import KernelCall, KernelSubject, checked_here
from tritile.tune.identity import identified
from tritile.tune.measure.answers import OUTSIDE, WRONG
from tritile.tune.measure.shipping import pack
from tritile.tune.measure.workshop import Workshop, borrowed
from tritile.tune.measuring import call_of, room_of

Outcome = Literal["right", "wrong", "failed"]
Reference = Callable[..., Mapping[str, torch.Tensor]]
Make = Callable[..., Sequence[Any] | Mapping[str, Any]]
Arguments = Sequence[Any] | Mapping[str, Any]


class CheckedConfig(NamedTuple):
    """Tell how a config did: "right", "wrong", or "failed", where it does not compile or run.

    `error`: the largest relative error of the calls that were right. `reason`: why it is wrong or failed,
    with the first wrong element; "" where it is right.
    """

    config: triton.Config
    outcome: Outcome
    error: float | None
    reason: str = ""

    @property
    def cells(self) -> tuple[str, str, str]:
        """Return what a table shows."""
        error = "" if self.error is None else f"relative error {self.error:.2g}"
        return self.outcome, str(self.config), self.reason or error


@dataclass(frozen=True)
class CheckResult:
    """Tell which configs of a kernel were right on every call. It is true where all were, and one at least.

    `calls` names the calls, by the kernel and the values of its key. `on` is where they ran.
    """

    kernel: str
    on: Device
    calls: tuple[str, ...]
    configs: tuple[CheckedConfig, ...]

    def __bool__(self) -> bool:
        return bool(self.configs) and all(each.outcome == "right" for each in self.configs)

    def _of(self, outcome: Outcome) -> tuple[CheckedConfig, ...]:
        return tuple(each for each in self.configs if each.outcome == outcome)

    @property
    def right(self) -> tuple[CheckedConfig, ...]:
        """Return the configs that were right on every call."""
        return self._of("right")

    @property
    def wrong(self) -> tuple[CheckedConfig, ...]:
        """Return the configs that gave a wrong answer, or wrote outside their memory."""
        return self._of("wrong")

    @property
    def failed(self) -> tuple[CheckedConfig, ...]:
        """Return the configs that did not compile or run."""
        return self._of("failed")

    @property
    def _title(self) -> str:
        counts = f"{len(self.right)} right, {len(self.wrong)} wrong, {len(self.failed)} failed"
        return f"{self.kernel} on {self.on.name}: {counts}; checked at {'; '.join(self.calls)}"

    def __repr__(self) -> str:
        order = (*self.wrong, *self.failed, *self.right)
        lines = ("  {:6}  {}: {}".format(*each.cells).removesuffix(": ") for each in order)
        return "\n".join((self._title, *lines))

    def _repr_html_(self) -> str:
        rows = (each.cells for each in (*self.wrong, *self.failed, *self.right))
        return table_html(self._title, ("outcome", "config", "reason"), rows)


def tuner_of(who: str, kernel: Any, configs: Any = None) -> Autotuner:
    """Return a decorated kernel, or a bare one with configs. Raise InvalidValueError for anything else."""
    if isinstance(kernel, Autotuner):
        return kernel
    if hasattr(kernel, "arg_names") and configs and not hasattr(kernel, "configs"):
        return autotune(list(configs), [])(kernel)
    raise InvalidValueError(
        f"{who}: kernel is {kernel!r}: wanted a kernel that tritile.autotune decorates"
        + (", or one of triton.jit with configs=" if who == "check" else "")
    )


def _listed(tuner: Autotuner, configs: Any) -> list[triton.Config]:
    """Return the configs to check, for all calls; empty for those that a kernel's pruning leaves."""
    if configs is None:
        return [] if tuner.space is None else [config.to_triton() for config in tuner.space.configs()]
    found = [config.to_triton() if isinstance(config, Config) else config for config in configs]
    if not found or not all(isinstance(config, triton.Config) for config in found):
        raise InvalidValueError(f"check: configs is {configs!r}: wanted triton.Config objects")
    return found


def _less(sizes: Sequence[Any]) -> tuple[int, ...]:
    """Return sizes one less: of two neighbours one at least ends amid a tile."""
    if not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        raise InvalidValueError(f"check: with make= the arguments are sizes, not {tuple(sizes)!r}")
    return tuple(max(1, size - 1) for size in sizes)


def _given(
    args: Sequence[Any], make: Make | None, more: Iterable[Sequence[Any]]
) -> list[Arguments]:  # fmt: skip
    """Return the arguments of every call: as given, or as `make` returns them for sizes."""
    further = list(more) if isinstance(more, Iterable) else [more]
    if not all(isinstance(each, Sequence | Mapping) for each in further):
        raise InvalidValueError(f"check: more is {more!r}: wanted a list of arguments of calls")
    if make is None:
        return [args, *further]
    if not callable(make):
        raise InvalidValueError(f"check: make is {make!r}: wanted a function of sizes")
    return [make(*sizes) for sizes in dict.fromkeys((tuple(args), _less(args), *map(tuple, further)))]


def _call(
    tuner: Autotuner, configs: Any, given: Arguments, kwargs: dict[str, Any], how: dict[str, Any]
) -> KernelCall:
    """Return one call, `ragged` left to it where `how` does. Raise InvalidValueError for bad arguments."""
    by_name = dict(given) if isinstance(given, Mapping) else {}
    args = () if by_name else tuple(given)
    named = {"warmup": False} | kwargs | by_name
    check_grid("check", named.get("grid"))
    check_arguments(tuner.fn, configs, args, named)
    return replace(call_of(tuner, args, named, {}), **how)


class _Checks:
    """Check configs on one call after the other, and hold what was found of each."""

    def __init__(self, tuner: Autotuner) -> None:
        self._tuner = tuner
        self.found: dict[str, CheckedConfig] = {}
        self.labels: list[str] = []

    def _note(self, label: str, config: triton.Config, result: float | TuningError | None) -> None:
        key, known = str(config), self.found.get(str(config))
        if isinstance(result, TuningError):
            wrong = any(word in str(result) for word in (WRONG, OUTSIDE))
            reason = f"at {label}: {result}"
            self.found[key] = CheckedConfig(config, "wrong" if wrong else "failed", None, reason)
        else:
            errors = [e for e in (result, known.error if known else None) if e is not None]
            self.found[key] = CheckedConfig(config, "right", max(errors, default=None))

    def run(self, call: KernelCall, configs: list[triton.Config], device: Device) -> None:
        """Check those of the configs that were right so far."""
        kwargs = {name: value for name, value in call.kwargs.items() if name != "grid"}
        offered = configs or list(self._tuner.offered(call.args, kwargs).values())
        label = self._tuner.problem(call.args, kwargs).label.strip()
        self.labels.append(label)
        left = [c for c in offered if str(c) not in self.found or self.found[str(c)].outcome == "right"]
        results = self._here if device == INTERPRETER else self._elsewhere
        for config, result in results(call, left, device):
            self._note(label, config, result)

    def _here(
        self, call: KernelCall, configs: list[triton.Config], device: Device
    ) -> Iterable[tuple[triton.Config, float | TuningError | None]]:
        """Check in this process. In the interpreter configs differ by what the kernel is given alone."""
        known: dict[Any, float | TuningError | None] = {}
        for config in configs:
            same = (
                str(sorted(config.kwargs.items())),
                config.pre_hook,
                str(config) * (device != INTERPRETER),
            )
            if same not in known:
                try:
                    known[same] = checked_here(call, config)
                except TuningError as wrong:
                    known[same] = wrong
            yield config, known[same]

    def _elsewhere(
        self, call: KernelCall, configs: list[triton.Config], device: Device
    ) -> Iterable[tuple[triton.Config, float | TuningError | None]]:
        """Check in another process, which a config may crash; here where the call cannot be sent there."""
        plain = identified(configs)
        problem = self._tuner.problem(call.args, call.named)
        subject = KernelSubject(problem, device, self._tuner.digest)
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tritile-")))
            gpu, room = room_of(call)
            try:
                sent = replace(
                    subject,
                    shipment=pack(
                        replace(call, configs={own.key: c for own, c in plain.items()}), folder, room
                    ),
                )
                shop = stack.enter_context(borrowed(gpu))
                shop.begin(sent)
            except (UnsupportedError, TuningError) as error:
                text = f"{problem.label} is checked in this process, which a config may crash: {error}"
                warnings.warn(text, IsolationWarning, stacklevel=callers_level())
                yield from self._here(call, configs, device)
                return
            stack.callback(shop.end, sent)
            yield from _checked_there(shop, sent, plain)


def _checked_there(
    shop: Workshop, subject: KernelSubject, plain: Mapping[Config, triton.Config]
) -> Iterable[tuple[triton.Config, float | TuningError | None]]:
    """Compile configs in parallel, and have the measuring process check one after the other."""
    compiles = [(config, own, shop.compile(subject, own)) for own, config in plain.items()]
    for config, own, compiled in compiles:
        try:
            compiled.result()
            yield config, shop.check(subject, own)
        except TuningError as error:
            yield config, error


def check(
    kernel: Any,
    *args: Any,
    grid: Any = None,
    configs: Iterable[triton.Config | Config] | None = None,
    reference: Reference | None = None,
    tolerance: float | None = None,
    make: Make | None = None,
    more: Iterable[Sequence[Any]] = (),
    **kwargs: Any,
) -> CheckResult:
    """Run every config of a kernel against a reference, and tell which are right, wrong, or failed.

        tritile.check(softmax, x, out, 5, 300, grid=grid)
        tritile.check(softmax, 64, 512, make=make, grid=grid)  # make(m, n) -> (x, out, m, n)

    A config is checked on copies of the arguments, with outputs poisoned (NaN, or wrong integers) and guards
    around every tensor, which lie at its first and behind its last element. It is wrong where an output
    differs or is not written whole, and where a guard is written. Tensors in host memory run in Triton's
    interpreter. Tensors on a GPU are checked in a process of their own, which a config may hang or crash.

    A fault at the edge of a tile shows only at sizes that end amid one. These come from `make`, from `more`,
    and from the `ragged` that the kernel was decorated with.

    Args:
        kernel: a kernel that `tritile.autotune` decorates; or one of `triton.jit`, with `configs`.
        args: the call's positional arguments; with `make`, whole numbers, its sizes.
        grid: the grid of the launch, as `kernel[grid]` takes it. A function is given all arguments by name.
        configs: the configs to check. Default: all, of a list those that its pruning leaves for the call. A
            `tritile.Space` may have thousands.
        reference: returns the right tensors by name of argument, as `tritile.autotune` takes it. Default:
            that of the decorated kernel.
        tolerance: the allowed relative error. Default: as for `tritile.autotune`.
        make: called with sizes; returns the arguments of a call, in their order or by name, "grid" included
            if it depends on sizes. It is called with the sizes given and with each one less, of which one at
            least ends amid any tile.
        more: arguments of further calls, or with `make` further sizes.
        kwargs: the call's keyword arguments.

    Returns:
        A `tritile.CheckResult`, true where every config was right, which prints as a table.

    Raises:
        InvalidValueError: an argument is missing or does not fit, there is no reference or no grid.
        Exception: what the reference or `make` raises.
    """
    if configs is not None and not isinstance(configs, Iterable):
        raise InvalidValueError(f"check: configs is {configs!r}: wanted triton.Config objects")
    chosen = None if configs is None else list(configs)
    tuner = tuner_of("check", kernel, chosen)
    judge = reference or tuner.reference
    if judge is None:
        raise InvalidValueError(
            "check: there is no reference: wanted reference=, or that of tritile.autotune"
        )
    check_kernel(tuner.fn, tuner.space or tuner.configs, tuner.keys, None, None, judge, None)
    allowed = tuner.tolerance if tolerance is None else tolerance
    check_tolerance(allowed, judge)
    wanted, how = _listed(tuner, chosen), {"reference": judge, "tolerance": allowed}
    named = kwargs if grid is None else kwargs | {"grid": grid}
    offered = wanted or tuner.space or tuner.configs
    calls = [_call(tuner, offered, given, named, how) for given in _given(args, make, more)]
    checks = _Checks(tuner)
    for call in calls:
        device = tuner.device_of(call.args, call.kwargs)
        checks.run(call, wanted, device)
    labels = [*checks.labels, *[f"{checks.labels[0]}, ragged"] * (tuner.ragged is not None)]
    return CheckResult(tuner.base_fn.__qualname__, device, tuple(labels), tuple(checks.found.values()))
