"""Run calls that are not in the memo of prepared calls: check, allocate, describe, launch and remember."""

from collections.abc import Callable
from typing import Any

import torch

from tritile.core.settings import rules
from tritile.core.views import Call
from tritile.ops.memo import Key, Tensors, remember
from tritile.ops.run import interpret_product, mark_written, on_host, prepared

Change = Callable[[torch.Tensor], torch.Tensor]
Result = tuple[tuple[int, ...], torch.dtype, str]


class Asked:
    """Hold what a caller asks of an operation: the tensors, as given, and the options.

    An operation defines `checked` and `call`. The rest is what most operations do. `tensors` are in the order
    of `tritile.ops.memo.ARGUMENTS`.
    """

    op: str
    tensors: Tensors

    @property
    def first(self) -> Any:
        """Return the first operand, on whose device the result is."""
        return self.tensors[0]

    @property
    def is_empty(self) -> bool:
        """Tell whether there is nothing to compute, although the result has elements."""
        return False

    def checked(self, out: Any) -> Result:
        """Return shape and dtype of the result, and the precision. Raise a TritileError for bad arguments.

        out may be None; its memory is not checked.
        """
        raise NotImplementedError

    def check_memory(self, out: torch.Tensor) -> None:
        """Raise OverlapError where the memory of out overlaps."""

    def call(self, change: Change, out: torch.Tensor, how: str) -> Call:
        """Return the described call, in the precision `how`, after `change` was applied to every operand."""
        raise NotImplementedError

    def run_otherwise(self, out: torch.Tensor | None, dtype: torch.dtype, how: str) -> torch.Tensor | None:
        """Return the result where another operation computes it, else None."""
        return None

    def fill(self, out: torch.Tensor) -> None:
        """Store the result where `is_empty`."""
        out.zero_()

    def interpret(self, out: torch.Tensor, how: str) -> None:
        """Compute on host tensors."""
        interpret_product(self.call, (self.first, *self.tensors), out, how)


def unchanged(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself."""
    return tensor


def run_unprepared(of: Asked, out: Any, key: Key | None) -> torch.Tensor:
    """Run a call that is not in the memo of prepared calls, and remember its launch under `key`."""
    rules()  # report a wrong setting of the environment on any device
    shape, dtype, how = of.checked(out)
    if out is not None:
        of.check_memory(out)
    done = of.run_otherwise(out, dtype, how)
    if done is not None:
        return done
    result = torch.empty(shape, dtype=dtype, device=of.first.device) if out is None else out
    if result.numel() == 0:
        return result
    if not of.first.is_meta:
        if of.is_empty:
            of.fill(result)
        elif on_host(of.first):
            of.interpret(result, how)
        else:
            call = of.call(unchanged, result, how)
            launch = prepared(call)
            launch(*call.tensors)
            remember(key, of.op, launch, call, of.tensors, result)
    return result if out is None else mark_written(of.op, result)
