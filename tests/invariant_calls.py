"""Calls of rows by operation, which are batch-invariant where they are asked to be."""

import torch

import tritile
from tests.packed import weight_of
from tests.reference import values
from tests.scales import scale

COLUMNS = 23


def calls(k: int, dtype: torch.dtype = torch.float64):
    """By name a call of rows of k numbers and the rows' dtype; what is plain is of `dtype`."""
    n = COLUMNS
    weight, up = values((n, k), dtype, 1), values((n, k), dtype, 2)
    bias, single, fp8, one = values((n,), dtype, 3), weight.float(), torch.float8_e4m3fn, scale(1)[0]

    def all_of(x):
        return torch.tensor([len(x)], dtype=torch.int32)

    def scaled(x):
        return tritile.scaled_matmul(x, weight.to(x.dtype).t(), one, one, activation="gelu")

    def packed(bits, zeros):
        other = weight_of(n, k, torch.float16, bits, 32, zeros)
        return lambda x: tritile.linear(x, other, bias.half())

    return {
        "matmul": (lambda x: tritile.matmul(x, weight.t()), dtype),
        "column": (lambda x: tritile.matmul(x, weight[0]), dtype),
        "batch by matrix": (lambda x: tritile.matmul(x.expand(3, -1, -1), weight.t())[2], dtype),
        "bmm": (lambda x: tritile.bmm(x.expand(2, -1, -1), torch.stack([up, weight]).mT)[1], dtype),
        "gelu": (lambda x: tritile.linear(x, weight, bias, activation="gelu"), dtype),
        "silu": (lambda x: tritile.linear(x, weight, activation="silu"), dtype),
        "addmm": (lambda x: tritile.addmm(bias, x, weight.t(), alpha=0.7, beta=1.3), dtype),
        "baddbmm": (lambda x: tritile.baddbmm(bias, x[None], weight.t()[None], beta=0.3)[0], dtype),
        "gated": (lambda x: tritile.gated_linear(x, weight, up, bias_up=bias), dtype),
        "float32": (lambda x: tritile.linear(x, single, activation="gelu_tanh"), torch.float32),
        "fp16": (lambda x: tritile.matmul(x, weight.half().t()), torch.float16),
        "packed": (packed(4, False), torch.float16),
        "packed with zero points": (packed(8, True), torch.float16),
        "scaled fp8": (scaled, fp8),
        "scaled int8": (scaled, torch.int8),
        "groups of rows": (
            lambda x: tritile.grouped_matmul(x, single.t()[None], all_of(x)), torch.float32
        ),
        "groups of columns": (
            lambda x: tritile.grouped_matmul(single[None], x.t(), all_of(x)).t(), torch.float32
        ),
    }  # fmt: skip
