"""Measure the calls that a model makes: `tritile tune --model`."""

import contextlib
import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tritile.cli.shared import console
from tritile.core.device import current_gpu
from tritile.errors import InvalidValueError
from tritile.in_torch import use_in_torch

ROUNDS = 9  # of both sides, after the run that measures


def step_of(name: str) -> Callable[[], Any]:
    """Return the function that `module:function` names, of a module in the current folder or installed.

    Raises InvalidValueError where there is none.
    """
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise InvalidValueError(f"--model {name!r}: wanted module:function")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise InvalidValueError(f"--model {name}: {error}") from error
    if not callable(found):
        raise InvalidValueError(f"--model {name}: {type(found).__name__} is not a function")
    step: Callable[[], Any] = found
    return step


def _seconds(step: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def tune_model(name: str) -> None:
    """Measure each call of torch's in a step of a model beside tritile's, and say what `use_in_torch` gains.

    The step runs once to measure, in mode "tune", then by turns without and with `use_in_torch`.
    """
    if current_gpu() is None:
        raise InvalidValueError("--model measures, and there is no GPU here")
    step = step_of(name)
    step()  # what the model itself loads at a first call does not count
    before = os.environ.get("TRITILE_MODE")
    os.environ["TRITILE_MODE"] = "tune"  # of the threads of backward passes too
    try:
        with use_in_torch():
            step()
    finally:
        os.environ.pop("TRITILE_MODE")
        if before is not None:
            os.environ["TRITILE_MODE"] = before
    switch = use_in_torch()
    times: dict[bool, list[float]] = {False: [], True: []}
    with switch:
        step()
    for number in range(ROUNDS):
        for side in (number % 2 == 0, number % 2 == 1):
            with switch if side else contextlib.nullcontext():
                times[side].append(_seconds(step))
    console.print(switch.report)
    off, on = times[False], times[True]
    alone, taken = statistics.median(off), statistics.median(on)
    console.print(
        f"{name}: {1e3 * alone:.2f} ms, with tritile {1e3 * taken:.2f} ms: {alone / taken:.3f} times as fast"
    )
