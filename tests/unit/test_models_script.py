"""The benchmark of whole models, as far as no transformers is needed: intervals, turns, processes."""

import argparse
import subprocess
import sys

import pytest

import models


def test_the_interval_of_equal_pairs_is_their_ratio():
    found = models.compared([3.0] * 9, [2.0] * 9)
    assert found == {"torch_ms": 3.0, "tritile_ms": 2.0, "ratio": 1.5, "low": 1.5, "high": 1.5}


def test_the_interval_holds_the_ratio_is_repeatable_and_forgives_a_pair_that_was_disturbed():
    off = [1.00, 1.01, 0.99, 1.02, 0.98, 1.00, 1.01, 0.99, 1.00]
    found = models.compared(off, [1.0] * 9)
    assert 0.98 <= found["low"] < found["ratio"] == 1.0 < found["high"] <= 1.02
    assert models.compared(off, [1.0] * 9) == found
    assert models.compared([*off[:-1], 5.0], [1.0] * 9)["high"] < 1.03


def test_sides_take_turns_and_each_begins_with_a_call_that_does_not_count(monkeypatch):
    monkeypatch.setattr(models, "SECONDS", 0.0)  # an iteration a time
    order = []
    found = models.measured({side: lambda side=side: order.append(side) for side in models.SIDES}, 3)
    assert order[:3] == ["torch"] * 3  # how long an iteration takes
    pairs = [order[i : i + 4] for i in range(3, len(order), 4)]
    first, second = models.SIDES
    turn, other = [first, first, second, second], [second, second, first, first]
    assert pairs == [turn, other, turn]
    assert (found["turns"], found["iterations"]) == (3, 1)


@pytest.mark.parametrize(("status", "ended"), [(0, True), (1, False)])
def test_a_process_gets_caches_of_its_own_and_its_lines_are_kept_even_if_it_fails(monkeypatch, status, ended):
    asked = argparse.Namespace(turns=9, what=["forward"], compiled=True, small=False, tune=True)
    seen = []

    def run(command, env, **rest):
        seen.append((command, env))
        return subprocess.CompletedProcess(command, status, stdout='told\n{"what": "forward"}\n')

    monkeypatch.setattr(models.subprocess, "run", run)
    wanted = {"op": "models", "model": "bert", "process": "later", "what": "forward"}
    assert models.lines_of("bert", "later", asked, "/caches") == ([wanted], ended)
    ((command, env),) = seen
    assert command[2:] == ["--one", "bert", "--turns", "9", "--what", "forward", "--compiled", "--tune"]
    for name in ("TRITON", "TORCHINDUCTOR"):
        assert env[f"{name}_CACHE_DIR"] == f"/caches/bert/{name}"
    assert env["TRITILE_CACHE_DIR"] == "/caches/TRITILE"


def test_that_transformers_is_missing_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(sys, "argv", ["models.py", "--small"])
    with pytest.raises(SystemExit, match="needs transformers: pip install transformers"):
        models.main()
