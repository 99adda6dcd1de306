"""A climb, the readings of all steps of one or more ladders on one device; kept in a JSON file."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from tritile.errors import InvalidValueError
from tritile.lab.explain.texts import bytes_text
from tritile.lab.ladder.race import LARGEST
from tritile.lab.ladder.reading import Reading
from tritile.lab.ladder.steps import ITEMSIZE, LADDERS

PICTURES: Final = (".svg", ".png", ".html")
_FIELDS: Final = ("n", "device", "timed", "env", "rungs")


@dataclass(frozen=True)
class Climb:
    """Hold the readings of ladders on n x n matrices.

    If `timed`, `device` names the GPU that steps ran on; else they ran in the interpreter, and it names the
    GPU that they were compiled for. `env` is as `tritile.lab.report.environment` returns it.
    """

    n: int
    device: str
    timed: bool
    env: Mapping[str, str]
    readings: tuple[Reading, ...]

    def only(self, ops: Iterable[str]) -> "Climb":
        """Keep some ladders only. Raises InvalidValueError where none of them was climbed."""
        wanted = list(ops)
        readings = tuple(reading for reading in self.readings if reading.op in wanted)
        if not readings:
            raise InvalidValueError(f"nothing of {', '.join(wanted)} there, only of {', '.join(self.ops)}")
        return replace(self, readings=readings)

    def of(self, op: str) -> list[Reading]:
        """Return the readings of one ladder, from the first step up."""
        return [reading for reading in self.readings if reading.op == op]

    @property
    def ops(self) -> list[str]:
        """Return the ladders that were climbed."""
        return list(dict.fromkeys(reading.op for reading in self.readings))


def rate(reading: Reading, n: int) -> float | None:
    """Return TFLOP/s of a product or GB/s, read and written, of a transpose; None if not timed."""
    if not reading.us:
        return None
    if reading.op == "matmul":
        return 2 * n**3 / reading.us / 1e6
    return 2 * n**2 * ITEMSIZE[reading.dtype] / reading.us / 1e3


def unit(op: str) -> str:
    """Return the unit of `rate`."""
    return "TFLOP/s" if op == "matmul" else "GB/s"


def gains(readings: Iterable[Reading]) -> dict[str, tuple[float, float]]:
    """Return by step's name its speed over that of the first timed step, and over that of the fastest."""
    times = {reading.name: reading.us for reading in readings if reading.us}
    if not times:
        return {}
    first, best = next(iter(times.values())), min(times.values())
    return {name: (first / us, best / us) for name, us in times.items()}


def save(climb: Climb, path: Path) -> None:
    """Write a climb as JSON. Raises OSError where the file cannot be written."""
    data = {
        "n": climb.n, "device": climb.device, "timed": climb.timed, "env": dict(climb.env),
        "rungs": [asdict(reading) for reading in climb.readings],
    }  # fmt: skip
    path.write_text(json.dumps(data, indent=1) + "\n")


def read(path: Path) -> Climb:
    """Read the climb that `save` wrote. Raises InvalidValueError for anything else, OSError for no file."""
    try:
        data: Any = json.loads(path.read_text())
    except ValueError as error:
        raise InvalidValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict) or data.keys() != set(_FIELDS):
        raise InvalidValueError(
            f"{path} holds no climb: wanted {', '.join(_FIELDS)}, as tritile ladder writes"
        )
    n, device, timed, env, rungs = (data[name] for name in _FIELDS)
    if not (type(n) is int and 1 <= n <= LARGEST):
        raise InvalidValueError(f"{path}: wanted n of 1 to {LARGEST:,}")
    good = isinstance(device, str) and isinstance(timed, bool) and isinstance(rungs, list) and rungs
    if not (good and isinstance(env, dict) and all(isinstance(v, str) for v in env.values())):
        raise InvalidValueError(
            f"{path}: wanted a device's name, true or false in timed, texts in env, and a list of rungs"
        )
    readings = tuple(Reading.from_dict(step) for step in rungs)
    for reading in readings:
        if reading.op not in LADDERS or reading.dtype not in ITEMSIZE:
            raise InvalidValueError(f"{path}: {reading.name!r} is of op {reading.op!r} and {reading.dtype!r}")
    return Climb(n, device, timed, env, readings)


def rate_text(value: float | None) -> str:
    """Write a rate in few digits: 2.62, 743, 3,160; "-" for None."""
    return "-" if value is None else f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def share_text(share: float | None) -> str:
    """Write a share in few digits: 0.6%, 64%; "-" for None."""
    return "-" if share is None else f"{share:.1%}" if share < 0.095 else f"{share:.0%}"


def size_text(count: int | None) -> str:
    """Write a number of bytes in few letters: 7.11 MB; "-" for None."""
    return "-" if count is None else bytes_text(count)


def time_text(us: float | None) -> str:
    """Write a time in few letters: 12.3 us, 4.56 ms; "-" for None."""
    if us is None:
        return "-"
    for unit in ("us", "ms"):
        if us < 999.5:
            return f"{us:.3g} {unit}"
        us /= 1000
    return f"{us:.3g} s" if us < 999.5 else f"{us:,.0f} s"
