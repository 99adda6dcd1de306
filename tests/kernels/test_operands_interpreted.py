"""Operands that a launch copies for descriptors, and TF32's rounding of operands, in Triton's interpreter."""

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
from tritile.errors import TuningError
from tritile.families import launching
from tritile.families.common import descriptors
from tritile.families.common.descriptors import copied, k_major_copies, realigned
from tritile.families.work import work_of
from tritile.ops.products import matmul_call
from tritile.runtime.work import Descriptor

pytestmark = pytest.mark.interpreted

CONFIG = tma(32, 32, 16, group=2)


def steps(a, b, config=CONFIG):
    """The names of a product's kernels, and how many workspaces it has."""
    work = work_of(matmul_call(a, b, torch.empty(a.shape[0], b.shape[1]), "tf32"), config, 1, False)
    return [step.kernel.__name__ for step in work.steps], len(work.scratch)


def test_only_needed_operand_is_copied():
    even, odd, wide = torch.empty(64, 64), torch.empty(64, 65), torch.empty(64, 96)
    assert steps(even, even) == (["matmul_descriptor"], 0)
    assert steps(even, odd) == (["repack", "matmul_descriptor"], 1)
    assert steps(odd.T, odd) == (["repack", "matmul_descriptor"], 2)
    assert steps(even[:, :40], even[:40]) == (["matmul_descriptor"], 0)
    assert steps(wide[:, :68], torch.empty(68, 64)) == (["matmul_descriptor"], 0)


def halves(m, n, k, layout="column", **more):
    return MatmulProblem(1, m, n, k, "bfloat16", "bfloat16", b_layout=layout, **more)


@pytest.mark.parametrize(
    ("problem", "copies"),
    [
        (halves(128, 8192, 8192), (False, False)),  # rows on lines
        (halves(128, 8192, 8200), (True, False)),  # the smaller one
        (halves(8192, 128, 8200), (False, True)),
        (halves(1024, 8192, 8200), (False, False)),  # not by far the smaller
        (halves(8192, 128, 8208), (False, False)),  # rows on sectors
        (halves(16, 8192, 8200), (False, False)),  # a copy takes longer than it saves
        (halves(4096, 136, 8192, "row"), (False, True)),  # rows of b alone start off sectors
        (halves(136, 4096, 8192, "row", a_layout="column"), (True, False)),
        (halves(128, 8192, 8200, a_align=8), (False, False)),  # a is copied in any case
        (replace(halves(8192, 128, 8200), dtype="float8_e4m3fn"), (False, False)),  # not measured
        (halves(8192, 127, 8200, out_align=2), (False, False)),  # nor is this
        (halves(128, 8192, 8200, epilogue="gated silu"), (False, False)),  # nor are gated products
        (halves(1, 60000, 30008), (False, False)),  # one row starts where its tensor does
    ],
    ids=str,
)
def test_rows_off_sectors_are_copied(problem, copies):
    """Only if that makes the product faster."""
    assert realigned(problem) == copies
    unreadable = problem.a_align < 16, problem.b_align < 16
    assert copied(problem) == tuple(map(any, zip(copies, unreadable, strict=True)))


@pytest.mark.parametrize("copies", [(True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("layout", ["row", "column"])
def test_copies_of_rows_off_sectors(copies, layout, monkeypatch):
    monkeypatch.setattr(descriptors, "realigned", lambda problem: copies)
    m, n, k = 44, 52, 68  # of 4 bytes: rows start on 16 bytes, and not on 32
    a, b = (placed(values(shape, torch.float32, i), layout) for i, shape in enumerate(((m, k), (k, n))))
    buffer, out = frame((m, n), torch.float32, "row")
    launching.run_interpreted(matmul_call(a, b, out, "tf32"), CONFIG)  # computed as fp32 here
    assert_product(out, a, b)
    assert guard_intact(buffer, out)
    assert steps(a, b)[0] == ["repack", "matmul_descriptor"]


def test_impossible_calls_are_refused():
    a, b = torch.empty(32, 48), torch.empty(48, 32)
    with pytest.raises(TuningError, match="SPLIT_K = 4 leaves programs without a block of K = 48"):
        steps(a, b, tma(32, 32, 16, group=2, split=4))
    a = values((2, 3, 5, 16, 16), torch.float32).permute(2, 0, 1, 3, 4)[:, :, ::2]
    call = matmul_call(a, a, torch.empty(5, 2, 2, 16, 16), "tf32")
    assert len(call.batch_shape) == 3
    with pytest.raises(TuningError, match="do not merge"):
        work_of(call, CONFIG, 1, False)


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
def test_copies_make_k_contiguous(monkeypatch, layouts, batch):
    monkeypatch.setattr(descriptors, "_COPIED_FROM", 1)
    shapes = ((*batch, 33, 70), (*batch, 70, 35))
    a, b = (placed(values(shape, torch.float32, i), layouts[i]) for i, shape in enumerate(shapes))
    buffer, out = frame((*batch, 33, 35), torch.float32, "row")
    call, config = matmul_call(a, b, out, "tf32"), tma(16, 32, 16)
    *_, step = work_of(call, config, 132, False).steps
    read = [value for value in step.values if isinstance(value, Descriptor)][:2]
    assert [value.shape[-1] for value in read] == [70, 70]
    launching.run_interpreted(call, config)
    assert_product(out, a, b, "tf32")
    assert guard_intact(buffer, out)


@pytest.mark.parametrize(
    ("m", "n", "found"), [(512, 512, (True, True)), (512, 511, (False, True)), (511, 512, (True, False))]
)
def test_thin_operands_prevent_copies(m, n, found):
    """A product with one thin operand leaves the other as it is."""
    problem = MatmulProblem(1, m, n, 512, "float32", "float32", a_layout="column", precision="tf32")
    assert k_major_copies(problem) == found
    assert k_major_copies(replace(problem, a_align=4, b_align=8)) == (True, True)  # copied in any case
    assert k_major_copies(replace(problem, precision="ieee")) == (False, False)
    assert k_major_copies(replace(problem, a_layout="row", b_layout="column")) == (False, False)


def test_operands_round_to_tf32():
    a, b = values((33, 70), torch.float32), values((70, 35), torch.float32, 1)
    got, rounded = tritile.matmul(a, b, precision="tf32"), [rounded_to_tf32(x) for x in (a, b)]
    bound = 70 * 2.0**-24 * product64(*(x.abs() for x in rounded))
    assert bool(((got.double() - product64(*rounded)).abs() <= bound).all())
    assert bool(((got.double() - product64(a, b)).abs() > bound).any())
    x, gate = torch.full((16, 16), 1 + 2.0**-11 + 2.0**-20), torch.eye(16)  # just above the middle of two
    got = tritile.gated_linear(x, gate, gate, activation=None, precision="tf32")
    assert torch.equal(got, torch.full((16, 16), (1 + 2.0**-10) ** 2))


def test_rounding_to_even_and_not_finite():
    ulp, inf, nan = 2.0**-10, float("inf"), float("nan")
    rounded = {
        1 + ulp / 2: 1.0,
        1 + 3 * ulp / 2: 1 + 2 * ulp,
        -1 - 3 * ulp / 2: -1 - 2 * ulp,
        1 + ulp * 0.501: 1 + ulp,
        1 + ulp * 0.499: 1.0,
        2 - ulp / 4: 2.0,
        0.0: 0.0,
        2.0**-149: 0.0,
        inf: inf,
        -inf: -inf,
    }
    given, wanted = (torch.tensor(list(numbers)) for numbers in (rounded, rounded.values()))
    got = tritile.matmul(given[:, None], torch.ones(1, 1), precision="tf32")[:, 0]
    assert torch.equal(got, wanted)
    assert torch.equal(rounded_to_tf32(given), got)
    # Bits of NaN: GPUs make the first, which must not be rounded up to -0.
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    nans = torch.cat([bits, torch.tensor([nan, -nan])])[:, None]
    assert tritile.matmul(nans, torch.ones(1, 1), precision="tf32").isnan().all()
