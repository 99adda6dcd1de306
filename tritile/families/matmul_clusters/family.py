"""Make 16-bit products by clusters of two programs that share tiles of an operand, on Hopper."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import MatmulProblem
from tritile.core.versions import parsed
from tritile.core.views import MatmulCall
from tritile.families.common.blocks import order_fault
from tritile.families.common.descriptors import arguments, check_sizes, grid_of, output_of
from tritile.families.common.facts import SECTOR
from tritile.families.common.numerics import canonical_product, of_product
from tritile.families.common.operands import Seen, copied, inputs, tiles
from tritile.families.common.repack import repack
from tritile.families.common.tma_time import TMA_FITTED, TmaFit, tma_us
from tritile.families.common.work import Descriptor, Work, step_of
from tritile.families.family import Family
from tritile.families.matmul_clusters.kernel import matmul_clusters
from tritile.families.matmul_wgmma import family as warpgroups
from tritile.families.matmul_wgmma.family import REGISTERS, epilogue_fault, main_columns, swizzled

NAME: Final = "clusters"
PARAMETERS: Final = (
    "BLOCK_K", "BLOCK_M", "BLOCK_N", "CONSUMERS", "DOWN", "GROUP_M", "PERSISTENT", "SUBTILES"
)  # fmt: skip
PROGRAMS: Final = 2  # of a cluster
TRITON: Final = (3, 7)  # the version with whose barriers and copies to both programs the kernel was checked
_BLOCK_K: Final = 64
_FEWEST_ROWS: Final = 64
_RESERVED: Final = 1024  # bytes of shared memory beside Triton's
# Of a program, (BLOCK_M, BLOCK_N, CONSUMERS, SUBTILES): the stages that shared memory holds, and each DOWN by
# which it was the fastest or nearly so.
Shapes = dict[tuple[int, ...], tuple[int, tuple[int, ...]]]
_SHAPES: Final[Shapes] = {
    (192, 128, 3, 2): (5, (1, 2)),
    (128, 192, 2, 1): (4, (1, 2)),
    (128, 160, 2, 2): (5, (1, 2)),
    (128, 256, 2, 2): (4, (2,)),
    (256, 128, 2, 2): (4, (1,)),
    (128, 128, 1, 1): (6, (2,)),
    (64, 128, 1, 1): (8, (2,)),
    (192, 192, 3, 2): (3, (1, 2)),
    (256, 160, 2, 2): (3, (1, 2)),
    (192, 144, 3, 2): (4, (1, 2)),
    (128, 144, 2, 1): (5, (1, 2)),
    (128, 80, 2, 1): (7, (1, 2)),
}
# Measured time by the time that the formula of single programs gives: see `predicted_us`.
_ON_SECTORS: Final = 1.02
_OFF_SECTORS: Final = 0.85


def arranged(config: Config) -> tuple[int, int]:
    """Return how many tiles of a cluster lie one below the other, and how many side by side."""
    return config["DOWN"], PROGRAMS // config["DOWN"]


def clustered(config: Config) -> Config:
    """Return the config with the rows and columns of a cluster as its blocks."""
    down, across = arranged(config)
    sides = {"BLOCK_M": down * config["BLOCK_M"], "BLOCK_N": across * config["BLOCK_N"]}
    return config.derived((k, sides.get(k, v)) for k, v in config.kwargs)


def _as_warpgroups(config: Config) -> Config:
    """Return the config of the warpgroups family whose programs do the same."""
    kwargs = (pair for pair in config.kwargs if pair[0] != "DOWN")
    return config.derived(kwargs, family=warpgroups.NAME, num_ctas=1)


def _shape(config: Config) -> tuple[int, ...]:
    return config["BLOCK_M"], config["BLOCK_N"], config["CONSUMERS"], config["SUBTILES"]


def shared_bytes(config: Config, problem: MatmulProblem) -> int:
    """Return the shared memory of a program, in bytes."""
    return warpgroups.shared_bytes(_as_warpgroups(config), problem) + _RESERVED


def fault(config: Config, problem: MatmulProblem, device: Device, shapes: Shapes) -> str | None:
    """Say why a config, with tiles of these shapes, may not run `problem` on `device`; None where it may."""
    if parsed(device.triton) != TRITON:
        return f"triton {device.triton}: clusters were checked with {TRITON[0]}.{TRITON[1]} alone"
    if tuple(name for name, _ in config.kwargs) != PARAMETERS:
        return f"parameters {[name for name, _ in config.kwargs]} are not {list(PARAMETERS)}"
    if device.processors < PROGRAMS:  # as many clusters as persist would be none
        return f"{device.name} has too few SMs for a cluster"
    if config["DOWN"] not in (1, PROGRAMS) or config.num_ctas != PROGRAMS:
        return f"DOWN must be 1 or {PROGRAMS}, num_ctas {PROGRAMS}"
    if _shape(config) not in shapes or config["BLOCK_K"] != _BLOCK_K:
        return f"{config}: tiles of clusters are {', '.join(map(str, shapes))}, BLOCK_K {_BLOCK_K}"
    if problem.itemsize != 2 or problem.totals:
        return f"{problem.dtype} is not summed by clusters"
    reason = warpgroups.fault(_as_warpgroups(config), problem, device)
    if reason is not None:
        return reason
    if PROGRAMS * tiles(clustered(config), problem) >= 2**31:
        return "more tiles than a launch counts"
    shared = shared_bytes(config, problem)
    if shared > device.shared_memory:
        return f"{shared} bytes of shared memory, of {device.shared_memory}"
    return None


def illegal(config: Config, problem: MatmulProblem, device: Device) -> str | None:
    """Say why `config` may not run `problem` on `device`, None where it may."""
    return fault(config, problem, device, _SHAPES) or epilogue_fault(config, problem)


def configs_of(shapes: Shapes) -> Iterator[Config]:
    """Yield the configs with tiles of these shapes."""
    for (m, n, consumers, subtiles), (stages, downs) in shapes.items():
        for down, group, persistent in itertools.product(downs, (1, 8), (False, True)):
            kwargs = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": _BLOCK_K, "CONSUMERS": consumers, "DOWN": down}
            rest = {"GROUP_M": group, "PERSISTENT": persistent, "SUBTILES": subtiles}
            yield replace(Config.of(4, stages, NAME, **kwargs, **rest), num_ctas=PROGRAMS)


def contends(problem: MatmulProblem) -> bool:
    """Tell whether clusters can be the fastest: fewer rows leave half of each idle."""
    return problem.m > _FEWEST_ROWS


def pointless(config: Config, problem: MatmulProblem, device: Device) -> bool:
    """Tell whether the config is dominated: another of the family does the same or strictly less work."""
    whole = clustered(config)
    if order_fault(whole, problem) or (
        config["PERSISTENT"] and tiles(whole, problem) <= device.processors // PROGRAMS
    ):
        return True
    sides = (("BLOCK_M", _FEWEST_ROWS, problem.m), ("BLOCK_N", 128, problem.n))
    return any(whole[name] > least and whole[name] >= 2 * size for name, least, size in sides)


def resident(config: Config, problem: MatmulProblem, device: Device) -> int:
    """Return how many programs of a config an SM holds at once."""
    return warpgroups.resident(_as_warpgroups(config), problem, device)


def _off_sectors(problem: MatmulProblem, copies: tuple[bool, bool]) -> bool:
    """Tell whether rows of an operand start off sectors where the kernel reads them."""
    rows = (
        problem.m if problem.a_layout == "column" else problem.k,
        problem.k if problem.b_layout == "column" else problem.n,
    )
    off = (row * problem.itemsize % SECTOR != 0 for row in rows)
    return any(own and not copy for own, copy in zip(off, copies, strict=True))


def copied_us(
    config: Config, problem: MatmulProblem, device: Device, fit: TmaFit, copies: tuple[bool, bool]
) -> float:
    """Return predicted microseconds of a config, where `copies` of a and b are made first.

    Rows that start off sectors take more of the L2 cache, which programs of a cluster read less of. The
    formula does not know that: a factor that was measured tells it.
    """
    alone = _as_warpgroups(config)
    down, across = arranged(config)
    made = warpgroups.programs(alone, problem)._replace(down=down, across=across, copied=copies)
    factor = _OFF_SECTORS if _off_sectors(problem, copies) else _ON_SECTORS
    return factor * tma_us(alone, problem, device, made, fit)


def predicted_us(config: Config, problem: MatmulProblem, device: Device, fit: TmaFit = TMA_FITTED) -> float:
    """Return predicted microseconds of a config."""
    return copied_us(config, problem, device, fit, copied(problem))


def described(seen: Seen, dtype: str, rows: int, columns: int, down: int, across: int) -> Descriptor:
    """Return the descriptor of tiles of so many rows and columns a program, `down` x `across` a cluster."""
    parts = (across, down) if seen.transposed else (down, across)
    return seen.descriptor(rows * down, columns * across, swizzled(dtype, (0, 0, parts[0] - 1, parts[1] - 1)))


def work(call: MatmulCall, config: Config, processors: int, early: bool) -> Work:
    """Return the launches of `call` with a config, on a GPU of so many SMs.

    `early`: kernels use programmatic dependent launch: they start before the kernel ahead is done, and wait
    themselves. Raises TuningError where no descriptor can see the operands.
    """
    check_sizes(call)
    read, out = inputs(call, early), output_of(call)
    consumers, main, depth = config["CONSUMERS"], main_columns(config), config["BLOCK_K"]
    rows, rest = config["BLOCK_M"] // consumers, config["BLOCK_N"] - main
    down, across = arranged(config)
    grid, flat = grid_of(call, clustered(config), 1, processors // PROGRAMS)
    stored = functools.partial(described, out.seen, call.out_dtype, rows)
    by = out.by_descriptor
    values = arguments(call, config, read, out, early) | {
        "a_desc": described(read.a, call.dtype, rows, depth, down, 1),
        "b_desc": described(read.b, call.dtype, depth, main, 1, across),
        "b_rest_desc": described(read.b, call.dtype, depth, rest, 1, across) if rest else None,
        "out_desc": stored(main // config["SUBTILES"], down, across) if by else None,
        "out_rest_desc": stored(rest, down, across) if by and rest else None,
        "MAIN_N": main, "REGISTERS": REGISTERS[consumers], "STAGES": config.num_stages, "FLAT": flat,
        "TRANSPOSED": False,
    }  # fmt: skip
    options = {"num_warps": config.num_warps, "num_ctas": PROGRAMS, "launch_pdl": early}
    return Work((*read.steps, step_of(matmul_clusters, grid, values, options)), read.scratch)


FAMILY: Final = Family(
    op=MatmulProblem.op,
    name=NAME,
    kernel=matmul_clusters,
    also=(repack,),
    space=functools.partial(configs_of, _SHAPES),
    illegal=illegal,
    pointless=pointless,
    predicted_us=predicted_us,
    resident=resident,
    work=work,
    contends=contends,
    numerics=functools.partial(of_product, specialised=True),
    canonical=canonical_product,
)
