"""Compiled where no GPU is seen, run where one is: nothing is compiled there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from triton.backends.compiler import GPUTarget

import tritile
from tritile.choose import table, waves
from tritile.core.device import current_gpu, target_key
from tritile.families import registry as families
from tritile.tuner.store.trial import Trial
from tritile.tuner.store.trials import store_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.version.hip is not None, reason="kernels are compiled ahead for NVIDIA GPUs"),
]

# Products whose operands TMA reads where they lie, or copies first, and one of a long K.
PRODUCTS = [
    ((256, 512), (512, 384), "float16"),
    ((129, 133), (133, 131), "bfloat16"),
    ((64, 4096), (4096, 64), "float16"),
]
ORDERS = [
    ((300, 520), (1, 0), "bfloat16"),
    ((5, 33, 65), (0, 2, 1), "float32"),
    ((257, 129), (1, 0), "uint8"),
]

SCRIPT = """
import json, sys
import torch, triton, tritile
from tritile.errors import NotCompiledError

products, orders = json.loads(sys.argv[1])
assert tritile.core.settings.current_mode() == "strict"
heard = []
triton.knobs.compilation.listener = lambda **told: heard.append(told["cache_hit"])
torch.manual_seed(0)
for of_a, of_b, dtype in products:
    a, b = (torch.randn(size, device="cuda").to(getattr(torch, dtype)) for size in (of_a, of_b))
    wanted = a.double() @ b.double()
    got = tritile.matmul(a, b)
    error = ((got.double() - wanted).norm() / wanted.norm()).item()
    assert error < 1e-2, (of_a, of_b, dtype, error)
for shape, order, dtype in orders:
    x = torch.randint(0, 100, shape, device="cuda").to(getattr(torch, dtype))
    assert torch.equal(tritile.permute(x, order), x.permute(order)), (shape, order, dtype)
assert heard and all(heard), heard
before = len(heard)

x = torch.randn(64, 192, device="cuda").half()  # remembered, and not compiled
out = torch.full((192, 64), -1.0, device="cuda").half()
try:
    tritile.transpose(x, out=out)
except NotCompiledError as error:
    assert "64" in str(error) and "tritile compile" in str(error), error
else:
    raise AssertionError("no error")
assert heard[before:] == [], heard
assert (out == -1).all()
with tritile.mode("cached"):
    tritile.transpose(x, out=out)
assert heard[before:] == [False], heard
assert torch.equal(out, x.mT)
print(before)
"""


WARMED = """
import torch, tritile
from tritile.errors import NotCompiledError
from tritile.runtime.compiles import compiles_refused

weight = torch.randn(1024, 512, device="cuda").bfloat16()

def call(m):
    x = torch.randn(m, 512, device="cuda").bfloat16()
    with compiles_refused("a kernel", "warm it"):
        got = tritile.matmul(x, weight.mT)
    wanted = x.double() @ weight.mT.double()
    assert ((got.double() - wanted).norm() / wanted.norm()).item() < 1e-2, m

try:
    call(33)
except NotCompiledError as error:
    assert "warm it" in str(error), error
else:
    raise AssertionError("no error")
x = torch.empty(33, 512, device="cuda", dtype=torch.bfloat16)
print(tritile.warm(tritile.matmul, x, weight.mT, any_rows=True))
for m in (1, 2, 16, 33, 64, 1000, 5001):
    call(m)
"""


def remembered(problem):
    """The model's config of a problem, remembered as measured."""
    device = current_gpu()
    config = waves.pick(problem, device)
    digest = families.FAMILIES[problem.op][config.family].digest
    store_of(device).add(digest, Trial(problem, config, 10.0, error=0.0))


def process(command, **env):
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=280, env={**os.environ, **env},
        cwd=Path(tritile.__file__).parents[1],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def contents(folder):
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.skipif(
    not target_key(current_gpu().name if current_gpu() else ""), reason="no --target names it"
)
def test_compiled_without_gpu_runs(tmp_path):
    device = current_gpu()
    if device.arch == 90:
        assert device.target == GPUTarget("cuda", 90, 32)
    for of_a, of_b, dtype in PRODUCTS:
        a, b = (torch.empty(size, dtype=getattr(torch, dtype), device="cuda") for size in (of_a, of_b))
        remembered(tritile.plan(tritile.matmul, a, b).problem)
    for shape, order, dtype in ORDERS:
        x = torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")
        remembered(tritile.plan(tritile.permute, x, order).problem)
    tritile.forget()
    exported, folder = tmp_path / "table.json", tmp_path / "compiled"
    table.write(table.from_store(store_of(device), device, families.digests()), exported)
    assert len(table.read(exported).entries) == len(PRODUCTS) + len(ORDERS)

    command = ["-m", "tritile", "compile", "--target", device.name]
    used = {"TRITON_CACHE_DIR": str(folder), "TRITILE_TABLE": str(exported)}
    # No GPU is seen: neither the present one's driver nor torch can have a part in what is compiled.
    found = re.search(r"(\d+) kernels of", process(command, CUDA_VISIBLE_DEVICES="", **used))
    used["TRITILE_MODE"] = "strict"
    process(command, CUDA_VISIBLE_DEVICES="", **used)

    x = torch.empty(64, 192, dtype=torch.float16, device="cuda")
    remembered(tritile.plan(tritile.transpose, x).problem)
    before = contents(folder)
    printed = process(["-c", SCRIPT, json.dumps([PRODUCTS, ORDERS])], **used)
    assert int(printed.split()[-1]) == int(found[1]) > 0  # each was looked for once, and found
    after = contents(folder)
    assert {name: after.get(name) for name in before} == before


def test_warmed_calls_compile_nothing(tmp_path):
    env = {"TRITON_CACHE_DIR": str(tmp_path)}
    kernels = int(process(["-c", WARMED], **env).split()[-1])
    assert kernels > 0
