"""Both kernels of groups compiled ahead of time: they compile, fit, and use the units they are made for."""

from dataclasses import replace

import pytest

from tests.ahead import NAMES, compiled
from tests.configs import of_groups, tile
from tritile.core.device import target_device
from tritile.core.problem import GroupedProblem
from tritile.families.grouped.family import shared_bytes, unreachable
from tritile.families.registry import FAMILIES
from tritile.families.space import illegal
from tritile.planning import model
from tritile.runtime import ahead

ROWS = GroupedProblem(64, 16384, 2048, 4096, "bfloat16", "bfloat16", b_layout="column")
PROBLEMS = (
    ROWS,
    replace(ROWS, b_layout="row", out_layout="column"),
    replace(ROWS, a_layout="column"),
    replace(ROWS, dtype="float32", out_dtype="float32", precision="tf32", groups=1000),
    replace(ROWS, n=1001, k=1003, out_align=2, a_align=2, b_align=2),
)
REACHED = [problem for problem in PROBLEMS if unreachable(problem) is None]
IEEE = replace(ROWS, dtype="float32", out_dtype="float32")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("problem", [*PROBLEMS, IEEE], ids=lambda problem: problem.label)
def test_by_pointers(problem, name):
    device = target_device(name)
    config = tile(64, 64, 32, stages=2)
    assert illegal(config, problem, device) is None
    taken = ahead.resources(ahead.compiled_for(problem, config, device))
    assert 0 < taken.registers <= 512
    assert taken.excess(device) is None


@pytest.mark.parametrize(
    "config", [of_groups(128, 128, 64, 8, 3), of_groups(64, 128, 64, persistent=False)], ids=str
)
@pytest.mark.parametrize("name", ["nvidia-h200", "sm_100"])
@pytest.mark.parametrize("problem", REACHED, ids=lambda problem: problem.label)
def test_by_descriptor(problem, name, config):
    device = target_device(name)
    if problem.dtype == "float32":
        config = of_groups(64, 128, 32, 4, 3, persistent=config["PERSISTENT"])
    assert illegal(config, problem, device) is None
    kernel = ahead.compiled_for(problem, config, device)
    taken = ahead.resources(kernel)
    assert taken.excess(device) is None
    assert shared_bytes(config, problem) <= taken.shared
    ptx = kernel.asm["ptx"]
    assert "cp.async.bulk.tensor" in ptx
    assert ("wgmma.mma_async" if name == "nvidia-h200" else "tcgen05.mma") in ptx
    stored = ".global.shared::cta" in ptx
    assert stored == (problem.out_layout == "row" and problem.out_align == 16)


def test_the_widest_tile_is_made_in_one_loop_without_spills():
    """The K loops of tiles are one, so that a tile's loads begin before the one ahead of it is stored."""
    kernel = compiled(ROWS, of_groups(128, 256, 64, 8, 3, subtiles=2))
    assert ahead.resources(kernel).spills == 0
    loops = [line for line in kernel.asm["ttgir"].splitlines() if "scf.for" in line]
    assert len([line for line in loops if "tensor<128x256xf32" in line]) == 1
    assert "ttng.async_tma_copy_local_to_global" in kernel.asm["ttgir"]


@pytest.mark.parametrize("name", NAMES)
def test_the_models_first_choice_compiles_without_spills(name):
    device = target_device(name)
    for problem in (ROWS, PROBLEMS[4]):
        assert ahead.compile_resources(problem, model.pick(problem, device), device).excess(device) is None


def test_every_config_is_legal_somewhere():
    """None is in the lists that nothing could ever run."""
    device = target_device("nvidia-h200")
    for configs in (family.configs for family in FAMILIES["grouped"].values()):
        legal = [c for c in configs if any(illegal(c, each, device) is None for each in PROBLEMS[:3])]
        assert len(legal) > len(configs) // 2
