"""What is read from stores and tables: values that nobody of ours wrote are refused, and harm nothing."""

import functools
import json
import math

import pytest

from tritile.core.config import Config
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import KernelProblem, MatmulProblem, problem_key, problem_to_dict
from tritile.errors import InvalidValueError
from tritile.planning.files import config_from, number_from, numbers_from, problem_from, rows_from, sifted

PROBLEM = MatmulProblem(1, 257, 129, 65, "bfloat16", "bfloat16")
KERNEL = KernelProblem("mine", (("n", 5), ("x", None)), (("x", "float16"),))
TURNED = PermuteProblem.transposed(3, 5, 7, 2)
CONFIG = Config.of(BLOCK_M=64, BLOCK_N=96, num_warps=4)
EVIL = "__import__('os').system('touch canary')"
KEY, DATA = problem_key(PROBLEM), problem_to_dict(PROBLEM)
PROBLEMS = [
    None, 3, b"{}", [], {}, "", "{}", EVIL, "[" * 50_000, '{"op":' * 50_000, "9" * 5000, "x" * 100_000,
    json.dumps({"op": ["matmul"]}), KEY + " ", KEY.replace("257", "1" + "0" * 4000), KEY.replace(",", ", "),
    KEY.replace('"a_align"', '"a_\\u0061lign"'), DATA | {"m": 2**70}, DATA | {"dtype": ["bfloat16"]},
    DATA | {"more": 1}, {name: value for name, value in DATA.items() if name != "m"}, DATA | {"op": EVIL},
    problem_to_dict(KERNEL) | {"key": 3}, problem_to_dict(KERNEL) | {"key": [["x", math.nan]]},
    problem_to_dict(KERNEL) | {"key": [["x", {}]]}, problem_to_dict(TURNED) | {"shape": [{}, 5, 7]},
    problem_to_dict(TURNED) | {"x_strides": [math.nan, 5, 7]},
]  # fmt: skip
TEXT, FIELDS = CONFIG.key, CONFIG.to_dict()
CONFIGS = [
    None, [], "", "[]", EVIL, TEXT + " ", TEXT.replace("64", "1e999"), "[" * 50_000,
    TEXT.replace('"BLOCK_M":64', '"BLOCK_M":[64]'), TEXT.replace('"BLOCK_M":64', '"x;import os":64'),
    TEXT.replace('"family":"",', ""),
    *(FIELDS | {"num_warps": value} for value in (-4, "4", True, 3)),
    *(FIELDS | {"kwargs": value} for value in (None, {"BLOCK_M": [[[[1]]]]}, {"BLOCK_M": math.nan})),
    FIELDS | {"pre_hook": EVIL}, FIELDS | {"family": EVIL},
]  # fmt: skip


@pytest.mark.parametrize("problem", [PROBLEM, KERNEL, TURNED], ids=str)
def test_a_problem_and_a_config_come_back_from_data_and_keys(problem):
    for source in (problem_to_dict(problem), problem_key(problem)):
        assert problem_from(source) == problem
    for source in (CONFIG.to_dict(), CONFIG.key):
        assert config_from(source) == CONFIG


@pytest.mark.parametrize(
    ("read", "source"),
    [(problem_from, each) for each in PROBLEMS] + [(config_from, each) for each in CONFIGS],
    ids=lambda value: getattr(value, "__name__", str(value)[:40]),
)
def test_other_problems_and_configs_are_refused(read, source):
    with pytest.raises(InvalidValueError):
        read(source)


def test_numbers():
    assert number_from(None, 0, 1) is None
    assert numbers_from("ones", [1, 0.5], 2, 0, 1) == (1.0, 0.5)
    assert rows_from("it", [[1, 2]], 1, 2, 5) == ((1.0, 2.0),)
    for value in ("2", True, -6, math.nan, math.inf, 10**400, [1], 6):
        with pytest.raises(InvalidValueError):
            number_from(value, 0, 5)
        for rows in ([[1, value]], [[1]], [], None, [1, 2]):
            with pytest.raises(InvalidValueError):
                rows_from("it", rows, 1, 2, 5)
    with pytest.raises(InvalidValueError):
        number_from(1.5, 0, 5, whole=True)


def test_the_good_are_kept_in_order_with_reasons_of_the_rest():
    deep = functools.reduce(lambda inner, _: [inner], range(10_000), [])
    good, reasons = sifted([1, -1, deep, 2, "x" * 10**6], lambda value: number_from(value, 0, 5))
    assert good == [1, 2]
    assert len(reasons) == 3
    assert all(len(reason) <= 200 for reason in reasons)
