"""Pairs of matrices on which precisions differ, made from normal random numbers."""

from collections.abc import Callable
from typing import Final

import torch

Pair = tuple[torch.Tensor, torch.Tensor]


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


def _with(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def changed(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[1, 2] = value
        return x

    return changed


# Functions of normal a and b, by name. Elements of "graded" span 2^60 along K, their products do not.
# Elements of "badly ranged" span some 10^20 anywhere. Sums of "cancelling" end near 1e-4 of their terms.
FINITE: Final[dict[str, Callable[[torch.Tensor, torch.Tensor], Pair]]] = {
    "normal": lambda a, b: (a, b),
    "uniform": lambda a, b: (a.frac().abs(), b.frac().abs()),
    "log-normal": lambda a, b: (a.exp(), b.exp()),
    "cancelling": _cancelling,
    "graded": _graded,
    "badly ranged": _badly_ranged,
}
# The same with NaN, infinities, or elements at the ends of their type's range.
SPECIAL: Final[dict[str, Callable[[torch.Tensor, torch.Tensor], Pair]]] = {
    "NaN": lambda a, b: (_with(float("nan"))(a), b),
    "infinite": lambda a, b: (_with(float("inf"))(a), _with(float("-inf"))(b)),
    "huge": lambda a, b: (_with(float(torch.finfo(a.dtype).max) * 0.9)(a), b),
    "denormal": lambda a, b: (a * float(torch.finfo(a.dtype).tiny) * 0.1, b),
}
