"""Spaces, the search of them, and replays of recorded times that say how well it searches."""

import functools
import itertools
import math
import statistics
from pathlib import Path
from typing import NamedTuple

import pytest

from figures import recorded
from tritile import Space, errors
from tritile.choose import waves
from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import MatmulProblem
from tritile.families.registry import FAMILIES
from tritile.families.space import illegal, legal_configs
from tritile.tune.subject.problem import ProblemSpace
from tritile.tuner.measure.engine import Rules, proposed
from tritile.tuner.search import OPENING, Listed, exhaustive, leaders, screening

H200 = target_device("nvidia-h200")
WHOLE = Path(__file__).parents[2] / "tuning" / "trials" / "nvidia-h200-whole.sqlite3.gz"
SQUARE = MatmulProblem(1, 4096, 4096, 4096, "bfloat16", "bfloat16")
PROBLEMS = [
    SQUARE,
    MatmulProblem(1, 1, 4096, 4096, "bfloat16", "bfloat16", b_layout="column"),
    MatmulProblem(1, 1001, 1003, 1007, "float32", "float32", a_align=4, b_align=4, out_align=4),
    PermuteProblem.transposed(1, 8191, 8193, 1),
]
BLOCKS = {"BLOCK_M": (16, 32, 64, 128), "BLOCK_N": (16, 32, 64, 128), "num_warps": (2, 4, 8)}


def hill(config):
    """Times that fall towards 64 x 32 with 4 warps."""
    goal = {"BLOCK_M": 6, "BLOCK_N": 5}
    away = sum(abs(math.log2(config[name]) - place) for name, place in goal.items())
    return 10.0 + away + abs(math.log2(config.num_warps) - 2)


# --- a space that a kernel's author writes down


def test_space_of_all_combinations():
    space = Space(BLOCKS, where=lambda c: c["BLOCK_M"] * c["BLOCK_N"] <= 2048)
    configs = list(space.configs())
    wanted = {
        Config.of(w, BLOCK_M=m, BLOCK_N=n)
        for m in BLOCKS["BLOCK_M"]
        for n in BLOCKS["BLOCK_N"]
        for w in BLOCKS["num_warps"]
        if m * n <= 2048
    }
    assert len(configs) == len(wanted)
    assert set(configs) == wanted
    assert all(config in space for config in configs)
    assert Config.of(4, BLOCK_M=128, BLOCK_N=128) not in space  # against the condition
    assert Config.of(4, BLOCK_M=16, BLOCK_N=24) not in space  # not a value
    assert Config.of(4, BLOCK_M=16) not in space
    assert Config.of(4, 5, BLOCK_M=16, BLOCK_N=16) not in space  # stages are not the space's to set
    assert Config.of(4, BLOCK_M=16, BLOCK_N=16, OTHER=1) not in space


def test_neighbours_one_value_away():
    space = Space({**BLOCKS, "EVEN": (False, True)}, where=lambda c: c["BLOCK_M"] >= c["BLOCK_N"])
    at = Config.of(4, BLOCK_M=64, BLOCK_N=64, EVEN=False)
    assert set(space.neighbours(at)) == {
        Config.of(4, BLOCK_M=128, BLOCK_N=64, EVEN=False),
        Config.of(4, BLOCK_M=64, BLOCK_N=32, EVEN=False),
        Config.of(2, BLOCK_M=64, BLOCK_N=64, EVEN=False),
        Config.of(8, BLOCK_M=64, BLOCK_N=64, EVEN=False),
        Config.of(4, BLOCK_M=64, BLOCK_N=64, EVEN=True),
    }


def test_unknown_condition_has_hint():
    wanted = r"where names 'BLOK_M' \(did you mean 'BLOCK_M'\?\): expected parameters of the space"
    with pytest.raises(errors.InvalidValueError, match=wanted):
        Space(BLOCKS, where=lambda c: c["BLOK_M"] > 16)
    with pytest.raises(KeyError):  # of a dictionary of the condition's own
        Space(BLOCKS, where=lambda c: {}[c["BLOCK_M"]])


def test_opening_is_spread():
    space = Space(BLOCKS)
    opening = space.opening(12)
    assert len(opening) == len(set(opening)) == 12
    assert opening[0] == Config.of(4, BLOCK_M=64, BLOCK_N=64)
    for name in ("BLOCK_M", "BLOCK_N"):
        assert {config[name] for config in opening} == set(BLOCKS[name])
    assert {config.num_warps for config in opening} == set(BLOCKS["num_warps"])
    assert set(space.opening(1000)) == set(space.configs())
    options = Space({"B": (1,), "num_stages": (2, 5), "maxnreg": (None, 128), "num_ctas": (1, 2)})
    assert len({(c.num_stages, c.maxnreg, c.num_ctas) for c in options.configs()}) == 8
    assert all(c.kwargs == (("B", 1),) and c.num_warps == 4 for c in options.configs())
    rare = Space(BLOCKS, where=lambda c: c["BLOCK_M"] == c["BLOCK_N"] == 128)
    assert set(rare.opening(24)) == set(rare.configs())


def test_large_space_is_lazy():
    space = Space({name: range(1, 11) for name in "ABCDEF"})
    first, second = itertools.islice(space.configs(), 2)
    assert first == Config.of(**dict.fromkeys("ABCDEF", 1))
    assert second["F"] == 2
    assert replay(space, dict.fromkeys(space.opening(64), 1.0)).tried == OPENING


@pytest.mark.parametrize(
    ("parameters", "where", "told"),
    [
        ({}, None, "parameters by name"),
        ([("B", (1, 2))], None, "parameters by name"),
        ({"B": ()}, None, "'B' has no values"),
        ({"B": 4}, None, "'B'.*not a list"),
        ({"B": "abc"}, None, "'B'.*not a list"),
        ({"B": (1, 2, 1)}, None, "'B' has a value twice"),
        ({"B": (1, [2])}, None, "B = "),
        ({"B": (1, math.nan)}, None, "B = nan"),
        ({"a b": (1,)}, None, "'a b' is not a name"),
        ({3: (1,)}, None, "3 is not a name"),
        ({"family": ("x",)}, None, "'family'"),
        ({"num_warps": (3,)}, None, "num_warps = 3"),
        ({"num_warps": ("4",)}, None, "num_warps = '4'"),
        ({"maxnreg": (1000,)}, None, "maxnreg = 1000"),
        ({"A": range(1001), "B": range(1000)}, None, "1,001,000 combinations"),
        ({"A": (1, 2)}, lambda c: c["A"] > 2, "none of 2 combinations"),
    ],
)
def test_what_is_no_space_is_told(parameters, where, told):
    with pytest.raises(errors.InvalidValueError, match=told):
        Space(parameters, where)


# --- a list of configs


def test_list_tried_in_order():
    configs = [Config.of(BLOCK=b) for b in (512, 64, 128, 256)]
    listed = Listed([*configs, configs[0]])
    assert listed.configs() == configs
    assert configs[3] in listed
    assert Config.of(2, BLOCK=64) not in listed
    assert proposed(listed, {}, Rules(batch=3)) == configs[:3]
    assert proposed(listed, dict.fromkeys(configs[:3], 1.0), Rules(batch=3, most=1)) == configs[3:]
    with pytest.raises(errors.InvalidValueError, match="one or more"):
        Listed([])


# --- our own problems


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.label)
def test_problem_space_legal_and_ordered(problem):
    space = ProblemSpace(problem, H200)
    opening = space.opening(OPENING)
    assert list(space.configs()) == waves.ranked(problem, H200)
    assert set(space.configs()) == set(legal_configs(problem, H200))
    times = [waves.predict_us(config, problem, H200) for config in space.configs()]
    assert times == sorted(times)
    assert 0 < times[0] <= times[-1] < math.inf
    assert len(opening) == len(set(opening)) == OPENING
    assert waves.pick(problem, H200) in opening
    assert len({waves.shape_of(config) for config in opening}) >= 4
    for config in opening[:4]:
        steps = space.neighbours(config)
        assert len(steps) >= 4
        assert config not in steps
        predicted = [waves.predict_us(step, problem, H200) for step in steps]
        assert predicted == sorted(predicted)
        for step in steps:
            assert step in space
            assert illegal(step, problem, H200) is None
            differing = {name for name, value in step.kwargs if value != config[name]}
            differing |= {n for n in ("num_warps", "num_stages") if getattr(step, n) != getattr(config, n)}
            # A warpgroup more brings its rows.
            assert len(differing) == 1 or differing == {"BLOCK_M", "CONSUMERS"}


def test_opening_begins_with_known():
    good, bad = waves.ranked(SQUARE, H200)[-1], Config.of(BLOCK=3)
    space = ProblemSpace(SQUARE, H200, [bad, good, good])
    opening = space.opening(OPENING)
    assert opening[0] == good
    assert len(opening) == len(set(opening)) == OPENING
    assert waves.pick(SQUARE, H200) in opening
    assert bad not in space


# --- the search


class Recorded:
    """Restrict a space to the configs whose time is on record."""

    def __init__(self, space, recorded):
        self.space, self.recorded = space, recorded

    def configs(self):
        return [config for config in self.space.configs() if config in self.recorded]

    def opening(self, count):
        wanted = count
        while True:
            opening = self.space.opening(wanted)
            found = [config for config in opening if config in self.recorded][:count]
            if len(found) == count or len(opening) < wanted:
                return found
            wanted *= 2

    def neighbours(self, config):
        return [step for step in self.space.neighbours(config) if step in self.recorded]

    def __contains__(self, config):
        return config in self.recorded


class Replayed(NamedTuple):
    """Hold a search's outcome; `regret` is the time found over the fastest on record, less 1."""

    best: Config
    regret: float
    tried: int


def replay(space, recorded, rules=Rules()):  # noqa: B008
    """Search until nothing is proposed, against times on record: infinity for what failed."""
    offered, tried = Recorded(space, recorded), {}
    while batch := proposed(offered, tried, rules):
        assert set(batch) <= recorded.keys() - tried.keys()
        assert len(batch) == len(set(batch)) <= rules.batch
        tried |= {config: recorded[config] for config in batch}
    best = min(tried, key=lambda config: (tried[config], config.key))
    return Replayed(best, tried[best] / min(recorded.values()) - 1, len(tried))


@pytest.fixture
def untiring(monkeypatch):
    """Let a search go on, however little gain it expects."""
    monkeypatch.setattr("tritile.tuner.measure.engine.ENOUGH", 0.0)


@pytest.mark.parametrize("strategy", [screening, exhaustive])
def test_search_is_pure_and_descends(strategy, untiring):
    space = Space(BLOCKS)
    times = {config: hill(config) for config in space.configs()}
    found = replay(space, times, Rules(exhaustive=strategy is exhaustive, batch=7))
    assert (found.best, found.regret) == (Config.of(4, BLOCK_M=64, BLOCK_N=32), 0.0)
    assert replay(space, times, Rules(batch=7, most=24)).tried == 24
    tried = dict(list(times.items())[:20])
    assert strategy(space, tried, 5) == strategy(space, dict(tried), 5)
    assert len(tried) == 20
    assert strategy(space, times, 5) == []


def test_failing_configs_not_followed(untiring):
    space = Space(BLOCKS)
    times = {c: math.inf if c["BLOCK_M"] > 32 else hill(c) for c in space.configs()}
    assert replay(space, times).regret == 0.0
    space = Space({"B": range(1, 101)})
    times = {c: 5.0 if c["B"] == 97 else math.inf for c in space.configs()}
    assert Config.of(B=97) not in space.opening(OPENING)
    assert replay(space, times).best["B"] == 97


def test_screening_near_families():
    tiles = [Config.of(4, 1, "tile", BLOCK_M=64, BLOCK_N=n, GROUP_M=1) for n in (16, 32, 64)]
    boxes = [Config.of(4, 1, "box", BLOCK=4096, RUN=64, READ=n) for n in (4, 16)]
    near = dict(zip([*tiles, *boxes], (10.0, 11.0, 12.0, 12.5, 12.4), strict=True))
    assert leaders(near) == [tiles[0], tiles[1], boxes[1]]
    assert leaders(near | {boxes[1]: 14.0, boxes[0]: 15.0}) == tiles[:2]
    assert leaders({boxes[0]: 1.0}) == [boxes[0]]
    assert leaders({boxes[0]: math.inf}) == []


# --- recorded times of whole spaces


@pytest.mark.slow
def test_screening_of_recorded_spaces(monkeypatch):
    """Bounds are what was measured, with a little slack. Without steps from the leaders, one is exceeded."""
    monkeypatch.setattr(waves, "ranked", functools.cache(waves.ranked))
    specialised = FAMILIES["matmul"]["warpgroups"]  # recorded without its options
    plain = [each for each in specialised.configs if not {*specialised.options} & {*dict(each.kwargs)}]
    monkeypatch.setitem(vars(specialised), "configs", tuple(plain))
    recordings = recorded(WHOLE, failures=True)
    assert len(recordings) == 14
    whole = [(ProblemSpace(problem, H200), times) for problem, times in recordings.items()]

    def is_within():
        found = [replay(space, times, Rules(most=64)) for space, times in whole]
        regrets, tried = [run.regret for run in found], [run.tried for run in found]
        lost = statistics.median(regrets) <= 0.001 and statistics.mean(regrets) <= 0.002
        return lost and max(regrets) <= 0.015 and statistics.median(tried) <= 40

    assert is_within()
    monkeypatch.setattr("tritile.tuner.measure.engine.screening", exhaustive)
    assert not is_within()
