"""The least time that each part of a GPU needs for a problem with a config, were it alone at work."""

from dataclasses import dataclass
from typing import Final

from tritile import model, traffic
from tritile.config import Config
from tritile.device import Device
from tritile.explain.hardware import SHARED_BYTES
from tritile.model.matmul import TMA_FITTED, rate
from tritile.model.permute import parts_us
from tritile.problem import MatmulProblem, PermuteProblem
from tritile.space import descriptor
from tritile.space.tile import uses_tensor_cores

MEMORY: Final = "device memory"
L2: Final = "L2 cache"
START: Final = "starting and waiting"
_ALONE: Final = 1.5  # times the longest part, from which on a predicted time is not explained by any part


@dataclass(frozen=True)
class Work:
    """The tiles of a config: how many, what share of each lies in the problem, and of how much work.

    `units` are tiles, or parts of tiles where programs share K. `filled` is the share of the tiles' elements
    (over M, N and K) that is not masked off.
    """

    tiles: int
    units: int
    filled: float


def work_of(problem: MatmulProblem | PermuteProblem, config: Config) -> Work:
    """How the config cuts the problem up."""
    m, n = config["BLOCK_M"], config["BLOCK_N"]
    rows, columns = -(-problem.m // m), -(-problem.n // n)
    tiles = rows * columns * problem.batch
    filled = problem.m / (rows * m) * problem.n / (columns * n)
    if isinstance(problem, PermuteProblem):
        return Work(tiles, tiles, filled)
    split = config["SPLIT_K"] if config.family == descriptor.NAME else 1
    turns = -(-problem.k // config["BLOCK_K"])
    return Work(tiles, tiles * split, filled * problem.k / (turns * config["BLOCK_K"]))


def parts(problem: MatmulProblem | PermuteProblem, config: Config, device: Device) -> dict[str, float]:
    """Microseconds of each part by itself, the longest first.

    Of a product: device memory moves every operand once at its peak rate; the L2 cache moves what tiles ask
    for, at the rate that was fitted for an H200; multiplying is that of the busiest multiprocessor, whole
    tiles, at the rate that `tl.dot` reaches and peak clock; shared memory is written and read once for each
    tile of a and b. Of a permutation: as its formula has them (`model.permute`).
    """
    if isinstance(problem, PermuteProblem):
        found = parts_us(config, problem, device)
        named = {
            MEMORY: found.memory,
            L2: found.l2,
            "instructions": found.instructions,
            START: found.wait,
        }
    else:
        named = _product(problem, config, device)
    return dict(sorted(named.items(), key=lambda item: (-item[1], item[0])))


def _product(problem: MatmulProblem, config: Config, device: Device) -> dict[str, float]:
    clocks_us = device.clock_ghz * 1e3
    m, n = config["BLOCK_M"], config["BLOCK_N"]
    work = work_of(problem, config)
    turns = -(-problem.k // config["BLOCK_K"]) / (work.units / work.tiles)
    busiest = -(-work.units // device.processors) * turns
    multiplied = 2.0 * m * n * config["BLOCK_K"] * busiest
    passed = 2 * (m + n) * config["BLOCK_K"] * problem.itemsize * busiest
    asked = traffic.tiled(problem, config).total
    units = "tensor cores" if uses_tensor_cores(problem) else "multiply-adds"
    return {
        MEMORY: traffic.least(problem).total / (device.memory_gbps * 1e3),
        L2: asked / (TMA_FITTED.l2_bytes * device.processors * clocks_us),
        units: multiplied / rate(problem, device) / clocks_us,
        "shared memory": passed / SHARED_BYTES / clocks_us,
    }


def bound(times: dict[str, float], predicted_us: float) -> str:
    """What takes longest: one of the parts, or none, where starting and waiting for data is most of it."""
    name = max(times, key=lambda part: times[part])
    return name if predicted_us < _ALONE * times[name] else START


def why_slower(problem: MatmulProblem | PermuteProblem, config: Config, best: Config, device: Device) -> str:
    """Why a config is predicted to lose to another, in a few words."""
    mine, theirs = (parts(problem, one, device) for one in (config, best))
    worse = {name: mine[name] - theirs.get(name, 0.0) for name in mine}
    name = max(worse, key=lambda part: worse[part])
    gap = model.predict_us(config, problem, device) - model.predict_us(best, problem, device)
    own, other = work_of(problem, config), work_of(problem, best)
    if gap <= 0:
        return "predicted to be no slower: measuring tells"
    if worse[name] > 0.25 * gap and worse[name] > 0.01 * mine[name]:
        text = f"{name}: {mine[name]:.1f} us for {theirs.get(name, 0.0):.1f}"
        waves = -(-own.units // device.processors), -(-other.units // device.processors)
        if own.filled < 0.97 * other.filled:
            return f"{text}; {1 - own.filled:.0%} of its tiles lies beyond the edge"
        if name in ("tensor cores", "multiply-adds") and own.units / waves[0] < 0.97 * other.units / waves[1]:
            idle = 1 - own.units / (waves[0] * device.processors)
            return f"{text}; {idle:.0%} of the multiprocessors' time is idle at the end"
        return text
    if own.units < min(other.units, device.processors):
        return f"{own.units} programs for {other.units}: fewer to hide each other's waiting"
    if config.family != best.family:
        return f"family {config.family} takes longer to start a tile, or to feed it"
    if config.num_stages < best.num_stages:
        return f"{config.num_stages} stages for {best.num_stages}: less is under way while it waits"
    return "starts and ends of programs take longer"
