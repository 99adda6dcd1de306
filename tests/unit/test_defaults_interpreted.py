"""Whatever torch makes by default: what tritile makes for itself says its device and dtype."""

import ast
import contextlib
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from torch.utils._device import _device_constructors

import tritile

pytestmark = pytest.mark.interpreted

_CPU = {"device": "cpu"}


def whole(*shape, dtype=torch.float32):
    """Return small whole numbers, with which every sum is exact."""
    dice = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-2, 3, shape, generator=dice, dtype=torch.int32, **_CPU).to(dtype)


A, B, C, BATCH = whole(33, 50), whole(50, 37), whole(37), whole(2, 33, 50)
HALF, OTHER, LONG = whole(33, 50).half(), whole(50, 37).half(), whole(5, 1000).half()
BYTES, MORE, ONE = whole(32, 64, dtype=torch.int8), whole(64, 48, dtype=torch.int8), torch.ones((), **_CPU)
FP8 = whole(32, 64, dtype=torch.float8_e4m3fn)
ENDS = torch.tensor([10, 33], dtype=torch.int32, **_CPU)
PACKED = tritile.quantize(whole(48, 128).half() / 4, bits=4)
X = whole(9, 128).half()
CALLS = {
    "ieee": lambda: tritile.matmul(A, B, precision="ieee"),
    "tf32": lambda: tritile.matmul(A, B, precision="tf32"),
    "fp16x3": lambda: tritile.matmul(A, B, precision="fp16x3"),
    "half": lambda: tritile.matmul(HALF, OTHER),
    "bf16": lambda: tritile.matmul(HALF.bfloat16(), OTHER.bfloat16()),
    "split sums": lambda: tritile.matmul(LONG, LONG.t()),
    "int8": lambda: tritile.matmul(BYTES, MORE),
    "linear": lambda: tritile.linear(A, B.t(), C, activation="relu", residual=C),
    "addmm": lambda: tritile.addmm(C, A, B, beta=2, alpha=3),
    "alpha = 0": lambda: tritile.addmm(C, A, B, alpha=0),
    "baddbmm": lambda: tritile.baddbmm(C, BATCH, B.expand(2, 50, 37)),
    "gated": lambda: tritile.gated_linear(A, B.t(), B.t(), activation="relu"),
    "groups": lambda: tritile.grouped_matmul(HALF, OTHER.expand(2, 50, 37), ENDS),
    "groups share K": lambda: tritile.grouped_matmul(HALF.t(), HALF, ENDS),
    "scaled int8": lambda: tritile.scaled_matmul(BYTES, MORE, ONE, ONE),
    "scaled fp8": lambda: tritile.scaled_matmul(FP8, FP8.t(), ONE, ONE),
    "transpose": lambda: tritile.transpose(A),
    "permute": lambda: tritile.permute(BATCH, (2, 0, 1)),
    "contiguous": lambda: tritile.contiguous(A.t()),
    "quantize": lambda: tritile.quantize(B.t(), bits=8, zero_points=True).dequantize(),
    "packed": lambda: tritile.linear(X, PACKED, whole(48).half()),
    "a gradient": lambda: torch.func.grad(lambda a: tritile.matmul(a, B).sum())(A),
    "complex": lambda: tritile.matmul(A.to(torch.complex64), B.to(torch.complex64)),
}  # fmt: skip


@contextlib.contextmanager
def default_of(name):
    try:
        if name == "meta":
            torch.set_default_device("meta")
        else:
            torch.set_default_dtype(getattr(torch, name))
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


defaults = pytest.mark.parametrize("default", ["meta", "float64", "bfloat16"])


@defaults
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("host", [False, True], ids=["kernels", "torch"])
def test_operations_ignore_torch_defaults(name, host, default, monkeypatch):
    if host:
        monkeypatch.setattr("tritile.ops.request.INTERPRETING", False)
        monkeypatch.setattr("tritile.ops.grouped.INTERPRETING", False)
    wanted = CALLS[name]()
    with default_of(default):
        found = CALLS[name]()
    assert found.device.type == "cpu"
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)


@triton.jit
def double(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, 2 * tl.load(x_ptr + at, at < n), at < n)


def grid(meta):
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


CONFIGS = [triton.Config({"BLOCK": block}) for block in (16, 32)]
tuned = tritile.autotune(CONFIGS, key=["n"], reference=lambda x_ptr, **_: {"out_ptr": 2 * x_ptr})(double)


def doubled(n):
    x, out = whole(n), torch.zeros(n, **_CPU)
    return {"x_ptr": x, "out_ptr": out, "n": n}


@defaults
def test_tools_ignore_torch_defaults(default):
    arguments, layer = doubled(100), torch.nn.Linear(64, 64)
    with default_of(default):
        found = tritile.check(tuned, 100, make=doubled, grid=grid)
        tuned[grid](**arguments)
        plan = tritile.plan("matmul", A, B, device="h200")
        rows = tritile.nn.convert(layer, rows=64, device="h200").rows
        text = str(tritile.explain("matmul", HALF, OTHER, device="h200"))
    assert torch.equal(arguments["out_ptr"], 2 * arguments["x_ptr"])
    assert found, str(found)
    assert plan == tritile.plan("matmul", A, B, device="h200")
    assert rows == tritile.nn.convert(layer, rows=64, device="h200").rows
    assert text == str(tritile.explain("matmul", HALF, OTHER, device="h200"))


MAKERS = {function.__name__ for function in _device_constructors()}
FLOATS = {"empty", "empty_strided", "zeros", "ones", "rand", "randn", "eye", "linspace", "logspace"}


def made_by_default():
    """Yield where tritile leaves the device, or a floating dtype, of a new tensor to torch."""
    package = Path(tritile.__file__).parent
    for path in sorted(package.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match call:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)) if name in MAKERS:
                    said = {keyword.arg for keyword in call.keywords}  # None: by **
                    wanted = {"device", "dtype"} if name in FLOATS else {"device"}
                    if None not in said and not wanted <= said:
                        yield f"{path.relative_to(package)}:{call.lineno}"


def test_tensors_say_device_and_dtype():
    assert list(made_by_default()) == []
