"""Compute how many programs an SM holds, and the time that each part of a GPU needs if it worked alone."""

import math
from dataclasses import dataclass, replace
from typing import Final

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import Known, MatmulProblem, PermuteProblem
from tritile.families.common import upright
from tritile.families.common.products import uses_tensor_cores
from tritile.families.common.rates import peak_tflops, rate
from tritile.families.common.tma_time import TMA_FITTED
from tritile.families.few_rows import across
from tritile.families.matmul_split import family as split
from tritile.families.matmul_tma import family as descriptor
from tritile.families.odd_rows import family as odd_rows
from tritile.families.permute import boxes
from tritile.families.permute.family import parts_us
from tritile.lab import traffic
from tritile.planning import model
from tritile.runtime.offline import Resources

MEMORY: Final = "device memory"
L2: Final = "L2 cache"
TENSOR_CORES: Final = "tensor cores"
FMA: Final = "multiply-adds"
INSTRUCTIONS: Final = "instructions"
SHARED: Final = "shared memory"
START: Final = "starting and waiting"
# Shares by which two times have to differ to tell which config is faster: predictions are off by some 10% in
# the median (docs/benchmarks.md), measurements side by side by 1%.
_MODEL_ERROR: Final = 0.1
_CLOCK_ERROR: Final = 0.01
_ALONE: Final = 1.5  # no part explains a time that is longer than its longest part by this factor
# Most warps and blocks of one SM, by compute capability: "Compute Capabilities" in NVIDIA's CUDA C++
# Programming Guide. A compute unit of AMD's CDNA has 4 SIMDs of 8 waves each: "CDNA3 ISA", AMD.
_MOST = {
    70: (64, 32), 72: (64, 32), 75: (32, 16), 80: (64, 32), 86: (48, 16), 87: (48, 16), 89: (48, 24),
    90: (64, 32), 100: (64, 32), 101: (64, 32), 103: (64, 32), 120: (48, 32), 121: (48, 32),
}  # fmt: skip
_OTHERS = (48, 16)  # for capabilities not in the list: the least of recent GPUs, except 7.5
_AMD_WAVES = 32
_REGISTERS = 65536  # of an SM, in four partitions; a warp takes them in units of 256
_RESERVED = 1024  # bytes of shared memory that the system takes for each block
SHARED_BYTES = 128  # that shared memory of an SM moves in a clock: 32 banks of 4 bytes


@dataclass(frozen=True)
class Occupancy:
    """Hold how many programs of a kernel an SM holds at once, and the limit that keeps it from more.

    `warps` counts the warps of these programs, `most` the most that an SM can hold.
    """

    programs: int
    warps: int
    most: int
    limit: str

    @property
    def share(self) -> float:
        """Return warps over the most possible."""
        return self.warps / self.most


def occupancy(taken: Resources, warps: int, device: Device) -> Occupancy:
    """Return the occupancy of a kernel from its resources and its warps per program."""
    if device.backend == "cuda":
        most, blocks = _MOST.get(device.nvidia, _OTHERS)
        of_warp = max(256, -(-taken.registers * device.warp_size // 256) * 256)
        by_registers = _REGISTERS // of_warp // 4 * 4 // warps  # whole warps in each of four partitions
        by_shared = (device.shared_memory + _RESERVED) // (taken.shared + _RESERVED)
    else:
        most, blocks = _AMD_WAVES, _AMD_WAVES
        by_registers = 4 * (512 // max(1, -(-taken.registers // 8) * 8)) // warps
        by_shared = device.shared_memory // max(1, taken.shared)
    counts = {
        "registers": by_registers,
        "shared memory": by_shared,
        "warps": most // warps,
        "programs": blocks,
    }
    least = min(counts.values())
    limit = " and ".join(name for name, count in counts.items() if count == least)
    return Occupancy(max(1, least), max(1, least) * warps, most, limit)


@dataclass(frozen=True)
class Waves:
    """Hold how many programs there are, and how many run `at_once` on the whole GPU."""

    programs: int
    at_once: int

    @property
    def count(self) -> int:
        """Count the waves, the last one included."""
        return -(-self.programs // self.at_once)

    @property
    def idle(self) -> float:
        """Return the share of the last wave that has nothing to do."""
        return (self.count * self.at_once - self.programs) / self.at_once


@dataclass(frozen=True)
class Work:
    """Count a config's tiles and work units, and how much of the tiles is needed.

    `units` counts tiles, or parts of tiles where programs share K. `filled` is the share of a product's tiles
    (over M, N and K) that is not masked, or the share of a permutation's elements that is not moved twice.
    """

    tiles: int
    units: int
    filled: float


def work_of(problem: Known, config: Config, device: Device) -> Work:
    """Count how the kernels of a config cut the problem up; a lowered product counts by its core."""
    if config.family == boxes.BOX and isinstance(problem, PermuteProblem):
        box = boxes.box_of(config, problem)
        count = boxes.boxes_of(box, problem)
        return Work(count, count, math.prod(problem.shape) / (count * math.prod(box.sides)))
    if isinstance(problem, PermuteProblem):
        of = traffic.covers(problem, config)
        tiles = of.tiles_m * of.tiles_n * problem.batch
        needed = math.prod(problem.shape) / (tiles * of.m * of.n)
        return Work(tiles, tiles, min(1.0, needed))
    problem = problem.core
    m, n = traffic.tile_of(config, problem)
    rows, columns = traffic.tile_counts(config, problem)
    tiles = rows * columns * problem.batch * config.num_ctas
    filled = problem.m / (rows * m) * problem.n / (columns * n)
    units = tiles * (config["SPLIT_K"] if config.family in (descriptor.NAME, odd_rows.NAME) else 1)
    if config.family == split.NAME:
        tail = split.tail(config, problem, device)
        units = tail.whole + tail.rest * tail.split
    if config.family == across.NAME:
        units = tiles * across.parts(config, problem, device.processors)
    padded_k = -(-problem.k // config["BLOCK_K"]) * config["BLOCK_K"]
    return Work(tiles, units, filled * problem.k / padded_k)


def parts(problem: Known, config: Config, device: Device) -> dict[str, float]:
    """Return the microseconds of each part by itself, the longest first.

    For a product these are lower bounds, except the L2 cache's. Device memory moves every operand once, and
    the busiest SM multiplies whole tiles, both at peak rate. Shared memory is written and read once for each
    tile of a and b. The L2 cache moves all that tiles ask for, at a rate fitted on an H200. For a permutation
    all parts are estimates, by its family's formula (`families.permute`).
    """
    if isinstance(problem, PermuteProblem):
        box = config.family == boxes.BOX
        found = (boxes.parts_us if box else parts_us)(config, problem, device)
        named = dict(zip((MEMORY, SHARED if box else L2, INSTRUCTIONS, START), found, strict=True))
    else:
        named = _product(problem, config, device)
    return dict(sorted(named.items(), key=lambda item: (-item[1], item[0])))


def _product(problem: MatmulProblem, config: Config, device: Device) -> dict[str, float]:
    problem, clocks_us = problem.core, device.clock_ghz * 1e3
    m, n = traffic.own_tile_of(config, problem)
    work, iterations = work_of(problem, config, device), -(-problem.k // config["BLOCK_K"])
    busiest = -(-work.units // device.processors) * iterations / (work.units / work.tiles)
    if config.family == split.NAME:
        tail = split.tail(config, problem, device)
        busiest = (tail.whole // device.processors + 1 / tail.split) * iterations
    multiplied = 2.0 * m * n * config["BLOCK_K"] * busiest
    passed = 2 * (m + n) * config["BLOCK_K"] * problem.itemsize * busiest
    asked = traffic.tiled(problem, config, device).total
    summed = replace(problem, dtype="float32") if config.family in upright.FAMILIES else problem
    known = peak_tflops(summed, device)
    peak = known * 1e3 / device.processors / device.clock_ghz if known else rate(summed, device)
    units = TENSOR_CORES if uses_tensor_cores(summed) else FMA
    return {
        MEMORY: traffic.least(problem).total / (device.memory_gbps * 1e3),
        L2: asked / (TMA_FITTED.l2_bytes * device.processors * clocks_us),
        units: multiplied / peak / clocks_us,
        SHARED: passed / SHARED_BYTES / clocks_us,
    }


def bound(times: dict[str, float], us: float) -> str:
    """Name what bounds the time: the longest part, or starting and waiting."""
    name = max(times, key=lambda part: times[part])
    return name if us < _ALONE * times[name] else START


def why_slower(problem: Known, config: Config, best: Config, device: Device) -> str:
    """Say in a few words why a config is predicted to be slower than another."""
    mine = parts(problem, config, device)
    theirs = dict.fromkeys(mine, 0.0) | parts(problem, best, device)  # families differ in parts
    worse = {name: mine[name] - theirs[name] for name in mine}
    name = max(worse, key=lambda part: worse[part])
    gap = model.predict_us(config, problem, device) - model.predict_us(best, problem, device)
    own, other = work_of(problem, config, device), work_of(problem, best, device)
    if worse[name] > 0.25 * max(gap, 0.0) and worse[name] > 0.01 * mine[name]:
        text = f"{name}: {mine[name]:.1f} us for {theirs[name]:.1f}"
        waves = -(-own.units // device.processors), -(-other.units // device.processors)
        if own.filled < 0.97 * other.filled:
            lost = "lies beyond the edge" if isinstance(problem, MatmulProblem) else "is moved twice"
            return f"{text}; {1 - own.filled:.0%} of its tiles {lost}"
        if name in (TENSOR_CORES, FMA) and own.units / waves[0] < 0.97 * other.units / waves[1]:
            idle = 1 - own.units / (waves[0] * device.processors)
            return f"{text}; {math.floor(100 * idle)}% of the SMs' time is idle at the end"
        return text
    if own.units < min(other.units, device.processors):
        return f"{own.units} programs for {other.units}: too few to hide latency"
    if config.family != best.family:
        return f"family {config.family} takes longer to start a tile, or to feed it"
    if config.num_stages < best.num_stages:
        return f"{config.num_stages} stages for {best.num_stages}: fewer loads are in flight"
    return "programs start and end more slowly, which no part explains"


def beside(
    problem: Known, config: Config, best: Config, device: Device, times: tuple[float | None, float | None]
) -> str:
    """Compare a config with another: by measured times where both are known, else by predicted ones.

    A reason is given only where the config is slower by more than such times err.
    """
    mine, theirs = times
    measured = mine is not None and theirs is not None
    if mine is None or theirs is None:
        mine, theirs = (model.predict_us(one, problem, device) for one in (config, best))
    off = _CLOCK_ERROR if measured else _MODEL_ERROR
    if mine > (1 + off) * theirs:
        return why_slower(problem, config, best, device)
    if theirs > (1 + off) * mine:
        faster = f"faster: {theirs / mine:.2f} times the speed"
        return faster if measured else f"predicted to be {faster}; only measuring tells"
    if measured:
        return "as fast, as far as timing tells"
    return f"predicted to be as fast, within the {off:.0%} that predictions err; only measuring tells"
