"""Tutorial kernels on a GPU: right at odd and at large sizes, timed, and tuned by measuring."""

import pytest
import torch

from ladder import error_of, matrices, timed
from ladder_rungs import LADDERS
from tests.reference import assert_product
from tritile.core import device as devices

pytestmark = pytest.mark.gpu
RUNGS = [rung for ladder in LADDERS.values() for rung in ladder]
named = pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: f"{rung.op}-{rung.name}".replace(" ", "_"))


@pytest.fixture(autouse=True)
def _sums_in_float32(cuda_matmul):
    """Hold torch's step to the bound of the others: by default cuBLAS may add parts in bfloat16."""
    cuda_matmul.allow_bf16_reduced_precision_reduction = False


def ran(rung, n, config=None):
    """Return the matrices after a run."""
    device = devices.current_gpu()
    unfit = rung.unfit(device, n)
    if unfit:
        pytest.skip(unfit)
    given = matrices(rung.op, n, rung.dtype, "cuda")
    rung.run(given, config or rung.config(n, device), device.processors)
    torch.cuda.synchronize()
    return given


@pytest.mark.parametrize("n", [1, 256, 1001])
@named
def test_rungs_are_right(rung, n):
    *given, out = ran(rung, n)
    if rung.op == "matmul":
        assert_product(out, *given)
    elif not rung.checked:
        assert torch.equal(out, *given)
    else:
        assert torch.equal(out, given[0].t())


@named
def test_large_sizes_are_right(rung):
    if not rung.checked:
        pytest.skip("only copies")
    error_of(rung.op, ran(rung, 4096))


@pytest.mark.parametrize("rung", [rung for rung in RUNGS if len(rung.configs) > 1], ids=lambda rung: rung.op)
@pytest.mark.parametrize("n", [1000, 333])
def test_every_config_is_right(rung, n):
    for config in rung.configs:
        error_of(rung.op, ran(rung, n, config))


@pytest.mark.serial
@pytest.mark.parametrize("op", LADDERS)
def test_a_ladder_is_timed(op):
    """Time every step that runs here; the last of ours is not slower than the first."""
    device = devices.current_gpu()
    found = timed(LADDERS[op], 1024, device)
    assert [reading.name for reading in found] == [rung.name for rung in LADDERS[op]]
    assert [(reading.name, reading.note) for reading in found if reading.failed] == []
    for rung, reading in zip(LADDERS[op], found, strict=True):
        assert (reading.us is None) == (rung.unfit(device, 1024) is not None)
    times = {reading.name: reading.us for reading in found}
    assert times[f"tritile.{op}"] < found[0].us
    tuned = next(rung for rung in LADDERS[op] if rung.name == "autotuned")
    config = next(reading.config for reading in found if reading.name == "autotuned")
    assert config in map(str, tuned.configs)
