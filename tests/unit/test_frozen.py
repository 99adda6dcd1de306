"""Picks and machine code are those of tests/frozen.json, which `python tests/freeze.py` writes."""

import pytest
import triton

from tests import freeze, frozen_kernels, frozen_picks
from tests.ahead import later

pytestmark = pytest.mark.skipif(
    freeze.frozen()["triton"] != triton.__version__,
    reason="picks and kernels were frozen with another Triton",
)


@pytest.mark.timeout(900)  # some thousand plans, which a busy machine may take minutes for
@pytest.mark.parametrize("gpu", frozen_picks.GPUS)
@pytest.mark.parametrize("every", [6, later(1)])
def test_picks_are_the_frozen_ones(gpu, every):
    changed = freeze.changed_picks(gpu, every=every)
    assert not changed, changed


def test_differences_are_counted_and_shown():
    old = {"a": "model: tile K=1", "b": "model: tile K=2", "c": "table: tile K=3"}
    told = freeze.differences("picks", old, {"a": "model: tile K=9", "c": "table: tile K=3"}).splitlines()
    assert told[0] == "picks: 2 of 3 changed"
    assert told[1:4] == ["  a", "    frozen model: tile K=1", "    now    model: tile K=9"]
    assert told[4:7] == ["  b", "    frozen model: tile K=2", "    now    None"]
    assert freeze.differences("picks", old, old) == ""


def test_kernels_are_the_frozen_ones():
    changed = freeze.changed_kernels(frozen_kernels.QUICK)
    assert not changed, changed


@pytest.mark.stacks
@pytest.mark.timeout(1800)
def test_all_kernels_are_the_frozen_ones():
    changed = freeze.changed_kernels()
    assert not changed, changed
