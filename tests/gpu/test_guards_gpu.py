"""Nothing is written outside a result, on a GPU: guard zones around what every operation and family writes.

Rows of results, and of operands, start on 16 bytes and end at every residue modulo 16 bytes, or start
anywhere. Around results lies poison, which has to stay; around operands lies NaN, which must not be read.
"""

import pytest
import torch
import torch.nn.functional as F

import tritile
from tests import configs
from tests.groups import assert_groups, operands
from tests.reference import (
    DEFAULT_OUT,
    DTYPES,
    assert_product,
    frame,
    guard_intact,
    name,
    placed,
    random_bits,
    same_bits,
    values,
)
from tritile.core import device as devices
from tritile.families.space import illegal
from tritile.ops import grouped, linear_quantized
from tritile.ops.products import matmul_call
from tritile.runtime import launch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]
BF16, FP16, FP32, FP64, INT8 = torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
LAYOUTS = ("padded", "column_padded", "sliced", "offset")


KINDS = [
    *((dtype, "ieee", out) for dtype in (BF16, FP16) for out in (dtype, FP32)),
    (FP32, "tf32", FP32),
    (INT8, "ieee", torch.int32),
    *((dtype, "ieee", out) for dtype in FP8 for out in (BF16, FP32)),
]


def sizes(itemsize):
    """(m, n, k) whose n ends at every residue modulo 16 bytes, beyond a tile and short of one."""
    for residue in range(max(1, 16 // itemsize)):
        yield 129 + residue % 2, 128 + residue, 72 + 5 * (residue % 2)
    yield 3, 1, 65
    yield 3, 7, 72


def cases(itemsize):
    """Sizes, batches and layouts: padded rows with every size, the others with few."""
    for size in sizes(itemsize):
        yield (), size, "padded"
    for layout in LAYOUTS[1:]:
        yield (), (133, 131, 77), layout
    yield (2,), (133, 131, 77), "padded"
    yield (2,), (133, 131, 77), "column_padded"


FEW = ((129, 131, 77), (3, 7, 72), (130, 134, 72))


def poised(shape, dtype, seed, layout="padded"):
    return placed(values(shape, dtype, seed, "cuda"), layout)


def run(config, call):
    """Whether the config may make the call; then it is made."""
    if illegal(config, call.problem, devices.gpu(0)) is None:
        launch.prepare(call, config)(*call.tensors)
        return True
    return False


@pytest.mark.parametrize("config", configs.ON_GPU, ids=str)
@pytest.mark.parametrize(("dtype", "precision", "out_dtype"), KINDS, ids=str)
def test_products_of_every_family(config, dtype, precision, out_dtype):
    ran = 0
    for batch, (m, n, k), layout in cases(out_dtype.itemsize):
        a = poised((*batch, m, k), dtype, 0)
        b = poised((*batch, n, k), dtype, 1).mT if dtype in FP8 else poised((*batch, k, n), dtype, 1)
        buffer, out = frame((*batch, m, n), out_dtype, layout, "cuda")
        if run(config, matmul_call(a, b, out, precision)):
            assert_product(out, a, b, precision)
            assert guard_intact(buffer, out), (batch, m, n, k, layout)
            ran += 1
    if not ran:
        pytest.skip("illegal for this type on this GPU")


GROUPED = [
    configs.tile(64, 64, 32),
    configs.of_groups(64, 128, 64, 4, 3, persistent=False),
    configs.of_groups(64, 128, 64, 4, 3, subtiles=2),
]


@pytest.mark.parametrize("config", GROUPED, ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=name)
@pytest.mark.parametrize("ragged", ["rows", "columns"])
def test_groups_of_every_family(config, dtype, ragged):
    ran, out_dtype = 0, DEFAULT_OUT.get(dtype, dtype)
    for batch, (m, n, k), layout in cases(out_dtype.itemsize):
        if batch:
            continue
        a, b = operands(ragged, 3, (m, n, k), dtype, "cuda")
        a, b, shared = placed(a, "padded"), placed(b, "padded"), m if ragged == "rows" else n
        offs = torch.tensor([shared // 3, shared // 3, shared], dtype=torch.int32, device="cuda")
        buffer, out = frame((m, n), out_dtype, layout, "cuda")
        precision = "tf32" if dtype == FP32 else "ieee"
        if run(config, grouped.grouped_call(a, b, offs, None, None, out, precision)):
            assert_groups(out, a, b, offs, precision)
            assert guard_intact(buffer, out), (m, n, k, layout)
            ran += 1
    if not ran:
        pytest.skip("illegal for this type on this GPU")


@pytest.mark.parametrize("family", ["tile", "descriptor"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=name)
def test_quantized_weights_of_every_family(family, dtype):
    made = [configs.packed_weights(16, 64, 128, 4, 3, split, family=family) for split in (1, 2)]
    for config in made:
        for m, n, k in sizes(2):
            weight = tritile.quantize(values((n, 4 * k), dtype, 1, "cuda"), bits=4, group_size=32)
            x = poised((m, 4 * k), dtype, 0)
            room = torch.full((16 + m * n + 16,), -1, dtype=torch.int16, device="cuda").view(dtype)
            out = room[16 : 16 + m * n].view(m, n)
            call = linear_quantized.quantized_call(x, weight, None, out)
            if not run(config, call):
                pytest.skip(illegal(config, call.problem, devices.gpu(0)))
            torch.testing.assert_close(out, F.linear(x, weight.dequantize()), rtol=2e-2, atol=0.5)
            assert guard_intact(room, out), (m, n, k)


def operations(m, n, k, dtype):
    """Every operation that takes `out`: its name, its result's shape, and the call."""
    x, weight, up = poised((m, k), dtype, 0), poised((n, k), dtype, 1), poised((n, k), dtype, 2)
    bias, residual = poised((1, n), dtype, 3)[0], poised((m, n), dtype, 4)
    many = [poised((3, *shape), dtype, 5) for shape in ((m, n), (m, k), (k, n))]
    offs = torch.tensor([m // 2, m], dtype=torch.int32, device="cuda")
    yield "matmul", (m, n), lambda **o: tritile.matmul(x, weight.mT, **o)
    yield "vector", (n,), lambda **o: tritile.matmul(x[0], weight.mT, **o)
    yield "addmm", (m, n), lambda **o: tritile.addmm(residual, x, weight.mT, beta=0.5, alpha=2, **o)
    yield "baddbmm", (3, m, n), lambda **o: tritile.baddbmm(*many, **o)
    yield "linear", (m, n), lambda **o: tritile.linear(x, weight, bias, activation="gelu", **o)
    yield "residual", (m, n), lambda **o: tritile.linear(x, weight, bias, residual=residual, **o)
    yield "gated", (m, n), lambda **o: tritile.gated_linear(x, weight, up, **o)
    if dtype != FP64:
        yield "groups", (m, n), lambda **o: tritile.grouped_matmul(x, many[2][:2], offs, **o)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64], ids=name)
@pytest.mark.parametrize("size", FEW, ids=str)
def test_operations_as_they_are_called(dtype, size):
    near = {"rtol": 0.05, "atol": 0.25} if dtype.itemsize == 2 else {"rtol": 1e-3, "atol": 1e-2}
    for op, shape, call in operations(*size, dtype):
        like = call()
        for layout in LAYOUTS if len(shape) > 1 else ("padded",):
            buffer, out = frame(shape if len(shape) > 1 else (1, *shape), dtype, layout, "cuda")
            out = out if len(shape) > 1 else out[0]
            for _ in range(2):  # the second call takes the fast path
                call(out=out)
                torch.testing.assert_close(out, like, **near, msg=lambda text, op=op: f"{op}: {text}")
                assert guard_intact(buffer, out), (op, layout)


@pytest.mark.parametrize("precision", ["tf32", "fp16x3"])
def test_products_that_are_lowered(precision):
    for m, n, k in FEW:
        a, b = poised((m, k), FP32, 0), poised((k, n), FP32, 1)
        for layout in LAYOUTS:
            buffer, out = frame((m, n), FP32, layout, "cuda")
            tritile.matmul(a, b, out=out, precision=precision)
            assert_product(out, a, b, precision)
            assert guard_intact(buffer, out), (m, n, k, layout)


@pytest.mark.parametrize("dtype", [*FP8, INT8], ids=name)
def test_scaled_products(dtype):
    for m, n, k in FEW:
        a, b = poised((m, k), dtype, 0), poised((n, k), dtype, 1).mT
        of_a, of_b = (torch.rand(shape, device="cuda") for shape in ((m, 1), (1, n)))
        like = tritile.scaled_matmul(a, b, of_a, of_b)
        for layout in LAYOUTS:
            buffer, out = frame((m, n), BF16, layout, "cuda")
            tritile.scaled_matmul(a, b, of_a, of_b, out=out)
            torch.testing.assert_close(out, like, rtol=2e-2, atol=0.1)
            assert guard_intact(buffer, out), (m, n, k, layout)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_copies(dtype):
    for m, n, _ in FEW:
        for batch, dims in (((), (1, 0)), ((3,), (2, 0, 1))):
            raw, x = random_bits((*batch, m, n), dtype, device="cuda")
            order = [*dims, x.ndim]
            for layout in LAYOUTS:
                shape = tuple(x.shape[i] for i in dims)
                buffer, out = frame(shape, dtype, layout, "cuda")
                for _ in range(2):  # the second call takes the fast path
                    assert tritile.permute(placed(x, "padded"), dims, out=out) is out
                    assert same_bits(out, raw.permute(order))
                    assert guard_intact(buffer, out), (m, n, dims, layout)
