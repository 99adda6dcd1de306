"""Calls that are left without asking Python: which, how they are counted, and how the library is built."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tritile
from tests.overriding import in_threads, switch
from tritile.errors import InvalidValueError, StoreWarning, UnsupportedError
from tritile.in_torch import building, overrides, routes

pytestmark = pytest.mark.filterwarnings("ignore::tritile.errors.InterpreterWarning")
KEYS = ("CPU",)
A, WEIGHT, WIDE = torch.randn(16, 8), torch.randn(8, 4), torch.randn(17, 8)
X = torch.randn(8, 512)


@pytest.fixture(autouse=True)
def _wanted(monkeypatch):
    monkeypatch.setenv("TRITILE_CROSSING", "1")


@pytest.fixture
def asked(crossing, monkeypatch):
    """The calls of which Python was asked, with the library in use."""
    calls = []

    def heard(name):
        def decide(*given):
            calls.append(name)

        return decide

    monkeypatch.setattr(overrides.building, "library", lambda: crossing)
    monkeypatch.setattr(routes, "product", heard("product"))
    monkeypatch.setattr(routes, "copy", heard("copy"))
    monkeypatch.setattr(routes, "brief_product", lambda *given: calls.append("asked") or False)
    monkeypatch.setattr(routes, "brief_copy", lambda *given: calls.append("asked") or False)
    yield calls
    overrides.remove_unwanted()
    assert not overrides._libraries


LITTLE = [
    ("bmm", lambda: torch.bmm(A[None], WEIGHT[None])),
    ("bmm", lambda: torch.bmm(A[None], WEIGHT[None], out=torch.empty(1, 16, 4))),
    ("baddbmm", lambda: torch.baddbmm(WEIGHT[:1], A[None], WEIGHT[None])),
    ("clone", lambda: X.mT.contiguous()),
]


@pytest.mark.parametrize(("name", "call"), LITTLE)
def test_little_is_left_without_asking(asked, name, call):
    wanted = call()
    with switch("expected") as report:
        assert torch.equal(call(), wanted)
        call()
        rows = report.rows
    assert not asked
    assert rows == report.rows == [(name, False, "so brief that host time dominates", 2)]


@pytest.mark.parametrize(
    ("limit", "value", "call"),
    [
        ("FEW_ROWS", 15, lambda: torch.bmm(A[None], WEIGHT[None])),
        ("SMALL", 31, lambda: torch.bmm(A[None], WEIGHT[None])),
        ("SMALL", 31, lambda: torch.baddbmm(WEIGHT[:1], A[None], WEIGHT[None])),
        ("LITTLE", 4 * 8 * 512 - 1, lambda: X.mT.contiguous()),
    ],
)
def test_python_is_asked_of_more_than_that(asked, monkeypatch, limit, value, call):
    wanted = call()
    for most, heard in ((value + 1, False), (value, True)):
        monkeypatch.setattr(routes, limit, most)
        overrides.remove_unwanted()
        with switch("expected") as report:
            assert torch.equal(call(), wanted)
        assert bool(asked) == heard
        assert bool(report.rows) != heard


def test_who_is_asked_goes_by_the_policy(asked):
    with switch("always"):
        A @ WEIGHT
        X.mT.contiguous()
        X.clone()  # keeps the order of its dimensions
        assert asked == ["product", "asked", "copy"]
        with switch("never"):
            WIDE @ WEIGHT
        with switch("expected"):
            A[None] @ WEIGHT[None]
    WIDE @ WEIGHT
    assert len(asked) == 3


def test_a_thread_without_a_switch_asks_nobody_but_of_the_one_everywhere(asked):
    def elsewhere():
        in_threads(lambda: WIDE @ WEIGHT)
        return len(asked)

    with switch("expected"):
        assert elsewhere() == 0
        tritile.use_in_torch.everywhere(_keys=KEYS)
        assert elsewhere() == 1
        tritile.use_in_torch.everywhere("never", _keys=KEYS)
        assert elsewhere() == 1
        tritile.use_in_torch.nowhere()
        assert elsewhere() == 1


def test_a_switch_that_ended_elsewhere_counts_no_more(asked):
    inner = switch("expected")
    with switch("always"):
        report = inner.__enter__()
        A[None] @ WEIGHT[None]
        in_threads(lambda: inner.__exit__(None, None, None))
        assert not asked
        A[None] @ WEIGHT[None]
    assert asked == ["asked", "product"]
    assert report.left == 1


def test_a_program_may_multiply_to_its_end(crossing, monkeypatch):
    monkeypatch.setenv("TRITILE_CACHE_DIR", str(Path(crossing._library._name).parents[1]))
    code = (
        "import atexit\n"
        "atexit.register(lambda: print((torch.ones(2, 2) @ torch.ones(2, 2)).sum().item()))\n"
        "import torch, tritile\n"
        "tritile.use_in_torch.everywhere(_keys=('CPU',))\n"
        "from tritile.in_torch import overrides\n"
        "print(overrides._libraries['CPU'].crossing is not None)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["True", "8.0"], "")


def test_a_wrong_key_is_told_of(crossing):
    with pytest.raises(RuntimeError, match="NoSuchKey"):
        crossing.before("NoSuchKey")


def counting(monkeypatch, made=None):
    """Have builds counted, and done by `made`."""
    asked = []

    def compiled(there):
        asked.append(there)
        if made is None:
            raise UnsupportedError("no compiler of today")
        there.write_bytes(made)

    monkeypatch.setattr(building, "_compile", compiled)
    return asked


def test_it_is_built_by_the_first_that_wants_it_and_stays(monkeypatch):
    monkeypatch.setattr(building, "Crossing", lambda there: there.read_bytes())
    asked = counting(monkeypatch, b"code")
    assert [building.library(), building.library()] == [b"code", b"code"]
    building._obtained.cache_clear()  # as another process
    assert building.library() == b"code"
    assert len(asked) == 1


def product_inside():
    with switch("always") as report:
        A @ WEIGHT
    return report


def test_where_it_cannot_be_built_that_is_said_once_and_python_decides(monkeypatch):
    asked = counting(monkeypatch)
    with pytest.warns(StoreWarning, match=r"some 40 us: .*no compiler of today") as told:
        reports = [product_inside() for _ in range(2)]
    said = [warning for warning in told if warning.category is StoreWarning]
    assert ([report.taken for report in reports], len(said), len(asked)) == ([1, 1], 1, 1)


def test_a_compiler_that_fails_is_asked_once(monkeypatch):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(UnsupportedError, match=r"crossing\.cpp could not be compiled"):
        building.build()
    monkeypatch.setattr(building, "_compile", lambda made: pytest.fail("again"))
    with pytest.warns(StoreWarning, match=r"failed says why; remove it to try again"):
        assert building.library() is None
    assert "false -O2" in building._failed().read_text()
    assert str(building._failed()) in building.state()[1]


def test_no_compiler(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(building.shutil, "which", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"no C\+\+ compiler is found"):
        building.build()
    assert not building._failed().exists()  # one may come
    with pytest.warns(StoreWarning, match=r"no C\+\+ compiler is found"):
        assert building.library() is None
    assert building.state()[0] == "no C++ compiler"


def test_a_compiler_that_was_killed_is_asked_again(tmp_path, monkeypatch):
    killed = tmp_path / "compiler"
    killed.write_text("#!/bin/sh\nkill -9 $$\n")
    killed.chmod(0o755)
    monkeypatch.setenv("CXX", f"{killed} --fast")
    with pytest.raises(UnsupportedError, match="could not be compiled"):
        building.build()
    assert not building._failed().exists()
    assert building._command("ccache g++", tmp_path)[:2] == ["ccache", "g++"]


def test_a_library_that_cannot_be_loaded_is_done_without_and_stays(monkeypatch):
    assert building.state()[0] == "not built"
    building.path().parent.mkdir(mode=0o700, parents=True)
    building.path().write_bytes(b"damaged")
    building.path().chmod(0o644)
    assert building.state() == ("built", "")
    with pytest.warns(StoreWarning, match=r"crossing-.*\.so\), so that Python") as told:
        assert [building.library(), building.library()] == [None, None]
    assert len(told) == 1
    assert building.path().exists()  # another machine that shares the folder may be able to


def given_away(place):
    """A file of another user's: only root can make one, and who is not root becomes another."""
    if os.geteuid() == 0:
        os.chown(place, 12345, -1)
    else:
        user = os.geteuid() + 1
        building.os.geteuid = lambda: user


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda file: file.chmod(0o664), "others may write to .*so"),
        (lambda file: file.chmod(0o646), "others may write to .*so"),
        (lambda file: file.parent.chmod(0o770), "others may write to .*library"),
        (lambda file: file.parent.chmod(0o1777), "others may write to .*library"),
        (given_away, "so belongs to user"),
        (lambda file: given_away(file.parent), "library belongs to user"),
        (lambda file: file.symlink_to(file.rename(f"{file}.other")), "is not a regular file"),
    ],
)
def test_a_library_that_others_could_have_written_is_not_loaded(monkeypatch, change, reason):
    monkeypatch.setattr(building.os, "geteuid", os.geteuid)  # put back afterwards
    monkeypatch.setattr(building, "Crossing", lambda there: pytest.fail("loaded"))
    monkeypatch.setattr(building, "_compile", lambda made: pytest.fail("in vain"))
    building.path().parent.mkdir(mode=0o700, parents=True)
    building.path().write_bytes(b"code")
    building.path().chmod(0o644)
    change(building.path())
    with pytest.warns(StoreWarning, match=f"runs without .*{reason}"):
        assert building.library() is None
    assert building.state()[0] == "not loaded"
    with pytest.raises(UnsupportedError, match=f"library is not built: .*{reason}"):
        building.build()


def test_only_its_user_may_write_to_what_is_built(monkeypatch, tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nfor last; do :; done\necho code > "$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TRITILE_CACHE_DIR", str(tmp_path / "new"))
    monkeypatch.setattr(building, "Crossing", lambda there: None)
    before = os.umask(0)
    try:
        there = building.build()
    finally:
        os.umask(before)
    assert (there.stat().st_mode & 0o777, there.parent.stat().st_mode & 0o777) == (0o755, 0o700)


def test_a_cache_that_may_not_be_looked_into_is_done_without(monkeypatch):
    def refuse(path):
        raise PermissionError(path)

    monkeypatch.setattr(building, "FileLock", lambda file, timeout: refuse(file))
    monkeypatch.setattr(building, "_compile", lambda made: pytest.fail("in vain"))
    with pytest.warns(StoreWarning, match="runs without"):
        assert building.library() is None


def test_it_can_be_refused(monkeypatch):
    monkeypatch.setenv("TRITILE_CROSSING", "0")
    monkeypatch.setattr(building, "path", lambda: pytest.fail("looked for"))
    assert building.library() is None
    assert building.state()[0] == "not wanted"
    monkeypatch.setenv("TRITILE_CROSSING", "no")
    with pytest.raises(InvalidValueError, match="TRITILE_CROSSING is 'no': wanted 1 or 0"):
        building.library()
