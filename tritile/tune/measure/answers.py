"""Check answers of kernels: poison outputs before a launch, and compare them with a reference after it."""

import functools
import math
from typing import Final

import torch

from tritile.errors import TuningError

WRONG: Final = "wrong answer"  # begins the reason of a config whose result differs
OUTSIDE: Final = "wrote outside the memory of its arguments"
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether the memory from the first to the last element of `a` meets that of `b`."""

    def span(tensor: torch.Tensor) -> tuple[int, int]:
        steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        return tensor.data_ptr(), tensor.data_ptr() + (steps + 1) * tensor.itemsize * bool(tensor.numel())

    (a_first, a_end), (b_first, b_end) = span(a), span(b)
    return a_first < b_end and b_first < a_end


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """View unsigned integers as signed ones, for which torch has operations."""
    return tensor.view(_SIGNED.get(tensor.dtype, tensor.dtype))


def poison(out: torch.Tensor, wanted: torch.Tensor) -> None:
    """Fill an output with values that are wrong everywhere, so that elements left unwritten show."""
    if out.is_floating_point():
        out.fill_(float("nan"))
    else:
        _bits(out).copy_(~_bits(wanted.to(out.dtype)))


def allowed_error(dtype: torch.dtype) -> float:
    """Return the relative error allowed by default: four roundings of the result's type, none of integers.

    16 roundings for fp32, as sums in another order differ by several.
    """
    if not dtype.is_floating_point:
        return 0.0
    return (16 if dtype == torch.float32 else 4) * torch.finfo(dtype).eps


def error_of(name: str, got: torch.Tensor, wanted: torch.Tensor, tolerance: float | None) -> float:
    """Return the relative error |got - wanted| / |wanted|, the larger of the 2-norm's and the maximum norm's.

    The maximum norm shows a few wrong elements among many right ones. Raises TuningError where the error is
    above `tolerance`, by default `allowed_error`.
    """
    kind, wanted = got.dtype, wanted.to(got.dtype)
    allowed = allowed_error(kind) if tolerance is None else tolerance
    error = _distance(got, wanted)
    if not error and not kind.is_floating_point and not torch.equal(got, wanted):
        error = math.ulp(0.0)  # doubles do not tell all 64-bit integers apart
    if not error <= allowed:
        first = _first_wrong(name, got, wanted, allowed)
        raise TuningError(f"{WRONG}: relative error of {name} {error:.3g}, above {allowed:.3g}; {first}")
    return error


def _first_wrong(name: str, got: torch.Tensor, wanted: torch.Tensor, allowed: float) -> str:
    """Name the first element that is further off than the maximum norm allows, else the one furthest off."""
    wide, right = got.double(), wanted.double()
    far = (wide - right).abs()
    far[(wide == right) | (wide.isnan() & right.isnan())] = 0.0
    far.nan_to_num_(nan=math.inf)
    largest = float(right[right.isfinite()].abs().amax()) if bool(right.isfinite().any()) else 0.0
    beyond = (far > allowed * largest).flatten()
    place = int(beyond.int().argmax()) if bool(beyond.any()) else int(far.flatten().argmax())
    at = [int(i) for i in torch.unravel_index(torch.tensor(place), got.shape)] if got.ndim else []
    values = got[tuple(at)].item(), wanted[tuple(at)].item()
    return f"{name}{at or ''} is {values[0]:.6g}, and {values[1]:.6g} is right"


def _distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the larger relative error of two norms; infinity where infinities or NaNs differ."""
    got, wanted = got.double(), wanted.double()
    finite = wanted.isfinite()
    if not torch.equal(got[~finite].nan_to_num(7.0), wanted[~finite].nan_to_num(7.0)):
        return math.inf
    off, right = got[finite] - wanted[finite], wanted[finite]
    if not off.numel():
        return 0.0
    errors = [
        float(norm(off) / norm(right)) if norm(right) > 0 else float(norm(off))
        for norm in (torch.linalg.vector_norm, functools.partial(torch.linalg.vector_norm, ord=math.inf))
    ]
    return math.nan if any(map(math.isnan, errors)) else max(errors)
