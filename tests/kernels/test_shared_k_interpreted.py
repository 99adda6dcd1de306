"""Programs that share the K of a tile, in the interpreter and in orders that are drawn.

Whoever comes last, waits or gives up: the product is right, and every counter is as the next launch wants it.
"""

import random

import pytest
import torch

from tests.configs import tma
from tests.interleaved import interleaved
from tests.reference import assert_product, values
from tritile.families.work import work_of
from tritile.ops.products import matmul_call
from tritile.runtime import launch
from tritile.runtime.work import COUNTERS

pytestmark = pytest.mark.interpreted

PROGRAMS_AT_ONCE = 64  # as many as the GPU runs, so that those of one tile wait for each other
A, B = values((40, 128), torch.float32), values((128, 20), torch.float32, 1)


def first(seed):
    """Each to its end, in turn, as the interpreter has it."""
    return lambda left: left[0]


def last(seed):
    return lambda left: left[-1]


def fair(seed):
    return random.Random(seed).choice


def one_ahead(seed):
    """One program goes on nine times of ten, so that it gives up now and then."""
    draw = random.Random(seed)
    return lambda left: left[seed % len(left)] if draw.random() < 0.9 else draw.choice(left)


def launched(config, counters, choose, out, processors=PROGRAMS_AT_ONCE, **extras):
    call = matmul_call(A, B, out, "tf32", **extras)  # computed as fp32 here
    work = work_of(call, config, processors, False)
    (step,) = work.steps
    scratch = {name: torch.full((s.elements,), float("nan")) for name, s in work.scratch.items()}
    buffers = (
        dict(zip(call.buffers, call.tensors, strict=True)) | scratch | {COUNTERS: counters[: work.counters]}
    )
    with interleaved(choose):
        step.kernel[step.grid](*[launch._bound(arg, buffers) for arg in step.values])


ORDERS = [(first, 1), (last, 3), (fair, 0), (fair, 1), (fair, 3), (fair, 64), (one_ahead, 3), (one_ahead, 8)]


@pytest.mark.parametrize(("order", "polls"), ORDERS)
@pytest.mark.parametrize("split", [2, 4])
def test_any_order_gives_the_product(monkeypatch, split, order, polls):
    """Counters are ready for the next call."""
    monkeypatch.setattr("tritile.families.common.grids.POLLS", polls)
    config, counters = tma(32, 32, 32, group=2, split=split), torch.zeros(8, dtype=torch.int64)
    for seed in range(3):
        out = torch.full((40, 20), float("nan"))
        launched(config, counters, order(seed), out)
        assert_product(out, A, B)
        assert not (counters % 2**24).any()  # of those who gave up and of those who came


def test_large_tile_summed_in_parts():
    """Where more programs share tiles than run at once, the last of a tile sums all of it."""
    config = tma(128, 256, 32, 8, 2, split=2, group=1)
    (step,) = work_of(matmul_call(A, B, torch.empty(40, 20), "tf32"), config, 1, False).steps
    assert step.args["POLLS"] == 0
    out, counters = torch.full((40, 20), float("nan")), torch.zeros(8, dtype=torch.int64)
    launched(config, counters, first(0), out, processors=1)
    assert_product(out, A, B)


def shuffled(seed):
    """Every other program is held back for a while: some give up, and others find all parts there."""
    draw = random.Random(seed)
    weights = [draw.choice((1, 30)) for _ in range(PROGRAMS_AT_ONCE)]
    return lambda left: draw.choices(left, [weights[each] for each in left])[0]


@pytest.mark.parametrize("polls", [1, 3, 8])
def test_residual_over_result_once(monkeypatch, polls):
    """Where some gave up the last to arrive sums all rows: one that finds all parts there sums none."""
    monkeypatch.setattr("tritile.families.common.grids.POLLS", polls)
    counters = torch.zeros(8, dtype=torch.int64)
    for seed in range(8):
        out = torch.zeros((40, 20))
        launched(tma(32, 32, 32, group=2, split=4), counters, shuffled(seed), out, residual=out)
        assert_product(out, A, B)
