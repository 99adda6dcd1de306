"""tritile accuracy: measure how far products are from exact."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table as RichTable

from tritile.cli.shared import app, console, progress
from tritile.core import device as devices
from tritile.errors import InvalidValueError
from tritile.lab.report import accuracy as measured
from tritile.lab.report.environment import environment


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


@app.command()
def accuracy(
    dtype: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(measured.PRECISIONS)}; may be repeated.")
    ] = None,
    n: Annotated[int, typer.Option(min=32, help="Rows of a and columns of b.")] = 256,
    k: Annotated[list[int] | None, typer.Option(help="Terms of a sum; may be repeated.")] = None,
    results: Annotated[Path | None, typer.Option(help="A .jsonl file to append to.")] = None,
) -> None:
    """Measure the errors of tritile's and torch's products, by precision and kind of data.

    "error" is by norm; "worst" is the worst element's error over the sum of its terms' magnitudes.
    """
    dtypes, depths = tuple(dtype or measured.PRECISIONS), tuple(k or (1024,))
    unknown = set(dtypes) - set(measured.PRECISIONS)
    if unknown or min(depths) < 1:
        raise InvalidValueError(
            f"dtype {', '.join(dtypes)}, k {depths}: wanted dtypes of {', '.join(measured.PRECISIONS)}, "
            "and k of 1 and more"
        )
    here = devices.current_gpu()
    where = "cpu" if here is None else "cuda"
    grid = RichTable(
        "dtype", "precision", "data", "K", "error", "torch's", "worst", "torch's", "bound", "differ"
    )
    listed = list(measured.cases(dtypes, depths))
    env = environment(here) if here is not None else {"gpu": "none", "torch": torch.__version__}
    with progress() as bar:
        task = bar.add_task("measuring", total=len(listed))
        for case in listed:
            bar.update(task, description=" ".join(map(str, case)))
            name, precision, data, depth = case
            found = measured.accuracy(name, precision, data, n, depth, where)
            errors = (found.error, found.torch_error, found.worst, found.torch_worst, found.bound)
            grid.add_row(name, precision, data, str(depth), *map(_shown, errors), str(found.differing))
            if results is not None:
                results.parent.mkdir(parents=True, exist_ok=True)
                with results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(dataclasses.asdict(found) | {"env": dict(env)}) + "\n")
            bar.advance(task)
    console.print(grid)
