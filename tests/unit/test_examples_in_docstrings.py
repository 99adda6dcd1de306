"""Examples in docstrings of public names run and print what they say, with "cuda" replaced by "cpu"."""

import doctest

import pytest
import torch

import tritile
from tritile.core import problem
from tritile.lab import bench, explain
from tritile.lab import tune as lab_tune
from tritile.tuner import plan as tuner_plan

# `tritile.tune` is a package that can be called; its docstring is that of the function.
NAMES = {name: getattr(tritile, name) for name in tritile.__all__} | {
    f"nn.{name}": getattr(tritile.nn, name) for name in tritile.nn.__all__
}
NAMES |= {"tune": lab_tune.tune, "TuneResult": lab_tune.TuneResult, "Explanation": explain.Explanation}
NAMES |= {"BenchResult": bench.BenchResult, "KernelPlan": tuner_plan.KernelPlan}
NAMES |= {each.__name__: each for each in (problem.MatmulProblem, problem.GroupedProblem)}


def examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    names = {"torch": torch, "tritile": tritile}
    found = [
        test
        for name, value in NAMES.items()
        if callable(value)
        for test in finder.find(value, name, module=False, globs=dict(names))
    ]
    return [test for test in found if test.examples]


EXAMPLES = examples()


def test_first_calls_have_examples():
    have = {test.name for test in EXAMPLES}
    assert {"matmul", "linear", "grouped_matmul", "permute", "quantize", "plan", "mode", "Config"} <= have


@pytest.mark.filterwarnings("ignore::tritile.errors.HostWarning")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda test: test.name)
def test_the_examples_run(example):
    for each in example.examples:
        each.source = each.source.replace('"cuda"', '"cpu"')
    said: list[str] = []
    result = doctest.DocTestRunner().run(example, out=said.append, clear_globs=False)
    assert result.attempted
    assert not result.failed, "".join(said)
