"""Kernels of drawn source, sent to a process of their own: compiled there as Triton compiles them here."""

import hashlib
import importlib
import json
import pickle
import random
import subprocess
import sys

import pytest
import torch
import triton

from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.core.problem import KernelProblem
from tritile.tuner.decorated import KernelCall
from tritile.tuner.measure.shipping import described, stood_in

H200 = target_device("nvidia-h200")
CONFIG = Config.of(BLOCK=64)
DRAWN, SEED = 12, 59

# A package whose submodule the kernels' module imports, and of which one value is set only later.
VALUES = """
import enum
import triton
import triton.language as tl
FIVE, LATE, NUMBER = tl.constexpr(5), tl.constexpr(0), 3
class Sizes:
    SIX = tl.constexpr(6)
class Mode(enum.Enum):
    NINE = 9
@triton.jit
def plus(x, by: tl.constexpr = NUMBER):
    return x + by
"""
HEAD = """
import threading
from types import SimpleNamespace
from typing import NamedTuple
import triton
import triton.language as tl
import drawn_values.inner
import drawn_values.inner as values
from drawn_values.inner import Mode, Sizes, plus as more

class Pair(NamedTuple):
    first: tl.constexpr
    second: tl.constexpr

SEVEN, TWO, SHAPE = tl.constexpr(7), 2, tl.constexpr((4, 8))
PAIR, SPACE, Known = Pair(tl.constexpr(3), tl.constexpr(4)), SimpleNamespace(EIGHT=8), tl.constexpr
TABLE = {"a": 11}
value = at = threading.Lock()  # which nobody can send, and locals of the same name hide

@triton.constexpr_function
def half(number):
    return number // TWO

@triton.jit
def inner(x, by: tl.constexpr = TWO):
    return x * by

@triton.jit
def outer(x, by: tl.constexpr = SEVEN, and_by: "tl.constexpr" = SPACE.EIGHT):
    return inner(x) * by + values.plus(x)

"""
# Parameters, and a line of the body, of which each kernel takes a few.
FORMS = [
    ("A0: tl.constexpr = TWO", "value += A0"),
    ("A1: 'tl.constexpr' = TWO", "value += A1"),
    ("A2: tl.constexpr = values.NUMBER", "value += A2"),
    ("A3: tl.constexpr = drawn_values.inner.NUMBER", "value += A3"),
    ("A4: tl.constexpr = Sizes.SIX", "value += A4"),
    ("A5: tl.constexpr = Mode.NINE.value", "value += A5"),
    ("A6: tl.constexpr = SPACE.EIGHT", "value += A6"),
    ("A7: Known = TWO", "value += A7"),
    ("TWO: tl.constexpr = TWO", "value += TWO"),
    ("A8=SEVEN", "value += A8"),
    ("A9: tl.constexpr = TABLE['a']", "value += A9"),
    ("", "fixed: Known = 4\n    value += tl.sum(tl.arange(0, fixed))"),
    ("", "SEVEN = SEVEN * 2\n    value += SEVEN"),
    ("", "value += values.LATE"),
    ("", "value += drawn_values.inner.FIVE"),
    ("", "value += values.Sizes.SIX"),
    ("", "value = values.plus(value)"),
    ("", "value = more(value, SEVEN)"),
    ("", "value = outer(inner(value))"),
    ("", "value += half(BLOCK)"),
    ("", "value += SHAPE[0] + SHAPE[1]"),
    ("", "value += PAIR.first * PAIR.second"),
    ("", "value += CLOSED"),
    ("", "value = closed(value)"),
    ("", "value += TABLE['a']"),  # which Triton refuses
    ("", "value += UNKNOWN"),
    ("", "value += values.UNKNOWN"),
]
MADE = """
def make{number}(CLOSED, closed):
    @triton.jit
    def kernel{number}(x, out, BLOCK: tl.constexpr{parameters}):
        at = tl.arange(0, BLOCK)
        value = tl.load(x + at)
{lines}
        tl.store(out + at, value)
    return kernel{number}
kernel{number} = make{number}(tl.constexpr(13), inner)
"""
THERE = """
import hashlib, json, pickle, sys
found = pickle.load(sys.stdin.buffer)
from tritile.tuner.measure.shipping import StandIn, unpack
def compiled(shipment, config):
    try:
        return hashlib.sha256(unpack(shipment, StandIn).compiled(config).asm["ptx"].encode()).hexdigest()
    except Exception as error:
        return type(error).__name__
print(json.dumps([compiled(*each) for each in found]))
"""


def drawn(generator):
    """Draw kernels: each takes up to four forms, and each form is taken alike often."""
    deck, texts = [], []
    for number in range(DRAWN):
        forms = []
        for _ in range(generator.randint(1, 4)):
            deck = deck or generator.sample(FORMS, len(FORMS))
            forms.append(deck.pop())
        parameters = "".join(f", {form[0]}" for form in dict.fromkeys(forms) if form[0])
        lines = "\n".join(f"    {line}" for form in forms for line in f"    {form[1]}".splitlines())
        texts.append(MADE.format(number=number, parameters=parameters, lines=lines))
    return "".join(texts)


def call_of(kernel):
    tensors = torch.empty(64, device="meta"), torch.empty(64, device="meta")
    problem = KernelProblem(kernel.__name__, (), ())
    return KernelCall(problem, H200, "0" * 16, kernel, kernel.arg_names, tensors, {})


def compiled_here(kernel):
    call = call_of(kernel)
    try:
        ptx = call.having(stood_in(call.tensors)).compiled(CONFIG).asm["ptx"]
    except Exception as error:  # whatever Triton raises, it has to raise there
        return type(error).__name__
    return hashlib.sha256(ptx.encode()).hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("future", ["", "from __future__ import annotations\n"], ids=["now", "future"])
def test_kernels_compile_elsewhere_alike(tmp_path, monkeypatch, future):
    name = f"drawn_kernels_{len(future)}"
    (tmp_path / "drawn_values").mkdir()
    (tmp_path / "drawn_values" / "__init__.py").write_text("")
    (tmp_path / "drawn_values" / "inner.py").write_text(VALUES)
    (tmp_path / f"{name}.py").write_text(future + HEAD + drawn(random.Random(SEED + len(future))))
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("drawn_values", "drawn_values.inner", name):
        monkeypatch.delitem(sys.modules, module, raising=False)
    kernels = importlib.import_module(name)
    kernels.values.LATE = triton.language.constexpr(17)
    found = [getattr(kernels, f"kernel{number}") for number in range(DRAWN)]
    sent = pickle.dumps([(described(call_of(kernel)), CONFIG) for kernel in found])
    program = f"import sys; sys.path[:] = {json.dumps(sys.path)}\n{THERE}"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "there"))
    answer = subprocess.run([sys.executable, "-c", program], input=sent, capture_output=True, check=True)
    there = json.loads(answer.stdout.splitlines()[-1])
    here = [compiled_here(kernel) for kernel in found]
    assert there == here
    assert sum(len(each) == 64 for each in here) >= DRAWN // 3  # of which Triton compiles enough
