"""Tell which kernels were tested on a GPU as they are, by records that lie beside the tests.

A test counts for the kernel's own digest and for the code of the modules that decide its arguments: those
that describe the problem, view it as matrices, turn it into work, and launch it. Comments, docstrings, the
words of errors and how values print do not count. Modules that only check arguments are left out, as tests
without a GPU cover them.
"""

import ast
import functools
import hashlib
import io
import json
import re
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tritile.families import registry as families
from tritile.families.work import LOWERINGS

RECORDS: Final = Path(__file__).parent
PACKAGE: Final = RECORDS.parents[1] / "tritile"
STACKS: Final = ("3.6.0", "3.7.1")  # versions of Triton on which every kernel is to be tested
_LAUNCHING: Final = ("runtime/launch.py", "runtime/native.py", "runtime/counters.py", "families/work.py")
# Modules that import every family; their imports are not followed.
_NOT_FOLLOWED: Final = ("runtime/launch.py", "runtime/counters.py", "families/work.py")
_JITTED: Final = re.compile(r"^@(triton|gluon)\.jit", re.MULTILINE)
_DOCUMENTED: Final = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _file(module: str) -> str:
    return "/".join(module.split(".")[1:]) + ".py"


def _text(path: str) -> str:
    return (PACKAGE / path).read_text(encoding="utf-8")


@functools.cache
def code_of(source: str) -> str:
    """Return Python source without what does not count and blank lines, or as it is if it does not parse."""
    lines = source.splitlines()
    dropped: set[int] = set()
    try:
        tree = ast.parse(source)
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            row, column = token.start
            if token.type == tokenize.COMMENT:
                lines[row - 1] = lines[row - 1][:column].rstrip()
            elif token.type == tokenize.NL and not lines[row - 1].strip():
                dropped.add(row)
    except (SyntaxError, ValueError, tokenize.TokenError):
        return source
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            before = lines[node.lineno - 1][: node.col_offset]
            lines[node.lineno - 1] = f"{before}raise {ast.unparse(node.exc.func)}"
            dropped.update(range(node.lineno + 1, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.FunctionDef) and node.name == "__repr__":
            dropped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            last = text.end_lineno or text.lineno
            if not (
                lines[text.lineno - 1][: text.col_offset] + lines[last - 1][text.end_col_offset :]
            ).strip():
                dropped.update(range(text.lineno, last + 1))
    return "\n".join(line for row, line in enumerate(lines, start=1) if row not in dropped)


@functools.cache
def _imported(package: Path, source: str) -> frozenset[str]:
    """Return the files of this package that source imports, without errors.py.

    A `Kernel` names the module that it imports later.
    """
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "Kernel":
            found += [str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant)]
    names = {"/".join(name.split(".")[1:]) for name in found if name.startswith("tritile.")}
    paths = {path for name in names for path in (f"{name}.py", f"{name}/__init__.py")}
    return frozenset(path for path in paths - {"errors.py"} if (package / path).is_file())


@functools.cache
def _kernels() -> frozenset[str]:
    """Return the files of families' kernels; kernels of lowered products count as host code does."""
    found = (path.relative_to(PACKAGE).as_posix() for path in PACKAGE.glob("families/*/*.py"))
    return frozenset(
        path
        for path in found
        if _JITTED.search(_text(path)) and (PACKAGE / path).with_name("family.py").is_file()
    )


def modules_of(kernel: str) -> list[str]:
    """Return the files, relative to the package, that decide the arguments of a kernel ("matmul/tile").

    Kernels of other families are left out: those that run beside this one are in its digest.
    """
    family = next(one for one in families.ALL if one.label == kernel)
    own = _file(family.space.__module__)
    left_out = {path for path in _kernels() if Path(path).parent != Path(own).parent}
    found: set[str] = set()
    pending = {own, *_LAUNCHING}
    if kernel.startswith("matmul/"):
        pending |= {_file(lowering.__name__) for lowering in LOWERINGS}
    while pending:
        path = pending.pop()
        found.add(path)
        if path not in _NOT_FOLLOWED:
            pending |= _imported(PACKAGE, _text(path)) - found - left_out
    return sorted(found)


def hashed(parts: Iterable[tuple[str, str]]) -> str:
    """Digest named texts, in any order, to sixteen hexadecimal digits."""
    return hashlib.sha256(repr(sorted(parts)).encode()).hexdigest()[:16]


@functools.cache
def digests() -> dict[str, str]:
    """Return the digest that a test of each kernel counts for, by op and family."""
    found = {}
    for kernel, measured in families.digests().items():
        found[kernel] = hashed(
            [("kernel", measured), *((path, code_of(_text(path))) for path in modules_of(kernel))]
        )
    return found


@dataclass(frozen=True)
class Pending:
    """Name a kernel not tested as it is with one version of Triton; `reason` is None where none is given."""

    kernel: str
    triton: str
    digest: str
    reason: str | None


def read(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Return what a record holds, no lines where there is none. Raises OSError or ValueError."""
    if not path.is_file():
        return {"kernels": [], "files": []}
    found: dict[str, list[dict[str, Any]]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _key(line: dict[str, Any]) -> tuple[str, str, str]:
    return line["kernel"], line["triton"], line["digest"]


def pending(records: Path = RECORDS) -> list[Pending]:
    """Return what is still to be tested, by last.json and pending.json of a folder.

    Each version of `STACKS` is wanted once, on any GPU. Raises OSError, ValueError, KeyError or TypeError
    for a broken record.
    """
    passed = set(map(_key, read(records / "last.json")["kernels"]))
    reasons = {_key(line): line["reason"] for line in read(records / "pending.json")["kernels"]}
    wanted = [(kernel, stack, digest) for stack in STACKS for kernel, digest in digests().items()]
    return [Pending(*what, reasons.get(what)) for what in wanted if what not in passed]
