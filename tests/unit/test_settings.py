"""Modes, backends, batch invariance, budgets and folders: of a `with`, and of the environment."""

import gc
import sys
import threading

import pytest
import torch

import tritile
from tritile import errors
from tritile.core import settings
from tritile.core.settings import Rules, cache_dir, current_mode, is_batch_invariant, rules, tune_budget_s

X = torch.ones(2, 2)
H200 = tritile.target_device("nvidia-h200")
MODES, BACKENDS = "cached, tune, strict, off", "'triton' or 'triton,aten'"


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
        ("TRITILE_BATCH_INVARIANT", "yes", "1 or 0"),
        ("TRITILE_BACKENDS", "cublas", BACKENDS),
    ],
)
def test_a_wrong_variable_is_told_of_by_every_call(monkeypatch, variable, value, words):
    monkeypatch.setenv(variable, value)
    for call in (
        lambda: tritile.matmul(X, X),
        lambda: tritile.transpose(X),
        lambda: tritile.plan("matmul", X, X, device=H200),
    ):
        with pytest.raises(errors.InvalidValueError, match=f"{variable} is {value!r}.*{words}"):
            call()


def test_the_innermost_choice_wins_and_is_of_its_thread(monkeypatch):
    assert rules() == Rules("cached", False, False)  # the backends are those of tests/conftest.py
    monkeypatch.setenv("TRITILE_MODE", "off")
    monkeypatch.setenv("TRITILE_BATCH_INVARIANT", "1")
    monkeypatch.setenv("TRITILE_BACKENDS", "triton, aten")
    assert rules() == Rules("off", True, True)
    seen = []
    with tritile.mode("strict", backends="triton"), tritile.batch_invariant(False):
        assert rules() == Rules("strict", False, False)
        with tritile.mode("tune"), tritile.batch_invariant():
            assert rules() == Rules("tune", True, False)
        assert (current_mode(), is_batch_invariant()) == ("strict", False)
        thread = threading.Thread(target=lambda: seen.append(rules()))
        thread.start()
        thread.join()
    assert seen == [Rules("off", True, True)]
    with pytest.raises(KeyError), tritile.mode("tune"):
        raise KeyError
    assert rules() == Rules("off", True, True)
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


@pytest.mark.parametrize("wanted", ["~nosuchuser/cache", None])
def test_a_cache_folder_in_the_home_of_nobody_breaks_no_call(monkeypatch, request, wanted):
    """None: as where neither HOME nor the list of users tells it."""
    settings._folder.cache_clear()
    request.addfinalizer(settings._folder.cache_clear)
    if wanted:
        monkeypatch.setenv("TRITILE_CACHE_DIR", wanted)
    else:
        monkeypatch.delenv("TRITILE_CACHE_DIR")
        monkeypatch.setattr(settings.platformdirs, "user_cache_dir", lambda name: f"~nosuchuser/{name}")
    with pytest.warns(errors.StoreWarning, match="no home folder for") as told:
        assert cache_dir() == cache_dir()
    assert cache_dir().is_absolute()
    assert len(told) == 1


@pytest.mark.parametrize(
    ("choose", "name"),
    [(lambda: tritile.mode("tune"), "mode"), (tritile.batch_invariant, "batch_invariant")],
)
def test_a_statement_that_sets_nothing_warns_and_a_with_and_a_decorator_do_not(choose, name, recwarn):
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
def test_a_with_inside_torch_compile_counts_and_nothing_fails_as_it_goes(monkeypatch):
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
