"""Make 16-bit products as out^T = b^T a^T by clusters of two programs, on Hopper."""

import functools
from collections.abc import Iterator
from typing import Final

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import MatmulProblem
from tritile.core.views import MatmulCall
from tritile.families.common.descriptors import arguments, check_sizes, grid_of, output_of
from tritile.families.common.numerics import canonical_product, of_product
from tritile.families.common.operands import copied, inputs, reachable
from tritile.families.common.repack import repack
from tritile.families.common.tma_time import TMA_FITTED, TmaFit
from tritile.families.common.work import Work, step_of
from tritile.families.family import Family
from tritile.families.matmul_clusters import family as clusters
from tritile.families.matmul_clusters.family import PROGRAMS, Shapes, arranged, described
from tritile.families.matmul_clusters.kernel import matmul_clusters
from tritile.families.matmul_transposed.family import as_made, mirrored
from tritile.families.matmul_wgmma.family import REGISTERS, epilogue_fault, main_columns

NAME: Final = "transposed_clusters"
# As those of clusters, of out^T: BLOCK_M here is of its rows, which are columns of out.
_SHAPES: Final[Shapes] = {
    (64, 48, 1, 1): (10, (1, 2)),
    (64, 80, 1, 1): (10, (1, 2)),
    (128, 32, 2, 1): (10, (1, 2)),
    (128, 48, 2, 1): (8, (1, 2)),
    (128, 80, 2, 1): (7, (1, 2)),
    (128, 96, 2, 1): (6, (1, 2)),
    (128, 144, 2, 1): (5, (1, 2)),
    (192, 80, 3, 1): (5, (1, 2)),
    (192, 96, 3, 1): (5, (1, 2)),
    (192, 144, 3, 2): (4, (1, 2)),
    (192, 192, 3, 2): (3, (1, 2)),
    (256, 80, 2, 1): (4, (1, 2)),
    (256, 160, 2, 2): (3, (1, 2)),
}


def _mirrored(config: Config) -> Config:
    """Return the config of `clusters` that makes out^T so. DOWN counts tiles of out^T in both families."""
    return mirrored(config).derived(family=clusters.NAME)


def clustered(config: Config) -> Config:
    """Return the config with the rows and columns of a cluster as its blocks."""
    return mirrored(clusters.clustered(_mirrored(config)))


def illegal(config: Config, problem: MatmulProblem, device: Device) -> str | None:
    """Say why `config` may not run `problem` on `device`, None where it may."""
    if tuple(name for name, _ in config.kwargs) != clusters.PARAMETERS:
        return f"parameters {[name for name, _ in config.kwargs]} are not {list(clusters.PARAMETERS)}"
    if problem.rights > 1:
        return "gated products are made by tile and descriptor"
    made = _mirrored(config)
    reason = reachable(problem) or clusters.fault(made, as_made(problem), device, _SHAPES)
    return reason or epilogue_fault(made, problem, turned=True)


def _configs() -> Iterator[Config]:
    for config in clusters.configs_of(_SHAPES):
        yield mirrored(config).derived(family=NAME)


def pointless(config: Config, problem: MatmulProblem, device: Device) -> bool:
    """Tell whether the config is dominated: another of the family does the same or strictly less work."""
    return clusters.pointless(_mirrored(config), as_made(problem), device)


def resident(config: Config, problem: MatmulProblem, device: Device) -> int:
    """Return how many programs of a config an SM holds at once."""
    return clusters.resident(_mirrored(config), as_made(problem), device)


def predicted_us(config: Config, problem: MatmulProblem, device: Device, fit: TmaFit = TMA_FITTED) -> float:
    """Return predicted microseconds of a config."""
    copies = copied(problem)[::-1]
    return clusters.copied_us(_mirrored(config), as_made(problem), device, fit, copies)


def work(call: MatmulCall, config: Config, processors: int, early: bool) -> Work:
    """Return the launches of `call` with a config, on a GPU of so many SMs.

    `early`: kernels use programmatic dependent launch: they start before the kernel ahead is done, and wait
    themselves. Raises TuningError where no descriptor can see the operands.
    """
    check_sizes(call)
    read, out, made = inputs(call, early), output_of(call), _mirrored(config)
    consumers, main, depth = made["CONSUMERS"], main_columns(made), made["BLOCK_K"]
    rows, rest = made["BLOCK_M"] // consumers, made["BLOCK_N"] - main
    down, across = arranged(made)
    grid, flat = grid_of(call.transposed, clusters.clustered(made), 1, processors // PROGRAMS)

    def stored(columns: int) -> object:
        if not out.by_descriptor or not columns:
            return None
        return described(out.seen, call.out_dtype, columns, rows, across, down)

    values = arguments(call, made, read, out, early) | {
        "a_desc": described(read.b, call.dtype, depth, rows, 1, down),
        "b_desc": described(read.a, call.dtype, main, depth, across, 1),
        "b_rest_desc": described(read.a, call.dtype, rest, depth, across, 1) if rest else None,
        "out_desc": stored(main // config["SUBTILES"]), "out_rest_desc": stored(rest),
        "A_ROW": read.b.transposed, "B_ROW": read.a.transposed,
        "MAIN_N": main, "REGISTERS": REGISTERS[consumers], "STAGES": config.num_stages, "FLAT": flat,
        "TRANSPOSED": True,
    }  # fmt: skip
    options = {"num_warps": config.num_warps, "num_ctas": PROGRAMS, "launch_pdl": early}
    return Work((*read.steps, step_of(matmul_clusters, grid, values, options)), read.scratch)


FAMILY: Final = Family(
    op=MatmulProblem.op,
    name=NAME,
    kernel=matmul_clusters,
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
