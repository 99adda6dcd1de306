"""How a call becomes launches; no kernel runs."""

from math import prod

import pytest
import torch

from tritile import launch
from tritile.config import Config
from tritile.ops.matmul import described
from tritile.work import tile, work_of

TINY = Config.of(family="tile", BLOCK_M=16, BLOCK_N=16, BLOCK_K=32, GROUP_M=1)


def _product(*batch: int, m: int = 1, n: int = 1) -> object:
    a = torch.empty(*batch, m, 1, dtype=torch.int8, device="meta")
    b = torch.empty(*batch, 1, n, dtype=torch.int8, device="meta")
    return described(a, b, torch.empty(*batch, m, n, dtype=torch.int32, device="meta"), "ieee")


@pytest.mark.parametrize("batch", [(2**31 + 5,), (2**31 - 1,), (2**33,)])
def test_a_batch_of_more_programs_than_a_launch_counts_is_split(batch):
    """Triton's launcher multiplies the grid in 32 bits, and runs nothing where the product turns negative."""
    pieces = launch._pieces(_product(*batch), TINY)
    for piece in pieces:
        (step,) = work_of(piece, TINY, 132, True).steps
        assert step.grid == tile.work(piece, TINY).steps[0].grid
        assert 0 < prod(step.grid) < 2**31
    assert sum(prod(piece.batch_shape) for piece in pieces) == prod(batch)
    start = 0
    for piece in pieces:
        assert piece.a.tensor.storage_offset() == piece.out.tensor.storage_offset() == start
        start += prod(piece.batch_shape)


def test_a_batch_that_fits_is_one_launch():
    call = _product(2**31 - 2**16)
    assert launch._pieces(call, TINY) == [call]
