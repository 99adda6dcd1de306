"""Describe products by specialised warps on Hopper: one loads tiles by TMA, 1 to 3 warpgroups multiply.

A family of such kernels is a `Kind`. Whatever it makes, its programs are those of a config of `warpgroups`,
which decides what is legal, how long it takes, and which descriptors read and store tiles.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import MatmulProblem, epilogue_of
from tritile.core.versions import parsed
from tritile.core.views import MatmulCall
from tritile.families.common import tma_time
from tritile.families.common.blocks import names_fault, order_fault, shared_fault
from tritile.families.common.descriptors import Output, arguments, grid_of, output_of
from tritile.families.common.numerics import of_product
from tritile.families.common.operands import Inputs, Seen, copied, inputs, repack, tiles
from tritile.families.common.products import SECTOR, in_parts, promoted_turns
from tritile.families.common.tma_time import tma_us
from tritile.families.common.warpgroups import (
    NAME,
    PARAMETERS,
    REGISTERS,
    epilogue_fault,
    fault,
    main_columns,
    programs_of,
    shared_bytes,
    swizzled,
)
from tritile.families.common.work import Descriptor, Kernel, Work, step_of
from tritile.families.family import Family

TRITON: Final = (3, 7)  # the version with whose barriers and copies to both programs clusters were checked
_RESERVED: Final = 1024  # bytes of shared memory beside Triton's, in clusters
_SIDES: Final = {"BLOCK_M": "BLOCK_N", "BLOCK_N": "BLOCK_M"}
_TRANSPOSED: Final = {"row": "column", "column": "row"}
# Measured time by the time that the formula of single programs gives, where rows of all operands start on
# sectors, and elsewhere: programs of a cluster read less of the L2 cache, of which such rows take more.
_ON_SECTORS: Final = 1.02
_OFF_SECTORS: Final = 0.85
# Of a cluster's program, (BLOCK_M, BLOCK_N, CONSUMERS, SUBTILES): the stages that shared memory holds, and
# each DOWN by which it was the fastest or nearly so.
Shapes = dict[tuple[int, ...], tuple[int, tuple[int, ...]]]


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
    kernel: Kernel
    turned: bool = False
    shapes: Shapes | None = None
    by_out: bool = False

    @property
    def programs(self) -> int:
        return 1 if self.shapes is None else 2

    @property
    def parameters(self) -> tuple[str, ...]:
        return PARAMETERS if self.shapes is None else tuple(sorted((*PARAMETERS, "DOWN")))

    def mirrored(self, config: Config) -> Config:
        """Return a config with the blocks of out for those of out^T, and the other way, if `turned`."""
        return config.derived(self._mirrored(config)) if self.turned else config

    def _mirrored(self, config: Config) -> Iterator[tuple[str, Any]]:
        sides = _SIDES if self.turned else {}
        return ((name, config[sides.get(name, name)]) for name, _ in config.kwargs)

    def alone(self, config: Config) -> Config:
        """Return the config of `warpgroups` whose programs do the same, on out^T if `turned`."""
        if self.name == NAME:
            return config
        kwargs = (pair for pair in self._mirrored(config) if pair[0] != "DOWN")
        return config.derived(kwargs, family=NAME, num_ctas=1)

    def arranged(self, config: Config) -> tuple[int, int]:
        """Return how many tiles of a cluster lie one below the other, and how many side by side."""
        return (1, 1) if self.shapes is None else (config["DOWN"], self.programs // config["DOWN"])

    def clustered(self, config: Config) -> Config:
        if self.shapes is None:
            return config
        down, across = self.arranged(config)[:: -1 if self.turned else 1]
        sides = {"BLOCK_M": down * config["BLOCK_M"], "BLOCK_N": across * config["BLOCK_N"]}
        return config.derived((name, sides.get(name, value)) for name, value in config.kwargs)

    def seen(self, problem: MatmulProblem) -> MatmulProblem:
        return transposed(problem) if self.turned else problem

    def shared_bytes(self, config: Config, problem: MatmulProblem) -> int:
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
        if problem.rights > 1:
            return "gated products are made by tile and descriptor"
        if self.name != NAME and (problem.itemsize != 2 or problem.totals):
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
        return tma_time.resident(programs_of(self.alone(config), self.seen(problem)), device)

    def predicted_us(self, config: Config, problem: MatmulProblem, device: Device) -> float:
        """Return predicted microseconds of a config. `problem`, and not out^T, tells what is copied."""
        alone, seen, (down, across) = self.alone(config), self.seen(problem), self.arranged(config)
        a, b = copied(problem)
        copies = (b, a) if self.turned else (a, b)
        made = programs_of(alone, seen)._replace(down=down, across=across, copied=copies)
        us = tma_us(alone, seen, device, made)
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

    def work(self, call: MatmulCall, config: Config, processors: int, early: bool) -> Work:
        read, out = inputs(call, early), output_of(call)
        values = self.arguments(call, config, read, out, early)
        whole, made = self.alone(self.clustered(config)), call.transposed if self.turned else call
        grid, values["FLAT"] = grid_of(made, whole, 1, processors // self.programs)
        options = {"num_warps": config.num_warps, "launch_pdl": early}
        if self.shapes is not None:
            options["num_ctas"] = self.programs
        return Work((*read.steps, step_of(self.kernel, grid, values, options)), read.scratch)

    def family(self, space: Callable[[], Iterable[Config]], **more: Any) -> Family:
        given: dict[str, Any] = {
            "illegal": self.illegal, "pointless": self.pointless, "predicted_us": self.predicted_us,
            "resident": self.resident, "work": self.work,
            "numerics": functools.partial(of_product, specialised=True), **more,
        }  # fmt: skip
        return Family(MatmulProblem.op, self.name, self.kernel, space, also=(repack,), **given)
