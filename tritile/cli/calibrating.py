"""tritile tune --calibrate: measure portfolios of classes."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from tritile.cli.shared import console, interruptible, progress, say
from tritile.core.device import Device
from tritile.core.problem import problem_to_dict
from tritile.errors import InvalidValueError, TuningError, UnsupportedError
from tritile.families.registry import digests
from tritile.families.space import legal_configs
from tritile.planning import gpu_tables, plans, table
from tritile.planning.aten import AtenTimes
from tritile.planning.classes import MEASURED
from tritile.planning.portfolio import Portfolio
from tritile.tune.calibrate import run
from tritile.tune.calibrate.draw import drawn
from tritile.tune.calibrate.sweep import Row, ready, sweep

ALL = "all"
LIKELY = 300  # sizes whose likeliest configs are candidates

_Rows = Callable[[], Iterator[Row]]  # times one size after the other


def classes_of(names: Sequence[str]) -> list[str]:
    """Return the classes of these names, or all. Raises InvalidValueError for an unknown name."""
    for name in names:
        if name not in (*MEASURED, ALL):
            raise InvalidValueError(f"--calibrate {name!r}: wanted {ALL} or one of {', '.join(MEASURED)}")
    return list(MEASURED) if ALL in names else list(dict.fromkeys(names))


def calibrate(
    names: Sequence[str],
    device: Device,
    sizes: int,
    count: int,
    seconds: float,
    path: Path,
    sweeps: Path | None,
) -> None:
    """Measure the portfolios of classes on the current GPU, and write them to a table.

    `count` configs are timed at `sizes` drawn sizes, for at most `seconds` a class. `sweeps` is a folder for
    all times, a file a class.
    """
    old = table.read(path) if path.exists() else table.Table(device.to_dict(), {}, ())
    if old.device["name"] != device.name:
        raise InvalidValueError(f"{path} is of {old.device['name']}, not {device.name}: name another")
    path.parent.mkdir(parents=True, exist_ok=True)
    portfolios, atens, classes = old.current_portfolios(), list(old.aten), []
    for name in names:
        try:
            legal_configs(drawn(name, 1, "candidates")[0], device)
            classes.append(name)
        except UnsupportedError as error:
            say(f"{name} is left out: {error}")
    if not classes:
        raise UnsupportedError(f"--calibrate: {device.name} runs none of {', '.join(names)}")
    with interruptible() as keep_on, ThreadPoolExecutor(1) as ahead:

        def prepare(place: int) -> Future[_Rows]:
            return ahead.submit(_prepared, classes[place], device, sizes, count)

        coming = prepare(0)
        for place, name in enumerate(classes):
            timing = coming.result()
            if place + 1 < len(classes):  # the next class is compiled while this one is timed
                coming = prepare(place + 1)
            begun = time.monotonic()
            rows = _timed(name, timing(), sizes, seconds, keep_on, sweeps, device)
            before = portfolios.get(name)
            if len(rows) < sizes and before is not None and before.loss.sizes > len(rows):
                say(f"{name}: stopped at {len(rows)} sizes, and the portfolio of {before.loss.sizes} stays")
            else:
                portfolio, aten = _fitted(name, rows, device)
                if portfolio is not None:
                    portfolios[name] = portfolio
                if aten is not None:  # the first that knows a class serves it
                    atens = [aten, *(each for each in atens if each.classes != (name,))]
                made = replace(old, kernels=digests(), portfolios=portfolios, aten=tuple(atens))
                table.write(made, path)
                console.print(f"{name}: {time.monotonic() - begun:.0f} s")
            if not keep_on():
                ahead.shutdown(cancel_futures=True)
                break
    plans.forget()
    console.print(f"portfolios are in {path}")


def _prepared(name: str, device: Device, sizes: int, count: int) -> _Rows:
    """Compile candidates, and return a function that times them at drawn sizes.

    These are other sizes than those that choose the candidates.
    """
    likely, problems = drawn(name, LIKELY, "candidates"), drawn(name, sizes, "sizes")
    configs = run.candidates(name, likely, device, gpu_tables.shipped(device), count)
    console.print(f"{name}: {len(configs)} configs at {sizes} sizes")
    chooser = ready(problems, configs, device, say)
    return lambda: sweep(problems, chooser, device, say)


def _timed(
    name: str,
    rows: Iterator[Row],
    sizes: int,
    seconds: float,
    keep_on: Callable[[], bool],
    sweeps: Path | None,
    device: Device,
) -> list[Row]:
    """Return the rows timed within so many seconds; write them to the folder `sweeps` even at an error.

    A sweep has a line of the GPU and the configs, then a line a size with the place of each config.
    """
    done, begun = list[Row](), time.monotonic()
    try:
        with progress() as bar:
            for row in bar.track(rows, total=sizes, description=name):
                done.append(row)
                if time.monotonic() - begun > seconds or not keep_on():
                    break
    finally:
        if sweeps is not None and done:
            places = {c: i for i, c in enumerate(dict.fromkeys(c for row in done for c in row.times))}
            lines: list[dict[str, object]] = [
                {"device": device.to_dict(), "configs": [config.to_dict() for config in places]}
            ]
            for row in done:
                us = {str(places[config]): float(f"{each:.5g}") for config, each in row.times.items()}
                lines.append({"problem": problem_to_dict(row.problem), "us": us, "torch_us": row.torch_us})
            sweeps.mkdir(parents=True, exist_ok=True)
            (sweeps / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return done


def _fitted(name: str, rows: Sequence[Row], device: Device) -> tuple[Portfolio | None, AtenTimes | None]:
    """Return portfolio and torch's times of what was measured, None of few sizes; say how they err."""
    try:
        measured = run.Measured(name, rows, device)
    except TuningError as error:
        say(str(error))
        return None, None
    left_out = measured.left_out()
    portfolio, aten = measured.portfolio(left_out), measured.aten(left_out)
    loss = portfolio.loss
    console.print(
        f"{name}: {len(portfolio.configs)} configs; at {loss.sizes} sizes left out picks lost "
        f"{loss.median:.2%} (median), {loss.p95:.2%} (95%), {loss.worst:.2%} (worst)"
    )
    if aten is not None:
        console.print(f"{name}: torch's times are predicted within {aten.error:.1%}")
    return portfolio, aten
