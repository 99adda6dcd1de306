"""Correct the time that a formula predicts, by what was measured at other sizes.

A small neural network predicts the logarithm of measured over predicted time. Its inputs are the parts of the
formula's prediction, such as the share of each bound and how full waves are, a problem's sizes and
alignments, and a few numbers of each config's own. All configs of a class share its two layers, and each
config has its own weights of what the second gives.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tritile.errors import InvalidValueError
from tritile.planning.trial import numbers_from

OWN: Final = 8  # inputs that are a config's own
LAYERS: Final = 64, 32  # units of the two layers
_LEAST: Final = 2.0**-30  # parts below it count as it
_LARGEST: Final = 1e6  # of a number of a correction

Rows = tuple[tuple[float, ...], ...]


def inputs_of(parts: Any, traits: Any) -> Any:
    """Return inputs (..., inputs) of parts (..., parts) and of traits (..., traits)."""
    return np.concatenate([np.log2(np.maximum(parts, _LEAST)), traits], -1)


def factors(inputs: Any, ranges: Any, first: Any, starts: Any, second: Any, weights: Any) -> Any:
    """Return the factors (..., configs) by which measured times exceed predicted ones.

    `inputs` is (..., configs, inputs), the others are what `Correction.arrays` returns.
    """
    units = np.maximum(np.minimum(np.maximum(inputs, ranges[0]), ranges[1]) @ first + starts, 0.0)
    units = np.maximum(units @ second[1:] + second[0], 0.0)
    return np.exp((units * weights[:, 1:]).sum(-1) + weights[:, 0])


@dataclass(frozen=True)
class Correction:
    """Hold a network of rectified linear units. What is added to a sum stands before its weights.

    - `ranges`: the least and the largest of each input; what is beyond counts as these.
    - `own`: the further inputs of each config.
    - `first`: for each unit of the first layer, a slope by each input, those of configs last.
    - `second`: for each unit of the second layer, a slope by each unit of the first.
    - `weights`: for each config, a weight of each unit of the second layer.
    """

    ranges: Rows
    own: Rows
    first: Rows
    second: Rows
    weights: Rows

    def arrays(self) -> tuple[Any, ...]:
        """Return what `factors` takes, with the part of configs' own inputs in the first layer's sums."""
        ranges, own, first, second, weights = map(np.array, vars(self).values())
        inputs = ranges.shape[1] + 1
        return ranges, first[:, 1:inputs].T, own @ first[:, inputs:].T + first[:, 0], second.T, weights

    def to_dict(self) -> dict[str, Any]:
        return {name: [[float(f"{x:.3g}") for x in row] for row in rows] for name, rows in vars(self).items()}


def correction_of(data: Any, inputs: int, configs: int) -> Correction:
    """Return the correction that `to_dict` gave. Raises InvalidValueError for anything else."""
    one, two = LAYERS
    shapes = {
        "ranges": (2, inputs),
        "own": (configs, OWN),
        "first": (one, 1 + inputs + OWN),
        "second": (two, 1 + one),
        "weights": (configs, 1 + two),
    }
    if not isinstance(data, Mapping) or set(data) != set(shapes):
        raise InvalidValueError(f"a correction is {', '.join(shapes)}")
    return Correction(**{name: _rows(data[name], *shape) for name, shape in shapes.items()})


def _rows(rows: Iterable[Any], count: int, length: int) -> Rows:
    if not isinstance(rows, list) or len(rows) != count:
        raise InvalidValueError(f"wanted {count} rows of a correction")
    return tuple(numbers_from("numbers of a correction", row, length, -_LARGEST, _LARGEST) for row in rows)
