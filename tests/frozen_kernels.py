"""Part of the frozen baseline: machine code of kernels of every family, compiled for an H200 without one."""

import functools
import hashlib
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import tritile
from tests.ahead import instructions
from tritile.families import launching
from tritile.runtime.ahead import compiling_for

GPU = "h200"
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
E4M3, INT32 = torch.float8_e4m3fn, torch.int32


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _products() -> dict[str, tuple[str, list[Any], dict[str, Any]]]:
    a, b, w = meta(4096, 4096), meta(4096, 4096), meta(4096, 4096).mT
    h = meta(4096, 4096, dtype=FP16)
    f, d = (meta(1024, 1024, dtype=dtype) for dtype in (FP32, FP64))
    e, i = meta(4096, 4096, dtype=E4M3), meta(4096, 4096, dtype=torch.int8)
    one, rows = meta(1, dtype=FP32), meta(4096, 1, dtype=FP32)
    odd = meta(3, 997, 1001, dtype=FP16).mT, meta(3, 997, 1003, dtype=FP16)
    grouped, ends = meta(8, 4096, 4096).mT, meta(8, dtype=INT32)
    bias, full = meta(4096), meta(4096, 4096)
    return {
        "NN float16": ("matmul", [h, h], {}),
        "NN": ("matmul", [a, b], {}),
        "NT": ("matmul", [a, w], {}),
        "TN": ("matmul", [a.mT, b], {}),
        "TT": ("matmul", [a.mT, w], {}),
        "odd batch": ("matmul", [*odd], {"out_dtype": FP32}),
        "odd NN": ("matmul", [meta(777, 333), meta(333, 555)], {}),
        "strided": ("matmul", [meta(512, 1024)[:, ::2], meta(512, 512)], {}),
        "into columns": ("matmul", [a, b], {"out": meta(4096, 4096).mT}),
        "deep": ("matmul", [meta(512, 16384), meta(16384, 512)], {}),
        "to float32": ("matmul", [a, w], {"out_dtype": FP32}),
        "batch": ("bmm", [meta(16, 1024, 128), meta(16, 128, 1024)], {}),
        "float32": ("matmul", [f, f], {"precision": "ieee"}),
        "tf32": ("matmul", [f, f.mT], {"precision": "tf32"}),
        "fp16x3": ("matmul", [f, f.mT], {"precision": "fp16x3"}),
        "float64": ("matmul", [d, d], {}),
        "fp8": ("matmul", [e, e.mT], {}),
        "fp8 fast": ("matmul", [e, e.mT], {"precision": "fast"}),
        "int8": ("matmul", [i, i.mT], {}),
        "few rows NT": ("matmul", [meta(4, 4096), w], {}),
        "few rows NN": ("matmul", [meta(4, 4096), b], {}),
        "few odd rows": ("matmul", [meta(5, 6821), meta(512, 6821).mT], {}),
        "few odd columns": ("linear", [meta(978, 5019), meta(19, 5019)], {"activation": "relu"}),
        "one row": ("matmul", [meta(1, 4096), w], {}),
        "matrix by vector": ("matmul", [a, meta(4096)], {}),
        "addmm": ("addmm", [full, a, b], {"alpha": 2.0, "beta": 0.5}),
        "linear bias": ("linear", [a, b, bias], {}),
        "linear bias gelu": ("linear", [a, b, bias], {"activation": "gelu"}),
        "linear silu residual": ("linear", [a, b, bias], {"activation": "silu", "residual": full}),
        "linear odd": ("linear", [meta(777, 333), meta(555, 333), meta(555)], {"activation": "gelu_tanh"}),
        "gated": ("gated_linear", [a, b, b], {}),
        "gated odd": ("gated_linear", [meta(777, 333), *[meta(555, 333)] * 2], {"activation": "gelu"}),
        "grouped rows": ("grouped_matmul", [a, grouped, ends], {}),
        "grouped columns": ("grouped_matmul", [meta(8, 4096, 4096), b, ends], {}),
        "scaled": ("scaled_matmul", [e, e.mT, one, one], {}),
        "scaled rowwise": ("scaled_matmul", [e, e.mT, rows, rows.mT], {"bias": bias}),
        "scaled int8": ("scaled_matmul", [i, i.mT, rows, rows.mT], {}),
    }  # fmt: skip


def _others() -> dict[str, tuple[str, list[Any], dict[str, Any]]]:
    found: dict[str, tuple[str, list[Any], dict[str, Any]]] = {}
    for rows in (1, 64):
        for bits, zeros in ((4, False), (8, True)):
            weight = tritile.quantize(meta(4096, 4096), bits=bits, zero_points=zeros)
            found[f"{rows} by int{bits}{' with zeros' * zeros}"] = ("linear", [meta(rows, 4096), weight], {})
    for dtype in (torch.int8, FP16, FP32, FP64, torch.complex128):
        found[f"transpose {dtype.itemsize}"] = ("transpose", [meta(4096, 4096, dtype=dtype)], {})
    return found | {
        "transpose odd": ("transpose", [meta(2, 1003, 1001, dtype=torch.int8)], {}),
        "transpose thin": ("transpose", [meta(100001, 3, dtype=torch.int8)], {}),
        "transpose conjugated": ("transpose", [meta(512, 512, dtype=torch.complex64).conj()], {}),
        "permute": ("permute", [meta(64, 48, 512, dtype=FP16), (2, 0, 1)], {}),
        "permute four": ("permute", [meta(17, 33, 65, 31, dtype=FP32), (3, 1, 2, 0)], {}),
        "permute keeping the last": ("permute", [meta(64, 48, 512), (1, 0, 2)], {}),
    }


CALLS = {**_products(), **_others()}
# Those that tests/kernels compile as well, by configs given there: `make test` compares these alone.
QUICK = {
    "NN float16": [
        "tile BLOCK_K=32 BLOCK_M=128 BLOCK_N=128 GROUP_M=8 num_warps=8 num_stages=3",
        "tile BLOCK_K=64 BLOCK_M=64 BLOCK_N=128 GROUP_M=8 num_warps=4 num_stages=2",
        "descriptor BLOCK_K=64 BLOCK_M=128 BLOCK_N=128 GROUP_M=8 PERSISTENT=True SPLIT_K=1 SUBTILES=1 "
        "num_warps=8 num_stages=3",
        "descriptor BLOCK_K=64 BLOCK_M=64 BLOCK_N=64 GROUP_M=8 PERSISTENT=False SPLIT_K=4 SUBTILES=1 "
        "num_warps=4 num_stages=4",
        "warpgroups BLOCK_K=64 BLOCK_M=64 BLOCK_N=64 CONSUMERS=1 GROUP_M=8 PERSISTENT=False SUBTILES=1 "
        "num_warps=4 num_stages=6",
    ],
    "odd batch": [
        "tile BLOCK_K=32 BLOCK_M=32 BLOCK_N=64 GROUP_M=8 num_warps=4 num_stages=3",
        "warpgroups BLOCK_K=64 BLOCK_M=128 BLOCK_N=128 CONSUMERS=2 GROUP_M=8 PERSISTENT=True SUBTILES=1 "
        "num_warps=4 num_stages=4",
    ],
    "transpose 2": ["tile BLOCK_M=64 BLOCK_N=64 GROUP_M=1 num_warps=4 num_stages=1"],
}  # fmt: skip
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s*(.*?)\s*;")
_LABEL = re.compile(r"\.L_x?_?\d+")


@functools.cache
def plan(name: str) -> tritile.Plan:
    op, args, words = CALLS[name]
    with tritile.mode("cached"):
        return tritile.plan(op, *args, device=tritile.target_device(GPU), **words)


def config(text: str) -> tritile.Config:
    """The config that `str` wrote."""
    family, *pairs = text.split()
    words = dict(pair.split("=") for pair in pairs)
    values = {
        name: value == "True" if value in ("True", "False") else int(value) for name, value in words.items()
    }
    clustered = values.pop("num_ctas", 1)
    return replace(tritile.Config.of(family=family, **values), num_ctas=clustered)


def chosen() -> dict[str, list[str]]:
    """Configs to keep for each call: the plan's, and the likeliest of each variant of a family."""
    from tritile.planning import model

    found, seen = {name: list(texts) for name, texts in QUICK.items()}, set()
    for name in CALLS:
        problem, device = plan(name).problem, plan(name).device
        own = found.setdefault(name, [])
        ranked = [
            each
            for family in model.families(problem, device)
            for each in model.ranked(problem, device, family)
        ]
        for each in (plan(name).config, *ranked):
            values = dict(each.kwargs)
            split, halves = (values.get(word, 1) > 1 for word in ("SPLIT_K", "SUBTILES"))
            variant = (problem.op, each.family, values.get("PERSISTENT"), split, halves)
            if each == plan(name).config or variant not in seen:
                seen.add(variant)
                own.append(str(each))
    return {name: list(dict.fromkeys(own)) for name, own in found.items()}


def code(kernel: Any) -> list[str]:
    """The instructions of a compiled kernel, labels by number: no address, symbol or line of a source."""
    with tempfile.TemporaryDirectory() as folder:
        text = instructions(kernel, Path(folder))
    text = text.replace(kernel.metadata.name, "kernel")
    labels: dict[str, str] = {}
    lines = []
    for line in text.splitlines():
        instruction = _INSTRUCTION.match(line)
        if instruction or line.startswith(".L"):
            kept = instruction[1] if instruction else line.strip()
            lines.append(_LABEL.sub(lambda found: labels.setdefault(found[0], f"L{len(labels)}"), kept))
    return lines


def machine_code(name: str, text: str) -> str:
    """Digest and number of lines of each kernel that the call launches by this config, or why it has none."""
    device, problem = plan(name).device, plan(name).problem
    try:
        with compiling_for(device):
            kernels = [compiled() for compiled in launching.compiles_for(problem, config(text), device)]
    except Exception as error:  # a compiler may raise anything
        return f"refused: {type(error).__name__}"
    codes = ["\n".join(code(kernel)) for kernel in kernels]
    return " ".join(
        f"{hashlib.sha256(own.encode()).hexdigest()[:12]}:{own.count(chr(10)) + 1}" for own in codes
    )
