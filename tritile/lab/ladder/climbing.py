"""Climb a ladder: time its steps on a GPU, or count and compile them without one; keep the readings."""

import contextlib
import itertools
import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import torch

from tritile.core import device as devices
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.files import write_whole
from tritile.core.settings import mode
from tritile.errors import FileError, InterpreterWarning, InvalidValueError, brief
from tritile.lab.counting import SECTOR, counted
from tritile.lab.explain.texts import bytes_text
from tritile.lab.ladder.running import (
    Matrices,
    Reading,
    error_of,
    matrices,
    planned,
    reading_of,
    run_compiled,
    run_interpreted,
)
from tritile.lab.ladder.steps import ITEMSIZE, Kernel, Library, Step
from tritile.tune.autotuner import autotune
from tritile.tune.measure.timing import Run, Timed, Timing, copies_wanted, graph_of, interleaved, timing_of

TIMED_N: Final = 8192  # by default
COUNTED_N: Final = 96
LARGEST: Final = 46340  # n * n, an offset, has 31 bits
_INTERPRETED: Final = 512  # the largest n of the interpreter, at which the naive product takes minutes
_SLOW_US: Final = 2e5  # slower steps are timed alone, a few times
_SLOWEST_US: Final = 2e6  # slower steps are timed once
_BUDGET_MS: Final = 60.0  # for timing each step that is not slow
_Found = tuple[Reading, Timing | Timed | None]  # a step's reading; its time, or the graph to time
Done = Callable[[str], None]  # told the name of each step


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

    def rate(self, reading: Reading) -> float | None:
        """Return TFLOP/s of a product or GB/s, read and written, of a transpose; None if not timed."""
        if not reading.us:
            return None
        if reading.op == "matmul":
            return 2 * self.n**3 / reading.us / 1e6
        return 2 * self.n**2 * ITEMSIZE[reading.dtype] / reading.us / 1e3

    def gains(self, op: str) -> dict[str, tuple[float, float]]:
        """Return by step's name its speed over that of the first timed step, and over that of the fastest."""
        times = {reading.name: reading.us for reading in self.of(op) if reading.us}
        if not times:
            return {}
        first, best = next(iter(times.values())), min(times.values())
        return {name: (first / us, best / us) for name, us in times.items()}

    def save(self, path: Path) -> None:
        """Write the climb as JSON. Raises OSError where the file cannot be written."""
        write_whole(path, json.dumps(asdict(self), indent=1) + "\n")


def read(path: Path) -> Climb:
    """Read the climb that `Climb.save` wrote. Raises FileError for others, and for no file."""
    from pydantic import TypeAdapter, ValidationError  # late: slow to import

    if not path.is_file():
        raise FileError(f"{path} is not there, or no regular file")
    try:
        found: Climb = TypeAdapter(Climb).validate_json(path.read_bytes(), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise FileError(f"{path} holds no climb: {place}: {first['msg']}") from error
    if found.n < 1 or not found.readings or any(r.us is not None and r.us <= 0 for r in found.readings):
        raise FileError(f"{path} holds no climb: wanted n of 1 or more, and times above 0")
    return found


def check_size(n: int, device: Device | None) -> None:
    """Raise InvalidValueError where offsets do not fit 32 bits, or the interpreter takes too long."""
    most, why = (LARGEST, "where offsets have 32 bits") if device else (_INTERPRETED, "in the interpreter")
    if not 1 <= n <= most:
        raise InvalidValueError(f"n = {n}: wanted 1 to {most:,}, {why}")


def counted_climb(steps: Iterable[Step], n: int, device: Device, done: Done) -> list[Reading]:
    """Return readings of steps without a GPU: memory traffic, and resources on a device.

    Yardsticks are left out, as they have nothing but a time. Steps in bfloat16, which Triton's interpreter
    gets wrong, are interpreted in float16.
    """
    readings = []
    for step in steps:
        if not step.yardstick:
            readings.append(_counted(reading_of(step, n, planned(step, n, device), device), step, n))
        done(step.name)
    return readings


def _counted(reading: Reading, step: Step, n: int) -> Reading:
    """Run a step in the interpreter, check its answer, and return the reading with its traffic."""
    unfit = step.unfit(devices.INTERPRETER, n)
    if unfit:
        return reading.noted(unfit)
    given = matrices(step.op, n, "float16" if step.dtype == "bfloat16" else step.dtype, "cpu")
    try:
        with warnings.catch_warnings(), counted() as counts:
            warnings.simplefilter("ignore", InterpreterWarning)
            run_interpreted(step, given)
        error = error_of(step.op, given)
    except Exception as failure:  # a step that raises costs itself alone
        return reading.noted(brief(failure), failed=True)
    if isinstance(step.runs, Library):
        reading = reading.noted("counted with the config that matrices in host memory get")
    touched = SECTOR * (counts.read_sectors + counts.written_sectors)
    return replace(reading, read=counts.read, written=counts.written, touched=touched, error=error)


def _copies(n: int, device: Device) -> int:
    return copies_wanted(3 * n * n * 2, device.l2_bytes)


def _chosen(step: Step, given: Matrices, device: Device) -> Config | None:
    """Return the config that a step runs with: of several, the fastest by `tritile.autotune`."""
    n, kernel = given[0].shape[0], step.runs
    if not isinstance(kernel, Kernel) or len(kernel.configs) == 1:
        return planned(step, n, device)
    tuner = autotune([config.to_triton() for config in kernel.configs], key=["n"])(kernel.jitted)
    grid, processors = kernel.grid, device.processors  # all that the measuring process is sent
    with mode("tune"):
        tuner[lambda values: grid(n, values, processors)](*given, n)
    return Config.from_triton(tuner.best_config)


def _once_us(run: Run, given: Matrices) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run(given)
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)


def _checked(step: Step, calls: Sequence[Matrices], device: Device) -> _Found:
    """Run a step and check its answer; return its reading, with its time if slow, else a graph to time.

    Raises whatever the step raises.
    """
    config = _chosen(step, calls[0], device)
    reading = reading_of(step, calls[0][0].shape[0], config, device)

    def run(given: Matrices) -> None:
        run_compiled(step, given, config, device.processors)

    calls[0][-1].fill_(math.nan)
    run(calls[0])
    torch.cuda.synchronize()
    if step.checked:
        reading = replace(reading, error=error_of(step.op, calls[0]))
    us = _once_us(run, calls[0])
    if us < _SLOW_US:
        return reading, graph_of(run, calls)
    more = 0 if us > _SLOWEST_US else 4
    return reading, timing_of([us, *(_once_us(run, calls[0]) for _ in range(more))])


def _timed(found: Sequence[_Found]) -> list[Reading]:
    """Time the graphs by turns, and return the readings with times."""
    graphs = {i: timed for i, (_, timed) in enumerate(found) if timed and not isinstance(timed, Timing)}
    timings = {i: timing for i, (_, timing) in enumerate(found) if isinstance(timing, Timing)}
    why = ""
    try:
        samples = interleaved(list(graphs.values()), _BUDGET_MS * len(graphs)) if graphs else []
        timings |= {i: timing_of(times) for i, times in zip(graphs, samples, strict=True)}
    except Exception as error:  # an error of the GPU costs these times, not what was read before
        why = brief(error)
    readings = [reading for reading, _ in found]
    for i, timing in timings.items():
        readings[i] = replace(readings[i], us=timing.us, spread=timing.spread)
    for i in graphs.keys() - timings.keys():
        readings[i] = readings[i].noted(why, failed=True)
    return readings


def timed_climb(steps: Iterable[Step], n: int, device: Device, done: Done) -> list[Reading]:
    """Check and time every step on the current GPU, those of one dtype side by side.

    A step that fails has the reason in its note. So have all later ones if it leaves the GPU unusable.
    """
    readings: list[Reading] = []
    for (op, dtype), group in itertools.groupby(steps, key=lambda step: (step.op, step.dtype)):
        calls, found = list[Matrices](), list[_Found]()
        for step in group:
            try:
                if step.unfit(device, n):
                    found.append((reading_of(step, n, planned(step, n, device), device), None))
                else:
                    calls = calls or [matrices(op, n, dtype, "cuda", i) for i in range(_copies(n, device))]
                    found.append(_checked(step, calls, device))
            except Exception as error:  # a step that raises costs itself alone
                found.append((reading_of(step, n, None, device).noted(brief(error), failed=True), None))
            done(step.name)
        readings += _timed(found)
        del calls, found
        with contextlib.suppress(RuntimeError):  # a GPU that is lost
            torch.cuda.empty_cache()
    return readings


def unit(op: str) -> str:
    """Return the unit of `Climb.rate`."""
    return "TFLOP/s" if op == "matmul" else "GB/s"


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
    return f"{us:.3g} us" if us < 999.5 else f"{us / 1e3:.3g} ms" if us < 999.5e3 else f"{us / 1e6:,.3g} s"
