"""Products of few rows, or columns, on a GPU: without tensor cores, and by them with a matrix of odd rows.

What all families have to do is in test_families_gpu.py.
"""

import functools
import itertools

import pytest
import torch

import tritile
from tests.launched import replayed
from tests.reference import assert_product, at_offset, frame, guard_intact, placed, values
from tritile.choose import pick, waves
from tritile.core import device as devices
from tritile.families import launching
from tritile.families.odd_rows import family as odd_rows
from tritile.families.skinny import family_k as skinny_k
from tritile.families.skinny import family_n
from tritile.families.space import legal_configs
from tritile.ops.products import matmul_call

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
# By the layout of w. Rows of "odd" are contiguous along K too, and begin off words.
FAMILIES = {"column": skinny_k.NAME, "row": family_n.NAME, "odd": odd_rows.NAME}
few = pytest.mark.parametrize("of_w", ["column", "row"])
every = pytest.mark.parametrize("of_w", FAMILIES)
at = functools.partial(at_offset, device="cuda")


@pytest.fixture(scope="module", autouse=True)
def _on_nvidia():
    if devices.gpu(0).nvidia < 80:
        pytest.skip("no asynchronous copies to shared memory")


def gpu(shape, dtype, seed=0):
    return values(shape, dtype, seed, "cuda")


def matrix(k, n, dtype, of_w):
    return at(1, n, k, dtype) if of_w == "odd" else placed(gpu((k, n), dtype, 1), of_w)


def configs_of(call, of_w):
    device = devices.gpu(0)
    if of_w == "odd":
        return legal_configs(call.problem, device, FAMILIES[of_w])
    return waves.ranked(call.problem, device, FAMILIES[of_w])


def check(a, b, layout="row", of_w="column", some=slice(None)):
    """Make a product by configs twice, into a frame of poison: right, alike, and nothing outside touched."""
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    buffer, out = frame((*batch, a.shape[-2], b.shape[-1]), a.dtype, layout, "cuda")
    call = matmul_call(a, b, out, "ieee")
    configs = configs_of(call, of_w)[some]
    assert configs
    for config in configs:
        prepared, found = launching.prepare(call, config), []
        for _ in range(2):
            out.fill_(float("nan"))
            prepared(*call.tensors)
            found.append(out.clone())
        assert torch.equal(*found), config
        assert_product(out, a, b, tensor_cores=of_w == "odd")
    assert guard_intact(buffer, out)


# N and K. Every number of rows that is compiled apart, in each type; every size, in each type.
SIZES = [(520, 1024), (333, 4099), (4001, 515), (31, 20000), (1, 777), (900, 3), (70, 17)]
FEW = [(dtype, m, SIZES[1]) for dtype in (FP16, BF16, FP32) for m in (1, 2, 3, 4, 8)]
FEW += [
    (dtype, m, size) for dtype, m in ((FP16, 1), (BF16, 3), (FP32, 8)) for size in SIZES if size != SIZES[1]
]
ODD_SIZES = [(520, 1027), (333, 4099), (4001, 515), (31, 20001), (1, 777), (900, 3), (70, 17)]
CASES = [
    *(("column", *case) for case in FEW),
    *(("row", *case) for case in FEW if 1 not in case[2]),  # of one column, contiguous along K
    *(("row", BF16, m, size) for m in (1, 8) for size in ((2, 777), (64, 30011), (2713, 21424), (60001, 35))),
    *(
        ("odd", (FP16, BF16)[(i + j) % 2], *((m, size) if size[0] >= m else (size[0], (m + 1, size[1]))))
        for i, m in enumerate((1, 16, 33, 100, 200))
        for j, size in enumerate(ODD_SIZES)
    ),
]


@pytest.mark.parametrize(("of_w", "dtype", "m", "size"), CASES, ids=str)
def test_sizes(of_w, dtype, m, size):
    n, k = size
    step = 5 if of_w == "odd" and size != ODD_SIZES[1] else 1
    check(gpu((m, k), dtype), matrix(k, n, dtype, of_w), of_w=of_w, some=slice(None, None, step))


COLUMNS = [*itertools.product(("column", "row"), (1, 3), (1040, 2053))]
COLUMNS += [("odd", n, 2053) for n in (1, 12, 100, 256)]


@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize(("of_w", "n", "k"), COLUMNS)
def test_few_columns(of_w, n, k, sliced):
    a, b = matrix(k, 515, FP16, of_w).mT, placed(gpu((k, n), FP16, 2), "column" if sliced else "row")
    if sliced and of_w != "odd":
        a = placed(a, "sliced" if of_w == "column" else "column_sliced")
    check(a, b, "sliced", of_w, slice(None, None, 4 if of_w == "odd" else 1))


@pytest.mark.parametrize("offset", [0, 1, 2, 4, 7])
@pytest.mark.parametrize("row", [1027, 1028, 1030, 1032, 1040])
def test_rows_begin_amid_words(offset, row):
    for size in (1023, 1024, 1027):
        for dtype in (FP16, FP32):
            check(gpu((2, size), dtype), at(offset, 77, size, dtype, row), some=slice(2))
            check(gpu((2, 77), dtype), at(offset, 77, size, dtype, row).mT, of_w="row", some=slice(3))
        if row < 1032:
            w = at(offset, 77, size, FP16, row)
            check(gpu((20, size), FP16), w, of_w="odd", some=slice(None, None, 4))


@few
def test_sums_of_fp32_are_compensated(of_w):
    """Sums of one sign, long enough that plain ones in fp32 lose more than their last bits."""
    k = 1 << 20
    a, b = gpu((1, k), FP32).abs(), placed(gpu((k, 5), FP32, 1).abs(), of_w)
    out, wanted = torch.empty(1, 5, device="cuda"), a.double() @ b.double()
    call = matmul_call(a, b, out, "ieee")
    for config in configs_of(call, of_w):
        launching.prepare(call, config)(*call.tensors)
        assert ((out - wanted).abs() <= 4 * torch.finfo(FP32).eps * wanted).all()


PLANNED = {"column": (1, 4099, 10007, FP32), "row": (1, 4099, 10007, FP32), "odd": (32, 8191, 8191, BF16)}


@every
def test_planned_alike_in_graphs(of_w):
    m, k, n, dtype = PLANNED[of_w]
    many, w = gpu((m + 40, k), dtype), placed(gpu((k, n), dtype, 1), "row" if of_w == "row" else "column")
    a = many[:m]
    problem = matmul_call(a, w, torch.empty(m, n, dtype=dtype, device="cuda"), "ieee").problem
    assert pick.plan_for(problem, devices.gpu(0), "cached").config.family == FAMILIES[of_w]
    product = functools.partial(tritile.matmul, precision="ieee" if dtype == FP32 else None)
    wanted = product(a, w)
    assert_product(wanted, a, w, tensor_cores=of_w == "odd")
    assert torch.equal(replayed(lambda: product(a, w)), wanted)
    with tritile.batch_invariant():
        assert torch.equal(product(a[:1], w)[0], product(many, w)[0])
