"""TF32 products on a GPU round their operands, whichever kernel and launcher makes them."""

import pytest
import torch

import tritile
from tests.configs import tile, tma
from tests.launched import launched
from tests.reference import placed, product64, values
from tests.simulated import rounded_to_tf32
from tritile.core import device as devices
from tritile.ops.products import matmul_call
from tritile.planning import model

pytestmark = pytest.mark.gpu


CONFIGS = [
    tile(64, 64, 32),
    tile(32, 32, 32),
    tma(64, 64, 64, 4, 3),
    tma(128, 128, 64, 8, 3, persistent=True),
    tma(64, 64, 64, 4, 3, split=2),
    tma(16, 64, 64, 4, 3),
]


def assert_rounded(got, a, b):
    """As of rounded operands, but for sums: these err by less than cutting the operands would."""
    left, right = rounded_to_tf32(a), rounded_to_tf32(b)
    exact = product64(left, right)
    k = a.shape[1]
    # tensor cores cut each sum of at least 4 of K
    bound = 2.0**-23 * (k / 4 + 2) * product64(left.abs(), right.abs())
    assert bool(((got.double() - exact).abs() <= bound).all())
    wanted = float((exact - product64(a, b)).norm())
    assert float((got.double() - product64(a, b)).norm()) == pytest.approx(wanted, rel=0.05)


@pytest.mark.parametrize(
    "layouts", [("row", "row"), ("row", "column"), ("column", "row"), ("offset", "sliced")], ids=str
)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("native", [True, False])
def test_operands_are_rounded(native, config, layouts):
    a, b = (values(shape, torch.float32, i, "cuda") for i, shape in enumerate(((200, 333), (333, 140))))
    a, b = placed(a, layouts[0]), placed(b, layouts[1])
    out = torch.full((200, 140), float("nan"), device="cuda")
    call = matmul_call(a, b, out, "tf32")
    run = launched(call, config)
    if not native:
        run._steps = list(run._triton)
        out.fill_(float("nan"))
        run(*call.tensors)
    assert_rounded(out, a, b)


@pytest.mark.parametrize("layouts", [("row", "row"), ("column", "row"), ("offset", "column")], ids=str)
@pytest.mark.parametrize("config", [None, tma(128, 256, 32, 8, 4), *CONFIGS[2:4]], ids=str)
def test_operands_that_are_copied_are_rounded(config, layouts):
    """Sizes from which copies have K contiguous."""
    a, b = (values(shape, torch.float32, i, "cuda") for i, shape in enumerate(((600, 333), (333, 777))))
    a, b = placed(a, layouts[0]), placed(b, layouts[1])
    out = torch.full((600, 777), float("nan"), device="cuda")
    call = matmul_call(a, b, out, "tf32")
    launched(call, config or model.pick(call.problem, devices.gpu(0)))
    assert_rounded(out, a, b)


def test_errors_are_those_of_torchs_tf32():
    a, b = (values((2048, 2048), torch.float32, i, "cuda") for i in range(2))
    exact = product64(a, b)
    ours = float((tritile.matmul(a, b, precision="tf32") - exact).norm() / exact.norm())
    assert ours < 3.5e-4


def test_what_is_not_finite_stays():
    a, b = values((64, 128), torch.float32, 0, "cuda"), values((128, 64), torch.float32, 1, "cuda")
    a[1, 2], a[3, 4], a[5, 6] = float("nan"), float("inf"), -float("inf")
    got, wanted = tritile.matmul(a, b, precision="tf32"), torch.matmul(a, b)
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.isinf(), wanted.isinf())
