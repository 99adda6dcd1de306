"""Make the matrices that tutorial kernels work on, and check what they wrote."""

import math
from typing import Final

import torch

from tritile.errors import TuningError

Matrices = tuple[torch.Tensor, ...]  # the last is written
_ROUNDING: Final = {"float32": 6e-8, "float16": 5e-4, "bfloat16": 4e-3}  # half a step, of elements near 1
_CHECKED_ROWS: Final = 256


def matrices(op: str, n: int, dtype: str, where: str, seed: int = 0) -> Matrices:
    """Return random n x n matrices, the same for the same seed, and one full of NaN for the answer."""
    generator = torch.Generator(where).manual_seed(seed)
    kind = getattr(torch, dtype)
    given = [
        torch.randn(n, n, device=where, dtype=kind, generator=generator)
        for _ in range(2 if op == "matmul" else 1)
    ]
    return (*given, torch.full_like(given[0], math.nan))


def allowed_error(dtype: str, n: int) -> float:
    """Return the largest `error_of` of a right product: rounding of the answer, and of n sums in fp32.

    A running sum errs by about sqrt(n) roundings of its own, twice as much in the adders of tensor cores.
    """
    return _ROUNDING[dtype] + 4e-7 * math.sqrt(n)


def error_of(op: str, given: Matrices) -> float:
    """Return the relative error of the last matrix: |out - a b| / |a b| in float64 over up to 256 rows.

    A transpose has to be exact. Raises TuningError for a wrong answer.
    """
    *operands, out = given
    n = out.shape[0]
    if op == "transpose":
        if not torch.equal(operands[0].t(), out):
            raise TuningError("wrong answer: elements differ")
        return 0.0
    rows = torch.linspace(0, n - 1, min(n, _CHECKED_ROWS), device=out.device).round().long()
    wanted = operands[0][rows].double() @ operands[1].double()
    error = float((out[rows].double() - wanted).norm() / wanted.norm())
    whole = math.isfinite(float(out.sum(dtype=torch.float32)))
    allowed = allowed_error(str(out.dtype).removeprefix("torch."), n)
    if not (whole and error <= allowed):
        raise TuningError(f"wrong answer: relative error {error:.3g}, above {allowed:.3g}, or not a number")
    return error
