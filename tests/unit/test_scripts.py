"""The scripts of tuning/ without a GPU: help of every one, and what else runs in seconds.

Others run in tests/gpu/test_pages_gpu.py. What scripts write is compared in test_figures.py.
"""

import ast
import gzip
import importlib
import json
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import adopted
import choices
import cost
import kinds
import train
from tests.commands import SCRIPTS, scripts
from tritile.choose import predictor, table
from unseen import draw, draw_by_time

ROOT = Path(__file__).parents[2]
TUNING = ROOT / "tuning"
WRITES = {"figures"}  # whenever it runs
RUN = sorted(path.stem for path in TUNING.glob("*.py") if "\nif __name__" in path.read_text())
HELP = """
import contextlib, io, json, runpy, sys
_, folder, *names = sys.argv
found = {}
sys.path.insert(0, folder)
for name in names:
    sys.argv, shown, status = [f"{name}.py", "--help"], io.StringIO(), None
    with contextlib.redirect_stdout(shown):
        try:
            runpy.run_path(f"{folder}/{name}.py", run_name="__main__")
        except SystemExit as end:
            status = end.code or 0
    found[name] = status, shown.getvalue()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """Exit status and help of each script, all in one process, for torch is imported in seconds."""
    command = [sys.executable, "-c", HELP, TUNING, *(name for name in RUN if name not in WRITES)]
    env, here = os.environ | {"PYTHONPATH": str(ROOT)}, tmp_path_factory.mktemp("here")
    return json.loads(subprocess.run(command, capture_output=True, check=True, cwd=here, env=env).stdout)


def test_names_from_tritile_exist():
    """Also those that a function imports once it runs, on a GPU."""
    missing = []
    for path in sorted(TUNING.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "tritile":
                module = importlib.import_module(node.module)
                absent = [each.name for each in node.names if not hasattr(module, each.name)]
                modules = {each.name for each in pkgutil.iter_modules(getattr(module, "__path__", []))}
                missing += [f"{path.name}: {node.module}.{name}" for name in absent if name not in modules]
    assert missing == []


@pytest.mark.parametrize("name", [name for name in RUN if name not in WRITES])
def test_help(name, shown):
    status, text = shown[name]
    assert status == 0
    assert f"{name}.py [" in text
    lines = text.partition("Examples:")[2].strip().splitlines()
    assert bool(lines) == (name in SCRIPTS)
    for line in lines:
        python, file, *arguments = shlex.split(line)
        assert (python, file) == ("python", f"tuning/{name}.py")
        scripts()[f"{name}.py"].make_context(name, arguments)


def few_sizes(folder):
    """Nine sizes of a sweep."""
    lines = gzip.decompress((TUNING / "sweeps" / "int8.jsonl.gz").read_bytes()).splitlines()[:10]
    folder.mkdir(exist_ok=True)
    (folder / "int8.jsonl.gz").write_bytes(gzip.compress(b"\n".join(lines)))


def test_train(tmp_path, monkeypatch, capsys):
    """What is told of sizes left out, and what is written, of nine sizes."""
    few_sizes(tmp_path / "sweeps")
    monkeypatch.setattr(train, "ROOT", tmp_path)
    for words in (["--check"], ["--check", "--beyond"], ["--output", str(tmp_path)]):
        monkeypatch.setattr("sys.argv", ["train.py", "products", "--steps", "4", *words])
        train.main()
        told = capsys.readouterr().out
        assert ("NVIDIA H200" in told and "int8" in told) or "--beyond" in words
        assert (tmp_path / "products.predictor.json").exists() == ("--output" in words)
    made = predictor.read(tmp_path / "products.predictor.json")
    assert made.classes["int8"].gpus == ("NVIDIA H200",)
    assert made.versions == train.VERSIONS


def test_choices(tmp_path, monkeypatch, capsys):
    """Plans of drawn sizes; those of other seeds are not compared; and what lines say."""
    monkeypatch.setattr(choices, "DRAWS", range(1, 2))
    monkeypatch.setattr(choices, "draw", lambda seed: draw(seed, 2, 2))
    monkeypatch.setattr(choices, "draw_by_time", lambda seed: draw_by_time(seed, 2))
    rows = list(choices.plans("nvidia-h200", "3.6.0"))
    assert [row["drawn"] for row in rows] == ["time", "time", "size", "size", "size", "size"]
    monkeypatch.setenv("TRITILE_SEED", "another")
    with pytest.raises(SystemExit, match="other sizes"):
        list(choices.timed(rows, list(choices.plans("nvidia-h200", "3.6.0")), 1.0, choices.SIDES))
    line = rows[2] | {"called_before": 10.0, "called_after": 8.0}
    (tmp_path / "choices.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (line, rows[3])))
    monkeypatch.setattr("sys.argv", ["choices.py", "--tell", str(tmp_path / "choices.jsonl")])
    choices.main()
    (told,) = capsys.readouterr().out.splitlines()
    assert "called matmul drawn by size: 1 differ, by time +25.00%, mean +25.00%" in told


def test_cost(tmp_path, monkeypatch, capsys):
    """Constants are fitted to half of nine sizes, and reported at the others."""
    few_sizes(tmp_path)
    monkeypatch.setattr(cost, "GPUS", {"H200": (tmp_path,)})
    monkeypatch.setattr("sys.argv", ["cost.py", "--steps", "1", "--sizes", "4"])
    monkeypatch.setattr(cost.product_us, "__defaults__", cost.product_us.__defaults__)
    cost.main()
    constants, report = capsys.readouterr().out.splitlines()
    assert constants.count("=") == len(cost.FIT.__dataclass_fields__)
    assert "H200 int8, 5 sizes left out" in report


def test_kinds(tmp_path, monkeypatch, capsys):
    """What was timed decides which kinds torch's kernel makes; the shipped table is of these lines."""
    shipped = ROOT / "tritile" / "tables" / "nvidia-h200.json"
    path = Path(shutil.copy(shipped, tmp_path))
    table.write(table.replace(table.read(path), by_aten=()), path)
    lines = TUNING / "sweeps" / "kinds.jsonl"
    monkeypatch.setattr("sys.argv", ["kinds.py", str(lines), "--sizes", "0", "--table", str(path)])
    kinds.main()
    assert table.read(path).by_aten == table.read(shipped).by_aten
    assert "torch/tritile" in capsys.readouterr().out


def test_adopted_lists_cases_and_their_sources(monkeypatch, capsys):
    """Parts of the list share it out; each case has its own name, and its project's sources a commit."""

    def listed(*arguments):
        monkeypatch.setattr("sys.argv", ["adopted.py", "--list", *arguments])
        assert adopted.main() == 0
        return capsys.readouterr().out.splitlines()

    lines = listed()
    parts = [line for index in range(1, 5) for line in listed("--part", f"{index}/4")]
    assert sorted(parts) == sorted(set(lines))
    assert len(lines) == len({case.name for case in adopted.CASES}) >= 20
    assert {case.project for case in adopted.CASES} == {*adopted.SOURCES}
    assert len(adopted.SOURCES) >= 12
    assert all(re.fullmatch("[0-9a-f]{40}", source.commit) for source in adopted.SOURCES.values())
    assert listed("--only", "fla_kda") == [line for line in lines if line.startswith("fla_kda ")]
