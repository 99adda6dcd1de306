"""Products of few rows, interpreted: without tensor cores, and by them with a matrix of odd rows.

Of `skinny_k` columns of w are contiguous ("column"), of `skinny_n` rows are ("row"). Rows of w of
`odd_rows` are contiguous along K and begin amid a word ("odd"). What all families have to do is in
test_families_interpreted.py.
"""

import pytest
import torch

from tests.accesses import reading_only
from tests.configs import odd_rows, skinny_k, skinny_n
from tests.reference import assert_product, at_offset, frame, guard_intact, name, placed, values
from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.families import launching
from tritile.families.skinny import family_n
from tritile.families.space import illegal
from tritile.families.work import work_of
from tritile.ops.products import matmul_call

pytestmark = pytest.mark.interpreted

H200 = target_device("nvidia-h200")
FP32, HALF, BF16 = torch.float32, torch.float16, torch.bfloat16
both = pytest.mark.parametrize("of_w", ["column", "row"])
CONFIG_OF = {"column": skinny_k, "row": skinny_n, "odd": lambda rows, dtype: odd_rows(rows)}


def run(a, b, out, of_w="column", config=None):
    """Make a product by a legal config; return the launch's steps and workspaces."""
    call = matmul_call(a, b, out, "ieee")
    config = config or CONFIG_OF[of_w](min(call.problem.m, call.problem.n), a.dtype)
    assert illegal(config, call.problem, H200) is None
    launching.run_interpreted(call, config)
    return work_of(call, config, H200.processors, True)


def check(a, b, layout="row", of_w="column", config=None):
    """Make a product into a frame of poison, reading elements of a and b alone; return its launches.

    Twice where programs share K, with the same bits. Of bfloat16 in fp32: the interpreter cuts where it
    should round to bfloat16.
    """
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    dtype = FP32 if a.dtype == BF16 else a.dtype
    buffer, out = frame((*batch, a.shape[-2], b.shape[-1]), dtype, layout)
    with reading_only(a, b):
        work = run(a, b, out, of_w, config=config)
        first = out.clone()
        if work.counters or len(work.steps) > 1:
            run(a, b, out, of_w, config=config)
    assert torch.equal(out, first)
    assert_product(out, a, b)
    assert guard_intact(buffer, out)
    return work


def pair(m, n, k, dtype=HALF, of_w="column"):
    return values((m, k), dtype), placed(values((k, n), dtype, 1), of_w)


@both
@pytest.mark.parametrize("dtype", [FP32, HALF, BF16], ids=name)
@pytest.mark.parametrize("m", [1, 3, 8])
def test_any_skinny_k(dtype, m, of_w):
    work = check(*pair(m, 37, 301, dtype, of_w), of_w=of_w)
    assert len(work.steps) == (2 if of_w == "row" else 1)
    assert of_w == "column" or work.steps[0].args["split"] > 1


@pytest.mark.parametrize(("m", "n"), [(1, 2), (3, 31), (8, 33), (3, 72)])
def test_one_kernel_without_shared_k(monkeypatch, m, n):
    """As where one program has as many tiles as the GPU has room."""
    monkeypatch.setattr(family_n, "parts", lambda config, problem, processors: 1)
    work = check(*pair(m, n, 67, of_w="row"), of_w="row")
    assert len(work.steps) == 1
    assert not work.scratch


# M, N and K, at how many elements after a word rows of w begin, how many from one to the next, and the dtype.
# Rows 259 apart begin at 8 places in a word, others at 4, 2 and 1.
ALONG = {
    "ends amid a word": [(1 + k % 3, 11, k, at) for k, at in zip(range(2, 18), 8 * (0, 7), strict=True)],
    "begins amid a word": [
        *((2, 9, 256, at, 259) for at in range(8)),
        *((2, 9, 256, at, row) for at, row in ((0, 260), (1, 260), (3, 264), (4, 264), (0, 272), (7, 272))),
    ],
    "begins amid a word of fp32": [
        *((2, 9, 255, at, 259, FP32) for at in range(4)),
        *((2, 9, 255, at, row, FP32) for at, row in ((1, 260), (0, 264), (3, 272))),
    ],
    "last tile": [(2, n, 301, 3) for n in (2, 7, 8, 31, 32, 33, 63, 64, 65)],
}
# The same of rows of w along N: nothing beside one is read, though rows are aligned and end amid a word.
ACROSS = {
    "begins amid a word": [
        (2, n, 30, at, row)
        for at, n in ((0, 35), (1, 40), (2, 35), (4, 40), (7, 35))
        for row in (48, 49, 50, 52)
    ],
    "last block of K, fewer than parts": [
        (2, 40, k) for k in (1, 2, 3, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64)
    ],
    "last tile": [
        *((2, n, 70) for n in (2, 7, 8, 31, 32, 33, 63, 64, 65)),
        *((2, n, 70, 0, None, FP32) for n in (7, 32, 65)),
    ],
}
# By how many programs that share K.
ODD = {
    ("begins amid a word", 1): [(5, 21, 141, 0), (5, 21, 129, 3, 142), (5, 21, 129, 1, 140), (5, 21, 144, 5)],
    ("begins amid a word", 2): [(5, 21, 129, 0, 141), (5, 21, 142, 3), (5, 21, 140, 1), (5, 21, 129, 5, 144)],
    ("short", 1): [
        *((n, n + 1, k, 1, 67) for k in (1, 7, 8, 9, 17, 33) for n in (1, 2)),
        *((40, 41, k, 1, 67) for k in (7, 17)),
    ],
    ("numbers of rows", 1): [(65, 66, 35), (130, 131, 35)],
    ("numbers of rows", 2): [(1, 2, 131), (17, 18, 131)],
    ("numbers of rows", 4): [(15, 16, 301)],
}


def along_k(m, n, k, at=0, row=None, dtype=HALF):
    return values((m, k), dtype), at_offset(at, n, k, dtype, row)


def along_n(m, n, k, at=0, row=None, dtype=HALF):
    return values((m, k), dtype), at_offset(at, k, n, dtype, row).mT


@pytest.mark.parametrize("what", ALONG)
def test_rows_along_k(what):
    for case in ALONG[what]:
        check(*along_k(*case))


@pytest.mark.parametrize("what", ACROSS)
def test_rows_along_n(what):
    for case in ACROSS[what]:
        check(*along_n(*case), of_w="row")


@pytest.mark.parametrize(("what", "split"), ODD)
def test_odd_rows(what, split):
    for m, *case in ODD[what, split]:
        check(*along_k(m, *case), of_w="odd", config=odd_rows(m, split))


def test_rows_that_overlap_or_are_one():
    def sliding(rows, columns):
        """Rows that begin one element after the last."""
        return values((1, 400), HALF, 2)[0].as_strided((rows, columns), (1, 1))

    check(sliding(3, 64), pair(3, 19, 64)[1])
    check(values((2, 300), HALF), values((1, 300), HALF, 1).expand(20, 300).mT)
    check(values((2, 1), HALF), values((1, 30), HALF, 1)[:, ::3])  # no row begins as another
    check(sliding(3, 64), pair(3, 19, 64, of_w="row")[1], of_w="row")
    check(values((3, 64), HALF), sliding(64, 40), of_w="row")
    check(values((2, 67), HALF), values((1, 40), HALF, 1).expand(67, 40), of_w="row")


# K and N, and by which values the first kernel is compiled. PERIOD: rows of w to one that begins on a word.
WORDS = [
    *(
        ("column", dtype, 3, 21, k, {"PERIOD": whole, "X_WORDS": whole == 1, "EDGES": whole > 1})
        for k, dtype, whole in ((304, HALF, 1), (300, FP32, 1), (301, FP32, 4), (301, HALF, 8))
    ),
    *(
        ("row", dtype, 3, n, 50, {"WIDE": wide, "X_WORDS": False})
        for n, dtype, wide in ((40, HALF, 8), (36, HALF, 4), (38, HALF, 2), (39, HALF, 1), (36, FP32, 4))
    ),
    ("row", HALF, 1, 40, 77, {"X_WORDS": True}),  # past whose end nothing is read
]


@pytest.mark.parametrize(("of_w", "dtype", "m", "n", "k", "by"), WORDS, ids=str)
def test_reads_as_wide_as_aligned(of_w, dtype, m, n, k, by):
    work = check(*pair(m, n, k, dtype, of_w), of_w=of_w)
    assert {name: work.steps[0].args[name] for name in by} == by


@pytest.mark.parametrize(
    ("of_w", "n", "config"),
    [
        *(("column", 21, skinny_k(2, HALF, warps, stages)) for stages in (1, 2, 5) for warps in (1, 4)),
        *(
            ("row", n, skinny_n(2, HALF, columns, unroll))
            for columns, unroll, n in ((8, 2, 40), (16, 8, 101), (64, 4, 40), (256, 2, 301))
        ),
    ],
    ids=str,
)
def test_every_shape_of_a_tile(of_w, n, config):
    check(*pair(2, n, 517 if of_w == "column" else 77, of_w=of_w), of_w=of_w, config=config)


def test_few_fp32_columns_are_copied():
    a, b = pair(130, 3, 67, FP32)
    buffer, out = frame((130, 3), FP32, "sliced")
    assert matmul_call(a, b, out, "ieee").problem.by_rows
    run(a, b, out)
    assert_product(out, a, b)
    assert guard_intact(buffer, out)


@pytest.mark.parametrize(("of_w", "shared"), [("column", False), ("row", False), ("row", True)])
def test_sums_of_fp32_are_compensated(of_w, shared, monkeypatch):
    """After 128 ones, each product is a fourth of a step of fp32 at 1: plain sums lose all of them.

    Where programs share K, sums are of one sign, long enough that plain ones lose more than their last bits.
    """
    step = torch.finfo(FP32).eps
    a, b = torch.full((1, 1 << 13), step / 4), placed(torch.ones(1 << 13, 2), of_w)
    a[:, :128] = 1.0
    if shared:
        a, b = (x.abs() for x in pair(1, 2, 1 << 14, FP32, "row"))
    else:
        monkeypatch.setattr(family_n, "parts", lambda config, problem, processors: 1)
    out = torch.empty(1, 2)
    run(a, b, out, of_w)
    wanted = a.double() @ b.double()
    assert ((out - wanted).abs() <= 4 * step * wanted).all()


def test_more_parts_than_under_way():
    work = check(*pair(1, 33, 4099, of_w="row"), of_w="row")
    assert work.steps[0].args["split"] > family_n._PARTS


@pytest.mark.parametrize("turned", [False, True])
def test_largest_tile_stored_in_halves(turned):
    """Of 531 rows 67 begin alike, which is more than half a tile."""
    x, w = values((140, 35), HALF), at_offset(3, 531, 35, HALF)
    config = Config.of(8, 4, "odd_rows", BLOCK_M=256, BLOCK_N=128, BLOCK_K=64, SPLIT_K=1)
    check(*((w.mT, x.mT.contiguous()) if turned else (x, w)), "sliced", config=config)
