"""The package as a whole: what importing it costs, and which module may import which."""

import ast
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tritile

TESTS = Path(__file__).parents[1]

PACKAGE = Path(tritile.__file__).parent
# Rooms, lowest first; rooms of one row are level. A module imports from lower rows, and its own room.
LEVELS = "errors", "core", "runtime", "tuner", "families", "choose", "ops tune", "nn invariant", "lab", "cli"
ROWS = [tuple(level.split()) for level in LEVELS]
RANK = {room: rank for rank, row in enumerate(ROWS) for room in row}
# Imports from beside or above: ops import the tuner where something is to be measured, and the package `tune`
# is the function of its name where it is called.
ALSO_ALLOWED = {
    ("ops/request.py", "tritile.tune.now"),
    ("ops/spread.py", "tritile.tune.spread"),
    ("tune/__init__.py", "tritile.lab.tune"),
    ("tuner/startup/sitecustomize.py", "tritile.invariant.overrides"),
}
FORBIDDEN = {("tune", "ops"), ("ops", "tune"), ("nn", "tune")}
ADAPTERS = {
    f"tritile.core.{name}" for name in ("bound", "interpreter_private", "torch_private", "triton_private")
}
# Of ours, but what the adapters give of torch and Triton.
IMPORTS_NOTHING = {"errors.py"} | {
    f"core/{name}.py"
    for name in ("forgetting", "interpreter_private", "torch_private", "triton_private", "source", "threads")
}
FREE = {"__init__", "__main__"}  # the package's own face, which nothing below the command line imports
OPTIONAL = {"typer", "rich", "matplotlib", "pandas", "jinja2"}
OPTIONAL_ROOMS = ("lab", "cli")


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


MODULES = sorted(path for path in PACKAGE.rglob("*.py") if room(path) not in FREE)


def absolute(path: Path, node: ast.ImportFrom) -> str:
    """The module that `from ... import` names, relative dots resolved."""
    if node.level == 0:
        return node.module or ""
    parts = ("tritile", *path.relative_to(PACKAGE).parts[:-1])
    return ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])


@functools.cache
def imported(path: Path, source: str) -> set[str]:
    """Dotted names of all that a file imports, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = absolute(path, node)
            names |= {f"{module}.{alias.name}" if module == "tritile" else module for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("import_module", "__import__", "Kernel")
        ):
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
        place = path.relative_to(PACKAGE).as_posix()
        if there not in RANK:
            allowed = here == "cli"  # `import tritile` or a name of its face: from the top only
        elif (place, name) in ALSO_ALLOWED:
            allowed = True
        elif place in IMPORTS_NOTHING:
            allowed = here == "core" and name in ADAPTERS
        elif (here, there) in FORBIDDEN:
            allowed = False
        else:
            allowed = here == there or RANK[there] < RANK[here]
        if not allowed:
            found.append(f"{path.relative_to(PACKAGE)} imports {name}")
    return found


def test_imports_come_from_lower_rooms():
    assert {room(path) for path in MODULES} <= set(RANK)
    assert [fault for path in MODULES for fault in faults(path, path.read_text())] == []
    for path in MODULES:  # optional packages stay in their rooms
        if not path.relative_to(PACKAGE).as_posix().startswith(OPTIONAL_ROOMS):
            assert not {name.split(".")[0] for name in imported(path, path.read_text())} & OPTIONAL, path


def first_imports(path: Path) -> set[Path]:
    """The files of ours that are loaded before the rest of a file is run."""
    source = "\n".join(
        ast.unparse(node) for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)
    )
    names = {
        name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
        for name in (absolute(path, node), *(f"{absolute(path, node)}.{alias.name}" for alias in node.names))
    }
    places = [PACKAGE.joinpath(*name.split(".")[1:]) for name in names if name.startswith("tritile.")]
    return {file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")} & {
        *MODULES
    }


def test_no_circular_imports():
    """Within a room too. A package's own __init__ may name its modules."""
    after = {path: first_imports(path) - {path.parent / "__init__.py"} for path in MODULES}
    left = set(MODULES)
    while free := {path for path in left if not after[path] & left}:
        left -= free
    assert left == set()


def test_architecture_shows_rooms():
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    rows = [
        re.findall(r"`(\w+)(?:\.py)?`", line.split("|")[1]) for line in page.splitlines() if line[:3] == "| `"
    ]
    rows = rows[rows.index([*ROWS[0]]) :]  # after the table of a room's files
    assert [tuple(row) for row in rows[: len(ROWS)]] == ROWS
    folders = {path.name for path in (PACKAGE / "families").iterdir() if path.is_dir()}
    shown = {name for row in rows[len(ROWS) :] for name in row} | {"common"}
    assert folders - {"__pycache__"} == shown


# What a new process prints as it imports tritile, then calls it: JSON, once.
STARTED = f"""
import json, os, sys, warnings, torch
matmul = torch.backends.cuda.matmul
settings = lambda: (dict(os.environ), torch.get_num_threads(), matmul.fp32_precision)
before = settings()
for argv in ([], ["/bin/tritile", "--help"]):  # the package is whole however its process was started
    if os.fork() == 0:
        sys.argv = argv
        import tritile
        tritile.matmul, tritile.explain, tritile.__version__
        os._exit(0)
whole = [os.wait()[1] for _ in range(2)] == [0, 0]
import tritile
from tritile.families.registry import ALL
from triton.runtime.driver import driver
jitted = lambda: sorted(family.label for family in ALL if 'jitted' in vars(family.kernel))
modules = {{family.kernel.module for family in ALL}} | {{"triton.experimental.gluon.language"}}
found = {{
    "whole": whole,
    "GPU": torch.cuda.is_initialized() or driver._active is not None,
    "optional": sorted({OPTIONAL} & set(sys.modules)), "same": settings() == before,
    "at import": jitted() + sorted(modules & set(sys.modules)),
}}
warnings.simplefilter("ignore")
x = torch.ones(5, 3)
tritile.transpose(x)
found["after a call"] = jitted()
assert torch.equal(tritile.matmul(x, x.mT), torch.full((5, 5), 3.0))
tritile.linear(x, x), tritile.linear(x, x, x[:, 0])
found["slow"] = "sympy" in sys.modules  # a second, which torch.broadcast_shapes takes
found["enumerated"] = [family.label for family in ALL if "configs" in vars(family)]  # thousands
tritile.plan(tritile.matmul, x, x.mT, device="nvidia-h200")
found["rooms"] = sorted({{name.split(".")[1] for name in sys.modules if name.startswith("tritile.")}})
sys.modules["rich"] = None
import tritile.lab.bench  # which needs it only to print
assert tritile.autotune and tritile.Space and tritile.explain
found["when asked"] = "tritile.tuner.autotuner" in sys.modules and callable(tritile.explain)
print(json.dumps(found))
"""


def test_import_touches_nothing(tmp_path):
    """No GPU, optional package, file or setting; of the kernels those that run; nothing that tunes."""
    cache = tmp_path / "cache"
    environ = os.environ | {"TRITILE_CACHE_DIR": str(cache), "TRITON_INTERPRET": "1"}  # so that kernels run
    command = [sys.executable, "-c", STARTED]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent, env=environ)
    assert done.returncode == 0, done.stderr
    started = json.loads(done.stdout)
    assert set(started.pop("rooms")) & {"tune", "lab", "cli"} == set()
    assert started == {
        "whole": True, "GPU": False, "optional": [], "same": True, "at import": [],
        "after a call": ["permute/tile"], "slow": False, "enumerated": [], "when asked": True,
    }  # fmt: skip
    assert not cache.exists()


def test_the_tuner_is_imported_alone():
    code = (
        "import sys, tritile.tuner.autotuner\n"
        "print(*sorted({name.split('.')[1] for name in sys.modules if name.startswith('tritile.')}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.stdout.split() == ["core", "errors", "runtime", "tuner"], done.stderr


def undocumented():
    """Public functions and classes without a docstring, and public methods that such a class defines."""
    for name in tritile.__all__:
        value = getattr(tritile, name)
        members = vars(value).items() if isinstance(value, type) else ()
        methods = [(f"{name}.{each}", member) for each, member in members if each[0] != "_"]
        for where, each in [(name, value), *methods]:
            if (callable(each) or isinstance(each, property)) and not each.__doc__:
                yield where


def test_the_face_of_the_package():
    assert sorted(tritile.__all__) == list(tritile.__all__)
    assert [name for name in tritile.__all__ if not hasattr(tritile, name)] == []
    assert [*undocumented()] == []
    assert set(dir(tritile)) == {*tritile.__all__, "__version__"}
    assert len(dir(tritile)) <= 45
    assert set(tritile.__all__) <= set(re.findall(r"\w+", tritile.__doc__)), "help(tritile) begins with these"
    assert (PACKAGE / "py.typed").exists()


@pytest.mark.parametrize("path", sorted((TESTS / "gpu").glob("test_*.py")), ids=lambda path: path.stem)
def test_gpu_tests_import(path):
    """They are not collected without a GPU, but what they name must still exist."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where triton.jit finds source
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[path.stem]
    assert any(name.startswith("test_") for name in vars(module))
