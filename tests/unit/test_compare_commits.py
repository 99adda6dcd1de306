"""The comparison of two checkouts: which problems are timed, and how turns become a ratio; no GPU."""

import pytest

import compare_commits
from tritile.tune import suites


@pytest.mark.parametrize("suite", ["square", "llm", "ragged", "epilogue"])
def test_every_product_of_a_suite_is_posed_once(suite):
    found = list(compare_commits.problems(suite))
    assert len({str(problem) for problem in found}) == len(found) > 20
    assert all(min(problem[side] for side in "mnk") > 0 for problem in found)


@pytest.mark.parametrize(
    ("suite", "op"), [("permute", "permute"), ("grouped", "grouped"), ("weights", "linear_quantized")]
)
def test_so_is_every_other_problem(suite, op):
    found, cases = (
        list(compare_commits.problems(suite)),
        suites.load(compare_commits.SUITES / f"{suite}.toml"),
    )
    assert {problem["op"] for problem in found} == {op}
    assert len({str(problem) for problem in found}) == len(found) == len(cases)


def test_sides_take_turns_and_the_ratio_is_of_the_same_round():
    """Slow both sides down in the second round: the ratio stays."""
    order = []

    def side(name, times):
        def answer(problem=None):
            order.append((name, problem is not None))
            return 1.0 if problem else times.pop(0)

        return answer

    here = side("here", [1.0, 10.0, 1.0, 1.0, 1.0])
    other = side("other", [2.0, 20.0, 2.0, 2.0, 2.0])
    line = compare_commits.compared([here, other], {"m": 1})
    assert line == {"m": 1, "us": 1.0, "other_us": 2.0, "ratio": 2.0}
    assert order[:2] == [("here", True), ("other", True)]
    assert order[2:] == [("here", False), ("other", False)] * compare_commits.ROUNDS
