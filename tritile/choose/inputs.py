"""What a predictor knows of a problem and of configs: tiles, waves, a roofline, and how memory lies.

All is of one problem and arrays over configs. A predicted time is the roofline of a config times a factor
that a network learns. The roofline is a reference and no bound: factors below 1 are normal.
"""

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import FP8_DTYPES, MatmulProblem, QuantizedProblem, Tiled
from tritile.families.common.cost import Facts, facts_of, leading_strides, shape_of
from tritile.families.common.products import LINE
from tritile.families.permute import boxes
from tritile.families.permute import family as permute
from tritile.families.quantized import family as packed
from tritile.families.registry import FAMILIES

# Tiles of torch's kernels, with BLOCK_K 64.
TORCH_TILES: Final = (
    (128, 256), (256, 128), (128, 128), (64, 128), (128, 64), (64, 64), (128, 192), (192, 128)
)  # fmt: skip
_FAMILIES: Final = ("tile", "descriptor", "warpgroups", boxes.BOX)  # that have an input; others have none
_LEAST: Final = 2.0**-20  # what is below counts as it
# Only the scale of these matters: networks learn the rest.
_OPERATIONS: Final = 4096  # multiplications of one byte an SM makes in a clock
_L2_BYTES: Final = 56.0  # that an SM gets from the L2 cache in a clock
_TURN_US: Final = 0.2  # of a K iteration
_FILL_US: Final = 1.0  # of a round of programs
_START_US: Final = 2.0
_COPY_US: Final = 1.5  # of an operand that is copied first


class Tiles(NamedTuple):
    """Hold the tiles of configs, and after them those of torch's kernels: arrays (tiles,)."""

    block_m: Any
    block_n: Any
    block_k: Any
    split: Any
    slots: Any  # programs resident on an SM; 1 if kernels are persistent
    copies: Any  # true if operands that TMA cannot read are copied first


class Inputs(NamedTuple):
    """Hold the inputs of networks for one problem."""

    shared: Any  # (inputs,), of the problem
    tiles: Any  # (configs, inputs), of a config's tiles at the problem
    roofline: Any  # (configs,), microseconds
    torch: Any  # (inputs,), of torch's tiles; empty where torch is no candidate
    torch_roofline: float  # microseconds


def _logs(values: Sequence[float]) -> list[float]:
    return [math.log2(max(value, _LEAST)) for value in values]


def of_config(config: Config) -> list[float]:
    """Return the inputs of a config, whatever the problem."""
    kwargs: dict[str, Any] = dict(config.kwargs)
    m, n = kwargs.get("BLOCK_M", kwargs.get("BLOCK", 64)), kwargs.get("BLOCK_N", kwargs.get("RUN", 64))
    numbers = [math.log2(side) / 4 - 1.5 for side in (m, n, kwargs.get("BLOCK_K", 64))]
    numbers += [math.log2(kwargs.get("SPLIT_K", 1)) / 3, config.num_warps / 8, config.num_stages / 8]
    numbers += [float(kwargs.get(name, False)) for name in ("PERSISTENT", "SPLIT_TAIL", "PAIR")]
    numbers += [kwargs.get("SUBTILES", 1) / 2, kwargs.get("CONSUMERS", 0) / 2, math.log2(config.num_ctas)]
    numbers += [math.log2(kwargs.get("GROUP_M", 1)) / 8, math.log2(kwargs.get("READ", 1)) / 4]
    return [*numbers, *(float(config.family == family) for family in _FAMILIES)]


# --- Products ---


def tiles_of(configs: Sequence[Config], problem: Tiled, device: Device) -> Tiles:
    """Return the tiles of configs for all problems of this one's kind."""
    rows = []
    for config in configs:
        family = FAMILIES[problem.op][config.family]
        resident = family.resident
        shape = shape_of(config, 1 if resident is None else resident(config, problem.core, device))
        rows.append((shape.block_m, shape.block_n, shape.block_k, shape.split, shape.slots, family.copies))
    rows += [(m, n, 64, 1, 1, False) for m, n in TORCH_TILES]
    *numbers, copied = zip(*rows, strict=True)
    m, n, k, split, slots = (np.array(each, float) for each in numbers)
    return Tiles(m, n, k, split, slots, np.array(copied))


def facts_at(problem: Tiled, device: Device, copies: bool) -> Facts:
    """Return the facts of a product; `copies`: operands that TMA cannot read are copied first."""
    if isinstance(problem, QuantizedProblem):
        return packed.facts_of(problem, device)
    assert isinstance(problem, MatmulProblem)
    return facts_of(problem, device, copies)


def _of_product(problem: Any, facts: Facts, device: Device) -> list[float]:
    f, clocks = facts, device.clock_ghz * 1e3 * device.processors
    compute = 2 * f.m * f.n * f.k * f.batch * f.size_a / (_OPERATIONS * clocks)
    memory = ((f.bytes_a + f.bytes_b) * f.batch + f.bytes_out) / (device.memory_gbps * 1e3)
    is_plain = isinstance(problem, MatmulProblem)
    rows = leading_strides(problem.core) if is_plain else [2 * problem.k, 0, 2 * problem.n]
    logs = [f.m, f.n, f.k, f.batch, min(f.m, f.n), max(f.m, f.n), compute, memory, max(compute, memory) + 2.5]
    logs += [math.gcd(row, 2 * LINE) for row in rows]
    rest = [
        f.by_row,
        f.m % 2,
        f.n % 2,
        f.k % 2,
        f.n % 64 / 64,
        f.m % 64 / 64,
        f.k % 64 / 64,
        min(f.m, 64) / 64,
    ]
    is_odd = is_plain and min(problem.core.a_align, problem.core.b_align, problem.core.out_align) < 16
    kinds = (
        not is_plain,
        problem.dtype in FP8_DTYPES,
        problem.dtype == "int8",
        is_plain and problem.in_parts,
        is_odd,
    )
    gpu = 4 * math.log2(device.memory_gbps / 4000)
    return [*_logs([*logs, (f.size_a + f.size_b) / 2]), *rest, *map(float, kinds), gpu]


_LOGS: Final = 17  # of the inputs of tiles, the rest are flags


def _of_tiles(tiles: Tiles, plain: Facts, copied: Facts, device: Device) -> tuple[Any, Any]:
    """Return inputs (inputs, tiles), and rooflines in microseconds, in few calls of numpy."""
    bm, bn, bk, split, slots, copies = tiles
    f, clocks, processors = plain, device.clock_ghz * 1e3, device.processors
    out = np.empty((_LOGS + 7, len(bm)))
    work, memory, cache, wait, parts, waves, idle, full, turns, tail, edge_m, edge_n, roofline = out[:13]
    # What copies change: how rows lie, and bytes.
    odd_a, odd_b, off_a, off_b, extra, launches = (
        one if one == other else np.where(copies, other, one)
        for one, other in ((getattr(plain, name), getattr(copied, name))
                           for name in ("odd_a", "odd_b", "off_a", "off_b", "copied", "copies"))
    )  # fmt: skip
    tiles_m, tiles_n = np.ceil(f.m / bm), np.ceil(f.n / bn)
    count = tiles_m * tiles_n * f.batch
    np.ceil(np.ceil(f.k / bk) / split, out=turns)
    np.divide(count * split, processors, out=waves)
    busiest = np.ceil(waves)
    rounds, odd = np.ceil(busiest / slots), 1 + 0.5 * (odd_a + odd_b)
    rows = np.minimum(f.m, bm) * f.size_a + np.minimum(f.n, bn) * f.size_b
    area = bm * bn
    np.multiply(busiest * turns * area, bk * (f.size_a / (clocks * _OPERATIONS)), out=work)
    moved = (f.bytes_a + f.bytes_b * (1 + (np.ceil(tiles_m / 8) - 1) * f.reread)) * f.batch
    memory[:] = (moved * odd + (f.bytes_out + 2 * extra)) / (device.memory_gbps * 1e3)
    cache[:] = count * rows * odd * (f.k / (processors * clocks * _L2_BYTES))
    np.multiply(rounds, turns * _TURN_US + _FILL_US, out=wait)
    np.multiply(count * area * (8 / (device.memory_gbps * 1e3)), split * (split > 1), out=parts)
    bounds = out[:4]
    roofline[:] = (bounds * bounds * bounds).sum(0) ** (1 / 3) + parts + (_START_US + _COPY_US * launches)
    parts += 0.01
    np.divide(busiest, waves, out=idle)
    np.divide(rounds * slots, waves, out=full)
    np.divide(turns * split * bk, f.k, out=tail)
    np.divide(tiles_m * bm, f.m, out=edge_m)
    np.divide(tiles_n * bn, f.n, out=edge_n)
    us = roofline.copy()
    np.divide(bounds, us, out=out[13:17])
    np.log2(np.maximum(out[:_LOGS], _LEAST), out=out[:_LOGS])
    for place, value in enumerate((odd_a, odd_b, f.odd_out, off_a, off_b, launches, np.log2(slots)), _LOGS):
        out[place] = value
    return out, us


def of_product(problem: Tiled, tiles: Tiles, device: Device) -> Inputs:
    """Return the inputs of a product by configs with these tiles, and by torch."""
    plain = facts_at(problem, device, False)
    copied = facts_at(problem, device, True) if isinstance(problem, MatmulProblem) else plain
    found, us = _of_tiles(tiles, plain, copied, device)
    count = len(us) - len(TORCH_TILES)
    best = count + int(us[count:].argmin())
    torch = np.concatenate([found[:, best], found[6, count:], np.log2(us[count:] / us[best])])
    shared = np.array(_of_product(problem, plain, device))
    return Inputs(shared, found[:, :count].T, us[:count], torch, float(us[best]))


# --- Permutations ---


def _of_permutation(p: PermuteProblem, device: Device) -> list[float]:
    m, n, _ = p.plane
    us = p.bytes / (device.memory_gbps * 1e3)
    logs = [us, us + 2, p.m, p.n, p.batch, p.x_align, p.out_align, p.itemsize]
    rest = [len(m), len(n), len(p.shape), len(p.n_digits[0]), float(p.is_transposing)]
    for strides in (p.x_strides, p.out_strides):
        dense = sorted(zip(strides, p.shape, strict=True)) or [(1, 1)]
        run, place = 1, 0
        while place < len(dense) and dense[place][0] == run:
            run, place = run * dense[place][1], place + 1
        step, size = dense[1] if len(dense) > 1 else (1, 1)
        starts = math.gcd(LINE, *(stride * p.itemsize for stride in strides if stride != 1))
        logs += [dense[0][1] * p.itemsize, starts, run * p.itemsize, size, step * p.itemsize]
    return [*_logs(logs), *rest]


def _of_block(config: Config, p: PermuteProblem, device: Device) -> list[float]:
    kwargs: dict[str, Any] = dict(config.kwargs)
    if config.family == boxes.BOX:
        count = max(1, p.bytes / 2 / p.itemsize / kwargs["BLOCK"])
        return [math.log2(count / device.processors), *[0.0] * 11]
    m, n, size = kwargs["BLOCK_M"], kwargs["BLOCK_N"], p.itemsize
    read, written = (run * size for run in p.runs(m, n))
    tiles_m, tiles_n = -(-p.m // m), -(-p.n // n)
    count = tiles_m * tiles_n * p.batch
    waves = count / device.processors
    vectors = max(size, min(p.x_align, read, 16)), max(size, min(p.out_align, written, 16))
    logs = [waves, math.ceil(waves) / waves, tiles_m * m / p.m, tiles_n * n / p.n, read, written, *vectors]
    logs += [tiles_m, tiles_n, count * m * n / vectors[0] / device.processors, kwargs["GROUP_M"] * m / p.m]
    return [math.log2(each) for each in logs]


def of_permutation(problem: PermuteProblem, configs: Sequence[Config], device: Device) -> Inputs:
    """Return the inputs of a permutation: the families' own estimates stand in for tiles' rooflines."""
    rows, parts = [], []
    for config in configs:
        estimates = (boxes if config.family == boxes.BOX else permute).parts_us(config, problem, device)
        rows.append(_of_block(config, problem, device))
        parts.append(estimates[:4])
    found = np.maximum(np.array(parts, float).reshape(-1, 4), 1e-3)
    us = _START_US + (found**2).sum(1) ** 0.5
    tiles = np.concatenate([np.array(rows).reshape(-1, 12), np.log2(found), np.log2(found / us[:, None])], 1)
    return Inputs(np.array(_of_permutation(problem, device)), tiles, us, np.empty(0), math.inf)
