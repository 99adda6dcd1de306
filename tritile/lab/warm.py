"""`tritile.warm`: compile the kernels of calls to come."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import torch
from triton import knobs

from tritile.core.device import INTERPRETER, Device
from tritile.core.problem import Tiled
from tritile.core.settings import current_mode
from tritile.errors import InvalidValueError, TritileError, TuningError, brief
from tritile.ops.plan import IN_PLACE, plan
from tritile.tune.autotuner import Autotuner
from tritile.tune.decorated import compile_ahead
from tritile.tune.deploy.fill import check_nvidia, fill
from tritile.tune.deploy.rows import of_class, of_rows
from tritile.tune.measuring import call_of

_INTERPRETED: Final = "warm: tensors in host memory are interpreted: name a GPU with device="


def _kernel(kernel: Autotuner, args: tuple[Any, ...], kwargs: dict[str, Any], device: Any) -> int:
    """Compile a decorated kernel with the config of a call, in this process."""
    chosen = plan(kernel, *args, device=device, **kwargs)
    if chosen.device == INTERPRETER:
        raise InvalidValueError(_INTERPRETED)
    check_nvidia(chosen.device)
    try:
        compile_ahead(call_of(kernel, args, kwargs, {}), chosen.config, chosen.device)
    except TritileError:
        raise
    except Exception as error:
        raise TuningError(f"warm: {chosen.problem.label}, {chosen.config}: {brief(error)}") from error
    return 1


def warm(
    what: Callable[..., Any] | str | Tiled | Autotuner,
    *args: Any,
    rows: Iterable[int] | None = None,
    device: Device | torch.device | str | None = None,
    **kwargs: Any,
) -> int:
    """Compile in parallel processes the kernels of calls like this one; return how many there are.

    Kernels go to Triton's cache on disk, where calls find them; cached ones count too. Calls like this one
    differ only in sizes: kernels are compiled for each config of its class's portfolio, and for the sizes
    whose config is remembered. If the class has no portfolio, and for a permutation, only the kernel of these
    sizes is compiled. A result of one column is computed as one row: other numbers of rows need a call of
    their own. Do not use this while another thread launches kernels.

    Args:
        what: the operation or its name, followed by the arguments of the call, or a problem alone, as
            `tritile.plan` takes them; or a kernel that `tritile.autotune` decorates, followed by its
            arguments: it is compiled with the config of just this call.
        args: the call's positional arguments.
        rows: compile only the configs planned for these numbers of rows of the first operand.
        device: compile for this GPU, which need not be here, as `tritile.plan` takes it.
        kwargs: the call's keyword arguments.

    Raises what `tritile.plan` raises; InvalidValueError for tensors in host memory without `device`, for a
    call in place, for invalid `rows`, and for `rows` of a decorated kernel; UnsupportedError for a GPU that
    is not NVIDIA's; TuningError if a kernel is refused, after all others were compiled.
    """
    if isinstance(what, Autotuner):
        if rows is not None:
            raise InvalidValueError("warm: rows= is for operations: call it for each call of a kernel")
        return _kernel(what, args, kwargs, device)
    chosen = plan(what, *args, device=device, **kwargs)
    problem, gpu = chosen.problem, chosen.device
    mode = "cached" if current_mode() == "tune" else current_mode()
    if chosen.source == "interpreter":
        raise InvalidValueError(_INTERPRETED)
    if chosen.why == IN_PLACE:
        raise InvalidValueError("warm: calls in place are not compiled ahead: leave out= away")
    entries = of_class(problem, gpu, mode) if rows is None else of_rows(problem, rows, gpu, mode)
    found = fill(list(entries), gpu, Path(knobs.cache.dir), whole=True).found
    if found.lines:
        raise TuningError(f"warm: {len(found.kernels)} kernels are there; {'; '.join(found.lines[:3])}")
    return len(found.kernels)
