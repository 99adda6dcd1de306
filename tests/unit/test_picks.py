"""tests/picks.toml: what runs for 40 named calls on two GPUs. `python tests/picks.py` rewrites it."""

import difflib

import pytest
import triton

from tests import picks
from tritile.choose.classes import MEASURED, class_of
from tritile.families.registry import ALL


@pytest.mark.skipif(f'"{triton.__version__}"' not in picks.FILE.read_text(), reason="picks of another Triton")
def test_picks():
    written, now = picks.FILE.read_text().splitlines(), picks.text().splitlines()
    changed = "\n".join(difflib.unified_diff(written, now, "tests/picks.toml", "now", n=4, lineterm=""))
    if changed:
        pytest.fail(f"{changed}\nIf that is meant: python tests/picks.py", pytrace=False)


def test_every_kind_is_picked():
    """Every family, every class of problems with measurements, and torch's own kernel."""
    found = [one for _, _, plans in picks.plans() for one in plans]
    families = {(one.problem.op, one.config.family) for one in found}
    assert families >= {(family.op, family.name) for family in ALL} | {("matmul", "aten")}
    assert {class_of(one.problem) for one in found if one.problem.op != "grouped"} >= {*MEASURED}
    assert {one.source for one in found} == {"table", "predicted", "model"}
