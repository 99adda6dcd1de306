"""Products of few rows by a matrix of odd rows, by tensor cores, on a GPU."""

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
    placed,
    values,
)
from tritile.core import device as devices
from tritile.core.problem import ACTIVATIONS
from tritile.families.odd_rows.family import NAME
from tritile.families.space import legal_configs
from tritile.ops.described import Extras, described
from tritile.planning import model, plans
from tritile.runtime import launch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]
DTYPES = (torch.float16, torch.bfloat16)
SIZES = [(520, 1027), (333, 4099), (4001, 515), (31, 20001), (1, 777), (900, 3), (70, 17)]


@pytest.fixture(scope="module", autouse=True)
def _on_nvidia():
    if devices.gpu(0).nvidia < 80:
        pytest.skip("no asynchronous copies to shared memory")


at = functools.partial(at_offset, device="cuda")


def check(a, b, layout="row", every=1):
    """Make a product by configs twice, into a frame of poison: right, alike, and nothing beside it."""
    buffer, out = frame((a.shape[0], b.shape[1]), a.dtype, layout, "cuda")
    call = described(a, b, out, "ieee")
    configs = legal_configs(call.problem, devices.gpu(0), NAME)
    assert configs
    for config in configs[::every]:
        prepared = launch.prepare(call, config)
        out.fill_(float("nan"))
        prepared(*call.tensors)
        first = out.clone()
        out.fill_(float("nan"))
        prepared(*call.tensors)
        assert torch.equal(out, first), config
        assert_product(out, a, b, tensor_cores=True)
    assert guard_intact(buffer, out)


# Either type at every size, with every number of rows that is compiled apart.
SIZED = [
    (DTYPES[(i + j) % 2], m, size)
    for i, m in enumerate((1, 16, 33, 100, 200))
    for j, size in enumerate(SIZES)
]


@pytest.mark.parametrize(("dtype", "m", "size"), SIZED, ids=str)
def test_sizes(dtype, m, size):
    n, k = size
    if n < m:
        n, m = m + 1, n
    check(values((m, k), dtype, 0, "cuda"), at(1, n, k, dtype), every=1 if size == SIZES[1] else 5)


@pytest.mark.parametrize("offset", [0, 1, 2, 4, 7])
@pytest.mark.parametrize("row", [1027, 1028, 1030])
def test_rows_that_begin_anywhere_in_a_word(offset, row):
    for k in (1023, 1024, 1027):
        check(values((20, k), torch.float16, 0, "cuda"), at(offset, 77, k, torch.float16, row), every=4)


@pytest.mark.parametrize("layout", ["column", "sliced", "column_sliced", "offset", "sparse", "strided"])
def test_layouts_of_x_and_of_out(layout):
    x = placed(values((14, 2053), torch.bfloat16, 0, "cuda"), layout)
    check(x, at(3, 301, 2053, torch.bfloat16), layout, every=4)


@pytest.mark.parametrize("n", [1, 12, 100, 256])
@pytest.mark.parametrize("of_b", ["row", "column"])
def test_few_columns(n, of_b):
    a, b = at(1, 515, 2053, torch.float16).mT, values((2053, n), torch.float16, 2, "cuda")
    check(a, placed(b, of_b), "sliced", every=4)


@pytest.mark.parametrize("activation", ["", *ACTIVATIONS])
@pytest.mark.parametrize(("m", "n"), [(30, 1000), (1000, 30)])
def test_epilogues(activation, m, n):
    k, dtype = 1043, torch.float16
    if m < n:
        a, b = values((m, k), dtype, 0, "cuda"), at(1, n, k, dtype)
    else:
        a, b = at(1, m, k, dtype).mT, values((k, n), dtype, 0, "cuda")
    row, column, full = (values(s, dtype, i, "cuda") for i, s in enumerate(((n,), (m, 1), (m, n)), start=2))
    sides = Sides(column, row, row, full, activation, -0.3, 1.7)
    buffer, out = frame((m, n), dtype, "sliced", "cuda")
    call = described(a, b, out, "ieee", Extras(*sides))
    for config in legal_configs(call.problem, devices.gpu(0), NAME)[::3]:
        launch.prepare(call, config)(*call.tensors)
        assert_fused(out, a, b, sides, tensor_cores=True)
        out.fill_(float("nan"))
    assert guard_intact(buffer, out)


def test_infinities_and_nan_stay_in_their_rows_and_columns():
    a, b = values((13, 2053), torch.float16, 0, "cuda"), at(0, 200, 2053, torch.float16)
    a[1, 3], a[12, 2052], b[9, 7], b[2052, 11] = torch.inf, torch.nan, torch.nan, torch.inf
    wanted = a.double() @ b.double()
    out = torch.empty(13, 200, dtype=torch.float16, device="cuda")
    call = described(a, b, out, "ieee")
    for config in legal_configs(call.problem, devices.gpu(0), NAME):
        launch.prepare(call, config)(*call.tensors)
        assert torch.equal(out.isnan(), wanted.isnan())
        assert torch.equal(out.isinf(), wanted.isinf())


def test_calls_plan_it_alike_in_graphs_and_not_where_batch_invariant():
    a = values((32, 8191), torch.bfloat16, 0, "cuda")
    w = values((8191, 8191), torch.bfloat16, 1, "cuda")
    problem = described(a, w.mT, torch.empty(32, 8191, dtype=a.dtype, device="cuda"), "ieee").problem
    assert NAME in {config.family for config in model.beside(problem, devices.gpu(0))}
    assert plans.plan_for(problem, devices.gpu(0), "cached").config.family == NAME
    wanted = tritile.matmul(a, w.mT)
    assert_product(wanted, a, w.mT, tensor_cores=True)
    graph, got = captured(lambda: tritile.matmul(a, w.mT))
    got.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got, wanted)
    with tritile.batch_invariant():
        one, rows = tritile.matmul(a[:1], w.mT), tritile.matmul(a, w.mT)
    assert torch.equal(one[0], rows[0])
