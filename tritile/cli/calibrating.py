"""tritile tune --calibrate: measure portfolios of classes."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from tritile.cli.shared import console, interruptible, progress, say, unknown
from tritile.core.device import Device
from tritile.core.problem import problem_to_dict
from tritile.errors import InvalidValueError, TuningError, UnsupportedError
from tritile.families.registry import digests
from tritile.families.space import legal_configs
from tritile.planning import gpu_tables, plans, table
from tritile.planning.classes import MEASURED
from tritile.tune.calibrate import run
from tritile.tune.calibrate.draw import drawn
from tritile.tune.calibrate.sweep import Row, ready, sweep

ALL = "all"
LIKELY = 300  # sizes from which candidates are chosen


def classes_of(names: Sequence[str]) -> list[str]:
    """Return the classes of these names, or all. Raises InvalidValueError for an unknown name."""
    for name in names:
        if name not in (*MEASURED, ALL):
            raise unknown("--calibrate", name, (ALL, *MEASURED))
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
    made = table.read(path) if path.exists() else table.Table(device.to_dict(), {}, ())
    if made.device["name"] != device.name:
        raise InvalidValueError(f"{path} is of {made.device['name']}, not {device.name}: name another")
    path.parent.mkdir(parents=True, exist_ok=True)
    made = replace(made, kernels=digests(), portfolios=made.current_portfolios())
    classes = []
    for name in names:
        try:
            legal_configs(drawn(name, 1, "candidates")[0], device)
            classes.append(name)
        except UnsupportedError as error:
            say(f"{name} is left out: {error}")
    if not classes:
        raise UnsupportedError(f"--calibrate: {device.name} runs none of {', '.join(names)}")
    with interruptible() as keep_on, ThreadPoolExecutor(1) as ahead:
        # Classes are compiled one after the other, while those before are timed.
        compiled = {name: ahead.submit(_compiled, name, device, sizes, count) for name in classes}
        for name in classes:
            rows = compiled[name].result()
            begun = time.monotonic()
            timed = list[Row]()
            try:
                with progress() as bar:
                    for row in bar.track(rows(), total=sizes, description=name):
                        timed.append(row)
                        if time.monotonic() - begun > seconds or not keep_on():
                            break
            finally:  # what was measured is kept, whatever happens
                if sweeps is not None and timed:
                    write_sweep(sweeps / f"{name}.jsonl", timed, device)
            before = made.portfolios.get(name)
            if len(timed) < sizes and before is not None and before.loss.sizes > len(timed):
                say(f"{name}: stopped at {len(timed)} sizes, and the portfolio of {before.loss.sizes} stays")
            else:
                made = _fitted(made, name, timed, device)
                table.write(made, path)
                console.print(f"{name}: {time.monotonic() - begun:.0f} s")
            if not keep_on():
                ahead.shutdown(cancel_futures=True)
                break
    plans.forget()
    console.print(f"portfolios are in {path}")


def _compiled(name: str, device: Device, sizes: int, count: int) -> Callable[[], Iterator[Row]]:
    """Compile candidates; return a function that times them, size by size.

    The sizes are not those by which the candidates were chosen.
    """
    likely, problems = drawn(name, LIKELY, "candidates"), drawn(name, sizes, "sizes")
    configs = run.candidates(name, likely, device, gpu_tables.shipped(device), count)
    console.print(f"{name}: {len(configs)} configs at {sizes} sizes")
    chooser = ready(problems, configs, device, say)
    return lambda: sweep(problems, chooser, device, say)


def write_sweep(path: Path, rows: Sequence[Row], device: Device) -> None:
    """Write a line with the GPU and the configs, then a line per size with the times by config number."""
    places = {config: i for i, config in enumerate(dict.fromkeys(c for row in rows for c in row.times))}
    lines: list[dict[str, object]] = [
        {"device": device.to_dict(), "configs": [config.to_dict() for config in places]}
    ]
    for row in rows:
        us = {str(places[config]): float(f"{each:.5g}") for config, each in row.times.items()}
        lines.append({"problem": problem_to_dict(row.problem), "us": us, "torch_us": row.torch_us})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _fitted(made: table.Table, name: str, rows: Sequence[Row], device: Device) -> table.Table:
    """Return the table with a class's portfolio and torch's times, unchanged if there are too few sizes."""
    try:
        measured = run.Measured(name, rows, device)
    except TuningError as error:
        say(str(error))
        return made
    left_out = measured.left_out()
    portfolio, aten = measured.portfolio(left_out), measured.aten(left_out)
    loss, atens = portfolio.loss, made.aten
    console.print(
        f"{name}: {len(portfolio.configs)} configs; at {loss.sizes} sizes left out picks lost "
        f"{loss.median:.2%} (median), {loss.p95:.2%} (95%), {loss.worst:.2%} (worst)"
    )
    if aten is not None:  # the first that knows a class serves it
        console.print(f"{name}: torch's times are predicted within {aten.error:.1%}")
        atens = (aten, *(each for each in atens if each.classes != (name,)))
    return replace(made, portfolios={**made.portfolios, name: portfolio}, aten=atens)
