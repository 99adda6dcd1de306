"""The comparison of tuners, as far as no GPU is needed: children, lines of results, warm calls.

Tuning itself is real, of a kernel in Triton's interpreter; the times that decide are made up.
"""

import json
from dataclasses import replace

import pytest
import torch

import authors
import compare_autotune as comparison
from tritile.core.config import Config

pytestmark = pytest.mark.interpreted

GIVEN = {"shape": (4, 50), "dtype": torch.float32, "device": "cpu"}


def subject():
    """Return the softmax with three configs, as the interpreter runs it."""
    configs = authors.configs_of({"ROWS": (1, 2), "BLOCK": (64, 128), "num_warps": (4,)})[:3]
    return replace(authors.SUBJECTS["softmax"], configs=configs)


class Bench:
    """Run each config once, and make the second one the fastest."""

    def __init__(self):
        self.calls = 0

    def __call__(self, call, quantiles):
        call()
        self.calls += 1
        return [1.0 if self.calls == 2 else 2.0] * 3


@pytest.mark.parametrize("side", ["triton", "tritile"])
def test_tuner_tries_every_config(side):
    bench = Bench()
    answer = comparison.tuned(side, subject(), authors.softmax_inputs(**GIVEN), do_bench=bench)
    assert bench.calls == 3
    assert answer["seconds"] > 0
    assert Config.from_dict(answer["config"]) == Config.of(ROWS=1, BLOCK=128, num_warps=4)
    assert json.loads(json.dumps(answer)) == answer


@pytest.mark.parametrize(("side", "said"), [("tritile", "wrong answer"), ("triton", "triton chose .* error")])
def test_a_wrong_answer_is_no_result(side, said):
    wrong = replace(subject(), reference=lambda x_ptr, **_: {"out_ptr": torch.softmax(2 * x_ptr, -1)})
    with pytest.raises(RuntimeError, match=said):
        comparison.tuned(side, wrong, authors.softmax_inputs(**GIVEN), do_bench=Bench())
