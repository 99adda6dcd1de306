"""IEEE fp32 products that copy b row by row first."""

from dataclasses import replace

import pytest
import torch

import tritile
from tests.reference import assert_product, frame, guard_intact, placed, poison_empty, values
from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.core.problem import MatmulProblem
from tritile.core.problem import matmul as problems
from tritile.families.work import work_of
from tritile.ops.described import described
from tritile.planning import model
from tritile.runtime import launch

pytestmark = pytest.mark.interpreted

CONFIG = Config.of(4, 3, "tile", BLOCK_M=32, BLOCK_N=64, BLOCK_K=16, GROUP_M=8)
NT = MatmulProblem(1, 512, 512, 512, "float32", "float32", b_layout="column")


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Small products are lowered too, and workspaces begin as NaN."""
    monkeypatch.setattr(problems, "_BY_ROWS_FROM", 1)
    poison_empty(monkeypatch)


@pytest.mark.parametrize(
    "layouts", [("row", "column"), ("column", "column_sliced"), ("sparse", "column")], ids=str
)
@pytest.mark.parametrize("size", [(1, 1, 1), (33, 70, 65), (64, 3, 130), (2, 129, 64)], ids=str)
def test_columns_of_b_are_contiguous(size, layouts):
    m, n, k = size
    a, b = (
        placed(values((m, k), torch.float32), layouts[0]),
        placed(values((k, n), torch.float32, 1), layouts[1]),
    )
    buffer, out = frame((m, n), torch.float32, "row")
    assert tritile.matmul(a, b, out=out, precision="ieee") is out
    assert_product(out, a, b)
    assert guard_intact(buffer, out)


BATCHES = [
    ((3,), (3,)),
    ((3,), (1,)),
    ((1,), (3,)),
    ((2, 3), (2, 3)),
    ((2, 1, 3), (1, 4, 3)),
    ((2, 3, 2), (2, 1, 2)),
]


@pytest.mark.parametrize("batches", BATCHES, ids=str)
def test_batches(batches):
    a = values((*batches[0], 5, 17), torch.float32)
    b = placed(values((*batches[1], 17, 9), torch.float32, 1), "column")
    assert_product(tritile.matmul(a, b, precision="ieee"), a, b)


def test_what_is_not_finite_stays_where_it_is():
    a, b = values((40, 20), torch.float32), placed(values((20, 70), torch.float32, 1), "column")
    b[3, 5], b[4, 69], a[7, 2] = float("nan"), float("inf"), float("-inf")
    got, wanted = tritile.matmul(a, b, precision="ieee"), a @ b
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.isfinite(), wanted.isfinite())


def test_with_an_epilogue():
    x, weight, bias = (
        values((40, 30), torch.float32),
        values((50, 30), torch.float32, 1),
        values((50,), torch.float32, 2),
    )
    got = tritile.linear(x, weight, bias, activation="relu")
    wanted = (x.double() @ weight.double().T + bias.double()).relu()
    assert torch.allclose(got.double(), wanted, rtol=1e-5, atol=1e-5)


def test_which_products_are_made_so(monkeypatch):
    monkeypatch.undo()
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
    complexes = replace(NT, dtype="complex64", out_dtype="complex64")
    assert complexes.core.b_layout == "row"


def test_a_stretched_b_is_copied_once():
    a, b = values((3, 5, 7), torch.float32), placed(values((7, 9), torch.float32, 1), "column")
    call = described(a.mT.contiguous().mT, b.expand(3, 7, 9), torch.empty(3, 5, 9), "ieee")
    config = model.pick(call.problem, target_device("nvidia-h200"))
    work = work_of(call, config, 132, False)
    assert [section.elements for section in work.scratch.values()] == [7 * 32]
    launch.run_interpreted(call, config)
    assert_product(call.out.tensor, a, b)
