"""A table's times are kept where its configs compile to the code that was measured, and only there."""

import json
import shutil
import sys
from types import SimpleNamespace

import pytest

import restamp

SLUG = "nvidia-h200"
TABLE = restamp.ROOT / "tritile" / "tables" / f"{SLUG}.json"
OLD = json.loads(TABLE.read_text())["kernels"]
NEW = {name: digest[::-1] for name, digest in OLD.items()}


@pytest.fixture
def stamped(tmp_path, monkeypatch):
    """The table of a made-up checkout after a run, by what each tree tells; git is not asked."""
    path = tmp_path / TABLE.relative_to(restamp.ROOT)
    path.parent.mkdir(parents=True)
    shutil.copy(TABLE, path)
    monkeypatch.setattr(restamp, "ROOT", tmp_path)
    monkeypatch.setattr(restamp, "subprocess", SimpleNamespace(run=lambda *args, **kwargs: None))
    monkeypatch.setattr(sys, "argv", ["restamp.py", SLUG, "--base", "abc"])

    def run(before, now):
        monkeypatch.setattr(restamp, "told", lambda tree, slug: now if tree == tmp_path else before)
        restamp.main()
        return path.read_text()

    run.path = path
    return run


def test_the_same_code_gets_the_present_digests(stamped):
    text = stamped({"codes": {"x": "1"}, "kernels": OLD}, {"codes": {"x": "1"}, "kernels": NEW})
    assert json.loads(text)["kernels"] == NEW
    assert json.loads(text)["entries"] == json.loads(TABLE.read_text())["entries"]


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        (
            {"codes": {"x": "1", "y": "2"}, "kernels": OLD},
            {"codes": {"x": "1", "y": "3"}, "kernels": NEW},
            "1 of 2",
        ),
        ({"codes": {"x": "1"}, "kernels": NEW}, {"codes": {"x": "1"}, "kernels": NEW}, "not of abc"),
    ],
)
def test_other_code_or_another_revision_changes_nothing(stamped, before, now, told):
    with pytest.raises(SystemExit, match=told):
        stamped(before, now)
    assert stamped.path.read_text() == TABLE.read_text()


def test_code_is_told_by_its_instructions(monkeypatch):
    kernel = SimpleNamespace(asm={"cubin": b""})
    told = iter(
        [
            "Function : f\n  /*0010*/ MOV R1, R2 ;  /* 0x01 */",
            "Function : g\n  /*0020*/ MOV R1, R2 ;  /* 0x01 */",
            "/*0010*/ MOV R1, R2 ;  /* 0x02 */",
        ]
    )
    run = SimpleNamespace(run=lambda *args, **kwargs: SimpleNamespace(stdout=next(told)))
    monkeypatch.setattr(restamp, "subprocess", run)
    first, second, third = (restamp.code_of(kernel) for _ in range(3))
    assert first == second != third
