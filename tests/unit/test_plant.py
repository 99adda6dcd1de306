"""The faults of tests/faults.json can still be planted; `python tests/plant.py --all` sees them caught."""

import ast
from pathlib import Path

import pytest

from tests import plant


@pytest.mark.parametrize("name", plant.faults())
def test_a_fault_can_be_planted(name):
    entry = plant.faults()[name]
    ast.parse(plant.planted(entry))
    assert entry["tests"]
    for test in entry["tests"]:
        file, _, function = test.partition("::")
        source = (plant.ROOT / file).read_text()
        assert f"def {function.partition('[')[0]}(" in source


def test_a_fault_without_a_place_is_told(tmp_path):
    Path(tmp_path, "file.py").write_text("a = 1\na = 1\n")
    for old, times in (("a = 1", 2), ("b", 0)):
        with pytest.raises(ValueError, match=f"{times} times"):
            plant.planted({"name": "x", "file": "file.py", "old": old, "new": ""}, tmp_path)
