"""Products of one to eight rows, or columns, without tensor cores, on a GPU."""

import functools

import pytest
import torch

import tritile
from tests.launched import captured
from tests.reference import (
    Sides,
    assert_fused,
    assert_product,
    at_offset,
    frame,
    guard_intact,
    name,
    placed,
    values,
)
from tritile.core import device as devices
from tritile.core.problem import ACTIVATIONS
from tritile.families.few_rows import across, family
from tritile.ops.described import Extras, described
from tritile.planning import model, plans
from tritile.runtime import launch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FAMILIES = {"column": family.NAME, "row": across.NAME}  # by the layout of w
BOTH = pytest.mark.parametrize("of_w", FAMILIES)
SIZES = [(520, 1024), (333, 4099), (4001, 515), (31, 20000), (1, 777), (900, 3), (70, 17)]


@pytest.fixture(scope="module", autouse=True)
def _on_nvidia():
    if devices.gpu(0).nvidia < 80:
        pytest.skip("no asynchronous copies to shared memory")


at = functools.partial(at_offset, device="cuda")


def check(a, b, layout="row", count=None, of_w="column"):
    """Make a product by each config twice, into a frame of poison: right, alike, and nothing beside it."""
    m, n = a.shape[-2], b.shape[-1]
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    buffer, out = frame((*batch, m, n), a.dtype, layout, "cuda")
    call = described(a, b, out, "ieee")
    configs = model.ranked(call.problem, devices.gpu(0), FAMILIES[of_w])
    for config in configs[:count]:
        prepared = launch.prepare(call, config)
        out.fill_(float("nan"))
        prepared(*call.tensors)
        first = out.clone()
        out.fill_(float("nan"))
        prepared(*call.tensors)
        assert torch.equal(out, first), config
        assert_product(out, a, b, tensor_cores=False)
    assert guard_intact(buffer, out)


# Every number of rows that is compiled apart, in each type; every size, in each type.
SIZED = [(dtype, m, SIZES[1]) for dtype in DTYPES for m in (1, 2, 3, 4, 8)]
SIZED += [
    (dtype, m, size) for dtype, m in zip(DTYPES, (1, 3, 8), strict=True) for size in SIZES if size != SIZES[1]
]


@pytest.mark.parametrize(("dtype", "m", "size"), SIZED, ids=str)
@BOTH
def test_sizes(dtype, m, size, of_w):
    n, k = size if of_w == "column" or 1 not in size else (2, 777)  # of one column, contiguous along K
    check(values((m, k), dtype, 0, "cuda"), placed(values((k, n), dtype, 1, "cuda"), of_w), of_w=of_w)


@pytest.mark.parametrize("offset", [0, 1, 2, 4, 7])
@pytest.mark.parametrize("row", [1027, 1028, 1030, 1032])
def test_rows_along_n_that_begin_anywhere(offset, row):
    for n in (1023, 1024):
        for dtype in (torch.float16, torch.float32):
            w = at(offset, 77, n, dtype, row).mT
            check(values((2, 77), dtype, 0, "cuda"), w, count=3, of_w="row")


@pytest.mark.parametrize("m", [1, 8])
def test_sums_of_many_parts(m):
    for n, k in ((64, 30011), (2713, 21424), (60001, 35)):
        a, b = values((m, k), torch.bfloat16, 0, "cuda"), values((k, n), torch.bfloat16, 1, "cuda")
        check(a, b, of_w="row")


@pytest.mark.parametrize("offset", [0, 1, 2, 4, 7])
@pytest.mark.parametrize("row", [1027, 1028, 1032, 1040])
def test_rows_that_begin_anywhere_in_a_word(offset, row):
    for k in (1023, 1024, 1027):
        for dtype in (torch.float16, torch.float32):
            check(values((2, k), dtype, 0, "cuda"), at(offset, 77, k, dtype, row), count=2)


@pytest.mark.parametrize("layout", ["column", "sliced", "column_sliced", "offset", "sparse", "strided"])
@pytest.mark.parametrize("k", [1040, 2053])
@BOTH
def test_layouts_of_x_and_of_out(layout, k, of_w):
    x = placed(values((4, k), torch.bfloat16, 0, "cuda"), layout)
    check(x, placed(values((k, 301), torch.bfloat16, 1, "cuda"), of_w), layout, of_w=of_w)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("layouts", [("row", "row"), ("sliced", "column")], ids=str)
@pytest.mark.parametrize("k", [1040, 2053])
@BOTH
def test_few_columns(n, layouts, k, of_w):
    a, b = values((515, k), torch.float16, 0, "cuda"), values((k, n), torch.float16, 1, "cuda")
    of_a = layouts[0] if of_w == "column" else {"row": "column", "sliced": "column_sliced"}[layouts[0]]
    check(placed(a, of_a), placed(b, layouts[1]), "sliced", of_w=of_w)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name)
@BOTH
def test_batches(dtype, of_w):
    a, b = values((3, 5, 2, 261), dtype, 0, "cuda"), values((3, 5, 261, 90), dtype, 1, "cuda")
    b = placed(b, of_w)
    for left, right in ((a, b), (a.transpose(0, 1), b.transpose(0, 1)), (a[:1], b), (a, b[0])):
        check(left, right, count=2, of_w=of_w)


@pytest.mark.parametrize("activation", ["", *ACTIVATIONS])
@pytest.mark.parametrize(("m", "n"), [(3, 1000), (1000, 3)])
@BOTH
def test_epilogues(activation, m, n, of_w):
    k, dtype = 1043, torch.float32
    a, b = values((m, k), dtype, 0, "cuda"), placed(values((k, n), dtype, 1, "cuda"), of_w)
    a = placed(a, "column") if m > n and of_w == "row" else a
    row, column, full = (values(s, dtype, i, "cuda") for i, s in enumerate(((n,), (m, 1), (m, n)), start=2))
    sides = Sides(column, row, row, full, activation, -0.3, 1.7)
    buffer, out = frame((m, n), dtype, "sliced", "cuda")
    call = described(a, b, out, "ieee", Extras(*sides))
    for config in model.ranked(call.problem, devices.gpu(0), FAMILIES[of_w]):
        launch.prepare(call, config)(*call.tensors)
        assert_fused(out, a, b, sides, tensor_cores=False)
        out.fill_(float("nan"))
    assert guard_intact(buffer, out)


@BOTH
def test_infinities_and_nan_stay_in_their_rows_and_columns(of_w):
    a = values((3, 2053), torch.float32, 0, "cuda")
    b = placed(values((2053, 200), torch.float32, 1, "cuda"), of_w)
    a[1, 3], b[9, 7] = torch.inf, torch.nan
    out = torch.empty(3, 200, device="cuda")
    call = described(a, b, out, "ieee")
    for config in model.ranked(call.problem, devices.gpu(0), FAMILIES[of_w]):
        launch.prepare(call, config)(*call.tensors)
        wanted = a.double() @ b.double()
        assert torch.equal(out.isnan(), wanted.isnan())
        assert torch.equal(out.isinf(), wanted.isinf())


@BOTH
def test_sums_of_fp32_are_compensated(of_w):
    """Sums of one sign, long enough that plain ones in fp32 lose more than their last bits."""
    k = 1 << 20
    a = values((1, k), torch.float32, 0, "cuda").abs()
    b = placed(values((k, 5), torch.float32, 1, "cuda").abs(), of_w)
    out = torch.empty(1, 5, device="cuda")
    call = described(a, b, out, "ieee")
    for config in model.ranked(call.problem, devices.gpu(0), FAMILIES[of_w]):
        launch.prepare(call, config)(*call.tensors)
        wanted = a.double() @ b.double()
        assert ((out - wanted).abs() <= 4 * torch.finfo(torch.float32).eps * wanted).all()


@BOTH
def test_calls_plan_it_alike_in_graphs_and_not_where_batch_invariant(of_w):
    a = values((1, 4099), torch.float32, 0, "cuda")
    w = placed(values((4099, 10007), torch.float32, 1, "cuda"), of_w)
    problem = described(a, w, torch.empty(1, 10007, device="cuda"), "ieee").problem
    assert plans.plan_for(problem, devices.gpu(0), "cached").config.family == FAMILIES[of_w]
    wanted = tritile.matmul(a, w, precision="ieee")
    assert_product(wanted, a, w, tensor_cores=False)
    graph, got = captured(lambda: tritile.matmul(a, w, precision="ieee"))
    got.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got, wanted)
    many = torch.cat([a, values((40, 4099), torch.float32, 2, "cuda")])
    with tritile.batch_invariant():
        one, all_rows = (tritile.matmul(x, w, precision="ieee") for x in (a, many))
    assert torch.equal(one[0], all_rows[0])
