"""Describe products by specialised warps on Hopper: one loads tiles by TMA, 1 to 3 warpgroups multiply.

A family of such kernels is a `Kind`. Whatever it makes, its programs are those of a config of `warpgroups`,
which decides what is legal, how long it takes, and which descriptors read and store tiles.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from triton.experimental.gluon import language as gl

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import ITEMSIZE, SCALE_K, MatmulProblem, epilogue_of
from tritile.core.versions import parsed
from tritile.core.views import MatmulCall
from tritile.families.common import tma_time
from tritile.families.common.blocks import late_fault, names_fault, order_fault, shared_fault
from tritile.families.common.descriptors import Output, arguments, check_sizes, grid_of, output_of
from tritile.families.common.facts import SECTOR
from tritile.families.common.numerics import canonical_product, of_product
from tritile.families.common.operands import Inputs, Seen, copied, inputs, reachable, tiles
from tritile.families.common.repack import repack
from tritile.families.common.sums import in_parts, promoted_turns
from tritile.families.common.tma_time import TMA_FITTED, Programs, TmaFit, tma_us
from tritile.families.common.work import Descriptor, Work, step_of
from tritile.families.family import Family

WARPGROUPS: Final = "warpgroups"
PARAMETERS: Final = ("BLOCK_K", "BLOCK_M", "BLOCK_N", "CONSUMERS", "GROUP_M", "PERSISTENT", "SUBTILES")
REGISTERS: Final = {1: 232, 2: 232, 3: 160}  # registers of a consumer's thread, by the number of consumers
ROWS: Final = (64, 128)  # of a tile, for one consumer
COLUMNS: Final = (16, 32, 48, 64, 80, 96, 128, 144, 160, 192, 256)
TRITON: Final = (3, 7)  # the version with whose barriers and copies to both programs clusters were checked
_BARRIERS: Final = 512  # bytes of shared memory for barriers and the state of the warps
_RESERVED: Final = 1024  # bytes of shared memory beside Triton's, in clusters
_GLUON_DTYPES: Final = {"float8_e4m3fn": gl.float8e4nv, "float8_e5m2": gl.float8e5}
_SIDES: Final = {"BLOCK_M": "BLOCK_N", "BLOCK_N": "BLOCK_M"}
_TRANSPOSED: Final = {"row": "column", "column": "row"}
# Measured time by the time that the formula of single programs gives, where rows of all operands start on
# sectors, and elsewhere: programs of a cluster read less of the L2 cache, of which such rows take more.
_ON_SECTORS: Final = 1.02
_OFF_SECTORS: Final = 0.85
# Of a cluster's program, (BLOCK_M, BLOCK_N, CONSUMERS, SUBTILES): the stages that shared memory holds, and
# each DOWN by which it was the fastest or nearly so.
Shapes = dict[tuple[int, ...], tuple[int, tuple[int, ...]]]


def main_columns(config: Config) -> int:
    """Return the largest power of two in BLOCK_N: the columns of its first accumulator."""
    return 1 << (config["BLOCK_N"].bit_length() - 1)


def shared_bytes(config: Config, problem: MatmulProblem) -> int:
    """Return shared memory that the compiled kernel asks for, in bytes."""
    main = main_columns(config)
    stage = (config["BLOCK_M"] + config["BLOCK_N"]) * config["BLOCK_K"] * problem.itemsize
    stored = config["BLOCK_M"] * (main // config["SUBTILES"] + config["BLOCK_N"] - main)
    return stage * config.num_stages + stored * ITEMSIZE[problem.out_dtype] + _BARRIERS


def numbers_fault(config: Config, names: tuple[str, ...]) -> str | None:
    """Say what is wrong with a config of specialised warps but for its tile, None where nothing is."""
    reason = names_fault(config, names)
    if reason is not None:
        return reason
    numbers = [value for name, value in config.kwargs if name != "PERSISTENT"]
    if not all(isinstance(v, int) and not isinstance(v, bool) and 1 <= v <= 384 for v in numbers):
        return f"{config}: blocks are whole numbers from 1"
    if not isinstance(config["PERSISTENT"], bool):
        return f"PERSISTENT = {config['PERSISTENT']!r} is neither True nor False"
    if config["GROUP_M"] & (config["GROUP_M"] - 1):
        return f"GROUP_M = {config['GROUP_M']} is not a power of two"
    if config.num_ctas != 1 or config.num_warps != 4 or not 2 <= config.num_stages <= 12:
        return "num_ctas must be 1, num_warps 4, num_stages 2 to 12"
    return None


def _tile_fault(config: Config) -> str | None:
    consumers = config["CONSUMERS"]
    if consumers not in REGISTERS or config["BLOCK_M"] not in [rows * consumers for rows in ROWS]:
        return f"BLOCK_M = {config['BLOCK_M']} is not 64 or 128 rows for each of 1 to 3 consumers"
    if config["BLOCK_N"] not in COLUMNS:
        return f"BLOCK_N = {config['BLOCK_N']} is none of {COLUMNS}"
    if config["BLOCK_K"] not in (32, 64, 128) or config["SUBTILES"] not in (1, 2):
        return "BLOCK_K must be 32, 64 or 128, SUBTILES 1 or 2"
    return None


def _accumulators(config: Config) -> int:
    """Return the registers of a thread that hold sums."""
    return int(config["BLOCK_M"] // config["CONSUMERS"] * config["BLOCK_N"] // 128)


def _sums_fault(config: Config, problem: MatmulProblem) -> str | None:
    """Say that the main loop has too few registers for a tile's sums, None where it has enough.

    A total takes as many again, but is only added to, and needs no room beside it except for scales.
    """
    words, most = _accumulators(config), REGISTERS[config["CONSUMERS"]]
    fits = most - 56
    if problem.totals:
        fits = min(fits, (most - (64 if problem.block_scales else 32)) // 2)
    return f"{words} accumulator registers a thread, above {fits}" if words > fits else None


def epilogue_fault(
    config: Config, problem: MatmulProblem, turned: bool = False, split: bool = False
) -> str | None:
    """Say that an epilogue would spill registers, by hundreds of bytes as compiled; None where it does not.

    Gelu holds steps of many elements at a time. It spills beside many sums where tiles are stored by
    pointers, and beside fewer where it reads a matrix. `turned`: tiles are stored turned over, and spill
    beside a matrix however they are stored. `split`: parts are summed too, by a second epilogue.
    """
    fused, most = epilogue_of(problem.epilogue), REGISTERS[config["CONSUMERS"]]
    gelu, reads = fused.activation == "gelu", "full" in (fused.bias, fused.residual)
    pointers = problem.out_align < 16 or problem.n * ITEMSIZE[problem.out_dtype] % 16 != 0
    words = fits = _accumulators(config)
    if pointers and (gelu or (reads and split)):
        fits = most * 9 // 16
    if gelu and reads and (pointers or turned):
        fits = (most - 40) // 2 if pointers else 96
    return f"{words} accumulator registers a thread, above {fits}" if words > fits else None


def fault(config: Config, problem: MatmulProblem, device: Device) -> str | None:
    """Say why a config of `warpgroups` may not run `problem` whatever its epilogue, None where it may."""
    if device.nvidia != 90:
        return f"{device.name} has no warpgroup instructions of Hopper's kind"
    if problem.itemsize > 2 or problem.dtype == "int8":  # Gluon's compiler has no instruction for these
        return f"{problem.dtype} is no floating type of 16 or 8 bits"
    if problem.itemsize == 1 and (problem.a_layout, problem.b_layout) != ("row", "column"):
        return f"a is {problem.a_layout}, b {problem.b_layout}: bytes must lie along K"
    if problem.totals and not problem.promoted and SCALE_K % config["BLOCK_K"]:
        return f"BLOCK_K = {config['BLOCK_K']} does not divide {SCALE_K}"
    if problem.rights > 1:
        return "gated products are made by tile and descriptor"
    reason = numbers_fault(config, PARAMETERS) or _tile_fault(config) or reachable(problem)
    reason = reason or late_fault(config, problem, device) or _sums_fault(config, problem)
    if reason is None and tiles(config, problem) >= 2**31:
        return "more tiles than a launch counts"
    return reason or shared_fault(shared_bytes(config, problem), device)


def programs_of(config: Config, problem: MatmulProblem) -> Programs:
    """Return what the time of a config of `warpgroups` depends on."""
    main, consumers = main_columns(config), config["CONSUMERS"]
    rows, rest = config["BLOCK_M"] // consumers, config["BLOCK_N"] - main
    pieces = ([(rows, main)] + [(rows, rest)] * (rest > 0)) * consumers
    return Programs(pieces, shared_bytes(config, problem), 4 * consumers + 4, consumers, True, 1)


@functools.cache
def swizzled(dtype: str, second: tuple[int, ...] | None = None) -> Callable[[tuple[int, ...]], Any]:
    """Return the layout in shared memory of a block of this dtype, as a function of the block.

    `second`: where the second program of a cluster has its part of the block; None: there is no cluster.
    """
    kind = _GLUON_DTYPES.get(dtype) or getattr(gl, dtype)
    shared = {} if second is None else {"cga_layout": [[*second]]}
    return functools.cache(lambda block: gl.NVMMASharedLayout.get_default_for([*block], kind, **shared))


@functools.lru_cache(16)  # all configs of a problem ask in turn
def transposed(problem: MatmulProblem) -> MatmulProblem:
    """Return the problem of out^T = b^T a^T, as if its result were stored row by row.

    Epilogues of types that are not made so are left out: not all have a mirror image.
    """
    fused = epilogue_of(problem.epilogue if problem.itemsize == 2 else "").transposed
    a, b = (_TRANSPOSED.get(layout, layout) for layout in (problem.b_layout, problem.a_layout))
    return replace(
        problem, m=problem.n, n=problem.m, a_layout=a, b_layout=b, a_align=problem.b_align,
        b_align=problem.a_align, epilogue=str(fused),
    )  # fmt: skip


def _off_sectors(problem: MatmulProblem, copies: tuple[bool, bool]) -> bool:
    """Tell whether rows of an operand start off sectors where the kernel reads them."""
    rows = (
        problem.m if problem.a_layout == "column" else problem.k,
        problem.k if problem.b_layout == "column" else problem.n,
    )
    off = (row * problem.itemsize % SECTOR != 0 for row in rows)
    return any(own and not copy for own, copy in zip(off, copies, strict=True))


@dataclass(frozen=True, eq=False)
class Kind:
    """Describe what a family does otherwise than `warpgroups`.

    - `turned`: it makes out^T = b^T a^T. Blocks of its configs are those of out, DOWN is of out^T.
    - `shapes`: tiles of its programs, if clusters of two share tiles of an operand. DOWN tiles of a cluster
      lie one below the other, else side by side. They are of out^T if `turned`.
    - `by_out`: the kernel's arguments are named by a and b of out, though it makes out^T.
    """

    name: str
    turned: bool = False
    shapes: Shapes | None = None
    by_out: bool = False

    @property
    def programs(self) -> int:
        """Return the programs of a cluster."""
        return 1 if self.shapes is None else 2

    @property
    def parameters(self) -> tuple[str, ...]:
        """Return the names of a config's parameters."""
        return PARAMETERS if self.shapes is None else tuple(sorted((*PARAMETERS, "DOWN")))

    def mirrored(self, config: Config) -> Config:
        """Return a config with the blocks of out for those of out^T, and the other way, if `turned`."""
        return config.derived(self._mirrored(config)) if self.turned else config

    def _mirrored(self, config: Config) -> Iterator[tuple[str, Any]]:
        sides = _SIDES if self.turned else {}
        return ((name, config[sides.get(name, name)]) for name, _ in config.kwargs)

    def alone(self, config: Config) -> Config:
        """Return the config of `warpgroups` whose programs do the same, on out^T if `turned`."""
        if self.name == WARPGROUPS:
            return config
        kwargs = (pair for pair in self._mirrored(config) if pair[0] != "DOWN")
        return config.derived(kwargs, family=WARPGROUPS, num_ctas=1)

    def arranged(self, config: Config) -> tuple[int, int]:
        """Return how many tiles of a cluster lie one below the other, and how many side by side."""
        return (1, 1) if self.shapes is None else (config["DOWN"], self.programs // config["DOWN"])

    def clustered(self, config: Config) -> Config:
        """Return the config with the rows and columns of a cluster as its blocks."""
        if self.shapes is None:
            return config
        down, across = self.arranged(config)[:: -1 if self.turned else 1]
        sides = {"BLOCK_M": down * config["BLOCK_M"], "BLOCK_N": across * config["BLOCK_N"]}
        return config.derived((name, sides.get(name, value)) for name, value in config.kwargs)

    def seen(self, problem: MatmulProblem) -> MatmulProblem:
        """Return the problem that programs make."""
        return transposed(problem) if self.turned else problem

    def shared_bytes(self, config: Config, problem: MatmulProblem) -> int:
        """Return the shared memory of a program, in bytes."""
        own = shared_bytes(self.alone(config), self.seen(problem))
        return own if self.shapes is None else own + _RESERVED

    def _cluster_fault(self, config: Config, device: Device) -> str | None:
        if self.shapes is None:
            return None
        if parsed(device.triton) != TRITON:
            return f"triton {device.triton}: clusters were checked with {TRITON[0]}.{TRITON[1]} alone"
        if device.processors < self.programs:  # as many clusters as persist would be none
            return f"{device.name} has too few SMs for a cluster"
        if config["DOWN"] not in (1, self.programs) or config.num_ctas != self.programs:
            return f"DOWN must be 1 or {self.programs}, num_ctas {self.programs}"
        own = self.mirrored(config)
        shape = tuple(own[name] for name in ("BLOCK_M", "BLOCK_N", "CONSUMERS", "SUBTILES"))
        if shape not in self.shapes or own["BLOCK_K"] != 64:
            return f"{config}: tiles of clusters are {', '.join(map(str, self.shapes))}, BLOCK_K 64"
        return None

    def illegal(self, config: Config, problem: MatmulProblem, device: Device) -> str | None:
        """Say why `config` may not run `problem` on `device`, None where it may."""
        if problem.rights > 1:
            return "gated products are made by tile and descriptor"
        if self.name != WARPGROUPS and (problem.itemsize != 2 or problem.totals):
            return f"{problem.dtype} is not summed by {self.name}"
        reason = names_fault(config, self.parameters) or self._cluster_fault(config, device)
        if reason is not None:
            return reason
        if self.shapes is None and config.num_ctas != 1:
            return "num_ctas must be 1"
        alone = self.alone(config)
        reason = fault(alone, self.seen(problem), device) or epilogue_fault(alone, problem, self.turned)
        if reason is not None or self.shapes is None:
            return reason
        if self.programs * tiles(self.clustered(config), problem) >= 2**31:
            return "more tiles than a launch counts"
        return shared_fault(self.shared_bytes(config, problem), device)

    def pointless(self, config: Config, problem: MatmulProblem, device: Device) -> bool:
        """Tell whether the config is dominated: another of the family does the same or less work."""
        seen, whole = self.seen(problem), self.alone(self.clustered(config))
        if order_fault(whole, seen):
            return True
        if config["PERSISTENT"] and tiles(whole, seen) <= device.processors // self.programs:
            return True
        if self.shapes is None and whole.num_stages < 10:
            stage = (whole["BLOCK_M"] + whole["BLOCK_N"]) * whole["BLOCK_K"] * seen.itemsize
            if shared_bytes(whole, seen) + 2 * stage <= device.shared_memory:
                return True  # a pipeline is as deep as shared memory allows, or one stage less
        narrow = 32 if self.shapes is None else 128
        sides = (("BLOCK_M", 64, seen.m), ("BLOCK_N", narrow, seen.n))
        return any(whole[name] > least and whole[name] >= 2 * size for name, least, size in sides)

    def resident(self, config: Config, problem: MatmulProblem, device: Device) -> int:
        """Return how many programs of a config an SM holds at once."""
        return tma_time.resident(programs_of(self.alone(config), self.seen(problem)), device)

    def predicted_us(
        self, config: Config, problem: MatmulProblem, device: Device, fit: TmaFit = TMA_FITTED
    ) -> float:
        """Return predicted microseconds of a config. `problem`, and not out^T, tells what is copied."""
        alone, seen, (down, across) = self.alone(config), self.seen(problem), self.arranged(config)
        a, b = copied(problem)
        copies = (b, a) if self.turned else (a, b)
        made = programs_of(alone, seen)._replace(down=down, across=across, copied=copies)
        us = tma_us(alone, seen, device, made, fit)
        if self.shapes is None:
            return us
        return (_OFF_SECTORS if _off_sectors(seen, copies) else _ON_SECTORS) * us

    def _tile(
        self, seen: Seen, dtype: str, rows: int, columns: int, down: int = 1, across: int = 1
    ) -> Descriptor | None:
        """Return the descriptor of tiles of a program, `down` x `across` a cluster; None of no tiles."""
        if not rows or not columns:
            return None
        if self.turned:
            rows, columns, down, across = columns, rows, across, down
        if self.shapes is None:
            return seen.descriptor(rows, columns, swizzled(dtype))
        parts = (across, down) if seen.transposed else (down, across)
        layout = swizzled(dtype, (0, 0, parts[0] - 1, parts[1] - 1))
        return seen.descriptor(rows * down, columns * across, layout)

    def arguments(
        self, call: MatmulCall, config: Config, read: Inputs, out: Output, early: bool
    ) -> dict[str, Any]:
        """Return the arguments of a kernel by name: those of out^T if `turned` and not `by_out`."""
        own, (down, across) = self.mirrored(config), self.arranged(config)
        consumers, main, depth = own["CONSUMERS"], main_columns(own), own["BLOCK_K"]
        rows, rest = own["BLOCK_M"] // consumers, own["BLOCK_N"] - main
        a, b = (read.b, read.a) if self.turned else (read.a, read.b)
        stored = out.seen if out.by_descriptor else None
        values = arguments(call, own, read, out, early) | {
            "A_ROW": a.transposed == self.turned, "B_ROW": b.transposed == self.turned,
            "a_desc": self._tile(a, call.dtype, rows, depth, down, 1),
            "b_desc": self._tile(b, call.dtype, depth, main, 1, across),
            "b_rest_desc": self._tile(b, call.dtype, depth, rest, 1, across),
            "out_desc": stored
            and self._tile(stored, call.out_dtype, rows, main // own["SUBTILES"], down, across),
            "out_rest_desc": stored and self._tile(stored, call.out_dtype, rows, rest, down, across),
            "MAIN_N": main, "REGISTERS": REGISTERS[consumers], "STAGES": config.num_stages,
            "PROMOTE": promoted_turns(call, config), "IN_PARTS": in_parts(call), "TRANSPOSED": self.turned,
        }  # fmt: skip
        if not self.by_out:
            return values
        return values | {
            "a_desc": values["b_desc"], "a_rest_desc": values["b_rest_desc"], "b_desc": values["a_desc"],
            "A_ROW": not values["B_ROW"], "B_ROW": not values["A_ROW"], "MAIN_M": main,
            **dict(config.kwargs),
        }  # fmt: skip

    def work(self, kernel: Any, call: MatmulCall, config: Config, processors: int, early: bool) -> Work:
        """Return the launches of `call` by a kernel: see `tritile.families.work.work_of`."""
        check_sizes(call)
        read, out = inputs(call, early), output_of(call)
        values = self.arguments(call, config, read, out, early)
        whole, made = self.alone(self.clustered(config)), call.transposed if self.turned else call
        grid, values["FLAT"] = grid_of(made, whole, 1, processors // self.programs)
        options = {"num_warps": config.num_warps, "launch_pdl": early}
        if self.shapes is not None:
            options["num_ctas"] = self.programs
        return Work((*read.steps, step_of(kernel, grid, values, options)), read.scratch)

    def family(
        self, kernel: Any, space: Callable[[], Iterable[Config]], work: Callable[..., Work], **more: Any
    ) -> Family:
        """Return the family: `more` is what it has of its own."""
        given: dict[str, Any] = {
            "illegal": self.illegal, "pointless": self.pointless, "predicted_us": self.predicted_us,
            "resident": self.resident, "numerics": functools.partial(of_product, specialised=True), **more,
        }  # fmt: skip
        return Family(
            op=MatmulProblem.op, name=self.name, kernel=kernel, also=(repack,), space=space, work=work,
            canonical=canonical_product, **given,
        )  # fmt: skip
