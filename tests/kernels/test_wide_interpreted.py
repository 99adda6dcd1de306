"""Which calls take the kernels' 64-bit paths. That these answer alike is seen where families are tried."""

from dataclasses import replace

import pytest
import torch

from tritile.families.common.grids import WIDE_FROM
from tritile.families.matmul_tile import family as tile
from tritile.families.permute.family import in_place
from tritile.families.work import work_of
from tritile.ops import permute
from tritile.ops.described import Extras, described

pytestmark = pytest.mark.interpreted


def test_sizes_near_the_end_of_32_bits_are_wide():
    limit = WIDE_FROM
    assert limit + 2**12 < 2**31
    for m, k, wide in ((limit, 1, True), (limit - 1, 1, False), (1, limit, True)):
        a = torch.empty((), dtype=torch.int8).expand(m, k)
        call = described(a, a[:1].mT, torch.empty((), dtype=torch.int32).expand(m, 1), "ieee")
        assert tile._args(call)["WIDE"] is wide


def test_a_second_matrix_that_lies_far_apart_makes_a_gated_product_wide():
    one = torch.empty((), dtype=torch.float16).expand(64, 64)
    call = described(one, one, one, "ieee", Extras(activation="silu", up=one))
    for step, wide in ((64, False), (2**26, True)):
        far = replace(call, up=replace(call.up, strides=(step, 1)))
        assert tile._args(far)["WIDE"] is wide


@pytest.mark.parametrize(("dtype", "wide"), [(torch.complex64, False), (torch.complex128, True)], ids=str)
def test_words_are_counted_of_what_is_transposed_in_place(dtype, wide):
    """An element of 16 bytes is two of them."""
    x = torch.empty_strided((2, 2), (3 << 29, 1), dtype=dtype, device="meta")
    call = replace(permute.described(x, x, [1, 0]), in_place=True)
    (step,) = work_of(call, in_place(call.problem), 1, False).steps
    assert step.args["WIDE"] is wide
