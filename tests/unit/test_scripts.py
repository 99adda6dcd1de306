"""Command lines of scripts under tuning/: what they take, refuse, print and write without a GPU."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer

import bench
import ladder
import picture
import report
import tritile
from tests import commands
from tritile.cli import shared

ROOT = Path(tritile.__file__).parents[1]
SCRIPTS = {"bench": bench, "ladder": ladder, "picture": picture, "report": report}
USAGE = {
    "bench": "there is no GPU here",
    "bench --output notes.txt": "notes.txt is not a folder",
    "bench --output not/there/x.jsonl": "--output not/there/x.jsonl: expected a folder",
    "bench --draw 2": "--draw is for --suite unseen",
    "bench --suite unseen --only nothing": "no drawn case has that in its name",
    "bench --suite llm --suite unsen": "--suite 'unsen'",
    "ladder 0": "n = 0: expected 1 to 16,384",
    "ladder 16385": "n = 16385: expected 1 to 16,384",
    "ladder 8 --op conv": "--op 'conv': expected one of matmul, transpose",
    "ladder 8 --target ''": "--target '': expected one of",
    "picture 300x200x150 --op conv": "--op 'conv': expected one of matmul, transpose",
    "picture 4x30x20x15 --op grouped": "--op 'grouped': expected one of matmul, transpose",
    "picture 300x200x150 --config 'tile BLOCKS=64'": "BLOCKS",
    "picture 300x200x150 --output tiling.pdf": "expected a name that ends in .svg",
    "picture 300x200x150 --tile 100000": "tile is 100000",
    "picture 300x200x150 --step 0": "step is 0",
    "picture 8x8x8 --target ''": "--target '': expected one of",
    "picture 8x8 --op transpose --layout NT": "--layout does not go with --op transpose",
    "report --output report.pdf": "expected a name that ends in .html or .svg",
}
FAILURES = {
    "picture 8x8x8 --dtype complex64": "only torch computes 8x8x8 NN complex64",
    "report missing.jsonl": "no such file",
    "report notes.txt": "there are no results",
    "report none": "no .jsonl file",
}
WRITES = (
    "picture 30 20 10 --output {}.svg",
    "picture 30x20 --op transpose --output {}.svg",
    "report results --output {}.svg",
)
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


def run(words, of=commands.run, **options):
    name, *arguments = shlex.split(words)
    return of(*arguments, app=SCRIPTS[name].app, **options)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_run_in_a_checkout_and_their_examples_are_taken(name, tmp_path):
    script = ROOT / "tuning" / f"{name}.py"
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, script, "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environ)
    lines = [line.strip() for line in shown.stdout.partition("Examples:")[2].splitlines() if line.strip()]
    assert lines
    for line in lines:
        python, file, *arguments = shlex.split(line)
        assert (python, file) == ("python", f"tuning/{name}.py")
        typer.main.get_command(SCRIPTS[name].app).make_context(name, arguments)


@without_gpu
@pytest.mark.parametrize("words", [*USAGE, *FAILURES])
def test_wrong_arguments_and_files_are_named_before_anything_is_written(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("x")
    Path("none").mkdir()
    told = USAGE.get(words) or FAILURES[words]
    assert told in run(words, commands.refused, status=2 if words in USAGE else 1)
    assert sorted(path.name for path in Path().iterdir()) == ["none", "notes.txt"]


@without_gpu
def test_tables_fit_80_columns_and_fold_on_a_terminal_alone_and_json_is_alone(monkeypatch):
    words = "ladder 8 --op transpose"
    monkeypatch.setattr(shared.console, "_force_terminal", True)
    monkeypatch.setattr(shared.console, "width", 80)
    shown = run(words)
    assert shown.exit_code == 0, shown.output
    assert max(map(len, shown.stdout.splitlines())) <= 80
    monkeypatch.setattr(shared.console, "_force_terminal", None)
    line = "element by element a thread an element: far more of them under way"
    assert any(line in " ".join(each.split()) for each in run(words).stdout.splitlines())
    assert json.loads(run(f"{words} --json").stdout)["readings"]
    assert not shared.console.stderr


@without_gpu
@pytest.mark.parametrize("words", WRITES)
def test_folders_of_an_output_are_made(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").symlink_to(ROOT / "tuning" / "results" / "nvidia-h200")
    found = run(words.format("deep/er/made"))
    assert found.exit_code == 0, found.output
    (made,) = Path("deep/er").iterdir()
    assert made.stat().st_size


def test_a_report_is_of_the_committed_results_where_no_files_are_named(tmp_path):
    found = run(f"report --output {tmp_path / 'page.svg'} --target h100")
    assert found.exit_code == 0, found.output
    assert found.stdout.startswith(f"{tmp_path / 'page.svg'}: ")
    assert "results of NVIDIA H200 are left out" in found.stdout
