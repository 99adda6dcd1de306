"""tritile check: every config of a kernel against a reference, with an exit status."""

import traceback
from typing import Annotated

import typer

from tritile.cli import shared
from tritile.cli.shared import app


@app.command(
    epilog=shared.examples(
        "tritile check kernels:softmax 5 512 --make kernels:arguments",
        "tritile check kernels:softmax 5 512 --make kernels:arguments --reference kernels:expected --json",
        "tritile check kernels:softmax 5 512 --make kernels:arguments --target h200",
    )
)
def check(
    kernel: Annotated[str, typer.Argument(help="module:kernel, under an autotuner or triton.jit alone.")],
    make: Annotated[
        str, typer.Option(help="module:function of the sizes, which returns the kernel's arguments by name.")
    ],
    sizes: Annotated[list[int] | None, typer.Argument(help="Sizes of the call.")] = None,
    reference: Annotated[
        str, typer.Option(help="module:function, which returns the right tensors. Default: the kernel's own.")
    ] = "",
    target: Annotated[
        str | None, typer.Option(help="Only compile, for this GPU: which configs fit, which spill?")
    ] = None,
    as_json: shared.Json = False,
) -> None:
    """Run every config of a kernel against a reference, and end with status 1 if any is wrong or fails.

    Arguments are made for the sizes, and for each size less one, at which a missing mask shows. "grid" is
    among them. Without a GPU, set TRITON_INTERPRET=1. `tritile.check` is the same in Python.
    """
    import tritile
    from tritile.errors import TritileError, TuningError, brief

    answers = shared.function_named("--reference", reference) if reference else None
    try:
        result = tritile.check(
            shared.object_named("KERNEL", kernel), *(sizes or ()), make=shared.function_named("--make", make),
            reference=answers, device=target,
        )  # fmt: skip
    except TritileError:
        raise
    except Exception as error:  # of make, the reference or the kernel's pruning
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename}:{last.lineno}, in {last.name}"
        raise TuningError(f"{kernel} cannot be checked: {brief(error)} at {where}") from error
    if as_json:
        configs = [each._asdict() | {"config": str(each.config)} for each in result.configs]
        facts = {"kernel": result.kernel, "device": result.on.name, "calls": result.calls}
        counts = {"passed": bool(result), "pruned": result.pruned}
        shared.print_json(facts | counts | {"configs": configs})
    else:
        shared.console.print(result)
    raise typer.Exit(0 if result else 1)
