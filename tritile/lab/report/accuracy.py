"""Measure the errors of tritile's and torch's products by precision, on easy and on hard data."""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
import torch

from tritile.core import of_torch
from tritile.core.problem import FP8_DTYPES, REAL_DTYPE, Precision, error_bound
from tritile.ops.matmul import matmul
from tritile.ops.scaled import scaled_matmul
from tritile.tune.subject.elements import torch_fp32

Pair = tuple[torch.Tensor, torch.Tensor]
Errors = tuple[float | None, float | None]
Data = Callable[[torch.Tensor, torch.Tensor], Pair]


def _graded(a: torch.Tensor, b: torch.Tensor) -> Pair:
    steps = torch.arange(a.shape[1], device=a.device) * (60 / a.shape[1])
    return a * torch.exp2(-steps), b * torch.exp2(steps)[:, None]


def _cancelling(a: torch.Tensor, b: torch.Tensor) -> Pair:
    half = a.shape[1] // 2
    a, b = a.clone(), b.clone()
    a[:, half : 2 * half] = a[:, :half]
    b[half : 2 * half] = b[:half] * (1e-4 * b[:half] - 1)
    return a, b


def _badly_ranged(a: torch.Tensor, b: torch.Tensor) -> Pair:
    return a * torch.exp(8 * torch.randn_like(a)), b * torch.exp(8 * torch.randn_like(b))


def _with(value: float, x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[1, 2] = value
    return x


# Functions of normal a and b, by name. Elements of "graded" span 2^60 along K, their products do not.
# Elements of "badly ranged" span some 10^20 anywhere. Sums of "cancelling" end near 1e-4 of their terms.
FINITE: Final[dict[str, Data]] = {
    "normal": lambda a, b: (a, b),
    "uniform": lambda a, b: (a.frac().abs(), b.frac().abs()),
    "log-normal": lambda a, b: (a.exp(), b.exp()),
    "cancelling": _cancelling,
    "graded": _graded,
    "badly ranged": _badly_ranged,
}
# The same with NaN, infinities, or elements at the ends of their type's range.
SPECIAL: Final[dict[str, Data]] = {
    "NaN": lambda a, b: (_with(math.nan, a), b),
    "infinite": lambda a, b: (_with(math.inf, a), _with(-math.inf, b)),
    "huge": lambda a, b: (_with(float(torch.finfo(a.dtype).max) * 0.9, a), b),
    "denormal": lambda a, b: (a * float(torch.finfo(a.dtype).tiny) * 0.1, b),
}
# Precisions by dtype; "" where there is no choice. "default" is what runs where none is named.
PRECISIONS: Final = {
    "float32": ("default", "ieee", "fp16x3", "tf32x3", "tf32"),
    "float64": ("ieee", "ozaki"),
    "complex64": ("ieee", "ieee-3m", "fp16x3"),
    "complex128": ("ieee", "ieee-3m"),
    "float16": ("",),
    "bfloat16": ("",),
    "float8_e4m3fn": ("ieee", "fast"),
    "int8": ("",),
}
_64_BITS: Final = (torch.float64, torch.complex128)
_ROWS: Final = 16  # rows and columns of 64-bit products that are compared


@dataclass(frozen=True)
class Accuracy:
    """Hold how far a product of (n, k) by (k, n) is from exact.

    `error` is |out - a b| / |a b|, by norm. `worst` is the largest error of an element over (|a| |b|) there.
    `torch_error` and `torch_worst` are torch's, which uses TF32 where tritile does. `bound` is the proved
    bound of `worst`, None where there is none. `differing` counts the elements that are NaN, infinite or
    finite where torch's are not. Where a product is not finite the other fields are None.
    """

    dtype: str
    precision: str
    data: str
    n: int
    k: int
    error: float | None
    worst: float | None
    torch_error: float | None
    torch_worst: float | None
    bound: float | None
    differing: int


def _is_fp8(dtype: torch.dtype) -> bool:
    return str(dtype).removeprefix("torch.") in FP8_DTYPES


def _ours(a: torch.Tensor, b: torch.Tensor, precision: str) -> torch.Tensor:
    if _is_fp8(a.dtype):
        one = torch.ones((), device=a.device)
        return scaled_matmul(a, b, one, one, out_dtype=torch.float32, use_fast_accum=precision == "fast")
    with torch_fp32("none") if precision == "default" else nullcontext():
        return matmul(a, b, precision=None if precision in ("", "default") else cast(Precision, precision))


def _torchs(a: torch.Tensor, b: torch.Tensor, precision: str) -> torch.Tensor:
    if a.dtype == torch.int8:
        return of_torch.int_mm(a, b)
    if _is_fp8(a.dtype):
        if a.device.type == "cpu":
            return a.float() @ b.float()
        one, fast = torch.ones((), device=a.device), precision == "fast"
        return of_torch.scaled_mm(a, b, one, one, out_dtype=torch.float32, use_fast_accum=fast)
    with torch_fp32("tf32" if precision == "tf32" else "ieee"):
        return a @ b


def _exact(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a b and |a| |b| in float64, more exact than any product that is compared with them.

    Products of 64-bit types are computed in numpy's longdouble, which has 64 bits of mantissa on x86. This is
    slow.
    """
    wide = torch.complex128 if a.is_complex() else torch.float64
    if a.dtype not in _64_BITS:
        return a.to(wide) @ b.to(wide), a.to(wide).abs() @ b.to(wide).abs()
    kind = np.clongdouble if a.is_complex() else np.longdouble
    x, y = (tensor.cpu().numpy().astype(kind) for tensor in (a, b))
    exact = np.stack([(row[:, None] * y).sum(0) for row in x])
    magnitude = np.stack([(np.abs(row)[:, None] * np.abs(y)).sum(0) for row in x])
    found = torch.from_numpy(exact.astype(np.complex128 if a.is_complex() else np.float64))
    return found, torch.from_numpy(magnitude.astype(np.float64))


def _errors(out: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor) -> tuple[float, float]:
    off = (out.to(exact.dtype) - exact).abs()
    norm = float(exact.abs().square().sum().sqrt())
    worst = float(torch.where(magnitude > 0, off / magnitude, off).max())
    return (float(off.square().sum().sqrt()) / norm if norm else float(off.max())), worst


def _kinds(out: torch.Tensor) -> torch.Tensor:
    """Return 1 for a NaN, 2 and 3 for infinities, else 0."""
    out = torch.view_as_real(out) if out.is_complex() else out
    if not out.is_floating_point():
        return torch.zeros_like(out, dtype=torch.int8)
    return (out.isnan() + 2 * out.isposinf().int() + 3 * out.isneginf().int()).to(torch.int8)


def _posed(dtype: str, n: int, k: int, make: Data, where: str) -> Pair:
    """Return a (n, k) and b (k, n), b with contiguous columns."""
    kind, generator = getattr(torch, dtype), torch.Generator(where).manual_seed(k)
    if dtype == "int8":
        a, b = (torch.randint(-128, 128, (n, k), generator=generator, device=where) for _ in range(2))
        return a.to(kind), b.to(kind).mT
    start = torch.float64 if kind in _64_BITS else torch.float32

    def normal() -> torch.Tensor:
        return torch.randn(n, k, generator=generator, dtype=start, device=where)

    a, b = make(normal(), normal().mT.contiguous())
    if dtype in REAL_DTYPE:
        c, d = make(normal(), normal().mT.contiguous())
        a, b = torch.complex(a, c), torch.complex(b, d)
    return a.to(kind), b.to(kind).mT.contiguous().mT


def accuracy(dtype: str, precision: str, data: str, n: int, k: int, where: str) -> Accuracy:
    """Measure the errors of one product on a device, "cuda" or "cpu"."""
    a, b = _posed(dtype, n, k, (FINITE | SPECIAL)[data], where)
    ours, theirs = _ours(a, b, precision), _torchs(a, b, precision)
    differing = int((_kinds(ours) != _kinds(theirs)).sum())
    our_errors: Errors = (None, None)
    torch_errors: Errors = (None, None)
    if not bool((_kinds(ours) + _kinds(theirs)).any()):
        if a.dtype in _64_BITS:
            a, b, ours, theirs = (
                a[:_ROWS],
                b[:, :_ROWS],
                ours[:_ROWS, :_ROWS].cpu(),
                theirs[:_ROWS, :_ROWS].cpu(),
            )
        exact = _exact(a, b)
        our_errors, torch_errors = _errors(ours, *exact), _errors(theirs, *exact)
    bounded = (dtype, precision) == ("float32", "fp16x3") and data in FINITE
    bound = error_bound(k) + 2.0**-24 if bounded else None  # and the rounding of the result to fp32
    return Accuracy(dtype, precision, data, n, k, *our_errors, *torch_errors, bound, differing)


def cases(dtypes: tuple[str, ...], ks: tuple[int, ...]) -> Iterator[tuple[str, str, str, int]]:
    """Yield dtype, precision, data and K of every product to measure."""
    few = {"float8_e4m3fn": ["normal"], "int8": ["normal"]}
    few |= {name: ["normal", "uniform"] for name in ("float16", "bfloat16")}
    for dtype in dtypes:
        names = few.get(dtype, [*FINITE]) + [*SPECIAL] * (dtype in ("float32", "float64"))
        for precision in PRECISIONS[dtype]:
            yield from ((dtype, precision, data, k) for data in names for k in ks)
