"""tritile replay: compare search strategies on recorded times, without a GPU."""

import statistics
from pathlib import Path
from typing import Annotated, Any

import typer

from tritile.cli import shared
from tritile.cli.shared import app, console, kept, progress
from tritile.core import gpus
from tritile.errors import InvalidValueError
from tritile.lab.report import columns, recorded
from tritile.lab.report.columns import number
from tritile.tune.measure.tasks import Rules
from tritile.tune.search import ENOUGH, STRATEGIES, Replayed, replay
from tritile.tune.subject import ProblemSpace


def _summary(name: str, runs: list[Replayed]) -> dict[str, Any]:
    """Return a strategy's medians of configs and rounds, and its regrets in percent."""
    regrets = sorted(100 * run.regret for run in runs)
    return {
        "strategy": name,
        "configs": statistics.median(run.tried for run in runs),
        "rounds": statistics.median(run.rounds for run in runs),
        "regret": statistics.median(regrets),
        "p95": regrets[round(0.95 * (len(regrets) - 1))],
        "worst": regrets[-1],
    }


def _row(found: dict[str, Any]) -> dict[str, Any]:
    counts = {name: number(found[name], "g") for name in ("configs", "rounds")}
    shares = (("regret %", "regret"), ("95%", "p95"), ("worst", "worst"))
    return {"strategy": found["strategy"], **counts, **{n: number(found[key], ".2f") for n, key in shares}}


@app.command("replay")
def replay_stores(
    stores: Annotated[
        list[Path] | None,
        typer.Argument(help="Stores, or .gz of them, of whole spaces. Default: those of a checkout."),
    ] = None,
    strategy: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(STRATEGIES)}; may be repeated. Default: each.")
    ] = None,
    target: shared.Target = None,
    batch: Annotated[int, typer.Option(min=1, help="Most configs of a round.")] = Rules.batch,
    most: Annotated[int, typer.Option(min=1, help="Most configs of a problem.")] = 64,
    enough: Annotated[float, typer.Option(min=0, help="Expected gain below which a search ends.")] = ENOUGH,
    as_json: shared.Json = False,
) -> None:
    """Run search strategies on recorded times; print the configs and rounds they take, and their regret.

    Regret is how many percent slower the config found is than the fastest on record. The times are those of a
    --target, by default h200.
    """
    names, device = strategy or list(STRATEGIES), gpus.target_device(target or "h200")
    unknown = [name for name in names if name not in STRATEGIES]
    if unknown:
        raise InvalidValueError(f"no strategy {unknown[0]!r}: there are {', '.join(STRATEGIES)}")
    here = kept("trials")
    paths = stores or sorted(here.glob(f"{device.slug}*whole*") if here else ())
    if not paths:
        raise InvalidValueError(f"there is no store of whole spaces of {device.name} here: name one")
    with shared.working("reading"):
        read = recorded.times(paths, device, failures=True)
    times = {key: own for key, own in read.items() if min(own.values()) < float("inf")}
    if not times:
        raise InvalidValueError(f"no config worked in {', '.join(map(str, paths))}")
    runs: dict[str, list[Replayed]] = {name: [] for name in names}
    with progress() as bar:
        for problem, place in bar.track(times, description="replaying"):
            space = ProblemSpace(problem, device)
            for name in names:
                runs[name].append(replay(space, times[problem, place], STRATEGIES[name], batch, most, enough))
    found = [_summary(name, own) for name, own in runs.items()]
    if as_json:
        return shared.print_json({"gpu": device.name, "problems": len(times), "strategies": found})
    console.print(columns.table(list(map(_row, found)), device.name))
    console.print(f"{len(times)} problems; configs, rounds and regret are medians")
