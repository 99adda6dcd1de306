"""Names of torch and Triton that these do not document: in three adapters, and nowhere else in tritile."""

import ast
import functools
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.tensor
from triton.compiler import CompiledKernel

import tritile
from tests import without_names
from tests.ahead import later
from tritile.core import bound, interpreter_private, torch_private, triton_private

PACKAGE = Path(tritile.__file__).parent
ROOT = PACKAGE.parent
ADAPTERS = {Path(adapter.__file__) for adapter in (interpreter_private, torch_private, triton_private)}
ADAPTERS.add(PACKAGE / "tuner" / "startup" / "sitecustomize.py")  # imports nothing
MODULES = sorted(PACKAGE.rglob("*.py"))
PARTS_OF_TRITON = {"runtime", "compiler", "backends"}
UNDOCUMENTED = re.compile(
    rf"triton\.({'|'.join(PARTS_OF_TRITON)})(\.|$)|(torch|triton)(\.\w+)*\._(?!_?$)(?!\w*__(\.|$))"
)
OF_PYTHON = {"_replace", "_asdict", "_fields", "_at_fork_reinit"}  # of a NamedTuple, and of a lock
# Classes and modules whose private names may be those of ours too.
THEIRS = (
    torch.Tensor,
    torch.nn.Module(),
    torch.autograd.Function,
    torch.autograd.forward_ad,
    torch.library.Library,
    torch.UntypedStorage,
    torch_private.OpOverload,
    torch.distributed.tensor.DTensor,
    triton_private.Autotuner,
    CompiledKernel,
    triton_private.JITFunction,
    triton_private.driver,
)
LIKE_PRIVATE = {"device_caches", "n_regs", "n_spills"}  # what Triton's kernels hold, and none of ours
# What nothing can do without, and what cannot be deleted: from a class in C, from a namespace of operators.
NEEDED = {"matmul": set(), "decorated": {"triton.runtime.autotuner.Autotuner", "triton.backends.backends"}}
STAYING = {"torch.Tensor._is_view", "torch.Tensor._is_zerotensor", "torch.ops.aten._unsafe_view.default"}
IN_KERNELS = {"_reinterpret"}  # what Gluon's memory calls `reinterpret` from Triton 3.9 on


def is_private(name: str) -> bool:
    return name.startswith("_") and name != "_" and not name.endswith("__")


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


OF_THEIRS = {name for owner in THEIRS for name in dir(owner) if is_private(name)}


@functools.cache
def ours() -> set[str]:
    return set().union(*(defined_in(ast.parse(path.read_text())) for path in MODULES)) - OF_THEIRS


def faults(source: str, in_kernel: bool = False) -> list[str]:
    """Each use of an undocumented name of torch or Triton in the source of a module."""
    tree, found = ast.parse(source), []
    allowed = defined_in(tree) | ours() | OF_PYTHON | (IN_KERNELS if in_kernel else set())
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found += filter(UNDOCUMENTED.match, (alias.name for alias in names))
            case ast.ImportFrom(module=module, names=names, level=0):
                found += filter(UNDOCUMENTED.match, (f"{module}.{alias.name}" for alias in names))
            case (
                ast.Attribute(value=owner, attr=name)
                | ast.Call(
                    func=ast.Name(id="getattr" | "setattr" | "hasattr"),
                    args=[owner, ast.Constant(value=str(name)), *_],
                )
            ) if is_private(name) or name in LIKE_PRIVATE | PARTS_OF_TRITON:
                path = f"{ast.unparse(owner)}.{name}"
                if path.startswith(("torch.", "triton.")):
                    found += [path] if UNDOCUMENTED.match(path) else []
                elif path.partition(".")[0] not in sys.stdlib_module_names:
                    found += [name] if name not in allowed | PARTS_OF_TRITON else []
    return found


def test_only_adapters_name_private():
    for path in set(MODULES) - ADAPTERS:
        in_kernel = "families" in path.relative_to(PACKAGE).parts
        assert not faults(path.read_text(), in_kernel), path


def test_what_adapters_bind_is_there():
    """In this torch and Triton; what only builds for CUDA have, in those."""
    of_cuda = ("_cuda_", "_empty_strided_cuda")
    for path in without_names.names():
        if torch.backends.cuda.is_built() or not any(part in path for part in of_cuda):
            bound.found(path)


@pytest.mark.parametrize("every", [14, later(1)])
def test_works_without_any_one_name(every, tmp_path):
    """Import, `matmul` and a kernel under the decorator; whatever needs the name says so."""
    script, folder = without_names.__file__, {"TRITILE_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, script, str(every)],
        env=os.environ | folder | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    found = dict(line.split("\t", 1) for line in ran.stdout.splitlines())
    assert set(found) == set(without_names.names()[::every]), ran.stderr
    for path, (imported, *made) in ((path, text.split("\t")) for path, text in found.items()):
        if imported == "stays":
            assert path in STAYING
            continue
        assert imported == "True", path
        for what, result in zip(("matmul", "decorated"), made, strict=True):
            library = path.partition(".")[0]
            says = rf"UnsupportedError: this needs {re.escape(path)}, which {library} \S+ does not have"
            assert result == "True" or (path in NEEDED[what] and re.match(says, result)), (path, what, result)


def test_adapter_names_exist():
    """What they would set in vain, or suppress, if it had been renamed."""
    decorators = (Path(torch.__file__).parent / "_dynamo" / "decorators.py").read_text()
    compiled, jitted = inspect.getsource(CompiledKernel), inspect.getsource(triton_private.JITFunction)
    for source, names in (
        (inspect.getsource(torch.nn.Module), ["_apply"]),
        (decorators, ["_dynamo_marked_constant"]),
        (jitted, ["_repr", "device_caches"]),
        (compiled, ["_init_handles", *(f"self.{name}" for name in ("function", "n_regs", "n_spills"))]),
    ):
        for name in names:
            assert re.search(rf"\b{re.escape(name)}\b", source), name
