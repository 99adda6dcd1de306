"""IEEE fp32 products on a GPU that copy b row by row first."""

import pytest
import torch

import tritile
from tests.launched import captured
from tests.reference import assert_product, frame, guard_intact, placed, values

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]
SIZES = [(128, 64, 64), (129, 1, 1), (200, 333, 517), (1000, 1003, 1), (257, 2048, 96), (128, 5, 4099)]


@pytest.mark.parametrize(
    "layouts", [("row", "column"), ("column", "column_sliced"), ("sparse", "column")], ids=str
)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_columns_of_b_are_contiguous(size, layouts):
    m, n, k = size
    shapes = (m, k), (k, n)
    a, b = (placed(values(shapes[i], torch.float32, i, "cuda"), layouts[i]) for i in range(2))
    buffer, out = frame((m, n), torch.float32, "row", "cuda")
    assert tritile.matmul(a, b, out=out, precision="ieee") is out
    first = out.clone()
    assert_product(out, a, b)
    assert guard_intact(buffer, out)
    assert torch.equal(tritile.matmul(a, b, precision="ieee"), first)


@pytest.mark.parametrize(
    "batches", [((3,), (3,)), ((3,), (1,)), ((2, 1, 3), (1, 4, 3)), ((2, 3, 2), (2, 1, 2))], ids=str
)
def test_batches(batches):
    a = values((*batches[0], 150, 70), torch.float32, 0, "cuda")
    b = placed(values((*batches[1], 70, 90), torch.float32, 1, "cuda"), "column")
    assert_product(tritile.matmul(a, b, precision="ieee"), a, b)


def test_in_a_graph_and_beside_what_is_not_finite():
    a, b = (values((300, 300), torch.float32, i, "cuda") for i in range(2))
    b = b.mT
    b[3, 5], a[7, 2] = float("nan"), float("inf")
    wanted = tritile.matmul(a, b, precision="ieee")
    graph, got = captured(lambda: tritile.matmul(a, b, precision="ieee"))
    got.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got.nan_to_num(), wanted.nan_to_num())
    assert torch.equal(got.isnan(), (a @ b).isnan())
