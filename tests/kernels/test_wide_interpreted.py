"""The kernels' 64-bit paths, on tensors that do not need them: the answers must be the same."""

from dataclasses import replace

import pytest
import torch

import tritile
from tritile.families.common.grids import WIDE_FROM
from tritile.families.matmul_tile import family as tile
from tritile.families.permute.family import in_place
from tritile.families.work import work_of
from tritile.ops import permute
from tritile.ops.described import Extras, described

pytestmark = pytest.mark.interpreted


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
        call = described(a, a[:1].mT, torch.empty((), dtype=torch.int32).expand(m, 1), "ieee")
        assert tile._args(call)["WIDE"] is wide


def test_a_second_matrix_that_lies_far_apart_makes_a_gated_product_wide(monkeypatch):
    monkeypatch.undo()
    one = torch.empty((), dtype=torch.float16).expand(64, 64)
    call = described(one, one, one, "ieee", Extras(activation="silu", up=one))
    for step, wide in ((64, False), (2**26, True)):
        far = replace(call, up=replace(call.up, strides=(step, 1)))
        assert tile._args(far)["WIDE"] is wide


@pytest.mark.parametrize(("dtype", "wide"), [(torch.complex64, False), (torch.complex128, True)], ids=str)
def test_words_are_counted_of_what_is_transposed_in_place(monkeypatch, dtype, wide):
    """An element of 16 bytes is two of them."""
    monkeypatch.undo()
    x = torch.empty_strided((2, 2), (3 << 29, 1), dtype=dtype, device="meta")
    call = replace(permute.described(x, x, [1, 0]), in_place=True)
    (step,) = work_of(call, in_place(call.problem), 1, False).steps
    assert step.args["WIDE"] is wide
