"""Check answers of kernels: poison outputs before a launch, and compare them with a reference after it."""

import math
from typing import Final

import torch

from tritile.errors import TuningError

WRONG: Final = "wrong answer"  # begins the reason of a config whose result differs
OUTSIDE: Final = "outside the memory of its arguments"  # behind "wrote" or "read"
# A NaN that arithmetic never produces, by element size in bytes, and the integer type of that size.
_NAN: Final = {
    2: (0x7FD5, torch.int16), 4: (0x7FD5A5A5, torch.int32), 8: (0x7FFD5A5A5A5A5A5A, torch.int64)
}  # fmt: skip
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of the first element, and the address just past the last."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (steps + 1) * tensor.itemsize


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if the memory between the first and last elements of `a` and of `b` overlaps."""
    (a_first, a_end), (b_first, b_end) = span(a), span(b)
    return a_first < b_end and b_first < a_end


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """View unsigned integers as signed ones, for which torch has operations."""
    return tensor.view(_SIGNED.get(tensor.dtype, tensor.dtype))


def poison(out: torch.Tensor, right: torch.Tensor) -> None:
    """Fill an output with values that are wrong everywhere, to expose elements that are not written."""
    if not out.is_floating_point():
        _bits(out).copy_(~_bits(right.to(out.dtype)))
    elif out.itemsize in _NAN:
        bits, integers = _NAN[out.itemsize]
        out.view(integers).fill_(bits)
    else:
        out.fill_(float("nan"))


def unwritten(out: torch.Tensor) -> list[int] | None:
    """Return the indices of the first floating element still filled by `poison`; None if there is none.

    Always None for fp8, where a kernel may write the same NaN.
    """
    if out.itemsize not in _NAN:
        return None
    bits, integers = _NAN[out.itemsize]
    is_left = out.view(integers) == bits
    return _first_true(is_left) if bool(is_left.any()) else None


def _first_true(mask: torch.Tensor) -> list[int]:
    return _indices(mask.flatten().int().argmax(), mask.shape)


def _indices(flat: torch.Tensor, shape: torch.Size) -> list[int]:
    return [int(i) for i in torch.unravel_index(flat.cpu(), shape)] if shape else []


def unlike(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    """True if a bit differs."""
    now, then = (x.contiguous().reshape(-1).view(torch.uint8) for x in (tensor, before))
    return not torch.equal(now, then)


def allowed_error(dtype: torch.dtype) -> float:
    """Return the default tolerance, a relative error; 0 for integers.

    - fp8: one epsilon. Two right results, each rounded once, are equal or neighbours.
    - fp16, bf16: four epsilons, for intermediate results rounded to the output's type.
    - fp32, fp64: 256 epsilons. A sum of K terms of either sign errs by up to about sqrt(K) epsilons of its
      typical size (five standard deviations), so this suffices for K = 65,536, and for tensor cores, which
      truncate when they add. TF32 errs by 4,000.
    """
    if not dtype.is_floating_point:
        return 0.0
    return min({1: 1, 2: 4}.get(dtype.itemsize, 256) * torch.finfo(dtype).eps, 0.5)


def error_of(name: str, got: torch.Tensor, right: torch.Tensor, tolerance: float | None) -> float:
    """Return the largest relative error of an element: see `_errors` for what it is relative to.

    `right` is rounded to the dtype of `got` first. Infinities and NaNs must be the same. Raises TuningError
    if an error is above `tolerance`, by default `allowed_error`; it names the first wrong element and its
    error, the largest error and where it is, and how many elements are wrong.
    """
    right = right.to(got.dtype)
    allowed = allowed_error(got.dtype) if tolerance is None else tolerance
    errors = _errors(got, right)
    error = float(errors.amax()) if errors.numel() else 0.0
    if error > allowed:
        wrong = errors > allowed
        at = _first_true(wrong)
        values = got[tuple(at)].item(), right[tuple(at)].item()
        short, expected = (f"{value:.6g}" for value in values)
        if not got.dtype.is_floating_point or short == expected:
            short, expected = map(str, values)
        first = f"{name}{at or ''} is {short}, and {expected} is right"
        count = int(wrong.sum())
        verb = "is" if count == 1 else "are"
        more = f"; {count} of {wrong.numel()} elements {verb} wrong" if at else ""
        if not got.dtype.is_floating_point:
            raise TuningError(f"{WRONG}: {first}{more}")
        here = float(errors[tuple(at)])
        if here < error:
            more = f"; the largest is {error:.3g} at {name}{_indices(errors.argmax(), errors.shape)}{more}"
        limit = f"above {'the default ' if tolerance is None else ''}tolerance={allowed:.3g}"
        raise TuningError(f"{WRONG}: {first}: relative error {here:.3g}, {limit}{more}")
    return error


def _errors(got: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the relative error of each element, in float64; infinity if infinities or NaNs differ.

    If terms cancel in an element, its error is relative to these terms, which the result does not show. So
    the error is relative to the largest of

    - the element itself: rounding to the output's type;
    - the typical size of elements in its row (along the last dimension) and column: `_typical`. Sums, and
      intermediate results in 16 bits, err by a share of it;
    - a share of the RMS of the whole tensor (of 1 if it is all zeros), small enough that the default allows
    64
      epsilons of fp32 sums (of fp64 for fp64), which is what K = 4,096 explains in rows that cancel entirely;
    - the smallest normal number, below which the spacing of the type is constant.
    """
    kind, mine, wide = got.dtype, got.double(), right.double()
    if not wide.numel():
        return wide
    finite = wide.where(wide.isfinite(), 0.0)
    unit = float(finite.abs().amax()) or 1.0  # so that squares neither overflow nor all vanish
    table = finite.div_(unit).reshape(-1, finite.shape[-1] if finite.ndim else 1)
    allowed, of_typical, normal, step = 1.0, 1.0, 1.0, torch.finfo(torch.float32).eps
    if kind.is_floating_point:
        allowed, normal = allowed_error(kind), torch.finfo(kind).smallest_normal
        of_typical = min(allowed, 4 * torch.finfo(torch.bfloat16).eps)
        step = torch.finfo(kind).eps if kind == torch.float64 else step
    share, whole = 64 * step / of_typical, float(table.square().mean().sqrt()) or 1.0
    typical = _typical(table, share).clamp_min_(share * whole).mul_(of_typical / allowed)
    scale = torch.maximum(table.abs(), typical).clamp_min_(normal / unit).reshape(wide.shape)
    errors = ((mine - wide) / unit).abs_().div_(scale).nan_to_num_(nan=math.inf, posinf=math.inf)
    errors[(mine == wide) | (mine.isnan() & wide.isnan())] = 0.0
    if not kind.is_floating_point:  # float64 cannot represent all 64-bit integers
        errors[(errors == 0) & (_bits(got) != _bits(right))] = math.ulp(0.0)
    return errors


def _typical(table: torch.Tensor, least: float) -> torch.Tensor:
    """Return r c for each element, with r by row and c by column: the RMS of table / (r c) is 1 in either.

    In a product a b, r follows the rows of a and c the columns of b. Two sweeps balance them, so that a large
    row does not hide which columns are small, or the reverse. Rows or columns of fewer than 8 elements have
    no meaningful RMS: only c or r, or the RMS of the whole table, stands in. r is at least `least` times its
    RMS over the rows, and likewise c.
    """
    squares = table.square()
    if not bool(squares.any()):
        return squares
    size = [torch.ones_like(squares[:, :1]), squares.mean().expand(1, squares.shape[1])]
    for _ in range(2):
        for dim, other in ((0, 1), (1, 0)):
            if table.shape[other] >= 8:
                mean = (squares / size[other]).mean(other, keepdim=True)
                size[dim] = mean.clamp_min(least**2 * mean.mean())
    return (size[0] * size[1]).sqrt()
