"""`tritile tune --model`: what it asks for, and that it leaves the process as it was."""

import os

import pytest
import torch
import typer.testing

from tritile.cli import app
from tritile.cli import tune_modes as modelling
from tritile.core import device as devices
from tritile.core.device import TARGETS
from tritile.core.settings import current_mode
from tritile.errors import InvalidValueError

STEPS = """
import torch
from tritile.core.settings import current_mode
seen = []
w = torch.ones(8, 8, requires_grad=True)
def step():
    seen.append(current_mode())
    w.register_hook(lambda grad: seen.append(("backward", current_mode())))
    (torch.ones(4, 8) @ w).sum().backward()
value = 3
"""


@pytest.fixture
def steps(tmp_path, monkeypatch):
    (tmp_path / "steps_of_a_model.py").write_text(STEPS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(devices, "current_gpu", lambda: TARGETS["nvidia-h200"])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.delenv("TRITILE_MODE", raising=False)


def run(name):
    return typer.testing.CliRunner().invoke(app, ["tune", "--model", name])


def test_a_step_is_measured_once_and_timed_on_both_sides(steps):
    found = run("steps_of_a_model:step")
    assert found.exit_code == 0, found.output
    assert "times as fast" in found.output
    import steps_of_a_model

    modes = [each for each in steps_of_a_model.seen if isinstance(each, str)]
    assert modes == ["cached", "tune"] + ["cached"] * (1 + 2 * modelling.ROUNDS)
    assert ("backward", "tune") in steps_of_a_model.seen
    assert current_mode() == "cached"
    assert "TRITILE_MODE" not in os.environ


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
def test_what_names_no_function_is_told(name, text, steps):
    with pytest.raises(InvalidValueError, match=text):
        modelling.step_of(name)


def test_a_package_that_cannot_be_imported_tells_why(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "package_of_a_model").mkdir()
    (tmp_path / "package_of_a_model" / "__init__.py").write_text("import no_such_part")
    with pytest.raises(InvalidValueError, match="no_such_part"):
        modelling.step_of("package_of_a_model.steps:step")


def test_without_a_gpu_there_is_nothing_to_measure(monkeypatch):
    monkeypatch.setattr(devices, "current_gpu", lambda: None)
    found = run("os:getcwd")
    assert found.exit_code != 0
    assert "no GPU" in found.output + str(found.exception)
