"""A climb of the ladders as a value: what was read off each rung, where and when; kept in a JSON file."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tritile.errors import InvalidValueError
from tritile.lab.explain.telling import bytes_text
from tritile.lab.rungs.climb import ITEMSIZE, LADDERS
from tritile.lab.rungs.race import LARGEST
from tritile.lab.rungs.reading import Reading

PICTURES: Final = (".svg", ".png", ".html")
_FIELDS: Final = ("n", "device", "timed", "env", "rungs")


@dataclass(frozen=True)
class Climb:
    """Readings of the rungs on n x n matrices.

    `device` names the GPU that they ran on, to be timed; or, where not `timed`, that they were compiled for,
    and ran in the interpreter. `env` is as `tritile.lab.report.environment` gives it.
    """

    n: int
    device: str
    timed: bool
    env: Mapping[str, str]
    readings: tuple[Reading, ...]

    def only(self, ops: Iterable[str]) -> "Climb":
        """The same of some ladders. Raises InvalidValueError where none of them was climbed."""
        wanted = list(ops)
        readings = tuple(reading for reading in self.readings if reading.op in wanted)
        if not readings:
            raise InvalidValueError(f"nothing of {', '.join(wanted)} there, only of {', '.join(self.ops)}")
        return replace(self, readings=readings)

    def of(self, op: str) -> list[Reading]:
        """The readings of one ladder, from the first rung up."""
        return [reading for reading in self.readings if reading.op == op]

    @property
    def ops(self) -> list[str]:
        """The ladders that were climbed."""
        return list(dict.fromkeys(reading.op for reading in self.readings))


def rate(reading: Reading, n: int) -> float | None:
    """TFLOP/s of a product, GB/s of a transpose, each byte read and written counted once; None untimed."""
    if not reading.us:
        return None
    if reading.op == "matmul":
        return 2 * n**3 / reading.us / 1e6
    return 2 * n**2 * ITEMSIZE[reading.dtype] / reading.us / 1e3


def unit(op: str) -> str:
    """That of `rate`."""
    return "TFLOP/s" if op == "matmul" else "GB/s"


def gains(readings: Iterable[Reading]) -> dict[str, tuple[float, float]]:
    """By rung's name: how many times as fast as the first that was timed, and the share of the fastest."""
    times = {reading.name: reading.us for reading in readings if reading.us}
    if not times:
        return {}
    first, best = next(iter(times.values())), min(times.values())
    return {name: (first / us, best / us) for name, us in times.items()}


def save(climb: Climb, path: Path) -> None:
    """Write a climb as JSON. Raises OSError where the file cannot be written."""
    rungs = [reading.to_dict() for reading in climb.readings]
    data = {
        "n": climb.n, "device": climb.device, "timed": climb.timed, "env": dict(climb.env), "rungs": rungs
    }  # fmt: skip
    path.write_text(json.dumps(data, indent=1) + "\n")


def read(path: Path) -> Climb:
    """The climb that `save` wrote. Raises InvalidValueError for anything else, OSError for no file."""
    try:
        data: Any = json.loads(path.read_text())
    except ValueError as error:
        raise InvalidValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict) or data.keys() != set(_FIELDS):
        raise InvalidValueError(
            f"{path} is of no climb: wanted {', '.join(_FIELDS)}, as tritile ladder writes"
        )
    n, device, timed, env, rungs = (data[name] for name in _FIELDS)
    if not (type(n) is int and 1 <= n <= LARGEST):
        raise InvalidValueError(f"{path}: wanted n of 1 to {LARGEST:,}")
    good = isinstance(device, str) and isinstance(timed, bool) and isinstance(rungs, list) and rungs
    if not (good and isinstance(env, dict) and all(isinstance(v, str) for v in env.values())):
        raise InvalidValueError(
            f"{path}: wanted a device's name, true or false in timed, texts in env, and rungs"
        )
    readings = tuple(Reading.from_dict(rung) for rung in rungs)
    for reading in readings:
        if reading.op not in LADDERS or reading.dtype not in ITEMSIZE:
            raise InvalidValueError(f"{path}: {reading.name!r} is of op {reading.op!r} and {reading.dtype!r}")
    return Climb(n, device, timed, env, readings)


def rate_text(value: float | None) -> str:
    """A rate in few digits: 2.62, 743, 3,160; "-" for None."""
    return "-" if value is None else f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def share_text(share: float | None) -> str:
    """A share in few digits: 0.6%, 64%; "-" for None."""
    return "-" if share is None else f"{share:.1%}" if share < 0.095 else f"{share:.0%}"


def size_text(count: int | None) -> str:
    """Bytes in few letters: 7.11 MB; "-" for None."""
    return "-" if count is None else bytes_text(count)


def time_text(us: float | None) -> str:
    """A time in few letters: 12.3 us, 4.56 ms; "-" for None."""
    if us is None:
        return "-"
    for unit in ("us", "ms"):
        if us < 999.5:
            return f"{us:.3g} {unit}"
        us /= 1000
    return f"{us:.3g} s" if us < 999.5 else f"{us:,.0f} s"
