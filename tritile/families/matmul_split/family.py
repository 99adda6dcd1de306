"""Make 16-bit products by specialised warps that split the last tiles along K, on Hopper."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import MatmulProblem
from tritile.core.views import MatmulCall
from tritile.families.common.blocks import names_fault
from tritile.families.common.descriptors import output_of, sizes_of
from tritile.families.common.numerics import Numerics
from tritile.families.common.operands import inputs, tiles
from tritile.families.common.rates import memory_us
from tritile.families.common.specialised import Kind
from tritile.families.common.tma_time import TmaFit, tma_us
from tritile.families.common.warpgroups import epilogue_fault, fault, programs_of
from tritile.families.common.work import COUNTERS, Buffer, Kernel, Section, Work, step_of
from tritile.families.matmul_wgmma import family as warpgroups

matmul_split: Final = Kernel("tritile.families.matmul_split.kernel", "matmul_split")

NAME: Final = "split"
PARAMETERS: Final = ("BLOCK_K", "BLOCK_M", "BLOCK_N", "CONSUMERS", "GROUP_M", "SUBTILES")
TURNS: Final = 4  # K iterations of a part, at the least
_MEETING_US: Final = 4.5  # to store parts, and to wait for the last one
_MOST: Final = 255  # parts that the kernel's counters can count


class Tail(NamedTuple):
    """Hold how tiles are made: `whole` tiles by one program each, `rest` tiles in `split` parts."""

    programs: int
    whole: int
    rest: int
    split: int


def tail_of(made: int, turns: int, processors: int) -> Tail:
    """Split the tiles of the last wave, of so many K iterations each, if SMs are left for that."""
    rest = made % processors
    split = min(processors // rest, turns // TURNS, _MOST) if rest else 1
    if split < 2:
        return Tail(min(made, processors), made, 0, 1)
    return Tail(processors if made > processors else rest * split, made - rest, rest, split)


def _as_warpgroups(config: Config, persistent: bool) -> Config:
    kwargs: tuple[tuple[str, Any], ...] = (*config.kwargs, ("PERSISTENT", persistent))
    return config.derived(sorted(kwargs), family=warpgroups.NAME)


def tail(config: Config, problem: MatmulProblem, device: Device) -> Tail:
    return tail_of(tiles(config, problem), -(-problem.k // config["BLOCK_K"]), device.processors)


def illegal(config: Config, problem: MatmulProblem, device: Device) -> str | None:
    reason = names_fault(config, PARAMETERS)
    if reason is not None:
        return reason
    if problem.itemsize != 2 or problem.totals:
        return f"{problem.dtype} is summed by warpgroups that split no tile"
    reason = fault(_as_warpgroups(config, True), problem, device)
    reason = reason or epilogue_fault(config, problem, split=True)
    if reason is not None:
        return reason
    if -(-problem.k // config["BLOCK_K"]) * _MOST >= 2**31:
        return f"K = {problem.k} is more than is counted in parts"
    return None if tail(config, problem, device).rest else "no tile is split: warpgroups makes the same"


def _configs() -> Iterator[Config]:
    for config in warpgroups.FAMILY.configs:
        if config["PERSISTENT"]:
            kwargs = tuple(pair for pair in config.kwargs if pair[0] != "PERSISTENT")
            yield replace(config, family=NAME, kwargs=kwargs)


def pointless(config: Config, problem: MatmulProblem, device: Device) -> bool:
    return warpgroups.KIND.pointless(_as_warpgroups(config, False), problem, device)


def predicted_us(config: Config, problem: MatmulProblem, device: Device) -> float:
    made, several = tail(config, problem, device), tiles(config, problem) > device.processors
    dense = _as_warpgroups(config, several)
    programs = programs_of(dense, problem)
    if not several:
        return tma_us(dense, problem, device, programs._replace(split=made.split)) + _MEETING_US
    part = config["BLOCK_M"] * config["BLOCK_N"] * 4  # bytes that an SM leaves, and that it sums
    summed_us = 2 * part / TmaFit.l2_bytes / (device.clock_ghz * 1e3)
    waves = made.whole // device.processors
    least = memory_us(config, problem, device, TmaFit.short, TmaFit.bandwidth)
    us = tma_us(dense, problem, device, programs) * (waves + 1 / made.split) / (waves + 1)
    return max(us, least) + summed_us + 2 * _MEETING_US


def resident(config: Config, problem: MatmulProblem, device: Device) -> int:
    """Return how many programs an SM holds at once: one, which goes through all of its tiles."""
    return 1


def work(call: MatmulCall, config: Config, processors: int, early: bool) -> Work:
    read, out = inputs(call, early), output_of(call)
    m, n, k, batch, _ = sizes_of(call)
    block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
    made = tail_of(batch * -(-m // block_m) * -(-n // block_n), -(-k // config["BLOCK_K"]), processors)
    values = warpgroups.KIND.arguments(call, config, read, out, early) | {
        "parts_ptr": Buffer("parts"), "counters_ptr": Buffer(COUNTERS),
        "whole": made.whole, "rest": made.rest, "split": made.split,
    }  # fmt: skip
    options = {"num_warps": config.num_warps, "launch_pdl": early}
    step = step_of(matmul_split, (made.programs, 1, 1), values, options)
    parts = Section("float32", max(1, made.rest * made.split) * block_m * block_n)
    return Work(
        (*read.steps, step), {**read.scratch, "parts": parts}, max(1, made.rest) * config["CONSUMERS"]
    )


def _numerics(config: Config, problem: MatmulProblem, device: Device) -> Numerics:
    """Return numerics that are never canonical: sizes and SMs decide which parts of K are summed apart."""
    return Numerics("warpgroup", 0)


FAMILY: Final = Kind(NAME, matmul_split).family(
    _configs, work=work, illegal=illegal, pointless=pointless, predicted_us=predicted_us,
    resident=resident, numerics=_numerics,
)  # fmt: skip
