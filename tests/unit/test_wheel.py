"""The wheel where no checkout is near: its size, every command, and commands without extras."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import tritile
from tests.unit.test_cli import remember
from tritile.cli import COMMANDS
from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.core.distribution import EXTRAS, extra_advice
from tritile.planning.store import Store
from tritile.tune.suites import SHIPPED

ROOT = Path(tritile.__file__).parents[1]
LINES = ROOT / "tuning" / "results" / "nvidia-h200" / "transpose.jsonl"
H200 = ("--target", "nvidia-h200")
MOST_BYTES = 1_500_000
# Of each command line that comes in: its exit status and what it prints.
RUNS = """
import contextlib, io, json, sys
from tritile.__main__ import main
found = []
for words in json.load(sys.stdin):
    sys.argv, said, status = ["tritile", *words], io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as end:
            status = end.code or 0
    found.append((status, " ".join(said.getvalue().split())))
import tritile
json.dump({"where": tritile.__file__, "found": found}, sys.stdout)
"""


def pip(*words):
    """Run pip with what is installed here, and without a network."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Copy what a wheel is built of: a build writes beside it."""
    copy = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "tritile", copy / "tritile", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def wrong(wanted, installed, tmp_path, hidden=()):
    """Return what commands of the installed wheel, run in one process, say other than wanted.

    `wanted` has an exit status and a part of what is printed for each command. The process has links to all
    installed packages but tritile and the hidden ones.
    """
    around, here = tmp_path / "packages", tmp_path / "here"
    around.mkdir()
    here.mkdir(exist_ok=True)
    places = [Path(place) for place in sys.path if place.endswith(("site-packages", "dist-packages"))]
    for each in (each for place in places for each in place.iterdir()):
        left_out = "tritile" in each.name or each.name.partition(".")[0] in hidden
        if not (left_out or each.suffix == ".pth" or (around / each.name).is_symlink()):
            (around / each.name).symlink_to(each)
    path = f"{installed}{os.pathsep}{around}"
    environ = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "300"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", RUNS],  # no site-packages, where a tritile may be
        input=json.dumps([list(map(str, words)) for words in wanted]),
        capture_output=True, text=True, env=environ, cwd=here, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert Path(answer["where"]).is_relative_to(installed)
    found = dict(zip(wanted, answer["found"], strict=True))
    return {
        words: found[words]
        for words, (status, said) in wanted.items()
        if found[words][0] != status or said not in found[words][1]
    }


def recorded(folder):
    """Return the file of a store with two trials of one problem."""
    store = Store(target_device("nvidia-h200"), folder)
    remember(store)
    faster = Config.of(family="tile", BLOCK_M=64, BLOCK_N=32, BLOCK_K=32, GROUP_M=8)
    remember(store, us=5.5, config=faster)
    return store.path


def test_the_wheel_is_small_and_holds_what_commands_read(wheel, installed):
    assert wheel.stat().st_size < MOST_BYTES
    suites = installed / "tritile" / "suites"
    assert {path.name for path in suites.iterdir()} == {path.name for path in SHIPPED.glob("*.toml")}
    assert {path.name for path in installed.iterdir()} == {"tritile", "tritile-0.1.0.dist-info"}
    scripts = (installed / "tritile-0.1.0.dist-info" / "entry_points.txt").read_text()
    assert scripts == "[console_scripts]\ntritile = tritile.__main__:main\n"


def test_every_command_works_from_the_wheel(installed, tmp_path):
    (tmp_path / "other").mkdir()
    store = recorded(tmp_path / "other")
    wanted = {
        ("tune", "--suite", "llm", "--only", "nothing"): (2, "no case has that in its name"),
        ("bench", "--suite", "quick"): (2, "no GPU here"),
        ("report",): (2, "no results here: name files"),
        ("compile", "8x8x8", "--dtype", "int8", *H200): (0, "1 kernels of 1 problems"),
        ("doctor",): (0, "torch on the CPU"),
        ("explain", "64x64x64", *H200): (0, "BLOCK_M"),
        ("ladder", 8, "--op", "transpose", *H200): (0, "row by row"),
        ("picture", "300x200x150", "--output", "a.svg"): (0, "a.svg: "),
        ("merge", store, *H200): (0, "2 trials added"),
        ("show", *H200): (0, "BLOCK_N=32"),
        ("export", "--output", "b.json", *H200): (0, "1 entries"),
        ("clear", "--yes", *H200): (0, "of NVIDIA H200 deleted: 2 trials"),
        ("report", LINES, "--output", "b.svg"): (0, "b.svg: "),
    }
    assert {words[0] for words in wanted} == set(COMMANDS)
    assert wrong(wanted, installed, tmp_path) == {}


def test_without_the_extras_commands_work_or_name_the_one_they_need(installed, tmp_path):
    (tmp_path / "here").mkdir()
    recorded(tmp_path)  # this user's own
    wanted = {
        ("doctor",): (0, "missing altair"),
        ("tune", "--suite", "llm", "--only", "M=nothing"): (2, "no case has that in its name"),
        ("export", "--output", "c.json", *H200): (0, "1 entries"),
        ("picture", "300x200x150", "--output", "a.svg"): (0, "a.svg: "),
        ("report", LINES): (1, "tritile[report]"),
    }
    assert wrong(wanted, installed, tmp_path, {name for names in EXTRAS.values() for name in names}) == {}


def test_an_editable_install_is_a_path_which_type_checkers_follow(source, tmp_path):
    """By default setuptools installs an import hook, and mypy then finds neither tritile nor py.typed."""
    pip("install", "--no-deps", "--no-build-isolation", "--target", tmp_path, "--editable", source)
    (path,) = tmp_path.glob("*.pth")
    assert path.read_text().strip() == str(source)


def test_extras_are_those_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for extra, names in EXTRAS.items():
        brought = {re.split("-python|>=", text)[0].replace("-", "_") for text in extras[extra]}
        assert set(names) <= brought
    assert extra_advice("altair.vegalite") == 'pip install "tritile[report]"'
    assert extra_advice("torch") == ""
