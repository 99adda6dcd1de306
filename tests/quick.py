"""Print the files of tests that import what changed, or a room: python tests/quick.py [ROOM or MODULE ...]

`make test-quick` runs them. Without names it is the modules and tests that differ from the last commit. A
room or module is named as it is imported, without "tritile": tuner, ops.memo. Of a room, it is the tests that
import no other room more, apart from what all of them share.
"""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHARED = "tritile.core", "tritile.errors"


def changed() -> list[str]:
    """The files that differ from the last commit, new ones among them."""
    commands = ["git", "diff", "--name-only", "HEAD"], ["git", "ls-files", "--others", "--exclude-standard"]
    found = (subprocess.run(each, cwd=ROOT, capture_output=True, text=True, check=True) for each in commands)
    return [path for each in found for path in each.stdout.split() if path.endswith(".py")]


def imported(path: Path) -> list[str]:
    """What a file imports from modules, by its full name."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def is_of(module: str, names: list[str]) -> bool:
    """Whether a file that imports these names imports a module, or a room more than any other."""
    if not any(f"{name}.".startswith(f"{module}.") for name in names):
        return False
    rooms = Counter(".".join(name.split(".")[:2]) for name in names if name.startswith("tritile."))
    others = [count for room, count in rooms.items() if room not in (module, *SHARED)]
    return module not in rooms or rooms[module] >= max(others, default=0)


def chosen(rooms: list[str]) -> list[Path]:
    """The test files of any of these rooms or modules, by default of what changed."""
    files = changed() if not rooms else []
    modules = {f"tritile.{room}" for room in rooms}
    modules |= {path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in files}
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    return [
        test
        for test in tests
        if test.relative_to(ROOT).as_posix() in files
        or any(is_of(module, imported(test)) for module in modules)
    ]


if __name__ == "__main__":
    print(*(path.relative_to(ROOT) for path in chosen(sys.argv[1:])))
