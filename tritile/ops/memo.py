"""The cache of prepared calls: one cache, one key.

A cached call costs one look-up and a launch. The key is coarse: the operation, sizes and options. Among the
launches of a key, the alignment of addresses and torch's own C++ guards of tensors find the right one.
"""

import random
import threading
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
    current_gpu,
    empty_strided_on_gpu,
    forward_level,
    fp32_precision,
    guard_of,
    increment_versions,
    is_deterministic,
    modes_entered,
)
from tritile.errors import OverlapError
from tritile.ops.checks import check_may_change, overlap, reach, same_memory
from tritile.ops.dispatch import TENSORS
from tritile.runtime.launch import Launch, SplitLaunch

_ADDED: Final = ("bias", "residual", "bias_up")  # each element is read just before out's is written
# The index of the first operand of each product, None for other operations.
_FIRST: Final = {
    op: next((i for i, (role, _) in enumerate(roles) if role == "a"), None) for op, roles in TENSORS.items()
}
_MAX_CALLS: Final = 64  # of one key and alignment
_MAX_ALIGNMENTS: Final = 256  # of one key
_RANDOM: Final = random.Random(0)  # our own: the program's random numbers stay as they are

Tensors = Sequence[Any]
ByTorch = Callable[..., torch.Tensor]  # takes the caller's tensors, then out unless it is None
Key = tuple[Any, ...]


def addresses_of(tensors: Tensors) -> list[Any]:
    """Return the address of each tensor, None for None."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


@dataclass(frozen=True, slots=True)
class CachedLaunch:
    """The launch of a prepared call, and the guards under which it may be used for another call.

    Indices are those of the caller's tensors, of which out is the last.

    - `unique` selects each tensor once, `guard` is torch's guard of these, and `duplicates` are pairs of
      indices that hold the same tensor.
    - `start`: the index of the first tensor with the address of out: out's own if no other has it.
    - `precision`: torch's precision of fp32; None if it does not matter.
    - `run`: the launch, whose `at` takes addresses; or, if `by_torch`, torch's call, a `ByTorch`.
    - `select` selects the addresses that the launch takes, in its order.
    - `reaches`: the length in bytes of each tensor, 0 for one that is not read or has the address of out.
      `read`: index and reach of the others.
    """

    unique: Callable[[Sequence[Any]], Sequence[torch.Tensor]]
    guard: Callable[..., bool]
    duplicates: tuple[tuple[int, int], ...]
    start: int
    precision: str | None
    run: Any
    by_torch: bool
    select: Callable[[Sequence[Any]], tuple[int, ...]]
    reaches: tuple[int, ...]
    read: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class CachedLaunches:
    """The cached launches of one key, the latest first.

    `any_alignment` are those for which alignment does not matter. The others are found by the alignment
    (address modulo 16 bytes) of the tensors at `indices`, which they read. If there is no room, a new launch
    replaces a random one: if it replaced the oldest, calls that take turns would never be found.
    """

    __slots__ = ("any_alignment", "by_alignment", "indices", "select")

    def __init__(self) -> None:
        self.any_alignment: tuple[CachedLaunch, ...] = ()
        self.indices: tuple[int, ...] = ()
        self.select: Callable[[Sequence[Any]], tuple[int, ...]] = lambda _: ()  # the addresses at `indices`
        self.by_alignment: dict[tuple[int, ...], tuple[CachedLaunch, ...]] = {}

    def __iter__(self) -> Iterator[CachedLaunch]:
        yield from self.any_alignment
        for cached in self.by_alignment.values():
            yield from cached

    def add(self, cached: CachedLaunch, addresses: Sequence[Any], indices: Sequence[int]) -> None:
        """Add a launch. `indices` are those of tensors whose alignment matters for it."""
        if not indices:
            self.any_alignment = _with(cached, self.any_alignment)
            return
        if not {*indices} <= {*self.indices}:
            self.by_alignment = {}  # launches under a shorter key are prepared again under the longer one
            self.indices = tuple(sorted({*self.indices, *indices}))
            self.select = itemgetter(*self.indices, self.indices[0])  # a single index would give no tuple
        alignment = tuple([at & 15 for at in self.select(addresses)])
        if alignment not in self.by_alignment and len(self.by_alignment) >= _MAX_ALIGNMENTS:
            # Another thread may have dropped it.
            self.by_alignment.pop(_RANDOM.choice(list(self.by_alignment)), None)
        self.by_alignment[alignment] = _with(cached, self.by_alignment.get(alignment, ()))


def _with(cached: CachedLaunch, others: tuple[CachedLaunch, ...]) -> tuple[CachedLaunch, ...]:
    if len(others) < _MAX_CALLS:
        return (cached, *others)
    dropped = _RANDOM.randrange(_MAX_CALLS)
    return (cached, *others[:dropped], *others[dropped + 1 :])


CALLS: Final[dict[Key, CachedLaunches]] = new_memo()


def launch_cached(
    op: str, tensors: Tensors, out: Any, options: Key, on_miss: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Launch a call that was prepared before, in the present state of torch; else return what `on_miss` does.

    `options` are all arguments that are not tensors. Torch's guards, in C++, compare types, dtypes, devices,
    sizes, strides, `requires_grad`, and each tensor's dispatch keys in this thread. The keys show laziness,
    modes, autocast and transforms, so a call that torch must see is never mistaken for one that it need not.
    Raise OverlapError if out overlaps an input this time.

    `on_miss` takes the first four arguments, and the key for `cache_launch`: None if the call is not to be
    cached.
    """
    if is_dynamo_compiling() or forward_level() >= 0:
        return on_miss(op, tensors, out, options, None)
    all_tensors = (*tensors, out)
    try:
        sizes = all_tensors[0].shape, all_tensors[1 if len(all_tensors) > 2 else 0].shape
        key = (op, options, rules(), is_deterministic(), is_grad_enabled(), sizes, *map(type, all_tensors))
        launches = CALLS.get(key)
    except (RuntimeError, AttributeError, TypeError):  # an argument that the operation refuses
        return on_miss(op, tensors, out, options, None)
    if launches is None:
        return on_miss(op, tensors, out, options, key)
    candidates, addresses = launches.any_alignment, None
    while True:
        for cached in candidates:
            if not cached.guard(*cached.unique(all_tensors)):
                continue
            if cached.duplicates and any(all_tensors[i] is not all_tensors[j] for i, j in cached.duplicates):
                continue
            if not (cached.precision is None or cached.precision == default_precision()):
                continue
            if out is not None and not _may_write(cached, op, tensors, out):
                continue
            if cached.by_torch:
                try:
                    result: torch.Tensor = cached.run(*tensors) if out is None else cached.run(*tensors, out)
                    return result
                except torch.OutOfMemoryError:
                    raise
                except (RuntimeError, ValueError):  # tritile's kernel runs instead, and is found before this
                    return on_miss(op, tensors, out, options, key)
            addresses = addresses or addresses_of(all_tensors)
            if out is None:
                out = new_output(cached.shape, cached.strides, cached.dtype, cached.device)
                addresses[-1] = out.data_ptr()
            cached.run.at(cached.select(addresses))
            return out
        if addresses is not None:
            return on_miss(op, tensors, out, options, key)
        try:
            addresses = addresses_of(all_tensors)
        except (RuntimeError, AttributeError):  # a tensor without memory, as in a transform, or no tensor
            return on_miss(op, tensors, out, options, key)
        alignment = tuple([at & 15 for at in launches.select(addresses)])
        candidates = launches.by_alignment.get(alignment, ())


def cache_launch(
    op: str, key: Key | None, run: Launch | SplitLaunch | ByTorch, call: Call, tensors: Tensors, out: Any,
    result: torch.Tensor, by_torch: bool = False, any_alignment: bool = True,
) -> None:  # fmt: skip
    """Cache, under the key of `launch_cached`, the launch of a call, or torch's call if `by_torch`.

    `tensors` and `out` are the caller's. Nothing is cached of a plan that is not to be kept. `any_alignment`:
    it may be used for plain matrices at any alignment, if torch makes it.
    """
    if key is None or not COMPARES or not may_be_kept():
        return
    by_role = {role: i for i, (role, _) in enumerate(TENSORS[op])} | {"out": len(tensors)}
    order = tuple(by_role[memory.buffer] for memory in call.memory)
    addresses = addresses_of((*tensors, result))
    if any(addresses[i] != memory.address for i, memory in zip(order, call.memory, strict=True)):
        return  # the launch reads a copy
    reaches = [reach(tensor) if i in order else 0 for i, tensor in enumerate((*tensors, result))]
    start = addresses.index(addresses[-1])
    if start < len(tensors):  # a tensor that is overwritten, or not read: other calls start elsewhere
        reaches[start] = 0
    if out is None:
        addresses[-1] = None
    all_tensors, indices = (*tensors, out), dict[int, int]()
    for i, tensor in enumerate(all_tensors):
        if tensor is not None:
            indices.setdefault(id(tensor), i)
    firsts = list(indices.values())  # torch's guard takes each tensor once
    unique = itemgetter(*firsts) if len(firsts) > 1 else itemgetter(slice(firsts[0], firsts[0] + 1))
    first = _FIRST[op]
    by_precision = first is not None and tensors[first].dtype == torch.float32
    read = range(len(all_tensors)) if by_torch else order
    aligned = [i for i in read if all_tensors[i] is not None]
    added = tensors[4:] if op == "linear_quantized" else tensors[2:]  # a packed weight has three parts
    is_plain = tensors[0].element_size() > 1 and all(tensor is None for tensor in added)
    if by_torch and any_alignment and is_plain:
        aligned = []  # torch multiplies two plain matrices at any alignment
    cached = CachedLaunch(
        unique=unique,
        guard=guard_of(*unique(all_tensors)),
        duplicates=tuple(
            (i, indices[id(t)]) for i, t in enumerate(all_tensors) if t is not None and i not in firsts
        ),
        start=start,
        precision=default_precision() if by_precision else None,
        run=run,
        by_torch=by_torch,
        select=itemgetter(*order),
        reaches=tuple(reaches),
        read=tuple((i, length) for i, length in enumerate(reaches[:-1]) if length),
        shape=tuple(result.shape),
        strides=result.stride(),
        dtype=result.dtype,
        device=result.device,
    )
    launches = CALLS.get(key)
    if launches is None:
        launches = CALLS[key] = CachedLaunches()
    launches.add(cached, addresses, aligned)


class _Stopgaps(threading.local):
    count = 0


stopgaps: Final = _Stopgaps()  # plans of this thread so far that later calls are to make anew


def may_be_kept() -> bool:
    """True if a plan made now may be kept: not a stopgap, of a mode that measures, during a capture."""
    return not (current_mode() in ("tune", "spread") and capturing())


def default_precision() -> str:
    """Return torch's setting for fp32: "ieee", "tf32", or "none" if it is not set."""
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
    """Tell autograd that out is overwritten, as torch's out= does; return out.

    Raise GradientError for an inference tensor outside of `torch.inference_mode()`.
    """
    if out.is_inference():
        check_may_change(op, out)
    else:
        increment_versions((out,))
    return out


def _may_write(cached: CachedLaunch, op: str, tensors: Tensors, out: torch.Tensor) -> bool:
    """True, with out marked as written, unless out no longer starts at the tensor that it did.

    Raise OverlapError if it overlaps an input.
    """
    at = out.data_ptr()
    if cached.start != len(tensors) and tensors[cached.start].data_ptr() != at:
        return False
    end = at + cached.reaches[-1]
    for index, length in cached.read:
        other = tensors[index].data_ptr()
        if other < end and at < other + length:
            check_out_apart(op, out, tensors, cached.reaches)
            break
    mark_written(op, out)
    return True


def check_out_apart(op: str, out: torch.Tensor, tensors: Tensors, reaches: Sequence[int]) -> None:
    """Raise OverlapError if out overlaps an input, unless it is exactly the memory of a tensor that is added.

    A tensor with a reach of 0 bytes is not read.
    """
    for (role, name), tensor, length in zip(TENSORS[op], tensors, reaches, strict=False):
        if length and overlap(out, tensor) and not (role in _ADDED and same_memory(out, tensor)):
            allowed = f", or exactly that of {name}" if role in _ADDED else ""
            raise OverlapError(f"{op}: out overlaps {name}: expected memory of its own{allowed}")


def reaches_of(tensors: Tensors, unread: Any = None) -> tuple[int, ...]:
    """Return the length of each tensor in bytes: 0 for None, for an empty tensor, and for `unread`."""
    return tuple(
        0 if tensor is None or tensor is unread or not tensor.numel() else reach(tensor) for tensor in tensors
    )
