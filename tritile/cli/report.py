"""tritile report: write results and trials as one HTML page, or a figure of it as a picture."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tritile.cli.shared import PICTURES, RESULTS, TUNING, app, check_output, console, say
from tritile.core import device as devices
from tritile.core.device import Device
from tritile.errors import InvalidValueError
from tritile.lab.report.page import rows, searches, sources
from tritile.lab.report.results import Result, stored
from tritile.planning.store import store_of


def _device(slug: str | None, results: list[Result]) -> tuple[str, Device | None]:
    """Return the GPU to report, the one named or the one of the results; and its device, if known."""
    if slug is not None:
        names = sorted({line["env"]["gpu"] for line in results})
        named = [name for name in names if replace(devices.INTERPRETER, name=name).slug == slug]
        gpu = named[0] if named else devices.target_device(slug).name
    else:
        gpu = rows.gpu_of(results)
    if gpu is not None:
        return gpu, rows.named(gpu)
    device = devices.current_gpu() or devices.target_device(next(iter(devices.TARGETS)))
    return device.name, device


def _stores(found: sources.Sources, defaults: bool, device: Device | None) -> list[searches.Recorded]:
    """Read the named stores; by default this user's own and those recorded in the checkout."""
    if device is None:
        if found.stores:
            raise InvalidValueError(
                f"{found.stores[0]}: trials of an unknown GPU; --target names one of "
                f"{', '.join(devices.TARGETS)}"
            )
        return []
    paths = list(found.stores)
    own = []
    if defaults:
        paths += sorted((TUNING / "trials").glob(f"{device.slug}*.sqlite3*"))
        own = [searches.of_store(store_of(device))]
    return [store for store in (*own, *(searches.of_file(path, device) for path in paths)) if store.trials]


def _read(files: list[Path], results: Path | None, stores: list[Path], target: str | None) -> rows.Rows:
    places = files or ([results] if results else [RESULTS] * RESULTS.is_dir())
    found = sources.sources(places)
    found.stores += stores
    lines = stored(found.results, say) if found.results else []
    if results and not files and not lines:
        raise InvalidValueError(f"{results} holds no results: tritile bench --results {results} makes them")
    gpu, device = _device(target, lines)
    recorded = _stores(found, not files and not stores, device)
    return sources.gathered(lines, recorded, gpu, device)


@app.command("report")
def report(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Results (.jsonl), stores (.sqlite3, .gz of them), or folders of results. "
            "Default: what this checkout has, and your own store."
        ),
    ] = None,
    results: Annotated[
        Path | None, typer.Option(help="The folder of results, in place of the default.")
    ] = None,
    store: Annotated[
        list[Path] | None, typer.Option(help="A store of trials, in place of the default; may be repeated.")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", "--gpu", help="The GPU to report, as nvidia-h200.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="What to write; default report.html.")] = None,
    figure: Annotated[
        str | None, typer.Option(help="Only this figure, as a picture: --output must end in .svg or .png.")
    ] = None,
    problem: Annotated[str, typer.Option(help="With --figure heatmap: a part of the problem's name.")] = "",
) -> None:
    """Write results and trials as one HTML page that needs no network, or one figure of it as a picture.

    The page shows speed-ups, rooflines, times over tiles, progress of searches and errors, each with a table
    and with filters.
    """
    path = output or Path("report.html" if figure is None else f"{figure}.svg")
    path.parent.mkdir(parents=True, exist_ok=True)
    check_output(path, dict.fromkeys([path.suffix], PICTURES[".html"]) if figure is None else PICTURES)
    from tritile.lab.report.page import document  # needs the extra `report`

    if figure is not None:
        document.check_picture(figure, path.suffix.removeprefix("."))
    made = _read(files or [], results, store or [], target)
    if figure is None:
        data = document.html(made).encode()
    else:
        data = document.picture(figure, made, path.suffix.removeprefix("."), problem)
    path.write_bytes(data)
    for gpu, count in made.left_out.items():
        console.print(f"{count} results of {gpu} are left out: --target shows them", highlight=False)
    what = "report" if figure is None else f"figure {figure}"
    console.print(
        f"{what} of {made.gpu} written to {path}: {len(made.results)} results, {made.trials} trials, "
        f"{len(data) / 1e6:.1f} MB",
        highlight=False,
    )
