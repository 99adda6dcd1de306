"""The package as a whole: what importing it costs, and which module may import which."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tritile

PACKAGE = Path(tritile.__file__).parent
# Rooms, lowest first; rooms of one row are level. A module imports from lower rows, and its own room.
ROWS = (
    ("errors", "files", "threads", "version", "forgetting"),
    ("settings", "markup", "epilogue", "versions"),
    ("problem", "config", "source", "interpreter", "views"),
    ("device", "compiles", "counting", "quantized"),
    ("kernels",),
    ("space",),
    ("families",),
    ("model", "work"),
    ("traffic",),
    ("loading",),
    ("native", "counters"),
    ("trial",),
    ("database",),
    ("store",),
    ("snapshot", "table"),
    ("offline",),
    ("launch",),
    ("agreement", "plans"),
    ("ahead",),
    ("ops",),
    ("switch",),
    ("operators",),
    ("nn",),
    ("search", "timing", "forms", "direct"),
    ("measure",),
    ("declared", "decorated"),
    ("searching",),
    ("remembering",),
    ("traced",),
    ("autotuner",),
    ("subject", "deploy"),
    ("lab",),
    ("rungs",),
    ("tune",),
    ("report",),
    ("cli",),
)
RANK = {room: rank for rank, row in enumerate(ROWS) for room in row}
TUNING = {
    "autotuner", "declared", "decorated", "direct", "forms", "measure", "remembering", "search", "searching",
    "subject", "timing", "traced", "tune",
}  # fmt: skip
# Each room that may import another of its row, or of one above: ops as something is to
# be measured.
ALSO_ALLOWED = {("views", "problem"), ("interpreter", "source"), ("ops", "subject")}
FORBIDDEN = {("tune", "ops"), ("ops", "tune")}
IMPORTS_NOTHING = {"errors", "files", "forgetting", "source", "threads", "version"}  # of ours
FREE = {"__init__", "__main__"}  # the package's own face, which nothing below the command line imports
OPTIONAL = {"typer", "rich", "matplotlib", "pandas", "scipy", "altair", "vl_convert", "jinja2"}
OPTIONAL_ROOMS = {"report", "cli"}


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


MODULES = sorted(path for path in PACKAGE.rglob("*.py") if room(path) not in FREE)


def absolute(path: Path, node: ast.ImportFrom) -> str:
    """The module that `from ... import` names, relative dots resolved."""
    if node.level == 0:
        return node.module or ""
    parts = ("tritile", *path.relative_to(PACKAGE).parts[:-1])
    return ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])


def imported(path: Path, source: str) -> set[str]:
    """Dotted names of all that a file imports, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = absolute(path, node)
            names |= {f"{module}.{alias.name}" if module == "tritile" else module for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names |= {arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)}
    return names


def faults(path: Path, source: str) -> list[str]:
    """Each import of ours that the table above does not allow."""
    here, found = room(path), []
    for name in sorted(imported(path, source)):
        parts = name.split(".")
        if parts[0] != "tritile":
            continue
        there = parts[1] if len(parts) > 1 else ""
        if there not in RANK:
            allowed = here == "cli"  # `import tritile` or a name of its face: from the top only
        elif here in IMPORTS_NOTHING or (here, there) in FORBIDDEN:
            allowed = False
        else:
            allowed = here == there or RANK[there] < RANK[here] or (here, there) in ALSO_ALLOWED
        if not allowed:
            found.append(f"{path.relative_to(PACKAGE)} imports {name}")
    return found


def test_every_room_is_in_the_table():
    assert {room(path) for path in MODULES} <= set(RANK)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_come_from_lower_rooms(path):
    assert faults(path, path.read_text()) == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_optional_packages_stay_in_their_rooms(path):
    if room(path) not in OPTIONAL_ROOMS:
        assert {name.split(".")[0] for name in imported(path, path.read_text())} & OPTIONAL == set()


@pytest.mark.parametrize(
    ("where", "source"),
    [
        ("space/tile.py", "from tritile.model import pick"),
        ("space/tile.py", "import tritile.model"),
        ("space/tile.py", "from tritile import model"),
        ("space/tile.py", "from .. import model"),
        ("space/tile.py", "from ..model import pick"),
        ("space/tile.py", "def late():\n    from tritile.ops.matmul import matmul"),
        ("space/tile.py", "import importlib\nimportlib.import_module('tritile.model')"),
        ("space/tile.py", "from tritile import matmul"),
        ("device.py", "from . import model"),
        ("device.py", "from .model import pick"),
        ("space/__init__.py", "from tritile.work import work_of"),
        ("work/tile.py", "from ..launch import prepare"),
        ("work/values.py", "from tritile.native import NativeLaunch"),
        ("model.py", "from tritile.work import work_of"),
        ("native.py", "from tritile import launch"),
        ("ops/new.py", "from tritile.tune.tuner import tune"),
        ("ops/new.py", "from ..tune import search"),
        ("tune/new.py", "from tritile.ops.run import prepared"),
        ("source.py", "from tritile.errors import TritileError"),
        ("problem.py", "from tritile.config import Config"),
        ("errors.py", "import tritile"),
    ],
)
def test_the_rule_catches(where, source):
    assert faults(PACKAGE / where, source) != []


@pytest.mark.parametrize(
    ("where", "source"),
    [
        ("model.py", "from tritile.space import illegal"),
        ("views.py", "from tritile.problem import Operand"),
        ("work/new.py", "from tritile.space import tile\nfrom tritile.views import Call"),
        ("native.py", "from tritile.work.values import Buffer"),
        ("launch.py", "from tritile.native import NativeLaunch\nfrom tritile.families import FAMILIES"),
        ("ops/new.py", "from tritile.ops.checks import overlap"),
        ("tune/new.py", "from tritile import plans, launch"),
        ("cli/tune.py", "import tritile"),
        ("kernels/new.py", "from .tiles import multiple\nimport triton.language as tl"),
    ],
)
def test_the_rule_lets_pass(where, source):
    assert faults(PACKAGE / where, source) == []


def fresh(code: str) -> str:
    """What `code` prints in a new interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=PACKAGE.parent
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_touches_no_gpu_and_no_optional_package():
    code = (
        "import sys, torch, tritile\n"
        f"print(torch.cuda.is_initialized(), {OPTIONAL} & set(sys.modules))\n"
        "from triton.runtime.driver import driver\n"
        "print(driver._active is None)"
    )
    assert fresh(code).splitlines() == ["False set()", "True"]


def test_a_launched_call_loads_nothing_that_tunes():
    """Nor does importing: what is public of it is loaded where it is asked for."""
    code = (
        "import sys, warnings, torch\n"
        "import tritile\n"
        "warnings.simplefilter('ignore')\n"
        "x = torch.ones(5, 3)\n"
        "assert torch.equal(tritile.matmul(x, x.mT), torch.full((5, 5), 3.0))\n"
        "tritile.transpose(x), tritile.linear(x, x)\n"
        "tritile.plan(tritile.matmul, x, x.mT, device='nvidia-h200')\n"
        "print(sorted({name.split('.')[1] for name in sys.modules if name.startswith('tritile.')}))\n"
        "assert tritile.autotune and tritile.Space and tritile.explain and tritile.Explanation\n"
        "print('tritile.searching' in sys.modules, callable(tritile.explain))"
    )
    rooms, then = fresh(code).splitlines()
    assert set(ast.literal_eval(rooms)) & (TUNING | {"lab"}) == set()
    assert then == "True True"


def test_importing_leaves_files_and_settings_alone(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    monkeypatch.setenv("TRITILE_CACHE_DIR", str(cache))
    code = (
        "import os, torch\n"
        "matmul = torch.backends.cuda.matmul\n"
        "before = dict(os.environ), torch.get_num_threads(), matmul.fp32_precision\n"
        "import tritile\n"
        "print(before == (dict(os.environ), torch.get_num_threads(), matmul.fp32_precision))"
    )
    assert fresh(code) == "True"
    assert not cache.exists()


def test_the_face_of_the_package():
    assert sorted(tritile.__all__) == list(tritile.__all__)
    assert [name for name in tritile.__all__ if not hasattr(tritile, name)] == []
    undocumented = [
        n for n in tritile.__all__ if callable(getattr(tritile, n)) and not getattr(tritile, n).__doc__
    ]
    assert undocumented == []
    assert (PACKAGE / "py.typed").exists()
