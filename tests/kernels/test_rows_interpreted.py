"""IEEE fp32 products that copy b row by row first: which, and how often b is copied."""

from dataclasses import replace

import pytest
import torch

from tests.reference import assert_product, placed, values
from tritile.core.device import target_device
from tritile.core.problem import MatmulProblem
from tritile.core.problem import matmul as problems
from tritile.families.work import work_of
from tritile.ops.described import described
from tritile.planning import model
from tritile.runtime import launch

pytestmark = pytest.mark.interpreted

NT = MatmulProblem(1, 512, 512, 512, "float32", "float32", b_layout="column")


def test_which_products_are_made_so():
    assert NT.by_rows
    assert (NT.core.b_layout, NT.core.b_align) == ("row", 16)
    assert NT.core.core == NT.core
    others = (
        {"m": 127}, {"b_layout": "row"}, {"precision": "tf32"}, {"precision": "fp16x3"},
        {"dtype": "float64", "out_dtype": "float64"}, {"dtype": "bfloat16", "out_dtype": "bfloat16"},
        {"epilogue": "gated silu"},
    )  # fmt: skip
    for fields in others:
        assert not replace(NT, **fields).by_rows


def test_a_stretched_b_is_copied_once(monkeypatch):
    monkeypatch.setattr(problems, "_BY_ROWS_FROM", 1)
    a, b = values((3, 5, 7), torch.float32), placed(values((7, 9), torch.float32, 1), "column")
    call = described(a.mT.contiguous().mT, b.expand(3, 7, 9), torch.empty(3, 5, 9), "ieee")
    config = model.pick(call.problem, target_device("nvidia-h200"))
    work = work_of(call, config, 132, False)
    assert [section.elements for section in work.scratch.values()] == [7 * 32]
    launch.run_interpreted(call, config)
    assert_product(call.out.tensor, a, b)
