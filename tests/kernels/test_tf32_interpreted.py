"""TF32 products round their operands: in the tile kernel, and by descriptors that round as they copy."""

from dataclasses import replace

import pytest
import torch

import tritile
from tests.configs import tma
from tests.reference import assert_product, frame, guard_intact, placed, product64, values
from tests.simulated import rounded_to_tf32
from tritile.core.call import call_for
from tritile.core.device import target_device
from tritile.core.problem import MatmulProblem
from tritile.families.common.operands import turned
from tritile.families.common.work import Descriptor
from tritile.families.work import work_of
from tritile.ops.products import matmul_call
from tritile.runtime import launch

pytestmark = pytest.mark.interpreted


def products(values):
    """Each of these numbers times 1, as a TF32 product."""
    one = torch.ones(1, 1)
    return tritile.matmul(torch.tensor(values)[:, None], one, precision="tf32")[:, 0]


def test_operands_are_rounded_to_the_nearest():
    a, b = values((33, 70), torch.float32), values((70, 35), torch.float32, 1)
    got, rounded = tritile.matmul(a, b, precision="tf32"), [rounded_to_tf32(x) for x in (a, b)]
    bound = 70 * 2.0**-24 * product64(*(x.abs() for x in rounded))
    assert bool(((got.double() - product64(*rounded)).abs() <= bound).all())
    assert bool(((got.double() - product64(a, b)).abs() > bound).any())


def test_rounding_goes_to_even_and_leaves_what_is_not_finite():
    ulp = 2.0**-10
    pairs = [
        (1 + ulp / 2, 1.0),
        (1 + 3 * ulp / 2, 1 + 2 * ulp),
        (-1 - 3 * ulp / 2, -1 - 2 * ulp),
        (1 + ulp * 0.501, 1 + ulp),
        (1 + ulp * 0.499, 1.0),
        (2 - ulp / 4, 2.0),
        (0.0, 0.0),
        (2.0**-149, 0.0),
        (float("inf"), float("inf")),
        (-float("inf"), -float("inf")),
    ]
    got = products([x for x, _ in pairs])
    assert torch.equal(got, torch.tensor([y for _, y in pairs]))
    assert bool(products([float("nan"), -float("nan")]).isnan().all())
    for bits in (
        0x7FFFFFFF,
        -1,
        0x7F800001,
    ):  # GPUs make the first, to be rounded up to -0
        nan = torch.tensor([[bits]], dtype=torch.int32).view(torch.float32)
        assert tritile.matmul(nan, torch.ones(1, 1), precision="tf32").isnan().all()
    assert torch.equal(rounded_to_tf32(torch.tensor([x for x, _ in pairs])), got)


@pytest.mark.parametrize(("precision", "rounded"), [("tf32", True), ("ieee", False)])
def test_descriptors_of_operands_round(precision, rounded):
    problem = MatmulProblem(1, 512, 512, 512, "float32", "float32", precision=precision, b_align=4)
    call = call_for(problem, lambda dtype, elements: torch.empty(elements, dtype=getattr(torch, dtype)))
    step = work_of(call, tma(64, 64, 32), target_device("nvidia-h200").processors, False).steps[-1]
    descriptors = [value for value in step.values if isinstance(value, Descriptor)]
    assert [value.rounded for value in descriptors] == [rounded, rounded, False]


LAYOUTS = [("row", "row"), ("row", "column"), ("column", "row"), ("offset", "sliced"), ("column", "strided")]


@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
@pytest.mark.parametrize("layouts", LAYOUTS, ids=str)
def test_operands_are_copied_so_that_k_is_contiguous(monkeypatch, layouts, batch):
    monkeypatch.setattr("tritile.families.common.operands._TURNED_FROM", 1)
    shapes = ((*batch, 33, 70), (*batch, 70, 35))
    a, b = (placed(values(shape, torch.float32, i), layouts[i]) for i, shape in enumerate(shapes))
    buffer, out = frame((*batch, 33, 35), torch.float32, "row")
    call = matmul_call(a, b, out, "tf32")
    config = tma(16, 32, 16)
    *_, step = work_of(call, config, 132, False).steps
    read = [value for value in step.values if isinstance(value, Descriptor)][:2]
    assert [value.shape[-1] for value in read] == [70, 70]
    launch.run_interpreted(call, config)
    assert_product(out, a, b, "tf32")
    assert guard_intact(buffer, out)


@pytest.mark.parametrize(
    ("m", "n", "found"), [(512, 512, (True, True)), (512, 511, (False, True)), (511, 512, (True, False))]
)
def test_operands_that_thin_ones_meet_stay_as_they_are(m, n, found):
    problem = MatmulProblem(1, m, n, 512, "float32", "float32", a_layout="column", precision="tf32")
    assert turned(problem) == found
    assert turned(replace(problem, a_align=4, b_align=8)) == (True, True)  # copied in any case
    assert turned(replace(problem, precision="ieee")) == (False, False)
    assert turned(replace(problem, a_layout="row", b_layout="column")) == (False, False)
