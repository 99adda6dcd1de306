"""Modes, backends, batch invariance, budgets and folders: of a `with`, and of the environment."""

import gc
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch

import tritile
from tritile import errors
from tritile.core import settings
from tritile.core.settings import Rules, cache_dir, current_mode, is_batch_invariant, rules, tune_budget_s

X = torch.ones(2, 2)
ROOT = Path(tritile.__file__).parents[1]
H200 = tritile.target_device("nvidia-h200")
MODES, BACKENDS = "cached, tune, spread, strict, off", "'triton' or 'triton,aten'"
FP32 = "'torch' or 'fp16x3'"


@pytest.mark.parametrize(
    ("choose", "words"),
    [
        *((lambda value=value: tritile.mode(value), MODES) for value in ("fast", "", "CACHED", "tune ", 1)),
        (lambda: tritile.mode(None), "expected"),
        (lambda: tritile.autotune([], [], mode="fast"), MODES),
        *(
            (lambda value=value: tritile.mode(backends=value), BACKENDS)
            for value in ("aten", "triton;aten", 3)
        ),
        *((lambda value=value: tritile.mode(fp32=value), FP32) for value in ("fp16", "tf32", True)),
        (lambda: tritile.batch_invariant("on"), "expected True or False"),
    ],
)
def test_a_wrong_choice(choose, words):
    with pytest.raises(errors.InvalidValueError, match=words), choose():
        pass


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("TRITILE_MODE", "fastest", MODES),
        ("TRITILE_BATCH_INVARIANT", "yes", "1, 0 or torch"),
        ("TRITILE_BACKENDS", "cublas", BACKENDS),
        ("TRITILE_FP32", "ieee", FP32),
    ],
)
def test_wrong_variable_told_each_call(monkeypatch, variable, value, words):
    monkeypatch.setenv(variable, value)
    for call in (
        lambda: tritile.matmul(X, X),
        lambda: tritile.transpose(X),
        lambda: tritile.plan("matmul", X, X, device=H200),
    ):
        with pytest.raises(errors.InvalidValueError, match=f"{variable} is {value!r}.*{words}"):
            call()


def test_innermost_choice_wins(monkeypatch):
    assert rules() == Rules("cached", False, False, "torch")  # the backends are those of tests/conftest.py
    monkeypatch.setenv("TRITILE_MODE", "off")
    monkeypatch.setenv("TRITILE_BATCH_INVARIANT", "1")
    monkeypatch.setenv("TRITILE_BACKENDS", "triton, aten")
    assert rules() == Rules("off", True, True, "torch")
    seen = []
    with tritile.mode("strict", backends="triton"), tritile.batch_invariant(False):
        assert rules() == Rules("strict", False, False, "torch")
        with tritile.mode("tune"), tritile.batch_invariant():
            assert rules() == Rules("tune", True, False, "torch")
        assert (current_mode(), is_batch_invariant()) == ("strict", False)
        thread = threading.Thread(target=lambda: seen.append(rules()))
        thread.start()
        thread.join()
    assert seen == [Rules("off", True, True, "torch")]
    with pytest.raises(KeyError), tritile.mode("tune"):
        raise KeyError
    assert rules() == Rules("off", True, True, "torch")
    monkeypatch.setenv("TRITILE_BATCH_INVARIANT", "0")
    assert not is_batch_invariant()


def test_budgets(monkeypatch):
    for value, seconds in (("2.5", 2.5), ("1e3", 1000.0), ("inf", float("inf"))):
        monkeypatch.setenv("TRITILE_TUNE_BUDGET", value)
        assert tune_budget_s(15.0) == seconds
    for value in ("soon", "", "0", "-1", "nan", "1s"):
        monkeypatch.setenv("TRITILE_TUNE_BUDGET", value)
        with pytest.raises(errors.InvalidValueError, match=r"TRITILE_TUNE_BUDGET.*seconds"):
            tune_budget_s(15.0)
    monkeypatch.delenv("TRITILE_TUNE_BUDGET")
    assert tune_budget_s(15.0) == 15.0


def test_cache_directory(monkeypatch, tmp_path):
    assert cache_dir() == tmp_path
    monkeypatch.setenv("TRITILE_CACHE_DIR", "~/somewhere")
    assert "~" not in str(cache_dir())
    monkeypatch.delenv("TRITILE_CACHE_DIR")
    assert cache_dir().name == "tritile"


def test_unusable_home_breaks_nothing(monkeypatch, request):
    settings._folder.cache_clear()
    request.addfinalizer(settings._folder.cache_clear)
    monkeypatch.setenv("TRITILE_CACHE_DIR", "~nosuchuser/cache")
    with pytest.warns(errors.StoreWarning, match="no home folder for ~nosuchuser/cache") as told:
        assert cache_dir() == cache_dir()
    assert cache_dir().is_absolute()
    assert len(told) == 1


HOMELESS = """
import os, pwd, sys, warnings
import torch  # once, in seconds
if os.fork():
    assert os.wait()[1] == 0
    os.environ.update(HOME="", XDG_CACHE_HOME="relative")
if os.geteuid() == 0:
    os.setresuid(54321, -1, -1)  # which no list of users has; files are still root's
else:
    pwd.getpwuid = {}.__getitem__
import tritile
from tritile.__main__ import main

x = torch.empty(2048, 2048, dtype=torch.bfloat16, device="meta")
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    torch.testing.assert_close(tritile.matmul(torch.ones(3, 4), torch.ones(4, 5)), torch.full((3, 5), 4.0))
    tritile.plan("matmul", x, x, device="h200")
    tritile.nn.convert(torch.nn.Linear(64, 64, dtype=torch.bfloat16), rows=64, device="h200")
    tritile.explain("matmul", x, x, device="h200")
    sys.argv = ["tritile", "doctor"]
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code
(text,) = [str(each.message) for each in told if each.category is tritile.errors.StoreWarning]
print(text)
"""


def test_no_home_temporary_folder(tmp_path):
    """Without a variable that says where, and with empty and relative ones."""
    environment = os.environ | {"TMPDIR": str(tmp_path), "COLUMNS": "300"}
    for name in ("HOME", "XDG_CACHE_HOME", "TRITILE_CACHE_DIR"):
        environment.pop(name, None)
    how = {"env": environment, "cwd": ROOT, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", HOMELESS], check=False, **how)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / f"tritile-{os.geteuid()}"
    assert done.stdout.count(f"results are kept in {folder}") == 2
    assert done.stdout.count(f"{folder}, writable") == 2
    assert folder.stat().st_mode & 0o777 == 0o700


def _by_another(folder):
    folder.mkdir(mode=0o700)
    os.chown(folder, 54321, 54321)


TAKEN = {
    "a link": lambda folder: folder.symlink_to(folder.parent / "elsewhere"),
    "a file": lambda folder: folder.touch(),
    "open to all": lambda folder: (folder.mkdir(), folder.chmod(0o777)),
    "another's": _by_another,
}


@pytest.mark.parametrize("how", TAKEN)
def test_writable_temporary_not_trusted(how, tmp_path, monkeypatch):
    if how == "another's" and os.geteuid() != 0:
        pytest.skip("only root can make another user's folder")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert settings._temporary() == settings._temporary() == tmp_path / f"tritile-{os.geteuid()}"
    settings._temporary().rmdir()
    (tmp_path / "elsewhere").mkdir()
    TAKEN[how](tmp_path / f"tritile-{os.geteuid()}")
    found = settings._temporary()
    assert found.parent == tmp_path
    assert found.name not in (f"tritile-{os.geteuid()}", "elsewhere")
    assert found.stat().st_mode & 0o777 == 0o700


def test_no_folder_calls_go_on(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/proc/none")
    monkeypatch.setenv("TRITILE_CACHE_DIR", "~nosuchuser/cache")
    settings._folder.cache_clear()
    tritile.forget()  # a test before may have planned the same call
    x = torch.empty(64, 64, dtype=torch.bfloat16, device="meta")
    with pytest.warns(errors.StoreWarning):
        assert tritile.plan("matmul", x, x, device="h200").config
    settings._folder.cache_clear()


@pytest.mark.parametrize(
    ("choose", "name"),
    [(lambda: tritile.mode("tune"), "mode"), (tritile.batch_invariant, "batch_invariant")],
)
def test_bare_statement_warns(choose, name, recwarn):
    """It sets nothing; `with` and a decorator do not warn."""
    before = rules()
    with pytest.warns(UserWarning, match=rf"tritile\.{name}\(\.\.\.\) changed nothing: write `with") as told:
        choose()
    assert rules() == before
    assert told[0].filename == __file__
    recwarn.clear()
    inside = choose()(rules)
    with choose():
        assert inside() == rules() != before
    assert [inside(), rules()] == [inside(), before]
    assert not recwarn.list


@pytest.mark.filterwarnings("error:.*changed nothing")
def test_with_inside_torch_compile(monkeypatch):
    inside, failures = [], []
    monkeypatch.setattr(sys, "unraisablehook", failures.append)

    def seen():
        with tritile.mode("off"), tritile.batch_invariant():
            inside.append(rules())
            return X + 1

    before = rules()
    assert torch.equal(torch.compile(seen, backend="eager")(), X + 1)
    gc.collect()
    assert [(each.mode, each.invariant) for each in inside] == [("off", True)]
    assert (rules(), failures) == (before, [])
