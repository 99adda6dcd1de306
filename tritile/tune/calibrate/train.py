"""Train a predictor on sweeps: times of many configs, and of torch, at many sizes.

A network learns the logarithm of measured time over the roofline of each config. Held-out
sizes show how much slower its picks are than the best.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from tritile.choose import aten, inputs
from tritile.choose.classes import MEASURED, group_of
from tritile.choose.inputs import Inputs
from tritile.choose.predictor import ABSURD, OWN, UNITS, WIDE, Class, Loss, Network, Predictor, work_of
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.permutation import PermuteProblem
from tritile.errors import TuningError
from tritile.families.registry import digests
from tritile.families.space import illegal
from tritile.tune.calibrate.candidates import covering, is_candidate
from tritile.tune.calibrate.files import Sweep
from tritile.tune.calibrate.sweep import Row

STEPS: Final = 4000
_FEWEST_STEPS, _STEPS_A_SIZE = 600, 4  # of training on few sizes
FOLDS: Final = 4
SEEDS: Final = 4  # networks that are averaged: picks lose a tenth less than by two
_CONFIGS: Final = 96  # of a class and a GPU, chosen to cover its sizes
_PERMUTED: Final = 48  # of permutations, whose estimates take long
_FEWEST: Final = 5  # the fewest configs timed at a size that counts
_SIZES: Final = 4  # the fewest of a class
_OUTLIER: Final = 3.0  # times the median distance from the roofline: the machine was slow, not the config
_BATCH: Final = 64  # sizes of a step
_RATE: Final = 3e-3  # learning rate
_JITTER: Final = 0.15  # standard deviation of the noise added to standardised inputs
_NOISE: Final = 0.05  # relative error at which the pseudo-Huber loss turns from quadratic to linear
_UNTIMED: Final = 1.1  # least slowdown of a config at a size where it was not timed
_UNTIMED_SHARE: Final = 0.15  # share of the untimed configs that a step samples
_SLOWDOWN_POWER: Final = 1.5  # a config's weight is its slowdown to minus this power
_DECAY, _OWN_DECAY = 1e-2, 0.05  # weight decay; of a column's own weights
_LEAST_SPREAD: Final = 0.05  # an input's least standard deviation
_HOST: Final[Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever torch's defaults are
_AVERAGED: Final = 0.25  # share of the steps, the last ones, whose weights are averaged


class Size(NamedTuple):
    """What was timed of a class at a size on a GPU, and the inputs of all its columns."""

    name: str
    device: Device
    problem: Any
    inputs: Inputs
    us: Any  # (columns of the class,), NaN where it was not timed
    torch_us: float  # NaN if it was not timed
    fastest: float  # of all that was timed, torch among them


# --- From sweeps to sizes ---


def usable(sweep: Sweep) -> Sweep:
    """Return a sweep without what is illegal now, outliers, and sizes with few configs.

    Raises TuningError if too few sizes are left.
    """
    name, device, rows, _ = sweep
    configs = list(dict.fromkeys(config for row in rows for config in row.times))
    allowed = {config for config in configs if is_candidate(config, name, device)}
    op, found = MEASURED[name].op, []
    for row in rows:
        times = {
            config: us
            for config, us in row.times.items()
            if config in allowed and illegal(config, row.problem, device) is None
        }
        if len(times) < _FEWEST:
            continue
        made = _inputs_of(op, [*times], row.problem, device)
        off = np.array([*times.values()]) / made.roofline
        kept = dict(
            pair for pair, far in zip(times.items(), off / np.median(off), strict=True) if far <= _OUTLIER
        )
        found.append(row._replace(times=kept))
    if len(found) < _SIZES:
        raise TuningError(f"{name}: {len(found)} sizes were timed, too few to train a predictor on")
    return Sweep(name, device, found)


def _inputs_of(op: str, configs: Sequence[Config], problem: Any, device: Device) -> Inputs:
    if op == PermuteProblem.op:
        return inputs.of_permutation(problem, configs, device)
    return inputs.of_product(problem, inputs.tiles_of(configs, problem, device), device)


class Samples:
    """Hold the sizes of some sweeps, and the columns of their classes."""

    def __init__(self, sweeps: Iterable[Sweep]) -> None:
        found = [usable(sweep) for sweep in sweeps]
        self.columns: list[Config] = []
        self.classes: dict[str, list[int]] = {}
        places: dict[tuple[str, Config], int] = {}
        for name, _, rows, _ in found:
            timed = list(dict.fromkeys(config for row in rows for config in row.times))
            own = self.classes.setdefault(name, [])
            is_permuted = MEASURED[name].op == PermuteProblem.op
            for config in covering(rows, timed, _PERMUTED if is_permuted else _CONFIGS):
                place = places.setdefault((group_of(name), config), len(self.columns))
                if place == len(self.columns):
                    self.columns.append(config)
                if place not in own:
                    own.append(place)
        self.numbers = np.array([inputs.of_config(config) for config in self.columns])
        sizes = (self._size(name, device, row) for name, device, rows, _ in found for row in rows)
        self.sizes = [size for size in sizes if not np.isnan(size.us).all()]

    def _size(self, name: str, device: Device, row: Row) -> Size:
        configs = [self.columns[column] for column in self.classes[name]]
        made = _inputs_of(MEASURED[name].op, configs, row.problem, device)
        us = np.array([row.times.get(config, np.nan) for config in configs])
        torch_us = row.torch_us if row.torch_us and aten.illegal(row.problem) is None else np.nan
        fastest = min(*row.times.values(), torch_us if torch_us == torch_us else np.inf)
        return Size(name, device, row.problem, made, us, torch_us, fastest)

    def folds(self, count: int, seed: int) -> Any:
        """Return the fold of each size, below `count`; a problem is in the same one on all GPUs."""
        dice = np.random.RandomState(seed)
        of = {problem: dice.randint(count) for problem in dict.fromkeys(size.problem for size in self.sizes)}
        return np.array([of[size.problem] for size in self.sizes])


# --- Training ---


class _Batches:
    """Hold the samples of some sizes as tensors, scaled; a sample is a size and a column.

    `at` (sizes, most columns) has the places of a size's samples, -1 beyond its last.
    """

    def __init__(self, samples: Samples, rows: Sequence[int]) -> None:
        sizes = [samples.sizes[row] for row in rows]
        columns = [np.array(samples.classes[size.name]) for size in sizes]
        counts = np.array([len(each) for each in columns])
        ends = counts.cumsum()
        steps = np.arange(counts.max())
        self.at = torch.from_numpy(np.where(steps < counts[:, None], (ends - counts)[:, None] + steps, -1))
        self.column = torch.from_numpy(np.concatenate(columns))
        us = np.concatenate([size.us for size in sizes])
        roofline = np.concatenate([size.inputs.roofline for size in sizes])
        own_best = np.array([np.nanmin(size.us) for size in sizes])
        torch_us = np.array([size.torch_us for size in sizes])
        best = np.fmin(own_best, torch_us)
        self.timed = torch.from_numpy(~np.isnan(us))
        least = np.where(np.isnan(us), _UNTIMED * np.repeat(best, counts), us)
        self.roofline = _tensor(np.log(roofline))
        self.y = _tensor(np.log(least / roofline))
        self.ratio = _tensor(least / np.repeat(best, counts))
        self.torch_timed = torch.from_numpy(~np.isnan(torch_us))
        torch_roofline = np.array([size.inputs.torch_roofline for size in sizes])
        has_torch = np.isfinite(torch_roofline)
        torch_roofline = np.where(has_torch, torch_roofline, 1.0)
        self.torch_roofline = _tensor(np.log(torch_roofline))
        self.torch_y = _tensor(np.log(np.where(np.isnan(torch_us), 1.0, torch_us) / torch_roofline))
        self.torch_ratio = _tensor(np.where(np.isnan(torch_us), 1.0, torch_us / best))
        of_class = {name: [size.name for size in sizes].count(name) for name in samples.classes}
        self.chance = _tensor(np.array([of_class[size.name] ** -0.5 for size in sizes]))
        shared = np.array([size.inputs.shared for size in sizes])
        tiles = np.concatenate([size.inputs.tiles for size in sizes])
        by_torch = np.array([size.inputs.torch for size in sizes])
        self.scales = {
            "shared": _scale(shared),
            "tiles": _scale(tiles[~np.isnan(us)]),
            "config": _scale(samples.numbers),
            "torch": _scale(by_torch[~np.isnan(torch_us)] if (~np.isnan(torch_us)).any() else by_torch),
        }
        self.shared, self.tiles, self.config, self.torch = (
            _tensor(np.clip((values - self.scales[name][0]) / self.scales[name][1], -WIDE, WIDE))
            for name, values in (
                ("shared", shared),
                ("tiles", tiles),
                ("config", samples.numbers),
                ("torch", by_torch),
            )
        )


def _tensor(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.float32, device="cpu")


def _scale(values: Any) -> Any:
    """Return mean and standard deviation (2, inputs) of inputs (samples, inputs)."""
    return np.stack([values.mean(0), np.maximum(values.std(0), _LEAST_SPREAD)])


def trained(samples: Samples, rows: Sequence[int], seed: int, steps: int = STEPS) -> Network:
    """Train a network on the times at the sizes of `rows`.

    A config that is predicted to be near the fastest counts as much as one that is. One that was not timed at
    a size is taken to be slower than the fastest by at least `_UNTIMED`, so that it is not picked for lack of
    data. Errors count for themselves and relative to those at the same size, as picks compare times there.
    To generalise to other sizes, noise is added to inputs, and the last weights are averaged (Izmailov et
    al., "Averaging weights leads to wider optima and better generalization", 2018).
    """
    data, dice = _Batches(samples, rows), torch.Generator().manual_seed(seed)
    w = _initial(data, len(samples.columns), dice)
    own = [w["own_weights"]]
    groups = [
        {"params": [value for name, value in w.items() if name != "own_weights"], "weight_decay": _DECAY},
        {"params": own, "weight_decay": _OWN_DECAY},
    ]
    optimizer = torch.optim.AdamW(groups, _RATE, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=steps, pct_start=0.15)
    means, averaged = {name: torch.zeros_like(value) for name, value in w.items()}, int(_AVERAGED * steps)
    for step in range(steps):
        loss = _loss(w, data, dice)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step >= steps - averaged:
            with torch.no_grad():
                for name, value in w.items():
                    means[name] += value / averaged
    arrays = {name: value.double().numpy() for name, value in means.items()}
    arrays["weights"] = arrays.pop("own_weights") + np.append(0.0, arrays.pop("last"))
    scales = {f"{name}_scale": values for name, values in data.scales.items()}
    return Network(**{each.name: (arrays | scales)[each.name] for each in fields(Network)})


def _initial(data: _Batches, columns: int, dice: torch.Generator) -> dict[str, torch.Tensor]:
    """Return the initial weights; `last` is shared by all columns, `own_weights` is added to it."""
    one, two = UNITS
    sides = {name: getattr(data, name).shape[1] for name in ("shared", "tiles", "config", "torch")}
    scale = (3 * (sides["shared"] + sides["tiles"] + sides["config"] + OWN)) ** -0.5

    def random(rows: int, length: int, size: float) -> torch.Tensor:
        return torch.randn(rows, length, generator=dice, **_HOST) * size

    found = {
        "own": random(columns, OWN, 0.3),
        "shared": random(sides["shared"], one, scale),
        "tiles": random(sides["tiles"], one, scale),
        "config": random(sides["config"] + OWN, one, scale),
        "torch": random(sides["shared"] + sides["torch"], one, scale),
        "start": torch.zeros(2, one, **_HOST),
        "second": torch.cat([torch.zeros(1, two, **_HOST), random(one, two, (3 * one) ** -0.5)]),
        "last": random(1, two, 0.1 * two**-0.5)[0],
        "own_weights": torch.zeros(columns + 1, 1 + two, **_HOST),
    }
    return {name: value.requires_grad_() for name, value in found.items()}


def _second(w: Mapping[str, torch.Tensor], units: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    units = (units.relu() @ w["second"][1:] + w["second"][0]).relu()
    own = w["own_weights"].index_select(0, column)
    return (units * (w["last"] + own[:, 1:])).sum(1) + own[:, 0]


def _loss(w: Mapping[str, torch.Tensor], data: _Batches, dice: torch.Generator) -> torch.Tensor:
    """Return the mean error of a random batch of sizes."""
    count = min(_BATCH, len(data.chance))
    batch = torch.multinomial(data.chance, count, True, generator=dice)

    def noisy(values: torch.Tensor) -> torch.Tensor:
        return values + _JITTER * torch.randn(values.shape, generator=dice, **_HOST)

    at = data.at[batch]
    there = at >= 0
    timed = data.timed[at.clamp(min=0)] & there
    row, place = (
        (timed | (there & (torch.rand(at.shape, generator=dice, **_HOST) < _UNTIMED_SHARE))).nonzero().T
    )
    sample = at[row, place]
    column, timed = data.column[sample], data.timed[sample]
    shared = noisy(data.shared[batch])
    own = torch.cat([data.config, w["own"]], 1) @ w["config"] + w["start"][0]
    units = (shared @ w["shared"]).index_select(0, row) + own.index_select(0, column)
    found = _second(w, units + noisy(data.tiles[sample]) @ w["tiles"], column)
    y, ratio, roofline = data.y[sample], data.ratio[sample], data.roofline[sample]
    by_torch = data.torch_timed[batch].nonzero()[:, 0]
    if len(by_torch):
        which = batch[by_torch]
        both = torch.cat([shared[by_torch], noisy(data.torch[which])], 1)
        last = torch.full_like(which, len(w["own"]))
        found = torch.cat([found, _second(w, both @ w["torch"] + w["start"][1], last)])
        row = torch.cat([row, by_torch])
        timed = torch.cat([timed, data.torch_timed[which]])
        y = torch.cat([y, data.torch_y[which]])
        ratio = torch.cat([ratio, data.torch_ratio[which]])
        roofline = torch.cat([roofline, data.torch_roofline[which]])
    with torch.no_grad():
        us = (found + roofline).where(timed, torch.tensor(torch.inf, **_HOST))
        fastest = torch.full((count,), torch.inf, **_HOST).scatter_reduce(0, row, us, "amin")
        near = torch.exp(us - fastest[row]).where(timed, torch.tensor(1.0, **_HOST))
        weight = torch.minimum(ratio, near).clamp(max=4) ** -_SLOWDOWN_POWER
        weight = weight.where(timed, 0.5 / _UNTIMED_SHARE * weight)
    short = y - found
    errors = short.where(timed, short.clamp(min=0))
    mass = weight * timed
    of_size = torch.zeros(count, **_HOST)
    mean_error = of_size.index_add(0, row, errors * mass) / of_size.index_add(0, row, mass)
    inner = (errors - mean_error.index_select(0, row)) * timed
    robust = (((1 + (errors / _NOISE) ** 2).sqrt() - 1) * weight).sum()
    robust = 0.5 * robust + (((1 + (inner / _NOISE) ** 2).sqrt() - 1) * weight).sum()
    return robust / weight.sum()


# --- What picks lose ---


class Pick(NamedTuple):
    """The pick at a held-out size, and its microseconds."""

    size: Size
    us: float
    own_us: float  # of the pick without torch
    torch_error: float  # log(measured / predicted) of torch's time; NaN if it was not timed


def picks(predictor: Predictor, sizes: Iterable[Size]) -> list[Pick]:
    """Return the picks at sizes among what was timed, as a plan makes them."""
    found = []
    for size in sizes:
        times = predictor.times(size.name, size.problem, size.device)
        good = ~np.isnan(size.us)
        sane = good & (times.roofline <= ABSURD * times.roofline[good].min())
        own = int(np.where(sane, times.us, np.inf).argmin())
        us = own_us = float(size.us[own])
        if not np.isnan(size.torch_us):
            expected = predictor.torch_us(size.name, size.problem, size.device)
            if expected is not None and expected < times.us[own]:
                us = size.torch_us
        error = float(np.log(size.torch_us / times.torch_us)) if np.isfinite(times.torch_us) else np.nan
        found.append(Pick(size, us, own_us, error))
    return found


def loss_of(found: Sequence[Pick]) -> Loss:
    """Return what picks lose; those without torch's kernel as a candidate, if that makes them no faster."""
    us, own_us, least, errors = (
        np.array(each)
        for each in zip(*((p.us, p.own_us, p.size.fastest, p.torch_error) for p in found), strict=True)
    )
    errors = errors[~np.isnan(errors)]
    if (own_us / least).mean() <= (us / least).mean():
        us, errors = own_us, errors[:0]
    lost = us / least - 1
    shares = float(lost.mean()), float(np.quantile(lost, 0.95)), float(us.sum() / least.sum() - 1)
    torch_error = float(np.sqrt((errors**2).mean())) if len(errors) else 0.0
    return Loss(len(found), *(round(each, 4) for each in (*shares, torch_error)))


def made_of(
    samples: Samples, networks: Sequence[Network], losses: Mapping[str, Loss], kernels: Mapping[str, str],
    versions: Mapping[str, str],
) -> Predictor:  # fmt: skip
    """Return the predictor of some networks."""
    devices = {size.device.name: size.device.to_dict() for size in samples.sizes}
    classes = {}
    for name, columns in samples.classes.items():
        own = [size for size in samples.sizes if size.name == name]
        has_torch = any(not np.isnan(size.torch_us) for size in own)
        loss = losses.get(name, Loss(len(own), 0.0, 0.0, 0.0, 1.0 if has_torch else 0.0))
        most = max(work_of(size.problem) for size in own)
        gpus = tuple(dict.fromkeys(size.device.name for size in own))
        classes[name] = Class(tuple(columns), most, loss, gpus)
    ops = {MEASURED[name].op for name in classes}
    own_kernels = {label: digest for label, digest in kernels.items() if label.partition("/")[0] in ops}
    return Predictor(
        tuple(devices.values()), own_kernels, versions, tuple(samples.columns), classes, tuple(networks)
    )


def fitted(sweeps: Iterable[Sweep], versions: Mapping[str, str]) -> Predictor:
    """Train a predictor on sweeps of products, or of permutations, with the loss of picks at held-out sizes.

    Raises TuningError if too few sizes were timed.
    """
    samples = Samples(sweeps)
    steps = min(STEPS, max(_FEWEST_STEPS, _STEPS_A_SIZE * len(samples.sizes)))
    losses = losses_of(held_out(samples, 0, steps))
    return made_of(samples, networks_of(samples, None, steps), losses, digests(), versions)


def networks_of(samples: Samples, rows: Sequence[int] | None, steps: int = STEPS) -> list[Network]:
    rows = range(len(samples.sizes)) if rows is None else rows
    return [trained(samples, rows, seed, steps) for seed in range(SEEDS)]


def held_out(samples: Samples, seed: int, steps: int = STEPS) -> list[Pick]:
    """Return the picks at all sizes, each by networks that were trained without it."""
    folds, found = samples.folds(FOLDS, seed), list[Pick]()
    for fold in range(FOLDS):
        made = made_of(
            samples, networks_of(samples, np.flatnonzero(folds != fold).tolist(), steps), {}, {}, {}
        )
        found += picks(made, [samples.sizes[row] for row in np.flatnonzero(folds == fold)])
    return found


def losses_of(found: Iterable[Pick]) -> dict[str, Loss]:
    """Return what picks lose, by class."""
    of_class: dict[str, list[Pick]] = {}
    for pick in found:
        of_class.setdefault(pick.size.name, []).append(pick)
    return {name: loss_of(each) for name, each in of_class.items()}
