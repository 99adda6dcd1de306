"""Remember prepared calls: one cache, one key.

A call that was prepared before costs one look-up and a launch. The key is coarse: it finds the calls of an
operation with these sizes and options. Among these, the alignment of addresses and torch's own test of
tensors, in C++, find the right one.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final

import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling

from tritile.core.call import Call
from tritile.core.device import capturing
from tritile.core.forgetting import new_memo
from tritile.core.settings import current_mode, rules
from tritile.core.torch_private import (
    COMPARES,
    alike,
    current_gpu,
    empty_strided_on_gpu,
    forward_level,
    fp32_precision,
    increment_versions,
    is_deterministic,
    modes_entered,
)
from tritile.errors import OverlapError
from tritile.ops.checks import check_may_change, overlap, reach, same_memory
from tritile.ops.dispatch import TENSORS
from tritile.runtime.launch import Launch, SplitLaunch

_ADDED: Final = ("bias", "residual", "bias_up")  # an element is read just before out's is written
# The place of the first operand of each product, None for other operations.
_FIRST: Final = {
    op: next((i for i, (role, _) in enumerate(each) if role == "a"), None) for op, each in TENSORS.items()
}
_MOST: Final = 64  # calls of one key and alignment
_MOST_ALIGNMENTS: Final = 256  # of one key
_RANDOM: Final = random.Random(0)  # of ours: a program's own numbers stay as they are

Tensors = Sequence[Any]
ByTorch = Callable[..., torch.Tensor]  # takes the caller's tensors, and out behind them where it is given
Key = tuple[Any, ...]


def addresses_of(tensors: Tensors) -> list[Any]:
    """Return where each tensor begins, None for None."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


@dataclass(frozen=True, slots=True)
class Ready:
    """How a prepared call is launched, and the guards by which a call is like it.

    Places are those of the caller's tensors, out being the last.

    - `distinct` takes each tensor once out of all, `alike` is torch's test of these, and `same` are pairs of
      places that have one tensor.
    - `start`: the place of the first tensor that begins where out does, out's own where it alone does.
    - `setting`: torch's precision of fp32; None where it does not count.
    - `run`: the launch, whose `at` takes addresses; or `by_torch`, torch's call, a `ByTorch`.
    - `pick` takes the addresses out of all, in the order of the launch.
    - `reaches`: the length in bytes of each tensor, 0 for one that is not read or begins where out does.
      `read`: the place and reach of those that are.
    """

    distinct: Callable[[Sequence[Any]], Sequence[torch.Tensor]]
    alike: Callable[..., bool]
    same: tuple[tuple[int, int], ...]
    start: int
    setting: str | None
    run: Any
    by_torch: bool
    pick: Callable[[Sequence[Any]], tuple[int, ...]]
    reaches: tuple[int, ...]
    read: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Prepared:
    """Hold the prepared calls of one key, the latest first.

    `free` are those for which alignment does not count. The others are found by where the tensors at
    `places`, which they read, begin within 16 bytes. Where there is no room, a new call takes the place of
    any other: if the oldest made room, calls that come in turns would never be found.
    """

    __slots__ = ("by_low", "free", "pick", "places")

    def __init__(self) -> None:
        self.free: tuple[Ready, ...] = ()
        self.places: tuple[int, ...] = ()
        self.pick: Callable[[Sequence[Any]], tuple[int, ...]] = lambda _: ()  # the addresses at `places`
        self.by_low: dict[tuple[int, ...], tuple[Ready, ...]] = {}

    def __iter__(self) -> Iterator[Ready]:
        return (ready for each in (self.free, *self.by_low.values()) for ready in each)

    def add(self, ready: Ready, addresses: Sequence[Any], places: Sequence[int]) -> None:
        """Remember a call. `places` are those of tensors whose alignment counts for it."""
        if not places:
            self.free = _with(ready, self.free)
            return
        if not {*places} <= {*self.places}:
            self.by_low = {}  # those of fewer places are met again under a longer key
            self.places = tuple(sorted({*self.places, *places}))
            self.pick = itemgetter(*self.places, self.places[0])  # of one place it would not give a tuple
        low = tuple([at & 15 for at in self.pick(addresses)])
        if low not in self.by_low and len(self.by_low) >= _MOST_ALIGNMENTS:
            self.by_low.pop(_RANDOM.choice(list(self.by_low)), None)  # another thread may have dropped it
        self.by_low[low] = _with(ready, self.by_low.get(low, ()))


def _with(ready: Ready, others: tuple[Ready, ...]) -> tuple[Ready, ...]:
    place = _RANDOM.randrange(_MOST)
    kept = others if len(others) < _MOST else others[:place] + others[place + 1 :]
    return (ready, *kept)


CALLS: Final[dict[Key, Prepared]] = new_memo()


def recall(
    op: str, tensors: Tensors, out: Any, options: Key, otherwise: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Launch a call that was prepared before, in this state of torch's; else call `otherwise`.

    `options` are all arguments that are not tensors. Torch's own test, in C++, compares types, dtypes,
    devices, sizes, strides, `requires_grad`, and each tensor's dispatch keys in this thread. These show
    laziness, modes, autocast and transforms: a call that torch must see is never taken for one that it need
    not. Raise OverlapError where out, this time, overlaps an input.

    `otherwise` takes the first four arguments and the key, for `remember`: None for a call that is not to be
    remembered.
    """
    if is_dynamo_compiling() or forward_level() >= 0:
        return otherwise(op, tensors, out, options, None)
    all_tensors = (*tensors, out)
    try:
        sizes = all_tensors[0].shape, all_tensors[len(all_tensors) > 2].shape
        key = (op, options, rules(), is_deterministic(), is_grad_enabled(), sizes, *map(type, all_tensors))
        prepared = CALLS.get(key)
    except (RuntimeError, AttributeError, TypeError):  # an argument that the operation refuses
        return otherwise(op, tensors, out, options, None)
    if prepared is None:
        return otherwise(op, tensors, out, options, key)
    calls, addresses = prepared.free, None
    while True:
        for ready in calls:
            if not ready.alike(*ready.distinct(all_tensors)):
                continue
            if ready.same and any(all_tensors[i] is not all_tensors[j] for i, j in ready.same):
                continue
            if not (ready.setting is None or ready.setting == default_precision()):
                continue
            if out is not None and not _may_write(ready, op, tensors, out):
                continue
            if ready.by_torch:
                try:
                    made: torch.Tensor = ready.run(*tensors) if out is None else ready.run(*tensors, out)
                    return made
                except torch.OutOfMemoryError:
                    raise
                except (
                    RuntimeError,
                    ValueError,
                ):  # tritile's kernel runs then, and is remembered before this
                    return otherwise(op, tensors, out, options, key)
            addresses = addresses or addresses_of(all_tensors)
            if out is None:
                out = new_output(ready.shape, ready.strides, ready.dtype, ready.device)
                addresses[-1] = out.data_ptr()
            ready.run.at(ready.pick(addresses))
            return out
        if addresses is not None:
            return otherwise(op, tensors, out, options, key)
        try:
            addresses = addresses_of(all_tensors)
        except (
            RuntimeError,
            AttributeError,
        ):  # a tensor without memory, as within a transform, or none at all
            return otherwise(op, tensors, out, options, key)
        calls = prepared.by_low.get(tuple([at & 15 for at in prepared.pick(addresses)]), ())


def remember(
    op: str, key: Key | None, how: Launch | SplitLaunch | ByTorch, call: Call, tensors: Tensors, out: Any,
    result: torch.Tensor, by_torch: bool = False,
) -> None:  # fmt: skip
    """Remember under the key of `recall` how a call is made: its launch, or `by_torch` torch's call.

    `tensors` and `out` are the caller's. Nothing is remembered of a plan that is not to be kept.
    """
    if key is None or not COMPARES or not may_be_kept():
        return
    indices = {role: i for i, (role, _) in enumerate(TENSORS[op])} | {"out": len(tensors)}
    order = tuple(indices[memory.buffer] for memory in call.memory)
    addresses = addresses_of((*tensors, result))
    if any(addresses[i] != memory.address for i, memory in zip(order, call.memory, strict=True)):
        return  # the launch reads a copy
    reaches = [reach(tensor) if i in order else 0 for i, tensor in enumerate((*tensors, result))]
    start = addresses.index(addresses[-1])
    if start < len(tensors):  # a tensor that is overwritten, or not read: other calls start elsewhere
        reaches[start] = 0
    if out is None:
        addresses[-1] = None
    all_tensors, places = (*tensors, out), dict[int, int]()
    for i, tensor in enumerate(all_tensors):
        if tensor is not None:
            places.setdefault(id(tensor), i)
    firsts = list(places.values())  # torch's test takes each tensor once
    distinct = itemgetter(*firsts) if len(firsts) > 1 else itemgetter(slice(firsts[0], firsts[0] + 1))
    first = _FIRST[op]
    by_setting = first is not None and tensors[first].dtype == torch.float32
    read = range(len(all_tensors)) if by_torch else order
    aligned = [i for i in read if all_tensors[i] is not None]
    added = tensors[4:] if op == "linear_quantized" else tensors[2:]  # a packed weight has three parts
    if by_torch and tensors[0].element_size() > 1 and all(tensor is None for tensor in added):
        aligned = []  # a product of two matrices is as good wherever these begin
    ready = Ready(
        distinct=distinct,
        alike=alike(*distinct(all_tensors)),
        same=tuple(
            (i, places[id(t)]) for i, t in enumerate(all_tensors) if t is not None and i not in firsts
        ),
        start=start,
        setting=default_precision() if by_setting else None,
        run=how,
        by_torch=by_torch,
        pick=itemgetter(*order),
        reaches=tuple(reaches),
        read=tuple((i, far) for i, far in enumerate(reaches[:-1]) if far),
        shape=tuple(result.shape),
        strides=result.stride(),
        dtype=result.dtype,
        device=result.device,
    )
    prepared = CALLS.get(key)
    if prepared is None:
        prepared = CALLS[key] = Prepared()
    prepared.add(ready, addresses, aligned)


def may_be_kept() -> bool:
    """True if a plan made now may be kept: not a stopgap that mode "tune" uses during a capture."""
    return not (current_mode() == "tune" and capturing())


def default_precision() -> str:
    """Return torch's own setting for fp32: "ieee", "tf32", or "none" where nobody set it."""
    if fp32_precision is None:  # the other way saves a microsecond
        return torch.backends.cuda.matmul.fp32_precision
    return fp32_precision("cuda", "matmul")


# --- The output ---


def new_output(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return a new output on a GPU, its elements not yet written."""
    if empty_strided_on_gpu is not None and device.index == current_gpu() and modes_entered() == 0:
        return empty_strided_on_gpu(shape, strides, dtype)
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def mark_written(op: str, out: torch.Tensor) -> torch.Tensor:
    """Have autograd know that out is overwritten, as torch's own out= does; return out.

    Raise GradientError for an inference tensor outside of `torch.inference_mode()`.
    """
    if out.is_inference():
        check_may_change(op, out)
    else:
        increment_versions((out,))
    return out


def _may_write(ready: Ready, op: str, tensors: Tensors, out: torch.Tensor) -> bool:
    """True, with out marked as written, unless it begins elsewhere than the tensor that it was before.

    Raise OverlapError where it overlaps an input.
    """
    at = out.data_ptr()
    if ready.start != len(tensors) and tensors[ready.start].data_ptr() != at:
        return False
    end = at + ready.reaches[-1]
    for index, far in ready.read:
        other = tensors[index].data_ptr()
        if other < end and at < other + far:
            check_out_apart(op, out, tensors, ready.reaches)
            break
    mark_written(op, out)
    return True


def check_out_apart(op: str, out: torch.Tensor, tensors: Tensors, reaches: Sequence[int]) -> None:
    """Raise OverlapError where out overlaps an input. It may be exactly a tensor that is added.

    A tensor with a reach of 0 bytes is not read.
    """
    for (role, name), tensor, far in zip(TENSORS[op], tensors, reaches, strict=False):
        if far and overlap(out, tensor) and not (role in _ADDED and same_memory(out, tensor)):
            allowed = f", or exactly that of {name}" if role in _ADDED else ""
            raise OverlapError(f"{op}: out overlaps {name}: expected memory of its own{allowed}")


def reaches_of(tensors: Tensors, unread: Any = None) -> tuple[int, ...]:
    """Return the length of each tensor in bytes: 0 for None, for an empty tensor, and for `unread`."""
    return tuple(
        0 if tensor is None or tensor is unread or not tensor.numel() else reach(tensor) for tensor in tensors
    )
