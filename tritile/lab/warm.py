"""`tritile.warm`: the kernels of calls to come, compiled before the first of them."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from triton import knobs

from tritile.core.device import Device
from tritile.core.problem import Tiled
from tritile.core.settings import current_mode
from tritile.errors import InvalidValueError, TuningError
from tritile.ops.plan import IN_PLACE, plan
from tritile.tune.deploy.fill import fill
from tritile.tune.deploy.rows import of_class, of_rows


def warm(
    what: Callable[..., Any] | Tiled,
    *args: Any,
    rows: Iterable[int] | None = None,
    device: Device | torch.device | str | None = None,
    **kwargs: Any,
) -> int:
    """Compile, in parallel processes, what calls like this one need; return how many kernels that are.

    They lie in Triton's cache on disk, where calls find them; what is there already counts too. Compiled are
    the kernels of calls that differ from this one in sizes only: for each config of the portfolio of its
    class, and for the sizes of which a config is remembered. Where its class has no portfolio, and of a
    permutation, the sizes stay. A result of one column is made as one row is: other numbers of rows need a
    call of their own. Not for use while another thread launches kernels.

    Args:
        what: the operation, followed by the arguments of the call, or a problem alone, as `tritile.plan`
            takes them.
        args: the call's positional arguments.
        rows: compile only what the plans at these numbers of rows of the first operand pick.
        device: compile for this GPU, which need not be here, as `tritile.plan` takes it.
        kwargs: the call's keyword arguments.

    Raises what `tritile.plan` raises; InvalidValueError for tensors in host memory without `device`, for a
    call in place and for `rows` that are none; UnsupportedError for a GPU that is not NVIDIA's; TuningError
    where something is refused, after all else was compiled.
    """
    chosen = plan(what, *args, device=device, **kwargs)
    problem, gpu = chosen.problem, chosen.device
    mode = "cached" if current_mode() == "tune" else current_mode()
    if chosen.source == "interpreter":
        raise InvalidValueError("warm: tensors in host memory are interpreted: name a GPU with device=")
    if chosen.why == IN_PLACE:
        raise InvalidValueError("warm: what is done in place is not compiled ahead: leave out= away")
    entries = of_class(problem, gpu, mode) if rows is None else of_rows(problem, rows, gpu, mode)
    found = fill(list(entries), gpu, Path(knobs.cache.dir), whole=True).found
    if found.lines:
        raise TuningError(f"warm: {len(found.kernels)} kernels are there; {'; '.join(found.lines[:3])}")
    return len(found.kernels)
