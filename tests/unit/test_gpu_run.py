"""The command that runs GPU tests: shards, what a kill leaves, and what counts as passed."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.gpu import recorder, run, tested

ROOT = Path(__file__).parents[2]
STACK = {"triton": "3.6.0", "gpu": "a GPU", "torch": "2.11.0", "commit": "abc"}
SOME = """
import pytest

@pytest.mark.parametrize("n", range(20))
def test_it(n):
    if n == 3:
        pytest.skip("not here")
    assert n != 4 or ok()

def ok():
    from pathlib import Path
    return Path(__file__).with_name("mended").exists()
"""


def pytest_run(folder, shard, workers=0):
    """Run the tests of a folder under the plugin, as run.py does; the journal's lines so far."""
    journal, keys = folder / "journal.jsonl", {"test_some.py": "k"}
    (folder / "test_some.py").write_text(SOME)
    done = run.done_in(run.read_journal([journal]), ("3.6.0", "a GPU"), keys)
    plan = {"journal": str(journal), "keys": keys, "shard": shard, "stack": STACK, "done": done}
    (folder / "plan.json").write_text(json.dumps(plan))
    environ = os.environ | {recorder.PLAN: str(folder / "plan.json"), "PYTHONPATH": str(ROOT)}
    environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    options = ["-q", "-p", "tests.gpu.recorder", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    options += ["-p", "xdist", "-n", str(workers)] if workers else []
    command = [sys.executable, "-m", "pytest", *options, str(folder / "test_some.py")]
    subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    return run.read_journal([journal])


def test_shards_share_the_tests_and_a_run_goes_on_where_it_stopped(tmp_path):
    first = pytest_run(tmp_path, [1, 2])
    ran = {line["test"] for line in first if "test" in line}
    assert 0 < len(ran) < 20
    (of_file,) = run.outcomes(pytest_run(tmp_path, [2, 2], workers=2)).values()
    assert of_file["count"] == len(of_file["tests"]) == 20
    ended = [line["outcome"] for line in of_file["tests"].values()]
    assert (ended.count("passed"), ended.count("skipped"), ended.count("failed")) == (18, 1, 1)
    journal = run.read_journal([tmp_path / "journal.jsonl"])
    assert not run._passed(journal, {"test_some.py": "k"})
    (tmp_path / "mended").write_text("")
    again = [line for shard in ([1, 2], [2, 2]) for line in pytest_run(tmp_path, shard)[len(journal) :]]
    assert {line["test"] for line in again if "test" in line} == {"test_some.py::test_it[4]"}
    (line,) = run._passed(run.read_journal([tmp_path / "journal.jsonl"]), {"test_some.py": "k"})
    assert (line["passed"], line["skipped"], line["torch"]) == (19, 1, "2.11.0")


def journal_of(keys, outcome="passed", **changes):
    """The journal of a run of all files, two tests each, some of whose outcomes are others."""
    lines = []
    for file, key in keys.items():
        lines.append(STACK | {"file": file, "key": key, "tests": 2})
        for test in ("a", "b"):
            how = changes.get(file.removesuffix(".py"), outcome) if test == "b" else outcome
            if how:
                what = {"test": f"{file}::{test}", "outcome": how, "seconds": 1.0}
                lines.append(STACK | {"file": file, "key": key} | what)
    return lines


KEYS = {file: f"key of {file}" for file in run.files()}
NOTHING = {"kernels": [], "files": []}


def kernels_in(record):
    return {line["kernel"] for line in record["kernels"]}


def test_a_kernel_has_passed_once_all_files_that_concern_it_have():
    whole = run.merged(NOTHING, journal_of(KEYS), KEYS)
    assert kernels_in(whole) == set(tested.digests())
    (line,) = (line for line in whole["kernels"] if line["kernel"] == "grouped/tile")
    assert line["digest"] == tested.digests()["grouped/tile"]
    assert (line["triton"], line["gpu"], line["torch"], line["commit"]) == ("3.6.0", "a GPU", "2.11.0", "abc")
    assert line["passed"] == 2 * sum("grouped/tile" in run.kernels_of(file) for file in KEYS)
    for how in ("failed", None):  # None: not run yet
        partial = run.merged(NOTHING, journal_of(KEYS, test_grouped_gpu=how), KEYS)
        assert kernels_in(partial) == {k for k in tested.digests() if not k.startswith("grouped/")}


def test_a_kernel_whose_tests_were_all_skipped_has_not_passed():
    whole = run.merged(NOTHING, journal_of(KEYS, "skipped"), KEYS)
    assert len(whole["files"]) == len(KEYS)
    assert whole["kernels"] == []


def test_what_passed_before_counts_while_nothing_of_it_changed():
    without = {file: key for file, key in KEYS.items() if file != "test_grouped_gpu.py"}
    before = run.merged(NOTHING, journal_of(without), KEYS)
    assert "grouped/tile" not in kernels_in(before)
    rest = journal_of({"test_grouped_gpu.py": KEYS["test_grouped_gpu.py"]})
    assert kernels_in(run.merged(before, rest, KEYS)) == set(tested.digests())
    stale = run.merged(NOTHING, journal_of(KEYS), KEYS | {"test_permute_gpu.py": "of changed kernels"})
    assert kernels_in(stale) == {k for k in tested.digests() if not k.startswith("permute/")}


def test_a_file_is_run_again_when_what_it_tests_changes(monkeypatch):
    before = {file: run.key_of(file) for file in run.files()}
    ours = tested.digests() | {"grouped/tile": "0" * 16}
    monkeypatch.setattr(tested, "digests", lambda: ours)
    changed = {file for file in before if run.key_of(file) != before[file]}
    assert changed == {file for file in before if "grouped/tile" in run.kernels_of(file)}
    assert "test_permute_gpu.py" not in changed


def test_every_kernel_is_tested_by_some_file():
    assert {kernel for file in run.files() for kernel in run.kernels_of(file)} == set(tested.digests())
