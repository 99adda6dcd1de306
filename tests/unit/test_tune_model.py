"""`tritile tune --model`: what it measures, on a GPU that is not here, and names that are no function."""

import importlib
import json

import pytest
import torch
import typer.testing
from torch import nn

from tests.layers import TOKENS, Net
from tritile.cli import app, tune_model
from tritile.core import device as devices
from tritile.core.device import TARGETS
from tritile.core.settings import current_mode
from tritile.errors import InvalidValueError
from tritile.nn.exchanged import Comparison, ConvertedLinear

CONVERT = importlib.import_module("tritile.nn.convert")
HERE = TARGETS["nvidia-h200"]
STEPS = """
value = 3
def step():
    net(tokens)
"""


@pytest.fixture
def steps(tmp_path, monkeypatch):
    (tmp_path / "steps_of_a_model.py").write_text(STEPS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module("steps_of_a_model")
    vars(module).update(net=Net(), tokens=TOKENS)
    return module


def run(*arguments):
    return typer.testing.CliRunner().invoke(app, ["tune", *arguments])


def test_the_layers_of_a_step_are_measured_and_both_sides_timed_in_turns(monkeypatch, steps):
    asked, sides = [], []

    def compared(call, weight, *rest):
        asked.append(current_mode())
        wins = weight.shape[0] == steps.net.up.out_features
        return Comparison(2.0 if wins else 0.5, wins, "measured", 100.0)

    def seconds(step):
        sides.append(type(steps.net.up))
        return {ConvertedLinear: 0.001, nn.Linear: 0.002}[sides[-1]]

    monkeypatch.setattr(CONVERT, "judged", compared)
    monkeypatch.setattr(CONVERT, "_target", lambda *given: (HERE, 0))
    monkeypatch.setattr(tune_model, "gpu_here", lambda: HERE)
    monkeypatch.setattr(tune_model, "_seconds", seconds)
    done = run("--model", "steps_of_a_model:step", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {"model": "steps_of_a_model:step", "torch_ms": 2.0, "tritile_ms": 1.0}
    assert set(asked) == {"tune"}
    assert current_mode() == "cached"
    assert sides[:4] == [ConvertedLinear, nn.Linear, nn.Linear, ConvertedLinear]
    assert not torch.nn.modules.module._global_forward_pre_hooks


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("steps_of_a_model", "module:function"),
        (":step", "module:function"),
        ("no_such_module_here:step", "no_such_module_here"),
        ("steps_of_a_model:other", "other"),
        ("steps_of_a_model:value", "int is not a function"),
    ],
)
def test_what_names_no_function_is_refused(name, text, steps):
    with pytest.raises(InvalidValueError, match=text):
        tune_model.step_of(name)


def test_without_a_gpu_there_is_nothing_to_measure(monkeypatch):
    monkeypatch.setattr(devices, "current_gpu", lambda: None)
    found = run("--model", "os:getcwd")
    assert found.exit_code != 0
    assert "no GPU" in found.output + str(found.exception)
