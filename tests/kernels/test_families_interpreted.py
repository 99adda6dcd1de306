"""Every family of products that the interpreter runs: those of tests.cases.families, at small sizes."""

import pytest
import torch

from tests.cases.families import *  # noqa: F403
from tests.cases.families import FAMILIES, FP32, TILE, check, launches, second, side
from tests.reference import Sides, bytes_of, placed, values
from tritile.ops.products import matmul_call

pytestmark = pytest.mark.interpreted


def test_batches_that_do_not_merge():
    a, b = values((2, 3, 2, 37, 51), FP32), values((2, 1, 2, 51, 29), FP32, 1)
    sides = Sides(bias=values((3, 1, 1, 29), FP32, 2), residual=values((2, 1, 1, 37, 29), FP32, 3))
    assert len(matmul_call(a, b, torch.empty(2, 3, 2, 37, 29), "ieee", **sides._asdict()).batch_shape) == 3
    check(TILE, a, b, sides)


@pytest.mark.parametrize("gated", [False, True])
def test_the_same_bits_by_every_family(gated):
    """A pure function of the sums: what is stored differs where sums do, and here they do not."""
    a, b = (torch.randint(-8, 8, shape).float() for shape in ((37, 83), (83, 29)))
    sides = Sides(bias=side(TILE, "row"), residual=side(TILE, "full"), activation="gelu")
    found = []
    for family in FAMILIES.values():
        if (family.gated, family.size, family.dtype) == (gated, TILE.size, FP32):
            found.append(torch.empty(37, 29))
            for run in launches(family, a, placed(b, family.of_b), found[-1], sides, second(b)):
                run()
    assert len(found) > 2
    assert all(torch.equal(bytes_of(found[0]), bytes_of(other)) for other in found[1:])
