"""The kernels' 64-bit paths, on tensors that do not need them: the answers must be the same."""

import pytest
import torch

import tritile
from tritile.families.common.grids import WIDE_FROM
from tritile.families.matmul_tile import family as tile

pytestmark = pytest.mark.filterwarnings("ignore::tritile.errors.InterpreterWarning")


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setattr(tile, "WIDE_FROM", 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize(
    "shapes", [((3, 1, 37, 45), (2, 45, 51)), ((1, 300), (300, 1)), ((5, 7), (7, 300))], ids=str
)
def test_products(dtype, shapes):
    a, b = (torch.randint(-4, 5, shape).to(dtype) for shape in shapes)
    assert torch.equal(tritile.matmul(a, b).double(), a.double() @ b.double())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.complex128], ids=str)
def test_transpositions(dtype):
    x = torch.randint(0, 100, (3, 67, 5, 41)).to(dtype)
    for dims in ((1, 3), (0, 3), (1, 2)):
        assert torch.equal(tritile.transpose(x, *dims), x.transpose(*dims))


def test_sizes_near_the_end_of_32_bits_are_wide(monkeypatch):
    monkeypatch.undo()
    limit = WIDE_FROM
    assert limit + 2**12 < 2**31
    for m, k, wide in ((limit, 1, True), (limit - 1, 1, False), (1, limit, True)):
        a = torch.empty((), dtype=torch.int8).expand(m, k)
        call = tritile.ops.matmul.described(
            a, a[:1].mT, torch.empty((), dtype=torch.int32).expand(m, 1), "ieee"
        )
        assert tile._args(call)["WIDE"] is wide
