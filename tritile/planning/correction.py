"""Correct the time that a formula predicts, by what was measured at other sizes.

A small neural network predicts the logarithm of measured over predicted time. Its inputs are the parts of the
formula's prediction, such as the share of each bound and how full waves are, and a problem's sizes and
alignments. All configs of a class share its hidden units, and each config has its own weights of them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tritile.errors import InvalidValueError
from tritile.planning.trial import numbers_from

UNITS: Final = 32
_LEAST: Final = 2.0**-30  # parts below it count as it
_LARGEST: Final = 1e6  # of a number of a correction

Rows = tuple[tuple[float, ...], ...]


def inputs_of(parts: Any, traits: Any) -> Any:
    """Return inputs (..., inputs) of parts (..., parts) and of traits (..., traits)."""
    return np.concatenate([np.log2(np.maximum(parts, _LEAST)), traits], -1)


def factors(inputs: Any, ranges: Any, units: Any, weights: Any) -> Any:
    """Return the factors (..., configs) by which measured times exceed predicted ones.

    `inputs` is (..., configs, inputs), the others are the members of a `Correction` as arrays.
    """
    hidden = np.tanh(np.clip(inputs, *ranges) @ units[:, 1:].T + units[:, 0])
    return np.exp((hidden * weights[:, 1:]).sum(-1) + weights[:, 0])


@dataclass(frozen=True)
class Correction:
    """Hold a network. The first number of a unit, and of a config's weights, is what is added to its sum.

    - `ranges`: the least and the largest of each input; what is beyond counts as these.
    - `units`: a slope by each input, for each hidden unit.
    - `weights`: a weight of each hidden unit, for each config.
    """

    ranges: Rows
    units: Rows
    weights: Rows

    def arrays(self) -> tuple[Any, Any, Any]:
        """Return the members as `factors` takes them."""
        return np.array(self.ranges), np.array(self.units), np.array(self.weights)

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary that JSON holds."""
        return {name: [_rounded(row) for row in rows] for name, rows in vars(self).items()}


def _rounded(row: Iterable[float]) -> list[float]:
    return [float(f"{value:.4g}") for value in row]


def correction_of(data: Any, inputs: int, configs: int) -> Correction:
    """Return the correction that `to_dict` gave. Raises InvalidValueError for anything else."""
    if not isinstance(data, Mapping) or set(data) != {"ranges", "units", "weights"}:
        raise InvalidValueError("a correction is ranges, units and weights")
    shapes = {"ranges": (2, inputs), "units": (UNITS, 1 + inputs), "weights": (configs, 1 + UNITS)}
    return Correction(**{name: _rows(data[name], *shape) for name, shape in shapes.items()})


def _rows(rows: Any, count: int, length: int) -> Rows:
    if not isinstance(rows, list) or len(rows) != count:
        raise InvalidValueError(f"wanted {count} rows of a correction")
    return tuple(numbers_from("numbers of a correction", row, length, -_LARGEST, _LARGEST) for row in rows)
