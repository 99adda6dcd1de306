"""Part of the frozen baseline: what every operation answers to host tensors of small integers.

Sums of small integers are exact in whatever order they are added, so that answers are compared by digest.
Only answers with an exponential in them are kept, as numbers that may be off by TOLERANCE * (1 + |number|).
"""

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import tritile

TOLERANCE = 4e-6
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
C64, C128, E4M3, E5M2 = torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2
REALS = BF16, FP16, FP32, FP64
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


def ends(*sizes: int) -> torch.Tensor:
    return torch.tensor(sizes, dtype=torch.int32)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, two elements apart."""
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _products() -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {}
    for dtype in (*REALS, torch.int8, E4M3, E5M2):
        found[f"matmul {named(dtype)}"] = lambda dtype=dtype: tritile.matmul(*pair(dtype))
        if dtype in (BF16, FP32, E4M3):
            found[f"matmul {named(dtype)} invariant"] = lambda dtype=dtype: invariant(
                tritile.matmul, *pair(dtype)
            )
    precisions = {FP32: ("ieee", "fp16x3", "tf32"), E4M3: ("ieee", "fast")}
    for dtype, names in precisions.items():
        for name in names:
            found[f"matmul {named(dtype)} {name}"] = lambda dtype=dtype, name=name: tritile.matmul(
                *pair(dtype), precision=name
            )
    a, b = pair(FP16)
    batch = integers(2, 1, M, K, dtype=BF16)
    return found | {
        "matmul of columns": lambda: tritile.matmul(a.mT.contiguous().mT, b.mT.contiguous().mT),
        "matmul of strided": lambda: tritile.matmul(strided(a), strided(b.mT).mT),
        "matmul of sliced": lambda: tritile.matmul(integers(M + 2, K + 3, dtype=FP16)[1:-1, 2:-1], b),
        "matmul vectors": lambda: tritile.matmul(a[0], b[:, 0]),
        "matmul vector first": lambda: tritile.matmul(a[0], b),
        "matmul vector last": lambda: tritile.matmul(a, b[:, 0]),
        "matmul one row": lambda: tritile.matmul(*pair(BF16, m=1)),
        "matmul few rows": lambda: tritile.matmul(*pair(BF16, m=5, n=130, k=200)),
        "matmul one column": lambda: tritile.matmul(*pair(BF16, n=1)),
        "matmul deep": lambda: tritile.matmul(*pair(FP32, m=9, n=7, k=2000)),
        "matmul round": lambda: tritile.matmul(*pair(FP16, m=128, n=128, k=64)),
        "matmul broadcast": lambda: tritile.matmul(batch, integers(3, K, N, dtype=BF16)),
        "matmul batch by matrix": lambda: tritile.matmul(batch, integers(K, N, dtype=BF16)),
        "matmul expanded": lambda: tritile.matmul(batch.expand(2, 3, M, K), integers(3, K, N, dtype=BF16)),
        "matmul mixed fp8": lambda: tritile.matmul(pair(E4M3)[0], pair(E5M2)[1]),
        "matmul fp8 to float32": lambda: tritile.matmul(*pair(E4M3), out_dtype=FP32),
        "matmul to float32": lambda: tritile.matmul(*pair(BF16), out_dtype=FP32),
        "matmul to float16": lambda: tritile.matmul(*pair(FP32), out_dtype=FP16),
        "matmul into columns": lambda: tritile.matmul(a, b, out=torch.empty(N, M, dtype=FP16).mT),
        "matmul into padded": lambda: tritile.matmul(a, b, out=torch.empty(M, N + 5, dtype=FP16)[:, 2:-3]),
        "matmul of nothing": lambda: tritile.matmul(a[:, :0], b[:0]),
        "mm": lambda: tritile.mm(a, b),
        "bmm": lambda: tritile.bmm(*pair(BF16, 3)),
        "bmm invariant": lambda: invariant(tritile.bmm, *pair(BF16, 3)),
        "bmm float64": lambda: tritile.bmm(*pair(FP64, 2)),
        "backward of matmul": lambda: gradients(tritile.matmul, *pair(FP32)),
        "backward of bmm": lambda: gradients(tritile.bmm, *pair(FP64, 2)),
    }  # fmt: skip


def _finished() -> dict[str, Callable[[], Any]]:
    a, b = pair(BF16)
    x, weight, bias, full = a, b.mT.contiguous(), integers(N, seed=5), integers(M, N, dtype=BF16, seed=6)
    x32, w32 = (tensor.to(FP32) / 8 for tensor in (x, weight))  # so that exponentials are of numbers around 1
    found: dict[str, Callable[[], Any]] = {
        "addmm": lambda: tritile.addmm(full, a, b),
        "addmm weighted": lambda: tritile.addmm(full, a, b, beta=2, alpha=-3, out_dtype=FP32),
        "addmm without input": lambda: tritile.addmm(full, a, b, beta=0),
        "addmm row": lambda: tritile.addmm(bias.to(BF16), a, b, activation="relu"),
        "addmm column": lambda: tritile.addmm(integers(M, 1, dtype=BF16), a, b),
        "baddbmm": lambda: tritile.baddbmm(integers(3, M, N, dtype=FP16), *pair(FP16, 3), beta=2),
        "linear": lambda: tritile.linear(x, weight),
        "linear bias": lambda: tritile.linear(x, weight, bias),
        "linear bias relu residual": lambda: tritile.linear(
            x, weight, bias, activation="relu", residual=full
        ),
        "linear of three dimensions": lambda: tritile.linear(integers(2, 3, K, dtype=BF16), weight, bias),
        "linear of a vector": lambda: tritile.linear(x, weight[0]),
        "linear into residual": lambda: into(full.clone(), tritile.linear, x, weight),
        "linear float64": lambda: tritile.linear(x.to(FP64), weight.to(FP64), bias.to(FP64)),
        "linear invariant": lambda: invariant(tritile.linear, x, weight, bias),
        "gated_linear relu": lambda: tritile.gated_linear(x, weight, weight.flip(0), activation="relu"),
        "gated_linear plain": lambda: tritile.gated_linear(
            x, weight, weight.flip(0), activation=None, bias_gate=bias, bias_up=bias.flip(0), out_dtype=FP32
        ),
        "gated_linear silu": lambda: tritile.gated_linear(x32, w32, w32.flip(0), bias_up=bias),
        "gated_linear gelu": lambda: tritile.gated_linear(x32, w32, w32.flip(0), activation="gelu"),
        "nn.Linear": lambda: layer(tritile.nn.Linear, weight, bias)(x.to(FP32)),
        "backward of linear": lambda: gradients(tritile.linear, x32 * 8, w32 * 8, bias),
        "backward of gated_linear": lambda: gradients(
            lambda *of: tritile.gated_linear(*of, activation=None), x32 * 8, w32 * 8, w32.flip(0) * 8
        ),
    }
    for name in ("gelu", "gelu_tanh", "silu"):
        found[f"linear {name}"] = lambda name=name: tritile.linear(x32, w32, bias, activation=name)
    return found


def _others() -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {}
    rows, weights, end = integers(40, K, dtype=BF16), integers(4, K, N, dtype=BF16), ends(7, 7, 30, 38)
    found |= {
        "grouped_matmul of rows": lambda: tritile.grouped_matmul(rows, weights, end),
        "grouped_matmul of rows float32": lambda: tritile.grouped_matmul(
            rows.to(FP32), weights.to(FP32), end
        ),
        "grouped_matmul of columns": lambda: tritile.grouped_matmul(
            integers(4, M, K, dtype=BF16), integers(K, 40, dtype=BF16), end
        ),
        "grouped_matmul of k": lambda: tritile.grouped_matmul(
            integers(M, 40, dtype=BF16), integers(40, N, dtype=BF16), end
        ),
        "grouped_matmul of batches": lambda: tritile.grouped_matmul(*pair(BF16, 4)),
        "grouped_matmul of disordered ends": lambda: tritile.grouped_matmul(
            rows, weights, ends(9, 3, 99, 20)
        ),
        "grouped_matmul invariant": lambda: invariant(tritile.grouped_matmul, rows, weights, end),
        "backward of grouped_matmul": lambda: gradients(
            lambda a, b: tritile.grouped_matmul(a, b, end), rows.to(FP32), weights.to(FP32)
        ),
    }
    a, b = pair(E4M3, k=300)
    i, j = pair(torch.int8, k=300)
    one = torch.tensor([0.5])
    bias, full = integers(N, dtype=BF16), integers(M, N, dtype=BF16)
    found |= {
        "scaled_matmul": lambda: tritile.scaled_matmul(a, b, one, one),
        "scaled_matmul rowwise": lambda: tritile.scaled_matmul(
            a, b, powers(M, 1), powers(1, N), out_dtype=FP32
        ),
        "scaled_matmul fast": lambda: tritile.scaled_matmul(a, b, one, one, use_fast_accum=True),
        "scaled_matmul finished": lambda: tritile.scaled_matmul(
            a, b, one, one, bias=bias, activation="relu", residual=full
        ),
        "scaled_matmul int8": lambda: tritile.scaled_matmul(i, j, powers(M, 1), powers(1, N), out_dtype=FP32),
    }
    for bits, group, zeros in ((4, 32, False), (4, 128, True), (8, 64, False), (8, 128, True)):
        name = f"int{bits} in groups of {group}{' with zeros' * zeros}"
        found[f"quantize {name}"] = lambda how=(bits, group, zeros): packed(*how).dequantize()
        found[f"linear {name}"] = lambda how=(bits, group, zeros): tritile.linear(
            integers(M, 160, dtype=BF16), packed(*how), bias
        )
    found["linear few rows int4"] = lambda: tritile.linear(integers(3, 160, dtype=BF16), packed(4, 64, False))
    return found


def _copies() -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {}
    for dtype in (torch.int8, torch.bool, *REALS, C64, C128):
        x = integers(3, 33, 47, dtype=dtype)
        found[f"transpose {named(dtype)}"] = lambda x=x: tritile.transpose(x)
        found[f"permute {named(dtype)}"] = lambda x=x: tritile.permute(x, (1, 2, 0))
    x, z = integers(5, 4, 9, 16, dtype=BF16), integers(20, 30, dtype=C64)
    square, into_strided = integers(70, 70, dtype=FP32), strided(torch.empty(16, 4, 5, 9, dtype=BF16))
    return found | {
        "permute of four": lambda: tritile.permute(x, (2, 0, 3, 1)),
        "permute keeping the last": lambda: tritile.permute(x, (1, 0, 2, 3)),
        "permute of a slice": lambda: tritile.permute(x[1:, :, ::2, 3:], (3, 2, 1, 0)),
        "permute of expanded": lambda: tritile.permute(x[:, :1].expand(5, 6, 9, 16), (3, 1, 0, 2)),
        "permute into strided": lambda: tritile.permute(x, (3, 1, 0, 2), out=into_strided),
        "transpose of named dimensions": lambda: tritile.transpose(x, 0, 2),
        "transpose in place": lambda: (lambda own: tritile.transpose(own, out=own))(square.clone()),
        "transpose conjugated": lambda: tritile.transpose(z.conj()),
        "transpose negated": lambda: tritile.transpose(z.conj().imag),
        "transpose of long rows": lambda: tritile.transpose(integers(3, 5000, dtype=FP16)),
        "contiguous of a transpose": lambda: tritile.contiguous(x.mT),
        "contiguous of a slice": lambda: tritile.contiguous(square[::3, 1:-4]),
        "contiguous of expanded": lambda: tritile.contiguous(square[:1].expand(9, 70)),
        "backward of permute": lambda: gradients(lambda x: tritile.permute(x, (2, 0, 1)), integers(4, 5, 6)),
    }  # fmt: skip


def invariant(call: Callable[..., Any], *given: Any) -> Any:
    with tritile.batch_invariant():
        return call(*given)


def gradients(call: Callable[..., torch.Tensor], *given: torch.Tensor) -> list[torch.Tensor]:
    """The answer, and its gradients for a gradient of whole numbers."""
    given = tuple(tensor.clone().requires_grad_() for tensor in given)
    out = call(*given)
    wanted = integers(*out.shape, dtype=out.dtype, seed=9, high=1)
    return [out.detach(), *torch.autograd.grad(out, given, wanted)]


def into(out: torch.Tensor, call: Callable[..., Any], *given: Any) -> Any:
    return call(*given, residual=out, out=out)


def layer(kind: type, weight: torch.Tensor, bias: torch.Tensor) -> Callable[..., Any]:
    made = kind(K, N)
    with torch.no_grad():
        made.weight.copy_(weight)
        made.bias.copy_(bias)
    return lambda x: made(x).detach()


def packed(bits: int, group: int, zeros: bool) -> tritile.QuantizedWeight:
    """A weight whose groups have 1 for a scale, so that it is packed without rounding."""
    low, high = (0, 2**bits - 1) if zeros else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    weight = torch.from_numpy(
        np.random.RandomState(bits + group).randint(low, high + 1, (N, 160)).astype(np.float32)
    )
    weight[:, ::32], weight[:, 1::32] = low, high
    return tritile.quantize(weight, bits=bits, group_size=group, zero_points=zeros, dtype=BF16)


def powers(*shape: int) -> torch.Tensor:
    """Scales that round nothing: 1/2, 1 and 2."""
    return 2.0 ** integers(*shape, seed=3, high=1)


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
