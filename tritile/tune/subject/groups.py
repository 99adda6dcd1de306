"""Check products of groups, each group by a float64 product of its own."""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from tritile.core.views import GroupedCall, View
from tritile.tune.subject.operands import matrix, sampled

_CHECKED_GROUPS = 8


class Group(NamedTuple):
    """Hold a group's matrices, where out is a times b, and the scales of its rows and columns, if any."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    scales: tuple[torch.Tensor, torch.Tensor] | None


def _ends(call: GroupedCall) -> list[int]:
    """Return where groups end in the shared dimension, within it and in ascending order."""
    total = call.a.shape[0 if call.ragged == "m" else 1]
    return list(itertools.accumulate((min(max(end, 0), total) for end in call.offs.tolist()), max))


def _matrices(view: View, groups: int) -> list[torch.Tensor]:
    count = groups if view.batch_strides else 1
    found = list(matrix(view, count))
    return found if view.batch_strides else found * groups


def _scales(call: GroupedCall) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
    if call.scales is None:
        return [None] * call.groups
    sizes = call.a.shape[0], call.b.shape[1]
    rows, columns = (
        [own.tensor.reshape(-1)[g * own.stride :][:size] for g in range(call.groups)]
        for own, size in zip(call.scales, sizes, strict=True)
    )
    return list(zip(rows, columns, strict=True))


def groups_of(call: GroupedCall) -> Iterator[Group]:
    """Yield every group of a call. Waits for the GPU, to read where the groups end."""
    parts = (_matrices(view, call.groups) for view in (call.a, call.b, call.out))
    whole = zip(*parts, _scales(call), strict=True)
    if call.ragged == "none":
        yield from itertools.starmap(Group, whole)
        return
    ends = _ends(call)
    for (a, b, out, scales), start, end in zip(whole, [0, *ends], ends, strict=False):
        if call.ragged == "k":
            yield Group(a[:, start:end], b[start:end], out, scales)
        else:
            own = scales and (scales[0][start:end], scales[1])
            yield Group(a[start:end], b, out[start:end], own)


def _left_over(call: GroupedCall) -> bool:
    """Tell whether rows of no group hold anything but zeros."""
    if call.ragged != "m":
        return False
    (out,) = matrix(call.out, 1)
    return bool(out[_ends(call)[-1] :].any())


def grouped_error(call: GroupedCall) -> float:
    """Return |out - a b| / |a b| over some rows of some groups, by float64 products.

    Infinite where out has a NaN, and where rows of no group are not zero.
    """
    if _left_over(call):
        return math.inf
    made = [group for group in groups_of(call) if group.out.numel()]
    worst = norm = 0.0
    for group in made[:: max(1, len(made) // _CHECKED_GROUPS)]:
        if not bool(torch.isfinite(group.out.sum(dtype=torch.float32))):
            return math.inf
        rows = sampled(len(group.out), group.out.device)
        wanted = group.a[rows].double() @ group.b.double()
        if group.scales is not None:
            by_row, by_column = (scale.double() for scale in group.scales)
            wanted *= by_row[rows, None] * by_column
        worst += float((group.out[rows].double() - wanted).square().sum())
        norm += float(wanted.square().sum())
    return math.sqrt(worst / norm) if norm else float(worst > 0)
