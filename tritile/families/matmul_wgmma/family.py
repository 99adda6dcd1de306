"""Make products of 16 and 8 bits by specialised warps, on Hopper: one of them loads tiles."""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple

from tritile.core.call import MatmulCall
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import ITEMSIZE, PROMOTED_EVERY, SCALE_K, MatmulProblem
from tritile.core.threads import import_late
from tritile.core.versions import parsed
from tritile.families.common import products
from tritile.families.common.cost import MOST_PARTS, Program, tail_parts
from tritile.families.common.descriptors import (
    DescriptorView,
    by_tma,
    k_major_copies,
    reachable,
    repack,
    tiles,
)
from tritile.families.common.rates import multiply_clocks, slowdown
from tritile.families.family import Family
from tritile.families.matmul_tma.family import stage_bytes, tma_programs_per_sm
from tritile.families.numerics import Numerics, of_product
from tritile.runtime.work import COUNTERS, Buffer, Descriptor, Kernel, Work, Workspace, step_of

matmul_warpgroups: Final = Kernel("tritile.families.matmul_wgmma.kernel", "matmul_warpgroups")

NAME: Final = "warpgroups"
PARAMETERS: Final = ("BLOCK_K", "BLOCK_M", "BLOCK_N", "CONSUMERS", "GROUP_M", "PERSISTENT", "SUBTILES")
# Parameters that only some configs have.
SPLIT_TAIL: Final = "SPLIT_TAIL"  # tiles of the last wave are made in parts of K
PAIR: Final = "PAIR"  # the two CTAs of a cluster make tiles one below the other, and share those of b
_OPTIONS: Final = (SPLIT_TAIL, PAIR)
_PAIRS_WITH: Final = (3, 7)  # the version of Triton with which pairs have run on a GPU; 3.6 has no multicast
_PAIR_BARRIERS: Final = 1024  # bytes of shared memory for a pair's barriers, in addition to Triton's
REGISTERS: Final = {1: 232, 2: 232, 3: 160}  # registers of a consumer's thread, by the number of consumers
_ROWS: Final = (64, 128)  # of a tile, for one consumer
_COLUMNS: Final = (16, 32, 48, 64, 80, 96, 128, 144, 160, 192, 256)
_LARGEST: Final = 256 * 160  # elements of a tile
_RIGHT_ON_3_6: Final = (64, 96, 128, 192)  # columns of tiles whose promoted sums are right with Triton 3.6
_BARRIERS: Final = 512  # bytes of shared memory for barriers and the state of the warps
_GLUON_DTYPES: Final = {"float8_e4m3fn": "float8e4nv", "float8_e5m2": "float8e5"}


class Tail(NamedTuple):
    """Hold how tiles are made: `whole` tiles by one program each, `rest` tiles in `split` parts."""

    programs: int
    whole: int
    rest: int
    split: int


def tail_of(made: int, turns: int, processors: int) -> Tail:
    """Split the tiles of the last wave, of so many K iterations each, if SMs are left for that."""
    rest = made % processors
    split = int(tail_parts(rest, turns, processors))
    if not rest or split < 2:
        return Tail(min(made, processors), made, 0, 1)
    return Tail(processors if made > processors else rest * split, made - rest, rest, split)


def tail(config: Config, problem: MatmulProblem, processors: int) -> Tail:
    return tail_of(tiles(config, problem), -(-problem.k // config["BLOCK_K"]), processors)


def splits(config: Config) -> bool:
    """True if a config splits the tiles of the last wave along K."""
    return bool(dict(config.kwargs).get(SPLIT_TAIL, False))


def has_options(config: Config) -> bool:
    return config.num_ctas > 1 or any(name in _OPTIONS for name, _ in config.kwargs)


def plain(config: Config) -> Config:
    """Return the config of single CTAs that splits no tile."""
    if not has_options(config):
        return config
    return config.derived((pair for pair in config.kwargs if pair[0] not in _OPTIONS), num_ctas=1)


def clustered(config: Config) -> Config:
    """Return a config whose tiles are those of a pair, if there are pairs."""
    if config.num_ctas == 1:
        return config
    return config.derived((n, config.num_ctas * v if n == "BLOCK_M" else v) for n, v in config.kwargs)


def _option_fault(config: Config) -> str | None:
    """Say what is wrong with a config's options, whatever the problem, None if nothing is."""
    options = {name: value for name, value in config.kwargs if name in _OPTIONS}
    if len(options) > 1:
        return f"{' and '.join(options)} do not go together"
    if SPLIT_TAIL in options and (options[SPLIT_TAIL] is not True or not config["PERSISTENT"]):
        return f"{SPLIT_TAIL} must be True if it is there, and PERSISTENT with it"
    if config.num_ctas != (2 if options.get(PAIR) is True else 1) or options.get(PAIR, True) is not True:
        return f"num_ctas must be 2 with {PAIR} = True, else 1"
    return None


def _unsuited(config: Config, problem: MatmulProblem, device: Device) -> str | None:
    """Say why a config's option may not make a problem, None if it may."""
    if not has_options(config):
        return None
    if problem.itemsize != 2 or problem.totals:
        return f"{problem.dtype} is made without {', '.join(_OPTIONS)}"
    if config.num_ctas == 2 and parsed(device.triton) != _PAIRS_WITH:
        return f"pairs are made with triton 3.7, not {device.triton}"
    if config.num_ctas == 2 and device.processors < 2:
        return f"{device.name} has too few SMs for a pair"
    if splits(config):
        if -(-problem.k // config["BLOCK_K"]) * MOST_PARTS >= 2**31:
            return f"K = {problem.k} is more than is counted in parts"
        return None if tail(config, problem, device.processors).rest else "no tile is split"
    return None


def _configs() -> Iterator[Config]:
    for m, n, consumers, k in itertools.product((64, 128, 192, 256), _COLUMNS, (1, 2, 3), (64, 128)):
        rows = m // consumers
        if m % consumers or rows not in _ROWS or m * n > _LARGEST:
            continue
        if rows * n // 128 > REGISTERS[consumers] - 56:
            continue
        for stages, group, persistent in itertools.product((3, 4, 5, 6, 8, 10), (1, 8, 16), (False, True)):
            if (m + n) * k * stages > (2**18 if k == 128 else 2**17):
                continue
            for subtiles in (1, 2) if n >= 128 else (1,):
                kwargs = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "CONSUMERS": consumers, "GROUP_M": group}
                yield Config.of(4, stages, NAME, **kwargs, PERSISTENT=persistent, SUBTILES=subtiles)


def _all_configs() -> Iterator[Config]:
    """Yield all plain configs, then those with deep pipelines that split tiles or are of pairs."""
    yield from _configs()
    for plain in _configs():
        m, n, persistent = plain["BLOCK_M"], plain["BLOCK_N"], plain["PERSISTENT"]
        deep = plain.num_stages == 8 or (m + n) * (plain.num_stages + 2) > 1536
        whole = plain["SUBTILES"] == (2 if n >= 128 else 1)
        if plain["BLOCK_K"] != 64 or plain["GROUP_M"] > 8 or not (deep and whole):
            continue
        if persistent and m * n >= 128 * 64:
            yield replace(plain, kwargs=tuple(sorted((*plain.kwargs, (SPLIT_TAIL, True)))))
        if m * n >= 96 * 128:
            yield replace(plain, kwargs=tuple(sorted((*plain.kwargs, (PAIR, True)))), num_ctas=2)


def _main_columns(config: Config) -> int:
    """Return the largest power of two in BLOCK_N: the columns of its first accumulator."""
    return 1 << (config["BLOCK_N"].bit_length() - 1)


def shared_bytes(config: Config, problem: MatmulProblem) -> int:
    main = _main_columns(config)
    stored = config["BLOCK_M"] * (main // config["SUBTILES"] + config["BLOCK_N"] - main)
    staged = stage_bytes(config, problem) * config.num_stages
    barriers = _BARRIERS + (_PAIR_BARRIERS if config.num_ctas == 2 else 0)
    return int(staged + stored * ITEMSIZE[problem.out_dtype] + barriers)


def _config_fault(config: Config) -> str | None:
    free = ("BLOCK_M", "BLOCK_N", "CONSUMERS")
    reason = products.config_fault(plain(config), PARAMETERS, 384, 4, (2, 12), free) or _option_fault(config)
    if reason is not None:
        return reason
    consumers = config["CONSUMERS"]
    if consumers not in REGISTERS or config["BLOCK_M"] not in [rows * consumers for rows in _ROWS]:
        return f"BLOCK_M = {config['BLOCK_M']} is not 64 or 128 rows for each of 1 to 3 consumers"
    if config["BLOCK_N"] not in _COLUMNS:
        return f"BLOCK_N = {config['BLOCK_N']} is none of {_COLUMNS}"
    if config["BLOCK_K"] not in (32, 64, 128) or config["SUBTILES"] > 2:
        return "BLOCK_K must be 32, 64 or 128, SUBTILES 1 or 2"
    return "num_warps must be 4" if config.num_warps != 4 else None


def _most_words(config: Config, problem: MatmulProblem) -> int:
    """Return the registers of a thread that a tile's sums may take.

    A total takes as many again, but is only added to, and needs no other room except for scales. Gelu holds
    steps of many elements at a time: it would spill hundreds of bytes, as compiled, if tiles are stored by
    pointers, and sooner if the epilogue reads a matrix.
    """
    registers, fused = REGISTERS[config["CONSUMERS"]], problem.epilogue
    most = registers - 56
    if problem.totals:
        most = min(most, (registers - 32) // 2)
    pointers = problem.out_align < 16 or problem.n * ITEMSIZE[problem.out_dtype] % 16 != 0
    reads = "full" in (fused.bias, fused.residual)
    if splits(config) and pointers and reads:  # a second epilogue, of sums of parts
        most = min(most, registers * 9 // 16)
    if fused.activation == "gelu" and pointers:
        most = min(most, (registers - 40) // 2 if reads else registers * 9 // 16)
    return most


def illegal(config: Config, problem: MatmulProblem, device: Device) -> str | None:
    if device.nvidia != 90:
        return f"{device.name} has no warpgroup instructions of Hopper's kind"
    if (reason := _config_fault(config)) is not None:
        return reason
    if problem.itemsize > 2 or problem.dtype == "int8":  # Gluon's compiler has no instruction for these
        return f"{problem.dtype} is no floating type of 16 or 8 bits"
    if problem.itemsize == 1 and (problem.a_layout, problem.b_layout) != ("row", "column"):
        return f"a is {problem.a_layout}, b {problem.b_layout}: bytes must lie along K"
    if problem.totals and not problem.promoted and SCALE_K % config["BLOCK_K"]:
        return f"BLOCK_K = {config['BLOCK_K']} does not divide {SCALE_K}"
    if problem.promoted and parsed(device.triton) < (3, 7) and config["BLOCK_N"] not in _RIGHT_ON_3_6:
        return f"with Triton 3.6 promoted sums of 160 columns are NaN; right as tested are {_RIGHT_ON_3_6}"
    if problem.rights > 1:
        return "gated products are made by tile and descriptor"
    words = config["BLOCK_M"] // config["CONSUMERS"] * config["BLOCK_N"] // 128
    shared, most, made = shared_bytes(config, problem), _most_words(config, problem), tiles(config, problem)
    reason = reachable(problem) or products.late_fault(config, problem, device)
    reason = reason or _unsuited(config, problem, device)
    return reason or products.resource_fault(device, shared, words, most, made)


def is_dominated(config: Config, problem: MatmulProblem, device: Device) -> bool:
    whole = clustered(config)
    if products.is_disordered(whole, problem):
        return True
    at_once = device.processors // config.num_ctas
    if config["PERSISTENT"] and tiles(whole, problem) <= at_once and not splits(config):
        return True
    deeper = shared_bytes(config, problem) + 2 * stage_bytes(config, problem)
    if config.num_stages < 10 and deeper <= device.shared_memory:
        return True  # a pipeline is as deep as shared memory allows, or one stage less
    sides = (("BLOCK_M", 64 * config.num_ctas, problem.m), ("BLOCK_N", 32, problem.n))
    return any(whole[name] > least and whole[name] >= 2 * size for name, least, size in sides)


def resident(config: Config, problem: MatmulProblem, device: Device) -> int:
    return tma_programs_per_sm(device, shared_bytes(config, problem), 4 * config["CONSUMERS"] + 4)


def cost(config: Config, problem: MatmulProblem, device: Device) -> Program:
    return Program(
        resident(config, problem, device),
        multiply_clocks(config, problem, device) * slowdown(problem, device, k_major_copies(problem)),
        True,
        config["BLOCK_M"] * config["BLOCK_N"] * ITEMSIZE[problem.out_dtype],
    )


@functools.cache
def _swizzled(dtype: str, ctas: int = 1, split: int | None = None) -> Callable[[tuple[int, ...]], Any]:
    """Return the layout in shared memory of a block of this dtype, as a function of the block.

    `split`: the dimension of which each CTA of a pair has half; None: both have all.
    """
    gl = import_late("triton.experimental.gluon.language")  # a twentieth of a second
    kind = getattr(gl, _GLUON_DTYPES.get(dtype, dtype))
    pair = {"cga_layout": [[int(dim == split) for dim in range(4)]]} if ctas == 2 else {}
    return functools.cache(lambda block: gl.NVMMASharedLayout.get_default_for([*block], kind, **pair))


def _tile(
    seen: DescriptorView | None, dtype: str, rows: int, columns: int, ctas: int, split: bool
) -> Descriptor | None:
    """Return the descriptor of tiles of a CTA, or of a pair whose rows are `split`; None of no columns."""
    if seen is None or not columns:
        return None
    half = (3 if seen.transposed else 2) if split else None
    return seen.descriptor(rows * (ctas if split else 1), columns, _swizzled(dtype, ctas, half))


def work(call: MatmulCall, config: Config, processors: int, early: bool) -> Work:
    problem, ctas = call.problem, config.num_ctas
    moved = by_tma(call, clustered(config), 1, processors // ctas, early)
    consumers, main, depth = config["CONSUMERS"], _main_columns(config), config["BLOCK_K"]
    rows, rest = config["BLOCK_M"] // consumers, config["BLOCK_N"] - main
    promoted = 0  # blocks of K after which sums move from tensor cores to a total in fp32; 0 for never
    if problem.totals:
        promoted = max(1, (PROMOTED_EVERY if problem.promoted else SCALE_K) // depth)
    scratch, counters, grid = moved.scratch, 0, moved.grid
    split: dict[str, Any] = dict.fromkeys(("parts_ptr", "counters_ptr", "whole", "rest", "split"))
    if splits(config):
        made = tail(config, problem, processors)
        parts = Workspace("float32", max(1, made.rest * made.split) * config["BLOCK_M"] * config["BLOCK_N"])
        scratch = {**scratch, "parts": parts}
        counters, grid = max(1, made.rest) * consumers, (made.programs, 1, 1)
        split = {"parts_ptr": Buffer("parts"), "counters_ptr": Buffer(COUNTERS), **made._asdict()}
        del split["programs"]
    values = moved.args | split | {
        "a_desc": _tile(moved.a, call.dtype, rows, depth, ctas, True),
        "b_desc": _tile(moved.b, call.dtype, depth, main, ctas, False),
        "b_rest_desc": _tile(moved.b, call.dtype, depth, rest, ctas, False),
        "out_desc": _tile(moved.out, call.out_dtype, rows, main // config["SUBTILES"], ctas, True),
        "out_rest_desc": _tile(moved.out, call.out_dtype, rows, rest, ctas, True),
        "BLOCK_M": config["BLOCK_M"], "BLOCK_N": config["BLOCK_N"], "CTAS": ctas,
        "MAIN_N": main, "REGISTERS": REGISTERS[consumers], "STAGES": config.num_stages,
        "PROMOTE": promoted, "IN_PARTS": problem.promoted, SPLIT_TAIL: splits(config),
    }  # fmt: skip
    options = {"num_warps": config.num_warps, "launch_pdl": early}
    if ctas == 2:
        options["num_ctas"] = ctas
    step = step_of(matmul_warpgroups, grid, values, options)
    return Work((*moved.steps, step), scratch, counters)


def _numerics(config: Config, problem: MatmulProblem, device: Device) -> Numerics:
    """Return numerics; those of split tiles are never canonical: sizes and SMs decide the parts of K."""
    found = of_product(config, problem, device, specialised=True)
    return found._replace(parts=0) if splits(config) else found


FAMILY: Final = Family(
    MatmulProblem.op, NAME, matmul_warpgroups, _all_configs, illegal, is_dominated, cost, work,
    also=(repack,), resident=resident, options=_OPTIONS, numerics=_numerics, copies=True,
)  # fmt: skip
