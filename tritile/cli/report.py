"""tritile report: write results and trials as one HTML page, or a figure of it as a picture."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tritile.cli import shared
from tritile.cli.shared import PICTURES, app, check_output, console, kept, say
from tritile.core import device as devices
from tritile.core import gpus
from tritile.core.device import Device
from tritile.errors import FileError, InvalidValueError
from tritile.lab.report.page import rows, searches
from tritile.lab.report.results import Result, stored
from tritile.planning.store import store_of

_STORES = (".sqlite3", ".sqlite3.gz")


def _device(slug: str | None, results: list[Result]) -> tuple[str, Device | None]:
    """Return the GPU to report, the one named or the one of the results; and its device, if known."""
    if slug is not None:
        names = sorted({line["env"]["gpu"] for line in results})
        named = [name for name in names if replace(devices.INTERPRETER, name=name).slug == slug.lower()]
        gpu = named[0] if named else gpus.target_device(slug).name
    else:
        gpu = rows.gpu_of(results)
    if gpu is not None:
        return gpu, rows.named(gpu)
    device = devices.current_gpu() or gpus.target_device("h200")
    return device.name, device


def _stores(named: list[Path], defaults: bool, device: Device | None) -> list[searches.Recorded]:
    """Read the named stores; by default this user's own and those recorded in the checkout."""
    if device is None:
        if named:
            known = ", ".join(gpus.SHORT)
            raise InvalidValueError(f"{named[0]}: trials of an unknown GPU; --target names one of {known}")
        return []
    found = []
    if defaults:
        here = kept("trials")
        named = sorted(here.glob(f"{device.slug}*.sqlite3*") if here else ())
        found = [searches.of_store(store_of(device))]
    found += [searches.of_file(path, device) for path in named]
    return [store for store in found if store[1]]


def _read(files: list[Path], target: str | None) -> rows.Rows:
    for path in files:
        if not path.exists() or not (path.is_dir() or path.name.endswith((".jsonl", *_STORES))):
            raise FileError(
                f"{path}: no such file or folder; wanted results (.jsonl), a folder of these, or trials "
                f"({', '.join(_STORES)})"
            )
    places = [path for path in files if not path.name.endswith(_STORES)]
    here = None if files else kept("results")
    places = [here] if here else places
    lines = stored(places, say) if places else []
    gpu, device = _device(target, lines)
    named = [path for path in files if path.name.endswith(_STORES)]
    stores = _stores(named, not files, device)
    if not (files or lines or stores):
        raise InvalidValueError(
            f"there are no results here, nor trials of {gpu}: name results (.jsonl), a folder of these, or "
            f"trials ({', '.join(_STORES)})"
        )
    return searches.gathered(lines, stores, gpu, device)


@app.command("report")
def report(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Results (.jsonl), stores (.sqlite3, .gz of them), or folders of results. "
            "Default: what a checkout has, and your own store."
        ),
    ] = None,
    target: shared.Target = None,
    output: Annotated[Path | None, typer.Option(help="What to write; default report.html.")] = None,
    figure: Annotated[
        str | None,
        typer.Option(
            help="Only this figure, as a picture (.svg, .png): speedups, roofline, bandwidth, accuracy, "
            "heatmap, progress."
        ),
    ] = None,
    problem: Annotated[str, typer.Option(help="With --figure heatmap: a part of the problem's name.")] = "",
) -> None:
    """Write results and trials as one HTML page that needs no network, or one figure of it as a picture.

    The page shows speed-ups, rooflines, times over tiles, progress of searches and errors, each with a table
    and with filters.
    """
    path = output or Path("report.html" if figure is None else f"{figure}.svg")
    check_output(path, dict.fromkeys([path.suffix], PICTURES[".html"]) if figure is None else PICTURES)
    from tritile.lab.report.page import document  # needs the extra `report`

    if figure is not None:
        document.check_picture(figure, path.suffix.removeprefix("."))
    with shared.working("reading"):
        made = _read(files or [], target)
    with shared.working("drawing"):
        if figure is None:
            data = document.html(made).encode()
        else:
            data = document.picture(figure, made, path.suffix.removeprefix("."), problem)
    shared.write(path, data)
    for gpu, count in made.left_out.items():
        console.print(f"{count} results of {gpu} are left out: --target shows them", soft_wrap=True)
    what = "report" if figure is None else f"figure {figure}"
    console.print(
        f"{what} of {made.gpu} written to {path}: {len(made.results)} results, {made.trials} trials, "
        f"{len(data) / 2**20:.1f} MiB",
        soft_wrap=True,
    )
