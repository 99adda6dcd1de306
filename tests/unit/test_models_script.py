"""The benchmark of whole models, as far as no transformers is needed: intervals, turns, processes."""

import argparse
import contextlib
import subprocess
import sys

import pytest

import models


def test_the_interval_of_equal_pairs_is_their_ratio():
    found = models.compared([3.0] * 9, [2.0] * 9)
    assert found == {"off_ms": 3.0, "on_ms": 2.0, "ratio": 1.5, "low": 1.5, "high": 1.5}


def test_the_interval_holds_the_ratio_is_repeatable_and_forgives_a_pair_that_was_disturbed():
    off = [1.00, 1.01, 0.99, 1.02, 0.98, 1.00, 1.01, 0.99, 1.00]
    found = models.compared(off, [1.0] * 9)
    assert 0.98 <= found["low"] < found["ratio"] == 1.0 < found["high"] <= 1.02
    assert models.compared(off, [1.0] * 9) == found
    assert models.compared([*off[:-1], 5.0], [1.0] * 9)["high"] < 1.03


def test_sides_take_turns_and_each_begins_with_a_call_that_does_not_count(monkeypatch):
    monkeypatch.setattr(models, "SECONDS", 0.0)  # an iteration a time
    within, order = [], []

    @contextlib.contextmanager
    def side(name):
        within.append(name)
        yield argparse.Namespace(taken=7, left=9)
        within.remove(name)

    def call(name):
        assert within == [name] or (name == "off" and not within)
        order.append(name)

    names = ("off", "on")
    monkeypatch.setattr(models, "SIDES", {name: lambda name=name: side(name) for name in names})
    found = models.measured({name: lambda name=name: call(name) for name in names}, 3)
    opening = ["off", "on", "on", "off", "off", "off"]  # the first of each, one that is counted, how long
    assert order[:6] == opening
    pairs = [order[i : i + 4] for i in range(6, len(order), 4)]
    assert sorted(map(tuple, pairs)) == [("off", "off", "on", "on")] + [("on", "on", "off", "off")] * 2
    assert (found["taken"], found["left"], found["turns"], found["iterations"]) == (7, 9, 3, 1)
    assert found["first_on_s"] > 0


@pytest.mark.parametrize(("status", "ended"), [(0, True), (1, False)])
def test_a_process_gets_caches_of_its_own_and_its_lines_are_kept_even_if_it_fails(monkeypatch, status, ended):
    asked = argparse.Namespace(turns=9, what=["forward"], compiled=True, small=False)
    seen = []

    def run(command, env, **rest):
        seen.append((command, env))
        return subprocess.CompletedProcess(command, status, stdout='told\n{"what": "forward"}\n')

    monkeypatch.setattr(models.subprocess, "run", run)
    wanted = {"op": "models", "model": "bert", "process": "later", "what": "forward"}
    assert models.lines_of("bert", "later", asked, "/caches") == ([wanted], ended)
    ((command, env),) = seen
    assert command[2:] == ["--one", "bert", "--turns", "9", "--what", "forward", "--compiled"]
    for name in ("TRITON", "TORCHINDUCTOR"):
        assert env[f"{name}_CACHE_DIR"] == f"/caches/bert/{name}"
    assert env["TRITILE_CACHE_DIR"] == "/caches/TRITILE"


def test_that_transformers_is_missing_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(sys, "argv", ["models.py", "--small"])
    with pytest.raises(SystemExit, match="needs transformers: pip install transformers"):
        models.main()
