"""Tutorial kernels in Triton's interpreter: right at any size, and asking for the bytes they say."""

from dataclasses import replace

import pytest
import torch

from tests.counting import counted
from tests.reference import assert_product
from tritile.core.device import INTERPRETER
from tritile.lab.ladder.running import matrices, run_interpreted
from tritile.lab.ladder.steps import ITEMSIZE, LADDERS, Kernel

GUARD = 64  # elements on either side of the output
ODD = (1, 31, 65)
EVEN = (8, 40, 72, 136)  # what TMA takes
ALIGNED = "persistent, TMA"


def rungs(of):
    """Yield each step with an interpretable kernel, once for each of its first `of` configs."""
    for rung in (rung for ladder in LADDERS.values() for rung in ladder):
        if isinstance(rung.runs, Kernel) and rung.unfit(INTERPRETER, 8) is None:
            for config in rung.runs.configs[:of]:
                one = replace(rung, runs=replace(rung.runs, configs=(config,)))
                yield pytest.param(one, id=f"{rung.op}-{rung.name}-{config}".replace(" ", "_"))


def ran(rung, n):
    """Return the matrices after a run on an output full of NaN, and the counts."""
    dtype = "float16" if rung.dtype == "bfloat16" else rung.dtype  # the interpreter is wrong in bfloat16
    *given, _ = matrices(rung.op, n, dtype, "cpu")
    memory = torch.full((n * n + 2 * GUARD,), float("nan"), dtype=given[0].dtype)
    out = memory[GUARD:-GUARD].view(n, n)
    with counted() as counts:
        run_interpreted(rung, (*given, out))
    assert memory[:GUARD].isnan().all()
    assert memory[-GUARD:].isnan().all()
    return given, out, counts


def check(rung, n):
    given, out, counts = ran(rung, n)
    if rung.op == "matmul":
        assert_product(out, *given, tensor_cores=False)
    else:
        assert torch.equal(out, given[0].t())
    (config,) = rung.runs.configs
    assert rung.runs.asked(n, ITEMSIZE[rung.dtype], config) == counts.read + counts.written


@pytest.mark.parametrize("n", ODD)
@pytest.mark.parametrize("rung", [case for case in rungs(1) if case.values[0].name != ALIGNED])
def test_rungs_are_right_and_ask_for_what_they_say(rung, n):
    check(rung, n)


@pytest.mark.parametrize("n", EVEN)
@pytest.mark.parametrize("rung", [case for case in rungs(1) if case.values[0].name == ALIGNED])
def test_descriptors_are_right_and_ask_for_what_they_say(rung, n):
    check(rung, n)


@pytest.mark.parametrize("rung", [case for case in rungs(99) if case.values[0].name == "autotuned"])
def test_every_config_is_right_across_several_tiles(rung):
    check(rung, 290)


def test_a_program_makes_several_tiles():
    """Make six tiles of 128 x 256 on three SMs."""
    (rung,) = (rung for rung in LADDERS["matmul"] if rung.name == ALIGNED)
    assert rung.runs.grid(296, rung.runs.configs[0], 3) == (3,)
    check(rung, 296)


def test_small_matrices_have_no_idle_programs():
    (rung,) = (rung for rung in LADDERS["matmul"] if rung.name == ALIGNED)
    assert rung.runs.grid(8, rung.runs.configs[0], 132) == (1,)


def test_writes_down_a_column_touch_a_sector_for_each_element():
    by_row = LADDERS["transpose"][0]
    _, _, counts = ran(by_row, 64)
    assert (counts.read_sectors * 32, counts.written_sectors) == (counts.read, 64 * 64)


def test_tiles_touch_no_more_than_they_ask_for():
    (rung,) = (rung for rung in LADDERS["transpose"] if rung.name == "autotuned")
    _, _, counts = ran(rung, 64)
    assert (
        32 * (counts.read_sectors + counts.written_sectors) == counts.read + counts.written == 2 * 64 * 64 * 4
    )


@pytest.mark.parametrize(("n", "fits"), [(8, True), (12, False), (31, False), (64, True)])
def test_what_tma_cannot_see_is_refused(n, fits):
    (rung,) = (rung for rung in LADDERS["matmul"] if rung.name == ALIGNED)
    assert (rung.unfit(INTERPRETER, n) is None) == fits
