"""Compile kernels ahead, for containers that start without a compile: `tritile compile`."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer

from tritile.cli import shared
from tritile.cli.shared import app, console, progress
from tritile.core import device as devices
from tritile.core import gpus
from tritile.core.device import Device
from tritile.core.problem import ACTIVATIONS, Epilogue, Tiled
from tritile.errors import InvalidValueError
from tritile.lab.report.environment import environ
from tritile.planning import gpu_tables, plans, table
from tritile.tune import suites
from tritile.tune.deploy import fill as deployment
from tritile.tune.deploy import rows as any_rows

_HELP: Final = (
    "Fill a folder with compiled kernels, without a GPU, so that first calls elsewhere compile nothing.",
    "Compiled is what calls use for the problems of a table (default: the one shipped for the GPU), of "
    "suites and shapes, or of any number of rows beside a --weight. A process that starts with "
    "TRITON_CACHE_DIR set to the folder finds every kernel in it, and the modules that Triton itself builds "
    "with a C compiler. The easiest way is to run this while the image of a container is built, and then "
    "--check in the finished image.",
    "Triton finds a kernel by a key. For the keys to agree both sides need the same tritile and the same "
    "build of Triton, file for file (and so the same minor version of Python), the same ptxas and libdevice, "
    "and the same values of TRITON_DEBUG, TRITON_DEFAULT_FP_FUSION, TRITON_OVERRIDE_ARCH, "
    "TRITON_INSTRUMENTATION_MODE, PTXAS_OPTIONS and of what changes Triton's passes, as DISABLE_LLVM_OPT. "
    "Where Triton and tritile are installed does not count, nor do the working directory, HOME, torch's "
    "version or the driver's.",
    "Triton finds a kernel's files by absolute paths. The folder must be where it was made, or where --at "
    "says; filled again with another --at, it tells the new paths. It may be read-only: then nothing else "
    "can be compiled.",
    "Triton's modules are built here with a C compiler and Python's headers. Where they run they need the "
    "same minor version of Python, the same kind of processor, and a C library no older than the one here. "
    "From Triton 3.8 on they are found only where Triton is installed at the same path, and libcuda.so.1 is "
    "where TRITON_LIBCUDA_PATH, set on both sides, says: without it, where it is here, or in the place of "
    "Debian and Ubuntu. Elsewhere Triton builds them at its first use, and kernels are found all the same.",
    "Not covered are residuals of a --weight, and biases of another dtype than the result's; transposes in "
    "place; tensors that do not start on 16 bytes, or whose strides are of another class than the problem's; "
    "kernels decorated with tritile.autotune; what a call falls back on where its config turns out not to "
    "run; and AMD GPUs, for which Triton compiles otherwise for tensors of less than 2 GiB.",
    "The exit status is 1 where anything is refused or missing. In mode strict a call that would have to "
    "compile all the same raises tritile.errors.NotCompiledError.",
)


Weight = Annotated[
    list[str] | None,
    typer.Option(help="NxK: what products with such a weight compile, whatever the number of rows."),
]
Rows = Annotated[int, typer.Option(min=1, help="With --weight: the most rows.")]
Bias = Annotated[bool, typer.Option("--bias", help="With --weight: of layers with a bias.")]
Activation = Annotated[str, typer.Option(help=f"With --weight: {', '.join(ACTIVATIONS)}.")]
FromTable = Annotated[
    Path | None, typer.Option("--table", help="All of a table that `tritile export` wrote; plan by it.")
]
Output = Annotated[Path | None, typer.Option(help="The folder to fill: a TRITON_CACHE_DIR.")]
Check = Annotated[
    Path | None, typer.Option(help="Compile nothing: exit with 1 where this folder lacks anything.")
]
At = Annotated[
    Path | None, typer.Option(help="Where the folder will be when it is used. Default: where it is.")
]


def _device(target: str | None, given: table.Table | None) -> Device:
    """Return the GPU that is named, else the table's, else the current one. Raises InvalidValueError."""
    if target is None and given is not None:
        return Device.from_dict(given.device)
    device = gpus.target_device(target) if target else devices.current_gpu()
    if device is None:
        raise InvalidValueError(
            f"for which GPU? --target {next(iter(gpus.SHORT))}, or --table of the GPU's own measurements"
        )
    if given is not None and given.device["name"] != device.name:
        raise InvalidValueError(f"the table is of {given.device['name']}, and --target {device.name}")
    return device


def _given(
    path: Path | None, target: str | None, named: bool, batch_invariant: bool | None
) -> tuple[table.Table | None, Device]:
    """Return the table to compile, and the GPU; without a path the shipped one, where nothing is `named`."""
    if batch_invariant and not named:
        raise InvalidValueError("--batch-invariant is for shapes or suites: tables hold configs of any calls")
    given = table.read(path) if path else None
    device = _device(target, given)
    return (_shipped(device) if given is None and not named else given), device


def _shipped(device: Device) -> table.Table:
    found = next((each for each in gpu_tables.shipped(device) if each.entries), None)
    if found is None:
        raise InvalidValueError(
            f"no table of {device.name} is shipped: name a --table, a --suite or shapes to compile"
        )
    return found


def _of_table(given: table.Table | None) -> list[deployment.Entry]:
    """Return the problems and configs of a table, without those of kernels that are not tritile's."""
    entries = given.entries if given is not None else ()
    return [(each.problem, each.config) for each in entries if isinstance(each.problem, Tiled)]


def _planned(problem: Tiled, device: Device) -> deployment.Entry:
    plan = plans.plan_for(problem, device, "cached")
    assert plan is not None
    return plan.problem, plan.config


def _of_weight(
    text: str, op: str, dtype: str, layout: str, epilogue: str, batch_invariant: bool | None
) -> Tiled:
    """Return the problem of two rows beside a weight NxK. Raises InvalidValueError for any other text."""
    if text.lower().count("x") != 1:
        raise InvalidValueError(f"--weight {text!r}: wanted NxK")
    case = replace(suites.parse_shape(f"2x{text}", op, dtype, layout), epilogue=epilogue)
    if case.n == 1:
        raise InvalidValueError(f"--weight {text!r}: a result of one column is made as one row: give shapes")
    (problem,) = shared.problems_of([case], batch_invariant)
    return problem


def _filled(
    entries: list[deployment.Entry], device: Device, output: Path, at: Path | None, jobs: int
) -> tuple[deployment.Found, str]:
    """Fill a folder, and return what is in it, with a line that says so."""
    with progress() as bar:
        task = bar.add_task("compiling", total=None)
        filled = deployment.fill(
            entries,
            device,
            output,
            at,
            jobs or None,
            begun=lambda total: bar.update(task, total=total),
            done=lambda label: bar.update(task, advance=1, description=label),
        )
    found, there = filled.found, len(filled.found.kernels) - filled.compiled
    return found, (
        f"{output}: {len(found.kernels)} kernels of {len(entries)} problems on {device.name}, {there} of "
        f"them there already, {filled.compiled} compiled; {filled.bytes / 2**20:.1f} MiB in all"
    )


def _checked(
    entries: list[deployment.Entry], device: Device, folder: Path, at: Path | None
) -> tuple[deployment.Found, str]:
    """Return what is in a folder and what is missing, with a line that says so."""
    with shared.working("checking"):
        found = deployment.check(entries, device, folder, at)
    said = f"{folder}: {len(found.kernels)} kernels of {len(entries)} problems on {device.name} are there"
    if at is None and found.lines and not found.kernels:
        said += "; a folder that was filled with --at elsewhere is checked with the same --at"
    return found, said


@app.command("compile", help="\n\n".join(_HELP))
def compile_(
    shapes: shared.Shapes = None,
    suite: shared.Suite = None,
    suites_dir: shared.Directory = shared.SUITES,
    op: shared.Op = "matmul",
    dtype: shared.Dtype = "bfloat16",
    layout: shared.Layout = "NN",
    weight: Weight = None,
    rows: Rows = 16384,
    bias: Bias = False,
    activation: Activation = "",
    from_table: FromTable = None,
    target: shared.Target = None,
    output: Output = None,
    check: Check = None,
    at: At = None,
    batch_invariant: shared.BatchInvariant = None,
    jobs: shared.Jobs = 0,
) -> None:
    """Fill a folder with compiled kernels, without a GPU, so that first calls elsewhere compile nothing."""
    if (output is None) == (check is None):
        raise InvalidValueError("wanted one folder: --output to fill, or --check to prove complete")
    shared.check_folder(output)
    if at is not None and not at.is_absolute():
        raise InvalidValueError(f"--at {at} is not an absolute path")
    if activation not in ("", *ACTIVATIONS):
        raise InvalidValueError(f"--activation {activation!r}: wanted one of {', '.join(ACTIVATIONS)}")
    epilogue = str(Epilogue(bias="row" * bias, activation=activation))
    if epilogue and (not weight or dtype == "int8"):
        raise InvalidValueError("--bias and --activation are for a --weight of a floating dtype")
    given, device = _given(from_table, target, bool(shapes or suite or weight), batch_invariant)
    entries = _of_table(given)
    table_set = environ(TRITILE_TABLE=str(from_table)) if from_table else contextlib.nullcontext()
    with table_set, shared.working("planning"):
        cases = shared.cases_of(shapes, suite, suites_dir, op, dtype, layout) if shapes or suite else []
        cases = shared.as_called(cases, device, batch_invariant)
        entries += [_planned(problem, device) for problem in shared.problems_of(cases, batch_invariant)]
        for text in weight or ():
            problem = _of_weight(text, op, dtype, layout, epilogue, batch_invariant)
            entries += any_rows.of_rows(problem, range(1, rows + 1), device)
    entries = list(dict.fromkeys(entries))
    if check is not None:
        found, said = _checked(entries, device, check, at)
    else:
        assert output is not None
        found, said = _filled(entries, device, output, at, jobs)
    for line in found.lines:
        console.print(line, style="red", soft_wrap=True)
    console.print(said, soft_wrap=True)
    if found.lines:
        raise typer.Exit(1)
