"""Tutorial kernels in Triton's interpreter: right at any size, and requesting the bytes that formulas say."""

import pytest
import torch

import ladder_transpose as transpose
from ladder import matrices
from ladder_rungs import ITEMSIZE, LADDERS
from tests.accesses import counted
from tests.reference import assert_product
from tritile.lab.traffic import SECTOR

pytestmark = pytest.mark.interpreted

GUARD = 64  # elements on either side of the output
SMS = 3  # few, so that a persistent program makes several tiles
ALIGNED = "persistent, TMA"  # n has to be a multiple of 8
INTERPRETED = [
    rung
    for rungs in LADDERS.values()
    for rung in rungs
    if rung.kernel is not None and rung.kernel is not transpose.transpose_shared  # Gluon has no interpreter
]


def check(rung, n, config=None):
    """Run a rung on an output full of NaN, and check its answer and its requests."""
    config = config or rung.configs[0]
    dtype = "float16" if rung.dtype == "bfloat16" else rung.dtype  # the interpreter is wrong in bfloat16
    *operands, _ = matrices(rung.op, n, dtype, "cpu")
    memory = torch.full((n * n + 2 * GUARD,), float("nan"), dtype=operands[0].dtype)
    out = memory[GUARD:-GUARD].view(n, n)
    with counted() as counts:
        args = rung.arguments((*operands, out), n, config)
        rung.kernel[rung.grid(n, config, SMS)](*args, **dict(config.kwargs))
    assert memory[:GUARD].isnan().all()
    assert memory[-GUARD:].isnan().all()
    requested = rung.requested(n, ITEMSIZE[rung.dtype], config)
    if rung.op == "matmul":
        assert_product(out, *operands, tensor_cores=False)
        assert requested == counts.read + counts.written
    else:
        assert torch.equal(out, operands[0].t())
        if n >= 128:
            assert requested == SECTOR * (counts.read_sectors + counts.written_sectors)


SIZED = [  # an element at a time takes n^3 loads
    pytest.param(rung, 8 * -(-n // 8) if rung.name == ALIGNED else n, id=f"{rung.op}-{rung.name}-{n}")
    for rung in INTERPRETED
    for n in ((1, 31) if rung.name == "naive" else (1, 31, 65, 130))
]


@pytest.mark.parametrize(("rung", "n"), SIZED)
def test_rungs_right_with_counted_requests(rung, n):
    check(rung, n)


@pytest.mark.parametrize("op", LADDERS)
def test_configs_across_several_tiles(op):
    (rung,) = (rung for rung in LADDERS[op] if rung.name == "autotuned")
    for config in rung.configs[:: 1 if op == "transpose" else 3]:  # a GPU runs each
        check(rung, 290, config)


def test_program_makes_several_tiles():
    """Make six tiles of 128 x 256 on three SMs."""
    (rung,) = (rung for rung in LADDERS["matmul"] if rung.name == ALIGNED)
    assert rung.grid(296, rung.configs[0], SMS) == (SMS,)
    assert rung.grid(8, rung.configs[0], 132) == (1,)
    check(rung, 296)
