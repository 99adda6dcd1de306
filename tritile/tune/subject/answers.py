"""Check answers of tritile's own operations: copies must be exact; products are compared with torch's.

torch computes the product in a wider type. The allowed error is a bound. Each of the K additions of a sum
rounds by at most eps / 2 of the partial sum, and no partial sum is above |row| |column|, the Euclidean norms.
Rounding errors are a random walk, which stays within 4 sqrt(K) eps |row| |column| for all but one element in
10^13 (Hoeffding). As torch's sums have errors too, 6 is allowed in place of 4. Tensor cores truncate when
they add, which is a drift: one step for each 8 of K. Inputs in TF32 are rounded to 11 bits.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch

from tritile.core.call import Call, GroupedCall, MatmulCall, PermuteCall
from tritile.core.epilogue import SIDES, Epilogue, apply_epilogue
from tritile.core.problem import FP8_DTYPES
from tritile.errors import TuningError
from tritile.tune.subject.operands import (
    groups_of,
    matrix,
    of_no_group,
    poison,
    sampled,
    weight_rows,
)
from tritile.tuner.measure.outputs import WRONG
from tritile.tuner.measure.timing import Run

ROUNDING: Final = {"float64": 1e-16, "float32": 6e-8, "float16": 5e-4, "bfloat16": 4e-3, "int32": 0.0}
_AT_ONCE: Final = 1 << 25  # elements of a block: 256 MiB of float64
_SLAB: Final = 8192  # rows of a weight to unpack at once
_SAMPLED: Final = 8  # matrices of a batch, or groups, in a sample

Sides = Sequence[torch.Tensor | None]
Sums = tuple[torch.Tensor, torch.Tensor]  # of products, and the allowed error of each


class Part(NamedTuple):
    """A part of a result that begins at `place`, its right values and their allowed errors."""

    out: torch.Tensor
    right: torch.Tensor
    bound: torch.Tensor
    place: tuple[int, ...]


@contextlib.contextmanager
def torch_fp32(setting: str = "ieee") -> Iterator[None]:
    """Make torch multiply fp32 in this precision, whatever its own setting and autocast say.

    Products that inherited their setting inherit it again afterwards.
    """
    matmul: Any = torch.backends.cuda.matmul
    before = _set_for_products()
    matmul.fp32_precision = setting
    try:
        with torch.autocast("cuda", enabled=False):
            yield
    finally:
        matmul.fp32_precision = before


def _set_for_products() -> str:
    """Return what torch.backends.cuda.matmul.fp32_precision was set to; "none" if it inherits.

    torch only shows the effective precision: that of products, else that of CUDA, which is named after cuDNN,
    else that of all backends. If products have the same as CUDA, a change of the latter two shows whether
    products follow.
    """
    backends: Any = torch.backends
    found: str = backends.cuda.matmul.fp32_precision
    if found == "none" or found != backends.cudnn.fp32_precision:
        return found
    other = "ieee" if found == "tf32" else "tf32"
    with backends.flags(fp32_precision=other):
        if backends.cuda.matmul.fp32_precision != found:
            return "none"
        if backends.cudnn.fp32_precision != found:
            return found
    backends.cudnn.fp32_precision = other  # CUDA has its own setting
    try:
        return found if backends.cuda.matmul.fp32_precision == found else "none"
    finally:
        backends.cudnn.fp32_precision = found


def _wider(dtype: str) -> torch.dtype:
    """Return the dtype to multiply in: float32 for floats of 16 bits and fewer, else float64."""
    narrow = dtype in ("float16", "bfloat16", *FP8_DTYPES)
    return torch.float32 if narrow else torch.float64


def step_of(dtype: str) -> float:
    return torch.finfo(torch.float64 if dtype == "float64" else torch.float32).eps


def growth(dtype: str, precision: str, k: int) -> float:
    """Return the allowed error of a sum of K products relative to |row| |column|: see the module's docstring.

    Sums of fp8 keep 13 bits within an instruction, which adds 32 of K, and for at most 256 of K in a row; in
    precision "fast" for all of K, where random signs keep partial sums below 6 / sqrt(K) of the norms.
    """
    if dtype == "int8":
        return 0.0
    inputs = 2.0**-10 + 2.0**-22 if precision == "tf32" else 0.0
    if dtype in FP8_DTYPES:
        inputs = (6 * math.sqrt(k) if precision == "fast" else min(k, 256)) / 32 * 2.0**-13
    return (6 * math.sqrt(k) + k / 8) * step_of(dtype) + inputs


def summed(a: torch.Tensor, b: torch.Tensor, grown: float) -> Sums:
    rows, columns = (torch.linalg.vector_norm(x, dim=dim, keepdim=True) for x, dim in ((a, -1), (b, -2)))
    return a @ b, grown * (rows * columns)


def with_epilogue(
    parts: Sequence[Sums],
    sides: Sides,
    step: float,
    activation: str = "",
    alpha: float = 1.0,
    beta: float = 1.0,
) -> Sums:
    """Return the epilogue of sums, and the allowed error of each element.

    `parts` are the sums and their errors: of one product, or of both of a gated one. The epilogue is applied
    to the sums plus and minus their errors. Its own error is at most 16 steps of the numbers that it adds,
    and of 1 if there is an activation.
    """

    def made(*sums: torch.Tensor) -> torch.Tensor:
        return apply_epilogue(sums[0], sides, activation, alpha, beta, *sums[1:])

    right = made(*(sums for sums, _ in parts))
    large = [None if side is None else side.abs() for side in sides]
    added = 0.0 if large[2] is None else abs(beta) * large[2].to(right.dtype)
    large[2] = added + torch.full((), float(bool(activation)), dtype=right.dtype, device=right.device)
    sums, *second = (sums.abs() for sums, _ in parts)
    bound = 16 * step * apply_epilogue(sums, large, "", abs(alpha), 1.0, *second)
    for signs in itertools.product((1, -1), repeat=len(parts)):
        shifted = (sums + sign * error for sign, (sums, error) in zip(signs, parts, strict=True))
        bound = bound + (made(*shifted) - right).abs()
    return right, bound


def compare(out: torch.Tensor, right: torch.Tensor, bound: torch.Tensor, place: tuple[int, ...]) -> None:
    """Raise TuningError where an element errs by more than bound and rounding; out begins at `place`."""
    if out.is_floating_point():
        facts = torch.finfo(out.dtype)
        bound = bound + 0.51 * facts.eps * right.abs() + facts.smallest_normal * facts.eps
    off = (out.to(right.dtype) - right).abs()
    bad = ~(off <= bound)  # so that NaN is bad too
    if bool(bad.any()):
        first = bad.nonzero()[0]
        at = tuple(int(i) + start for i, start in zip(first[-len(place) :], place, strict=True))
        values = " for ".join(str(tensor[tuple(first)].item()) for tensor in (out, right))
        raise TuningError(f"{WRONG}: {int(bad.sum())} elements, the first at {at}: {values}")


def in_pieces(total: int, each: int) -> Iterator[slice]:
    """Yield slices of `total` items of `each` elements, none larger than a block of `_AT_ONCE` elements."""
    step = max(1, _AT_ONCE // max(1, each))
    yield from (slice(start, start + step) for start in range(0, total, step))


def _parts(
    left: torch.Tensor, rights: Sequence[torch.Tensor], out: torch.Tensor, place: tuple[int, ...],
    grown: float, sample: bool, finish: Callable[[Sequence[Sums], Any], Sums] | None = None,
) -> Iterator[Part]:  # fmt: skip
    """Yield pieces of the rows of a product, or of a sample of them; `finish` applies an epilogue to rows.

    `left` is (..., m, k), `rights` are (..., k, n), in the dtype to multiply in. `out` begins at `place`.
    """
    *batch, row, column = place
    (m, k), n = left.shape[-2:], out.shape[-1]
    pieces: list[Any] = [sampled(m, out.device)] if sample else [*in_pieces(m, n + k)]
    for rows in pieces:
        near = left[..., rows, :].to(rights[0].dtype)
        sums = [summed(near, each, grown) for each in rights]
        right, bound = sums[0] if finish is None else finish(sums, rows)
        first = 0 if sample else rows.start
        yield Part(out[..., rows, :], right, bound, (*batch, row + first, column))


def _of_matmul(call: MatmulCall, wide: torch.dtype, sample: bool) -> Iterator[Part]:
    batch = call.problem.batch
    sides = [matrix(call.sides[name], batch) if name in call.sides else None for name in SIDES]
    a, b, out = (matrix(view, batch) for view in (call.a, call.b, call.out))
    rights = [b] if call.up is None else [b, matrix(call.up, batch)]
    (m, k), n, step = call.a.shape, call.b.shape[1], step_of(call.dtype)
    how = call.activation, call.alpha, call.beta
    some = [slice(i, i + 1) for i in range(0, batch, max(1, batch // _SAMPLED))]
    for own in some if sample else in_pieces(batch, m * (n + k) + k * n):

        def finish(sums: Sequence[Sums], rows: Any, own: slice = own) -> Sums:
            near = [None if side is None else side[own][..., rows, :] for side in sides]
            return with_epilogue(sums, near, step, *how)

        of_own = [each[own].to(wide) for each in rights]
        grown = growth(call.dtype, call.precision, k)
        fused = finish if call.epilogue else None
        yield from _parts(a[own], of_own, out[own], (own.start, 0, 0), grown, sample, fused)


def _of_groups(call: GroupedCall, wide: torch.dtype, sample: bool) -> Iterator[Part]:
    groups = [group for group in groups_of(call) if group.out.numel()]
    grown = growth(call.dtype, call.precision, call.a.shape[1])
    for group in groups[:: max(1, len(groups) // _SAMPLED) if sample else 1]:
        yield from _parts(group.a, [group.b.to(wide)], group.out, (0, 0), grown, sample)


def _of_weights(call: Any, wide: torch.dtype, sample: bool, rounds: bool = True) -> Iterator[Part]:
    """`rounds`: weights are rounded to the dtype of x, as by kernels that do not scale a group's sums."""
    n, k, step = call.out.shape[1], call.x.shape[1], step_of(call.dtype)
    x, out = matrix(call.x, 1)[0], matrix(call.out, 1)[0]
    grown = growth(call.dtype, "ieee", k)
    for start in range(0, n, _SLAB):
        columns = slice(start, min(n, start + _SLAB))

        def add(sums: Sequence[Sums], rows: Any, columns: slice = columns) -> Sums:
            bias = matrix(call.bias, 1)[0, rows, columns]
            return with_epilogue(sums, [None, None, bias, None, None], step)

        weight = weight_rows(call, start, columns.stop).to(getattr(torch, call.dtype) if rounds else wide)
        bias = add if call.bias is not None else None
        yield from _parts(x, [weight.to(wide).mT], out[:, columns], (0, start), grown, sample, bias)


_PARTS: Final[dict[str, Callable[[Any, torch.dtype, bool], Iterator[Part]]]] = {
    "matmul": _of_matmul,
    "grouped": _of_groups,
    "linear_quantized": _of_weights,
}


def parts_of(call: Any, sample: bool = False) -> Iterator[Part]:
    """Yield the parts of a product; for a `sample` only some rows, computed in float64."""
    return _PARTS[call.op](call, torch.float64 if sample else _wider(call.dtype), sample)


def _first_wrong(parts: Iterable[Part]) -> TuningError | None:
    try:
        for part in parts:
            compare(*part)
    except TuningError as error:
        return error
    return None


def check_elements(call: Any) -> None:
    """Raise TuningError if any element of a product is off by more than rounding explains.

    torch computes the product in blocks of rows, in float32 for 16-bit operands, else in float64. With packed
    weights, either all elements are right for rounded weights, or all for exact ones.
    """
    with torch_fp32():
        wrong = _first_wrong(parts_of(call)) if call.op in _PARTS else None
        if wrong is not None and call.op == "linear_quantized":
            exact = _of_weights(call, _wider(call.dtype), sample=False, rounds=False)
            wrong = wrong if _first_wrong(exact) else None
    if wrong is not None:
        raise wrong


def allowed_norm_error(call: Any) -> float:
    """Return the largest relative error, by the norms of `norm_error`, that a right product may have.

    Rounding to the output type errs by at most half its epsilon. A running sum of K fp32 products errs by
    about sqrt(K) epsilons of fp32, and by twice that in the truncating adders of tensor cores. TF32 keeps 11
    bits of each input. An activation may shrink its input to less than half and amplify the error up to 1.13
    times. A gated product has the errors of both factors. An epilogue rounds three more times, in the type of
    sums.
    """
    if isinstance(call, PermuteCall):
        return 0.0
    if call.op == "linear_quantized":
        return ROUNDING[call.dtype] + 4e-7 * math.sqrt(call.x.shape[1])
    dtype, k = call.dtype, call.a.shape[1]
    summing = {"float64": 1e-16, "int8": 0.0}.get(dtype, 1e-7) * math.sqrt(k) * 4
    inputs = 1e-3 if call.precision == "tf32" and dtype == "float32" else 0.0
    what = call.epilogue if isinstance(call, MatmulCall) else Epilogue()
    spared = 0.4 if what.activation else 1.0
    gate = summing + inputs if what.gated else 0.0
    fused = (4e-16 if dtype == "float64" else 2e-7) if what else 0.0
    return ROUNDING[call.out_dtype] + (summing + inputs) / spared + gate + fused


def norm_error(call: Call) -> float:
    """Return |out - right| / |right|, in Euclidean norms. Raises TuningError for an inexact copy.

    Up to 256 rows of a product are compared with one in float64.
    """
    if isinstance(call, PermuteCall):
        check_permuted(call)
        return 0.0
    if isinstance(call, GroupedCall) and bool(of_no_group(call).any()):
        return math.inf
    whole = matrix(call.out, call.problem.batch if isinstance(call, MatmulCall) else 1)
    if whole.dtype != torch.int32 and not bool(torch.isfinite(whole.sum(dtype=torch.float32))):
        return math.inf
    worst = norm = 0.0
    for out, right, *_ in parts_of(call, sample=True):
        worst += float((out.to(right.dtype) - right).abs().square().sum())
        norm += float(right.abs().square().sum())
    return math.sqrt(worst / norm) if norm else float(worst > 0)


def answer_error(call: Call, every: bool = True) -> float:
    """Return the relative error of a call's answer. Raises TuningError for a wrong one.

    `every` also checks each element, which takes as long as torch's product in a wider type.
    """
    error, allowed = norm_error(call), allowed_norm_error(call)
    if not error <= allowed:
        raise TuningError(f"{WRONG}: relative error {error:.3g}, above {allowed:.3g}")
    if every:
        check_elements(call)
    return error


def check(run: Run, call: Call, every: bool = True) -> float:
    """Run on a poisoned output and return the relative error. Raises TuningError for a wrong answer.

    `every`: see `answer_error`; not for a baseline of several steps, which rounds between them.
    """
    poison(call)
    run(call)
    torch.cuda.synchronize()
    return answer_error(call, every)


def check_permuted(call: PermuteCall) -> None:
    x, out = permuted(call)
    if not torch.equal(x, out):
        raise TuningError(f"{WRONG}: elements differ")


def permuted(call: PermuteCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x and out over the same index space; the last dimension is the words of an element."""
    problem = call.problem
    lanes = 2 if problem.itemsize == 16 else 1
    x, out = (
        memory.tensor.as_strided((*problem.shape, lanes), (*(lanes * step for step in strides), 1))
        for memory, strides in ((call.x, problem.x_strides), (call.out, problem.out_strides))
    )
    return x, out
