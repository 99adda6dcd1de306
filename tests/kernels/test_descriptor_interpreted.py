"""The descriptor kernel and the copying of operands in Triton's interpreter."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch

from tests.configs import tma
from tests.reference import assert_product, frame, guard_intact, placed, values
from tritile.core.problem import MatmulProblem
from tritile.errors import TuningError
from tritile.families.common import operands
from tritile.families.common.operands import copied, realigned
from tritile.families.work import work_of
from tritile.ops.products import matmul_call
from tritile.runtime import launch

pytestmark = pytest.mark.interpreted

config = functools.partial(tma, 32, 32, 16, group=2)
CONFIGS = [config()]
CONFIGS += [config(persistent=True), config(persistent=True, subtiles=2), config(split=2), config(split=4)]
TURNS = [
    ("row", "row"),
    ("row", "column"),
    ("column", "row"),
    ("sliced", "column_sliced"),
    ("sparse", "strided"),
]


def test_programs_without_a_block_are_refused():
    a, b = values((32, 48), torch.float32), values((48, 32), torch.float32, 1)
    with pytest.raises(TuningError, match="SPLIT_K = 4 leaves programs without a block of K = 48"):
        run(config(split=4), a, b, torch.empty(32, 32))


def run(config, a, b, out):
    call = matmul_call(a, b, out, "tf32")  # computed as fp32 here
    launch.run_interpreted(call, config)
    assert_product(out, a, b)


# Where no descriptor sees operands they are copied whatever the config: one is enough for each.
WHOLE, ODD, LOW = (64, 68, 72), (67, 35, 83), (37, 51, 64)
SIZED = [
    *itertools.product([WHOLE], TURNS[:3], CONFIGS),
    *itertools.product([ODD], TURNS[1:2], CONFIGS),
    *itertools.product([WHOLE], TURNS[3:], CONFIGS[:1]),
    *itertools.product([ODD], TURNS[:1] + TURNS[2:], CONFIGS[2:4]),
    # Rows of b and of out that start on 16 bytes wherever they end.
    *itertools.product([(2, 37, n, 64) for n in (3, 32, 51)], [("row", "padded", "padded")], CONFIGS),
    # One tile: the interpreter runs the first of two programs to its end, which looks for the other.
    *itertools.product([(30, 29, 64), (32, 32, 33)], TURNS[:1], CONFIGS[3:4]),
]


@pytest.mark.parametrize(("size", "layouts", "config"), SIZED, ids=str)
def test_layouts_and_sizes(config, layouts, size):
    *batch, m, n, k = size
    a, b = (values((*batch, *shape), torch.float32, i) for i, shape in enumerate(((m, k), (k, n))))
    buffer, out = frame((*batch, m, n), torch.float32, (*layouts, "row")[2])
    run(config, placed(a, layouts[0]), placed(b, layouts[1]), out)
    assert guard_intact(buffer, out)


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[3]], ids=str)
def test_batches_of_two_dimensions_are_copied_matrix_by_matrix(config):
    """Those over which an operand is stretched once."""
    a, b = values((2, 3, 19, 33), torch.float32), values((2, 3, 33, 35), torch.float32, 1)
    turned = a.transpose(0, 1).contiguous().transpose(0, 1)
    for left, right in (
        (turned, b),
        (turned, b[:1]),
        (a[:, :1], b.transpose(0, 1).contiguous().transpose(0, 1)),
    ):
        call = matmul_call(left, right, torch.empty(2, 3, 19, 35), "tf32")
        assert len(call.batch_shape) == 2
        run(config, left, right, torch.empty(2, 3, 19, 35))


def test_only_the_operand_that_needs_it_is_copied():
    def steps(a, b):
        out = torch.empty(a.shape[0], b.shape[1])
        work = work_of(matmul_call(a, b, out, "tf32"), config(), 1, False)
        return [step.kernel.__name__ for step in work.steps], len(work.scratch)

    even, odd = torch.empty(64, 64), torch.empty(64, 65)
    assert steps(even, even) == (["matmul_descriptor"], 0)
    assert steps(even, odd) == (["repack", "matmul_descriptor"], 1)
    assert steps(odd.T, odd) == (["repack", "matmul_descriptor"], 2)
    assert steps(even[:, :40], even[:40]) == (["matmul_descriptor"], 0)


def halves(m, n, k, layout="column", **more):
    return MatmulProblem(1, m, n, k, "bfloat16", "bfloat16", b_layout=layout, **more)


@pytest.mark.parametrize(
    ("problem", "copies"),
    [
        (halves(2048, 4096, 4096), (False, False)),  # rows on lines
        (halves(2048, 4096, 4104), (True, False)),  # the smaller one, which saves most
        (halves(4096, 2048, 4104), (False, True)),
        (halves(16384, 16384, 16376), (True, True)),
        (halves(4096, 2048, 4112), (False, False)),  # rows on sectors
        (halves(16, 4096, 4104), (False, False)),  # a copy takes longer than it saves
        (halves(4096, 4104, 4096, "row"), (False, True)),  # rows of b alone start off sectors
        (halves(4104, 4096, 4096, "row", a_layout="column"), (True, False)),
        (halves(4096, 4096, 4104, a_align=8), (False, False)),  # a is copied in any case
        (replace(halves(4096, 2048, 4104), dtype="float8_e4m3fn"), (False, False)),  # not measured
        (halves(4096, 2047, 4104, out_align=2), (False, False)),  # nor is this
        (halves(4096, 4096, 4104, epilogue="gated silu"), (False, False)),  # nor are gated products
        (halves(1, 60000, 30008), (False, False)),  # one row starts where its tensor does
    ],
    ids=str,
)
def test_operands_whose_rows_start_off_sectors_are_copied_where_that_pays(problem, copies):
    assert realigned(problem) == copies
    unreadable = problem.a_align < 16, problem.b_align < 16
    assert copied(problem) == tuple(map(any, zip(copies, unreadable, strict=True)))


@pytest.mark.parametrize("copies", [(True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("turn", [("row", "row"), ("column", "column")], ids=str)
def test_copies_of_rows_off_sectors_give_the_same_answers(copies, turn, monkeypatch):
    monkeypatch.setattr(operands, "realigned", lambda problem: copies)
    m, n, k = 44, 52, 68  # of 4 bytes: rows start on 16 bytes, and not on 32
    a, b = placed(values((m, k), torch.float32), turn[0]), placed(values((k, n), torch.float32, 1), turn[1])
    buffer, out = frame((m, n), torch.float32, "row")
    run(CONFIGS[0], a, b, out)
    assert guard_intact(buffer, out)
    steps = work_of(matmul_call(a, b, out, "tf32"), CONFIGS[0], 1, False).steps
    assert [step.kernel.__name__ for step in steps] == ["repack", "matmul_descriptor"]
    wide = torch.empty(64, 96)  # rows with gaps, that start on sectors
    call = matmul_call(wide[:, :68], torch.empty(68, 64), torch.empty(64, 64), "tf32")
    assert len(work_of(call, config(), 1, False).steps) == 1


def test_a_batch_that_no_descriptor_sees_is_refused():
    a = values((2, 3, 5, 16, 16), torch.float32).permute(2, 0, 1, 3, 4)[:, :, ::2]
    call = matmul_call(a, a, torch.empty(5, 2, 2, 16, 16), "tf32")
    if len(call.batch_shape) < 3:
        pytest.skip("the batch merged")
    with pytest.raises(TuningError, match="do not merge"):
        work_of(call, config(), 1, False)
