"""Names of torch and Triton that these do not document: in two adapters, and nowhere else in tritile."""

import ast
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed.tensor
import triton.language as tl
from triton.compiler import CompiledKernel

import tritile
from tritile.core import of_torch, of_triton, versions

PACKAGE = Path(tritile.__file__).parent
ROOT = PACKAGE.parent
ADAPTERS = {Path(adapter.__file__): adapter for adapter in (of_torch, of_triton)}
MODULES = sorted(PACKAGE.rglob("*.py"))
PRIVATE_PARTS = ("triton.runtime", "triton.compiler", "triton.backends")
OF_PYTHON = {"_replace", "_asdict", "_fields", "_at_fork_reinit"}  # of a NamedTuple, and of a lock
# Classes and modules whose private names may be those of ours too.
THEIRS = (
    torch.Tensor,
    torch.nn.Module(),
    torch.autograd.Function,
    torch.autograd.forward_ad,
    torch.library.Library,
    torch.UntypedStorage,
    of_torch.OpOverload,
    torch.distributed.tensor.DTensor,
    of_triton.Autotuner,
    CompiledKernel,
    of_triton.JITFunction,
    of_triton.driver,
)
SAID_BY_ALL = {"_abc_impl", "_is_protocol"}
LIKE_PRIVATE = {"device_caches", "n_regs", "n_spills"}  # what Triton's kernels hold, and none of ours
# A kernel's own source: what Gluon's memory calls `reinterpret` from Triton 3.9 on.
IN_KERNELS = {"_reinterpret"}


def is_private(name: str) -> bool:
    return name.startswith("_") and name != "_" and not name.endswith("__")


def is_undocumented(path: str) -> bool:
    """Whether a dotted path, from torch or triton on, is of what these do not document."""
    first, *rest = path.split(".")
    if first not in ("torch", "triton"):
        return False
    inside = any(f"{path}.".startswith(f"{part}.") for part in PRIVATE_PARTS)
    return inside or any(map(is_private, rest))


def imports_of(tree: ast.AST) -> dict[str, str]:
    """What each name stands for that is imported anywhere in a module, as a dotted path."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                found[alias.asname or name] = name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def dotted(node: ast.expr, known: dict[str, str]) -> str | None:
    """The path of an attribute of what is imported, None where it is of something else."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value, known)
        return owner and f"{owner}.{node.attr}"
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":  # getattr(owner, "name", None)
        owner = dotted(node.args[0], known)
        return (owner and isinstance(node.args[1], ast.Constant) and f"{owner}.{node.args[1].value}") or None
    return None


def defined_in(tree: ast.AST) -> set[str]:
    """Private names that a module gives to what is its own."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return set(filter(is_private, found))


@functools.cache
def ours() -> set[str]:
    return set().union(*(defined_in(ast.parse(path.read_text())) for path in MODULES))


OF_THEIRS = {name for owner in THEIRS for name in dir(owner) if is_private(name)} - SAID_BY_ALL


def is_ours(name: str, own: set[str]) -> bool:
    """Whether a private name of an object is tritile's: of this module, or of one while no class has it."""
    return name in own or name in OF_PYTHON or (name in ours() and name not in OF_THEIRS)


def asked_by_text(node: ast.AST) -> Iterator[tuple[ast.expr | None, str]]:
    """Private names that getattr and the like are given as text, each with its owner."""
    if not isinstance(node, ast.Call):
        return
    function = ast.unparse(node.func).rpartition(".")[2]
    texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    if function in ("getattr", "setattr", "hasattr", "delattr"):
        yield from ((node.args[0], text) for text in texts if is_private(text) or text in LIKE_PRIVATE)
    elif function in ("attrgetter", "methodcaller", "partial", "_replaced"):
        yield from ((None, text) for text in texts if is_private(text))


def faults(source: str, in_kernel: bool = False) -> list[str]:
    """Each use of an undocumented name of torch or Triton in the source of a module."""
    tree = ast.parse(source)
    known, own, found = imports_of(tree), defined_in(tree), []

    def said(node: ast.AST, name: str) -> None:
        found.append(f"line {node.lineno}: {name}")

    def attribute(node: ast.AST, owner: ast.expr | None, name: str) -> None:
        path = (owner and dotted(owner, known)) or ""
        root = path.partition(".")[0]
        if (in_kernel and name in IN_KERNELS) or root in sys.stdlib_module_names:
            return
        if root in ("torch", "triton"):
            theirs = is_undocumented(f"{path}.{name}")
        else:
            theirs = name in LIKE_PRIVATE or (is_private(name) and not is_ours(name, own))
        if theirs:
            said(node, name)

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            paths = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
        else:
            paths = []
        for path in filter(is_undocumented, paths):
            said(node, path)
        if isinstance(node, ast.Attribute):
            attribute(node, node.value, node.attr)
        for owner, name in asked_by_text(node):
            attribute(node, owner, name)
        if isinstance(node, ast.ClassDef) and node.bases:  # a method that stands for one of theirs
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and inner.name in OF_THEIRS:
                    said(inner, inner.name)
    return found


def test_only_the_adapters_name_what_is_private():
    for path in set(MODULES) - set(ADAPTERS):
        assert not faults(path.read_text(), in_kernel="families" in path.relative_to(PACKAGE).parts), path


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nx = torch._C._cuda_getDevice()",
        "import torch\nx = torch._neg_view",
        "import torch as t\nx = t._C",
        "import torch._inductor.config",
        "import torch._inductor.config as config",
        "from torch import _C",
        "from torch._guards import TracingContext",
        "from torch.autograd.function import _SingleLevelFunction",
        "def late():\n    from torch._inductor import select_algorithm",
        "import importlib\nimportlib.import_module('torch._dynamo')",
        "from torch.autograd import forward_ad\nx = forward_ad._current_level",
        "import torch\nx = getattr(torch._C, 'name', None)",
        "import torch\nx = getattr(torch, '_neg_view')",
        "from operator import attrgetter\nschema_of = attrgetter('_schema')",
        "def f(op):\n    return op._schema",
        "def f(library):\n    library._destroy()",
        "def f(function):\n    function._torchdynamo_disable = True",
        "import torch\nclass Layer(torch.nn.Module):\n    def _apply(self, fn, recurse=True): ...",
        "def f(layer):\n    return layer._parameters",
        "import triton\nx = triton.runtime.Autotuner",
        "import triton.runtime.jit",
        "from triton import compiler",
        "from triton.backends import backends",
        "from triton.backends.nvidia import driver",
        "from triton.runtime.driver import driver",
        "from triton._C import libtriton",
        "def f(kernel):\n    kernel._init_handles()",
        "def f(driver):\n    driver._active = None",
        "def f(tuner):\n    tuner._bench()",
        "def f(kernel):\n    return kernel.n_regs",
        "def f(function):\n    function.device_caches.clear()",
        "def f(kernel):\n    setattr(kernel, '_init_handles', None)",
    ],
)
def test_the_rule_catches(source):
    assert faults(source) != []


@pytest.mark.parametrize(
    "source",
    [
        "import triton\nx = triton.knobs.runtime.interpret, triton.Config, triton.cdiv, triton.__version__",
        "from triton.experimental import gluon\nfrom triton.tools.tensor_descriptor import TensorDescriptor",
        "import torch\nx = torch.library.Library, torch.autograd.Function, torch.compiler.reset",
        "import os, sys\nos._exit(0)\nsys._getframe(1)",
        "class Own:\n    _mine = 1\n    def of(self, other):\n        return other._mine",
        "def f(pair):\n    return pair._replace(a=1)",
        "from tritile.core.of_torch import neg_view\nfrom tritile.core.of_triton import driver",
    ],
)
def test_the_rule_lets_pass(source):
    assert faults(source) == []


def test_the_exception_is_for_kernels_alone():
    source = "def f(memory):\n    return memory._reinterpret"
    assert faults(source, in_kernel=True) == []
    assert faults(source) != []


class Given(NamedTuple):
    """A name that an adapter gives, and its docstring, or the comment beside or above it."""

    name: str
    told: str | None


def given(adapter: Path) -> list[Given]:
    """What an adapter offers, but for CHECKED_ON."""
    text, found = adapter.read_text(), []
    lines = text.splitlines()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.append(Given(node.name, ast.get_docstring(node)))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            above = lines[node.lineno - 2] if lines[node.lineno - 2].startswith("#") else ""
            found.append(Given(ast.unparse(target), lines[node.lineno - 1].partition("  # ")[2] or above))
    return [each for each in found if each.name != "CHECKED_ON" and not is_private(each.name)]


def used(adapter: str) -> set[str]:
    """The names of an adapter that other modules of tritile use."""
    found = set()
    for path in MODULES:
        tree = ast.parse(path.read_text())
        known = imports_of(tree)
        paths = {*known.values(), *(dotted(n, known) for n in ast.walk(tree) if isinstance(n, ast.Attribute))}
        found |= {name.removeprefix(f"{adapter}.") for name in paths - {None} if name.startswith(adapter)}
    return found


@pytest.mark.parametrize("path", ADAPTERS, ids=lambda path: path.stem)
def test_all_that_an_adapter_gives_is_told_of_and_used(path):
    names = given(path)
    assert [each.name for each in names if not each.told or "\n" in each.told] == []
    assert {each.name for each in names} - used(f"tritile.core.{path.stem}") == set()


MAY_LACK = ("current_gpu", "current_raw_stream", "empty_strided_on_gpu")  # builds without CUDA


def test_names_that_an_adapter_may_do_without_are_there():
    """Importing the adapters asks for all others, but for those inside functions."""
    wanted = ["fp32_precision", *(MAY_LACK if torch.backends.cuda.is_built() else ())]
    assert [name for name in wanted if getattr(of_torch, name) is None] == []


def test_functions_of_the_adapters_find_what_they_set():
    """What they would set in vain, or suppress, if torch had renamed it."""
    assert hasattr(torch.nn.Module, "_apply")
    source = (Path(torch.__file__).parent / "_dynamo" / "decorators.py").read_text()
    assert re.search(r"\b_dynamo_marked_constant\b", source)
    assert all(hasattr(tl.standard, name) for name in of_triton.REDUCTIONS)
    assert "_repr" in inspect.getsource(of_triton.JITFunction)


def test_triton_keeps_in_its_kernels_what_the_adapter_reads():
    compiled = inspect.getsource(CompiledKernel)
    assert all(re.search(rf"\bself\.{name}\b", compiled) for name in ("function", "n_regs", "n_spills"))
    assert hasattr(CompiledKernel, "_init_handles")
    assert "device_caches" in inspect.getsource(of_triton.JITFunction)


def test_the_interpreter_and_the_driver_take_what_the_adapter_gives():
    before, stand_in = vars(of_triton.driver)["_active"], object()
    with of_triton.driven_by(stand_in):
        assert of_triton.driver.active is stand_in
    assert vars(of_triton.driver)["_active"] is before
    assert callable(getattr(*of_triton.LANGUAGE_PATCHER))


def test_the_level_of_forward_derivatives_is_that_of_the_moment():
    assert of_torch.forward_level() == -1
    with torch.autograd.forward_ad.dual_level():
        assert of_torch.forward_level() == 0
    assert of_torch.forward_level() == -1


def test_versions_checked_are_those_of_the_stacks():
    (line,) = re.findall(r"^STACKS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert tuple(line.split()) == of_triton.CHECKED_ON
    assert versions.parsed(of_torch.CHECKED_ON[-1]) <= versions.NEWEST["torch"]


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_the_installed_version_was_checked(name):
    checked = (of_torch if name == "torch" else of_triton).CHECKED_ON
    version = importlib.import_module(name).__version__
    if versions.parsed(version) not in map(versions.parsed, checked):
        pytest.skip(f"{name} {version} is none of {', '.join(checked)}, where these names were checked")
