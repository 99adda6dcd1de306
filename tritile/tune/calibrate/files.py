"""Sweeps as files: a line with the GPU and the configs, then a line for each size."""

import gzip
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from tritile.choose.classes import MEASURED, class_of
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import Problem, Tiled, problem_from_dict, problem_to_dict
from tritile.errors import FileError, InvalidValueError, brief
from tritile.families.registry import digests
from tritile.tune.calibrate.sweep import Row
from tritile.tuner.store.files import MAX_US, number_from, write_whole


class Sweep(NamedTuple):
    """Times of a class on a GPU. `is_current`: by the kernels as they are now."""

    name: str
    device: Device
    rows: Sequence[Row]
    is_current: bool = True


def _kernels(path: Path) -> dict[str, str]:
    """Return the digests of the kernels that a class's configs run."""
    op = MEASURED[path.name.partition(".")[0]].op
    return {label: digest for label, digest in digests().items() if label.partition("/")[0] == op}


def write_sweep(path: Path, rows: Sequence[Row], device: Device) -> None:
    """Write a sweep, whole or not at all; times have the numbers of their configs."""
    places = {config: i for i, config in enumerate(dict.fromkeys(c for row in rows for c in row.times))}
    configs = [config.to_dict() for config in places]
    head = {"device": device.to_dict(), "kernels": _kernels(path), "configs": configs}
    lines: list[dict[str, Any]] = [head]
    for row in rows:
        us = {str(places[config]): float(f"{each:.5g}") for config, each in row.times.items()}
        lines.append({"problem": problem_to_dict(row.problem), "us": us, "torch_us": row.torch_us})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(json.dumps(line) + "\n" for line in lines))


def _number(value: Any, least: float = 1e-3) -> Any:
    if value is None:
        raise TypeError("a time is missing")
    return number_from(value, least, MAX_US)


def read_sweep(path: Path) -> Sweep:
    """Return the sweep of a file, gzipped or not, named after its class. Raises FileError for another."""
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
        head, *lines = map(json.loads, text.splitlines())
        configs, device = (
            [Config.from_dict(each) for each in head["configs"]],
            Device.from_dict(head["device"]),
        )
        rows = [
            Row(
                cast(Tiled, problem_from_dict(line["problem"])),
                {configs[_number(int(place), 0)]: _number(us) for place, us in line["us"].items()},
                None if line["torch_us"] is None else _number(line["torch_us"]),
            )
            for line in lines
        ]
        if any(class_of(row.problem) != path.name.partition(".")[0] for row in rows):
            raise InvalidValueError("it has problems of another class")
        is_current = head.get("kernels", _kernels(path)) == _kernels(path)
    except (
        OSError,
        EOFError,
        zlib.error,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RecursionError,
    ) as error:
        raise FileError(f"{path} is not a sweep: {brief(error)}") from error
    return Sweep(path.name.partition(".")[0], device, rows, is_current)


def joined(before: Sequence[Row], after: Sequence[Row]) -> list[Row]:
    """Return the sizes of both; times of `after` replace those of the same config and size."""
    by_problem: dict[Problem, Row] = {row.problem: row for row in before}
    for row in after:
        old = by_problem.get(row.problem, row)
        torch_us = row.torch_us or old.torch_us
        by_problem[row.problem] = row._replace(times={**old.times, **row.times}, torch_us=torch_us)
    return list(by_problem.values())
