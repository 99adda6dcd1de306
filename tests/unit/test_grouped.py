"""Products of groups around their kernels: problems, loads, suites, and what is measured."""

import itertools
from dataclasses import replace

import pytest
import torch

import tritile
from tritile.choose import waves
from tritile.core.call import call_for
from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.core.problem import LOADS, GroupedProblem, ends_of
from tritile.errors import InvalidValueError, ShapeError, UnsupportedError
from tritile.families import launching
from tritile.families.grouped import kernel_tma
from tritile.families.grouped.family import FAR, tiles
from tritile.families.registry import FAMILIES
from tritile.families.space import illegal, legal_configs
from tritile.families.work import work_of
from tritile.lab import baselines
from tritile.tune.subject import answers
from tritile.tune.subject.operands import with_group_ends
from tritile.tune.suites import SHIPPED, find

pytestmark = pytest.mark.interpreted
H200 = target_device("nvidia-h200")
ROWS = GroupedProblem(64, 16384, 2048, 4096, "bfloat16", "bfloat16", b_layout="column")
A, B = torch.zeros(12, 8), torch.zeros(3, 8, 5)
OFFS = torch.tensor([4, 4, 12], dtype=torch.int32)


def test_a_plan_of_a_call():
    plan = tritile.plan(tritile.grouped_matmul, A, B, OFFS)
    assert plan.source == "interpreter"
    assert plan.problem == GroupedProblem(3, 12, 5, 8, "float32", "float32", b_align=4, out_align=4)
    far = tritile.plan(ROWS, device=H200)
    assert far.config == waves.pick(ROWS, H200)
    assert tritile.plan(tritile.grouped_matmul, B, B.mT.contiguous()).problem.op == "matmul"
    with pytest.raises(ShapeError, match="launches no kernel"):
        tritile.plan(tritile.grouped_matmul, A[:0], B, OFFS)


def test_figures_and_what_is_not_explained():
    rows = replace(ROWS, out_dtype="float32")
    assert rows.bytes == 2 * (16384 * 4096 + 64 * 4096 * 2048) + 4 * 16384 * 2048
    assert ROWS.flops == ROWS.even.flops == 2 * 16384 * 4096 * 2048
    assert ROWS.even.sizes == (64, 256, 2048, 4096)
    assert illegal(waves.pick(ROWS, H200), ROWS, H200) is None
    fp8 = replace(ROWS, dtype="float8_e4m3fn", scaled=True)
    assert "only torch" in illegal(waves.pick(ROWS, H200), fp8, H200)
    with pytest.raises(UnsupportedError, match=r"`problem\.even`"):
        tritile.explain(ROWS, device=H200)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("sizes", [(1, 5), (7, 100), (128, 65536), (512, 3)], ids=str)
def test_loads_share_all_there_is(sizes, load):
    groups, total = sizes
    ends = ends_of(load, groups, total)
    assert len(ends) == groups
    assert ends[-1] == total
    assert all(0 <= start <= end for start, end in itertools.pairwise((0, *ends)))


def test_loads_differ():
    even, skewed, sparse = (
        [b - a for a, b in itertools.pairwise((0, *ends_of(load, 128, 65536)))] for load in LOADS
    )
    assert set(even) == {512}
    assert max(skewed) > 16 * sorted(skewed)[64]
    assert sparse.count(0) == 96
    with pytest.raises(InvalidValueError, match="heavy"):
        ends_of("heavy", 2, 4)


@pytest.mark.parametrize("sizes", list(itertools.product((1, 5, 64), (1, 7, 300, 4096), (16, 128))), ids=str)
def test_there_are_programs_for_every_tile(sizes):
    """Of any groups: the worst leave one row in the last tile of each."""
    groups, total, block = sizes
    problem = replace(ROWS, groups=groups, m=total, n=1)
    bound = tiles(Config.of(BLOCK_M=block, BLOCK_N=16), problem)
    for used in {total, total // 2, 0}:
        ends, last = [], 0
        for g in range(groups):
            left = used - last
            last += left if g == groups - 1 else min(left, 1 + block * (left // groups // block))
            ends.append(last)
        made = sum(-(-(b - a) // block) for a, b in itertools.pairwise([0, *ends, total]))
        assert made <= bound
    assert bound <= -(-total // block) + min(groups, total)


def test_grid_within_processors():
    call = call_for(ROWS, lambda dtype, elements: torch.empty(0, dtype=getattr(torch, dtype), device="meta"))
    for config in legal_configs(ROWS, H200, "descriptor"):
        (step,) = work_of(call, config, 132, True).steps
        assert step.grid[1:] == (1, 1)
        assert step.grid[0] == 132 if config["PERSISTENT"] else step.grid[0] == tiles(config, ROWS)


def on_host(problem):
    """A call on random operands in host memory."""

    def make(dtype, elements):
        kind = getattr(torch, dtype)
        return torch.randn(elements).to(kind) if kind.is_floating_point else torch.zeros(elements, dtype=kind)

    return with_group_ends(call_for(problem, make))


SMALL = GroupedProblem(5, 48, 24, 40, "float32", "float32", precision="ieee")
TILE = Config.of(4, 2, "tile", BLOCK_M=32, BLOCK_N=32, BLOCK_K=32, GROUP_M=2)


def test_rows_of_no_group():
    call = on_host(SMALL)
    call.offs.tensor.clamp_(max=40)
    launching.run_interpreted(call, TILE)
    assert answers.norm_error(call) < 1e-6
    call.out.tensor[-1] = 1e-30
    assert answers.norm_error(call) == float("inf")


@pytest.mark.parametrize("layout", ["NN", "NT"])
def test_torch_answers_the_same_calls(layout):
    layouts = {"N": "row", "T": "column"}
    sides = {"a_layout": layouts[layout[0]], "b_layout": layouts[layout[1]]}
    problem = replace(SMALL, dtype="bfloat16", out_dtype="bfloat16", precision="ieee")
    call = on_host(replace(problem, **sides))
    (baseline,) = baselines.torch_baselines(call).values()
    baselines.into_out(baseline)(call)
    assert answers.answer_error(call) < 4e-3


def test_the_suite_that_ships():
    cases = find(["grouped"], SHIPPED)
    assert {case.load for case in cases} == set(LOADS)
    assert all(min(case.problem.a_align, case.problem.b_align) == 16 for case in cases)
    for wrong in ({"load": "heavy"}, {"dtype": "int8"}, {"shape": (1,)}, {"op": "matmul"}):
        with pytest.raises(InvalidValueError):
            replace(cases[0], **wrong)
    assert kernel_tma.FAR == FAR  # rows that a cut descriptor never reaches


def test_every_config_is_legal_somewhere():
    """None is in the lists that nothing could ever run."""
    somewhere = ROWS, replace(ROWS, b_layout="row", out_layout="column"), replace(ROWS, a_layout="column")
    for configs in (family.configs for family in FAMILIES["grouped"].values()):
        legal = [c for c in configs if any(illegal(c, each, H200) is None for each in somewhere)]
        assert len(legal) > len(configs) // 2
