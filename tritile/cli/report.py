"""tritile report: write results as one HTML page, or a figure of results or trials as a picture."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tritile.cli import shared
from tritile.cli.shared import DRAWING, app, console, kept, say
from tritile.core import device as devices
from tritile.core.problem import Problem, Tiled
from tritile.errors import FileError, InvalidValueError
from tritile.families.space import illegal
from tritile.lab.results import Result, of_cases, stored
from tritile.planning.store import store_of
from tritile.planning.trial import Trial


def _gpu_of(target: str | None, results: list[Result]) -> str:
    """Return the name of the GPU to report: the one named, the current one, or the one of most results."""
    counts = Counter(line["env"]["gpu"] for line in results)
    here = devices.current_gpu()
    if target is not None:
        named = [name for name in counts if replace(devices.INTERPRETER, name=name).slug == target.lower()]
        return named[0] if named else devices.target_device(target).name
    return here.name if here and counts[here.name] else max(counts, key=counts.__getitem__)


def _trials(files: list[Path], target: str | None, problem: str) -> list[Trial]:
    """Return the trials of the most widely searched problem whose name holds `problem`.

    They are of one store, as only its times were measured side by side: of `files`, else of those that a
    checkout has and this user's own.
    """
    current = None if target else devices.current_gpu()
    device = current or devices.target_device(target or "h200")
    own, here = store_of(device), kept("trials")
    stores = [
        [trial for _, trial in own.of_file(path)]
        for path in files or sorted(here.glob(f"{device.slug}*.sqlite3*") if here else ())
    ]
    if not files:
        everything = own.everything()
        stores.append([trial for facts, trial in everything if facts["name"] == device.name])
    searches: dict[tuple[int, Problem], list[Trial]] = {}
    for number, trials in enumerate(stores):
        for trial in trials:
            blocks = {"BLOCK_M", "BLOCK_N"} <= dict(trial.config.kwargs).keys()
            if problem not in trial.problem.label or not blocks:
                continue
            if isinstance(trial.problem, Tiled) and illegal(trial.config, trial.problem, device) is not None:
                continue
            searches.setdefault((number, trial.problem), []).append(trial)
    if not searches:
        raise InvalidValueError(f"--problem {problem!r}: no search on {device.name} has that in its name")
    return max(searches.values(), key=len)


@app.command("report")
def report(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Results (.jsonl) or folders of them; of --figure heatmap stores (.sqlite3, .gz of them). "
            "Default: what a checkout has, and for the heat map your own store too."
        ),
    ] = None,
    target: shared.Target = None,
    output: Annotated[Path | None, typer.Option(help="What to write; default report.html.")] = None,
    figure: Annotated[
        str | None, typer.Option(help="Only this figure, as a picture (.svg, .png): speedups or heatmap.")
    ] = None,
    problem: Annotated[str, typer.Option(help="With --figure heatmap: a part of the problem's name.")] = "",
) -> None:
    """Write results as one HTML page that needs no network, or a figure of results or trials as a picture.

    The page shows where tritile gains and where it loses, with filters. The heat map shows the times of a
    tuned problem over BLOCK_M and BLOCK_N.
    """
    path = output or Path("report.html" if figure is None else f"{figure}.svg")
    shared.check_output(path, dict.fromkeys([".html"] if figure is None else [".svg", ".png"], DRAWING))
    from tritile.lab import report as charts  # needs the extra `report`

    if figure not in (None, *charts.FIGURES):
        raise InvalidValueError(f"no figure {figure!r}: there are {', '.join(charts.FIGURES)}")
    for file in files or []:
        if not file.exists():
            raise FileError(f"{file}: no such file or folder")
    kind = path.suffix.removeprefix(".")
    if figure == "heatmap":
        with shared.working("drawing"):
            trials = _trials(files or [], target, problem)
            shared.write(path, charts.picture(charts.heatmap(trials), kind))
        return console.print(f"{trials[0].problem.label}: {len(trials)} trials in {path}", soft_wrap=True)
    places = shared.places_of(files)
    with shared.working("drawing"):
        lines = stored(places, say)
        if not lines:
            raise FileError(f"there are no results in {', '.join(map(str, places))}")
        gpu = _gpu_of(target, lines)
        rows = charts.rows_of(lines, gpu)
        if figure is None:
            data: str | bytes = charts.page(rows, gpu, _versions(lines, gpu))
        else:
            data = charts.picture(charts.speedups(rows), kind)
        shared.write(path, data)
    console.print(f"{path}: {len(rows)} comparisons on {gpu}", soft_wrap=True)
    for other, count in Counter(line["env"]["gpu"] for line in of_cases(lines)).items():
        if other != gpu:
            console.print(f"{count} results of {other} are left out: --target shows them", soft_wrap=True)


def _versions(lines: list[Result], gpu: str) -> str:
    """Return the versions and the time of the newest result of a GPU, "" where there is none."""
    own = [line["env"] for line in lines if line["env"]["gpu"] == gpu]
    newest: dict[str, str] = max(own, key=lambda env: env["time"], default={})
    names = ("torch", "triton", "driver", "tritile", "time")
    return ", ".join(f"{name} {newest[name]}" for name in names if newest.get(name))
