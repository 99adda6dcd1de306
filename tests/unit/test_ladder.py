"""The ladder without a GPU: what it computes and prints; rungs are timed with made-up times."""

import json
import math
from dataclasses import replace

import pytest
import torch

import ladder
import tritile
from ladder import error_of, matrices
from ladder_rungs import LADDERS, Rung
from tests import commands
from tritile.core.device import target_device
from tritile.core.settings import current_mode, mode
from tritile.errors import TuningError

H200 = target_device("nvidia-h200")


def run(*arguments):
    return commands.run("ladder.py", *arguments)


def test_rungs_are_listed_as_json():
    found = json.loads(run(512, "--op", "transpose", "--target", "sm_90", "--json").stdout)
    assert (found["n"], found["device"], found["timed"]) == (512, "NVIDIA H100 80GB HBM3", False)
    assert found["env"]["torch"] == torch.__version__
    rungs = [rung.name for rung in LADDERS["transpose"] if not rung.is_baseline]
    assert [reading["name"] for reading in found["readings"]] == rungs
    assert all(reading["requested"] >= 2 * 512 * 512 * 4 for reading in found["readings"])


def test_missing_rung_says_so():
    result = run(512, "--op", "matmul", "--target", "sm_80")
    assert result.exit_code == 0, result.output
    (line,) = (line for line in result.output.splitlines() if "persistent, TMA" in line)
    assert line.split()[-4:] == ["MB", "-", "-", "-"]
    assert "Hopper (sm_90)" in " ".join(result.output.split())
    assert "transpose" not in result.output.split("requested:")[0]
    (rung,) = (rung for rung in LADDERS["matmul"] if rung.name == "autotuned")
    large = max(rung.configs, key=lambda c: c["BLOCK_M"] * c["BLOCK_N"] * c.num_stages)
    reading = ladder.described(rung, 512, large, target_device("gfx942"))
    assert "shared memory" in reading.note
    assert reading.registers is None


@pytest.mark.parametrize("op", LADDERS)
@pytest.mark.parametrize("fault", ["nothing written", "a wrong row", "one NaN"])
def test_wrong_answers_are_found(op, fault):
    *operands, out = matrices(op, 300, "float32", "cpu")
    out.copy_(operands[0] @ operands[1] if op == "matmul" else operands[0].t())
    assert error_of(op, (*operands, out)) < 1e-6
    if fault == "nothing written":
        out.fill_(math.nan)
    elif fault == "one NaN":
        out[5, 7] = math.nan
    else:
        out[-1] *= 1.001
    with pytest.raises(TuningError, match="wrong answer"):
        error_of(op, (*operands, out))


class Timer:
    """Stands for a graph whose launch takes so many microseconds."""

    launches = 1

    def __init__(self, us):
        self.us = us

    def time_us(self):
        return self.us


def test_rungs_checked_and_timed(monkeypatch):
    monkeypatch.setattr(ladder, "matrices", lambda op, n, dtype, where, seed: matrices(op, n, dtype, "cpu"))
    monkeypatch.setattr(ladder, "copies_for", lambda *sizes: 2)
    monkeypatch.setattr(ladder, "graph_of", lambda run, calls: Timer(500.0))
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)

    def rung(name, call, **rest):
        return Rung("transpose", name, "", "float32", call=call, **rest)

    rungs = [
        rung("right", lambda x, out: out.copy_(x.t())),
        rung("wrong", lambda x, out: out.fill_(1)),
        rung("raising", lambda x, out: x.no_such_method()),
        rung("copy", lambda x, out: out.copy_(x), checked=False),
        rung("elsewhere", lambda x, out: None, unfit=lambda device, n: f"not at {n}"),
    ]
    done = []
    found = {each.name: each for each in ladder.timed(rungs, 16, H200, done.append)}
    assert list(found) == done == [each.name for each in rungs]
    assert {name for name, each in found.items() if each.us == 500.0} == {"right", "copy"}
    assert {name for name, each in found.items() if each.failed} == {"wrong", "raising"}
    assert (found["right"].error, found["copy"].error) == (0.0, None)
    assert "wrong answer" in found["wrong"].note
    assert "no_such_method" in found["raising"].note


def test_library_rungs_in_shown_mode():
    modes = []
    rung = replace(LADDERS["matmul"][-1], call=lambda *_: modes.append(current_mode()))
    with mode("strict"):
        rung.run((), None, 132)
        assert current_mode() == "strict"
    assert modes == ["cached"]


@pytest.mark.parametrize("n", [1, 2, 7, 8, 100, 1001])
@pytest.mark.parametrize("op", LADDERS)
def test_library_rung_shows_its_kernel(op, n):
    (rung,) = (rung for rung in LADDERS[op] if rung.name == f"tritile.{op}")
    *operands, _ = matrices(op, n, rung.dtype, "cpu")
    plan = tritile.plan(getattr(tritile, op), *operands, device=H200)
    assert plan.problem == rung.problem(n)
    assert plan.config == rung.config(n, H200)
