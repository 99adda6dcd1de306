"""Gated products in Triton's interpreter: two matrices in one loop, each with biases and strides of its own.

What all families have to do is in test_families_interpreted.py.
"""

import pytest
import torch

import tritile
from tests.configs import tile, tma
from tests.reference import assert_gated, bytes_of, name, placed, values
from tritile.core.posed import posed
from tritile.core.problem import MatmulProblem
from tritile.ops.described import Extras, described
from tritile.runtime import launch

pytestmark = pytest.mark.interpreted

FP32, FP16, FP64, BF16 = torch.float32, torch.float16, torch.float64, torch.bfloat16
TILE, HALVES = tile(32, 32, 32, group=2), tma(32, 32, 32, group=2, persistent=True, subtiles=2)
CONFIGS = [TILE, tma(32, 32, 32, group=2), tma(32, 32, 32, group=2, persistent=True), HALVES]
every_config = pytest.mark.parametrize("config", CONFIGS, ids=str)
each_end = pytest.mark.parametrize("config", [TILE, HALVES], ids=["whole", "by halves"])
each_start = pytest.mark.parametrize("config", CONFIGS[:2], ids=["by pointer", "by TMA"])
M, N, K = 37, 45, 51


def operands(dtype=FP32, batch=(), m=M, n=N, k=K):
    return values((*batch, m, k), dtype), values((n, k), dtype, 1), values((n, k), dtype, 2)


def run(config, x, gate, up, out, activation="silu", bias_gate=None, bias_up=None):
    """Through the kernel itself; by descriptor tf32 is computed as fp32 here."""
    precision = "ieee" if config == TILE else "tf32"
    extras = Extras(bias=bias_gate, bias_up=bias_up, activation=activation, up=up.mT)
    launch.run_interpreted(described(x, gate.mT, out, precision, extras), config)
    assert_gated(out, x, gate.mT, up.mT, activation, bias_gate, bias_up)


@each_end
@pytest.mark.parametrize("of_gate", [None, (N,)], ids=str)
@pytest.mark.parametrize("of_up", [None, (N,), (M, N), ()], ids=str)
def test_biases(config, of_gate, of_up):
    biases = (None if shape is None else values(shape, FP16, 3) for shape in (of_gate, of_up))
    run(config, *operands(), torch.empty(M, N), "gelu", *biases)


@each_start
@pytest.mark.parametrize("layout", ["column", "sparse", "offset"])
def test_weights_each_with_strides_of_its_own(config, layout):
    x, gate, up = operands()
    run(config, x, placed(gate, layout), up, torch.empty(M, N))
    run(config, placed(x, layout), gate, placed(up, layout), torch.empty(M, N))


@each_start
def test_weights_that_are_halves_of_one(config):
    x = values((M, K), FP32)
    both = values((2 * N, K), FP32, 1)
    run(config, x, both[:N], both[N:], torch.empty(M, N))
    run(config, x, both[::2], both[1::2], torch.empty(M, N))
    turned = values((K, 2 * N), FP32, 1)
    run(config, x, turned[:, :N].mT, turned[:, N:].mT, torch.empty(M, N))


@each_start
def test_batches_fold_or_stay(config):
    x, gate, up = operands(batch=(2, 3), m=7)
    run(config, x, gate, up, torch.empty(2, 3, 7, N), "silu", values((N,), FP32, 3), values((7, 1), FP32, 4))
    x = placed(values((2, 2, 33, K), FP32), "sliced")
    run(config, x, gate, up, torch.empty(2, 2, 33, N))
    run(config, values((K,), FP32), gate, up, torch.empty(N))


@every_config
def test_other_dtypes(config):
    for dtype, out_dtype in ((FP16, FP16), (FP16, FP32), (FP32, FP16)):
        run(config, *operands(dtype), torch.empty(M, N, dtype=out_dtype), "gelu_tanh", values((N,), FP32, 3))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64], ids=name)
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_the_operation(dtype, activation):
    x, gate, up = operands(dtype, (2,), 9, 13, 21)
    bias_gate, bias_up = values((13,), dtype, 3), values((13,), dtype, 4)
    got = tritile.gated_linear(x, gate, up, activation=activation, bias_gate=bias_gate, bias_up=bias_up)
    assert got.dtype == dtype
    assert_gated(got, x, gate.mT, up.mT, activation or "", bias_gate, bias_up)
    plain = tritile.gated_linear(x, gate, up, activation=activation)
    assert_gated(plain, x, gate.mT, up.mT, activation or "")


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_precisions(precision):
    x, gate, up = operands()
    got = tritile.gated_linear(x, gate, up, precision=precision)
    assert_gated(got, x, gate.mT, up.mT, precision=precision, tensor_cores=True)


def test_operands_are_rounded_to_the_nearest_tf32():
    """Not cut: of numbers just above the middle between two of TF32 the product is that of the upper ones."""
    x, gate = torch.full((16, 16), 1 + 2.0**-11 + 2.0**-20), torch.eye(16)
    got = tritile.gated_linear(x, gate, gate, activation=None, precision="tf32")
    assert torch.equal(got, torch.full((16, 16), (1 + 2.0**-10) ** 2))


def test_float64_keeps_its_digits():
    x, gate, up = operands(FP64)
    biases = values((N,), FP64, 3), values((N,), FP64, 4)
    run(TILE, x, gate, up, torch.empty(M, N, dtype=FP64), "gelu", *biases)


def test_the_same_bits_by_every_family():
    x, gate, up = ((8 * t).round() for t in operands())
    found = []
    for config in CONFIGS:
        found.append(torch.empty(M, N))
        run(config, x / 64, gate, up, found[-1])
    assert all(torch.equal(bytes_of(found[0]), bytes_of(other)) for other in found[1:])


def test_the_problem_counts_both_matrices():
    plain = MatmulProblem(1, 64, 48, 32, "float16", "float16")
    gated = MatmulProblem(1, 64, 48, 32, "float16", "float16", epilogue="gated silu")
    assert gated.flops == 2 * plain.flops
    assert gated.bytes == plain.bytes + 32 * 48 * 2
    call = posed(gated, lambda dtype, elements: torch.zeros(elements, dtype=getattr(torch, dtype)))
    assert call.problem == gated
    assert call.up.shape == call.b.shape
    assert call.up.tensor is not call.b.tensor
    assert len(call.tensors) == 4
