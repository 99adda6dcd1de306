"""The source distribution and the wheel: what they contain, and that a wheel works without a checkout."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.utils import canonicalize_name

import tritile
from tests.commands import commands
from tests.unit.test_cli import remember
from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.tune.suites import SHIPPED
from tritile.tuner.store.trials import Store

pytestmark = pytest.mark.slow  # each builds, or installs
ROOT = Path(tritile.__file__).parents[1]
H200 = ("--target", "nvidia-h200")
MOST_BYTES = 1_500_000
BUILD_SDIST = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
# For each command line, or Python file, on stdin: the exit status and what it prints.
RUNS = """
import contextlib, io, json, runpy, sys
from tritile.__main__ import main
found = []
for words in json.load(sys.stdin):
    sys.argv, said, status = ["tritile", *words], io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            runpy.run_path(words[0]) if words[0].endswith(".py") else main()
        except SystemExit as end:
            status = end.code or 0
    found.append((status, " ".join(said.getvalue().split())))
import tritile
json.dump({"where": tritile.__file__, "found": found}, sys.stdout)
"""


def run(*words, **options):
    """Run a command and return what it prints."""
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def pip(*words):
    """Run pip without a network."""
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *words)


def build_wheel(source, folder):
    """Build with the setuptools that is installed here, and return the wheel."""
    pip("wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder, source)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the checkout without git's folder or anything that a build left behind."""
    copy = tmp_path_factory.mktemp("source") / "tritile"
    left_out = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "site")
    return shutil.copytree(ROOT, copy, ignore=left_out)


@pytest.fixture(scope="module")
def sdist(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-c", BUILD_SDIST, folder, cwd=source)
    (found,) = folder.glob("*.tar.gz")
    return found


@pytest.fixture(scope="module")
def wheel(source, sdist, tmp_path_factory):  # after the source distribution: a build writes into the source
    return build_wheel(source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as files:
        return Metadata.from_email(files.read("tritile-0.2.0.dist-info/METADATA"), validate=True)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The `bin` of an environment in which pip has installed the wheel, and nothing else."""
    environment = tmp_path_factory.mktemp("installed")
    venv.create(environment, symlinks=True)
    pip("--python", environment / "bin" / "python", "install", "--no-deps", "--no-index", wheel)
    return environment / "bin"


@pytest.fixture
def packages(tmp_path):
    """An environ whose PYTHONPATH has the installed packages except tritile."""
    around = tmp_path / "packages"
    around.mkdir()
    places = [Path(place) for place in sys.path if place.endswith(("site-packages", "dist-packages"))]
    for each in (each for place in places for each in place.iterdir()):
        left_out = "tritile" in each.name or each.suffix == ".pth"
        if not (left_out or (around / each.name).is_symlink()):
            (around / each.name).symlink_to(each)
    return os.environ | {"PYTHONPATH": str(around), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "300"}


def wrong(expected, installed, environ, here):
    """Return what the installed wheel prints where it is not as `expected`, all run in one process.

    `expected` maps command lines, or files of Python, to an exit status and a part of what is printed.
    """
    lines = json.dumps([list(map(str, words)) for words in expected])
    answer = json.loads(run(installed / "python", "-c", RUNS, input=lines, env=environ, cwd=here))
    assert Path(answer["where"]).is_relative_to(installed.parent)
    found = dict(zip(expected, answer["found"], strict=True))
    return {
        words: found[words]
        for words, (status, said) in expected.items()
        if found[words][0] != status or said not in found[words][1]
    }


def recorded(folder):
    """Return the file of a store with two trials of one problem."""
    store = Store(target_device("nvidia-h200"), folder)
    remember(store)
    faster = Config.of(family="tile", BLOCK_M=64, BLOCK_N=32, BLOCK_K=32, GROUP_M=8)
    remember(store, us=5.5, config=faster)
    return store.path


def files_of(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_wheel_is_small_and_alone(source, wheel):
    assert wheel.name == "tritile-0.2.0-py3-none-any.whl"
    assert wheel.stat().st_size < MOST_BYTES
    shipped = {f"tritile/{name}" for name in files_of(source / "tritile")}
    assert {f"tritile/suites/{path.name}" for path in SHIPPED.glob("*.toml")} < shipped
    about = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt")
    with zipfile.ZipFile(wheel) as files:
        assert {*files.namelist()} == shipped | {f"tritile-0.2.0.dist-info/{name}" for name in about}


def test_sdist_wheel_is_the_same(source, sdist, wheel, tmp_path):
    with tarfile.open(sdist) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert {"CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "pyproject.toml"} < names
    again = build_wheel(sdist, tmp_path)
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:  # RECORD has a digest of each file
        first, second = (sorted(each.read("tritile-0.2.0.dist-info/RECORD").split()) for each in (one, other))
    assert first == second


def test_metadata_declares_imports_in_ranges(metadata):
    assert str(metadata.version) == tritile.__version__
    assert str(metadata.requires_python) == ">=3.11"
    assert metadata.license_expression == "MIT"
    assert metadata.description == (ROOT / "README.md").read_text()
    declared = {
        (str(each.marker or ""), canonicalize_name(each.name).replace("-", "_")): each.specifier
        for each in metadata.requires_dist
    }
    pins = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pins = {canonicalize_name(name).replace("-", "_"): version for name, version in pins.items()}
    backends = {"s3fs", "gcsfs", "huggingface_hub"}  # of fsspec, which no test needs
    assert {name for marker, name in declared if "shared" in marker} == backends
    pinned = {name: ranges for (_, name), ranges in declared.items() if name not in backends}
    assert {name for name, ranges in pinned.items() if pins[name] not in ranges} == set()
    trees = [ast.parse(path.read_text()) for path in (ROOT / "tritile").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    modules = {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"tritile"}
    assert modules == {name for marker, name in declared if not marker}


def test_readme_and_commands_from_wheel(installed, packages, tmp_path):
    here, environ = tmp_path / "here", packages
    for folder in (here, tmp_path / "other"):
        folder.mkdir()
    snippets = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    (here / "readme.py").write_text("\n".join(snippets))
    store = recorded(tmp_path / "other")
    expected = {
        ("readme.py",): (0, "matmul"),
        ("tune", "--suite", "llm", "--only", "nothing"): (2, "no case has that in its name"),
        ("bench", "64x64x64"): (2, "no GPU here"),
        ("compile", "8x8x8", "--dtype", "int8", *H200): (0, "1 kernel of 1 problem"),
        ("doctor",): (0, "torch computed the product on the CPU"),
        ("explain", "64x64x64", *H200): (0, "BLOCK_M"),
        ("plan", "64x64x64", *H200): (0, "predicted"),
        ("merge", store, *H200): (0, "2 trials added"),
        ("show", *H200): (0, "BLOCK_N=32"),
        ("pull", *H200): (2, "set TRITILE_SHARED"),
        ("compact", str(tmp_path / "none")): (1, "FileNotFoundError"),
        ("export", "--output", "b.json", *H200): (0, "1 entries"),
        ("check", "json:dumps", "5", "--make", "math:sqrt"): (2, "is no kernel"),
        ("run", "--print-env"): (0, "tritile/tuner/startup"),
        ("clear", "--yes", *H200): (0, "on NVIDIA H200 deleted: 2 trials"),
    }
    assert snippets
    assert {words[0] for words in expected} == {"readme.py", *commands()}
    assert wrong(expected, installed, environ, here) == {}
    said = run(installed / "tritile", "--version", env=environ, cwd=here)
    assert said == f"tritile {tritile.__version__}\n"


def test_editable_install_is_path(source, tmp_path):
    """By default setuptools installs an import hook, and mypy then finds neither tritile nor py.typed."""
    pip("install", "--no-deps", "--no-build-isolation", "--target", tmp_path, "--editable", source)
    (path,) = tmp_path.glob("*.pth")
    assert path.read_text().strip() == str(source)
