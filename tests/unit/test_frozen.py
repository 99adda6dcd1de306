"""Picks and machine code are those of tests/frozen.json, which `python tests/freeze.py` writes."""

import pytest
import triton

from tests import freeze, frozen_kernels

pytestmark = pytest.mark.skipif(
    freeze.frozen()["triton"] != triton.__version__,
    reason="picks and kernels were frozen with another Triton",
)
compiling = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="triton.jit interprets in this process")


def test_picks_are_the_frozen_ones():
    changed = freeze.changed_picks()
    assert not changed, changed


@compiling
def test_kernels_are_the_frozen_ones():
    changed = freeze.changed_kernels(frozen_kernels.QUICK)
    assert not changed, changed


@compiling
@pytest.mark.stacks
@pytest.mark.timeout(1800)
def test_all_kernels_are_the_frozen_ones():
    changed = freeze.changed_kernels()
    assert not changed, changed
