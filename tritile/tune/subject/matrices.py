"""Read the operands of a call as plain matrices: groups, unpacked weights, scaled blocks."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from tritile.core.problem import BLOCK_SCALES, SCALE_K
from tritile.core.quantized import meaning
from tritile.core.views import GroupedCall, MatmulCall, QuantizedCall, View
from tritile.tune.subject.operands import matrix


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
    found = list(matrix(view, groups if view.batch_strides else 1))
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


def of_no_group(call: GroupedCall) -> torch.Tensor | None:
    """Return the rows of the result that belong to no group, and are to be zeros."""
    return matrix(call.out, 1)[0][_ends(call)[-1] :] if call.ragged == "m" else None


def weight_rows(call: QuantizedCall, start: int, stop: int) -> torch.Tensor:
    """Return unpacked rows of a weight in the dtype of its scales; `start` is a multiple of 16."""
    problem, end = call.problem, -(-stop // 16) * 16
    words = call.words.view(problem.words)[start // 8 : end // 8]
    scales = call.scales.view(problem.scales)[:, start:end]
    zeros = None if call.zeros is None else call.zeros.view(problem.scales)[:, start:end]
    shape = (stop - start, problem.k)
    return meaning(words, scales, zeros, shape, call.bits, call.group_size).to(scales.dtype)


def as_matrices(call: MatmulCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales of a by blocks of rows and of K, and of b by blocks of K and of columns."""
    assert call.scales is not None
    shared = BLOCK_SCALES[call.scales.shared]
    assert shared is not None
    (m, k), n = call.a.shape, call.b.shape[1]
    blocks = -(-k // SCALE_K)
    a, b = call.scales.a, call.scales.b
    of_a = a.as_strided((-(-m // shared[0]), blocks), call.scales.a_strides)
    of_b = b.as_strided((blocks, -(-n // shared[1])), call.scales.b_strides)
    return of_a, of_b


def applied(call: MatmulCall, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a and b in this dtype, each element times its scale, of a call with scales for each 128 of K."""
    assert call.scales is not None
    shared = BLOCK_SCALES[call.scales.shared]
    assert shared is not None
    (m, k), n = call.a.shape, call.b.shape[1]
    of_a, of_b = (scales.to(kind) for scales in as_matrices(call))
    of_a = of_a.repeat_interleave(shared[0], 0)[:m].repeat_interleave(SCALE_K, 1)[:, :k]
    of_b = of_b.repeat_interleave(SCALE_K, 0)[:k].repeat_interleave(shared[1], 1)[:, :n]
    return matrix(call.a, 1)[0].to(kind) * of_a, matrix(call.b, 1)[0].to(kind) * of_b
