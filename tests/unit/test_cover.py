"""Cover: the fewest configs that serve every problem, exactly, and none that was not measured there."""

import itertools
import random
from pathlib import Path

import pytest

from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.core.problem import MatmulProblem
from tritile.errors import InvalidValueError
from tritile.lab.report import recorded
from tritile.lab.report.cover import careful_us, covered, fewest
from tritile.planning.table import Entry
from tritile.planning.trial import Trial, rank

H200 = target_device("nvidia-h200")
TRIALS = Path(__file__).parents[2] / "tuning" / "trials" / "nvidia-h200-2.sqlite3.gz"
CONFIGS = [Config.of(BLOCK=1 << place) for place in range(8)]
PROBLEMS = [MatmulProblem(1, m, 64, 64, "float16", "float16") for m in range(1, 9)]


def checked(problem, config, us, **rest):
    return Trial(problem, config, us, error=0.0, **rest)


@pytest.mark.parametrize("seed", range(20))
def test_no_smaller_set_serves_all(seed):
    draw = random.Random(seed)
    sets = [draw.sample(CONFIGS, draw.randint(1, 4)) for _ in range(8)]
    found = fewest(sets)
    assert all(found & set(own) for own in sets)
    for smaller in itertools.combinations(CONFIGS, len(found) - 1):
        assert not all(set(smaller) & set(own) for own in sets)


def test_nothing_is_served_by_nothing():
    assert fewest([]) == set()
    assert covered([], [], 0.02).entries == ()


def test_each_problem_gets_the_fastest_kept_config_measured_on_it():
    a, b, c = CONFIGS[:3]
    first, second, third, predicted = PROBLEMS[:4]
    entries = [
        Entry(first, a, 10.0),
        Entry(second, b, 20.0),
        Entry(third, c, 30.0),
        Entry(predicted, c, None),
    ]
    trials = [
        checked(first, a, 10.0),
        checked(first, c, 10.15),
        checked(second, b, 20.0),
        checked(second, c, 20.1),
        checked(third, c, 30.0),
        checked(third, a, 31.0),
    ]
    found = covered(entries, trials, 0.02)
    assert [(entry.config, entry.us) for entry in found.entries] == [
        (c, 10.15),
        (c, 20.1),
        (c, 30.0),
        (c, None),
    ]
    assert (found.before, found.after) == (3, 1)
    assert found.worst == pytest.approx(0.015)
    assert found.mean == pytest.approx((0.015 + 0.005) / 4)
    kept = covered(entries, trials, 0.0)
    assert kept.entries == tuple(entries)
    assert (kept.after, kept.worst, kept.mean) == (3, 0.0, 0.0)
    with pytest.raises(InvalidValueError, match="tolerance"):
        covered(entries, trials, -0.01)


def test_a_quick_look_counts_for_less_than_a_checked_time():
    first, second, a, b = *PROBLEMS[:2], *CONFIGS[:2]
    entries = [Entry(first, a, 10.0), Entry(second, b, 10.0)]
    quick = Trial(first, b, 10.1, spread=0.04)
    assert careful_us(quick) == pytest.approx(10.302)
    assert covered(entries, [quick], 0.02).after == 2
    assert covered(entries, [checked(first, b, 10.1, spread=0.04)], 0.02).after == 1
    failed = Trial(first, b, 10.1, failure="wrong answer", error=0.0)
    assert covered(entries, [failed], 0.02).after == 2


def test_two_percent_spare_many_configs_of_a_recorded_tuning():
    trials = [trial for trial in recorded.trials(TRIALS, H200) if trial.works]
    best = {}
    for trial in sorted(trials, key=rank):
        best.setdefault(trial.problem, Entry(trial.problem, trial.config, trial.us))
    found = covered(list(best.values()), trials, 0.02)
    measured = {(trial.problem, trial.config): trial.us for trial in trials}
    assert all(measured[entry.problem, entry.config] == entry.us for entry in found.entries)
    assert (len(found.entries), found.before, found.after) == (262, 138, 83)
    assert 0.0 < found.mean < 0.005
    assert found.worst <= 0.02
