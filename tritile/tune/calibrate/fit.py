"""Choose a portfolio by measured times, and fit each config's constants to them.

Times are in a tensor (sizes, configs) of microseconds, NaN where a config was not timed at a size.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any, Final

import numpy as np
import torch

from tritile.core.device import Device
from tritile.core.problem import MatmulProblem, Tiled
from tritile.planning import aten
from tritile.planning.aten import AtenTimes
from tritile.planning.formula import Formula
from tritile.planning.portfolio import LAYERS, OWN, Correction, Loss

_WORST: Final = 3.0  # slowdown that slower and missing times count as
_ROUNDS: Final = (0.05, 0.3, 0.3)  # pull towards the constants that a kind shares, round by round
_STEPS: Final = 60
_NOISE: Final = 0.05  # share of a measured time beyond which errors count less than squared
_CONFIG_DECAY: Final = 15e3  # weight decay of a config's own weights, times the number of samples
_UNTIMED: Final = 1.1  # least slowdown of a config at a size where it was not timed
_WIDE: Final = 4.0  # standard deviations at which an input is clamped
_LEAST_SPREAD: Final = 0.05  # an input's least standard deviation
_BATCHES: Final = 1500  # to train a correction
_BATCH: Final = 1024  # samples of each
_RATE: Final = 2e-3  # learning rate
_DECAY: Final = 1e-4  # weight decay of the other weights of a correction
_JITTER: Final = 0.15  # standard deviation of the noise on inputs, that of which is 1
_OWN_SPREAD: Final = 0.3  # initial standard deviation of configs' own inputs
_ATEN_BATCHES: Final = 2500  # to train the network of torch's times
_ATEN_BATCH: Final = 256
_MARGINS: Final = (1.0, 1.03, 1.06, 1.1, 1.15, 1.2, 1.3, 1.5)
_ATEN_DECAY: Final = 1e-3
_HOST: Final[Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever torch's defaults are
_PRESSURE: Final = 1.5  # power by which slower configs count less


def chosen(us: torch.Tensor, count: int) -> list[int]:
    """Choose `count` configs one by one, each lowering the mean time of the best of all the most."""
    fastest = us.nan_to_num(math.inf).amin(1, keepdim=True)
    losses = (us / fastest).nan_to_num(_WORST).clamp(max=_WORST).log()
    best = torch.full((len(us),), math.log(_WORST), dtype=us.dtype, device="cpu")
    found: list[int] = []
    for _ in range(min(count, us.shape[1])):
        means = torch.minimum(losses, best[:, None]).mean(0)
        means[found] = math.inf
        found.append(int(means.argmin()))
        best = torch.minimum(best, losses[:, found[-1]])
    return found


def facts_at(
    formula: Formula, problems: Sequence[Tiled], device: Device, key: Any
) -> tuple[torch.Tensor, ...]:
    """Return the facts of many problems as tensors, so that a formula predicts all of them at once."""
    rows = [formula.facts(problem, device, key) for problem in problems]
    columns = [torch.tensor(column, dtype=torch.float64, device="cpu") for column in zip(*rows, strict=True)]
    return type(rows[0])(*columns)


def _predicted(formula: Formula, theta: torch.Tensor, shape: Any, facts: Any) -> torch.Tensor:
    """Return microseconds (rows of `theta`, sizes) for constants that are exponentials of `theta`."""
    values = theta.exp()
    constants = formula.constants(*(values[:, i, None] for i in range(theta.shape[1])))
    return torch.as_tensor(formula.us(shape, facts, constants), device="cpu")


def _fit_one(
    predict: Callable[[torch.Tensor], torch.Tensor],
    us: torch.Tensor,
    weights: torch.Tensor,
    prior: torch.Tensor,
    pull: float,
) -> torch.Tensor:
    """Fit logarithms of constants to log times: robust least squares, by Levenberg and Marquardt.

    `predict` returns the times (rows, sizes) of rows of such logarithms.
    """
    target, count, step = us.log(), len(prior), 1e-4
    theta, damping = prior.clone(), 1e-2

    def cost(at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        errors = weights * (predict(at[None])[0].log() - target)
        robust = 2 * _NOISE**2 * ((1 + (errors / _NOISE) ** 2).sqrt() - 1)
        return robust.sum() + (pull**2 * (at - prior) ** 2).sum(), errors

    value, errors = cost(theta)
    for _ in range(_STEPS):
        moved = theta + torch.cat([torch.zeros(1, count, **_HOST), step * torch.eye(count, **_HOST)]).double()
        predicted = predict(moved).log()
        slopes = weights[:, None] * ((predicted[1:] - predicted[0]) / step).T
        trust = (1 + (errors / _NOISE) ** 2) ** -0.5
        square = slopes.T @ (slopes * trust[:, None]) + pull**2 * torch.eye(
            count, dtype=torch.float64, device="cpu"
        )
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
    formula: Formula,
    shapes: Sequence[Any],
    kinds: Sequence[Any],
    facts: Sequence[Any],
    us: torch.Tensor,
    rows: torch.Tensor,
) -> list[Any]:
    """Return the constants of each config, fitted to its times at the sizes of `rows`.

    Configs of one kind are alike: a config that was timed at few sizes takes its constants from the others.
    """
    fastest = us.nan_to_num(math.inf).amin(1)
    begin = [
        torch.tensor(astuple(formula.begin(shape)), dtype=torch.float64, device="cpu").log()
        for shape in shapes
    ]
    found, common = begin, dict.fromkeys(kinds, torch.zeros(len(begin[0]), dtype=torch.float64, device="cpu"))
    for pull in _ROUNDS:
        new = []
        for index, (shape, kind) in enumerate(zip(shapes, kinds, strict=True)):
            own = rows[~us[rows, index].isnan()]
            at = type(facts[index])(*(column[own] for column in facts[index]))
            times, prior = us[own, index], begin[index] + common[kind]
            weights = _slowdown_weights(times / fastest[own])
            predict = functools.partial(_predicted, formula, shape=shape, facts=at)
            new.append(_fit_one(predict, times, weights, prior, pull) if len(own) else prior)
        found = new
        for kind in common:
            alike = [found[i] - begin[i] for i in range(len(shapes)) if kinds[i] == kind]
            common[kind] = torch.stack(alike).median(0).values
    return [formula.constants(*theta.exp().tolist()) for theta in found]


def _slowdown_weights(ratios: torch.Tensor) -> torch.Tensor:
    return ratios.clamp(max=4) ** -_PRESSURE


def correction(
    inputs: torch.Tensor, predicted: torch.Tensor, us: torch.Tensor, rows: torch.Tensor
) -> Correction:
    """Return the correction fitted to the times at the sizes of `rows`.

    `inputs` is (sizes, configs, inputs), `predicted` (sizes, configs), in microseconds. A config that is
    predicted to be near the fastest counts as much as one that is. A config not timed at a size is taken to
    be slower than the fastest by at least `_UNTIMED`, so that it is not picked for lack of data.
    """
    inputs, predicted, us = inputs[rows], predicted[rows], us[rows]
    timed, fastest = ~us.isnan(), us.nan_to_num(math.inf).amin(1, keepdim=True)
    least = us.where(timed, _UNTIMED * fastest)
    ratios = least / fastest, predicted / predicted.amin(1, keepdim=True)
    emphasis, missed = _slowdown_weights(torch.minimum(*ratios)), (least / predicted).log()
    middle, spread = inputs[timed].mean(0), inputs[timed].std(0).clamp(min=_LEAST_SPREAD)
    scaled = ((inputs - middle) / spread).clamp(-_WIDE, _WIDE)
    configs = torch.arange(us.shape[1], device="cpu").expand_as(us)
    x, y, counts, is_timed, config = (
        each.flatten(0, 1) for each in (scaled, missed, emphasis, timed, configs)
    )
    own, first, second, weights = _learnt(x, y, counts, is_timed, config, us.shape[1])
    slopes = first[:, 1 : 1 + len(middle)] / spread  # of inputs that are not scaled
    first = torch.cat([first[:, :1] - (slopes @ middle)[:, None], slopes, first[:, 1 + len(middle) :]], 1)
    ranges = torch.stack([middle - _WIDE * spread, middle + _WIDE * spread])
    return Correction(*(tuple(map(tuple, each.tolist())) for each in (ranges, own, first, second, weights)))


def _learnt(
    x: torch.Tensor,
    y: torch.Tensor,
    emphasis: torch.Tensor,
    timed: torch.Tensor,
    config: torch.Tensor,
    configs: int,
) -> list[torch.Tensor]:
    """Train the network of `Correction` on (samples, inputs) of so many configs; return its parameters.

    `y` of a sample that was not timed is a lower bound. For sizes left out, noise is added to inputs, and
    parameters are averaged over the second half of the steps (Izmailov et al., "Averaging weights leads to
    wider optima and better generalization", 2018).
    """
    x, y, emphasis = (each.float() for each in (x, y, emphasis))
    dice, (one, two), inputs = torch.Generator().manual_seed(0), LAYERS, x.shape[1] + OWN
    own = _OWN_SPREAD * torch.randn(configs, OWN, generator=dice, **_HOST)
    first = torch.randn(one, 1 + inputs, generator=dice, **_HOST) * (3 * inputs) ** -0.5
    second = torch.randn(two, 1 + one, generator=dice, **_HOST) * (3 * one) ** -0.5
    shared, weights = (
        torch.randn(1 + two, generator=dice, **_HOST) * 0.1 * two**-0.5,
        torch.zeros(configs, 1 + two, **_HOST),
    )
    members = [each.requires_grad_() for each in (own, first, second, shared, weights)]
    groups = [
        {"params": members[:4], "weight_decay": _DECAY},
        {"params": weights, "weight_decay": _CONFIG_DECAY / len(x)},
    ]
    optimizer, mean = torch.optim.AdamW(groups, _RATE), [torch.zeros_like(each) for each in members]
    for step in range(_BATCHES):
        batch = torch.randint(len(x), (_BATCH,), generator=dice, device="cpu")
        moved = x[batch] + _JITTER * torch.randn(_BATCH, x.shape[1], generator=dice, **_HOST)
        units = (torch.cat([moved, own[config[batch]]], 1) @ first[:, 1:].T + first[:, 0]).relu()
        units = (units @ second[:, 1:].T + second[:, 0]).relu()
        each = shared + weights[config[batch]]
        short = y[batch] - each[:, 0] - (units * each[:, 1:]).sum(1)
        errors = emphasis[batch] * short.where(timed[batch], short.clamp(min=0)) / _NOISE
        optimizer.zero_grad()
        (((1 + errors**2).sqrt() - 1).sum() / emphasis[batch].sum()).backward()
        optimizer.step()
        if step >= _BATCHES // 2:
            with torch.no_grad():
                for total, member in zip(mean, members, strict=True):
                    total += member / (_BATCHES - _BATCHES // 2)
    own, first, second, shared, weights = (each.double() for each in mean)
    return [own, first, second, shared + weights]


def aten_times(
    classes: Sequence[str], problems: Sequence[MatmulProblem], us: torch.Tensor, device: Device,
    versions: Mapping[str, str], picks: torch.Tensor, predicted: torch.Tensor,
) -> AtenTimes:  # fmt: skip
    """Fit torch's times at problems of some classes. Its error is that of each quarter by the others.

    `picks` and `predicted` are microseconds of the portfolio's pick at sizes left out, as measured and as
    predicted, NaN where the pick was not timed: they decide the margin.
    """
    found = [aten.features(problem, device) for problem in problems]
    x = torch.tensor(np.array([inputs for inputs, _ in found]), device="cpu")
    y = us.log() - torch.tensor([floor for _, floor in found], dtype=torch.float64, device="cpu").log()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0), device="cpu")
    quarters = order.tensor_split(4)
    held_out = torch.zeros_like(y)
    for left_out in quarters:
        rows = torch.cat([each for each in quarters if each is not left_out])
        part = AtenTimes(tuple(classes), *_network(x[rows], y[rows]), 0.0, 1.0, len(rows), versions)
        held_out[left_out] = torch.from_numpy(part.factors(x[left_out].numpy()))
    error, ratios = float((held_out - y).square().mean().sqrt()), predicted / us * (y - held_out).exp()
    has_pick = ~(picks + predicted).isnan()

    def mean(margin: float) -> float:
        return float(torch.where(ratios >= margin, us, picks)[has_pick].log().mean())

    margin = min(_MARGINS, key=mean) if bool(has_pick.any()) else _MARGINS[-1]
    return AtenTimes(tuple(classes), *_network(x, y), error, margin, len(y), versions)


def _network(x: torch.Tensor, y: torch.Tensor) -> tuple[Any, tuple[Any, Any, Any]]:
    """Train the network of `AtenTimes` on inputs (samples, inputs): return its ranges and its layers."""
    middle, spread = x.mean(0), x.std(0).clamp(min=_LEAST_SPREAD)
    scaled, target = ((x - middle) / spread).clamp(-_WIDE, _WIDE).float(), y.float()
    dice, sizes = torch.Generator().manual_seed(0), (x.shape[1], *aten.LAYERS, 1)
    layers = [
        (torch.randn(after, 1 + before, generator=dice, **_HOST) * (3 * before) ** -0.5).requires_grad_()
        for before, after in itertools.pairwise(sizes)
    ]
    optimizer = torch.optim.AdamW(layers, _RATE, weight_decay=_ATEN_DECAY)
    means = [torch.zeros_like(each) for each in layers]
    for step in range(_ATEN_BATCHES):
        batch = torch.randint(len(y), (_ATEN_BATCH,), generator=dice, device="cpu")
        units = scaled[batch] + _JITTER * torch.randn(_ATEN_BATCH, x.shape[1], generator=dice, **_HOST)
        for layer in layers[:-1]:
            units = (units @ layer[:, 1:].T + layer[:, 0]).relu()
        errors = ((units @ layers[-1][:, 1:].T + layers[-1][:, 0])[:, 0] - target[batch]) / _NOISE
        optimizer.zero_grad()
        ((1 + errors**2).sqrt() - 1).mean().backward()
        optimizer.step()
        if step >= _ATEN_BATCHES // 2:
            with torch.no_grad():
                for mean, layer in zip(means, layers, strict=True):
                    mean += layer / (_ATEN_BATCHES - _ATEN_BATCHES // 2)
    first, *rest = (each.double() for each in means)
    slopes = first[:, 1:] / spread  # of inputs that are not scaled
    first = torch.cat([first[:, :1] - (slopes @ middle)[:, None], slopes], 1)
    ranges = torch.stack([middle - _WIDE * spread, middle + _WIDE * spread])
    rows = [tuple(map(tuple, each.tolist())) for each in (ranges, first, *rest)]
    return rows[0], (rows[1], rows[2], rows[3])


def loss_of(shares: torch.Tensor) -> Loss:
    """Return count, median, 95th percentile and maximum of lost shares of time."""
    median, p95 = (round(float(shares.quantile(q)), 4) for q in (0.5, 0.95))
    return Loss(len(shares), median, p95, round(float(shares.max()), 4))
