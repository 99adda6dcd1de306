"""`tritile.warm`: compile the kernels of calls to come."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from triton import knobs

from tritile.core.device import Device
from tritile.core.problem import Tiled
from tritile.core.settings import current_mode
from tritile.errors import InvalidValueError, TuningError, UnsupportedError
from tritile.ops.plan import IN_PLACE, plan
from tritile.planning.kernel_plan import Plannable
from tritile.tune.deploy.fill import fill
from tritile.tune.deploy.rows import of_class, of_rows


def warm(
    what: Callable[..., Any] | str | Tiled,
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
            `tritile.plan` takes them.
        args: the call's positional arguments.
        rows: compile only the configs planned for these numbers of rows of the first operand.
        device: compile for this GPU, which need not be here, as `tritile.plan` takes it.
        kwargs: the call's keyword arguments.

    Raises what `tritile.plan` raises; InvalidValueError for tensors in host memory without `device`, for a
    call in place and for invalid `rows`; UnsupportedError for a GPU that is not NVIDIA's, and for a decorated
    kernel; TuningError if a kernel is refused, after all others were compiled.
    """
    if isinstance(what, Plannable):
        raise UnsupportedError("warm: a decorated kernel is compiled at its first call, into Triton's cache")
    chosen = plan(what, *args, device=device, **kwargs)
    problem, gpu = chosen.problem, chosen.device
    mode = "cached" if current_mode() == "tune" else current_mode()
    if chosen.source == "interpreter":
        raise InvalidValueError("warm: tensors in host memory are interpreted: name a GPU with device=")
    if chosen.why == IN_PLACE:
        raise InvalidValueError("warm: calls in place are not compiled ahead: leave out= away")
    entries = of_class(problem, gpu, mode) if rows is None else of_rows(problem, rows, gpu, mode)
    found = fill(list(entries), gpu, Path(knobs.cache.dir), whole=True).found
    if found.lines:
        raise TuningError(f"warm: {len(found.kernels)} kernels are there; {'; '.join(found.lines[:3])}")
    return len(found.kernels)
