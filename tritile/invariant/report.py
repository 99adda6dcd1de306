"""`tritile.batch_invariant.report`: which operations ran and were not batch-invariant."""

import re
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from tritile.core.markup import Tabular
from tritile.core.torch_private import OpOverload, TorchDispatchMode, is_composite, leaves_of
from tritile.invariant import overrides

# Operations that move, choose or compare elements, and sum nothing. Those that torch tags as pointwise, and
# views, are not listed here. Of equal elements `argmax` and `argmin` return the first.
_EXACT: Final = re.compile(
    r"(_to_copy|_unsafe_view|_reshape_alias|_local_scalar_dense|_assert\w*|_has_\w*|_new_\w*|"
    r"alias|all|amax|amin|any|arange|max|min|"
    r"_foreach_(abs|add|addcdiv|addcmul|clamp\w*|copy|div|lerp|maximum|minimum|mul|neg|pow|sign|sqrt|sub|zero)|"
    r"argmax|argmin|as_strided\w*|cat|clone|constant_pad_nd|contiguous|copy|count_nonzero|detach|"
    r"diagonal\w*|embedding|empty\w*|equal|expand\w*|eye|fill|flip|full\w*|gather|index|index_copy|index_fill|"
    r"index_select|isin|item|lift\w*|linspace|masked_fill|masked_select|narrow\w*|new_\w*|nonzero\w*|ones\w*|"
    r"pad|permute\w*|pin_memory|pixel_\w*shuffle|record_stream|repeat\w*|resize|roll|scalar_tensor|"
    r"select_\w*|set|slice_\w*|split\w*|squeeze|stack|take|tril\w*|triu\w*|unbind\w*|unfold|unsqueeze|view\w*|"
    r"where|zero|zeros\w*|set_source_Tensor|is_\w+|sym_\w+|unsafe_split\w*|unsafe_chunk|_int_mm)_?"
)
_RANDOM: Final = "random numbers go by their place in the batch"
_TIES: Final = "which of equal elements comes first is open"
_ADDS: Final = "the order of additions is open"
_OPEN: Final = (_RANDOM, _TIES)  # of integers, too
_ORDERS: Final = (
    (r"(topk|sort|argsort|kthvalue|median|nanmedian|mode|_?unique\w*)(\.\w+)?|(max|min)\.dim\w*", _TIES),
    (r"(index_add|scatter_(add|reduce)|_?index_put|embedding\w*_backward|histc|bincount)(\w|\.)*", _ADDS),
)
_WHY: Final = (
    (r"attention|flash|cudnn_rnn|_thnn|lstm|gru", "torch's kernel"),
    (r"norm", "a norm sums"),
    (r"softmax|logsumexp|nll|loss|entropy", "sums over classes"),
    (r"conv|pool|fft|upsample|grid_sample", "torch's kernel"),
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
        return f"not batch-invariant: {count} of {count + self.invariant} calls"

    @property
    def _rows(self) -> list[tuple[str, ...]]:
        return [(each.name, str(each.calls), each.why) for each in self.operations]


def why_not(func: Any, tensors: list[torch.Tensor], adds: bool = False) -> str:
    """Return why an operator may make other bits of a row in another batch, "" if it does not.

    `adds`: the call has `accumulate=True`.
    """
    space, _, name = func.name().partition("::")
    base = name.partition(".")[0]
    if space == "tritile":
        return ""
    if space not in ("aten", "prims"):
        return "not torch's own: tritile does not know it"
    if any(each.layout != torch.strided or each.is_nested for each in tensors):
        return "sparse or nested tensors"
    if base.strip("_").startswith("index_put") and not adds:
        return ""
    if why := next((why for pattern, why in _ORDERS if re.fullmatch(pattern, name)), ""):
        return why
    if torch.Tag.nondeterministic_seeded in func.tags and not re.search("attention|empty", base):
        return _RANDOM
    if torch.Tag.pointwise in func.tags or func.is_view or torch.Tag.inplace_view in func.tags:
        return ""
    if _EXACT.fullmatch(base):
        return ""
    return next((why for pattern, why in _WHY if re.search(pattern, base)), "torch's kernel, which may sum")


def _is_exact(values: Any) -> bool:
    """True if values hold tensors, and of integers only: their sums are exact in any order."""
    tensors = [each for each in leaves_of(values) if isinstance(each, torch.Tensor)]
    return bool(tensors) and not any(each.is_floating_point() or each.is_complex() for each in tensors)


class Watch(TorchDispatchMode):
    """Add each operation to a report."""

    supports_higher_order_operators = True

    def __init__(self, found: Report) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, found = kwargs or {}, self._found
        if not isinstance(func, OpOverload):  # an operator that takes functions, such as flex_attention
            found.add(str(func), "an operator that takes functions: tritile does not see inside")
            return func(*args, **kwargs)
        if is_composite(func):  # it consists of others: torch hands it over of inference tensors
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        tensors = [each for each in leaves_of((args, kwargs)) if isinstance(each, torch.Tensor)]
        overrides.last.is_ours, overrides.last.why = False, ""
        result = func(*args, **kwargs)
        base = func.name().removeprefix("aten::").partition(".")[0]
        if base in overrides.PRODUCTS:  # by torch's kernel, unless a kernel of ours has just made it
            why = "" if overrides.last.is_ours else f"torch's kernel: {overrides.last.why or _where(tensors)}"
        else:
            why = why_not(
                func, tensors, kwargs.get("accumulate") is True or (len(args) > 3 and args[3] is True)
            )
        if why and not (_is_exact((args, kwargs)) and _is_exact(result) and why not in _OPEN):
            found.add(func.name(), why)
        else:
            found.invariant += 1
        return result


def _where(tensors: list[torch.Tensor]) -> str:
    devices = {each.device.type for each in tensors}
    if not {each.upper() for each in devices} <= overrides.installed():
        return f"on {', '.join(sorted(devices))}"
    return "of sparse or nested tensors, or outside of tritile.batch_invariant(torch=True)"
