"""`tritile.batch_invariant.report`: which operations ran and were not batch-invariant."""

import re
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from tritile.core.markup import Tabular
from tritile.core.torch_private import TorchDispatchMode, leaves_of
from tritile.invariant import overrides

# Operations that move, choose or compare elements, and sum nothing. Those that torch tags as pointwise, and
# views, are not listed here. Of equal elements `argmax` and `argmin` return the first.
_EXACT: Final = re.compile(
    r"(_to_copy|_unsafe_view|_reshape_alias|_local_scalar_dense|_assert\w*|_has_\w*|alias|all|amax|amin|any|arange|"
    r"argmax|argmin|as_strided\w*|bincount|cat|clone|constant_pad_nd|contiguous|copy|count_nonzero|detach|"
    r"diagonal\w*|embedding|empty\w*|equal|expand\w*|eye|fill|flip|full\w*|gather|index|index_copy|index_fill|"
    r"index_select|isin|item|lift\w*|linspace|masked_fill|masked_select|narrow\w*|new_\w*|nonzero\w*|ones\w*|"
    r"pad|permute\w*|pin_memory|pixel_\w*shuffle|record_stream|repeat\w*|resize|roll|scalar_tensor|"
    r"select_\w*|set|slice_\w*|split\w*|squeeze|stack|take|tril\w*|triu\w*|unbind\w*|unfold\w*|unsqueeze|view\w*|"
    r"where|zero|zeros\w*|set_source_Tensor|is_\w+|sym_\w+|unsafe_split\w*|unsafe_chunk|_int_mm)_?"
)
_RANDOM: Final = "random numbers go by their place in the batch"
_WHY: Final = (
    (r"attention|flash|cudnn_rnn|_thnn|lstm|gru", "torch's kernel"),
    (r"norm", "a norm sums"),
    (r"softmax|logsumexp|nll|loss|entropy", "sums over classes"),
    (r"conv|pool|fft|upsample|grid_sample", "torch's kernel"),
    (r"topk|sort|kthvalue|median|mode|unique|^(max|min)$", "which of equal elements comes first is open"),
    (r"index_add|scatter|index_put|embedding_.*backward|histc", "the order of additions is open"),
)


@dataclass(frozen=True)
class Operation:
    """An operation that was not batch-invariant: its name as torch's dispatcher has it, why, how often."""

    name: str
    why: str
    calls: int


@dataclass(repr=False)
class Report(Tabular):
    """Operations that ran and were not batch-invariant. It prints as a table, and is true if there are any.

    Attributes:
        operations: each of them once, in the order of their first calls.
        invariant: how many calls of other operations ran.
    """

    invariant: int = 0
    _calls: dict[tuple[str, str], int] = field(default_factory=dict)

    _head = ("operation", "calls", "why")

    @property
    def operations(self) -> list[Operation]:
        return [Operation(name, why, count) for (name, why), count in self._calls.items()]

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, name: str, why: str) -> None:
        self._calls[name, why] = self._calls.get((name, why), 0) + 1

    @property
    def _title(self) -> str:
        if not self:
            return f"all {self.invariant} calls of torch's operations were batch-invariant"
        count = sum(self._calls.values())
        return f"not batch-invariant: {count} calls, of {count + self.invariant}"

    @property
    def _rows(self) -> list[tuple[str, ...]]:
        return [(each.name, str(each.calls), each.why) for each in self.operations]


def why_not(func: Any, tensors: list[torch.Tensor]) -> str:
    """Return why an operator may make other bits of a row in another batch, "" if it does not."""
    space, _, name = func.name().partition("::")
    base = name.partition(".")[0]
    if space == "tritile":
        return ""
    if space != "aten":
        return "not torch's own: tritile does not know it"
    if any(each.layout != torch.strided or each.is_nested for each in tensors) and not func.is_view:
        return "sparse or nested tensors"
    if base in overrides.PRODUCTS:  # its kernel reports what it leaves to torch
        here = {each.device.type.upper() for each in tensors}
        return "" if here <= overrides.installed() else f"a product on {', '.join(sorted(here)).lower()}"
    tags = func.tags
    if (
        torch.Tag.pointwise in tags
        or func.is_view
        or torch.Tag.inplace_view in tags
        or _EXACT.fullmatch(base)
    ):
        return ""
    if torch.Tag.nondeterministic_seeded in tags and "attention" not in base:
        return _RANDOM
    if tensors and not any(each.is_floating_point() or each.is_complex() for each in tensors):
        return ""  # sums of integers are exact in any order
    return next((why for pattern, why in _WHY if re.search(pattern, base)), "torch's kernel, which may sum")


class Watch(TorchDispatchMode):
    """Add each operation to a report."""

    def __init__(self, found: Report) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat = leaves_of((args, kwargs))
        why = why_not(func, [each for each in flat if isinstance(each, torch.Tensor)])
        before = sum(self._found._calls.values())
        result = func(*args, **kwargs)
        if why:
            self._found.add(func.name(), why)
        elif before == sum(self._found._calls.values()):  # nor did a kernel of ours report the call
            self._found.invariant += 1
        return result
