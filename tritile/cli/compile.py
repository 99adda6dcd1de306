"""Compile kernels ahead, as for the image of a container: `tritile compile`."""

from dataclasses import replace
from typing import Annotated, Final

import typer

from tritile.cli import shared
from tritile.cli.shared import app, console, counted, progress
from tritile.core.settings import current_mode
from tritile.errors import InvalidValueError

_SHOWN: Final = 10  # configs with a missing kernel that mode "strict" lists


@app.command(
    "compile",
    epilog=shared.examples(
        "tritile compile --suite llm --target h200",
        "tritile compile 1x4096x4096 1x14336x4096 --layout NT --any-rows --target h200",
    ),
)
def compile_(
    context: typer.Context,
    shapes: shared.Shapes = None,
    suite: shared.Suite = None,
    op: shared.Op = "matmul",
    dtype: shared.Dtype = "bfloat16",
    layout: shared.Layout = "NN",
    any_rows: Annotated[
        bool, typer.Option("--any-rows", help="For any M of each product, at its N and K.")
    ] = False,
    bias: Annotated[bool, typer.Option("--bias", help="Shapes are of layers with a bias.")] = False,
    activation: Annotated[
        str,
        typer.Option(
            help="Of layers: relu, gelu, gelu_tanh or silu.",
            autocompletion=shared.completes(("relu", "gelu", "gelu_tanh", "silu")),
        ),
    ] = "",
    target: shared.Target = None,
) -> None:
    """Compile what calls launch into Triton's cache, TRITON_CACHE_DIR, for this GPU or a --target.

    Name shapes and suites, or leave them out for the problems of the table in TRITILE_TABLE. In mode strict
    nothing is compiled: the exit status is 1 if a process with this cache would have to compile.

    Triton looks kernels up by a hash. For it to agree, both sides need the same tritile and Triton, file for
    file, the same ptxas and libdevice, and the same values of Triton's variables that affect compilation.
    Triton stores absolute paths, so the cache has to stay where it was made.

    Not covered: transposes in place; tensors that do not start on 16 bytes, or with strides of another kind
    than the problem's; kernels decorated with tritile.autotune (see tritile.warm); the C module that Triton
    builds at its first use; AMD GPUs.
    """
    shared.refuse_unread(context, op, layout, shapes, "bias", "activation")
    options = shared.typed(context)
    for name, ops in (("bias", ("matmul", "linear_quantized")), ("activation", ("matmul",))):
        if name in options and op not in ops:
            raise InvalidValueError(
                f"{options[name]} is for --op {' or '.join(ops)}: other kernels have none"
            )
        if name in options and dtype == "int8":
            raise InvalidValueError(
                f"{options[name]} does not go with --dtype {dtype}: its kernels have none"
            )
    from triton import knobs

    from tritile.choose import gpu_tables
    from tritile.core.epilogue import ACTIVATIONS, Epilogue
    from tritile.core.problem import MatmulProblem, QuantizedProblem, Tiled
    from tritile.lab.warm import Calls, calls_of, compile_calls

    if activation not in ("", *ACTIVATIONS):
        raise shared.unknown("--activation", activation, ACTIVATIONS)
    epilogue = str(Epilogue(bias="row" * bias, activation=activation))
    device = shared.device_of(target)
    if shapes or suite:
        cases = shared.cases_of(shapes, suite, op, dtype, layout)
        cases = [replace(case, epilogue=epilogue) for case in cases] if epilogue else cases
        if any_rows and any(case.op != "permute" and case.n == 1 for case in cases):
            raise InvalidValueError("--any-rows: a result of one column is made as one row: name its shapes")
        problems = shared.problems_of(cases, device)
    else:
        table = gpu_tables.pinned(device)
        problems = (
            [each.problem for each in table.entries if isinstance(each.problem, Tiled)] if table else []
        )
        if not problems:
            raise InvalidValueError(
                f"nothing to compile: name shapes, a --suite, or in TRITILE_TABLE a table of {device.name}"
            )
    if any_rows and not any(isinstance(each, MatmulProblem | QuantizedProblem) for each in problems):
        raise InvalidValueError(
            "--any-rows is for matmul and linear_quantized: nothing else has rows to vary"
        )
    calls: Calls = {}
    with shared.working("planning"):
        for problem in problems:
            for config, alike in calls_of(problem, device, any_rows).items():
                calls.setdefault(config, []).extend(alike)
    with progress() as bar:
        task = bar.add_task("compiling", total=len(calls))
        kernels, reasons = compile_calls(
            calls, device, done=lambda label: bar.update(task, advance=1, description=label)
        )
    strict = current_mode() == "strict"
    shown = reasons[:_SHOWN] if strict else reasons
    for reason in shown:
        console.print(reason, style="red")
    if len(shown) < len(reasons):
        console.print(f"... and {len(reasons) - len(shown)} more", style="red")
    found = f"{counted(len(kernels), 'kernel')} of {counted(len(problems), 'problem')} on {device.name}"
    already = ", compiled already" if strict and kernels else ""
    console.print(f"{knobs.cache.dir}: {found}{already}")
    if reasons:
        what = "are missing: the same command with TRITILE_MODE=cached compiles them"
        console.print(f"kernels of {counted(len(reasons), 'config')} {what if strict else 'do not compile'}")
        raise typer.Exit(1)
