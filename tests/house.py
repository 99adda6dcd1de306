"""Print how large the package is, and what in it is longer or harder to read than wanted.

    python tests/house.py          # the table
    python tests/house.py --all    # and every function and docstring that it counts

Lines of a function are those of its code: its docstring is left out. A docstring dangles if its first word is
no verb, as far as a list of such words tells.
"""

import ast
import functools
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tritile"
KERNEL_LINES, HOST_LINES = 80, 50
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef
# First words of docstrings that begin with a noun or a clause. A verb in the imperative is none of them.
DANGLING = {
    *("A", "All", "An", "Any", "As", "At", "Both", "Each", "Every", "Everything", "For", "From", "How", "If"),
    *("In", "It", "Its", "No", "Not", "Of", "On", "One", "Other", "Others", "Some", "Such", "That", "The"),
    *("Their", "These", "This", "Those", "Two", "What", "When", "Where", "Whether", "Which", "Who", "With"),
}


class Found(NamedTuple):
    """A place in the package, and what is said of it."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} {self.text}"


@functools.cache
def nodes() -> dict[Path, list[Function | ast.ClassDef]]:
    """Return the functions and classes of each of the package's files."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found[path] = [node for node in ast.walk(tree) if isinstance(node, (*FUNCTIONS, ast.ClassDef))]
    return found


def jitted(node: Function | ast.ClassDef) -> bool:
    """Tell whether a function is a kernel or called by one."""
    return any("jit" in ast.unparse(each) for each in node.decorator_list)


def code_lines(function: Function) -> int:
    """Return the lines of a function without those of its docstring."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function) is None:
        return lines
    text = function.body[0]
    return lines - ((text.end_lineno or text.lineno) - text.lineno + 1)


def long_functions() -> tuple[list[Found], list[Found]]:
    """Return the kernels, and the functions of the host, that are longer than wanted."""
    kernels, host = [], []
    for path, found in nodes().items():
        for node in found:
            if isinstance(node, FUNCTIONS):
                lines = code_lines(node)
                place = Found(path, node.lineno, f"{node.name}: {lines} lines")
                if jitted(node):
                    kernels += [place] * (lines > KERNEL_LINES)
                else:
                    host += [place] * (lines > HOST_LINES)
    return kernels, host


def dangling() -> list[Found]:
    """Return the docstrings of functions and classes that begin with no verb."""
    places = []
    for path, found in nodes().items():
        for node in found:
            text = ast.get_docstring(node) or ""
            words = text.split(maxsplit=1)
            if words and words[0].strip(",.:'") in DANGLING:
                places.append(Found(path, node.lineno, text.splitlines()[0]))
    return places


def lines_of(*paths: Path) -> int:
    """Return the lines of files."""
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


def table() -> list[tuple[str, int]]:
    """Return what is counted, and how much there is of it."""
    python = [*nodes()]
    kernels = {path for path, found in nodes().items() if any(map(jitted, found))}
    outside_lab = [path for path in python if path.relative_to(PACKAGE).parts[0] != "lab"]
    entries = {path.relative_to(PACKAGE).parts[0] for path in python} - {"__main__.py", "__init__.py"}
    long_kernels, long_host = long_functions()
    return [
        ("entries in tritile/, but for __init__ and __main__", len(entries)),
        ("lines in tritile/, Python", lines_of(*python)),
        ("lines in tritile/ without lab and files of kernels", lines_of(*{*outside_lab} - kernels)),
        ("lines of tests, Python", lines_of(*(ROOT / "tests").rglob("*.py"))),
        ("lines of scripts in tuning/", lines_of(*(ROOT / "tuning").glob("*.py"))),
        (f"kernels over {KERNEL_LINES} lines", len(long_kernels)),
        (f"host functions over {HOST_LINES} lines", len(long_host)),
        ("docstrings that begin with no verb", len(dangling())),
        ("lines of README.md", lines_of(ROOT / "README.md")),
    ]


def main() -> None:
    """Print the table, and with --all what it counts."""
    for name, count in table():
        print(f"{count:7,}  {name}")
    if "--all" in sys.argv[1:]:
        kernels, host = long_functions()
        print(*kernels, *host, *dangling(), sep="\n")


if __name__ == "__main__":
    main()
