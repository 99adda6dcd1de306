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
from tritile.families.skinny import family_n
from tritile.families.space import illegal
from tritile.families.work import work_of
from tritile.ops.products import matmul_call
from tritile.runtime import launch

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
    launch.run_interpreted(call, config)
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
def test_one_kernel_makes_it_where_programs_do_not_share_k(monkeypatch, m, n):
    """As where one program has as many tiles as the GPU has room."""
    monkeypatch.setattr(family_n, "parts", lambda config, problem, processors: 1)
    work = check(*pair(m, n, 67, of_w="row"), of_w="row")
    assert len(work.steps) == 1
    assert not work.scratch


def sliding(rows, columns, dtype=HALF):
    """Rows that begin one element after the last."""
    return values((1, 400), dtype, 2)[0].as_strided((rows, columns), (1, 1))


def placed_rows(offset, n, k, row, m=2):
    return values((m, k), HALF), at_offset(offset, n, k, HALF, row)


# Operands along K, of rows that end or begin amid a word, last tiles, rows that overlap or are one.
ALONG = {
    "ends amid a word": [
        lambda k=k, at=at: (values((1 + k % 3, k), HALF), at_offset(at, 11, k, HALF))
        for k in range(2, 18) for at in (0, 1, 7)
    ],
    "begins amid a word": [  # rows 259 elements apart begin at 8 places in a word, others at 4, 2 and 1
        lambda at=at, row=row: placed_rows(at, 9, 256, row) for at in range(8) for row in (259, 260, 264, 272)
    ],
    "begins amid a word of fp32": [
        lambda at=at, row=row: (values((2, 255), FP32), at_offset(at, 9, 255, FP32, row))
        for at in range(4) for row in (259, 260, 264, 272)
    ],
    "last tile": [lambda n=n: placed_rows(3, n, 301, None) for n in (2, 7, 8, 31, 32, 33, 63, 64, 65)],
    "K of 1": [lambda: (values((2, 1), HALF), values((1, 30), HALF, 1)[:, ::3])],  # no row begins as another
    "overlaps": [lambda: (sliding(3, 64), pair(3, 19, 64)[1])],
    "stretched": [lambda: (values((2, 300), HALF), values((1, 300), HALF, 1).expand(20, 300).mT)],
}  # fmt: skip
ACROSS = {
    "begins amid a word": [  # nothing beside a row is read, though rows are aligned and end amid a word
        lambda at=at, row=row, n=n: (values((2, 30), HALF), at_offset(at, 30, n, HALF, row).mT)
        for at in (0, 1, 2, 4, 7) for row in (48, 49, 50, 52) for n in (35, 40)
    ],
    "last block of K, fewer than parts": [
        lambda k=k: pair(2, 40, k, of_w="row") for k in (1, 2, 3, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64)
    ],
    "last tile": [
        lambda n=n, dtype=dtype: pair(2, n, 70, dtype, "row")
        for n in (2, 7, 8, 31, 32, 33, 63, 64, 65) for dtype in (HALF, FP32)
    ],
    "overlaps": [
        lambda: (sliding(3, 64), pair(3, 19, 64, of_w="row")[1]),
        lambda: (values((3, 64), HALF), sliding(64, 40)),
    ],
    "stretched": [lambda: (values((2, 67), HALF), values((1, 40), HALF, 1).expand(67, 40))],
}  # fmt: skip


ODD = {
    "begins amid a word": [
        lambda k=k, at=at, row=row, by=by: (values((5, k), HALF), at_offset(at, 21, k, HALF, row), by)
        for row, at, k, by in (
            (141, 0, 141, 1), (141, 0, 129, 2), (142, 3, 129, 1), (142, 3, 142, 2),
            (140, 1, 140, 2), (140, 1, 129, 1), (144, 5, 144, 1), (144, 5, 129, 2),
        )
    ],
    "short": [
        lambda k=k, n=n: (values((n, k), HALF), at_offset(1, n + 1, k, HALF, 67), 1)
        for k in (1, 7, 8, 9, 17, 33) for n in (1, 2, 40)
    ],
    "numbers of rows": [
        lambda m=m, k=k, split=split: (values((m, k), HALF), at_offset(0, m + 1, k, HALF), split)
        for m, k, split in ((1, 131, 2), (15, 301, 4), (17, 131, 2), (65, 67, 1), (130, 35, 1))
    ],
}  # fmt: skip
OPERANDS = [(of_w, what) for of_w, of in (("column", ALONG), ("row", ACROSS), ("odd", ODD)) for what in of]


@pytest.mark.parametrize(("of_w", "what"), OPERANDS)
def test_operands(of_w, what):
    for operands in {"column": ALONG, "row": ACROSS, "odd": ODD}[of_w][what]:
        a, b, *split = operands()
        check(a, b, of_w=of_w, config=odd_rows(len(a), *split) if split else None)


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
def test_operands_are_read_as_wide_as_they_are_aligned(of_w, dtype, m, n, k, by):
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


def test_few_columns_of_fp32_that_are_copied_row_by_row_first():
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


def test_more_parts_than_the_second_kernel_has_under_way():
    work = check(*pair(1, 33, 4099, of_w="row"), of_w="row")
    assert work.steps[0].args["split"] > family_n._PARTS


@pytest.mark.parametrize("turned", [False, True])
def test_the_largest_tile_is_stored_in_halves(turned):
    """Of 531 rows 67 begin alike, which is more than half a tile."""
    x, w = values((140, 35), HALF), at_offset(3, 531, 35, HALF)
    config = Config.of(8, 4, "odd_rows", BLOCK_M=256, BLOCK_N=128, BLOCK_K=64, SPLIT_K=1)
    check(*((w.mT, x.mT.contiguous()) if turned else (x, w)), "sliced", config=config)
