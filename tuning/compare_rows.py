"""Make the lines of results of `compare_autotune.py`, keep them in a file, and print them as tables."""

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from tritile.core.config import Config

TUNERS = ("triton", "tritile", "space")  # the last is tritile with the whole space in place of the list
Row = dict[str, Any]
Problem = tuple[str, tuple[int, ...]]


def shape_text(shape: Sequence[int]) -> str:
    """Write a shape as one word: 4096x1000."""
    return "x".join(map(str, shape))


def shape_from(text: str) -> tuple[int, ...]:
    """Return the shape that `shape_text` wrote."""
    return tuple(int(size) for size in text.split("x"))


def tuning_row(
    problem: Problem,
    configs: tuple[int, int],
    answers: Mapping[str, Mapping[str, Any]],
    timings: Mapping[str, Mapping[str, float]],
    env: Mapping[str, str],
) -> Row:
    """Return a line of results: seconds and configs of each tuner, and microseconds of what each chose.

    `configs` counts the configs of the list, then those of the space.
    """
    row: Row = {"measures": "tuning", "kernel": problem[0], "problem": shape_text(problem[1])}
    row |= {"configs": configs[0], "space": configs[1]}
    for side in TUNERS:
        row[f"{side}_s"] = round(answers[side]["seconds"], 3)
        row[f"{side}_us"] = round(timings[side]["us"], 3)
        row[f"{side}_spread"] = round(timings[side]["spread"], 4)
        row[f"{side}_config"] = answers[side]["config"]
    row["ratio"] = round(timings["triton"]["us"] / timings["tritile"]["us"], 4)
    return row | {"env": dict(env)}


def host_row(problem: Problem, us: Mapping[str, float], env: Mapping[str, str]) -> Row:
    """Return a line of results: microseconds that the host spends on a warm call."""
    row: Row = {"measures": "host", "kernel": problem[0], "problem": shape_text(problem[1])}
    return row | {f"{side}_host_us": round(value, 3) for side, value in us.items()} | {"env": dict(env)}


def merged(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """Return the old lines, those of the same problem replaced by the new ones."""
    kept = {(row["measures"], row["kernel"], row["problem"]): row for row in (*old, *new)}
    return sorted(kept.values(), key=lambda row: (row["measures"], row["kernel"], shape_from(row["problem"])))


def keep(path: Path, rows: Iterable[Row]) -> list[Row]:
    """Merge lines into a file, and return all that it has now."""
    held = merged(json.loads(path.read_text()) if path.exists() else [], rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in held) + "\n]\n")
    return held


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean, NaN of no values."""
    found = list(values)
    return statistics.geometric_mean(found) if found else math.nan


# By name, the lines that a mean of `summary` is of, triton.autotune's field and tritile's.
_COMPARED = {
    "seconds of a first call": ("tuning", "triton_s", "tritile_s"),
    "seconds of a first call, whole space": ("tuning", "triton_s", "space_s"),
    "us of what was chosen": ("tuning", "triton_us", "tritile_us"),
    "us of what was chosen, whole space": ("tuning", "triton_us", "space_us"),
    "host us of a warm call": ("host", "triton_host_us", "tritile_host_us"),
}


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """Return geometric means of triton.autotune / tritile.autotune: above 1, tritile is ahead."""
    return {
        name: geometric_mean(row[theirs] / row[ours] for row in rows if row["measures"] == measures)
        for name, (measures, theirs, ours) in _COMPARED.items()
    }


def _table(title: str, left: Sequence[str], right: Sequence[str] = ()) -> Table:
    table = Table(*left, title=title, title_justify="left")
    for name in right:
        table.add_column(name, justify="right")
    return table


def tables(rows: Sequence[Row]) -> Iterator[Table]:
    """Yield the lines as tables: first calls, what each tuner chose, and the host's cost of a warm call."""
    tuned = [row for row in rows if row["measures"] == "tuning"]
    numbers = [f"{side} {unit}" for unit in ("s", "us") for side in TUNERS]
    first = _table(
        "First calls, nothing compiled before", ("kernel", "problem"), ("configs", *numbers, "ratio")
    )
    chosen = _table("What was chosen", ("kernel", "problem", *TUNERS))
    for row in tuned:
        times = [f"{row[f'{side}_{unit}']:.1f}" for unit in ("s", "us") for side in TUNERS]
        configs = f"{row['configs']} of {row['space']}"
        first.add_row(row["kernel"], row["problem"], configs, *times, f"{row['ratio']:.3f}")
        texts = [str(Config.from_dict(row[f"{side}_config"])) for side in TUNERS]
        chosen.add_row(row["kernel"], row["problem"], *texts)
    yield from (first, chosen)
    sides = ("jit", "triton", "tritile")
    host = _table("Warm calls, us of the host", ("kernel", "problem"), ("bare kernel", *sides[1:]))
    for row in rows:
        if row["measures"] == "host":
            host.add_row(row["kernel"], row["problem"], *[f"{row[f'{side}_host_us']:.2f}" for side in sides])
    yield host
