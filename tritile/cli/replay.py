"""tritile replay: compare search strategies on recorded times, without a GPU."""

import statistics
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table as RichTable

from tritile.cli.shared import app, console, kept, progress
from tritile.core import device as devices
from tritile.errors import InvalidValueError
from tritile.lab.report import recorded
from tritile.tune.measure.tasks import Rules
from tritile.tune.search import ENOUGH, STRATEGIES, Replayed, replay
from tritile.tune.subject import ProblemSpace


def _row(name: str, runs: list[Replayed]) -> list[str]:
    """Return a strategy's row: configs, rounds, and regrets in percent."""
    regrets = sorted(run.regret for run in runs)
    tail = regrets[round(0.95 * (len(regrets) - 1))]
    counts = (statistics.median(run.tried for run in runs), statistics.median(run.rounds for run in runs))
    shares = (statistics.median(regrets), tail, regrets[-1])
    return [name, *(f"{count:g}" for count in counts), *(f"{100 * share:.2f}" for share in shares)]


@app.command("replay")
def replay_stores(
    stores: Annotated[
        list[Path] | None,
        typer.Argument(help="Stores, or .gz of them, of whole spaces. Default: those of a checkout."),
    ] = None,
    strategy: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(STRATEGIES)}; may be repeated. Default: each.")
    ] = None,
    target: Annotated[str, typer.Option(help="The GPU that the times were measured on.")] = "nvidia-h200",
    batch: Annotated[int, typer.Option(min=1, help="Most configs of a round.")] = Rules.batch,
    most: Annotated[int, typer.Option(min=1, help="Most configs of a problem.")] = 64,
    enough: Annotated[float, typer.Option(min=0, help="Expected gain below which a search ends.")] = ENOUGH,
) -> None:
    """Run search strategies on recorded times; print the configs and rounds they take, and their regret.

    Regret is how many percent slower the config found is than the fastest on record.
    """
    names, device = strategy or list(STRATEGIES), devices.target_device(target)
    unknown = [name for name in names if name not in STRATEGIES]
    if unknown:
        raise InvalidValueError(f"no strategy {unknown[0]!r}: there are {', '.join(STRATEGIES)}")
    here = kept("trials")
    paths = stores or sorted(here.glob(f"{device.slug}*whole*") if here else ())
    if not paths:
        raise InvalidValueError(f"there is no store of whole spaces of {device.name} here: name one")
    times = {
        key: own
        for key, own in recorded.times(paths, device, failures=True).items()
        if min(own.values()) < float("inf")
    }
    runs: dict[str, list[Replayed]] = {name: [] for name in names}
    with progress() as bar:
        for problem, number in bar.track(times, description="replaying"):
            space = ProblemSpace(problem, device)
            for name in names:
                runs[name].append(
                    replay(space, times[problem, number], STRATEGIES[name], batch, most, enough)
                )
    grid = RichTable("strategy", "configs", "rounds", "regret %", "95%", "worst")
    for name in names:
        grid.add_row(*_row(name, runs[name]))
    console.print(grid)
    console.print(f"{len(times)} problems; configs, rounds and regret are medians", highlight=False)
