"""Search proposes; a replay of remembered times, with no GPU, says whether it proposes well."""

import warnings

import pytest

from tritile import model, table
from tritile.config import Config
from tritile.device import target_device
from tritile.launch import digests
from tritile.problem import MatmulProblem, PermuteProblem
from tritile.space import illegal
from tritile.trial import Trial
from tritile.tune import search, tuner

H200 = target_device("nvidia-h200")
PROBLEMS = [
    MatmulProblem(1, 4096, 4096, 4096, "bfloat16", "bfloat16"),
    MatmulProblem(1, 1, 4096, 4096, "bfloat16", "bfloat16", b_layout="column"),
    MatmulProblem(1, 1001, 1003, 1007, "float32", "float32", a_align=4, b_align=4, out_align=4),
    PermuteProblem.turned(1, 8191, 8193, 1),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.label)
def test_the_opening_is_legal_varied_and_holds_the_models_pick(problem):
    opening = search.opening(problem, H200, 24)
    assert len(opening) == len(set(opening)) == 24
    assert all(illegal(config, problem, H200) is None for config in opening)
    assert model.pick(problem, H200) in opening
    assert len({(config["BLOCK_M"], config["BLOCK_N"]) for config in opening}) >= 4


def test_the_opening_begins_with_what_is_known_to_be_good():
    problem = PROBLEMS[0]
    known = model.ranked(problem, H200)[-1]
    opening = search.opening(problem, H200, 24, known=[known])
    assert opening[0] == known
    assert len(opening) == len(set(opening)) == 24
    assert model.pick(problem, H200) in opening


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.label)
def test_a_refinement_is_new_legal_and_one_step_away(problem):
    best, *tried = search.opening(problem, H200, 5)
    steps = search.refinement([best], [best, *tried], problem, H200, 8)
    assert 0 < len(steps) <= 8
    assert not {best, *tried} & set(steps)
    for step in steps:
        assert illegal(step, problem, H200) is None
        differing = [pair for pair in step.kwargs if pair not in best.kwargs]
        differing += [0] * (step.num_warps != best.num_warps) + [0] * (step.num_stages != best.num_stages)
        rows = {"BLOCK_M", "CONSUMERS"}  # a warpgroup more brings its rows
        assert len(differing) == 1 or {pair[0] for pair in differing} == rows


def test_refinement_climbs_a_replayed_hill():
    """Times that fall towards one config: steps from the opening reach it."""
    problem = PROBLEMS[0]
    goal = {"BLOCK_M": 64, "BLOCK_N": 256, "BLOCK_K": 32}

    def us(config):
        return 1 + sum(abs(config[name].bit_length() - value.bit_length()) for name, value in goal.items())

    times = {config: us(config) for config in search.opening(problem, H200, 2)}
    for _ in range(12):
        best = sorted(times, key=lambda config: (times[config], config.key))[:2]
        steps = search.refinement(best, times, problem, H200, 40)
        times |= {config: us(config) for config in steps}
    assert min(times.values()) == 1


def test_the_shipped_table_is_whole_and_legal():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table._shipped.cache_clear()
        shipped = table.shipped(H200)
    assert shipped is not None
    assert shipped.measured
    assert len(shipped.entries) >= 290
    for entry in shipped.entries:
        assert illegal(entry.config, entry.problem, H200) is None
        assert entry.us > 0
    used = {table.kernel_name(entry.problem.op, entry.config.family) for entry in shipped.entries}
    assert used <= set(shipped.kernels)
    assert shipped.kernels.items() <= digests().items()


def test_the_best_of_a_family_that_is_not_far_behind_is_refined_too():
    problem = PermuteProblem.turned(1, 4095, 4097, 1)

    def leaders(times):
        session = object.__new__(tuner._Session)
        session.trials = {config: Trial(problem, config, us) for config, us in times.items()}
        return session.leaders()

    tiles = [Config.of(4, 1, "tile", BLOCK_M=64, BLOCK_N=n, GROUP_M=1) for n in (16, 32, 64)]
    packed = [Config.of(4, 1, "packed", BLOCK_M=64, BLOCK_N=n, GROUP_M=1) for n in (32, 64)]
    near = dict(zip([*tiles, *packed], (10.0, 11.0, 12.0, 12.5, 12.4), strict=True))
    assert leaders(near) == [tiles[0], tiles[1], packed[1]]
    assert leaders(near | {packed[1]: 14.0, packed[0]: 15.0}) == tiles[:2]
    assert leaders({packed[0]: 1.0}) == [packed[0]]
    assert leaders({packed[0]: None}) == []
