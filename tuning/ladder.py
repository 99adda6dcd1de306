"""Climb tutorial kernels from a naive one up to the library's own, each with what it adds.

Kernels are timed side by side on a GPU, or compiled for one elsewhere.
"""

import itertools
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Final

import torch
import typer
from rich.text import Text

sys.path.insert(0, str(Path(__file__).parents[1]))

import command
from ladder_rungs import ITEMSIZE, LADDERS, Dtype, Op, Rung
from tritile.cli import shared
from tritile.cli.shared import console, number, print_table, progress, unknown
from tritile.core import device as devices
from tritile.core.call import MatmulCall, Memory
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.settings import mode
from tritile.errors import InvalidValueError, TuningError, brief
from tritile.lab.environment import environment
from tritile.lab.traffic import bytes_text, tiled
from tritile.tune.subject import answers
from tritile.tuner.autotuner import autotune
from tritile.tuner.measure.outputs import WRONG
from tritile.tuner.measure.timing import Eager, copies_for, graph_of, interleaved, timing_of

LARGEST: Final = 16384  # at which the naive product takes seconds
_BUDGET_MS: Final = 60.0  # for timing each rung
Matrices = tuple[torch.Tensor, ...]  # the last is written


@dataclass(frozen=True)
class Reading:
    """What is known of a rung; a field is None where it was not measured, for the reason in `note`.

    `requested`: bytes, as `Rung.requested` has them. `us`: the median time of a launch in microseconds;
    `spread`: that of its samples; `error`: the relative error of the answer. `registers` and `spills` (bytes)
    are per thread, `shared` (bytes) per program. `failed` marks a rung that does not run or answers wrongly.
    """

    op: Op
    name: str
    idea: str
    dtype: Dtype
    baseline: bool
    config: str | None = None
    requested: int | None = None
    us: float | None = None
    spread: float | None = None
    error: float | None = None
    registers: int | None = None
    spills: int | None = None
    shared: int | None = None
    note: str | None = None
    failed: bool = False


def matrices(op: str, n: int, dtype: str, where: str, seed: int = 0) -> Matrices:
    """Return random n x n matrices, the same for the same seed, and one full of NaN for the answer."""
    generator, kind = torch.Generator(where).manual_seed(seed), getattr(torch, dtype)
    count = 2 if op == "matmul" else 1
    operands = [torch.randn(n, n, device=where, dtype=kind, generator=generator) for _ in range(count)]
    return (*operands, torch.full_like(operands[0], math.nan))


def error_of(op: str, given: Matrices) -> float:
    """Return the relative error of the last matrix, like `answers.norm_error`. A transpose has to be exact.

    Raises TuningError for a wrong answer.
    """
    if op == "transpose":
        if not torch.equal(given[0].t(), given[1]):
            raise TuningError(f"{WRONG}: elements differ")
        return 0.0
    views = (
        Memory.of(name, tensor).view((len(tensor), len(tensor)), (len(tensor), 1))
        for name, tensor in zip(("a", "b", "out"), given, strict=True)
    )
    return answers.answer_error(MatmulCall(*views, batch_shape=(), precision="ieee"), every=False)


def described(rung: Rung, n: int, config: Config | None, device: Device) -> Reading:
    """Return what is known of a rung without a GPU: requested bytes, and resources on a device."""
    reading = Reading(rung.op, rung.name, rung.idea, rung.dtype, rung.is_baseline)
    if config is None:
        return reading
    if rung.problem is not None:
        requested = round(tiled(rung.problem(n), config, device).total)
    else:
        requested = rung.requested(n, ITEMSIZE[rung.dtype], config)
    reading = replace(reading, config=str(config), requested=requested, note=rung.unfit(device, n))
    if reading.note is not None:
        return reading
    try:
        found = rung.resources(n, config, device)
    except Exception as error:  # a compiler may raise anything
        return replace(reading, note=brief(error))
    return replace(reading, registers=found.registers, spills=found.spills, shared=found.shared)


def _tuned(rung: Rung, tensors: Matrices, device: Device) -> Config:
    """Return the fastest of a rung's configs, by `tritile.autotune`."""
    n, grid, processors = tensors[0].shape[0], rung.grid, device.processors  # all that is sent to a process
    tuner = autotune([config.to_triton() for config in rung.configs], key=["n"])(rung.kernel)
    with mode("tune"):
        tuner[lambda values: grid(n, values, processors)](*tensors, n)
    return Config.from_triton(tuner.best_config)


def _checked(rung: Rung, calls: list[Matrices], device: Device) -> tuple[Reading, Eager | None]:
    """Run a rung and check its answer; return what is known of it, and what times it where it runs here."""
    n = calls[0][0].shape[0]
    config, is_fit = rung.config(n, device), rung.unfit(device, n) is None
    if is_fit and len(rung.configs) > 1:
        config = _tuned(rung, calls[0], device)
    reading = described(rung, n, config, device)
    if not is_fit:
        return reading, None

    def run(tensors: Matrices) -> None:
        rung.run(tensors, config, device.processors)

    calls[0][-1].fill_(math.nan)
    run(calls[0])
    torch.cuda.synchronize()
    error = error_of(rung.op, calls[0]) if rung.checked else None
    return replace(reading, error=error), graph_of(run, calls)


def timed(
    rungs: Iterable[Rung], n: int, device: Device, done: Callable[[str], None] = lambda name: None
) -> list[Reading]:
    """Check and time every rung on the current GPU, those of one dtype in turns; `done` gets each name.

    A rung that fails has the reason in its note.
    """
    readings: list[Reading] = []
    for (op, dtype), group in itertools.groupby(rungs, key=lambda rung: (rung.op, rung.dtype)):
        copies = copies_for(3 * n * n * ITEMSIZE[dtype], device.l2_bytes)
        calls = [matrices(op, n, dtype, "cuda", i) for i in range(copies)]
        graphs = dict[int, Eager]()
        for rung in group:
            try:
                reading, graph = _checked(rung, calls, device)
                if graph is not None:
                    graphs[len(readings)] = graph
            except Exception as error:  # a rung that raises costs itself alone
                reading = replace(described(rung, n, None, device), note=brief(error), failed=True)
            readings.append(reading)
            done(rung.name)
        samples = interleaved(list(graphs.values()), _BUDGET_MS * len(graphs)) if graphs else []
        for i, times in zip(graphs, samples, strict=True):
            readings[i] = replace(readings[i], **timing_of(times)._asdict())
        del calls, graphs
        torch.cuda.empty_cache()
    return readings


def _row(reading: Reading, times: list[float], n: int, timed: bool) -> dict[str, str | Text]:
    """The row of a rung; `times` has those of its ladder, from the first rung up."""
    product, us = reading.op == "matmul", reading.us
    cells: dict[str, object] = {}
    if timed:
        work = 2 * n**3 / 1e6 if product else 2 * n**2 * ITEMSIZE[reading.dtype] / 1e3
        cells["ms"] = us and f"{us / 1e3:,.4g}"
        cells["TFLOP/s" if product else "GB/s"] = us and f"{work / us:,.4g}"
        cells |= {"x first": us and f"{times[0] / us:,.3g}", "of best": us and f"{min(times) / us:.1%}"}
    cells["requested"] = bytes_text(reading.requested) if reading.requested else None
    if not timed:  # with times there is no room for them in a narrow terminal: see --json
        cells |= {name: getattr(reading, name) for name in ("registers", "spills", "shared")}
    idea = reading.idea + (f" ({reading.note})" if reading.note else "")
    numbers = {name: number("-" if cell is None else cell) for name, cell in cells.items()}
    return {"rung": reading.name, "what is new": idea, **numbers}


def main(
    n: Annotated[int, typer.Argument(help="Rows and columns.")] = 8192,
    op: Annotated[str, typer.Option(help=f"One of {', '.join(LADDERS)}. Default: both.")] = "",
    target: shared.Target = None,
    as_json: shared.Json = False,
) -> None:
    """Climb from a naive matmul and a naive transpose to tritile's own, one idea a step.

    On a GPU every rung is checked, timed and compared. Without one, or for a --target, its requests to memory
    are counted by formula, and it is compiled for that GPU; without either, for an h200.
    """
    if op and op not in LADDERS:
        raise unknown("--op", op, LADDERS)
    if not 1 <= n <= LARGEST:
        raise InvalidValueError(f"n = {n}: expected 1 to {LARGEST:,}")
    ops = [op] if op else list(LADDERS)
    here = devices.current_gpu() if target is None else None
    device = shared.device_of(target, otherwise="h200")
    rungs = [rung for each in ops for rung in LADDERS[each]]
    with progress() as bar:
        task = bar.add_task("ladder", total=len(rungs))
        if here:
            found = timed(rungs, n, device, lambda name: bar.update(task, advance=1, description=name))
        else:
            own = bar.track([rung for rung in rungs if not rung.is_baseline], task_id=task)
            found = [described(rung, n, rung.config(n, device), device) for rung in own]
    if as_json:
        facts = {"n": n, "device": device.name, "timed": here is not None, "env": environment(here)}
        shared.print_json(facts | {"readings": [asdict(each) for each in found]})
    else:
        for name in ops:
            readings = [reading for reading in found if reading.op == name]
            times = [reading.us for reading in readings if reading.us]
            rows = [_row(reading, times, n, here is not None) for reading in readings]
            styles = ["red" if each.failed else "dim" if each.baseline else "" for each in readings]
            title = f"{name}, {n} x {n}, {'on' if here else 'compiled for'} {device.name}"
            print_table(rows, title, styles=styles)
            console.print()
        console.print("requested: bytes of global memory; of a transpose, of whole 32-byte sectors")
    if any(reading.failed for reading in found):
        raise typer.Exit(1)


app = command.app_of(
    main,
    "python tuning/ladder.py",
    "python tuning/ladder.py 4096 --op transpose",
    "python tuning/ladder.py --target h200",
)

if __name__ == "__main__":
    command.run(app)
