"""GPU tests: which kernels have passed them as they are, and the command that runs and records them."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import recorder, run, tested
from tritile.families import registry as families

ROOT = Path(__file__).parents[2]
ADVICE = 'run `make test-gpu` on a GPU, or say why not: python tests/gpu/run.py --pending "the reason"'
PRODUCTS = {f"matmul/{family}" for family in families.FAMILIES["matmul"]}
PERMUTATIONS = {"permute/tile", "permute/box"}
STACK = {"triton": "3.6.0", "gpu": "a GPU", "torch": "2.11.0", "commit": "abc"}


def test_every_kernel_was_tested_as_it_is_or_is_pending_with_a_reason():
    unexplained = [f"{what.kernel} on triton {what.triton}" for what in tested.pending() if not what.reason]
    assert not unexplained, ADVICE


def test_every_kernel_is_tested_by_some_file():
    assert set(tested.digests()) == set(families.digests())
    assert {kernel for file in run.files() for kernel in run.kernels_of(file)} == set(tested.digests())


@pytest.mark.parametrize("path", sorted(tested.RECORDS.glob("test_*.py")), ids=lambda path: path.stem)
def test_files_of_gpu_tests_can_be_imported(path):
    """Import files that are not collected without a GPU: what they name must still exist."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where triton.jit finds source
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[path.stem]
    assert any(name.startswith("test_") for name in vars(module))


# A change of these files, and the kernels that it concerns.
CHANGES = [
    ("families/common/descriptors.py", "== 0 and not stretched", "== 0 or stretched", {*families.digests()}),
    ("families/fp16x3/lowering.py", "def ", "async def ", PRODUCTS),
    ("families/permute/kernel.py", "def ", "async def ", PERMUTATIONS),
    ("runtime/native.py", "def ", "async def ", {*families.digests()}),
    ("families/matmul_tma/family.py", '"""True if there is room', '"""There is room', set()),
    ("tune/autotuner.py", "def ", "async def ", set()),
]


def test_host_code_counts_for_the_kernels_whose_arguments_it_decides(tmp_path, monkeypatch):
    """Edit a copy of the package's source, a file after the other."""
    copy = tmp_path / "tritile"
    shutil.copytree(tested.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "*.json", "pages"))
    before = tested.digests()
    monkeypatch.setattr(tested, "PACKAGE", copy)
    try:
        for path, old, new, wanted in CHANGES:
            text = (copy / path).read_text()
            assert old in text, path
            (copy / path).write_text(text.replace(old, new))
            tested.digests.cache_clear()
            now = tested.digests()
            assert {kernel for kernel in before if before[kernel] != now[kernel]} == wanted, path
            before = now
        own = families.digests() | {"grouped/tile": "0" * 16}
        monkeypatch.setattr(families, "digests", lambda: own)
        tested.digests.cache_clear()
        now = tested.digests()
        assert {kernel for kernel in before if before[kernel] != now[kernel]} == {"grouped/tile"}
    finally:
        tested.digests.cache_clear()


def test_code_is_told_without_comments_docstrings_and_blank_lines():
    plain = 'def f(x):\n    y = """a\n\n# b"""\n    return x'
    said = f'"""Module."""\n\n# note\ndef f(x):  # does\n    """Doc.\n\n    More."""\n{plain[10:]}  # done\n'
    assert tested.code_of(said) == plain
    assert tested.code_of("x = '# no comment'  # one") == "x = '# no comment'"
    assert tested.code_of("def (") == "def ("
    refused = "if x:\n    raise {}(\n        {}\n    ) from y\nz()"
    assert tested.code_of(refused.format("E", "1")) == tested.code_of(refused.format("E", "f'{x}'"))
    assert tested.code_of(refused.format("E", "1")) != tested.code_of(refused.format("F", "1"))
    shown = "class A:\n    def {}(self):\n        return {}\n    y = 1"
    assert tested.code_of(shown.format("__repr__", 1)) == tested.code_of(shown.format("__repr__", 2))
    assert tested.code_of(shown.format("__str__", 1)) != tested.code_of(shown.format("__str__", 2))
    assert tested.code_of('def f():\n    """Doc."""; g()') == 'def f():\n    """Doc."""; g()'


def lines(digests, triton, **rest):
    return [{"kernel": k, "triton": triton, "digest": d, **rest} for k, d in digests.items()]


def test_a_record_counts_for_its_digest_and_version_alone(tmp_path):
    digests = tested.digests()
    assert {what.reason for what in tested.pending(tmp_path)} == {None}
    passed = [line for stack in tested.STACKS for line in lines(digests, stack)]
    passed[0]["digest"] = "0" * 16
    (tmp_path / "last.json").write_text(json.dumps({"kernels": passed, "files": []}))
    (left,) = tested.pending(tmp_path)
    assert (left.kernel, left.triton) == (next(iter(digests)), tested.STACKS[0])
    assert left.reason is None
    told = [{"kernel": left.kernel, "triton": left.triton, "digest": left.digest, "reason": "no GPU today"}]
    (tmp_path / "pending.json").write_text(json.dumps({"kernels": told}))
    assert [what.reason for what in tested.pending(tmp_path)] == ["no GPU today"]
    told[0]["digest"] = "1" * 16  # the kernel changed since
    (tmp_path / "pending.json").write_text(json.dumps({"kernels": told}))
    assert [what.reason for what in tested.pending(tmp_path)] == [None]


# The command.

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


@pytest.fixture
def pytest_run(tmp_path, monkeypatch):
    """Runs the tests above under the plugin, as run.py does; returns the journal's lines so far."""
    journal, keys, plan = tmp_path / "journal.jsonl", {"test_some.py": "k"}, tmp_path / "plan.json"
    (tmp_path / "test_some.py").write_text(SOME)
    monkeypatch.setenv(recorder.PLAN, str(plan))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def ran(shard, xdist=False):
        done = run.done_in(run.read_journal([journal]), ("3.6.0", "a GPU"), keys)
        asked = {"journal": str(journal), "keys": keys, "shard": shard, "stack": STACK, "done": done}
        plan.write_text(json.dumps(asked))
        options = ["-q", "-p", "tests.gpu.recorder", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
        if xdist:
            options += ["-p", "xdist", "-n", "1"]
            environ = os.environ | {"PYTHONPATH": str(ROOT)}
            command = [sys.executable, "-m", "pytest", *options, str(tmp_path / "test_some.py")]
            subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True)
        else:
            pytest.main([*options, str(tmp_path / "test_some.py")])
        return run.read_journal([journal])

    return ran


def test_shards_share_the_tests_and_a_run_goes_on_where_it_stopped(pytest_run, tmp_path):
    ran = {line["test"] for line in pytest_run([1, 2]) if "test" in line}
    assert 0 < len(ran) < 20
    journal = pytest_run([2, 2], xdist=True)
    (of_file,) = run.outcomes(journal).values()
    assert of_file["count"] == len(of_file["tests"]) == 20
    ended = [line["outcome"] for line in of_file["tests"].values()]
    assert (ended.count("passed"), ended.count("skipped"), ended.count("failed")) == (18, 1, 1)
    assert not run._passed(journal, {"test_some.py": "k"})
    (tmp_path / "mended").write_text("")
    pytest_run([1, 2])
    whole = pytest_run([2, 2])
    again = {line["test"] for line in whole[len(journal) :] if "test" in line}
    assert {test.rpartition("::")[2] for test in again} == {"test_it[4]"}
    (line,) = run._passed(whole, {"test_some.py": "k"})
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
