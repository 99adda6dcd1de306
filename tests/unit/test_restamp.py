"""Times are kept where kernels still are what was measured, by their source, their code or their speed."""

import gzip
import json
import shutil
import sqlite3
import sys
from types import SimpleNamespace

import pytest

import restamp
from tritile.families import registry as families

SLUG = "nvidia-h200"
TABLE = restamp.ROOT / "tritile" / "tables" / f"{SLUG}.json"
OLD = json.loads(TABLE.read_text())["kernels"]
NEW = {name: digest[::-1] for name, digest in OLD.items()}
SAME, OTHER = dict.fromkeys(OLD, "s"), dict.fromkeys(OLD, "t")


def tree(stamps, sources, codes=None):
    return {"stamps": stamps, "sources": sources, "codes": codes or {}}


def store_at(path, *kernels):
    """A compressed store with an environment for each of these digests."""
    plain = path.with_suffix("")
    plain.parent.mkdir(parents=True)
    with sqlite3.connect(plain) as connection:
        connection.execute("CREATE TABLE environments (id INTEGER PRIMARY KEY, kernel TEXT)")
        connection.executemany("INSERT INTO environments (kernel) VALUES (?)", [(k,) for k in kernels])
    connection.close()
    path.write_bytes(gzip.compress(plain.read_bytes()))


def digests_in(path):
    plain = path.with_suffix("")
    plain.write_bytes(gzip.decompress(path.read_bytes()))
    with sqlite3.connect(plain) as connection:
        found = [kernel for (kernel,) in connection.execute("SELECT kernel FROM environments ORDER BY id")]
    connection.close()
    return found


@pytest.fixture
def stamped(tmp_path, monkeypatch):
    """The table of a made-up checkout after a run, by what each tree tells; git is not asked."""
    path = tmp_path / TABLE.relative_to(restamp.ROOT)
    path.parent.mkdir(parents=True)
    shutil.copy(TABLE, path)
    trials = tmp_path / "tuning" / "trials" / f"{SLUG}-1.sqlite3.gz"
    store_at(trials, OLD["permute/tile"], "of an older kernel")
    monkeypatch.setattr(restamp, "ROOT", tmp_path)
    monkeypatch.setattr(restamp, "subprocess", SimpleNamespace(run=lambda *args, **kwargs: None))
    asked = []

    def run(before, now, *options):
        def told(tree, slug, names):
            asked.extend(names)
            return now if tree == tmp_path else before

        monkeypatch.setattr(restamp, "told", told)
        monkeypatch.setattr(sys, "argv", ["restamp.py", SLUG, "--base", "abc", *options])
        restamp.main()
        return path.read_text()

    run.path, run.asked, run.trials = path, asked, trials
    return run


def test_the_same_source_gets_the_present_digests_with_nothing_compiled(stamped):
    text = stamped(tree(OLD, SAME), tree(NEW, SAME))
    assert json.loads(text)["kernels"] == NEW
    assert json.loads(text)["entries"] == json.loads(TABLE.read_text())["entries"]
    assert stamped.asked == []
    assert digests_in(stamped.trials) == [NEW["permute/tile"], "of an older kernel"]


def test_other_source_that_compiles_to_the_same_code_gets_them_too(stamped):
    text = stamped(tree(OLD, SAME, {"x": "1"}), tree(NEW, OTHER, {"x": "1"}))
    assert json.loads(text)["kernels"] == NEW
    assert set(stamped.asked) == set(OLD)


def test_a_kernel_that_was_measured_to_be_as_fast_is_not_compared(stamped):
    now = SAME | {"matmul/descriptor": "t", "matmul/tile": "t"}
    codes = {"x": "1"}, {"x": "1"}
    text = stamped(tree(OLD, SAME, codes[0]), tree(NEW, now, codes[1]), "--as-fast", "matmul/descriptor")
    assert json.loads(text)["kernels"] == NEW
    assert set(stamped.asked) == {"matmul/tile"}


@pytest.mark.parametrize(
    ("before", "now", "options", "told"),
    [
        (tree(OLD, SAME, {"x": "1", "y": "2"}), tree(NEW, OTHER, {"x": "1", "y": "3"}), [], "1 of 2"),
        (tree(NEW, SAME), tree(NEW, SAME), [], "not of the base"),
        (tree(OLD, SAME), tree(NEW, OTHER), ["--as-fast", "matmul/none"], "no kernel matmul/none"),
    ],
    ids=["code", "revision", "name"],
)
def test_other_code_another_revision_or_an_unknown_name_changes_nothing(stamped, before, now, options, told):
    trials = stamped.trials.read_bytes()
    with pytest.raises(SystemExit, match=told):
        stamped(before, now, *options)
    assert stamped.path.read_text() == TABLE.read_text()
    assert stamped.trials.read_bytes() == trials


def test_digests_of_another_tree_are_those_that_this_checkout_defines():
    assert restamp.sources() == families.digests()


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
