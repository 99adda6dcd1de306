"""Hopper's tensor cores as they are modelled, and data that are easy or hard for products of parts.

The model (Khattak and Mikaitis, arXiv 2512.07004): of one instruction, 16 of K, products are exact; they
and the sum so far are cut, toward zero, to 2 bits below the last that fp32 has beside the largest of them;
their sum is cut to fp32.
"""

import torch

from tests.reference import assert_below, product64
from tritile.families.fp16x3.lowering import error_bound

STEP = 16  # of K, in one instruction
_EXTRA = 2  # bits


def _exponents(x: torch.Tensor) -> torch.Tensor:
    """The power of two above each number."""
    return torch.frexp(x).exponent.double().exp2()


def _cut(x: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    return torch.where(unit > 0, (x / unit).trunc() * unit, x)


def tensor_core_sum(a: torch.Tensor, b: torch.Tensor, acc: torch.Tensor) -> torch.Tensor:
    """acc + a @ b of small float64 matrices that hold 16-bit numbers, as fp32 numbers in float64."""
    for k in range(0, a.shape[1], STEP):
        terms = a[:, k : k + STEP, None] * b[None, k : k + STEP, :]
        terms = torch.cat([terms, acc[:, None, :]], 1)
        unit = _exponents(terms.abs().amax(1, keepdim=True)) * 2.0 ** -(24 + _EXTRA)
        total = _cut(terms, unit).sum(1)
        acc = _cut(total, _exponents(total.abs()) * 2.0**-24)
    return acc


def promoted_product(a: torch.Tensor, b: torch.Tensor, every: int) -> torch.Tensor:
    """a @ b of parts: two thirds of K in one sum, then sums of `every`, added as `carried_sum` does."""
    small = a.shape[1] // 3 * 2
    acc = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
    total = tensor_core_sum(a[:, :small], b[:small], acc).float()
    lost = torch.zeros_like(total)
    for k in range(small, a.shape[1], every):
        sums = tensor_core_sum(a[:, k : k + every], b[k : k + every], lost.double()).float()
        added = (total + sums) - total
        total, lost = total + added, sums - added
    return total


def _graded(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    steps = torch.arange(a.shape[1], device=a.device) * (60 / a.shape[1])
    return a * torch.exp2(-steps), b * torch.exp2(steps)[:, None]


def _cancelling(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    half = a.shape[1] // 2
    a, b = a.clone(), b.clone()
    a[:, half : 2 * half] = a[:, :half]
    b[half : 2 * half] = b[:half] * -(1 + 1e-4 * b[:half])
    return a, b


def _with(x: torch.Tensor, value: float) -> torch.Tensor:
    x = x.clone()
    x[1, 2] = value
    return x


# What becomes of two matrices of normal numbers.
DATA = {
    "normal": lambda a, b: (a, b),
    "uniform": lambda a, b: (a.abs().frac(), b.abs().frac()),
    "log-normal": lambda a, b: (a.exp(), b.exp()),
    "relu": lambda a, b: (a.relu(), b),
    "cancelling": _cancelling,
    "constant": lambda a, b: (torch.full_like(a, 1 + 2.0**-11 - 2.0**-20), torch.full_like(b, 1 + 2.0**-11)),
    "large": lambda a, b: (a * 2.0**50, b * 2.0**-55),
    "identity": lambda a, b: (torch.eye(*a.shape, device=a.device), b + b.sign()),
    "zero": lambda a, b: (a * 0, b + b.sign()),
    "wide": lambda a, b: (a * (3 * b[: len(a), : 1]).exp() * (4 * a).exp(), b * (4 * b).exp()),
    "graded": _graded,
    "one small": lambda a, b: (torch.eye(*a.shape, device=a.device), _with(b, 2.0**-40)),
    "one large": lambda a, b: (a, _with(b, 2.0**40)),
    "far out": lambda a, b: (a * 2.0**70, b),
    "NaN": lambda a, b: (_with(a, float("nan")), b),
    "infinite": lambda a, b: (_with(a, float("inf")), _with(b, -float("inf"))),
    "huge": lambda a, b: (_with(a, 3.4e38), b * 1e-20),
    "denormal": lambda a, b: (a * 1e-39, b),
}  # fmt: skip


def rounded_to_tf32(x: torch.Tensor) -> torch.Tensor:
    """float32 numbers rounded to 11 bits, ties to even, by arithmetic in float64."""
    wide = x.double()
    unit = torch.frexp(wide).exponent.clamp(min=-125).double().exp2() * 2.0**-11
    return torch.where(wide.isfinite(), (wide / unit).round() * unit, wide).float()


def assert_bounded(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor, rounding: float = 2.0**-24) -> None:
    """A product of parts within the stated bound where torch's is finite; NaN and infinite where that is."""
    torchs = torch.matmul(a, b)
    assert got.shape == torchs.shape
    assert torch.equal(got.isnan(), torchs.isnan())
    assert torch.equal(got.isinf(), torchs.isinf())
    finite = torchs.isfinite()
    exact, magnitude = product64(a, b), product64(a.abs(), b.abs())
    bound = error_bound(a.shape[-1]) * magnitude + rounding * exact.abs() + 2.0**-149
    assert_below((got.double() - exact).abs()[finite], bound[finite])
