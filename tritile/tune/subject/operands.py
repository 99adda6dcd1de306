"""Operands of a problem on the GPU: copies of a call, guarded ones, and views as plain matrices."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch

from tritile.core.call import Call, GroupedCall, QuantizedCall, View, call_for
from tritile.core.device import Device
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import ITEMSIZE, GroupedProblem, MatmulProblem, Tiled, ends_of
from tritile.core.quantized import meaning
from tritile.tuner.measure import outputs, shipping
from tritile.tuner.measure.timing import Run, copies_for

_CHECKED_ROWS: Final = 256  # of a product, in a sample
_LARGEST: Final = 768  # rows or columns of a ragged sibling: several tiles, and little work


def random_elements(dtype: str, elements: int) -> torch.Tensor:
    """Return random data: normal for floating types, the whole range for integers."""
    kind = getattr(torch, dtype)
    if kind.is_floating_point and ITEMSIZE.get(dtype) != 1:
        return torch.randn(elements, dtype=kind, device="cuda")
    if kind.is_floating_point:
        return torch.randn(elements, device="cuda", dtype=torch.bfloat16).to(kind)
    info = torch.iinfo(kind)
    low, high = max(info.min, -(2**62)), min(info.max, 2**62)
    return torch.randint(low, high, (elements,), dtype=kind, device="cuda")


def _filled(problem: Tiled, make: Callable[[str, int], torch.Tensor]) -> Call:
    call = call_for(problem, make)
    if isinstance(call, QuantizedCall):
        call.scales.tensor.mul_(2.0**-call.bits)  # so that results stay well within the range of float16
    return with_group_ends(call)


def copies_of(problem: Tiled, device: Device, count: int | None = None) -> list[Call]:
    """Return calls, each on its own random operands; by default as many as fill the L2 cache three times."""
    count = copies_for(problem.bytes, device.l2_bytes) if count is None else count
    pools: list[torch.Tensor] = []  # of each operand: (copies, elements)

    def pooled(dtype: str, elements: int) -> torch.Tensor:
        padded = -(-elements // 256) * 256
        pools.append(random_elements(dtype, count * padded).view(count, padded))
        return pools[-1][0, :elements]

    def copied(number: int) -> Call:
        own = iter(pools)
        return _filled(problem, lambda dtype, elements: next(own)[number, :elements])

    return [_filled(problem, pooled), *map(copied, range(1, count))]


def with_group_ends(call: Call, load: str = "skewed") -> Call:
    """Return the call, after writing the ends of its groups, if any, to its offsets.

    `load` is one that `tritile.core.problem.ends_of` takes.
    """
    if isinstance(call, GroupedCall):
        call.offs.tensor.copy_(
            torch.tensor(ends_of(load, call.groups, call.a.shape[0]), dtype=torch.int32, device="cpu")
        )
    return call


def run_of(launch: Any) -> Run:
    return lambda call: launch(*call.tensors)


def matrix(view: View, batch: int) -> torch.Tensor:
    """Return the view as a (batch, rows, columns) tensor."""
    strides = (*(view.batch_strides or (0,)), *view.strides)
    return view.tensor.as_strided((batch, *view.shape), strides)


def sampled(rows: int, device: torch.device) -> torch.Tensor:
    """Return the indices of rows to check, spread evenly over all `rows`."""
    places = torch.linspace(0, rows - 1, min(rows, _CHECKED_ROWS), dtype=torch.float64, device=device)
    return places.round().long()


def poison(call: Call) -> None:
    """Fill the output's memory with NaN, or -1 if it is of integers, so that unwritten elements show."""
    out = call.out.tensor
    outputs.poison(out, out.new_zeros(()))


def guarded(problem: Tiled) -> tuple[Call, shipping.GuardedMemory]:
    """Return a call on random operands, and its memory, with guards around each buffer."""
    tensors = _filled(problem, random_elements).tensors
    copies, memory = shipping.guarded(tensors, device=tensors[0].device.type)
    own = iter(copies)
    return call_for(problem, lambda dtype, elements: next(own)), memory


def _less(size: int, most: int = _LARGEST) -> int:
    """Reduce a size by a multiple of 16, which keeps alignments, so that its last tile is partial."""
    return size - 16 - max(0, size - most) // 16 * 16 if size > 32 else size


def _packed(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return strides without gaps, in the same order; 0 stays 0."""
    packed, reach = list(strides), 1
    for i in sorted(range(len(shape)), key=lambda i: (strides[i], -i)):
        if strides[i]:
            packed[i], reach = reach, reach * shape[i]
    return tuple(packed)


def ragged(problem: Any) -> Tiled:
    """Return a small problem of the same alignments, the last tiles of which are all partial."""
    if isinstance(problem, PermuteProblem):
        shape = [_less(size) for size in problem.shape]
        x, out = (_packed(shape, steps) for steps in (problem.x_strides, problem.out_strides))
        return PermuteProblem.of(shape, x, out, problem.itemsize, widen=False)
    if isinstance(problem, MatmulProblem):
        problem = replace(problem, batch=min(problem.batch, 3))
    if isinstance(problem, GroupedProblem):
        problem = replace(problem, groups=min(problem.groups, 5))
    k = _less(problem.k, problem.k)
    smaller: Tiled = replace(problem, m=_less(problem.m), n=_less(problem.n), k=k)
    return smaller


class Group(NamedTuple):
    """The matrices of a group: out = a @ b."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor


def _ends(call: GroupedCall) -> list[int]:
    total = call.a.shape[0]
    return list(itertools.accumulate((min(max(end, 0), total) for end in call.offs.tensor.tolist()), max))


def groups_of(call: GroupedCall) -> Iterator[Group]:
    """Yield every group of a call. Waits for the GPU to read the groups' ends."""
    ends, a, out = _ends(call), matrix(call.a, 1)[0], matrix(call.out, 1)[0]
    for b, start, end in zip(matrix(call.b, call.groups), [0, *ends], ends, strict=False):
        yield Group(a[start:end], b, out[start:end])


def of_no_group(call: GroupedCall) -> torch.Tensor:
    """Return the rows of the result that belong to no group and should be zero."""
    return matrix(call.out, 1)[0][_ends(call)[-1] :]


def weight_rows(call: QuantizedCall, start: int, stop: int) -> torch.Tensor:
    """Return unpacked rows of a weight in float32, not rounded; `start` is a multiple of 16."""
    problem, end = call.problem, -(-stop // 16) * 16
    words = call.words.tensor.view(problem.words)[start // 8 : end // 8]
    scales = call.scales.tensor.view(problem.scales)[:, start:end]
    zeros = None if call.zeros is None else call.zeros.tensor.view(problem.scales)[:, start:end]
    shape = (stop - start, problem.k)
    return meaning(words, scales, zeros, shape, call.bits, call.group_size)
