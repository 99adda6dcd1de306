"""The suites whose sizes nobody chose: what is drawn, by which seed, and what their lines come to."""

import pytest

from tests.commands import run
from tritile.core.config import Config
from tritile.core.device import TARGETS
from tritile.core.settings import cache_dir, table_path
from tritile.errors import InvalidValueError
from tritile.lab import bench, drawn, results
from tritile.lab.results import Measurement
from tritile.planning import plans
from tritile.planning.classes import MOVED, OPERATIONS


def test_products_are_drawn_in_range_and_in_both_layouts():
    cases = drawn.draw("range", 400, 0)
    assert cases == drawn.draw("range", 400, 0)
    assert not set(cases) & set(drawn.draw("another tree", 400, 0))
    assert {case.layout for case in cases} == {"NN", "NT"}
    for case in cases:
        assert 1 <= case.m <= 16384
        assert OPERATIONS[0] <= case.problem.flops <= OPERATIONS[1]
    even = [case for case in cases if case.n % 64 == case.k % 64 == 0]
    odd = [case for case in cases if case.n % 8 and case.k % 8]
    assert 0.5 < len(even) / len(cases) < 0.7
    assert 0.1 < len(odd) / len(cases) < 0.25
    assert sum(case.m < 128 for case in cases) / len(cases) > 0.3  # few rows are as likely as many


def test_permutations_are_drawn_in_range_and_move_something():
    cases = drawn.draw("moved", 0, 150)
    assert len({case.dtype for case in cases}) == 5
    assert {len(case.shape) for case in cases} == {2, 3, 4, 5}
    for case in cases:
        assert MOVED[0] <= case.problem.bytes / 2 <= MOVED[1]
        assert case.dims != tuple(range(len(case.dims)))


def test_sizes_of_a_seed_stay_what_they_were():
    """A line names its seed: anyone can draw its sizes again."""
    first, second, *_ = drawn.draw("9ca5e47a185f8357d8edac32ed1f0a2dc3da615c")
    assert (first.m, first.n, first.k, first.layout) == (13763, 5392, 1552, "NN")
    assert (second.m, second.n, second.k, second.layout) == (375, 201, 1141, "NT")


def test_the_seed_is_the_one_given_or_follows_from_the_files(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITILE_SEED", raising=False)
    monkeypatch.setattr(drawn, "_PACKAGE", tmp_path)
    (tmp_path / "a.py").write_text("A = 1\n")
    first = drawn.seed_of()
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").write_text("compiled")
    assert drawn.seed_of() == first
    (tmp_path / "a.py").write_text("A = 2\n")
    assert drawn.seed_of() != first
    monkeypatch.setenv("TRITILE_SEED", "set")
    assert drawn.seed_of() == "set"


def test_further_draws_have_seeds_of_their_own(monkeypatch):
    monkeypatch.setenv("TRITILE_SEED", "given")
    seeds = [drawn.seed_of(number) for number in (1, 2, 3)]
    assert len({seed[:8] for seed in seeds}) == 3  # as tables name them
    assert seeds == list(drawn.draws([1, 2, 3]))
    (cases,) = drawn.draws([2], "NT bfloat16").values()
    assert cases == [case for case in drawn.draw(seeds[1]) if case.layout == "NT"]
    with pytest.raises(InvalidValueError, match="no drawn case"):
        drawn.draws([1], "nothing")


def test_what_was_remembered_or_pinned_does_not_count(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITILE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITILE_TABLE", str(tmp_path / "table.json"))
    with drawn.nothing_remembered():
        (case, *_), inside = drawn.aligned(drawn.draw("a tree")), cache_dir()
        assert inside != tmp_path
        assert table_path() is None
        chosen = plans.plan_for(case.problem, TARGETS["nvidia-h200"], "cached")
    assert (cache_dir(), table_path()) == (tmp_path, tmp_path / "table.json")
    assert not inside.exists()
    assert chosen.source == "predicted"


def test_what_calls_of_drawn_cases_launch_is_compiled(monkeypatch):
    compiled, device = [], TARGETS["nvidia-h200"]
    monkeypatch.setattr(drawn, "compile_calls", lambda calls, device: compiled.append(calls))
    cases = drawn.draw("a tree", 3, 2)
    drawn.compile_all(cases, device)
    (calls,) = compiled
    pairs = [(config, problem) for config, problems in calls.items() for problem in problems]
    assert {problem: config for config, problem in pairs} == {
        case.problem: plans.plan_for(case.problem, device, "cached").config for case in cases
    }
    drawn.compile_all(cases, TARGETS["gfx942"])  # whose kernels are not compiled ahead
    assert len(compiled) == 1


def test_the_command_draws_and_searches_some_of_the_aligned_products(monkeypatch, tmp_path):
    compiled, asked = [], {}

    def measured(case, inductor, log):
        asked[case] = inductor
        assert cache_dir() != tmp_path / "cache"
        return Measurement(
            1.0, 2.0, 3.0 if inductor else None, 0.0, 0.0, 0.0, None, Config.of(BLOCK_M=64), "predicted"
        )

    monkeypatch.setenv("TRITILE_SEED", "given")
    monkeypatch.setenv("TRITILE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("tritile.core.device.current_gpu", lambda: TARGETS["nvidia-h200"])
    monkeypatch.setattr(bench, "measured", measured)
    monkeypatch.setattr(bench, "_host_calls", lambda: [])
    monkeypatch.setattr(drawn, "compile_all", lambda cases, device: compiled.append(list(cases)))
    monkeypatch.setattr(drawn, "SEARCHED", 5)
    words = ["--suite", "unseen", "--draw", "1", "--draw", "2", "--inductor"]
    done = run("bench", *words, "--output", tmp_path, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "against torch" in done.stdout
    assert "against inductor" in done.stdout
    by_draw = [drawn.draw(drawn.seed_of(number)) for number in (1, 2)]
    assert compiled == by_draw
    assert set(asked) == {case for cases in by_draw for case in cases}
    searched = [case for case, inductor in asked.items() if inductor]
    assert searched == [case for cases in by_draw for case in drawn.aligned(cases)[:5]]
    lines = results.read(tmp_path / "unseen.jsonl", pytest.fail)
    assert [line["env"]["seed"] for line in (lines[0], lines[-1])] == ["given", drawn.seed_of(2)]
    assert len(lines) == sum(map(len, by_draw))
