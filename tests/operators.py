"""Calls of every operator: small, in layouts and with words that count, and what torch makes of them."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import tritile
from tests.reference import ACTIVATIONS


class Sample(NamedTuple):
    """A call of `tritile.<op>`, and the same by torch, of the same tensors."""

    op: str
    label: str
    call: Callable[..., torch.Tensor]
    peer: Callable[..., torch.Tensor]
    tensors: tuple[torch.Tensor, ...]

    @property
    def id(self) -> str:
        """For the names of tests."""
        return f"{self.op}-{self.label}"


def drawn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    """Random numbers, the same every time."""
    generator = torch.Generator().manual_seed(seed + sum(shape) + 31 * len(shape))
    return torch.randn(shape, dtype=dtype, generator=generator)


def _linear(x, weight, bias=None, residual=None, activation=None):
    y = ACTIVATIONS[activation or ""](F.linear(x, weight) if bias is None else F.linear(x, weight) + bias)
    return y if residual is None else y + residual


def _gated(x, gate, up, bias_gate=None, bias_up=None, activation="silu"):
    return _linear(x, gate, bias_gate, None, activation) * _linear(x, up, bias_up)


def _addmm(added, a, b, beta=1, alpha=1, activation=None):
    return ACTIVATIONS[activation or ""](beta * added + alpha * (a @ b))


def _sample(op: str, label: str, peer: Any, tensors: tuple[Any, ...], names: tuple[str, ...] = (), **words):
    """A call of tensors, the last of which go by these names, and words."""
    plain = len(tensors) - len(names)

    def call(*given, out=None):
        named = dict(zip(names, given[plain:], strict=True))
        return getattr(tritile, op)(*given[:plain], **named, **words, out=out)

    return Sample(op, label, call, lambda *given: peer(*given, **words), tensors)


A, B = drawn(3, 4), drawn(4, 5)
X, W = drawn(2, 3, 4), drawn(5, 4, seed=1)
OFFS = torch.tensor([2, 2, 5], dtype=torch.int32)


def matmul_samples() -> list[Sample]:
    """Vectors, matrices, batches that broadcast, views, complex numbers."""
    z, y = torch.complex(A, A.flip(0)), torch.complex(B, B.flip(1))
    shapes = {
        "matrices": (A, B),
        "views": (drawn(4, 3).mT, drawn(10, 4)[::2].mT),
        "vectors": (A[0], B[:, 0]),
        "vector first": (A[0], B),
        "vector last": (A, B[:, 0]),
        "vector by batch": (A[0], drawn(2, 4, 5)),
        "batch by vector": (X, B[:, 0]),
        "batch by matrix": (X, B),
        "matrix by batch": (A, drawn(2, 4, 5)),
        "batches that broadcast": (drawn(2, 1, 3, 4), drawn(3, 4, 2)),
        "complex": (z, y),
        "conjugated": (z.mT.conj().mT, y.conj()),
    }
    return [_sample("matmul", label, torch.matmul, pair) for label, pair in shapes.items()]


def linear_samples() -> list[Sample]:
    """Every argument of each call with an epilogue, and products of fewer dimensions."""
    bias, residual = drawn(5), drawn(2, 3, 5)
    up, more = drawn(5, 4, seed=2), drawn(3, 5)
    return [
        _sample("linear", "plain", _linear, (X, W)),
        _sample("linear", "vector", _linear, (A[0], W)),
        _sample("linear", "no columns", _linear, (X, W[0])),
        _sample("linear", "bias, residual", _linear, (X, W, bias, residual), ("residual",)),
        _sample("linear", "silu", _linear, (X, W, bias, residual), ("residual",), activation="silu"),
        _sample("gated_linear", "plain", _gated, (X, W, up)),
        _sample("gated_linear", "biases", _gated, (A, W, up, bias, drawn(3, 1)), ("bias_gate", "bias_up"),
                activation="gelu"),
        _sample("addmm", "plain", _addmm, (more, A, B)),
        _sample("addmm", "weights", _addmm, (bias, A, B), beta=0.5, alpha=2.0),
        _sample("addmm", "gelu_tanh", _addmm, (more, A, B), activation="gelu_tanh", alpha=-1),
        _sample("baddbmm", "plain", _addmm, (drawn(2, 3, 5), X, drawn(2, 4, 5))),
        _sample("baddbmm", "stretched", _addmm, (more, X, drawn(2, 4, 5)), beta=3),
        *complex_samples(),
    ]  # fmt: skip


def complex_samples() -> list[Sample]:
    """What is added to products of complex numbers, with complex weights."""

    def z(*shape: int, seed: int = 0) -> torch.Tensor:
        return torch.complex(drawn(*shape, seed=seed), drawn(*shape, seed=seed + 7))

    a, b, weights = z(3, 4), z(4, 5), {"beta": 0.5 - 2j, "alpha": 1 + 3j}
    return [
        _sample("linear", "complex", _linear, (z(2, 3, 4), z(5, 4), z(5), z(2, 3, 5)), ("residual",)),
        _sample("linear", "conjugated", _linear, (z(2, 3, 4).conj(), z(5, 4).conj(), z(5))),
        _sample("addmm", "complex weights", _addmm, (z(5), a, b), **weights),
        _sample("addmm", "conjugated operands", _addmm, (z(3, 5).conj(), a, z(5, 4).mH), alpha=-1j),
        _sample("baddbmm", "complex batches", _addmm, (z(3, 5), z(2, 3, 4), z(2, 4, 5)), **weights),
    ]


def permute_samples() -> list[Sample]:
    """Copies, of what is conjugated too."""
    z = torch.complex(X, X.flip(0))
    return [
        _sample("permute", "dims", lambda x, dims: x.permute(dims), (X,), dims=(2, 0, -2)),
        _sample("permute", "conjugated", lambda x, dims: x.permute(dims), (z.conj(),), dims=(1, 0, 2)),
        _sample("transpose", "plain", lambda x: x.mT, (X,)),
        _sample("transpose", "others", lambda x, dim0: x.transpose(dim0, -1), (X,), dim0=0),
    ]


def grouped(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Products of groups, one by one."""
    ends = [0, *offs.tolist()]
    spans = [slice(i, j) for i, j in itertools.pairwise(ends)]
    if a.ndim == 2 and b.ndim == 3:
        rest = a.new_zeros(a.shape[0] - ends[-1], b.shape[-1])
        return torch.cat([*(a[s] @ b[i] for i, s in enumerate(spans)), rest])
    if a.ndim == 3:
        rest = a.new_zeros(a.shape[1], b.shape[1] - ends[-1])
        return torch.cat([*(a[i] @ b[:, s] for i, s in enumerate(spans)), rest], 1)
    return torch.stack([a[:, s] @ b[s] for s in spans])


def grouped_samples() -> list[Sample]:
    """What groups share: rows of a, columns of b, K; in fp32, as nothing wider is offered."""
    a, b = drawn(6, 4, dtype=torch.float32), drawn(3, 4, 2, dtype=torch.float32)

    def sample(label, *operands):
        return Sample("grouped_matmul", label, lambda a, b: tritile.grouped_matmul(a, b, OFFS),
                      lambda a, b: grouped(a, b, OFFS), operands)  # fmt: skip

    return [sample("rows", a, b), sample("columns", b.mT, a.mT), sample("k", a.mT, a[:, :3].contiguous())]


DOUBLES = [*matmul_samples(), *linear_samples(), *permute_samples()]
SAMPLES = [*DOUBLES, *grouped_samples()]
