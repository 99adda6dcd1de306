"""Print the files of tests that import what changed, or a room: python tests/quick.py [ROOM or MODULE ...]

`make test-quick` runs them. Without names it is the modules and tests that differ from the last commit. A
room or module is named as it is imported, without "tritile": tuner, ops.memo.
"""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def changed() -> list[str]:
    """The files that differ from the last commit, new ones among them."""
    commands = ["git", "diff", "--name-only", "HEAD"], ["git", "ls-files", "--others", "--exclude-standard"]
    found = (subprocess.run(each, cwd=ROOT, capture_output=True, text=True, check=True) for each in commands)
    return [path for each in found for path in each.stdout.split() if path.endswith(".py")]


def imported(path: Path) -> set[str]:
    """The modules that a file imports, and what it imports from them."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def chosen(names: list[str]) -> list[Path]:
    """The test files that import any of these modules, or a module within them."""
    files = changed() if not names else []
    modules = {f"tritile.{name}" for name in names}
    modules |= {path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in files}
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    return [
        test
        for test in tests
        if test.relative_to(ROOT).as_posix() in files
        or any(f"{name}.".startswith(f"{module}.") for name in imported(test) for module in modules)
    ]


if __name__ == "__main__":
    print(*(path.relative_to(ROOT) for path in chosen(sys.argv[1:])))
