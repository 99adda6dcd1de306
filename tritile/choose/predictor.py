"""Predict the time of a class's configs, and of torch's kernel, at any size: one list, one forward pass.

A small network of rectified linear units predicts the logarithm of measured time over a roofline, from the
inputs of `choose/inputs.py`. All classes of products share its two layers, on all GPUs it was trained for;
permutations have one of their own. A config of a group of classes is a column, with a few inputs and weights
of its own. A few networks, trained from different seeds, are averaged. `tune/calibrate/train.py` trains them.
"""

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from tritile.choose import inputs
from tritile.choose.classes import MEASURED
from tritile.choose.inputs import Tiles
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.forgetting import Memo
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import Tiled
from tritile.errors import FileError, InvalidValueError
from tritile.families.permute import boxes, family
from tritile.families.registry import FAMILIES
from tritile.families.space import dominated, illegal, unbanded
from tritile.tuner.store.files import number_from, read_json, write_whole

FORMAT: Final = 1
MAX_BYTES: Final = 8 << 20
RACED: Final = 8  # configs, the likeliest at a size, that mode "tune" times
OWN: Final = 8  # inputs of a network that are a column's own
UNITS: Final = 64, 32  # of its two layers
WIDE: Final = 4.0  # standard deviations at which an input is clamped
ABSURD: Final = 2.0  # times the least roofline, beyond which a config is not picked
_LARGEST: Final = 1e6  # number of a network
_MOST_LOG: Final = 10.0  # of a time over its roofline
_LEAST_SPREAD: Final = 1e-3  # an input's standard deviation
_ERRATIC: Final = ("unaligned_16bit", "int8")  # where torch's time at sizes beyond the sweeps goes wrong
_COUNTS: Final = {"matmul": (27, 24, 40), "linear_quantized": (27, 24, 40), "permute": (23, 20, 0)}
_CONFIG: Final = 18  # inputs of a config


class Loss(NamedTuple):
    """Hold what picks lose to the fastest that was timed, as shares: 0.01 is 1%; at sizes left out.

    `by_time`: of the time of all these sizes. `torch`: the root mean square of log(measured / predicted) of
    torch's times; 0 if it was not timed, or if picks are faster without it as a candidate.
    """

    sizes: int
    mean: float
    p95: float
    by_time: float
    torch: float = 0.0


class Class(NamedTuple):
    """Hold the columns of a class's configs, the largest work swept, what picks lose, and the GPUs swept."""

    columns: tuple[int, ...]
    most: float  # as `work_of` counts it
    loss: Loss
    gpus: tuple[str, ...]


class Times(NamedTuple):
    """Predicted microseconds at a size: of a class's configs, by roofline too, and of torch's kernel."""

    us: Any
    roofline: Any
    torch_us: float  # infinite if torch was not timed


def work_of(problem: Tiled) -> float:
    """Return operations of a product, bytes of a permutation."""
    return float(problem.bytes if isinstance(problem, PermuteProblem) else getattr(problem, "flops", 0))


@dataclass(frozen=True, eq=False)
class Network:
    """Hold the arrays of a network; `*_scale` are mean and standard deviation of inputs."""

    shared_scale: Any  # (2, shared)
    tiles_scale: Any  # (2, tiles)
    config_scale: Any  # (2, config)
    torch_scale: Any  # (2, torch)
    own: Any  # (columns, OWN)
    shared: Any  # (shared, one): slopes of the first layer
    tiles: Any  # (tiles, one)
    config: Any  # (config + OWN, one)
    torch: Any  # (shared + torch, one), of torch's kernel
    start: Any  # (2, one): what sums of the first layer begin with, of configs and of torch
    second: Any  # (1 + one, two): what sums begin with, then slopes
    weights: Any  # (columns + 1, 1 + two): what is added, then a weight of each unit; torch's are the last

    @staticmethod
    def shapes(op: str, columns: int) -> dict[str, tuple[int, int]]:
        (shared, tiles, torch), (one, two) = _COUNTS[op], UNITS
        return {
            "shared_scale": (2, shared), "tiles_scale": (2, tiles), "config_scale": (2, _CONFIG),
            "torch_scale": (2, torch), "own": (columns, OWN), "shared": (shared, one), "tiles": (tiles, one),
            "config": (_CONFIG + OWN, one), "torch": (shared + torch, one), "start": (2, one),
            "second": (1 + one, two), "weights": (columns + 1, 1 + two),
        }  # fmt: skip

    def scaled(self, name: str, values: Any) -> Any:
        middle, spread = getattr(self, f"{name}_scale")
        return np.minimum(np.maximum((values - middle) / spread, -WIDE), WIDE)

    def started(self, columns: Any, configs: Any) -> Any:
        """Return the part (configs, one) of the first layer's sums that does not depend on the problem."""
        numbers = np.concatenate([self.scaled("config", configs), self.own[columns]], 1)
        return numbers @ self.config + self.start[0]

    def logs(self, found: inputs.Inputs, started: Any, weights: Any) -> Any:
        """Return log(us / roofline) of configs and, where there are its inputs, of torch after them."""
        shared = self.scaled("shared", found.shared)
        units = started + shared @ self.shared + self.scaled("tiles", found.tiles) @ self.tiles
        if len(found.torch):
            own = np.concatenate([shared, self.scaled("torch", found.torch)]) @ self.torch + self.start[1]
            units = np.concatenate([units, own[None]])
        units = np.maximum(np.maximum(units, 0.0) @ self.second[1:] + self.second[0], 0.0)
        return (units * weights[:, 1:]).sum(1) + weights[:, 0]


class _Ready(NamedTuple):
    """What does not change within a kind of problems of a class."""

    configs: list[Config]
    tiles: Tiles | None
    parts: list[tuple[Any, Any]]  # of each network: `started`, and weights


@dataclass(frozen=True, eq=False)
class Predictor:
    """Predict times of the classes of an operation, or of all products.

    - `devices`: the GPUs it was trained for, as `Device.to_dict` gives them.
    - `kernels`: the digest of each kernel, by op and family ("matmul/tile"), as they were timed.
    - `versions`: of torch and cuBLAS, as they were timed.
    - `columns`: configs; classes name theirs by number.
    """

    devices: tuple[Mapping[str, Any], ...]
    kernels: Mapping[str, str]
    versions: Mapping[str, str]
    columns: tuple[Config, ...]
    classes: Mapping[str, Class]
    networks: tuple[Network, ...]
    _ready: Memo[Any, Any] = field(default_factory=Memo, init=False, repr=False)
    _last: Memo[Any, Times] = field(default_factory=Memo, init=False, repr=False)

    def configs(self, name: str) -> list[Config]:
        return [self.columns[column] for column in self.classes[name].columns]

    def is_current(self, name: str, config: Config) -> bool:
        """True if the times of a config's family are measurements of its kernel as it is now."""
        kernel = FAMILIES[MEASURED[name].op].get(config.family)
        return kernel is not None and self.kernels.get(kernel.label) == kernel.digest

    def is_current_class(self, name: str) -> bool:
        return all(self.is_current(name, config) for config in self.configs(name))

    def times(self, name: str, problem: Tiled, device: Device) -> Times:
        """Return predicted times of a class's configs, legal or not, and of torch's kernel."""
        key = name, problem, device
        found = self._last.get(key)
        if found is None:
            found = self._times(name, problem, device)
            self._last.clear()
            self._last[key] = found
        return found

    def _times(self, name: str, problem: Tiled, device: Device) -> Times:
        ready = self._ready_for(name, problem, device)
        if isinstance(problem, PermuteProblem):
            found = inputs.of_permutation(problem, ready.configs, device)
        else:
            assert ready.tiles is not None
            found = inputs.of_product(problem, ready.tiles, device)
        logs = sum(net.logs(found, *part) for net, part in zip(self.networks, ready.parts, strict=True))
        factors = np.exp(np.clip(logs / len(self.networks), -_MOST_LOG, _MOST_LOG))
        torch_us = np.inf
        if self.classes[name].loss.torch:
            torch_us = float(found.torch_roofline * factors[-1])
        return Times(found.roofline * factors[: len(found.roofline)], found.roofline, torch_us)

    def _ready_for(self, name: str, problem: Any, device: Device) -> _Ready:
        kind = name, getattr(problem, "kind", None), device
        ready = self._ready.get(kind)
        if ready is None:
            columns, configs = np.array(self.classes[name].columns), self.configs(name)
            numbers = np.array([inputs.of_config(config) for config in configs])
            is_permuted = isinstance(problem, PermuteProblem)
            rows = columns if is_permuted else np.append(columns, len(self.columns))
            parts = [(net.started(columns, numbers), net.weights[rows]) for net in self.networks]
            tiles = None if is_permuted else inputs.tiles_of(configs, problem, device)
            ready = self._ready[kind] = _Ready(configs, tiles, parts)
        return ready

    def torch_us(self, name: str, problem: Tiled, device: Device) -> float | None:
        """Return predicted microseconds of torch's kernel; None if they are not known."""
        us = self.times(name, problem, device).torch_us
        return us if np.isfinite(us) else None

    def is_least(self, name: str, problem: Tiled) -> bool:
        """True if torch's kernel may take far longer than predicted: at sizes beyond the sweeps."""
        return name in _ERRATIC and work_of(problem) > self.classes[name].most

    def ranked(self, name: str, problem: Tiled, device: Device, count: int) -> list[tuple[float, Config]]:
        """Return microseconds and config of the `count` legal configs that are predicted fastest, in order.

        Those come last that another dominates, in bands or not; whose roofline is absurd; or that no sweep
        timed at such sizes.
        """
        found, late = list[tuple[float, Config]](), list[tuple[float, Config]]()
        worse = dominated(problem, device)
        for us, config, is_doubtful in self._in_order(name, problem, device):
            if is_doubtful or (worse(config) and worse(unbanded(config))):
                late.append((us, config))
            elif illegal(config, problem, device) is None:
                found.append((us, config))
                if len(found) == count:
                    return found
        legal = [pair for pair in late if illegal(pair[1], problem, device) is None]
        roofline = dict(zip(self.configs(name), self.times(name, problem, device).roofline, strict=True))
        limit = ABSURD * min((roofline[config] for _, config in (*found, *legal)), default=0.0)
        legal.sort(key=lambda pair: (roofline[pair[1]] > limit, is_beyond(pair[1], problem)))
        return [*found, *legal[: count - len(found)]]

    def _in_order(self, name: str, problem: Tiled, device: Device) -> Iterator[tuple[float, Config, bool]]:
        times, configs = self.times(name, problem, device), self.configs(name)
        absurd = times.roofline > ABSURD * times.roofline.min()
        for place in np.argsort(times.us, kind="stable").tolist():
            config = configs[place]
            yield float(times.us[place]), config, bool(absurd[place]) or is_beyond(config, problem)

    def to_dict(self) -> dict[str, Any]:
        def rounded(array: Any) -> list[list[float]]:
            return [[float(f"{value:.3g}") for value in row] for row in array.tolist()]

        classes = {
            name: {"columns": list(one.columns), "most": one.most, "loss": one.loss._asdict()}
            | {"gpus": list(one.gpus)}
            for name, one in self.classes.items()
        }
        networks = [
            {each.name: rounded(getattr(one, each.name)) for each in fields(one)} for one in self.networks
        ]
        return {
            "format": FORMAT,
            "devices": list(self.devices),
            "kernels": dict(self.kernels),
            "versions": dict(self.versions),
            "columns": [config.to_dict() for config in self.columns],
            "classes": classes,
            "networks": networks,
        }


def is_beyond(config: Config, problem: Tiled) -> bool:
    """True for a permutation's tile that is twice as large as a side: no sweep times such."""
    return (
        isinstance(problem, PermuteProblem)
        and config.family != boxes.BOX
        and family.oversized(config, problem)
    )


# --- Files ---


def read(file: Path | Traversable) -> Predictor:
    """Return the predictor of a file. Raises FileError or InvalidValueError for anything else."""
    data = read_json(file, MAX_BYTES)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise FileError(f"{file} is not a predictor of format {FORMAT}")
    try:
        return _predictor_of(data)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise InvalidValueError(f"{file} is not a predictor: {str(error)[:200]}") from error


def write(predictor: Predictor, path: Path) -> None:
    """Write a predictor to a file, whole or not at all. Raises OSError if that fails."""
    write_whole(path, json.dumps(predictor.to_dict(), separators=(",", ":")))


def _predictor_of(data: Mapping[str, Any]) -> Predictor:
    devices = tuple(Device.from_dict(each).to_dict() for each in data["devices"])
    for each in devices:
        number_from(each["memory_gbps"], 1, 1e6)
    kernels, versions = (
        {str(key): str(value) for key, value in data[name].items()} for name in ("kernels", "versions")
    )
    columns = tuple(Config.from_dict(each) for each in data["columns"])
    classes = {}
    for name, each in data["classes"].items():
        op = MEASURED[name].op
        own = tuple(int(number_from(column, 0, len(columns) - 1, whole=True)) for column in each["columns"])
        _check(0 < len(set(own)) == len(own), f"{name}: expected columns, each once")
        for column in own:
            _check_offered(columns[column], op)
        loss = each["loss"]
        sizes = int(number_from(loss["sizes"], 1, 1 << 31, whole=True))
        shares = (float(number_from(loss[key], 0, 1e3)) for key in Loss._fields[1:])
        most, gpus = float(number_from(each["most"], 1, 1e30)), tuple(map(str, each["gpus"]))
        classes[name] = Class(own, most, Loss(sizes, *shares), gpus)
    _check(bool(classes), "it has no classes")
    (counts,) = {_COUNTS[MEASURED[name].op] for name in classes}
    op = next(op for op, each in _COUNTS.items() if each == counts)
    shapes = Network.shapes(op, len(columns))
    networks = []
    for one in data["networks"]:
        _check(set(one) == set(shapes), f"a network is {', '.join(shapes)}")
        arrays = {key: np.array(one[key], np.float64) for key in shapes}
        for key, shape in shapes.items():
            got = arrays[key]
            is_right = got.shape == shape and bool(np.isfinite(got).all()) and not (abs(got) > _LARGEST).any()
            _check(is_right, f"{key}: expected {shape} finite numbers")
            if key.endswith("_scale"):
                _check(bool((got[1] >= _LEAST_SPREAD).all()), f"{key}: expected at least {_LEAST_SPREAD}")
        networks.append(Network(**arrays))
    _check(1 <= len(networks) <= 8, "expected 1 to 8 networks")
    return Predictor(devices, kernels, versions, columns, classes, tuple(networks))


@functools.cache
def _parameters(op: str, name: str) -> dict[str, bool]:
    """Return whether each parameter of a family is a flag. Cached: the first of a space may take long."""
    return {key: isinstance(value, bool) for key, value in next(iter(FAMILIES[op][name].space())).kwargs}


def _check_offered(config: Config, op: str) -> None:
    names, own = _parameters(op, config.family), {each for each, _ in config.kwargs}
    _check(
        own.difference(FAMILIES[op][config.family].options) == names.keys(),
        f"{config} is not of {sorted(names)}",
    )
    for key, value in config.kwargs:
        is_flag = names.get(key, True)  # options are flags
        is_block = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        _check(isinstance(value, bool) if is_flag else is_block, f"{config}: expected blocks and flags")


def _check(condition: bool, text: str) -> None:
    if not condition:
        raise InvalidValueError(text)
