"""tritile report: write results as one HTML page, or its chart as a picture."""

from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from tritile.cli import shared
from tritile.cli.shared import app, console, say
from tritile.core.distribution import EXTRAS, extra_advice
from tritile.errors import FileError, InvalidValueError, UnsupportedError

if TYPE_CHECKING:
    from tritile.lab.results import Result

_CHECKOUT: Final = Path(__file__).parents[2]  # where tritile is installed from one


def _committed() -> Path:
    """Return the results of the checkout around the working directory, else of the one that is installed.

    Raises InvalidValueError where there is no checkout.
    """
    here = Path.cwd()
    for folder in (here, *here.parents, _CHECKOUT):
        results = folder / "tuning" / "results"
        if results.is_dir() and (folder / "tritile" / "suites").is_dir():
            return results
    raise InvalidValueError(
        "FILES is missing: name .jsonl files that `tritile bench --output FOLDER` wrote, or their folder; "
        "without them a report is of tuning/results, in a checkout of tritile"
    )


def _gpu_of(target: str | None, results: "list[Result]") -> str:
    """The name of the GPU to report: the one named, the current one, or the one of most results."""
    from tritile.core import device as devices

    counts = Counter(line["env"]["gpu"] for line in results)
    here = devices.current_gpu()
    if target is not None:
        named = [name for name in counts if replace(devices.HOST, name=name).slug == target.lower()]
        return named[0] if named else shared.device_of(target).name
    return here.name if here and counts[here.name] else max(counts, key=counts.__getitem__)


@app.command(
    "report",
    epilog=shared.examples(
        "tritile report",
        "tritile report results --target h200 --output report.html",
        "tritile report results --output speedups.svg",
    ),
)
def report(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Results (.jsonl) or folders of them, which `tritile bench --output` writes. "
            "Default, in a checkout: tuning/results."
        ),
    ] = None,
    target: shared.Target = None,
    output: Annotated[
        Path, typer.Option(help="The page to write (.html), or its chart alone (.svg).")
    ] = Path("report.html"),
) -> None:
    """Write results as one HTML page that needs no network, or its chart as a picture.

    The page shows where tritile gains and where it loses, with filters.
    """
    shared.check_output(output, ".html", ".svg")
    missing = [name for name in EXTRAS["report"] if find_spec(name) is None]
    if missing:
        raise UnsupportedError(f"a report needs {', '.join(missing)}: {extra_advice(missing[0])}")
    for file in files or []:
        if not file.exists():
            raise FileError(f"{file}: no such file or folder")
    places = files or [_committed()]

    from tritile.lab import report as charts  # needs the extra `report`
    from tritile.lab.results import of_cases, stored

    with shared.working("drawing"):
        lines = stored(places, say)
        if not lines:
            raise FileError(f"there are no results in {', '.join(map(str, places))}")
        gpu = _gpu_of(target, lines)
        rows = charts.rows_of(lines, gpu)
        env = shared.measured_on([line for line in lines if line["env"]["gpu"] == gpu])
        drawn = charts.page(rows, gpu, env) if output.suffix == ".html" else charts.picture(rows)
        shared.write(output, drawn)
    console.print(f"{output}: {shared.counted(len(rows), 'comparison')} on {gpu}")
    for other, count in Counter(line["env"]["gpu"] for line in of_cases(lines)).items():
        if other != gpu:
            console.print(f"{count} results of {other} are left out: --target shows them")
