"""The digest of a kernel changes with whatever changes what is compiled, and with nothing else."""

import importlib
import os
import sys
from pathlib import Path

import pytest
import triton

import tritile
from tritile.choose import gpu_tables, predictor
from tritile.core.source import source_hash

HELPER = """
import triton
import triton.language as tl

@triton.jit
def helper(x):
    return x * 2
"""
OPERATIONS = {"add": "+", "multiply": "*", "stored": "/", "listed": "%", "standard": "&", "paired": "|"}
OPERATION = """
@triton.jit
def {}(x, y):
    return x {} y
"""
MODULE = f"""
import functools
import math
import typing
import triton
import triton.language as tl
import {{package}}.inner

class Outer:
    WIDTH = 32
    class Inner:
        @staticmethod
        @triton.jit
        def helper(x):
            return x * 4
{"".join(OPERATION.format(name, sign) for name, sign in OPERATIONS.items())}"""
MODULE += """
@triton.jit(noinline=False)
def called(x):
    return x + 1

@triton.constexpr_function
def chosen(n):
    return n + 8

def within(inner, by):
    @triton.jit
    def closed(x):
        return inner(x, by)
    return closed

DTYPE = tl.float16
SIZES = (tl.constexpr(16), (tl.constexpr(64), "left"))
OPERATION = tl.constexpr(stored)
OPERATIONS = tl.constexpr((add, listed))
FIRST, SECOND = within(add, tl.constexpr(7)), within(multiply, tl.constexpr(9))
Facts = typing.NamedTuple("Facts", [("warp", int)])
FACTS = Facts(33)
LIMIT = 128
LOWEST = 6
EMPTY = None

def rounded(n, by):
    return -(-n // by) * by

def limited(by):
    return lambda a: rounded(a["n"], 96) < by + LIMIT

SCALE = 3  # a local of this name below is not this one

@triton.heuristics({{"EVEN": lambda a: a["n"] % 4 == 0, "ODD": lambda a: a["n"] % 3 == 0}})
@triton.heuristics({{"SHORT": limited(40), "PART": functools.partial(rounded, by=24)}})
@triton.jit
def kernel(
    x, n, EVEN: tl.constexpr, ODD: tl.constexpr, SHORT: tl.constexpr, PART: tl.constexpr, kind: DTYPE = 2,
    OP: tl.constexpr = standard, BOTH: tl.constexpr = (paired, 5), LEAST: tl.constexpr = LOWEST,
):
    SCALE = tl.load(x)
    y = called(SCALE + n).to(DTYPE) + {package}.inner.helper(SCALE)
    y += Outer.Inner.helper(SCALE) + tl.arange(0, Outer.WIDTH) + SIZES[0] + chosen(n) + FACTS.warp
    y = OPERATION(y, SCALE) + OPERATIONS[1](y, y) + FIRST(y) + SECOND(y)
    tl.store(x, OP(y, math.pi) + BOTH[0](y, y))
"""

LAST_ABOVE = "SCALE = 3  # a local of this name below is not this one"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write a package of kernels, each time anew, and return its kernel."""
    monkeypatch.syspath_prepend(tmp_path)

    def made(old="", new="", name="digested", module=MODULE, helper=HELPER, before=""):
        assert old in module + helper
        module = module.format(package=name).replace(old, new) if old else module.format(package=name)
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        for file, text in (("__init__", ""), ("inner", helper.replace(old, new) if old else helper)):
            (folder / f"{file}.py").write_text(before + text)
        (folder / "kernels.py").write_text(before + module)
        for imported in [each for each in sys.modules if each.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, imported)
        importlib.invalidate_caches()
        sys.dont_write_bytecode, kept = True, sys.dont_write_bytecode
        try:
            return importlib.import_module(f"{name}.kernels").kernel
        finally:
            sys.dont_write_bytecode = kept

    return made


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return x * 2", "return x * 3"),
        ("return x * 4", "return x * 3"),
        ("WIDTH = 32", "WIDTH = 64"),
        ("noinline=False", "noinline=True"),
        ("noinline=False", "debug=True"),
        ("DTYPE = tl.float16", "DTYPE = tl.bfloat16"),
        ("tl.constexpr(16)", "tl.constexpr(32)"),
        ('"left"', '"right"'),
        ("OPERATION = tl.constexpr(stored)", "OPERATION = tl.constexpr(add)"),
        ("tl.constexpr((add, listed))", "tl.constexpr((listed, add))"),
        ("return x / y", "return y / x"),
        ("return x % y", "return y % x"),
        ("return x & y", "return y & ~x"),
        ("return x | y", "return y | ~x"),
        ("(paired, 5)", "(paired, 6)"),
        ("n + 8", "n + 9"),
        ("within(add, tl.constexpr(7))", "within(add, tl.constexpr(8))"),
        ("FIRST, SECOND =", "SECOND, FIRST ="),
        ("Facts(33)", "Facts(34)"),
        ('a["n"] % 4 == 0', 'a["n"] % 8 == 0'),
        ('a["n"] % 3 == 0', 'a["n"] % 3 != 0'),
        ('"EVEN": lambda a: a["n"] % 4 == 0, "ODD"', '"ODD": lambda a: a["n"] % 4 == 0, "EVEN"'),
        ("limited(40)", "limited(41)"),
        ("by=24", "by=25"),
        ("-(-n // by)", "(n // by)"),
        ("LIMIT = 128", "LIMIT = 256"),
        ("LOWEST = 6", "LOWEST = 7"),
    ],
)
def test_an_edit_changes_the_digest(package, old, new):
    plain = source_hash(package())
    assert source_hash(package(old, new)) != plain
    assert source_hash(package()) == plain


@pytest.mark.parametrize(
    "changes",
    [
        {"before": "# Copyright\n\nUNREAD = 1\n\n\n"},
        {"name": "elsewhere"},
        {"old": "SCALE = 3", "new": "SCALE = 4"},
        {"old": "EMPTY = None", "new": "EMPTY = object()"},
        {"old": LAST_ABOVE, "new": "import tritile\n\n@tritile.autotune([], [])"},
        {"old": "@triton.heuristics", "new": "\n\n@triton.heuristics"},
    ],
    ids=["lines above", "another module", "shadowed", "not read", "tuned", "lines between"],
)
def test_harmless_edits_keep_digest(package, changes):
    module = MODULE.replace("{package}.inner.helper", "helper")  # else the source names its package
    module = module.replace("import {package}.inner", "from {package}.inner import helper")
    assert source_hash(package(module=module, **changes)) == source_hash(package(module=module))


def test_recursive_functions(package):
    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n != 0 and even(n - 1)

    kernels = [triton.heuristics({"EVEN": heuristic})(package()) for heuristic in (even, even, odd)]
    first, again, other = map(source_hash, kernels)
    assert first == again != other


@pytest.mark.parametrize(
    ("variable", "value", "counts"),
    [
        ("TRITON_F32_DEFAULT", "ieee", True),
        ("TRITON_DEFAULT_FP_FUSION", "0", True),
        ("TRITON_DEFAULT_FP_FUSION", "1", False),
        ("DISABLE_LLVM_OPT", "1", True),
        ("DISABLE_LLVM_OPT", "0", False),
        ("PTXAS_OPTIONS", "-O1", True),
        ("MLIR_ENABLE_DUMP", "1", False),
        ("TRITON_DISABLE_LINE_INFO", "1", False),
        ("TRITON_CACHE_DIR", "elsewhere", False),
    ],
)
def test_compiled_variables_count(package, monkeypatch, variable, value, counts):
    kernel = package()
    plain = source_hash(kernel)
    monkeypatch.setenv(variable, value)
    assert (source_hash(kernel) != plain) == counts


@pytest.mark.parametrize(
    ("group", "knob", "value"),
    [("runtime", "debug", True), ("compilation", "instrumentation_mode", "consan")],
)
def test_knobs_count_as_variables_do(package, group, knob, value):
    kernel, knobs = package(), getattr(triton.knobs, group)
    plain = source_hash(kernel)
    with knobs.scope():
        setattr(knobs, knob, value)
        assert source_hash(kernel) != plain
    assert source_hash(kernel) == plain


def interpret(folder, answers):
    """Say the digest of the kernel, which Triton's interpreter takes in this process."""
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, folder)
    answers.put(source_hash(importlib.import_module("digested.kernels").kernel))


def test_digests_across_processes(package, tmp_path, server):
    module = MODULE.replace('lambda a: a["n"] % 4 == 0', 'lambda a: a["n"] in {{"a", "b", "c", "d", "e", 4}}')
    plain, digest = source_hash(package()), source_hash(package(module=module))
    answers = server.SimpleQueue()
    process = server.Process(target=interpret, args=(str(tmp_path), answers))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert answers.get() == digest != plain


@pytest.mark.parametrize("what", gpu_tables.WHAT)
def test_shipped_predictors_are_current(what):
    found = predictor.read(Path(tritile.__file__).parent / "tables" / f"{what}.predictor.json")
    assert all(map(found.is_current_class, found.classes))
