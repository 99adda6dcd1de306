"""Versions of Triton and torch: newer ones warn, tables measured by another count, and bounds are open."""

import functools
import re
import tomllib
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import triton

from tritile.choose import pick, table
from tritile.cli import findings
from tritile.core import versions
from tritile.core.config import Config
from tritile.core.device import TARGETS
from tritile.core.problem import MatmulProblem
from tritile.errors import UntestedWarning
from tritile.families import registry as families

ROOT = Path(__file__).parents[2]
H200 = replace(TARGETS["nvidia-h200"], triton="3.9.0")
PROBLEM = MatmulProblem(1, 512, 512, 512, "bfloat16", "bfloat16")
TILE = Config.of(4, 3, "tile", BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, GROUP_M=8)


@pytest.fixture
def shipped(folder):
    """A table of the present kernels that triton 3.6.0 measured, in the place of those that ship."""
    facts = replace(H200, triton="3.6.0").to_dict()
    made = table.Table(facts, families.digests(), (table.Entry(PROBLEM, TILE, 9.0),))
    table.write(made, folder / "nvidia-h200.json")


@pytest.mark.parametrize(
    ("name", "version", "newer"),
    [
        ("triton", "3.6.0", False),
        ("triton", "3.9.7+git1234", False),
        ("triton", "3.10.0", True),
        ("triton", "4.0.0a1", True),
        ("torch", "2.15.1+cpu", False),
        ("torch", "2.16.0.dev20270101", True),
        ("torch", "unknown", False),
    ],
)
def test_newer_than_tested(name, version, newer):
    tested = ".".join(map(str, versions.NEWEST[name]))
    said = versions.untested(name, version)
    assert (version in said and tested in said) if newer else not said


def test_newer_triton_warns_once(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "4.1.2")
    monkeypatch.setattr(pick, "warn_untested", functools.cache(versions.warn_untested.__wrapped__))
    pick.forget()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [pick.plan_for(replace(PROBLEM, m=m), H200, "off") for m in (64, 128)]
    assert None not in found
    (warning,) = (w for w in caught if w.category is UntestedWarning)
    assert re.search(r"triton 4\.1\.2 .* 3\.9", str(warning.message))


def test_other_triton_table_strict(shipped):
    plan = pick.plan_for(PROBLEM, H200, "strict")
    assert (plan.source, plan.config) == ("table", TILE)
    assert plan.why.endswith("measured with Triton 3.6.0, but 3.9.0 is in use")
    found = findings._gpu(H200)[-1]
    assert "measured with triton 3.6.0" in found.found
    assert "triton 3.9.0 is in use" in found.advice


def test_current_triton_table_silent(shipped):
    same = replace(H200, triton="3.6.0")
    assert "triton" not in pick.plan_for(PROBLEM, same, "cached").why
    assert findings._gpu(same)[-1].advice == ""


def test_no_dependency_has_an_upper_bound():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [project["dependencies"], *project["optional-dependencies"].values()]
    assert [text for texts in wanted for text in texts if re.search(r"<|==|~=|!=", text)] == []


def test_makefile_stacks_are_tested():
    (line,) = re.findall(r"^STACKS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    stacks = line.split()
    oldest, newest = versions.parsed(stacks[0]), versions.parsed(stacks[-1])
    assert (oldest, newest) == (versions.OLDEST_TRITON, versions.NEWEST["triton"])
    pinned = re.search(r"^triton==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    assert pinned in stacks


def test_page_names_newest_tested():
    page = (ROOT / "docs" / "environment.md").read_text()
    assert f"newer than {versions.tested('triton')} or a torch newer than {versions.tested('torch')} " in page
