"""What grouped products should be: group by group, against float64."""

import itertools

import torch

from tests.reference import assert_product, values

# Offsets of 40 shared rows or columns: uneven, with empty groups, one group, less than all, and bad ones.
OFFSETS = {
    "uneven": [5, 18, 19, 40],
    "empty first and last": [0, 7, 40, 40],
    "all empty": [0, 0, 0],
    "one": [40],
    "one and a rest": [33],
    "a rest": [3, 3, 17, 30],
    "many": [2 * i for i in range(1, 20)],
    "decreasing": [30, 10, 35, 20],
    "past the end": [10, 90, 2**31 - 1],
    "below zero": [-5, 8, -(2**31), 25],
    "far below zero at first": [-(2**31), 8, 40],
    "bad throughout": [2**31 - 1, -1, 3],
}
SHARED = 40


def offsets(kind: str, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(OFFSETS[kind], dtype=torch.int32, device=device)


def ends_of(offs: torch.Tensor, total: int) -> list[int]:
    """Where each group starts, and the last one ends: offsets cut to 0..total, none below one before it."""
    ends = [0]
    for end in offs.tolist():
        ends.append(max(ends[-1], min(max(end, 0), total)))
    return ends


def operands(
    ragged: str, groups: int, sizes: tuple[int, int, int], dtype: torch.dtype, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """a and b of m, n and k, of which groups share one: "rows", "columns", "k", or "none"."""
    m, n, k = sizes
    of_a = (groups,) if ragged in ("columns", "none") else ()
    of_b = (groups,) if ragged in ("rows", "none") else ()
    return values((*of_a, m, k), dtype, 0, device), values((*of_b, k, n), dtype, 1, device)


def parts(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None, out: torch.Tensor
) -> tuple[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], torch.Tensor]:
    """Of each group its result, its a and its b; and what of the result belongs to none."""
    if offs is None:
        return list(zip(out, a, b, strict=True)), out[:0]
    shared = b.shape[1] if a.ndim == 3 else a.shape[0] if b.ndim == 3 else a.shape[1]
    ends = ends_of(offs, shared)
    cut = [slice(*pair) for pair in itertools.pairwise(ends)]
    if a.ndim == 3:
        return [(out[:, s], a[g], b[:, s]) for g, s in enumerate(cut)], out[:, ends[-1] :]
    if b.ndim == 3:
        return [(out[s], a[s], b[g]) for g, s in enumerate(cut)], out[ends[-1] :]
    return [(out[g], a[:, s], b[s]) for g, s in enumerate(cut)], out[:0]


def assert_groups(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None, precision: str = "ieee",
    *, fp8: bool = False,
) -> None:  # fmt: skip
    """Each group's product within its bound, and zeros where there is no group."""
    made, rest = parts(a, b, offs, out)
    for got, of_a, of_b in made:
        assert_product(got, of_a, of_b, precision, fp8=fp8)
    assert not rest.any()  # a NaN is not zero either


def shape_of(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None) -> tuple[int, ...]:
    """The shape of the products."""
    if offs is None or a.ndim == b.ndim == 2:
        return (len(a) if offs is None else len(offs), a.shape[-2], b.shape[-1])
    return (a.shape[-2], b.shape[-1])


def spoiled(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, ragged: str, shared: int = SHARED) -> None:
    """Fill what belongs to no group with NaN, and end each part of a shared K with an infinity or NaN.

    The latter reaches every product that reads past its own group, and none that does not.
    """
    last = ends_of(offs, shared)[-1]
    if ragged == "rows":
        a[last:] = float("nan")
    elif ragged == "columns":
        b[:, last:] = float("nan")
    else:
        a[:, last:] = float("nan")
        b[last:] = float("inf")
