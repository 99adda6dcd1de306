"""tritile accuracy: measure how far products are from exact."""

import dataclasses
import json
import time
import warnings
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from tritile.cli import shared
from tritile.cli.shared import app, console, progress
from tritile.core import device as devices
from tritile.errors import InterpreterWarning, InvalidValueError
from tritile.lab.report import accuracy as measured
from tritile.lab.report import columns
from tritile.lab.report.columns import number, whole
from tritile.lab.report.environment import environment

_ON_GPU, _INTERPRETED = (256, 1024), (64, 128)  # n and k by default
_LONG_S = 60.0  # from which on the time that it takes is said first


def _row(found: measured.Accuracy) -> dict[str, Any]:
    ours, theirs = (found.error, found.worst), (found.torch_error, found.torch_worst)
    names = ("error", "worst", "torch's", "torch's worst")
    errors = dict(zip(names, (*ours, *theirs), strict=True))
    return {
        "dtype": found.dtype,
        "precision": whole(found.precision),
        "data": found.data,
        "K": number(found.k),
        **{name: number(value, ".1e") for name, value in errors.items()},
        "bound": number(found.bound, ".1e"),
        "differ": number(found.differing),
    }


def _dtypes(named: list[str] | None) -> tuple[str, ...]:
    unknown = set(named or ()) - set(measured.PRECISIONS)
    if unknown:
        raise InvalidValueError(
            f"dtype {sorted(unknown)[0]!r}: wanted one or more of {', '.join(measured.PRECISIONS)}"
        )
    return tuple(dict.fromkeys(named or measured.PRECISIONS))


def _append(path: Path, found: measured.Accuracy, env: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(dataclasses.asdict(found) | {"env": env}) + "\n")


def _measured(
    dtypes: tuple[str, ...], n: int, depths: tuple[int, ...], output: Path | None, env: dict[str, str]
) -> list[measured.Accuracy]:
    """Measure every case; say after the first few seconds what all will take, where that is long."""
    where = "cpu" if env["gpu"] == "none" else "cuda"
    cases, found, begun, said = list(measured.cases(dtypes, depths)), list[measured.Accuracy](), 0.0, False
    begun = time.monotonic()
    with progress() as bar, warnings.catch_warnings():
        warnings.simplefilter("ignore", InterpreterWarning)  # the title says where
        task = bar.add_task("measuring", total=len(cases))
        for name, precision, data, depth in cases:
            bar.update(task, description=f"{name} {precision} {data} {depth}")
            found.append(measured.accuracy(name, precision, data, n, depth, where))
            if output is not None:
                _append(output, found[-1], env)
            bar.advance(task)
            spent = time.monotonic() - begun
            expected = spent / len(found) * len(cases)
            if not said and spent > 5 and expected > _LONG_S:
                said = True
                shared.notes.print(
                    f"{len(cases)} products of {n} x {n} take some {expected / 60:.0f} minutes here; "
                    "--dtype, --n and --k choose fewer or smaller ones"
                )
    return found


@app.command()
def accuracy(
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            help=f"One of {', '.join(measured.PRECISIONS)}, or as bf16; may be repeated.",
            callback=shared.torchs_names,
        ),
    ] = None,
    n: Annotated[
        int | None, typer.Option(min=32, help="Rows of a, columns of b. Default: 256; without a GPU 64.")
    ] = None,
    k: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Terms of a sum; may be repeated. Default: 1024; without a GPU 128."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="A .jsonl file to append to.")] = None,
    as_json: shared.Json = False,
) -> None:
    """Measure the errors of tritile's and torch's products, by precision and kind of data.

    "error" is by norm; "worst" is the worst element's error over the sum of its terms' magnitudes.
    """
    dtypes, here = _dtypes(dtype), devices.current_gpu()
    shared.check_output(output)
    default_n, default_k = _INTERPRETED if here is None else _ON_GPU
    env = environment(here) if here is not None else {"gpu": "none", "torch": torch.__version__}
    found = _measured(dtypes, n or default_n, tuple(k or (default_k,)), output, env)
    if as_json:
        return shared.print_json([dataclasses.asdict(one) for one in found])
    title = f"{n or default_n} rows and columns, on {'the CPU' if here is None else here.name}"
    console.print(columns.table(list(map(_row, found)), title, ("dtype", "K", "differ")))
    console.print("error: by norm; worst: an element's, over the sum of its terms' magnitudes")
    console.print("differ: elements that are NaN, infinite or finite where torch's are not;")
    console.print("a product that is not finite has no other figures")
