"""What was tested on a GPU counts for a kernel, and for the host code that decides its arguments."""

import importlib.util
import json
import shutil
import sys

import pytest

from tests.gpu import tested
from tritile.families import registry as families

ADVICE = 'run `make test-gpu` on a GPU, or say why not: python tests/gpu/run.py --pending "the reason"'


def test_every_kernel_was_tested_as_it_is_or_is_pending_with_a_reason():
    unexplained = [f"{what.kernel} on triton {what.triton}" for what in tested.pending() if not what.reason]
    assert not unexplained, ADVICE


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


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Copy the package's source that digests are made of, to be edited."""
    copy = tmp_path / "tritile"
    shutil.copytree(tested.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "*.json", "pages"))
    monkeypatch.setattr(tested, "PACKAGE", copy)
    tested.digests.cache_clear()
    yield copy
    tested.digests.cache_clear()


def changed(package, path, old, new):
    """Return the kernels whose digest changes with an edit."""
    before = tested.digests()
    text = (package / path).read_text()
    assert old in text
    (package / path).write_text(text.replace(old, new))
    tested.digests.cache_clear()
    after = tested.digests()
    return {kernel for kernel in before if before[kernel] != after[kernel]}


PRODUCTS = {f"matmul/{family}" for family in families.FAMILIES["matmul"]}


@pytest.mark.parametrize(
    ("path", "old", "new", "wanted"),
    [
        (
            "families/common/descriptors.py",
            "== 0 and not stretched",
            "== 0 or stretched",
            {*families.digests()},
        ),
        ("families/fp16x3/lowering.py", "def ", "async def ", {*PRODUCTS}),
        (
            "families/permute/kernel.py",
            "def ",
            "async def ",
            {"permute/tile", "permute/packed", "permute/box"},
        ),
        ("runtime/native.py", "def ", "async def ", set(families.digests())),
        ("families/matmul_tma/family.py", '"""True if there is room', '"""There is room', set()),
        ("tune/autotuner.py", "def ", "async def ", set()),
    ],
)
def test_host_code_counts_for_the_kernels_whose_arguments_it_decides(package, path, old, new, wanted):
    assert changed(package, path, old, new) == wanted


def test_every_kernel_is_known_and_all_work_counts_for_some_kernel():
    assert set(tested.digests()) == set(families.digests())
    counted = {path for kernel in tested.digests() for path in tested.modules_of(kernel)}
    rooms = {path.relative_to(tested.PACKAGE).as_posix() for path in tested.PACKAGE.glob("*/*.py")}
    assert {path for path in rooms if path.startswith(("work/", "views/"))} <= counted


def test_a_kernels_own_digest_counts(monkeypatch):
    before = dict(tested.digests())
    ours = dict(families.digests()) | {"grouped/tile": "0" * 16}
    monkeypatch.setattr(families, "digests", lambda: ours)
    tested.digests.cache_clear()
    try:
        assert {k for k, d in tested.digests().items() if d != before[k]} == {"grouped/tile"}
    finally:
        tested.digests.cache_clear()


def test_code_is_told_without_comments_docstrings_and_blank_lines():
    plain = 'def f(x):\n    y = """a\n\n# b"""\n    return x'
    said = f'"""Module."""\n\n# note\ndef f(x):  # does\n    """Doc.\n\n    More."""\n{plain[10:]}  # done\n'
    assert tested.code_of(said) == plain
    assert tested.code_of("x = '# no comment'  # one") == "x = '# no comment'"
    assert tested.code_of("def (") == "def ("
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
