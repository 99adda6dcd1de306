"""The formula of products: more work takes longer, and its picks come near the fastest that was timed."""

import gzip
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from tritile.choose import waves
from tritile.core.config import Config
from tritile.core.device import Device, target_device
from tritile.core.problem import GroupedProblem, MatmulProblem, problem_from_dict
from tritile.families.common.cost import Program, facts_of, product_us
from tritile.families.space import illegal

H200 = target_device("nvidia-h200")
SWEEPS = Path(__file__).parents[2] / "tuning" / "sweeps"
BLOCKS = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8, "SPLIT_K": 1}
CONFIG = Config.of(8, 3, "descriptor", **BLOCKS, PERSISTENT=False, SUBTILES=1)
PROGRAM = Program(resident=1, multiply=512.0, whole=True, stored=2.0 * 128 * 128, warps=8)


def product(m, n, k, **kinds):
    return MatmulProblem(1, m, n, k, **{"dtype": "bfloat16", "out_dtype": "bfloat16"} | kinds)


SQUARE = product(4096, 4096, 4096)


def us(problem=SQUARE, program=PROGRAM, device=H200, stages=3, **blocks):
    config = replace(CONFIG, num_stages=stages, kwargs=tuple(sorted((dict(CONFIG.kwargs) | blocks).items())))
    return product_us(config, facts_of(problem, device, copies=True), device, program)


@pytest.mark.parametrize(
    "more",
    [
        {"problem": product(8192, 4096, 4096)},
        {"problem": product(4096, 4096, 4160)},
        {"problem": product(4096, 4096, 4096, a_align=8)},  # copied first
        {"program": PROGRAM._replace(multiply=1024.0)},
        {"program": PROGRAM._replace(whole=False)},
        {"program": PROGRAM._replace(loads=100.0)},
        {"program": PROGRAM._replace(instructions=100.0)},
        {"program": PROGRAM._replace(warps=16)},
        {"program": PROGRAM._replace(stored=4.0 * 128 * 128)},
        {"device": replace(H200, clock_ghz=1.5)},
        {"device": replace(H200, memory_gbps=2400.0)},
        {"device": replace(H200, processors=100)},
        {"stages": 2},
    ],
    ids=str,
)
def test_what_is_more_takes_longer(more):
    assert us(**more) > us()


@pytest.mark.parametrize("target", ["h200", "a100", "4090", "b200", "mi300x"])
@pytest.mark.parametrize(
    "problem",
    [
        product(7, 1001, 3000, dtype="float32", out_dtype="float32", precision="tf32"),
        product(512, 512, 512, dtype="float64", out_dtype="float64"),
        GroupedProblem(8, 4096, 512, 1024, "bfloat16", "bfloat16"),
    ],
    ids=lambda problem: problem.label,
)
def test_picks_legal_within_gpu_limits(target, problem):
    device = target_device(target)
    config = waves.pick(problem, device)
    assert illegal(config, problem, device) is None
    floor = problem.bytes / (device.memory_gbps * 1e3)
    assert 0.8 * floor < waves.predict_us(config, problem, device) < 1e5


# A quarter of the sizes of a sweep, and half as much again as picks lose there.
@pytest.mark.parametrize(
    ("name", "lost"), [("h100/fp8", 0.08), ("h100/int8", 0.08), ("int4", 0.06), ("permute_4", 0.07)]
)
def test_picks_near_fastest_timed(name, lost):
    head, *lines = gzip.decompress((SWEEPS / f"{name}.jsonl.gz").read_bytes()).decode().splitlines()
    configs, device = map(json.loads(head).get, ("configs", "device"))
    device = Device.from_dict(device)
    configs, ratios = [Config.from_dict(each) for each in configs], []
    for line in map(json.loads, lines[::4]):
        problem = problem_from_dict(line["problem"])
        times = {configs[int(index)]: us for index, us in line["us"].items()}
        times = {config: us for config, us in times.items() if illegal(config, problem, device) is None}
        if times:
            pick = waves.likeliest(times, problem, device)
            ratios.append(math.log(times[pick] / min(times.values())))
    assert math.expm1(statistics.fmean(ratios)) < lost
