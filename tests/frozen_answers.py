"""Part of the frozen baseline: what every operation answers to host tensors of small integers.

Sums of small integers are exact in whatever order they are added, so that answers are compared by digest.
Only answers with an exponential in them are kept, as numbers that may be off by TOLERANCE * (1 + |number|).
"""

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

import tritile
from tritile import (
    addmm,
    contiguous,
    gated_linear,
    grouped_matmul,
    linear,
    matmul,
    permute,
    scaled_matmul,
    transpose,
)

TOLERANCE = 4e-6
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
M, N, K = 37, 29, 51


def integers(*shape: int, dtype: torch.dtype = FP32, seed: int = 0, high: int = 3) -> torch.Tensor:
    """Whole numbers from -high to high; numpy promises this generator's sequence for good."""
    drawn = np.random.RandomState(seed + 101 * len(shape) + sum(shape))
    found = torch.from_numpy(drawn.randint(-high, high + 1, (2, *shape)).astype(np.float64))
    return (torch.complex(found[0], found[1]) if dtype.is_complex else found[0]).to(dtype)


def pair(
    dtype: torch.dtype, *batch: int, m: int = M, n: int = N, k: int = K
) -> tuple[torch.Tensor, torch.Tensor]:
    return integers(*batch, m, k, dtype=dtype), integers(*batch, k, n, dtype=dtype, seed=1)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, two elements apart."""
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def powers(*shape: int) -> torch.Tensor:
    """Scales that round nothing: 1/2, 1 and 2."""
    return 2.0 ** integers(*shape, seed=3, high=1)


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def invariant(call: Callable[..., Any], *given: Any) -> Any:
    with tritile.batch_invariant():
        return call(*given)


def gradients(call: Callable[..., torch.Tensor], *given: torch.Tensor) -> list[torch.Tensor]:
    """The answer, and its gradients for a gradient of whole numbers."""
    given = tuple(tensor.clone().requires_grad_() for tensor in given)
    out = call(*given)
    wanted = integers(*out.shape, dtype=out.dtype, seed=9, high=1)
    return [out.detach(), *torch.autograd.grad(out, given, wanted)]


def in_place(call: Callable[..., Any], name: str, own: torch.Tensor, *given: Any) -> Any:
    """The answer written over a copy of an operand, which the call takes by this name too."""
    own = own.clone()
    return call(*given, **{name: own, "out": own})


def by_layer(weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    made = tritile.nn.Linear(K, N)
    with torch.no_grad():
        made.weight.copy_(weight)
        made.bias.copy_(bias)
        return made(x)


def packed(bits: int, group: int, zeros: bool) -> tritile.QuantizedWeight:
    """A weight whose groups have 1 for a scale, so that it is packed without rounding."""
    low, high = (0, 2**bits - 1) if zeros else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    weight = torch.from_numpy(
        np.random.RandomState(bits + group).randint(low, high + 1, (N, 160)).astype(np.float32)
    )
    weight[:, ::32], weight[:, 1::32] = low, high
    return tritile.quantize(weight, bits=bits, group_size=group, zero_points=zeros, dtype=BF16)


def _products() -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {}
    for dtype in (BF16, FP16, FP32, FP64, torch.int8, E4M3, E5M2):
        found[f"matmul {named(dtype)}"] = partial(matmul, *pair(dtype))
        if dtype in (BF16, FP32, E4M3):
            found[f"matmul {named(dtype)} invariant"] = partial(invariant, matmul, *pair(dtype))
    precisions = {FP32: ("ieee", "fp16x3", "tf32"), E4M3: ("ieee", "fast")}
    for dtype, names in precisions.items():
        for name in names:
            found[f"matmul {named(dtype)} {name}"] = partial(matmul, *pair(dtype), precision=name)
    a, b = pair(FP16)
    batch, matrices = integers(2, 1, M, K, dtype=BF16), integers(3, K, N, dtype=BF16)
    return found | {
        "matmul of columns": partial(matmul, a.mT.contiguous().mT, b.mT.contiguous().mT),
        "matmul of strided": partial(matmul, strided(a), strided(b.mT).mT),
        "matmul of sliced": partial(matmul, integers(M + 2, K + 3, dtype=FP16)[1:-1, 2:-1], b),
        "matmul vectors": partial(matmul, a[0], b[:, 0]),
        "matmul vector first": partial(matmul, a[0], b),
        "matmul vector last": partial(matmul, a, b[:, 0]),
        "matmul one row": partial(matmul, *pair(BF16, m=1)),
        "matmul few rows": partial(matmul, *pair(BF16, m=5, n=130, k=200)),
        "matmul one column": partial(matmul, *pair(BF16, n=1)),
        "matmul deep": partial(matmul, *pair(FP32, m=9, n=7, k=2000)),
        "matmul round": partial(matmul, *pair(FP16, m=128, n=128, k=64)),
        "matmul broadcast": partial(matmul, batch, matrices),
        "matmul batch by matrix": partial(matmul, batch, integers(K, N, dtype=BF16)),
        "matmul expanded": partial(matmul, batch.expand(2, 3, M, K), matrices),
        "matmul mixed fp8": partial(matmul, pair(E4M3)[0], pair(E5M2)[1]),
        "matmul fp8 to float32": partial(matmul, *pair(E4M3), out_dtype=FP32),
        "matmul to float32": partial(matmul, *pair(BF16), out_dtype=FP32),
        "matmul to float16": partial(matmul, *pair(FP32), out_dtype=FP16),
        "matmul into columns": partial(matmul, a, b, out=torch.empty(N, M, dtype=FP16).mT),
        "matmul into padded": partial(matmul, a, b, out=torch.empty(M, N + 5, dtype=FP16)[:, 2:-3]),
        "matmul of nothing": partial(matmul, a[:, :0], b[:0]),
        "mm": partial(tritile.mm, a, b),
        "bmm": partial(tritile.bmm, *pair(BF16, 3)),
        "bmm invariant": partial(invariant, tritile.bmm, *pair(BF16, 3)),
        "bmm float64": partial(tritile.bmm, *pair(FP64, 2)),
        "backward of matmul": partial(gradients, matmul, *pair(FP32)),
        "backward of bmm": partial(gradients, tritile.bmm, *pair(FP64, 2)),
    }


def _finished() -> dict[str, Callable[[], Any]]:
    a, b = pair(BF16)
    x, w, bias, full = a, b.mT.contiguous(), integers(N, seed=5), integers(M, N, dtype=BF16, seed=6)
    x32, w32 = x.to(FP32), w.to(FP32)
    x8, w8 = x32 / 8, w32 / 8  # so that exponentials are of numbers around 1
    ungated = partial(gated_linear, activation=None)
    wide = x.to(FP64), w.to(FP64), bias.to(FP64)
    return {
        "addmm": partial(addmm, full, a, b),
        "addmm weighted": partial(addmm, full, a, b, beta=2, alpha=-3, out_dtype=FP32),
        "addmm without input": partial(addmm, full, a, b, beta=0),
        "addmm row": partial(addmm, bias.to(BF16), a, b, activation="relu"),
        "addmm column": partial(addmm, integers(M, 1, dtype=BF16), a, b),
        "baddbmm": partial(tritile.baddbmm, integers(3, M, N, dtype=FP16), *pair(FP16, 3), beta=2),
        "linear": partial(linear, x, w),
        "linear bias": partial(linear, x, w, bias),
        "linear bias relu residual": partial(linear, x, w, bias, activation="relu", residual=full),
        "linear of three dimensions": partial(linear, integers(2, 3, K, dtype=BF16), w, bias),
        "linear of a vector": partial(linear, x, w[0]),
        "linear into residual": partial(in_place, linear, "residual", full, x, w),
        "linear float64": partial(linear, *wide),
        "linear invariant": partial(invariant, linear, x, w, bias),
        "gated_linear relu": partial(gated_linear, x, w, w.flip(0), activation="relu"),
        "gated_linear plain": partial(
            ungated, x, w, w.flip(0), bias_gate=bias, bias_up=bias.flip(0), out_dtype=FP32
        ),
        "gated_linear silu": partial(gated_linear, x8, w8, w8.flip(0), bias_up=bias),
        "gated_linear gelu": partial(gated_linear, x8, w8, w8.flip(0), activation="gelu"),
        "nn.Linear": partial(by_layer, w, bias, x32),
        "backward of linear": partial(gradients, linear, x32, w32, bias),
        "backward of gated_linear": partial(gradients, ungated, x32, w32, w32.flip(0)),
        "linear gelu": partial(linear, x8, w8, bias, activation="gelu"),
        "linear gelu_tanh": partial(linear, x8, w8, bias, activation="gelu_tanh"),
        "linear silu": partial(linear, x8, w8, bias, activation="silu"),
    }


def _others() -> dict[str, Callable[[], Any]]:
    rows, weights = integers(40, K, dtype=BF16), integers(4, K, N, dtype=BF16)
    ends, disordered = (torch.tensor(each, dtype=torch.int32) for each in ((7, 7, 30, 38), (9, 3, 99, 20)))
    of_k = integers(M, 40, dtype=BF16), integers(40, N, dtype=BF16)
    of_columns = integers(4, M, K, dtype=BF16), integers(K, 40, dtype=BF16)
    in_groups = partial(grouped_matmul, offs=ends)
    a, b = pair(E4M3, k=300)
    i, j = pair(torch.int8, k=300)
    one, by_row = torch.tensor([0.5]), (powers(M, 1), powers(1, N))
    bias, full, x = integers(N, dtype=BF16), integers(M, N, dtype=BF16), integers(M, 160, dtype=BF16)
    finish = {"bias": bias, "activation": "relu", "residual": full}
    found: dict[str, Callable[[], Any]] = {
        "grouped_matmul of rows": partial(in_groups, rows, weights),
        "grouped_matmul of rows float32": partial(in_groups, rows.to(FP32), weights.to(FP32)),
        "grouped_matmul of columns": partial(in_groups, *of_columns),
        "grouped_matmul of k": partial(in_groups, *of_k),
        "grouped_matmul of batches": partial(grouped_matmul, *pair(BF16, 4)),
        "grouped_matmul of disordered ends": partial(grouped_matmul, rows, weights, disordered),
        "grouped_matmul invariant": partial(invariant, grouped_matmul, rows, weights, ends),
        "backward of grouped_matmul": partial(gradients, in_groups, rows.to(FP32), weights.to(FP32)),
        "scaled_matmul": partial(scaled_matmul, a, b, one, one),
        "scaled_matmul rowwise": partial(scaled_matmul, a, b, *by_row, out_dtype=FP32),
        "scaled_matmul fast": partial(scaled_matmul, a, b, one, one, use_fast_accum=True),
        "scaled_matmul finished": partial(scaled_matmul, a, b, one, one, **finish),
        "scaled_matmul int8": partial(scaled_matmul, i, j, *by_row, out_dtype=FP32),
    }
    for bits, group, zeros in ((4, 32, False), (4, 128, True), (8, 64, False), (8, 128, True)):
        name = f"int{bits} in groups of {group}{' with zeros' * zeros}"
        weight = packed(bits, group, zeros)
        found[f"quantize {name}"] = weight.dequantize
        found[f"linear {name}"] = partial(linear, x, weight, bias)
    found["linear few rows int4"] = partial(linear, integers(3, 160, dtype=BF16), packed(4, 64, False))
    return found


def _copies() -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {}
    for dtype in (torch.int8, torch.bool, BF16, FP16, FP32, FP64, torch.complex64, torch.complex128):
        whole = integers(3, 33, 47, dtype=dtype)
        found[f"transpose {named(dtype)}"] = partial(transpose, whole)
        found[f"permute {named(dtype)}"] = partial(permute, whole, (1, 2, 0))
    x, z = integers(5, 4, 9, 16, dtype=BF16), integers(20, 30, dtype=torch.complex64)
    square, into_strided = integers(70, 70, dtype=FP32), strided(torch.empty(16, 4, 5, 9, dtype=BF16))
    return found | {
        "permute of four": partial(permute, x, (2, 0, 3, 1)),
        "permute keeping the last": partial(permute, x, (1, 0, 2, 3)),
        "permute of a slice": partial(permute, x[1:, :, ::2, 3:], (3, 2, 1, 0)),
        "permute of expanded": partial(permute, x[:, :1].expand(5, 6, 9, 16), (3, 1, 0, 2)),
        "permute into strided": partial(permute, x, (3, 1, 0, 2), out=into_strided),
        "transpose of named dimensions": partial(transpose, x, 0, 2),
        "transpose in place": partial(in_place, transpose, "input", square),
        "transpose conjugated": partial(transpose, z.conj()),
        "transpose negated": partial(transpose, z.conj().imag),
        "transpose of long rows": partial(transpose, integers(3, 5000, dtype=FP16)),
        "contiguous of a transpose": partial(contiguous, x.mT),
        "contiguous of a slice": partial(contiguous, square[::3, 1:-4]),
        "contiguous of expanded": partial(contiguous, square[:1].expand(9, 70)),
        "backward of permute": partial(gradients, partial(permute, dims=(2, 0, 1)), integers(4, 5, 6)),
    }


CASES = {**_products(), **_finished(), **_others(), **_copies()}
_INEXACT = "gelu", "silu"


def _digest(found: torch.Tensor) -> str:
    if found.is_floating_point():
        found = torch.where(found == 0, torch.zeros_like(found), found)  # -0 is 0
    found = torch.view_as_real(found.resolve_conj()) if found.is_complex() else found
    facts = f"{found.dtype} {tuple(found.shape)}".encode()
    return hashlib.sha256(
        facts + found.resolve_neg().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
    ).hexdigest()[:12]


def answer(name: str) -> str | list[float]:
    """A digest of the case's answer, or its numbers; the name of the error that refuses it."""
    try:
        found = CASES[name]()
    except (tritile.TritileError, AttributeError, TypeError) as error:  # the last two of what is no more
        return f"refused: {type(error).__name__}"
    if any(word in name for word in _INEXACT):
        return [float(f"{number:.8g}") for number in found.flatten()[::7].tolist()]
    return " ".join(_digest(each) for each in (found if isinstance(found, list) else [found]))


def alike(old: str | list[float], new: str | list[float]) -> bool:
    if isinstance(old, str) or isinstance(new, str):
        return old == new
    near = (abs(a - b) <= TOLERANCE * (1 + abs(a)) for a, b in zip(old, new, strict=False))
    return len(old) == len(new) and all(near)
