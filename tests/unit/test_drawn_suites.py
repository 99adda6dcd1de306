"""The suites whose sizes nobody chose: what is drawn, by which seed, and what their lines come to."""

import json
import math

import rows
import unseen
from tritile.lab.report import results
from tritile.tune.calibrate.draw import MOVED, OPERATIONS


def test_cases_follow_from_the_seed_alone():
    cases = unseen.draw("a tree", 40, 20)
    assert cases == unseen.draw("a tree", 40, 20)
    assert not set(cases) & set(unseen.draw("another tree", 40, 20))


def test_products_are_drawn_in_range_and_in_both_layouts():
    cases = [case for case in unseen.draw("range", 400, 0) if case.op == "matmul"]
    assert {case.layout for case in cases} == {"NN", "NT"}
    for case in cases:
        assert 1 <= case.m <= 16384
        assert OPERATIONS[0] <= case.problem.flops <= OPERATIONS[1]
    even = [case for case in cases if case.n % 64 == case.k % 64 == 0]
    odd = [case for case in cases if case.n % 8 and case.k % 8]
    assert 0.5 < len(even) / len(cases) < 0.7
    assert 0.1 < len(odd) / len(cases) < 0.25
    logs = [math.log2(case.m) for case in cases]
    assert sum(log < 7 for log in logs) / len(logs) > 0.3  # few rows are as likely as many


def test_permutations_are_drawn_in_range_and_move_something():
    cases = unseen.draw("moved", 0, 150)
    assert len({case.dtype for case in cases}) == 5
    assert {len(case.shape) for case in cases} == {2, 3, 4, 5}
    for case in cases:
        assert MOVED[0] <= case.problem.bytes / 2 <= MOVED[1]
        assert case.dims != tuple(range(len(case.dims)))


def test_the_seed_is_that_of_the_tree_or_the_one_given(monkeypatch):
    monkeypatch.setenv("TRITILE_SEED", "given")
    assert unseen.seed() == "given"


def test_a_line_of_rows_is_summed_up_and_passed_over_by_reports(tmp_path):
    line = {
        "op": "rows", "process": "from nothing", "mode": "cached", "kernels": 3, "compile_s": 4.5,
        "first_ms": [100.0, 2.0, 1.0], "second_ms": [0.1, 0.1, 0.1], "ratio_torch": [0.9, 1.0, 1.1],
    }  # fmt: skip
    text = rows.summary(line)
    for part in ("0.10 s in all", "median 2.00 ms", "worst 100.0", "3 kernels in 4.5 s", "worst 0.900"):
        assert part in text
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(line) + "\n")
    assert results.read(path) == []
