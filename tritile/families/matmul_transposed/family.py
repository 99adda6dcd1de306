"""Make 16-bit products as out^T = b^T a^T by specialised warps, on Hopper."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import MatmulProblem, epilogue_of
from tritile.core.views import MatmulCall
from tritile.families.common.descriptors import arguments, check_sizes, grid_of, output_of
from tritile.families.common.numerics import canonical_product, of_product
from tritile.families.common.operands import copied, inputs, reachable
from tritile.families.common.repack import repack
from tritile.families.common.tma_time import TMA_FITTED, TmaFit, tma_us
from tritile.families.common.work import Work, step_of
from tritile.families.family import Family
from tritile.families.matmul_transposed.kernel import matmul_transposed
from tritile.families.matmul_wgmma import family as warpgroups
from tritile.families.matmul_wgmma.family import REGISTERS, main_columns

NAME: Final = "transposed"
_LAYOUTS: Final = {"row": "column", "column": "row"}


def mirrored(config: Config) -> Config:
    """Return the config of the warpgroups family that makes out^T so."""
    sides = {"BLOCK_M": config["BLOCK_N"], "BLOCK_N": config["BLOCK_M"]}
    kwargs = ((name, sides.get(name, value)) for name, value in config.kwargs)
    return config.derived(kwargs, family=warpgroups.NAME)


@functools.lru_cache(16)  # all configs of a problem ask in turn
def as_made(problem: MatmulProblem) -> MatmulProblem:
    """Return the problem of out^T = b^T a^T, as if its result were stored row by row.

    Epilogues of types that are not made so are left out: not all have a mirror image.
    """
    fused = epilogue_of(problem.epilogue if problem.itemsize == 2 else "").transposed
    a, b = (_LAYOUTS.get(layout, layout) for layout in (problem.b_layout, problem.a_layout))
    return replace(
        problem, m=problem.n, n=problem.m, a_layout=a, b_layout=b, a_align=problem.b_align,
        b_align=problem.a_align, epilogue=str(fused),
    )  # fmt: skip


def illegal(config: Config, problem: MatmulProblem, device: Device) -> str | None:
    """Say why `config` may not run `problem` on `device`, None where it may."""
    if problem.rights > 1:
        return "gated products are made by tile and descriptor"
    if problem.itemsize != 2 or problem.totals:
        return f"{problem.dtype} is not summed in transposed tiles"
    if tuple(name for name, _ in config.kwargs) != warpgroups.PARAMETERS:
        return f"parameters {[name for name, _ in config.kwargs]} are not {list(warpgroups.PARAMETERS)}"
    made = mirrored(config)
    reason = reachable(problem) or warpgroups.fault(made, as_made(problem), device)
    return reason or warpgroups.epilogue_fault(made, problem, turned=True)


def _configs() -> Iterator[Config]:
    for config in warpgroups.FAMILY.configs:
        if config["BLOCK_K"] == 64:
            yield replace(mirrored(config), family=NAME)


def pointless(config: Config, problem: MatmulProblem, device: Device) -> bool:
    """Tell whether the config is dominated: another of the family does the same or strictly less work."""
    return warpgroups.pointless(mirrored(config), as_made(problem), device)


def resident(config: Config, problem: MatmulProblem, device: Device) -> int:
    """Return how many programs of a config an SM holds at once."""
    return warpgroups.resident(mirrored(config), as_made(problem), device)


def predicted_us(config: Config, problem: MatmulProblem, device: Device, fit: TmaFit = TMA_FITTED) -> float:
    """Return predicted microseconds of a config. The problem, and not that of out^T, tells what is copied."""
    made, turned = mirrored(config), as_made(problem)
    programs = warpgroups.programs(made, turned)._replace(copied=copied(problem)[::-1])
    return tma_us(made, turned, device, programs, fit)


def work(call: MatmulCall, config: Config, processors: int, early: bool) -> Work:
    """Return the launches of `call` with a config, on a GPU of so many SMs.

    `early`: kernels use programmatic dependent launch: they start before the kernel ahead is done, and wait
    themselves. Raises TuningError where no descriptor can see the operands.
    """
    check_sizes(call)
    read, out = inputs(call, early), output_of(call)
    made, depth, consumers = mirrored(config), config["BLOCK_K"], config["CONSUMERS"]
    main, columns = main_columns(made), config["BLOCK_N"] // config["CONSUMERS"]
    rest = config["BLOCK_M"] - main
    grid, flat = grid_of(call.transposed, made, 1, processors)
    inward, outward = warpgroups.swizzled(call.dtype), warpgroups.swizzled(call.out_dtype)
    by = out.by_descriptor
    values = arguments(call, config, read, out, early) | {
        "a_desc": read.a.descriptor(main, depth, inward),
        "a_rest_desc": read.a.descriptor(rest, depth, inward) if rest else None,
        "b_desc": read.b.descriptor(depth, columns, inward),
        "out_desc": out.seen.descriptor(main // config["SUBTILES"], columns, outward) if by else None,
        "out_rest_desc": out.seen.descriptor(rest, columns, outward) if by and rest else None,
        "MAIN_M": main, "REGISTERS": REGISTERS[consumers], "STAGES": config.num_stages, "FLAT": flat,
    }  # fmt: skip
    step = step_of(matmul_transposed, grid, values, {"num_warps": config.num_warps, "launch_pdl": early})
    return Work((*read.steps, step), read.scratch)


FAMILY: Final = Family(
    op=MatmulProblem.op,
    name=NAME,
    kernel=matmul_transposed,
    also=(repack,),
    space=_configs,
    illegal=illegal,
    pointless=pointless,
    predicted_us=predicted_us,
    resident=resident,
    work=work,
    numerics=functools.partial(of_product, specialised=True),
    canonical=canonical_product,
)
