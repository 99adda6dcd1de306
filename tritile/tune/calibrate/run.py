"""Calibrate a class on the current GPU: candidates, sweep, portfolio."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import MatmulProblem, Tiled
from tritile.errors import TuningError
from tritile.families.matmul_tma import family as descriptor
from tritile.families.registry import FAMILIES
from tritile.families.space import legal_configs
from tritile.planning import model
from tritile.planning.aten import AtenTimes, versions
from tritile.planning.classes import MEASURED, class_of
from tritile.planning.formula import FORMULAS
from tritile.planning.portfolio import Loss, Portfolio, factors, inputs_of
from tritile.planning.table import Table
from tritile.tune.calibrate import fit
from tritile.tune.calibrate.sweep import Row, banded, kind_of
from tritile.tuner.measure.workers import WorkerPool

CONFIGS: Final = 48  # of a portfolio: with 96 of them picks at sizes left out are 0.1% faster
_SPLIT_ONLY: Final = ("bf16_nn", "bf16_nt")
_HOPPER: Final = 90
_NEAR: Final = 1.2  # times the least predicted time, up to which a config is a candidate
_TIMED: Final = 30  # the fewest sizes with a time of torch's to which its times are fitted
_FEWEST: Final = 5  # the fewest configs timed at a size that counts
_EARNED: Final = 0.0025  # the least share of the picks' time that corrections must save


def is_candidate(config: Config, name: str | None, device: Device) -> bool:
    """False for a config that a class's portfolio does not need.

    On Hopper `warpgroups` computes aligned 16-bit products in the way of `descriptor` without SPLIT_K, and is
    faster at nearly every size.
    """
    if name not in _SPLIT_ONLY or device.nvidia != _HOPPER or config.family != descriptor.NAME:
        return True
    return config["SPLIT_K"] > 1


def likely(problem: Tiled, device: Device) -> dict[Config, float]:
    """Return the candidates predicted to come near the fastest, with their microseconds."""
    families, name = FAMILIES[problem.op], class_of(problem)
    legal = [c for c in legal_configs(problem, device) if families[c.family].margin is None]
    ranked = [(model.predict_us(c, problem, device), c) for c in legal if is_candidate(c, name, device)]
    least = min(us for us, _ in ranked)
    found: dict[Config, float] = {}
    for us, config in sorted(ranked, key=lambda pair: (pair[0], pair[1].key)):
        if us <= _NEAR * least:
            found.setdefault(banded(config), us)
    return found


def candidates(
    name: str, problems: Sequence[Tiled], device: Device, tables: Sequence[Table], count: int
) -> list[Config]:
    """Return `count` configs to sweep: a class's portfolios and winners, and those predicted to be fastest.

    Half are chosen so that every size, even a rare kind, has a config near its fastest. Configs that add
    nothing to that come in the order of how many sizes they are near the fastest at.
    """
    own: dict[Config, None] = {}
    for each in tables:
        if name in each.portfolios:
            own |= dict.fromkeys(map(banded, each.portfolios[name].configs))
    for entry in (entry for each in tables for entry in each.entries):
        plain = not getattr(entry.problem, "epilogue", "")
        if plain and isinstance(entry.problem, Tiled) and class_of(entry.problem) == name:
            own[banded(entry.config)] = None
    with WorkerPool() as pool:
        futures = [pool.submit(likely, problem, device) for problem in problems]
        rows = [Row(problem, each.result()) for problem, each in zip(problems, futures, strict=True)]
    common = [config for config, _ in Counter(config for row in rows for config in row.times).most_common()]
    cover = [common[index] for index in fit.chosen(_matrix(rows, common), count)]
    earlier = [config for config in own if is_candidate(config, name, device)]
    return list(dict.fromkeys([*cover[: count // 2], *earlier, *cover]))[:count]


def _matrix(rows: Sequence[Row], configs: Sequence[Config]) -> torch.Tensor:
    indices = {config: index for index, config in enumerate(configs)}
    us = torch.full((len(rows), len(configs)), torch.nan, dtype=torch.float64, device="cpu")
    for row, measured in enumerate(rows):
        for config, each in measured.times.items():
            if config in indices:
                us[row, indices[config]] = each
    return us


class LeftOut(NamedTuple):
    """Microseconds at sizes left out, of picks by a portfolio of the other sizes; NaN if not timed."""

    alone: torch.Tensor  # of the pick by the formula alone
    corrected: torch.Tensor  # of the pick with corrections
    fastest: torch.Tensor  # of the portfolio's fastest
    predicted: torch.Tensor  # of the pick, as predicted with corrections

    @property
    def earned(self) -> bool:
        return float((self.corrected / self.alone).log().nanmean()) < -_EARNED

    @property
    def picks(self) -> torch.Tensor:
        return self.corrected if self.earned else self.alone


class Measured:
    """Times of many configs at many sizes of a class. Raises TuningError for too few sizes.

    Portfolios have corrections if these make the picks at sizes left out faster.
    """

    def __init__(self, name: str, rows: Sequence[Row], device: Device) -> None:
        timed = dict.fromkeys(config for row in rows for config in row.times)
        self.configs = [config for config in timed if is_candidate(config, name, device)]
        own = set(self.configs)
        rows = [row for row in rows if len(row.times.keys() & own) >= _FEWEST]
        if len(rows) < 4:
            raise TuningError(f"{name}: {len(rows)} sizes were timed, too few to fit a portfolio to")
        self.name, self.device = name, device
        self.problems, self._formula = [row.problem for row in rows], FORMULAS[MEASURED[name].op]
        self.us = _matrix(rows, self.configs)
        self.fastest = torch.tensor(
            [min(row.times.values()) for row in rows], dtype=torch.float64, device="cpu"
        )
        self.torch_us = torch.tensor(
            [row.torch_us or math.nan for row in rows], dtype=torch.float64, device="cpu"
        )
        self._facts: dict[Any, Any] = {}
        self._traits = np.array([self._formula.traits(problem) for problem in self.problems])

    def _facts_of(self, config: Config) -> Any:
        key = self._formula.key(config)
        if key not in self._facts:
            self._facts[key] = fit.facts_at(self._formula, self.problems, self.device, key)
        return self._facts[key]

    def _fitted(
        self, rows: torch.Tensor, count: int
    ) -> tuple[list[int], Portfolio, torch.Tensor, torch.Tensor]:
        """Choose and fit a portfolio by the sizes of `rows`; return indices, portfolio and predictions.

        Both tensors of times are (sizes, configs) at all sizes: by the formula alone, and with corrections.
        """
        indices = fit.chosen(self.us[rows], count)
        own = [self.configs[index] for index in indices]
        formula, facts = self._formula, [self._facts_of(config) for config in own]
        shapes = [formula.shape(config, self.problems[0], self.device) for config in own]
        kinds = [kind_of(config)[:-1] for config in own]
        constants = fit.fitted(formula, shapes, kinds, facts, self.us[:, indices], rows)
        made = Portfolio(self.name, tuple(own), tuple(constants), Loss(1, 0.0, 0.0, 0.0))
        parts = [formula.parts(*each) for each in zip(shapes, facts, constants, strict=True)]
        us = torch.stack([each[0] for each in parts], 1)
        inputs = np.stack([self._inputs(each) for each in parts], 1)
        correction = fit.correction(torch.from_numpy(inputs), us, self.us[:, indices], rows)
        corrected = us * torch.from_numpy(factors(inputs, *correction.arrays()))
        return indices, replace(made, correction=correction), us, corrected

    def _inputs(self, parts: Sequence[Any]) -> Any:
        """Return the inputs (sizes, inputs) of a config's correction; some parts are the same for all."""
        columns = np.broadcast_arrays(*map(np.asarray, parts))
        return inputs_of(np.stack(columns, -1), self._traits)

    def left_out(self, count: int = CONFIGS) -> LeftOut:
        """Try each quarter of the sizes with the portfolio that the other quarters choose and fit."""
        times = torch.full((len(self.us), 4), torch.nan, dtype=torch.float64, device="cpu")
        order = torch.randperm(len(self.us), generator=torch.Generator().manual_seed(0), device="cpu")
        quarters = order.tensor_split(4)
        for left_out in quarters:
            rows = torch.cat([each for each in quarters if each is not left_out])
            indices, _, *predictions = self._fitted(rows, count)
            own = self.us[left_out][:, indices].nan_to_num(torch.inf)
            timed = [each[left_out].where(own < torch.inf, torch.inf) for each in predictions]
            picks = [own.gather(1, each.argmin(1, keepdim=True))[:, 0] for each in timed]
            times[left_out] = torch.stack([*picks, own.amin(1), timed[1].amin(1)], 1)
        return LeftOut(*times.where(times < torch.inf, torch.nan).unbind(1))

    def lost(self, us: torch.Tensor) -> torch.Tensor:
        """Return by what share these times exceed the fastest config's, where timed."""
        shares = us / self.fastest - 1
        return shares[~shares.isnan()]

    def portfolio(self, left_out: LeftOut, count: int = CONFIGS) -> Portfolio:
        """Return the portfolio chosen and fitted by all sizes, with the loss of picks at sizes left out."""
        _, made, *_ = self._fitted(torch.arange(len(self.us), device="cpu"), count)
        correction = made.correction if left_out.earned else None
        return replace(made, correction=correction, loss=fit.loss_of(self.lost(left_out.picks)))

    def aten(self, left_out: LeftOut) -> AtenTimes | None:
        """Fit the predictor of torch's times of products; None if torch was timed at few sizes."""
        timed = ~self.torch_us.isnan()
        if MEASURED[self.name].op != MatmulProblem.op or timed.sum() < _TIMED:
            return None
        pairs = zip(self.problems, timed.tolist(), strict=True)
        rows = [problem for problem, good in pairs if good and isinstance(problem, MatmulProblem)]
        us, *picks = (each[timed] for each in (self.torch_us, left_out.corrected, left_out.predicted))
        return fit.aten_times([self.name], rows, us, self.device, versions(), *picks)
