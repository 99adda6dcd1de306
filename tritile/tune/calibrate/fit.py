"""Choosing a portfolio by measured times, and fitting each config's constants to them.

Times are in a tensor (sizes, configs) of microseconds, NaN where a config was not timed at a size.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, fields
from typing import Any, Final

import torch

from tritile.core.device import Device
from tritile.core.problem import MatmulProblem
from tritile.planning.formula import Constants, Facts, Shape, facts_of, product_us
from tritile.planning.portfolio import Loss

_WORST: Final = 3.0  # times the fastest: what is slower, or was not timed, counts as this slow
_ROUNDS: Final = (0.05, 0.3, 0.3)  # pull towards what configs of a kind have in common, round by round
_STEPS: Final = 60
_NOISE: Final = 0.05  # of a measured time, beyond which an error counts less than in square
_PRESSURE: Final = 1.5  # power by which slower configs count less


def chosen(us: torch.Tensor, count: int) -> list[int]:
    """Return `count` configs, added one by one: each makes the best of all the fastest, on the mean."""
    fastest = us.nan_to_num(math.inf).amin(1, keepdim=True)
    losses = (us / fastest).nan_to_num(_WORST).clamp(max=_WORST).log()
    best = torch.full((len(us),), math.log(_WORST), dtype=us.dtype)
    found: list[int] = []
    for _ in range(min(count, us.shape[1])):
        means = torch.minimum(losses, best[:, None]).mean(0)
        means[found] = math.inf
        found.append(int(means.argmin()))
        best = torch.minimum(best, losses[:, found[-1]])
    return found


def facts_at(problems: Sequence[MatmulProblem], device: Device, copies: bool) -> Facts:
    """Return the facts of many products as tensors, for a formula of all of them."""
    rows = [facts_of(problem, device, copies) for problem in problems]
    return Facts(*(torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)))


def _predicted(theta: torch.Tensor, shape: Shape, facts: Facts) -> torch.Tensor:
    """Return microseconds (constants, sizes) by the exponentials of rows of `theta`."""
    values = theta.exp()
    constants: Any = [values[:, i, None] for i in range(theta.shape[1])]
    return torch.as_tensor(product_us(shape, facts, Constants(*constants)))


def _fit_one(
    shape: Shape, facts: Facts, us: torch.Tensor, weights: torch.Tensor, prior: torch.Tensor, pull: float
) -> torch.Tensor:
    """Return logarithms of constants: least squares of log times, by Levenberg and Marquardt."""
    target, count, step = us.log(), len(prior), 1e-4
    theta, damping = prior.clone(), 1e-2

    def cost(at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        errors = weights * (_predicted(at[None], shape, facts)[0].log() - target)
        robust = 2 * _NOISE**2 * ((1 + (errors / _NOISE) ** 2).sqrt() - 1)
        return robust.sum() + (pull**2 * (at - prior) ** 2).sum(), errors

    value, errors = cost(theta)
    for _ in range(_STEPS):
        moved = theta + torch.cat([torch.zeros(1, count), step * torch.eye(count)]).double()
        predicted = _predicted(moved, shape, facts).log()
        slopes = weights[:, None] * ((predicted[1:] - predicted[0]) / step).T
        trust = (1 + (errors / _NOISE) ** 2) ** -0.5
        square = slopes.T @ (slopes * trust[:, None]) + pull**2 * torch.eye(count, dtype=torch.float64)
        down = slopes.T @ (trust * errors) + pull**2 * (theta - prior)
        for _ in range(8):
            damped = square + damping * torch.diag(square.diagonal() + 1e-9)
            tried = theta - torch.linalg.solve(damped, down).clamp(-1, 1)
            new, new_errors = cost(tried)
            if new < value:
                break
            damping *= 4
        else:
            return theta
        gained, theta, value, errors, damping = value - new, tried, new, new_errors, damping / 3
        if gained < 1e-6 * value:
            break
    return theta


def fitted(
    shapes: Sequence[Shape],
    kinds: Sequence[Any],
    facts: Sequence[Facts],
    us: torch.Tensor,
    rows: torch.Tensor,
) -> list[Constants]:
    """Return the constants of each config, fitted to its times at the sizes of `rows`.

    Configs of one kind are alike: what one was measured at too few sizes to tell, it takes from the others.
    """
    fastest = us.nan_to_num(math.inf).amin(1)
    defaults = torch.tensor(astuple(Constants()), dtype=torch.float64).log()
    found = [defaults] * len(shapes)
    common: dict[Any, torch.Tensor] = dict.fromkeys(kinds, torch.zeros(len(defaults), dtype=torch.float64))
    for pull in _ROUNDS:
        new = []
        for place, (shape, kind) in enumerate(zip(shapes, kinds, strict=True)):
            own = rows[~us[rows, place].isnan()]
            at = Facts(*(column[own] for column in facts[place]))
            times = us[own, place]
            weights = (times / fastest[own]).clamp(max=4) ** -_PRESSURE
            prior = _begin(shape, defaults) + common[kind]
            new.append(_fit_one(shape, at, times, weights, prior, pull) if len(own) else prior)
        found = new
        for kind in common:
            alike = [found[i] - _begin(shapes[i], defaults) for i in range(len(shapes)) if kinds[i] == kind]
            common[kind] = torch.stack(alike).median(0).values
    return [Constants(*theta.exp().tolist()) for theta in found]


def _begin(shape: Shape, defaults: torch.Tensor) -> torch.Tensor:
    """Return the constants to begin with: the work of a block by its size."""
    names = [f.name for f in fields(Constants)]
    begin = defaults.clone()
    clocks_us = 2 * shape.block_m * shape.block_n * shape.block_k / 5.2e6
    begin[names.index("work")] = math.log(clocks_us)
    begin[names.index("turn")] = math.log(max(clocks_us, 0.15))
    return begin


def loss_of(shares: torch.Tensor) -> Loss:
    """Return what these shares come to."""
    median, p95 = (round(float(shares.quantile(q)), 4) for q in (0.5, 0.95))
    return Loss(len(shares), median, p95, round(float(shares.max()), 4))
